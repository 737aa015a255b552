"""Blocks that cost the same are one kind, with the options that a search has for them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Final

from probes.errors import UsageError
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.option import Option, Pass
from probes.placement.planner.costs.tiers import options

MOST_KINDS: Final = 64  # that a search counts one by one: its integer programs take the cube of their number
NEARLY: Final = 1.01  # times the bytes of another, that a kind is counted with first; then this squared


@dataclass(frozen=True)
class Kind:
    """Blocks that cost the same, by their places in call order. `block` is one of them.

    `members`: the kinds that are counted together as this one, each with its own options.
    """

    places: tuple[int, ...]
    options: tuple[Option, ...]
    block: BlockDescription
    members: "tuple[Kind, ...]" = ()


def kinds(model: ModelDescription, machine: Constants, work: Pass) -> tuple[Kind, ...]:
    """The model's blocks by cost, each kind as the machine computes it.

    Raises UsageError for a product or lookup whose tensor has no rows.
    """
    places: dict[object, list[int]] = {}
    for place, block in enumerate(model.blocks):
        places.setdefault(block.kind, []).append(place)
    made = []
    for found in places.values():
        block = model.blocks[found[0]].computed(model.becomes)
        for tensor in block.tensors:
            if tensor.use != "elementwise" and len(tensor.shape) < 2:
                said = f"{tensor.name} is described as a {tensor.use}"
                raise UsageError(
                    f"{said}, and its shape {list(tensor.shape)} has no rows",
                    "describe it as elementwise",
                )
        made.append(Kind(tuple(found), options(block, machine, work), block))
    return tuple(made)


def together(found: Sequence[Kind]) -> tuple[Kind, ...]:
    """At most MOST_KINDS: those of nearly the same bytes with the same tiers count as one.

    Such a one takes, in each tier, the most of all its members. So what fits the sums fits the blocks, and a
    budget for nearly nothing else may be refused although it would do.
    """
    if len(found) <= MOST_KINDS:
        return tuple(found)
    ordered = sorted(found, key=lambda kind: (_ways(kind), kind.block.weight_bytes))
    ratio = NEARLY
    while len(runs := list(_runs(ordered, ratio))) > MOST_KINDS and ratio < 2.0**64:
        ratio *= ratio
    return tuple(run[0] if len(run) == 1 else _as_one(run) for run in runs)


def _ways(kind: Kind) -> tuple[tuple[str, bool, bool, bool, int], ...]:
    return tuple(option.way for option in kind.options)


def _runs(ordered: Iterable[Kind], ratio: float) -> Iterator[list[Kind]]:
    for _, alike in groupby(ordered, key=_ways):
        run: list[Kind] = []
        for kind in alike:
            if run and kind.block.weight_bytes > ratio * run[0].block.weight_bytes:
                yield run
                run = []
            run.append(kind)
        yield run


def _as_one(run: Sequence[Kind]) -> Kind:
    options = (_most(same) for same in zip(*(kind.options for kind in run), strict=True))
    places = sorted(place for kind in run for place in kind.places)
    return Kind(tuple(places), tuple(options), run[-1].block, members=tuple(run))


def _most(same: Sequence[Option]) -> Option:
    """The option of this way that takes the most of everything."""
    names = [field.name for field in fields(Option)][1:]  # after the tier
    return Option(same[0].tier, **{name: max(getattr(one, name) for one in same) for name in names})


def options_by_block(found: Sequence[Kind]) -> list[tuple[Option, ...]]:
    """The options of each block, in call order."""
    each = [one for kind in found for one in kind.members or (kind,)]
    by_place = {place: kind.options for kind in each for place in kind.places}
    return [by_place[place] for place in sorted(by_place)]


def exactly(found: Sequence[Kind], chosen: dict[int, Option]) -> None:
    """Exchange the options of blocks that were counted together, by place, for their own."""
    for kind in found:
        for member in kind.members:
            own = {option.way: option for option in member.options}
            chosen.update((place, own[chosen[place].way]) for place in member.places)


def undominated(found: Sequence[Option]) -> tuple[Option, ...]:
    """The options for which no other takes less or the same of everything."""
    kept: list[Option] = []
    for option in found:
        mine = (*option.lanes, *option.memories)
        others = ((*other.lanes, *other.memories) for other in found if other is not option)
        worse = any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others
        )
        if not worse and not any((*k.lanes, *k.memories) == mine for k in kept):
            kept.append(option)
    return tuple(kept)
