"""The card that a user names: which torch computes on it, and what the planner knows of it."""

import datetime
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from buildtool.doctor.compatibility import Compatibility
from buildtool.doctor.host import Platform
from buildtool.doctor.routes import best_of, supposed_routes
from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.cards import Card, named_card
from probes.placement.planner.api import resolve_machine
from probes.placement.planner.machine import Constants, nearest_profile, profile

# NVIDIA's CUDA C++ Programming Guide has arithmetic in bfloat16 from compute capability 8.0 on, and Triton's
# README names the same as its least
LEAST_AMPERE: Final = 80
SAME_SIZE: Final = 0.02  # share by which a profile's VRAM may be below the nominal: the driver keeps some


@dataclass(frozen=True)
class TorchAnswer:
    """The doctor's best answer for a card: which torch, and whether it computes there."""

    tag: ClassVar[str] = "torch"
    computes_on_card: bool  # a published one does
    rank: str  # official, distribution, community, override, none
    runs: str  # yes, partly, no
    torch: str  # 2.7.0+rocm6.3
    runtime: str  # ROCm 6.3
    says: str


@dataclass(frozen=True)
class CardFacts:
    """What is known of a card. Bytes."""

    name: str
    target: str  # gfx906, sm_90; empty for a report without a GPU
    vram_bytes: int
    context_bytes: int  # of it, by the driver
    has_bfloat16_units: bool
    figures: str  # where its speeds are from: "predicted: profile mi50"
    also_sold_with_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChosenCard:
    """A card, ready to be asked about."""

    facts: CardFacts
    machine: Constants
    named: str  # as `--machine` of `weir probe plan` and `fit` takes it; empty where there is no profile
    torch: TorchAnswer | Unknown
    notes: tuple[str, ...] = ()

    @property
    def has_speeds(self) -> bool:
        """Whether its speeds are known: by a profile of it, or by a report of the machine."""
        return bool(self.named)


def choose_card(words: str, platform: Platform, data: Compatibility, today: datetime.date) -> ChosenCard:
    """The card that `words` mean: a name, with a size of memory or without, or the file of a probe report.

    Raises CardUnknown and CardAmbiguous, which are UsageErrors, and ReportError.
    """
    if words.endswith(".json"):
        machine = resolve_machine(words)
        return ChosenCard(
            _facts(machine), machine, words, torch_answer(machine.target, platform, data, today)
        )
    found = named_card(words)
    card = found.card
    machine, named, notes = _with_size(card, found.memory_bytes)
    others = tuple(size for size in card.memory_variants if not _is_size(machine, size))
    facts = replace(_facts(machine), also_sold_with_bytes=others)
    torch = torch_answer(card.target, platform, data, today)
    return ChosenCard(facts, machine, named, torch, (*found.notes, *notes))


def _facts(machine: Constants) -> CardFacts:
    return CardFacts(
        name=machine.name,
        target=machine.target,
        vram_bytes=machine.vram_bytes,
        context_bytes=machine.context_bytes,
        has_bfloat16_units=machine.has_gpu and machine.bfloat16,
        figures=machine.origin,
    )


def _with_size(card: Card, asked: int | None) -> tuple[Constants, str, tuple[str, ...]]:
    """The constants of a card with that much memory, its profile's name or none, and what is assumed.

    `asked` None: as much as its profile says, or as it was sold with. Raises UsageError where neither says.
    """
    key = card.profile if isinstance(card.profile, str) else ""
    base = profile(key or nearest_profile(card.name, card.target))
    sizes = card.memory_variants
    if key and asked is None:
        others = [size for size in sizes if not _is_size(base, size)]
        sold = " or ".join(f"'{card.name} {size >> 30}GB'" for size in others)
        return base, key, (f"for one with less or more memory, write {sold}",) if others else ()
    if key:
        assert asked is not None
        return base if _is_size(base, asked) else replace(base, vram_bytes=asked), key, ()
    if asked is None and len(sizes) != 1:
        raise UsageError(
            f"{card.name} was sold with {' or '.join(f'{size >> 30} GB' for size in sizes)} of memory"
            if sizes
            else f"{card.name} uses the machine's memory, and how much isn't said",
            f"say which: '{card.name} {sizes[0] >> 30}GB'" if sizes else "say it: --vram SIZE",
        )
    vram = asked if asked is not None else sizes[0]
    return _without_profile(card, base, vram), "", ("nobody has written a profile for this card",)


def _is_size(machine: Constants, size: int) -> bool:
    """Whether a machine has that nominal size of memory."""
    return 0 <= size - machine.vram_bytes <= SAME_SIZE * size


def _without_profile(card: Card, base: Constants, vram: int) -> Constants:
    """What is counted for a card without a profile: `base`, with this card's memory and units."""
    machine = replace(
        base, name=card.name, vram_bytes=vram, target=card.target, origin="no profile", notes=()
    )
    if not card.target.startswith("sm_"):
        return machine
    ampere = int(card.target.removeprefix("sm_")) >= LEAST_AMPERE
    return replace(machine, bfloat16=ampere, triton=ampere)


def torch_answer(
    target: str, platform: Platform, data: Compatibility, today: datetime.date
) -> TorchAnswer | Unknown:
    """The doctor's best answer for a target; one whose torch computes on the card comes first."""
    routes = supposed_routes(target, platform, data, today=today)
    if not routes:
        return Unknown("the doctor's data doesn't have this target")
    there = best_of([route for route in routes if route.computes_on_card])
    best = there or best_of(routes) or routes[0]
    return TorchAnswer(
        there is not None, best.rank, best.runs, best.torch, runtime=best.runtime, says=best.says
    )
