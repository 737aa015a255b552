"""Which card of the list this machine has, by sysfs and NVML. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.cards import Card, cards_meant
from probes.hardware.nvml import open_nvml
from probes.hardware.sysfs import read_cards
from probes.records.facts import Card as SeenCard
from probes.records.facts import NvidiaCard

ROOT = Path("/")
_DRIVER = "amdgpu"


@dataclass(frozen=True)
class HostCard:
    """A card that is here. `cards`: those of the list that it may be, several where they share a PCI id."""

    seen: str  # NVML's name, or the PCI id
    cards: tuple[Card, ...]
    vram_bytes: int | Unknown


def host_cards(root: Path = ROOT, nvidia: Sequence[NvidiaCard] | None = None) -> tuple[HostCard, ...]:
    """The GPUs of this machine, NVIDIA's by NVML (`nvidia`, where they were read before), AMD's by sysfs."""
    if nvidia is None:
        nvml = open_nvml()
        nvidia = () if isinstance(nvml, Unknown) else nvml.cards()
    amd = [card for card in read_cards(root) if card.driver == _DRIVER]
    return (*(_nvidia(card) for card in nvidia), *(_amd(card) for card in amd))


def _nvidia(seen: NvidiaCard) -> HostCard:
    return HostCard(seen.name, _of_size(_meant(seen.name), seen.vram_total_bytes), seen.vram_total_bytes)


def _amd(seen: SeenCard) -> HostCard:
    if isinstance(seen.product, Unknown):
        return HostCard(seen.name, (), seen.vram_total_bytes)
    cards = _of_size(_meant(seen.product), seen.vram_total_bytes)
    return HostCard(seen.product, cards, seen.vram_total_bytes)


def _meant(text: str) -> tuple[Card, ...]:
    try:
        return cards_meant(text)
    except UsageError:
        return ()


def _of_size(cards: Sequence[Card], n_bytes: int | Unknown) -> tuple[Card, ...]:
    """Of cards that share a name or a PCI id, those with this much memory."""
    if len(cards) < 2 or isinstance(n_bytes, Unknown):
        return tuple(cards)
    return tuple(card for card in cards if not card.memory_variants or card.variant(n_bytes) is not None)
