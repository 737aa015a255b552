"""The card that a user names: which torch computes on it, and what the planner knows of it."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from buildtool.doctor.compatibility import Compatibility
from buildtool.doctor.host import Platform
from buildtool.doctor.routes import best_of, supposed_routes
from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.cards import Card, named_card, sizes_text
from probes.hardware.host import meminfo_bytes
from probes.hardware.host_card import host_cards
from probes.placement.planner.api import resolve_machine
from probes.placement.planner.machine import Constants, machine_of_card, nearest_profile, profile

# NVIDIA's CUDA C++ Programming Guide has arithmetic in bfloat16 from compute capability 8.0 on, and Triton's
# README names the same as its least
LEAST_AMPERE: Final = 80
EXAMPLES: Final = "weir fits MODEL 'MI50 16GB', or rx7900xtx, or the report of `weir probe run`"
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
    named: str | None  # as `--machine` of `weir probe plan` and `fit` takes it; None: this host's card
    torch: TorchAnswer | Unknown
    notes: tuple[str, ...] = ()
    has_speeds: bool = True  # whether they are known: by a profile of it, or by a report of the machine


@dataclass(frozen=True)
class Torches:
    """The doctor's data, for a platform and a day."""

    data: Compatibility
    platform: Platform
    today: datetime.date

    def best(self, target: str) -> TorchAnswer | Unknown:
        """The doctor's best answer for a target; one whose torch computes on the card comes first."""
        routes = supposed_routes(target, self.platform, self.data, today=self.today)
        if not routes:
            return Unknown(f"the doctor's data doesn't have {target}" if target else "there is no GPU")
        there = best_of([route for route in routes if route.computes_on_card])
        best = there or best_of(routes) or routes[0]
        return TorchAnswer(
            there is not None, best.rank, best.runs, best.torch, runtime=best.runtime, says=best.says
        )


def choose_card(words: str | None, torches: Torches) -> ChosenCard:
    """The card that `words` mean: a name, with a size of memory or without, or the file of a probe report.

    None: this host's card. Raises UsageError, which asks for a card where none is found or several could be
    meant, and ReportError.
    """
    if words is None:
        return _of_this_host(torches)
    if words.endswith(".json"):
        machine = resolve_machine(words)
        return ChosenCard(_facts(machine), machine, words, torches.best(machine.target))
    found = named_card(words)
    card, asked = found.card, found.memory_bytes
    if isinstance(card.profile, Unknown):
        return _without_profile(card, asked, torches)
    chosen = _with_profile(card, resolve_machine(words), words, torches)
    sizes = _other_sizes(chosen.facts, card) if asked is None else ()
    return replace(chosen, notes=(*chosen.notes, *found.notes, *sizes))


def _of_this_host(torches: Torches) -> ChosenCard:
    """This host's card, if it has one, or several that are alike. Raises UsageError."""
    found = host_cards()
    if len({one.cards for one in found}) != 1 or len(found[0].cards) != 1:
        seen = ", ".join(dict.fromkeys(one.seen for one in found))
        why = f"it isn't clear which one this host has: {seen}" if found else "none was found on this host"
        raise UsageError(f"which card? none is named, and {why}", f"name one: {EXAMPLES}")
    card = found[0].cards[0]
    vram = None if isinstance(found[0].vram_bytes, Unknown) else found[0].vram_bytes
    if isinstance(card.profile, Unknown):
        return _without_profile(card, vram, torches)
    ram = meminfo_bytes(Path("/"), "MemTotal")
    machine = replace(machine_of_card(card, vram), host_bytes=None if isinstance(ram, Unknown) else ram)
    chosen = _with_profile(card, machine, None, torches)
    return replace(chosen, notes=(*chosen.notes, f"{card.name} is this host's card"))


def _with_profile(card: Card, machine: Constants, named: str | None, torches: Torches) -> ChosenCard:
    others = tuple(size for size in card.memory_variants if not _is_size(machine, size))
    facts = replace(_facts(machine), also_sold_with_bytes=others)
    base = profile(str(card.profile))
    return ChosenCard(facts, machine, named, torches.best(card.target), base.notes)


def _other_sizes(facts: CardFacts, card: Card) -> tuple[str, ...]:
    """What to write for a card with another size of memory."""
    names = [f"'{card.name.split()[-1]} {size >> 30}GB'" for size in facts.also_sold_with_bytes]
    return (f"for one with another size of memory, write {' or '.join(names)}",) if names else ()


def _facts(machine: Constants) -> CardFacts:
    return CardFacts(
        name=machine.name,
        target=machine.target,
        vram_bytes=machine.vram_bytes,
        context_bytes=machine.context_bytes,
        has_bfloat16_units=machine.has_gpu and machine.bfloat16,
        figures=machine.origin,
    )


def _is_size(machine: Constants, size: int) -> bool:
    """Whether a machine has that nominal size of memory."""
    return 0 <= size - machine.vram_bytes <= SAME_SIZE * size


def _without_profile(card: Card, asked: int | None, torches: Torches) -> ChosenCard:
    """A card of which only the memory and the torch are known. Raises UsageError where the memory isn't."""
    sizes = card.memory_variants
    if asked is None and len(sizes) != 1:
        raise UsageError(
            f"{card.name} has {sizes_text(card)}, and nobody has written a profile for it",
            f"say which: weir fits MODEL '{card.name} {sizes[0] >> 30}GB'"
            if sizes
            else "name another card, or give the report of `weir probe run` on that machine",
        )
    near = profile(nearest_profile(card.name, card.target))
    machine = replace(
        near,
        name=card.name,
        vram_bytes=asked if asked is not None else sizes[0],
        target=card.target,
        origin="no profile",
        notes=(),
    )
    if card.target.startswith("sm_"):
        ampere = int(card.target.removeprefix("sm_")) >= LEAST_AMPERE
        machine = replace(machine, bfloat16=ampere, triton=ampere)
    note = f"nobody has written a profile for this card: the driver's context is that of {near.name}"
    return ChosenCard(_facts(machine), machine, None, torches.best(card.target), (note,), has_speeds=False)
