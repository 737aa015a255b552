"""Hostile images end in a report or in a typed refusal that says where; never in a traceback or a file."""

from collections import Counter
from pathlib import Path

import image_maker as make
import pytest
from hostile import corpus

from buildtool.audit.counts import gather_facts
from buildtool.audit.report import make_report, to_json
from buildtool.audit.text import render_markdown, render_table
from buildtool.core.errors import ToolError
from buildtool.core.model import Budget
from buildtool.image.archive import StreamArchive, open_archive
from buildtool.image.documents import Platform
from buildtool.image.errors import Limits
from buildtool.image.reader import ImageContents, read_image

pytestmark = pytest.mark.thorough

CASES = list(corpus())
LIMITS = Limits(unpacked_bytes=4 << 20, index_bytes=8 << 20)


def verdict(read: ImageContents) -> str:
    report = make_report(read, gather_facts(read), Budget(1, 1), "test")
    total = report.totals.unpacked_bytes
    assert sum(report.owners.values()) == sum(report.kinds.values()) == total
    assert report.totals.visible_bytes <= total < 1 << 30
    for text in (to_json(report), render_table(report), render_markdown(report)):
        text.encode("utf-8")
        assert "\x1b" not in text
    return "read"


def as_stream(content: bytes) -> str:
    try:
        archive = StreamArchive(make.chunks(content), label="evil.tar", limits=LIMITS)
        return verdict(
            read_image(archive, label="evil.tar", platform=Platform("linux", "amd64"), limits=LIMITS)
        )
    except ToolError as error:
        return type(error).__name__ if str(error) else "a refusal without a word"


def as_file(content: bytes, path: Path) -> str:
    """The same bytes by the other reader; the report about them doesn't depend on it."""
    path.write_bytes(content)
    try:
        archive = open_archive(path, limits=LIMITS)
        gather_facts(
            read_image(archive, label="evil.tar", platform=Platform("linux", "amd64"), limits=LIMITS)
        )
    except ToolError as error:
        return type(error).__name__
    return "read"


def test_there_are_enough_cases_and_classes() -> None:
    classes = Counter(group for group, _, _ in CASES)
    assert len(classes) >= 24
    assert len(CASES) >= 120
    assert len({(group, variant) for group, variant, _ in CASES}) == len(CASES)


@pytest.mark.parametrize("group", sorted({group for group, _, _ in CASES}))
def test_every_case_of_a_class_ends_well_and_alike_from_stream_and_file(group: str, tmp_path: Path) -> None:
    for name, variant, content in CASES:
        if name == group:
            told = as_stream(content)
            assert told == as_file(content, tmp_path / "evil.tar"), (variant, told)
    assert {path.name for path in tmp_path.iterdir()} == {"evil.tar"}


def test_bit_flips_and_truncations_of_blobs_are_all_detected() -> None:
    layer = make.tar(make.file("f", bytes(range(256)) * 20), make.symlink("l", "f"))
    members = make.oci_layout(make.Image([layer, make.tar(make.file("g", b"g" * 900))]))
    honest = as_stream(make.archive(members))
    assert honest == "read"
    blobs = [path for path in members if path.startswith("blobs/")]
    for n in range(24):  # the bench has 1,500
        path = blobs[n % len(blobs)]
        content = members[path]
        bit = n * 7919 % (len(content) * 8)
        flipped = content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]
        assert as_stream(make.archive(members | {path: flipped})) != "read", (path, bit)
        assert as_stream(make.archive(members | {path: content[: bit // 8]})) != "read", (path, bit // 8)
