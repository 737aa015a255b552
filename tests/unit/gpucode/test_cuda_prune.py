"""CUDA libraries cut to some cards: what the driver would choose for them stays."""

import struct

import pytest

from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.nvfatbin import NvEntry
from buildtool.gpucode.scan import find_code
from buildtool.gpucode.source import PruneRefused, Source, TargetMissing
from buildtool.gpucode.target import parse_targets
from gpucode.cutting import ALL, CUBIN, LTO, PTX, cuda, pruned, targets_in
from gpucode.maker import Spec, bundles, make_library, nv_fatbin, split_section

LIBRARY = cuda([nv_fatbin(ALL), nv_fatbin(ALL)])


@pytest.mark.parametrize(
    ("cards", "kept"),
    [
        ("sm_90", {"sm_90"}),
        ("sm_80", {"sm_80"}),
        ("sm_89", {"sm_80", "sm_86"}),
        ("sm_100", {"compute_90"}),
        ("sm_75,sm_90", {"sm_75", "sm_90"}),
        ("sm_75,sm_120", {"sm_75", "compute_90"}),
    ],
)
def test_card_keeps_what_the_driver_could_choose(cards: str, kept: set[str]) -> None:
    out = pruned(LIBRARY, cards)
    assert targets_in(out) == kept
    assert len(out) < len(LIBRARY)


def test_second_cuda_prune_changes_nothing_and_two_steps_equal_one() -> None:
    once = pruned(LIBRARY, "sm_90")
    assert not plan_prune(Source.of_bytes(once), parse_targets("sm_90")).changed
    assert pruned(pruned(LIBRARY, "sm_80,sm_90"), "sm_90") == once


def test_fat_binary_that_never_served_the_card_keeps_one_entry_without_its_code() -> None:
    """The driver finds nothing for the card there, as before, and the file holds no code for another."""
    old = cuda([nv_fatbin(ALL), nv_fatbin([(PTX, 100, 900), (CUBIN, 100, 800), (CUBIN, 103, 9000)])])
    out = pruned(old, "sm_90")
    assert targets_in(out) == {"sm_90"}
    [*_, last] = find_code(Source.of_bytes(out))
    assert [(code.name, code.n_bytes, code.is_blank) for code in last.codes] == [("sm_100", 16, True)]
    assert not plan_prune(Source.of_bytes(out), parse_targets("sm_90")).changed


def two_sections() -> bytes:
    """A library of device-linked code, as NCCL's: `.nv_fatbin`, and relocatable code right behind it."""
    one, two = nv_fatbin(ALL), nv_fatbin([*ALL, (CUBIN, 70, 30_000)])
    library = make_library(
        Spec([one, two], section=".nv_fatbin", wrapper_section=".nvFatBinSegment", wrapper_magic=0x466243B1)
    )
    return split_section(library, at=library.bundle_starts[1], name="__nv_relfatbin")


def test_relocatable_code_is_cut_as_well_as_linked_code() -> None:
    """NCCL, NVSHMEM and bitsandbytes hold hundreds of megabytes of it, and were left whole for it."""
    old = two_sections()
    out = pruned(old, "sm_90")
    assert targets_in(out) == {"sm_90"}
    assert len(old) - len(out) > 60_000
    assert not plan_prune(Source.of_bytes(out), parse_targets("sm_90")).changed
    places = find_code(Source.of_bytes(out))
    assert [code.name for place in places for code in place.codes] == ["sm_90", "sm_90"]


@pytest.mark.parametrize("section", [".data.more", ".cask_resource"])
def test_code_that_anything_may_point_to_becomes_zeros_where_it_is(section: str) -> None:
    """cuFFT's and cublasLt's is reached in ways that the file doesn't show: nothing moves."""
    lto = (LTO, 75, 800)
    old = cuda([nv_fatbin([*ALL, lto]), nv_fatbin([(CUBIN, 100, 9000)])], section=section)
    out = pruned(old, "sm_90")
    assert len(out) == len(old)
    assert targets_in(out) == {"sm_90", "lto_75"}
    before, after = find_code(Source.of_bytes(old)), find_code(Source.of_bytes(out))
    assert [(p.start, p.n_bytes) for p in before] == [(p.start, p.n_bytes) for p in after]
    for old_code, new_code in zip(before[0].codes, after[0].codes, strict=True):
        content = out[new_code.start :][: new_code.n_bytes]
        same = content == old[old_code.start :][: old_code.n_bytes]
        assert same if new_code.name in ("sm_90", "lto_75") else not any(content)
    assert not plan_prune(Source.of_bytes(out), parse_targets("sm_90")).changed


def test_a_section_too_small_to_be_cut_stays_while_code_elsewhere_becomes_zeros() -> None:
    """cuFFT's `.nv_fatbin` holds one cubin of 400 bytes; its prune was refused as a wrong result."""
    small = cuda([nv_fatbin([(CUBIN, 75, 400)])], data=nv_fatbin(ALL))
    out = pruned(small, "sm_90")
    assert targets_in(out) == {"sm_75", "sm_90"}
    assert len(out) == len(small)
    assert not plan_prune(Source.of_bytes(out), parse_targets("sm_90")).changed


def test_code_that_no_segment_loads_stays() -> None:
    """An object file's, or what stands behind a program: a linker or an archiver reads it."""
    behind = cuda([nv_fatbin(ALL)], section=".data.more") + nv_fatbin(ALL)
    behind += bytes(-len(behind) % 8)
    out = pruned(behind, "sm_90")
    [inside, outside] = find_code(Source.of_bytes(out))
    assert {code.name for code in inside.codes if not code.is_blank} == {"sm_90"}
    assert len([code for code in outside.codes if not code.is_blank]) == len(ALL)
    assert not plan_prune(Source.of_bytes(out), parse_targets("sm_90")).changed


def test_wrapper_of_the_device_link_is_understood() -> None:
    assert targets_in(pruned(cuda([nv_fatbin(ALL)], wrapper_version=2), "sm_90")) == {"sm_90"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (cuda([nv_fatbin(ALL)], wrapper_version=3), "unknown kind"),
        (cuda([nv_fatbin(ALL[:2])]), "no code for sm_90, but code for sm_75, sm_80"),
    ],
)
def test_cuda_code_that_is_not_understood_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(PruneRefused, match=reason):
        plan_prune(Source.of_bytes(data), parse_targets("sm_90"))


def test_targets_of_one_vendor_leave_the_other_vendors_code() -> None:
    hip = make_library(Spec(bundles(["gfx906", "gfx803"]))).data
    for data, foreign in ((hip, "sm_90"), (LIBRARY, "gfx906")):
        source = Source.of_bytes(data)
        assert not plan_prune(source, parse_targets(foreign), strict=False).changed
        with pytest.raises(TargetMissing, match=f"no code for {foreign}, but code for"):
            plan_prune(source, parse_targets(foreign))
    assert targets_in(pruned(hip, "gfx906,sm_90")) == {"gfx906"}


@pytest.mark.parametrize("count", [300, 600])
def test_a_fat_binary_of_very_many_entries_is_cut_in_linear_time(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Planned in a second per million entries, not in hours: no entry is compared with all others."""
    compared = 0
    equal = NvEntry.__eq__

    def counted(one: NvEntry, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    many = cuda([nv_fatbin([*[(CUBIN, 90, 8)] * count, (CUBIN, 75, 9000)])])
    monkeypatch.setattr(NvEntry, "__eq__", counted)
    assert plan_prune(Source.of_bytes(many), parse_targets("sm_90")).changed
    assert compared <= 2 * count


def test_library_whose_section_headers_are_loaded_as_patchelf_leaves_them_is_cut() -> None:
    """libcutensor and libcuml were planned, and then refused as wrong results."""
    data = bytearray(cuda([nv_fatbin(ALL), nv_fatbin(ALL)], data=bytes(4096)))
    (shoff,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + 64 * n) for n in range(count)]
    place = next(row[4] for row in rows if row[5] == 4096) + 8
    place += -place % 8
    data[place : place + 64 * count] = data[shoff : shoff + 64 * count]
    struct.pack_into("<Q", data, 40, place)
    assert targets_in(pruned(bytes(data), "sm_90")) == {"sm_90"}
