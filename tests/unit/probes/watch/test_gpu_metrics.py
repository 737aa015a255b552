"""AMD's binary table: every known form is parsed at its offsets, others and cut ones are unknown."""

import struct

import pytest
from probe_trees import metrics
from watch_samples import table_1_3

from probes.core.unknown import Unknown
from probes.hardware import gpu_metrics
from probes.hardware.gpu_metrics import Metrics, parse, slowdowns_between

# form -> (bytes of the structure, where its 32 bits of throttle_status are), by the kernel's header
STATUS = {
    (1, 0): (80, 68),
    (1, 1): (96, 68),
    (1, 2): (104, 68),
    (1, 3): (120, 68),
    (1, 4): (288, 40),
    (1, 5): (328, 72),
    (2, 0): (120, 112),
    (2, 1): (120, 108),
    (2, 2): (128, 108),
    (2, 3): (152, 108),
    (2, 4): (168, 108),
}
# form -> (bytes, first residency, ticks)
RESIDENCIES = {(1, 6): (1664, 36, 32), (1, 7): (2208, 44, 40), (1, 8): (3360, 44, 40), (3, 0): (264, 228, 0)}


def known(data: bytes) -> Metrics:
    found = parse(data)
    assert isinstance(found, Metrics)
    return found


@pytest.mark.parametrize("form", STATUS)
def test_the_throttle_status_is_found_in_each_form(form: tuple[int, int]) -> None:
    size, offset = STATUS[form]
    assert slowdowns_between(None, known(metrics(form, throttle=0, offset=offset, size=size))) == ()
    assert slowdowns_between(None, known(metrics(form, throttle=1, offset=offset, size=size)))
    silent = slowdowns_between(None, known(metrics(form, throttle=0xFFFFFFFF, offset=offset, size=size)))
    assert isinstance(silent, Unknown)
    assert isinstance(parse(metrics(form, throttle=1, offset=offset, size=size)[:70]), Unknown)


@pytest.mark.parametrize("form", RESIDENCIES)
def test_a_residency_that_grew_is_a_slowdown(form: tuple[int, int]) -> None:
    size, offset, _ = RESIDENCIES[form]
    before = known(metrics(form, throttle=100, offset=offset + 4, size=size))
    after = known(metrics(form, throttle=107, offset=offset + 4, size=size))
    assert slowdowns_between(before, after) == ("power cap",)
    assert slowdowns_between(after, after) == ()
    assert isinstance(slowdowns_between(None, after), Unknown)


def test_every_form_is_tested() -> None:
    assert set(gpu_metrics._LAYOUTS) == set(STATUS) | set(RESIDENCIES)


def test_fields_that_firmware_leaves_out_are_missing_and_not_65535() -> None:
    found = known(table_1_3(edge=61, power=38))
    assert found.values == {"edge_celsius": 61.0, "power_w": 38.0}


@pytest.mark.parametrize(
    ("status", "words"),
    [(1 << 0, ("power cap",)), (1 << 36, ("hot",)), (1 << 34 | 1 << 17, ("current limit", "memory hot"))],
)
def test_names_that_hold_for_every_chip_are_preferred(status: int, words: tuple[str, ...]) -> None:
    assert slowdowns_between(None, known(table_1_3(status=0x80, independent=status))) == words


def test_a_chips_own_bits_are_named_only_where_one_chip_has_that_form() -> None:
    assert slowdowns_between(None, known(metrics((1, 4), throttle=2, offset=40, size=288))) == ("power cap",)
    assert slowdowns_between(None, known(metrics((1, 1), throttle=2, offset=68, size=96))) == ("status 0x2",)


def test_an_energy_counter_is_in_joules() -> None:
    data = bytearray(metrics((1, 4), throttle=0, offset=40, size=288))
    struct.pack_into("<Q", data, 24, 65536 * 1000)
    assert known(bytes(data)).values["energy_j"] == 1000.0


@pytest.mark.parametrize(
    "data", [b"", b"\x01\x02\x03", b"\x78\x00\x09\x01" + bytes(200), b"\x00\x00\x01\x09" * 50]
)
def test_a_form_that_is_not_known_is_unknown(data: bytes) -> None:
    assert isinstance(parse(data), Unknown)
