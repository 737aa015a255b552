"""AMD cards' binary table `gpu_metrics`: temperatures, power, clocks, and why a card is slowed down. Pure.

Layouts: struct gpu_metrics_v1_0 and later in Linux drivers/gpu/drm/amd/include/kgd_pp_interface.h.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from probes.core.unknown import Unknown

HEADER = 4  # bytes: size, format, content
JOULES_PER_COUNT = 2.0**-16  # of the energy counters of tables 1.4 and later
_ABSENT = {"H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}  # what firmware writes where it has nothing
_Layout = Mapping[str, tuple[int, str]]  # field -> offset, form
_V1_1: _Layout = {
    "edge": (4, "H"),
    "hotspot": (6, "H"),
    "memory": (8, "H"),
    "power": (22, "H"),
    "core": (54, "H"),
    "clock": (58, "H"),
    "status": (68, "I"),
}
_MI300: _Layout = {"hotspot": (4, "H"), "memory": (6, "H"), "power": (10, "H")}
_MI300_BITS = ("hardware hot", "power cap", "socket hot", "voltage regulator hot", "memory hot")


def _counted(at: int) -> _Layout:
    """The firmware's ticks, and after them those of each of MI300's throttlers."""
    return {field: (at + 4 * place, "I") for place, field in enumerate(("ticks", *_MI300_BITS))}


_V1_7: _Layout = {**_MI300, "energy": (24, "Q"), "core": (296, "H"), "clock": (336, "H"), **_counted(40)}
_V2_1: _Layout = {"core": (76, "H"), "clock": (80, "H"), "status": (108, "I")}
_LAYOUTS: Mapping[tuple[int, int], _Layout] = {
    (1, 0): {**_V1_1, "edge": (16, "H"), "hotspot": (18, "H"), "memory": (20, "H"), "power": (34, "H")},
    (1, 1): _V1_1,
    (1, 2): _V1_1,
    (1, 3): {**_V1_1, "independent": (112, "Q")},
    (1, 4): {**_MI300, "energy": (24, "Q"), "core": (240, "H"), "clock": (280, "H"), "status": (40, "I")},
    (1, 5): {**_MI300, "energy": (56, "Q"), "core": (280, "H"), "clock": (320, "H"), "status": (72, "I")},
    (1, 6): {**_MI300, "energy": (16, "Q"), "core": (264, "H"), "clock": (304, "H"), **_counted(32)},
    (1, 7): _V1_7,
    (1, 8): _V1_7,
    (2, 0): {"core": (80, "H"), "clock": (84, "H"), "status": (112, "I")},
    (2, 1): _V2_1,
    (2, 2): {**_V2_1, "independent": (120, "Q")},
    (2, 3): {**_V2_1, "independent": (120, "Q")},
    (2, 4): {**_V2_1, "independent": (120, "Q")},
    (3, 0): {
        "core": (174, "H"),
        "clock": (186, "H"),
        "hardware hot": (228, "I"),
        "power cap": (232, "I"),
        "fast power cap": (236, "I"),
        "slow power cap": (240, "I"),
        "CPU cores hot": (244, "I"),
        "GPU hot": (248, "I"),
        "SoC hot": (252, "I"),
    },
}
# fields that count how long each throttler was active; all others are no residencies
_PLAIN = {"edge", "hotspot", "memory", "power", "energy", "core", "clock", "status", "independent", "ticks"}
_INDEPENDENT = (
    (range(8), "power cap"),
    (range(16, 21), "current limit"),
    (range(21, 23), "peak current limit"),
    (range(23, 24), "current limit"),
    (range(32, 34), "hot"),
    (range(34, 35), "memory hot"),
    (range(35, 38), "hot"),
    (range(38, 42), "voltage regulator hot"),
    (range(42, 44), "liquid hot"),
    (range(44, 46), "voltage regulator hot"),
    (range(46, 48), "hardware hot"),
)
_GAUGES = {  # field -> gauge and the factor that makes the gauge's unit of it
    "edge": ("edge_celsius", 1.0),
    "hotspot": ("hotspot_celsius", 1.0),
    "memory": ("memory_celsius", 1.0),
    "power": ("power_w", 1.0),
    "core": ("core_mhz", 1.0),
    "clock": ("memory_mhz", 1.0),
    "energy": ("energy_j", JOULES_PER_COUNT),
}


@dataclass(frozen=True)
class Metrics:
    """One table: gauges by name, and what it says about throttling."""

    form: tuple[int, int]
    values: Mapping[str, float]
    status: tuple[str, ...] | Unknown  # at this moment
    residencies: Mapping[str, int]  # time in each throttler since the driver started, in the firmware's unit


def parse(data: bytes) -> Metrics | Unknown:
    """A whole table; unknown for a form that isn't in our list, or one that is cut short."""
    form = (data[2], data[3]) if len(data) >= HEADER else (0, 0)
    layout = _LAYOUTS.get(form)
    if layout is None or len(data) < max(at + struct.calcsize(how) for at, how in layout.values()):
        return Unknown(f"gpu_metrics of form {form[0]}.{form[1]} isn't known here")
    figures = {}
    for field, (at, how) in layout.items():
        (figure,) = struct.unpack_from(f"<{how}", data, at)
        if figure != _ABSENT[how]:
            figures[field] = figure
    return Metrics(
        form=form,
        values={_GAUGES[k][0]: v * _GAUGES[k][1] for k, v in figures.items() if k in _GAUGES},
        status=_status(form, figures, layout),
        residencies={field: figure for field, figure in figures.items() if field not in _PLAIN},
    )


def _status(form: tuple[int, int], figures: Mapping[str, int], layout: _Layout) -> tuple[str, ...] | Unknown:
    if "status" not in layout:
        return Unknown("this table counts residencies: two readings show what was active between them")
    if figures.get("independent"):
        return _independent(figures["independent"])
    if "status" not in figures:
        return Unknown("the card's firmware doesn't report its throttle status")
    status = figures["status"]
    if form in ((1, 4), (1, 5)):
        return tuple(word for bit, word in enumerate(_MI300_BITS) if status >> bit & 1) or _bare(status)
    return _bare(status)


def _bare(status: int) -> tuple[str, ...]:
    """Bits whose meaning depends on the chip."""
    return (f"status {status:#x}",) if status else ()


def _independent(status: int) -> tuple[str, ...]:
    words = [word for bits, word in _INDEPENDENT if any(status >> bit & 1 for bit in bits)]
    return tuple(dict.fromkeys(words)) or _bare(status)


def slowdowns_between(before: Metrics | None, now: Metrics) -> tuple[str, ...] | Unknown:
    """Why the card was slowed down: at this moment, or since `before` where the table counts residencies."""
    if not now.residencies:
        return now.status
    if before is None or before.form != now.form:
        return Unknown("the first reading of a counter says nothing of now")
    return tuple(
        word for word, ticks in now.residencies.items() if ticks > before.residencies.get(word, ticks)
    )
