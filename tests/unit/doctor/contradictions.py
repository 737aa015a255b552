"""What can't be true in the compatibility data: its statements held against one another."""

import datetime
import itertools
import re
from collections.abc import Iterator

from buildtool.doctor.compatibility import RANKS, Answer, Build, Cell, Compatibility, Target, python_range
from buildtool.gpucode.target import GENERIC_ISAS, TargetId, target_of_override


def all_cells(data: Compatibility) -> Iterator[tuple[str, Cell]]:
    """Every cell of the file, with its place."""
    for build in data.builds:
        for name in ("torch", "runtime", "python", "index", "code", "matrix", "driver"):
            yield f"{build.id}.{name}", getattr(build, name)
    for target in data.targets:
        for number, answer in enumerate(target.answers):
            for name in ("runtime", "torch", "python", "get"):
                own = getattr(answer, name)
                if own:
                    yield f"{target.id}[{number}].{name}", own


def contradictions(data: Compatibility, today: datetime.date) -> list[str]:
    """Statements of the file that can't hold together; empty for a sound file."""
    return [
        *_source_faults(data, today),
        *_name_faults(data),
        *itertools.chain.from_iterable(_target_faults(target, data) for target in data.targets),
    ]


def _source_faults(data: Compatibility, today: datetime.date) -> Iterator[str]:
    used = {cell.source for _, cell in all_cells(data)} | {card.source for card in data.cards}
    used |= {target.source for target in data.targets}
    used |= {answer.source for target in data.targets for answer in target.answers if answer.source}
    yield from (f"source {name} is not in the list" for name in sorted(used - data.sources.keys()))
    for name, source in data.sources.items():
        if source.day > today:
            yield f"source {name} is dated {source.date}, which is in the future"
    for place, cell in all_cells(data):
        if bool(cell.value) == bool(cell.unknown):
            yield f"{place} needs either a value or a reason why it is unknown"
        if place.endswith(".python") and cell.value:
            found = python_range(cell)
            if not found or found[0] > found[1]:
                yield f"{place}: {cell.value} is not a range of Pythons"


def _name_faults(data: Compatibility) -> Iterator[str]:
    for what, names in (
        ("build", [build.id for build in data.builds]),
        ("target", [target.id for target in data.targets]),
        ("card", [card.pci for card in data.cards]),
    ):
        yield from (
            f"{what} {name} occurs twice" for name in sorted({n for n in names if names.count(n) > 1})
        )
    for card in data.cards:
        if not data.target(card.target):
            yield f"card {card.pci} is a {card.target}, which is not in the file"


def _target_faults(target: Target, data: Compatibility) -> Iterator[str]:
    order = [RANKS.index(answer.rank) for answer in target.answers]
    if order != sorted(order):
        yield f"{target.id}: answers are not in the order {', '.join(RANKS)}"
    for platform in ("linux", "wsl", "windows"):
        mine = [answer for answer in target.answers if platform in answer.platforms]
        if not mine:
            yield f"{target.id}: no answer for {platform}"
        none = [answer for answer in mine if answer.rank == "none"]
        if none and any(answer.rank == "official" and answer.runs != "no" for answer in mine):
            yield f"{target.id}: {platform} has an official route and `none`"
        pairs = [(answer.build, answer.override) for answer in mine if answer.build]
        if len(pairs) != len(set(pairs)):
            yield f"{target.id}: {platform} names a build twice"
    for answer in target.answers:
        yield from (f"{target.id}: {answer.rank}: {fault}" for fault in _answer_faults(target, answer, data))


def _answer_faults(target: Target, answer: Answer, data: Compatibility) -> Iterator[str]:
    build = data.build(answer.build)
    if answer.build and not build:
        yield f"there is no build {answer.build}"
    if not build and answer.rank not in ("none", "override"):
        missing = [name for name in ("runtime", "torch", "python", "get") if not getattr(answer, name)]
        yield from (f"no cell for {name}, and no build" for name in missing)
    if not answer.source and not any((answer.runtime, answer.torch, answer.python, answer.get)):
        yield "no source"
    if answer.rank == "none" and answer.runs != "no":
        yield f"`none` can't run: {answer.runs}"
    if answer.rank == "override":
        yield from _override_faults(target, answer, build)
    elif answer.override is not None:
        yield "an override outside its rank"
    elif build:
        yield from _kernel_faults(target.id, answer, build)


def _override_faults(target: Target, answer: Answer, build: Build | None) -> Iterator[str]:
    if answer.override is None or (answer.override == "" and answer.runs != "no"):
        yield "an override needs its version"
        return
    if answer.runs == "no":
        return
    shown = target_of_override(answer.override).processor
    if not any({shown, target.id} <= set(family) for family in GENERIC_ISAS.values()):
        yield f"{shown} is of another instruction set"
    if build and shown not in build.matrix.value.split():
        yield f"{build.id} has no matrix kernels for {shown}"
    if not re.search(r"crash|wrong", answer.says):
        yield "what it risks is not said"


def _kernel_faults(target: str, answer: Answer, build: Build) -> Iterator[str]:
    """A build that runs must have kernels; one that doesn't must lack some."""
    kinds = {"code": build.code, "matrix library": build.matrix}
    lacking = [name for name, cell in kinds.items() if cell.value and not _serves(cell, target)]
    if answer.runs == "yes":
        yield from (f"{build.id} has no {name} for {target}" for name in lacking)
    if answer.runs == "no" and not lacking:
        yield f"{build.id} has kernels for {target} and yet doesn't run"


def _serves(cell: Cell, target: str) -> bool:
    wanted = TargetId.parse(target)
    return any(TargetId.parse(word).serves(wanted) for word in cell.value.split())
