"""How much of what this machine can do was done, next to how busy it looked. Pure.

Utilisation is a share of time: one small kernel makes a GPU 100 % busy. Saturation compares work done with
the most that was measured on this machine. What no counter shows stays unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from probes.records.samples import WatchedCard
from probes.records.watched import CardWatch, Saturation
from probes.shared.unknown import Unknown

_NO_CEILING = Unknown("no measured ceiling was given: --ceilings with a throughput report of this machine")


@dataclass(frozen=True)
class Tops:
    """The most that was measured on one card, per second."""

    memory_bytes: float | Unknown = _NO_CEILING  # read and written
    to_card_bytes: float | Unknown = _NO_CEILING
    from_card_bytes: float | Unknown = _NO_CEILING


def saturation(card: WatchedCard, watch: CardWatch, tops: Tops) -> tuple[Saturation, ...]:
    """What one card achieved."""
    means = {track.gauge: track.mean for track in watch.tracks}
    return (
        Saturation(
            "memory",
            _part_of(means, "dram_percent", card.memory_bytes_per_s),
            tops.memory_bytes,
            "bytes/s",
            "bytes that the card's memory moved: its counter's share of the bandwidth by clock and width",
        ),
        Saturation(
            "link to card",
            _mean(means, "to_card_bytes_per_s"),
            tops.to_card_bytes,
            "bytes/s",
            "PCI Express traffic received by the card, with protocol",
        ),
        Saturation(
            "link from card",
            _mean(means, "from_card_bytes_per_s"),
            tops.from_card_bytes,
            "bytes/s",
            "PCI Express traffic sent by the card, with protocol",
        ),
        Saturation(
            "matrix units",
            _mean(means, "tensor_percent"),
            Unknown("a share of cycles has no measured ceiling"),
            "%",
            "share of cycles in which tensor pipes were busy; FLOP/s can't be seen from outside a program",
        ),
        Saturation(
            "multiprocessors",
            _mean(means, "sm_active_percent"),
            Unknown("a share of time has no measured ceiling; full use is 100 %"),
            "%",
            "share of time and multiprocessors with at least one warp, waiting ones included",
        ),
    )


def _mean(means: Mapping[str, float | Unknown], gauge: str) -> float | Unknown:
    return means.get(gauge, Unknown("not read"))


def _part_of(means: Mapping[str, float | Unknown], gauge: str, whole: float | Unknown) -> float | Unknown:
    percent = _mean(means, gauge)
    if isinstance(percent, Unknown):
        return percent
    return whole if isinstance(whole, Unknown) else percent / 100 * whole
