"""A report as whole values: every figure of its rows, its notes, its JSON, and what calls for them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import image_maker as make
import pytest
from image_maker import Image, file, sha, symlink, tar
from report_maker import BASE, SERVICE, FakeEngine, a_finding, a_row, small_report

from buildtool.audit import audit as auditing
from buildtool.audit.audit import audit_image, audit_path, progress_lines, write_reports
from buildtool.audit.counts import Duplicate, Facts, Tally, gather_facts
from buildtool.audit.findings import Prediction
from buildtool.audit.options import LISTED_FILES, AuditOptions
from buildtool.audit.packages import PackageRow
from buildtool.audit.report import (
    AuditReport,
    DirectoryRow,
    GpuCode,
    ImageRow,
    LayerRow,
    Totals,
    make_report,
    to_json,
)
from buildtool.audit.treemap import FileRow
from buildtool.core.model import Budget
from buildtool.gpucode.source import BadTarget
from buildtool.image.archive import StreamArchive
from buildtool.image.documents import Platform
from buildtool.image.reader import PLAIN_REASON, ImageContents, read_image
from probes.core import invocation

HISTORY = [
    {"created_by": "# debian.sh x"},
    {"created_by": "CMD x", "empty_layer": True},
    {"created_by": "RUN X_TOKEN=abcd1234 y\x1b"},
]
IMAGE = Image([BASE, SERVICE], labels={"a\x1b": "b\x1b", "x_token": "abcd1234ef"}, history=list(HISTORY))


def read(image: Image, members: make.Members | None = None) -> ImageContents:
    content = make.archive(members or make.containerd_nested(image))
    archive = StreamArchive(make.chunks(content), label="x")
    return read_image(archive, label="x", platform=Platform("linux", "amd64"))


def reported(contents: ImageContents, **facts: object) -> AuditReport:
    changed = replace(gather_facts(contents), **facts)  # type: ignore[arg-type]
    return make_report(contents, changed, Budget(), "1.2")


def test_a_report_says_which_image_was_read() -> None:
    nested = make.containerd_nested(IMAGE)
    index = json.loads(nested["index.json"])["manifests"][0]
    attestation = json.loads(nested["blobs/" + index["digest"].replace(":", "/")])["manifests"][1]
    statement = json.loads(nested["blobs/" + attestation["digest"].replace(":", "/")])["layers"][0]
    report = audit_image(IMAGE.ref, engine=FakeEngine(IMAGE))
    assert report.image == ImageRow(
        ref="weir/tiny:1",
        digest=index["digest"],
        digest_reason=None,
        manifest_digest=sha(IMAGE.manifest()),
        config_digest=sha(IMAGE.config()),
        platform="linux/amd64",
        labels={"a\\x1b": "b\\x1b", "x_token": "[redacted]"},
        attestations=1,
        attestations_stored_bytes=report.image.attestations_stored_bytes,
        base_layers=1,
        base_told_by="the CMD that ends it in the history",
        base_name="",
    )
    assert report.image.attestations_stored_bytes >= statement["size"]


def test_sums_and_rows_of_a_report_are_those_of_its_layers() -> None:
    report = audit_image(IMAGE.ref, engine=FakeEngine(IMAGE))
    stored = [len(blob) for blob in IMAGE.blobs()]
    assert report.totals == Totals(
        unpacked_bytes=2649,
        visible_bytes=2619,
        stored_bytes=sum(stored),
        stored_reason=None,
        tar_bytes=len(BASE) + len(SERVICE),
        n_files=5,
    )
    blobs = [sha(blob) for blob in IMAGE.blobs()]
    assert report.layers == (
        LayerRow(blobs[0], sha(BASE), 2109, stored[0], len(BASE), 5, "# debian.sh x"),
        LayerRow(blobs[1], sha(SERVICE), 540, stored[1], len(SERVICE), 2, "RUN X_TOKEN=[redacted] y\\x1b"),
    )
    assert report.packages == (PackageRow("deb", "libc6", "2.41-1", "", 2019, 2019, 2),)
    assert report.top_files[:2] == (
        FileRow("usr/lib/libc.so.6", 2000, 0, "libc6"),
        FileRow("app/service.py", 500, 1, "service"),
    )
    assert report.top_directories[:2] == (DirectoryRow("usr/lib", 2000), DirectoryRow("app", 500))
    assert (report.duplicates, report.notes) == ((), ())
    assert [finding.id for finding in report.findings] == ["secrets"]
    assert report.prediction == Prediction(2649, 0)


def test_an_engine_that_shows_no_digest_leaves_a_reason() -> None:
    image = replace(IMAGE, pack=make.plain)
    report = reported(read(image, make.docker_legacy(image)))
    assert (report.image.digest, report.image.manifest_digest) == (None, None)
    assert "digest" in str(report.image.digest_reason)
    assert (report.totals.stored_bytes, report.totals.stored_reason) == (None, PLAIN_REASON)


def test_a_layer_without_content_or_command_is_a_row_all_the_same() -> None:
    contents = read(IMAGE)
    absent = replace(contents.layers[1], index=None, command=None)
    report = reported(replace(contents, layers=(contents.layers[0], absent)))
    row = report.layers[1]
    assert (row.unpacked_bytes, row.n_entries, row.command) == (0, 0, None)


def test_code_of_a_target_is_added_up_over_files_and_libraries() -> None:
    files, libraries = {"gfx906": Tally(5), "gfx908": Tally(7)}, {"gfx906": Tally(30)}
    report = reported(read(IMAGE), gpu_files=files, gpu_in_libraries=libraries)
    assert report.gpu_code.by_target == {"gfx906": 35, "gfx908": 7}
    assert report.gpu_code.in_libraries == {"gfx906": 30}


def test_as_many_duplicates_as_are_worth_a_row_are_kept() -> None:
    one = Duplicate(5, 5, ("a\\x1b", "b"), "why")
    report = reported(read(IMAGE), duplicates=(one,) * 101)
    assert report.duplicates == (one,) * 100


@cache
def counted() -> tuple[ImageContents, Facts]:
    contents = read(IMAGE)
    return contents, gather_facts(contents)


def notes_with(**facts: object) -> tuple[str, ...]:
    contents, plain = counted()
    return make_report(contents, replace(plain, **facts), Budget(), "1.2").notes  # type: ignore[arg-type]


def test_what_is_not_known_of_an_image_is_noted_with_its_figures() -> None:
    assert notes_with() == ()
    [note] = notes_with(packages_left_out=12345)
    assert "12,345 packages" in note
    [note] = notes_with(dangling_links=3)
    assert note.endswith(": 3")
    [note] = notes_with(unread=((b"a\x1b", "broken"),))
    assert note.endswith(r"/a\x1b: broken")
    for more in (1, 2):
        [note] = notes_with(unread=((b"a", "broken"), *[(b"b", "other")] * more))
        assert note.endswith(f"/a: broken (and {more} more file{'' if more == 1 else 's'})")


def test_code_for_several_cards_calls_for_the_card_that_is_meant() -> None:
    several = {"gfx906": Tally(1), "gfx1100": Tally(1)}
    assert len(notes_with(gpu_files=several)) == 1
    assert len(notes_with(gpu_files={"gfx906": Tally(1)}, gpu_in_libraries={"gfx908": Tally(1)})) == 1
    assert notes_with(gpu_files=several, wanted_targets=("gfx906",)) == ()
    assert notes_with(gpu_files={"gfx906": Tally(1)}, gpu_in_libraries={"gfx906": Tally(2)}) == ()
    assert notes_with(gpu_files={"gfx906": Tally(1), "sm_90": Tally(1)}) == ()


def test_notes_of_the_archive_and_its_layers_come_before_those_of_the_report() -> None:
    contents = read(IMAGE)
    index = contents.layers[1].index
    assert index
    index.notes = ("odd\x1b",)
    report = reported(replace(contents, notes=("archive\x1b",)), dangling_links=1)
    assert report.notes[:2] == ("archive\\x1b", "layer 1: odd\\x1b")
    assert len(report.notes) == 3


CPU_BUILD = {"io.weir.torch.build": "cpu"}


@pytest.mark.parametrize(
    ("packages", "labels", "told"),
    [
        ((), {}, "none"),
        ((PackageRow("python", "torch", "2.9", "", 1, 1, 1),), {}, "2.9"),
        (
            (PackageRow("deb", "python3-torch", "2.6", "", 1, 1, 1),),
            CPU_BUILD,
            "2.6 (cpu)",
        ),
        ((PackageRow("deb", "torchx", "1", "", 1, 1, 1),), CPU_BUILD, "(cpu)"),
    ],
)
def test_the_torch_of_an_image_is_that_of_its_package_and_its_label(
    packages: tuple[PackageRow, ...], labels: dict[str, str], told: str
) -> None:
    report = small_report()
    report = replace(report, packages=packages, image=replace(report.image, labels=labels))
    assert report.torch_build == told


def test_the_json_of_a_report_has_every_value_under_its_name() -> None:
    row = Duplicate(5, 10, ("a", "b"), "why")
    report = replace(
        small_report(Budget(1, 10**9)),
        findings=(a_finding(predicted_unpacked_bytes=7),),
        duplicates=(row,),
        gpu_code=GpuCode({"gfx906": 5}, {"gfx906": 3}),
        notes=("note é",),
        tree=replace(small_report().tree, rows=(a_row("a", 5),)),
    )
    text = to_json(report)
    document = json.loads(text)
    assert text == json.dumps(document, sort_keys=True, indent=2, ensure_ascii=True) + "\n"
    expected = json.loads(json.dumps(asdict(report), default=lambda value: value.value))
    expected["budget"] |= {"limit_bytes": 1, "verdict": "fail"}
    assert document == expected | {"schema_version": 1}


def test_a_report_without_a_prediction_has_none_in_json() -> None:
    assert json.loads(to_json(replace(small_report(), prediction=None)))["prediction"] is None


# The audit from end to end


class Recorder(FakeEngine):
    """An engine that notes what it was asked for."""

    def __init__(self, image: Image) -> None:
        super().__init__(image)
        self.asked: list[str] = []

    def save(self, ref: str):  # type: ignore[no-untyped-def]
        self.asked.append(ref)
        return super().save(ref)


def test_an_image_is_read_by_its_digest_where_one_is_given() -> None:
    engine = Recorder(IMAGE)
    digest = audit_image(IMAGE.ref, engine=engine).image.digest
    report = audit_image(IMAGE.ref, engine=engine, digest=digest)
    assert engine.asked == [IMAGE.ref, digest]
    assert report.image.ref == IMAGE.ref


def test_what_the_caller_wants_reaches_the_report() -> None:
    code = tar(file("opt/rocm/lib/x_gfx906.co", bytes(9)), file("opt/rocm/lib/x_gfx1100.co", bytes(9)))
    image = Image([code])
    report = audit_image(
        image.ref,
        engine=FakeEngine(image),
        options=AuditOptions(budget=Budget(1, None), targets=("gfx1100",)),
    )
    assert report.budget.unpacked.limit_bytes == 1
    assert report.notes == ()
    assert len(audit_image(image.ref, engine=FakeEngine(image)).notes) == 1


def test_files_and_layouts_are_audited_by_their_path(tmp_path: Path) -> None:
    root = make.layout_directory(make.oci_layout(IMAGE), tmp_path / "layout")
    heard: list[int] = []
    options = AuditOptions(image=IMAGE.ref, platform=Platform("linux", "amd64"), top=1)
    report = audit_path(root, options=options, tick=heard.append)
    assert (len(report.top_files), report.image.ref) == (1, IMAGE.ref)
    assert sum(heard) > 0


def test_a_target_that_is_none_is_refused_before_an_image_is_read() -> None:
    with pytest.raises(BadTarget):
        AuditOptions(targets=("gfx906", "nonsense"))
    assert AuditOptions().top == LISTED_FILES


def test_reports_are_written_in_three_forms(tmp_path: Path) -> None:
    paths = write_reports(small_report(), tmp_path, "cpu")
    assert paths == tuple(tmp_path / f"cpu.{ending}" for ending in ("json", "md", "html"))
    assert [path.read_text()[:1] for path in paths] == ["{", "#", "<"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.html", "cpu.json", "cpu.md"]


def test_progress_is_reported_every_five_seconds_with_all_bytes_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((100.0, 104.0, 105.0, 109.9, 110.0))
    monkeypatch.setattr(auditing.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    tick = progress_lines(said.append, "weir/x")
    for _ in range(4):
        tick(1_000_000)
    assert said == ["audit weir/x: 2.00 MB read", "audit weir/x: 4.00 MB read"]


@pytest.fixture
def version_unknown_yet() -> Iterator[None]:
    invocation.tool_version.cache_clear()
    yield
    invocation.tool_version.cache_clear()


@pytest.mark.usefixtures("version_unknown_yet")
def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert audit_image(IMAGE.ref, engine=FakeEngine(IMAGE)).tool_version == "source"
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} 7")
    invocation.tool_version.cache_clear()
    assert audit_image(IMAGE.ref, engine=FakeEngine(IMAGE)).tool_version == "gpu-weir 7"


def test_a_link_that_leads_nowhere_is_counted(tmp_path: Path) -> None:
    image = Image([tar(make.hardlink("a", "gone"), symlink("s", "gone"))])
    facts: Facts = gather_facts(read(image))
    assert facts.dangling_links == 1
