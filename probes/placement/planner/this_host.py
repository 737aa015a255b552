"""The machine that plans are for where none is named: this host's own card, if it is known."""

from collections.abc import Sequence
from dataclasses import replace

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.host_card import HostCard, host_cards
from probes.placement.planner.machine import Constants, machine_of_card

EXAMPLES = (
    "--machine 'RX 7900 XTX', --machine 'MI50 16GB' or, of a report that `run` wrote, --machine run.json"
)


def this_hosts_machine(found: Sequence[HostCard] | None = None) -> Constants:
    """The constants of this host's card, with a note that says so. `found`: the cards, where they are known.

    Raises UsageError, which asks for --machine: where there is no card, where it isn't in the list or has no
    profile, and where there are several different ones.
    """
    found = host_cards() if found is None else found
    found = [one for one in found if not _is_shared(one)] or found
    if not found:
        raise _asking("no card was found on this host to plan for")
    first = found[0]
    if any(other.cards != first.cards for other in found):
        raise _asking(f"this host has several cards: {', '.join(dict.fromkeys(map(_name, found)))}")
    if len(first.cards) != 1:
        unclear = f"could be {_name(first)}" if first.cards else "isn't in our list of cards"
        raise _asking(f"this host's card, {first.seen}, {unclear}")
    try:
        vram = None if isinstance(first.vram_bytes, Unknown) else first.vram_bytes
        made = machine_of_card(first.cards[0], vram)
    except UsageError as error:
        raise UsageError(f"this host's card: {error.message}", error.hint) from error
    return replace(
        made, notes=(*made.notes, f"for this host's card, {_name(first)}: --machine names another")
    )


def _is_shared(found: HostCard) -> bool:
    """Whether it is a processor's GPU, which shares the machine's memory."""
    return bool(found.cards) and not any(card.memory_variants for card in found.cards)


def _name(found: HostCard) -> str:
    return " or ".join(card.name for card in found.cards) or found.seen


def _asking(why: str) -> UsageError:
    return UsageError(f"which machine? {why}", f"name one: {EXAMPLES}")
