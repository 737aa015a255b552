"""Blocks that cost the same are one kind, with the options that a search has for them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.constants import Constants
from probes.placement.planner.costs import Option, Pass, options


@dataclass(frozen=True)
class Kind:
    """Blocks that cost the same, by their places in call order. `block` is one of them."""

    places: tuple[int, ...]
    options: tuple[Option, ...]
    block: BlockDescription


def kinds(model: ModelDescription, machine: Constants, work: Pass) -> tuple[Kind, ...]:
    """The model's blocks by cost, each kind as the machine computes it."""
    places: dict[object, list[int]] = {}
    for place, block in enumerate(model.blocks):
        places.setdefault(block.kind, []).append(place)
    made = []
    for found in places.values():
        block = model.blocks[found[0]].computed(model.becomes)
        made.append(Kind(tuple(found), options(block, machine, work), block))
    return tuple(made)


def options_by_block(found: Sequence[Kind]) -> list[tuple[Option, ...]]:
    """The options of each block, in call order."""
    by_place = {place: kind.options for kind in found for place in kind.places}
    return [by_place[place] for place in sorted(by_place)]


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
