"""The audit at the end of a build: its reports are written, once for each image."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from image_maker import Image
from report_maker import BASE, SERVICE, FakeEngine

from buildtool.audit.text import SummaryRow
from buildtool.build import pipeline
from buildtool.build.plan import ImagePlan
from buildtool.build.workplace import Workplace
from buildtool.core.model import Budget, BuiltImage, Resolved, Variant
from buildtool.engine.client import Engine

VARIANT = Variant("tiny", "", Path("Dockerfile"), "3.11", (), (), budget=Budget(10_000))
FORMS = {"tiny.json", "tiny.md", "tiny.html"}


class CountingEngine(FakeEngine):
    """Says how often an image was read."""

    reads = 0

    def save(self, ref: str) -> Iterator[bytes]:
        self.reads += 1
        return super().save(ref)


def test_reports_of_every_form_are_written_once_and_again_when_one_is_gone(tmp_path: Path) -> None:
    engine = CountingEngine(Image([BASE, SERVICE], ref="weir/tiny:latest"))
    place = Workplace(tmp_path / "state", tmp_path / "lock.json", lambda _: None)
    target = ImagePlan(VARIANT, cast(Resolved, None), tmp_path)
    built = BuiltImage("tiny", "weir/tiny:latest", "sha256:" + 64 * "0")

    def audited() -> SummaryRow:
        return pipeline.audit(place, target, built, cast(Engine, engine), tmp_path / "reports")

    first = audited()
    assert first.verdict == "pass"
    assert {path.name for path in (tmp_path / "reports").iterdir()} == FORMS
    assert "Where the bytes are" in (tmp_path / "reports" / "tiny.html").read_text()
    assert audited() == first
    assert engine.reads == 1
    for number, name in enumerate(sorted(FORMS), 2):
        (tmp_path / "reports" / name).unlink()
        assert audited() == first
        assert engine.reads == number
        assert {path.name for path in (tmp_path / "reports").iterdir()} == FORMS
