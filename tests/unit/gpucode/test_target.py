"""Which code runs on which card."""

import pytest

from buildtool.gpucode.amdelf import target_of_flags
from buildtool.gpucode.errors import BadTarget
from buildtool.gpucode.target import GENERIC_ISAS, MACH, TargetId, parse_targets, target_of_override


@pytest.mark.parametrize(
    "text", ["gfx906", "gfx90a:sramecc+:xnack-", "gfx11-generic", "gfx9-4-generic", "sm_90"]
)
def test_target_reads_back_as_it_was_written(text: str) -> None:
    assert str(TargetId.parse(text)) == text


def test_features_are_put_in_order() -> None:
    assert str(TargetId.parse("gfx90a:xnack-:sramecc+")) == "gfx90a:sramecc+:xnack-"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "906",
        "gfx",
        "gfxabc",
        "gfx90a:",
        "gfx90a:xnack",
        "gfx90a:xnack+:xnack-",
        "gfx90a:ecc+",
        "sm_9",
        "host",
    ],
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(BadTarget):
        TargetId.parse(text)


SERVES = [
    ("gfx906", "gfx906", True),
    ("gfx906", "gfx908", False),
    ("gfx90a:xnack+", "gfx90a", True),
    ("gfx90a:xnack+", "gfx90a:xnack-", False),
    ("gfx90a", "gfx90a:xnack-", True),
    ("gfx90a:sramecc+", "gfx90a:xnack-", True),
    ("gfx9-generic", "gfx906", True),
    ("gfx9-generic", "gfx90a", False),
    ("gfx9-4-generic", "gfx942", True),
    ("gfx10-1-generic", "gfx1012", True),
    ("gfx10-3-generic", "gfx1012", False),
    ("gfx11-generic", "gfx1151", True),
    ("gfx12-generic", "gfx1201", True),
    ("gfx12-generic", "gfx1250", False),
    ("gfx99-generic", "gfx906", True),  # unknown family: may be needed
    ("gfx11-generic", "gfx11-generic", True),
    ("gfx1100", "gfx11-generic", False),
    ("spirv", "gfx803", True),
    ("sm_80", "sm_86", True),
    ("sm_86", "sm_80", False),
    ("sm_80", "sm_90", False),
    ("compute_80", "sm_90", True),
    ("compute_90", "sm_80", False),
    ("sm_100", "sm_103", True),
    ("spirv", "sm_90", False),
    ("gfx906", "sm_90", False),
    ("sm_90", "gfx906", False),
]


@pytest.mark.parametrize(("code", "card", "serves"), SERVES)
def test_code_serves_a_card(code: str, card: str, serves: bool) -> None:
    loose = {
        "spirv": TargetId("spirv"),
        "compute_80": TargetId("compute_80"),
        "compute_90": TargetId("compute_90"),
    }
    assert (loose.get(code) or TargetId.parse(code)).serves(TargetId.parse(card)) is serves


def test_every_member_of_a_family_is_a_known_processor() -> None:
    known = set(MACH.values())
    assert all(set(members) <= known for members in GENERIC_ISAS.values())
    assert GENERIC_ISAS.keys() <= known


def test_lists_are_sorted_and_without_doubles() -> None:
    assert list(map(str, parse_targets("gfx906; gfx1100,gfx906,"))) == ["gfx1100", "gfx906"]
    with pytest.raises(BadTarget, match="no GPU target"):
        parse_targets(" , ")


@pytest.mark.parametrize(
    ("version", "target"), [("10.3.0", "gfx1030"), ("9.0.10", "gfx90a"), ("11.0.0", "gfx1100")]
)
def test_override_stands_for_a_target(version: str, target: str) -> None:
    assert str(target_of_override(version)) == target


@pytest.mark.parametrize("version", ["10.3", "gfx1030", "10.3.99", ""])
def test_odd_override_is_refused(version: str) -> None:
    with pytest.raises(BadTarget):
        target_of_override(version)


@pytest.mark.parametrize(
    ("flags", "abi", "target"),
    [
        (0x2F, 2, "gfx906"),
        (0x53F, 2, "gfx90a"),  # any, any
        (0xA3F, 3, "gfx90a:sramecc-:xnack-"),
        (0xF3F, 3, "gfx90a:sramecc+:xnack+"),
        (0x12F, 1, "gfx906:xnack+"),
        (0x100054, 4, "gfx11-generic"),
    ],
)
def test_elf_flags_name_the_target(flags: int, abi: int, target: str) -> None:
    assert str(target_of_flags(flags, abi)) == target


def test_unknown_elf_flags_name_none() -> None:
    assert target_of_flags(0xFE, 3) is None
