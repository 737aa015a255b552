"""Which torch runs on which card, as data/compatibility.yaml says: shape, look-ups, contradictions. Pure."""

import datetime
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from buildtool.errors import DataError
from buildtool.gpucode.target import GENERIC_ISAS, TargetId, target_of_override
from probes.shared.codec import Json, Misfit, decode

Rank = Literal["official", "distribution", "community", "override", "none"]
Runs = Literal["yes", "partly", "no"]
RANKS: tuple[Rank, ...] = ("official", "distribution", "community", "override", "none")
STALE_DAYS = 365
NOT_GIVEN = ""


@dataclass(frozen=True)
class Source:
    """Where a statement comes from. `date` is the statement's or, with `read`, that of our reading."""

    what: str
    where: str
    date: str
    read: bool = False

    @property
    def day(self) -> datetime.date:
        """The date."""
        return datetime.date.fromisoformat(self.date)

    def is_stale(self, today: datetime.date) -> bool:
        """Older than a year."""
        return (today - self.day).days > STALE_DAYS


@dataclass(frozen=True)
class Cell:
    """A value, or why it is unknown; and the name of its source."""

    source: str
    value: str = NOT_GIVEN
    unknown: str = NOT_GIVEN

    def __str__(self) -> str:
        return self.value or f"unknown ({self.unknown})"


@dataclass(frozen=True)
class Build:
    """A published torch. Targets are words; `matrix` are those that its matrix library serves."""

    id: str
    torch: Cell
    runtime: Cell
    python: Cell
    index: Cell
    code: Cell
    matrix: Cell
    driver: Cell

    def torch_for(self, target: str) -> str:
        """The torch of this build for a target, `2.13.0+rocm7.2`."""
        return str(self.torch).replace("{target}", target)

    def requirement(self, target: str) -> str:
        """What pip is asked for."""
        version = str(self.torch)
        return f"torch=={version}" if re.match(r"\d", version) else f"torch[device-{target}]"


@dataclass(frozen=True)
class Answer:
    """One route for one target. The cells are the build's where it names one."""

    rank: Rank
    platforms: tuple[Literal["linux", "wsl", "windows"], ...]
    runs: Runs
    says: str
    source: str = NOT_GIVEN
    build: str = NOT_GIVEN
    override: str | None = None  # HSA_OVERRIDE_GFX_VERSION; empty where there is none that could help
    variant: str = NOT_GIVEN  # a torch source in images/variants.yaml that is this route
    runtime: Cell | None = None
    torch: Cell | None = None
    python: Cell | None = None
    get: Cell | None = None


@dataclass(frozen=True)
class Target:
    """A GPU target with its answers, the best first."""

    id: str
    family: str
    source: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class CardName:
    """A product by its PCI ids."""

    pci: str
    target: str
    product: str
    source: str


@dataclass(frozen=True)
class Compatibility:
    """The whole file."""

    schema_version: int
    sources: Mapping[str, Source]
    builds: tuple[Build, ...]
    targets: tuple[Target, ...]
    cards: tuple[CardName, ...]

    def build(self, name: str) -> Build | None:
        """A build by its id."""
        return next((build for build in self.builds if build.id == name), None)

    def target(self, name: str) -> Target | None:
        """A target by its id; features such as `:xnack-` are ignored."""
        return next((one for one in self.targets if one.id == name.partition(":")[0]), None)

    def card(self, product: str) -> CardName | None:
        """A card by its PCI vendor:device."""
        return next((one for one in self.cards if one.pci == product.lower()), None)

    def cards_named(self, words: str) -> tuple[CardName, ...]:
        """Cards whose product name holds every word, in any case."""
        wanted = words.casefold().split()
        return tuple(one for one in self.cards if all(word in one.product.casefold() for word in wanted))


def read(data: Json) -> Compatibility:
    """The file's content as values. Raises DataError naming the place of what doesn't fit."""
    try:
        return decode(Compatibility, data, "compatibility")
    except Misfit as error:
        raise DataError(str(error), "the file belongs to this program: install it again") from error


def cells(answer: Answer, data: Compatibility, target: str) -> dict[str, Cell]:
    """Runtime, torch, python and get of an answer, each with its source; its own come before the build's."""
    build = data.build(answer.build)
    found: dict[str, Cell] = {}
    if build:
        getting = f"pip install '{build.requirement(target)}' --index-url {build.index}"
        found = {
            "runtime": build.runtime,
            "torch": Cell(build.torch.source, build.torch_for(target)),
            "python": build.python,
            "get": Cell(build.index.source, getting),
        }
    own = {"runtime": answer.runtime, "torch": answer.torch, "python": answer.python, "get": answer.get}
    return found | {name: cell for name, cell in own.items() if cell}


def python_range(cell: Cell | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """`3.10-3.14` as ((3, 10), (3, 14)); None where it is unknown."""
    match = re.fullmatch(r"3\.(\d+)-3\.(\d+)", cell.value) if cell else None
    return ((3, int(match[1])), (3, int(match[2]))) if match else None


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


# ---- what can't be true ------------------------------------------------------------------------------


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
