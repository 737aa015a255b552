"""Debug information inside programs and libraries, found while the layer streams by."""

import random
import struct
from collections.abc import Mapping

import image_maker as make
import pytest
from image_maker import file, tar
from report_maker import audited

from buildtool.gpucode.source import BadElf
from buildtool.image.debug_info import DebugCounter
from buildtool.image.layer import LayerIndex, index_layer
from buildtool.image.tar import TarReader

GNU = (".text", ".comment", ".debug_info", ".debug_str", ".symtab", ".strtab", ".shstrtab")
LLD = (".text", ".debug_info", ".debug_str", ".comment", ".symtab", ".shstrtab", ".strtab")
BYTES = {
    ".text": 90_000,
    ".comment": 40,
    ".debug_info": 200_000,
    ".debug_str": 50_000,
    ".symtab": 2400,
    ".strtab": 99_000,
}
STRIPPED = BYTES[".debug_info"] + BYTES[".debug_str"] + BYTES[".symtab"] + BYTES[".strtab"]
PROGBITS, SYMTAB, STRTAB = 1, 2, 3
ALLOC = 2


def program(
    order: tuple[str, ...] = GNU, *, sizes: Mapping[str, int] = BYTES, segments_at: int = 64
) -> bytes:
    """A 64-bit ELF program: headers, sections in this order, section headers last."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in order)
    start = 512
    places, body = {}, b""
    for name in order:
        content = names if name == ".shstrtab" else bytes([len(name)]) * sizes[name]
        places[name] = start + len(body), len(content)
        body += content
    body += bytes(-len(body) % 8)
    loaded = places[".text"][0] + places[".text"][1]
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, loaded, loaded, 4096)
    rows = [bytes(64)]
    for name in order:
        kind = {".symtab": SYMTAB, ".strtab": STRTAB, ".shstrtab": STRTAB}.get(name, PROGBITS)
        link = order.index(".strtab") + 1 if name == ".symtab" else 0
        flags = ALLOC if name == ".text" else 0
        fields = (names.find(name.encode() + b"\0"), kind, flags, 0, *places[name], link, 0, 1, 0)
        rows.append(struct.pack("<IIQQQQIIQQ", *fields))
    table_at = start + len(body)
    counts = (64, 56, 1, 64, len(rows), order.index(".shstrtab") + 1)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, segments_at, table_at, 0, *counts)
    return (head + segment).ljust(start, b"\0") + body + b"".join(rows)


def probed(content: bytes, chunk: int = 1 << 16) -> int:
    probe = DebugCounter(len(content))
    for piece in make.chunks(content, chunk):
        probe.feed(piece)
    return probe.debug_bytes()


def index(*members: bytes) -> LayerIndex:
    return index_layer(TarReader(make.chunks(tar(*members)), place="t"), place="t")


@pytest.mark.parametrize("order", [GNU, LLD])
@pytest.mark.parametrize("chunk", [997, 4096, 1 << 16, 1 << 20])
def test_what_stripping_takes_out_is_counted_however_the_stream_is_cut(
    order: tuple[str, ...], chunk: int
) -> None:
    assert probed(program(order), chunk) == STRIPPED


def test_names_far_before_the_section_headers_are_found() -> None:
    assert probed(program(LLD, sizes={**BYTES, ".strtab": 3_000_000})) == STRIPPED - 99_000 + 3_000_000


def test_names_are_found_where_the_program_headers_are_out_of_sight() -> None:
    content = program()
    assert probed(program(segments_at=len(content) - 200)) == STRIPPED


def test_section_headers_at_the_start_are_read_too() -> None:
    content = bytearray(program())
    at = int.from_bytes(content[40:48], "little")
    table = content[at:]
    content[1024 : 1024 + len(table)], content[40:48] = table, (1024).to_bytes(8, "little")
    assert probed(bytes(content)) == STRIPPED


def test_a_stripped_program_and_what_is_no_program_have_none() -> None:
    order = (".text", ".comment", ".shstrtab")
    assert probed(program(order)) == 0
    assert probed(b"\x7fELF" + bytes(100_000)) == 0
    assert probed(bytes(100_000)) == 0
    without_sections = bytearray(program())
    without_sections[60:62] = bytes(2)
    assert probed(bytes(without_sections)) == 0


def test_words_that_look_like_names_do_not_mislead() -> None:
    content = program(sizes={**BYTES, ".debug_str": 0}).replace(
        b"\x0b" * 200_000, b".shstrtab".ljust(20) * 10_000
    )
    assert probed(content) == STRIPPED - 50_000


@pytest.mark.thorough
def test_a_file_of_nothing_but_names_costs_no_more_memory() -> None:
    probe = DebugCounter(len(content := program(sizes={**BYTES, ".strtab": 9_000_000})))
    for piece in make.chunks(content.replace(b"\x07" * 9_000_000, b".shstrtab" * 1_000_000)):
        probe.feed(piece)
        assert len(probe._recent) + sum(len(near) for _, near in probe._names) < 2 << 20
    assert probe.debug_bytes() == STRIPPED - 99_000 + 9_000_000


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (40, b"\xff" * 8, "outside the file"),
        (58, b"\x28\0", "outside the file"),
        (60, b"\xff\xff", "outside the file"),
        (62, b"\xff\xff", "have no names"),
    ],
)
def test_a_header_that_lies_leaves_the_file_unread_with_a_reason(offset: int, value: bytes, why: str) -> None:
    content = bytearray(program())
    content[offset : offset + len(value)] = value
    found = index(file("usr/lib/x.so", bytes(content)))
    assert found.debug == {}
    assert why in found.unread[0]


def test_sections_that_reach_past_the_end_or_are_on_code_are_not_believed() -> None:
    content = bytearray(program())
    content[-3 * 64 - 32 : -3 * 64 - 24] = (1 << 62).to_bytes(8, "little")
    with pytest.raises(BadElf, match="past its end"):
        probed(bytes(content))
    probe = DebugCounter(len(content))
    probe.feed(program())
    with pytest.raises(BadElf, match="overlap"):
        probe.debug_bytes(beside=100_000)


def test_sections_on_one_another_count_once() -> None:
    content = bytearray(program())
    names = content[-5 * 64 : -4 * 64]
    content[-4 * 64 + 24 : -4 * 64 + 40] = names[24:40]  # .debug_str where .debug_info is
    assert probed(bytes(content)) == STRIPPED - 50_000


@pytest.mark.thorough
def test_no_damage_makes_it_fail_otherwise_or_count_more_than_there_is() -> None:
    chance = random.Random(11)
    content = program(sizes={**BYTES, ".text": 3000, ".debug_info": 9000, ".strtab": 2000, ".debug_str": 700})
    unread = 0
    for _ in range(1500):
        broken = bytearray(content)
        for _ in range(chance.randint(1, 6)):
            where = chance.choice((range(64), range(64, 130), range(len(content) - 520, len(content))))
            broken[chance.choice(where)] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        cut = chance.choice((len(broken), chance.randrange(1, len(broken))))
        probe = DebugCounter(len(broken))
        for piece in make.chunks(bytes(broken[:cut]), chance.choice((100, 4000, 1 << 16))):
            probe.feed(piece)
        try:
            assert 0 <= probe.debug_bytes() <= len(content)
        except BadElf:
            unread += 1
    assert 300 < unread < 1400


def test_it_is_a_kind_of_its_own_in_all_sums_and_a_finding_with_its_remedy() -> None:
    big = program(sizes={**BYTES, ".debug_info": 3_000_000})
    report = audited(tar(file("usr/lib/x/libx.so", big), file("usr/bin/tool", program()), file("a", b"1")))
    stripped = 2 * STRIPPED + 2_800_000
    total = report.totals.unpacked_bytes
    assert report.kinds["debug information"] == stripped
    assert sum(report.kinds.values()) == sum(report.owners.values()) == total == report.totals.visible_bytes
    assert sum(row.unpacked_bytes for row in report.tree.rows) == total
    [finding] = report.findings
    assert (finding.id, finding.bytes) == ("debug-info-in-libraries", stripped)
    assert finding.predicted_unpacked_bytes == total - stripped
    assert finding.remedy.startswith("RUN find /usr/lib/x /usr/bin -maxdepth 1")
    assert "strip --strip-unneeded" in finding.remedy


def test_a_file_of_debug_information_is_not_counted_twice() -> None:
    report = audited(tar(file("usr/lib/debug/x.debug", program(sizes={**BYTES, ".debug_info": 3_000_000}))))
    assert [row.id for row in report.findings] == ["debug-info"]
    assert report.kinds == {"debug information": report.totals.unpacked_bytes}
