"""Which code runs on which card."""

import re

import pytest

from buildtool.gpucode.scan import target_of_flags
from buildtool.gpucode.source import BadTarget, TargetMissing
from buildtool.gpucode.target import (
    GENERIC_ISAS,
    MACH,
    TargetId,
    known_targets,
    parse_targets,
    served_targets,
    target_of_override,
)


@pytest.mark.parametrize(
    "text",
    [
        "gfx906",
        "gfx90a:sramecc+:xnack-",
        "gfx11-generic",
        "gfx9-4-generic",
        "sm_90",
        "compute_100",
        "spirv",
        "gfx1250-strict",
    ],
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
        "gfx90a:xnack*",
        "gfx1250-strictly",
        "gfx12-5-6-generic",
        "gfx12345",
        "sm_1000",
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
    ("sm_80", "sm_80", True),
    ("compute_80", "sm_80", True),
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
def test_override_represents_a_target(version: str, target: str) -> None:
    assert str(target_of_override(version)) == target


@pytest.mark.parametrize("version", ["10.3", "gfx1030", "10.3.99", "10.3.16", "10.30.1", "100.3.0", ""])
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
        (0x22F, 1, "gfx906:sramecc+"),
        (0x2F, 1, "gfx906"),
        (0x100054, 4, "gfx11-generic"),
    ],
)
def test_elf_flags_name_the_target(flags: int, abi: int, target: str) -> None:
    assert str(target_of_flags(flags, abi)) == target


# by processor, as LLVM's tests of the ELF header list them (amdgpu elf-header-flags-mach, 2026)
NUMBERS = """
    gfx600 20  gfx601 21  gfx602 3A  gfx700 22  gfx701 23  gfx702 24  gfx703 25  gfx704 26  gfx705 3B
    gfx801 28  gfx802 29  gfx803 2A  gfx805 3C  gfx810 2B
    gfx900 2C  gfx902 2D  gfx904 2E  gfx906 2F  gfx908 30  gfx909 31  gfx90a 3F  gfx90c 32
    gfx940 40  gfx941 4B  gfx942 4C  gfx950 4F
    gfx1010 33  gfx1011 34  gfx1012 35  gfx1013 42
    gfx1030 36  gfx1031 37  gfx1032 38  gfx1033 39  gfx1034 3E  gfx1035 3D  gfx1036 45
    gfx1100 41  gfx1101 46  gfx1102 47  gfx1103 44
    gfx1150 43  gfx1151 4A  gfx1152 55  gfx1153 58  gfx1154 57  gfx1170 5D  gfx1171 5E  gfx1172 5C
    gfx1200 48  gfx1201 4E  gfx1250 49  gfx1251 5A  gfx1310 50
    gfx9-generic 51  gfx9-4-generic 5F  gfx10-1-generic 52  gfx10-3-generic 53  gfx11-generic 54
    gfx11-7-generic 62  gfx12-generic 59  gfx12-5-generic 5B  gfx13-generic 63
"""
LLVM = {int(number, 16): name for name, number in re.findall(r"(gfx\S+) ([0-9A-F]{2})", NUMBERS)}


def test_no_code_is_taken_for_another_cards() -> None:
    assert {number: str(found) for number in range(256) if (found := target_of_flags(number, 3))} == LLVM


# the processors of each family (LLVM's AMDGPUUsage, "Generic processors")
FAMILIES = {
    "gfx9-generic": "gfx900 gfx902 gfx904 gfx906 gfx909 gfx90c",
    "gfx9-4-generic": "gfx940 gfx941 gfx942 gfx950",
    "gfx10-1-generic": "gfx1010 gfx1011 gfx1012 gfx1013",
    "gfx10-3-generic": "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036",
    "gfx11-generic": "gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153 gfx1154",
    "gfx11-7-generic": "gfx1170 gfx1171 gfx1172",
    "gfx12-generic": "gfx1200 gfx1201",
    "gfx12-5-generic": "gfx1250 gfx1251",
    "gfx13-generic": "gfx1310",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_generic_code_serves_its_family_and_no_other_card(family: str) -> None:
    cards = [name for name in LLVM.values() if "generic" not in name]
    code = TargetId(family)
    assert {card for card in cards if code.serves(TargetId(card))} == set(FAMILIES[family].split())


def test_a_missing_card_is_reported_with_what_is_there_instead() -> None:
    had = [TargetId("sm_90"), TargetId("compute_80"), TargetId("sm_90")]
    cards = parse_targets("sm_70,sm_90")
    assert served_targets(had, cards, strict=False) == (TargetId("sm_90"),)
    with pytest.raises(TargetMissing) as caught:
        served_targets(had, cards, strict=True)
    assert caught.value.message.endswith("sm_70, but code for compute_80, sm_90")
    assert caught.value.hint.endswith("--targets sm_80")
    with pytest.raises(TargetMissing, match="sm_70, but"):
        served_targets(had, cards[:1], strict=False)
    with pytest.raises(TargetMissing, match="no GPU code at all"):
        served_targets([], cards, strict=False)


def test_a_virtual_architecture_is_no_card() -> None:
    with pytest.raises(BadTarget, match="compute_80") as caught:
        parse_targets("gfx906,compute_80")
    assert caught.value.hint.endswith("sm_80")


def test_names_that_are_no_targets_are_left_out() -> None:
    assert known_targets(["gfx906", "unknown", "", "gfx906"]) == {TargetId("gfx906")}
