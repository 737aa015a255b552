"""Libraries cut to some targets: smaller, loadable, every kept byte in place, or refused untouched."""

import ctypes
import platform
import random
import struct
import sys
from pathlib import Path

import pytest

from buildtool.gpucode.bundle import Method, pack
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.elf import PT_LOAD, PT_PHDR, read_elf
from buildtool.gpucode.scan import BundlePlace, iter_bundles, scan_file
from buildtool.gpucode.source import PruneRefused, Source, VerifyFailed
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.verify import verify_prune
from gpucode.cutting import pruned, targets_in
from gpucode.maker import HOST_ID, Spec, bundles, code, make_library, raw_bundle

ALL = ["gfx803", "gfx906", "gfx90a:xnack+", "gfx90a:xnack-", "gfx1100"]


def bundles_in(data: bytes) -> list[BundlePlace]:
    source = Source.of_bytes(data)
    section = read_elf(source).section(".hip_fatbin")
    assert section is not None
    return list(iter_bundles(source, section.offset, section.file_end))


def packed(raw: bytes, version: int, method: Method) -> bytes:
    return pack([raw], len(raw), version=version, method=method)


SHAPES = {
    "gnu ld": Spec([]),
    "bundles last in their segment": Spec([], follow=False),
    "relr": Spec([], relr=True),
    "pt_phdr": Spec([], phdr=True),
    "alignment of 64 KiB": Spec([], align=0x10000),
    "pointers in the file too": Spec([], words_in_file=True),
    "symbols": Spec([], symbols=True),
    "all of it": Spec([], relr=True, phdr=True, align=0x8000, symbols=True),
}


@pytest.fixture(params=SHAPES, ids=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Spec:
    spec = SHAPES[request.param]
    return Spec(**{**vars(spec), "bundles": bundles(ALL, n_bytes=30_000)})


def test_library_of_every_shape_loses_foreign_code_and_gets_smaller(shape: Spec) -> None:
    data = make_library(shape).data
    out = pruned(data, "gfx906")
    assert targets_in(out) == {"gfx906"}
    freed = 3 * 4 * 28_000 - 2 * shape.align
    assert len(data) - len(out) > freed


def test_all_feature_variants_of_a_kept_processor_stay(shape: Spec) -> None:
    out = pruned(make_library(shape).data, "gfx90a")
    assert targets_in(out) == {"gfx90a:xnack+", "gfx90a:xnack-"}


def test_second_prune_changes_nothing(shape: Spec) -> None:
    once = pruned(make_library(shape).data, "gfx906")
    assert not plan_prune(Source.of_bytes(once), parse_targets("gfx906")).changed


@pytest.mark.thorough
def test_two_steps_equal_one(shape: Spec) -> None:
    data = make_library(shape).data
    assert pruned(pruned(data, "gfx906,gfx1100"), "gfx906") == pruned(data, "gfx906")


@pytest.mark.thorough
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("method", list(Method))
def test_compressed_bundles_are_cut_and_keep_their_version(version: int, method: Method) -> None:
    noise = random.Random(1)
    raws = [raw_bundle({target: noise.randbytes(50_000) for target in ALL}) for _ in range(3)]
    data = make_library(Spec([packed(raw, version, method) for raw in raws])).data
    out = pruned(data, "gfx1100")
    scan = scan_file(Source.of_bytes(out))
    assert scan.keys() == {"gfx1100"}
    assert all(place.header for place in bundles_in(out))
    assert out[out.index(b"CCOB") + 4] == version
    assert len(out) < 0.5 * len(data)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_raw_bundles_can_be_written_compressed(version: int) -> None:
    data = make_library(Spec(bundles(ALL, n_bytes=60_000))).data
    small = pruned(data, "gfx906", compress=version)
    assert len(small) < len(pruned(data, "gfx906"))
    assert all(place.header for place in bundles_in(small))
    again = plan_prune(Source.of_bytes(small), parse_targets("gfx906"), compress=version)
    assert not again.changed


def test_generic_code_and_spirv_that_serve_a_kept_card_stay() -> None:
    codes = {t: code(t) for t in ("gfx1030", "gfx11-generic", "gfx9-generic", "gfx9-4-generic")}
    codes["hip-spirv64-amd-amdhsa--amdgcnspirv"] = code("spirv")
    data = make_library(Spec([raw_bundle(codes)])).data
    assert targets_in(pruned(data, "gfx1101")) == {"gfx11-generic", "spirv"}
    assert targets_in(pruned(data, "gfx906")) == {"gfx9-generic", "spirv"}
    assert targets_in(pruned(data, "gfx942")) == {"gfx9-4-generic", "spirv"}


def test_bundle_of_its_own_is_cut_too() -> None:
    raw = bundles(ALL, count=1)[0]
    assert targets_in(pruned(raw, "gfx803")) == {"gfx803"}
    small = pruned(packed(raw, 3, Method.ZSTD), "gfx803")
    assert targets_in(small) == {"gfx803"}


def test_library_without_foreign_code_stays_as_it_is() -> None:
    data = make_library(Spec(bundles(["gfx906"]))).data
    plan = plan_prune(Source.of_bytes(data), parse_targets("gfx906"))
    assert not plan.changed
    assert plan.bytes_after == plan.bytes_before
    assert plan.removed_bytes == {}


def test_plan_says_what_is_kept_and_what_goes() -> None:
    data = make_library(Spec(bundles(["gfx906", "gfx1100"], count=2, n_bytes=5000))).data
    plan = plan_prune(Source.of_bytes(data), parse_targets("gfx906"))
    assert plan.kept_bytes == {"gfx906": 10_100}
    assert plan.removed_bytes == {"gfx1100": 10_100}


def test_headers_keep_their_meaning() -> None:
    library = make_library(Spec(bundles(ALL), phdr=True))
    out = pruned(library.data, "gfx906")
    elf = read_elf(Source.of_bytes(out))
    loads = [s for s in elf.segments if s.type == PT_LOAD]
    assert len(loads) == 4
    assert [s.address for s in loads] == sorted(s.address for s in loads)
    phdr = next(s for s in elf.segments if s.type == PT_PHDR)
    assert phdr.offset == elf.segments_offset == elf.offset_of(phdr.address, phdr.memory_bytes)
    assert elf.segments.index(phdr) < elf.segments.index(loads[0])
    note = elf.section(".note.gnu.build-id")
    assert note is not None
    assert out[note.offset + 16 : note.file_end] == bytes(range(20))


def test_pointers_in_the_file_follow_their_bundles() -> None:
    library = make_library(Spec(bundles(ALL), words_in_file=True, symbols=True))
    out = pruned(library.data, "gfx1100")
    elf = read_elf(Source.of_bytes(out))
    wrappers, symbols = elf.section(".hipFatBinSegment"), elf.section(".symtab")
    assert wrappers is not None
    assert symbols is not None
    for index in range(3):
        (word,) = struct.unpack_from("<Q", out, wrappers.offset + 24 * index + 8)
        assert out[elf.offset_of(word, 24) :].startswith(b"__CLANG_OFFLOAD_BUNDLE__")
        assert struct.unpack_from("<Q", out, symbols.offset + 24 * (index + 1) + 8) == (word,)


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs the loader of x86-64 Linux"
)
def test_real_loader_maps_the_split_segment_and_fills_the_pointers(tmp_path: Path, shape: Spec) -> None:
    library = make_library(shape)
    path = tmp_path / "libpruned.so"
    path.write_bytes(pruned(library.data, "gfx906"))
    ctypes.CDLL(str(path))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    base = int(maps[0][0].split("-")[0], 16)
    for index in range(3):
        at = base + library.wrappers_address + 24 * index
        magic, version, pointer = struct.unpack("<IIQ", ctypes.string_at(at, 16))
        assert (magic, version) == (0x48495046, 1)
        assert ctypes.string_at(pointer, 24) == b"__CLANG_OFFLOAD_BUNDLE__"
        expected = code("gfx906", index, 30_000 + 100 * index)
        assert ctypes.string_at(pointer + 4096, len(expected)) == expected


REFUSED = {
    "kpack": (Spec(bundles(ALL), wrapper_magic=0x4B504948), "kpack"),
    "unknown wrapper version": (Spec(bundles(ALL), wrapper_version=2), "unknown kind"),
    "unknown wrapper magic": (Spec(bundles(ALL), wrapper_magic=7), "unknown kind"),
    "wrapper that no relocation fills": (Spec(bundles(ALL), relocate=False), "points to no bundle"),
    "pointer into the middle": (Spec(bundles(ALL), pointer_shift=4096), "where no bundle starts"),
    "write into a bundle": (Spec(bundles(ALL), extra_rela=[(0x3000, 8, 0)]), "writes into"),
    "dynamic symbol on a bundle": (Spec(bundles(ALL), dynamic_symbol_in_bundle=True), "dynamic symbol"),
    "another machine": (Spec(bundles(ALL), machine=183), "183"),
    "a program": (Spec(bundles(ALL), interpreter=True), "program"),
    "an executable at a fixed address": (Spec(bundles(ALL), type=2), "program"),
    "zero-filled memory behind": (Spec(bundles(ALL), follow=False, bss_behind=True), "zero-filled"),
    "bundle without the target": (
        Spec([*bundles(["gfx906", "gfx803"]), *bundles(["gfx803"], count=1)]),
        "bundle 3 would be left without code",
    ),
    "file without the target": (
        Spec(bundles(["gfx803", "gfx1100"])),
        "no code for gfx906, but code for gfx1100, gfx803",
    ),
    "no bundle at all": (Spec([bytes(9000)]), "there is no GPU code at all"),
}


@pytest.mark.parametrize(("spec", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_understood_is_refused(spec: Spec, reason: str) -> None:
    library = make_library(spec)
    if spec.extra_rela:  # now that the address is known
        spec = Spec(spec.bundles, extra_rela=[(library.fatbin_address + 64, 8, 0)])
        library = make_library(spec)
    with pytest.raises(PruneRefused, match=reason):
        plan_prune(Source.of_bytes(library.data), parse_targets("gfx906"))


def test_one_of_several_targets_is_enough_only_when_asked_for() -> None:
    source = Source.of_bytes(make_library(Spec(bundles(["gfx906", "gfx803"]))).data)
    with pytest.raises(PruneRefused, match="no code for gfx1100"):
        plan_prune(source, parse_targets("gfx906,gfx1100"))
    plan = plan_prune(source, parse_targets("gfx906,gfx1100"), strict=False)
    assert plan.kept_bytes.keys() == {"gfx906"}


def test_bundle_that_never_served_the_card_stays_whole_when_asked_for() -> None:
    data = make_library(Spec([*bundles(["gfx906", "gfx803"]), *bundles(["gfx803"], count=1)])).data
    out = pruned(data, "gfx906", strict=False)
    assert len(out) < len(data)
    codes = [[str(e.target) for e in place.bundle.entries if not e.is_host] for place in bundles_in(out)]
    assert codes == [["gfx906"]] * 3 + [["gfx803"]]


def test_host_code_in_a_bundle_is_refused() -> None:
    raw = raw_bundle({HOST_ID: code("host"), "gfx906": code("x"), "gfx803": code("y")}, host=False)
    with pytest.raises(PruneRefused, match="host code"):
        plan_prune(Source.of_bytes(make_library(Spec([raw])).data), parse_targets("gfx906"))


def spoilt(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def test_verify_notices_a_single_wrong_byte_anywhere_that_matters() -> None:
    library = make_library(Spec(bundles(["gfx906", "gfx1100"]), symbols=True))
    wanted = parse_targets("gfx906")
    good = pruned(library.data, "gfx906")
    elf = read_elf(Source.of_bytes(good))
    places = [read.offset for read in elf.sections if read.file_bytes and read.name != ".shstrtab"]
    places += [section.file_end - 1 for section in elf.sections if section.file_bytes and section.index > 1]
    places += [16, elf.segments_offset + 8, elf.segments_offset + 16, elf.sections_offset + 64 + 24]
    for place in places:
        with pytest.raises(Exception, match=r".") as caught:
            verify_prune(Source.of_bytes(library.data), Source.of_bytes(spoilt(good, place)), wanted)
        assert type(caught.value).__module__ == VerifyFailed.__module__, f"byte {place:#x}: {caught.value!r}"
