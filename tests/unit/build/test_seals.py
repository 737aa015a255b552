"""What was seen on an image is reused for that digest, those settings and this tool alone."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.audit.text import SummaryRow
from buildtool.build import catalog, pipeline, plan, workplace
from buildtool.build.workplace import Workplace
from buildtool.core.errors import ProofFailed
from buildtool.core.model import BuiltImage, TorchBuild
from buildtool.engine.client import RunResult

VARIANT = catalog.load().select(("cpu",))[0]
TARGET = plan.ImagePlan(VARIANT, plan.unresolved(VARIANT), Path("context"))
A, B = (BuiltImage("cpu", VARIANT.ref, f"sha256:{letter * 64}", letter) for letter in "ab")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path / "state", tmp_path / "lock.json", lambda _line: None)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Audits that write the digest they were asked for; the list of those digests."""
    asked: list[str] = []

    def audit(ref: str, *, digest: str, **_more: object) -> str:
        asked.append(digest)
        return digest

    def write(report: str, folder: Path, stem: str) -> tuple[Path, ...]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = tuple(folder / f"{stem}.{end}" for end in ("json", "md", "html"))
        for path in paths:
            path.write_text(report)
        return paths

    row = SummaryRow(**dict.fromkeys(SummaryRow.__dataclass_fields__, None))
    monkeypatch.setattr("buildtool.audit.audit.audit_image", audit)
    monkeypatch.setattr("buildtool.audit.audit.write_reports", write)
    monkeypatch.setattr("buildtool.audit.text.summary_row", lambda _report: row)
    return asked


ENGINE: Any = SimpleNamespace()


def test_building_a_then_b_then_a_again_shows_the_report_of_a(
    place: Workplace, audits: list[str], tmp_path: Path
) -> None:
    reports = tmp_path / "reports"
    for image in (A, B, A):
        pipeline.audit(place, TARGET, image, ENGINE, reports)
        assert {path.read_text() for path in reports.iterdir()} == {image.digest}
    pipeline.audit(place, TARGET, A, ENGINE, reports)
    assert audits == [A.digest, B.digest, A.digest]  # the last one had nothing to do


def test_a_report_that_somebody_changed_is_written_again(
    place: Workplace, audits: list[str], tmp_path: Path
) -> None:
    pipeline.audit(place, TARGET, A, ENGINE, tmp_path / "reports")
    (tmp_path / "reports/cpu.md").write_text("torn")
    pipeline.audit(place, TARGET, A, ENGINE, tmp_path / "reports")
    assert (tmp_path / "reports/cpu.md").read_text() == A.digest


def test_other_settings_and_another_tool_look_again(
    place: Workplace, audits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(TARGET, variant=replace(VARIANT, gpu_targets=("gfx906",)))
    pipeline.audit(place, TARGET, A, ENGINE, tmp_path)
    pipeline.audit(place, other, A, ENGINE, tmp_path)
    monkeypatch.setattr(workplace, "tool_fingerprint", lambda: "another")
    pipeline.audit(place, other, A, ENGINE, tmp_path)
    assert audits == [A.digest] * 3


def test_the_tool_is_distinguished_by_its_sources_not_by_its_version(tmp_path: Path) -> None:
    (tmp_path / "package/__pycache__").mkdir(parents=True)
    (tmp_path / "package/a.py").write_text("1")
    before = workplace.fingerprint((tmp_path / "package",))
    (tmp_path / "package/__pycache__/a.pyc").write_text("bytecode")
    assert workplace.fingerprint((tmp_path / "package",)) == before
    (tmp_path / "package/a.py").write_text("2")
    assert workplace.fingerprint((tmp_path / "package",)) != before


def test_an_image_is_proved_by_digest_and_for_each_promise(place: Workplace) -> None:
    said = (
        'SMOKE {"python": "3.11.2", "uid": 0, "torch": {"version": "2", "hip": null, "cuda": null,'
        ' "product_ok": true}, "service": true, "probes": true, "rocminfo": {"present": false}}'
    )
    ran: list[str] = []

    def run(ref: str, _command: list[str]) -> RunResult:
        ran.append(ref)
        return RunResult(0, said, "")

    engine: Any = SimpleNamespace(run=run)
    assert pipeline.prove(place, TARGET, A, engine) == pipeline.prove(place, TARGET, A, engine)
    assert ran == [A.image_id]
    promising = replace(TARGET, resolved=replace(TARGET.resolved, torch_build=TorchBuild.ROCM))
    with pytest.raises(ProofFailed):
        pipeline.prove(place, promising, A, engine)
    assert ran == [A.image_id] * 2


ALONE = 'SMOKE {"python": "3.11.2", "uid": 0, "service": %s, "probes": true}'
WHOLE = ALONE.replace("}", ', "torch": {"version": "2", "hip": null, "cuda": null, "product_ok": true}, ') + (
    '"rocminfo": {"present": false}}'
)


def test_layers_below_the_service_are_proved_once_and_the_service_each_time(place: Workplace) -> None:
    ran: list[tuple[str, bool]] = []
    service = "true"

    def run(ref: str, command: list[str]) -> RunResult:
        ran.append((ref, "--service" in command))
        return RunResult(0, (ALONE if "--service" in command else WHOLE) % service, "")

    engine: Any = SimpleNamespace(run=run)
    first = pipeline.prove(place, TARGET, A, engine, below="sha256:base")
    second = pipeline.prove(place, TARGET, B, engine, below="sha256:base")
    assert ran == [(A.image_id, False), (B.image_id, True)]
    assert second == replace(first, seen_in=A.digest), "it says where torch was seen"
    service = "false"
    other = replace(B, digest="sha256:other", image_id="other")
    with pytest.raises(ProofFailed, match="lacks its payload: service"):
        pipeline.prove(place, TARGET, other, engine, below="sha256:base")
    service = "true"
    pipeline.prove(place, TARGET, other, engine, below="sha256:another base")
    pipeline.prove(place, TARGET, replace(other, digest="sha256:baked"), engine)
    promising = replace(TARGET, resolved=replace(TARGET.resolved, python="3.12"))
    with pytest.raises(ProofFailed):
        pipeline.prove(place, promising, other, engine, below="sha256:base")
    assert [alone for _, alone in ran[2:]] == [True, False, False, False]


def test_a_build_sweeps_what_killed_builds_left_in_every_folder(place: Workplace) -> None:
    left = ".weir-0123456789abcdef.partial"
    folders = [place.state / name for name in ("rootfs", "pruned", "wheels", "context", "audited", "proved")]
    for folder in (*folders, place.state, place.lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / left).write_text("half")
    place.sweep()
    assert not list(place.lock.parent.rglob(left))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_no_umask_lets_other_users_write_what_goes_into_images(place: Workplace, umask: int) -> None:
    before = os.umask(umask)
    try:
        with place.alone():
            (place.state / "rootfs").mkdir()
            (place.state / "rootfs/x.tar").touch()
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    for path in (place.state, *place.state.rglob("*")):
        assert not path.stat().st_mode & 0o022, path


@pytest.mark.parametrize("open_one", ["", "state", "state/rootfs"])
def test_a_state_directory_that_others_can_write_is_not_used_without_a_warning(
    tmp_path: Path, open_one: str
) -> None:
    said: list[str] = []
    place = Workplace(tmp_path / "state", tmp_path / "lock.json", said.append)
    (place.state / "rootfs").mkdir(parents=True, mode=0o755)
    (tmp_path / open_one).chmod(0o777)
    with place.alone():
        warned = [line for line in said if f" {tmp_path / open_one} can be written by other users" in line]
    assert len(warned) == 1
    assert "chmod go-w" in warned[0]


def test_a_folder_of_another_build_that_ends_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = tmp_path / ".weir-0123456789abcdef.partial"
    leaving.mkdir()
    stat = Path.stat

    def gone(path: Path, **more: Any) -> os.stat_result:
        found = stat(path, **more)
        if path == leaving:
            leaving.rmdir()
        return found

    monkeypatch.setattr(Path, "stat", gone)
    assert not [line for line in workplace.writable_by_others(tmp_path) if leaving.name in line]


def test_a_state_directory_of_this_user_alone_raises_no_doubt(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert not [line for line in workplace.writable_by_others(tmp_path) if str(tmp_path) in line]
