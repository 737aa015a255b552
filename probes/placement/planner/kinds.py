"""Kinds: the blocks of a model that cost the same, with the tiers that each can go to. Pure.

The search counts how many blocks of a kind go to each tier, so a model of 80 layers is a problem of a few
kinds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Final

from probes.core.errors import UsageError
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.costs import Option
from probes.placement.planner.machine import Constants
from probes.placement.planner.rules import Pass
from probes.placement.planner.tiers import options

MOST_KINDS: Final = 64  # above which kinds are merged: integer programs take the cube of their number
NEARLY: Final = 1.01  # ratio of bytes up to which kinds are merged at first; then its square, and so on


@dataclass(frozen=True)
class Kind:
    """Blocks that cost the same, by their places in call order. `block` is one of them.

    `members`: of a merged kind, the kinds it was made of, each with its own options.
    """

    places: tuple[int, ...]
    options: tuple[Option, ...]
    block: BlockDescription
    members: "tuple[Kind, ...]" = ()


def kinds(model: ModelDescription, machine: Constants, work: Pass) -> tuple[Kind, ...]:
    """The kinds of a model's blocks, with their options on the machine.

    Raises UsageError for a product or lookup whose tensor has no rows.
    """
    places: dict[object, list[int]] = {}
    for place, block in enumerate(model.blocks):
        places.setdefault(block.kind, []).append(place)
    result = []
    for same in places.values():
        block = model.blocks[same[0]].computed(model.becomes)
        for tensor in block.tensors:
            if tensor.use != "elementwise" and len(tensor.shape) < 2:
                raise UsageError(
                    f"{tensor.name} is described as a {tensor.use}, and its shape {list(tensor.shape)} "
                    "has no rows",
                    "describe it as elementwise",
                )
        result.append(Kind(tuple(same), options(block, machine, work), block))
    return tuple(result)


def merge_kinds(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """At most MOST_KINDS kinds: those of nearly the same bytes with the same tiers are merged.

    A merged kind takes, in each tier, the most of all its members. So what fits for it fits for the blocks,
    and a budget that only just suffices may be refused.
    """
    if len(kinds) <= MOST_KINDS:
        return tuple(kinds)
    ordered = sorted(kinds, key=lambda kind: (_ways(kind), kind.block.weight_bytes))
    ratio = NEARLY
    while len(runs := list(_runs_of_nearly_equal(ordered, ratio))) > MOST_KINDS and ratio < 2.0**64:
        ratio *= ratio
    return tuple(run[0] if len(run) == 1 else _merged(run) for run in runs)


def _ways(kind: Kind) -> tuple[tuple[str, bool, bool, bool, int], ...]:
    return tuple(option.way for option in kind.options)


def _runs_of_nearly_equal(ordered: Iterable[Kind], ratio: float) -> Iterator[list[Kind]]:
    for _, alike in groupby(ordered, key=_ways):
        run: list[Kind] = []
        for kind in alike:
            if run and kind.block.weight_bytes > ratio * run[0].block.weight_bytes:
                yield run
                run = []
            run.append(kind)
        yield run


def _merged(run: Sequence[Kind]) -> Kind:
    options = (_largest(same) for same in zip(*(kind.options for kind in run), strict=True))
    places = sorted(place for kind in run for place in kind.places)
    return Kind(tuple(places), tuple(options), run[-1].block, members=tuple(run))


def _largest(same: Sequence[Option]) -> Option:
    """The option that takes, of everything, the most of these, which are of one tier and layout."""
    names = [field.name for field in fields(Option)][1:]  # after the tier
    return Option(same[0].tier, **{name: max(getattr(option, name) for option in same) for name in names})


def options_by_block(kinds: Sequence[Kind]) -> list[tuple[Option, ...]]:
    """The options of each block, in call order."""
    unmerged = [member for kind in kinds for member in kind.members or (kind,)]
    by_place = {place: kind.options for kind in unmerged for place in kind.places}
    return [by_place[place] for place in sorted(by_place)]


def unmerge_options(kinds: Sequence[Kind], chosen: dict[int, Option]) -> None:
    """Replace the options of blocks of merged kinds, by place in call order, by the blocks' own."""
    for kind in kinds:
        for member in kind.members:
            own = {option.way: option for option in member.options}
            chosen.update((place, own[chosen[place].way]) for place in member.places)
