"""Cubins that are zstd frames of their own, in the data of a library: found, counted, cut, recognised."""

import random
import struct
from collections import Counter

import pytest

from buildtool.core.compression import zstd
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.scan import bytes_by_target, find_code, scan_file
from buildtool.gpucode.source import BadBundle, Source
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.used import Used, machine_code
from buildtool.gpucode.verify import verify_prune
from buildtool.image.gpu_code import GpuCodeCounter
from gpucode.cutting import ALL, CUBIN, carried_out, cubin, cuda, fatbin, pruned, targets_in
from gpucode.maker import nv_fatbin

NOISE = random.Random(1).randbytes(300_000)
FLAGS = zstd.CompressionParameter
CARDS = (75, 80, 90, 100)


def code(architecture: int, n_bytes: int = 9000) -> bytes:
    return cubin(f"_Z{architecture}v", n_bytes=n_bytes, stuff=NOISE, architecture=architecture)


def frame(content: bytes, **options: int) -> bytes:
    chosen = {getattr(FLAGS, name): value for name, value in options.items()}
    return zstd.compress(content, options=chosen)


def in_row(*frames: bytes) -> bytes:
    """Frames as cuBLASLt has them: each begins at a multiple of 16 bytes."""
    return b"".join(each + bytes(16 - len(each) % 16) for each in frames)


def library(*frames: bytes, **more: object) -> bytes:
    return cuda([nv_fatbin(ALL)], data=b"variables " * 8 + in_row(*frames) + b"variables " * 8, **more)


def scan_places(data: bytes) -> Counter[str]:
    """What is in a file at hand, whatever its section headers say."""
    return bytes_by_target(find_code(Source.of_bytes(data)))


def counted(data: bytes, step: int) -> Counter[str]:
    """What an audit counts of a file that streams by."""
    counter = GpuCodeCounter(len(data))
    for at in range(0, len(data), step):
        counter.feed(data[at : at + step])
    return Counter(counter.stored_bytes_by_processor())


FRAMES = [frame(code(card)) for card in CARDS]
LIBRARY = library(*FRAMES)
OTHERS = Counter({"compute_90": 968}) + Counter({f"sm_{card}": 9064 for card in (75, 80, 86, 90)})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checksum_flag": 1},
        {"content_size_flag": 0},
        {"compression_level": 19},
        {"window_log": 10, "content_size_flag": 0},
    ],
)
@pytest.mark.parametrize("n_bytes", [40, 300, 9000, 300_000])
def test_every_form_of_a_frame_is_measured_without_unpacking_it(
    n_bytes: int, options: dict[str, int]
) -> None:
    whole = frame(code(100, n_bytes) + bytes(n_bytes), **options)
    data = library(whole)
    found = scan_file(Source.of_bytes(data))
    assert found["sm_100"] == len(whole)
    for step in (100, 4097, 1 << 20):
        assert counted(data, step) == found


def test_frames_are_counted_beside_fat_binaries_and_not_inside_of_them() -> None:
    inside = cuda([fatbin((CUBIN, 90, code(90)))], data=in_row(*FRAMES))
    assert scan_file(Source.of_bytes(inside)).total() == len(fatbin((CUBIN, 90, code(90)))) - 16 + sum(
        map(len, FRAMES)
    )


def test_frames_of_other_cards_become_zeros_and_nothing_moves() -> None:
    data = cuda([nv_fatbin([(CUBIN, 90, 900)])], data=in_row(*FRAMES))
    out = pruned(data, "sm_90")
    assert len(out) == len(data)
    at = data.index(FRAMES[2])
    assert out[at : at + len(FRAMES[2])] == FRAMES[2]
    assert not any(out[data.index(FRAMES[0]) : at])
    assert targets_in(out) == {"sm_90"}
    again = plan_prune(Source.of_bytes(out), parse_targets("sm_90"))
    assert not again.changed


def test_what_a_wanted_card_can_run_stays() -> None:
    assert targets_in(pruned(LIBRARY, "sm_86")) == {"sm_80", "sm_86"}


@pytest.mark.parametrize("section", [".nv_fatbin", ".cask_resource"])
def test_verification_notices_a_kept_frame_that_was_lost(section: str) -> None:
    data = cuda([nv_fatbin(ALL)], data=in_row(*FRAMES), section=section)
    out = bytearray(pruned(data, "sm_90"))
    at = bytes(out).index(FRAMES[2])
    out[at : at + len(FRAMES[2])] = bytes(len(FRAMES[2]))
    with pytest.raises(Exception, match="changed"):
        verify_prune(Source.of_bytes(data), Source.of_bytes(bytes(out)), parse_targets("sm_90"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text " * 900,
        code(90)[:63],
        code(90)[:18] + b"\x3e\0" + code(90)[20:],  # a library for x86-64
        bytes(9000),
    ],
)
def test_frames_of_something_else_are_no_code(content: bytes) -> None:
    assert scan_file(Source.of_bytes(library(frame(content)))).keys() == OTHERS.keys()


def test_a_library_behind_a_frame_of_something_else_is_still_searched() -> None:
    hidden = library(frame(b"text " * 900), FRAMES[3])
    assert "sm_100" in targets_in(hidden)


def test_frames_that_need_a_dictionary_are_no_code() -> None:
    head = b"\x28\xb5\x2f\xfd\x01\x38\x07"  # of dictionary 7
    assert targets_in(library(head + frame(code(100))[6:])) == set(OTHERS)


def test_a_frame_is_kept_where_no_section_holds_all_of_it() -> None:
    data = bytearray(cuda([nv_fatbin([(CUBIN, 90, 900)])], data=in_row(*FRAMES)))
    (shoff,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    at = bytes(data).index(FRAMES[3])
    for row in range(shoff, shoff + 64 * count, 64):
        start, n_bytes = struct.unpack_from("<QQ", data, row + 24)
        if start <= at < start + n_bytes:
            struct.pack_into("<Q", data, row + 32, at + 100 - start)  # the section ends inside of the frame
    out = pruned(bytes(data), "sm_90")
    assert targets_in(out) == {"sm_90", "sm_100"}


# Hostile files.


def test_a_file_that_ends_in_what_may_begin_a_frame_is_whole() -> None:
    whole = frame(code(100, 300_000))
    for n_bytes in (4, 5, 9, 12, 100, 60_000):
        data = LIBRARY[:800] + whole[:n_bytes]
        assert counted(data, 5000) == scan_places(data) == {}


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_frame_that_is_cut_off_is_damage(cut: int) -> None:
    whole = frame(code(100, 300_000))
    data = LIBRARY[:800] + whole[:-cut]
    with pytest.raises(BadBundle, match="cut off"):
        scan_places(data)
    with pytest.raises(BadBundle, match="cut off"):
        counted(data, 5000)


def test_a_frame_with_an_impossible_block_is_damage() -> None:
    whole = bytearray(frame(code(100, 300_000)))
    second = 9 + 3 + (int.from_bytes(whole[9:12], "little") >> 3)
    assert int.from_bytes(whole[4:5], "little") >> 5 == 0b101  # a length of 4 bytes, one segment
    whole[second] |= 0b110
    with pytest.raises(BadBundle, match="impossible block"):
        scan_file(Source.of_bytes(library(bytes(whole))))


def bomb(blocks: int) -> bytes:
    """A frame of a cubin and of blocks that are 128 KiB of one byte each."""
    first = code(90, 40)
    head = b"\x28\xb5\x2f\xfd\x00\x58" + (len(first) << 3).to_bytes(3, "little") + first
    block = (1 << 17 << 3 | 0b010).to_bytes(3, "little") + b"\0"
    return head + block * blocks + (0b001).to_bytes(3, "little")


@pytest.mark.thorough
def test_a_frame_that_unpacks_without_bound_is_counted_as_stored_and_stays() -> None:
    data = library(bomb(20_000))  # 2.6 GB
    found = scan_file(Source.of_bytes(data))
    assert found["sm_90"] == OTHERS["sm_90"] + len(bomb(20_000))
    out = carried_out(
        plan_prune(Source.of_bytes(data), parse_targets("sm_90"), used=Used(frozenset({"none"}))), data
    )
    assert bomb(20_000) in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "form", [b"\x28\xb5\x2f\xfd\x20\x80\xff\xff", b"\x28\xb5\x2f\xfd\x00\x58\xfc\xff\x0f"]
)
def test_looking_at_many_beginnings_of_frames_is_bounded(form: bytes) -> None:
    """Each claims a first block of 128 KiB, in which the next ones begin: 2 MB, and 16 GB to look at."""
    data = LIBRARY[:800] + form.ljust(16, b"\0") * (2 << 16)
    with pytest.raises(BadBundle, match="too many places"):
        scan_file(Source.of_bytes(data))


def test_looking_at_very_short_blocks_is_bounded() -> None:
    data = LIBRARY[:800] + bomb(0)[:-3] + bytes(3) * (1 << 18)
    with pytest.raises(BadBundle, match="too many places"):
        scan_file(Source.of_bytes(data))


# What runs loaded.


@pytest.mark.parametrize("section", [".nv_fatbin", ".cask_resource"])
def test_frames_that_no_run_loaded_go_and_those_that_one_did_stay(section: str) -> None:
    one, two = code(90), cubin("_Z3twov", n_bytes=9000, stuff=NOISE[9000:])
    data = cuda([fatbin((CUBIN, 90, two))], data=in_row(frame(one), frame(two)), section=section)
    assert {key_of(each) for each in machine_code(Source.of_bytes(data))} == {key_of(one), key_of(two)}
    source, targets, used = Source.of_bytes(data), parse_targets("sm_90"), Used(frozenset({key_of(one)}))
    out = carried_out(plan_prune(source, targets, strict=False, used=used), data)
    verify_prune(source, Source.of_bytes(out), targets, used)
    assert [key_of(each) for each in machine_code(Source.of_bytes(out))] == [key_of(one)]
