"""Builds that share a state directory don't touch what another one is reading."""

import threading
from pathlib import Path

import pytest
from standin_engine import StandinEngine

from buildtool.build.plan import BuildPlan
from buildtool.cli.program import main
from buildtool.core.errors import BuildFailed


def test_a_second_build_does_not_replace_the_context_that_the_first_one_bakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stage into <state>/context/<variant>: the first would hold the second one's files."""
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", lambda *_, **__: StandinEngine())
    baking, waiting = threading.Event(), threading.Event()
    order: list[str] = []

    def make_plan(*_: object, **__: object) -> BuildPlan:
        order.append("plan")
        return BuildPlan((), 0)

    def stage(*_: object) -> None:
        order.append("stage")

    def build(*_: object, **__: object) -> None:
        order.append("bake")
        baking.set()
        assert waiting.wait(60)
        order.append("baked")
        raise BuildFailed("far enough")

    def said(_progress: object, line: str) -> None:
        if "another build is using" in line:
            waiting.set()

    monkeypatch.setattr("buildtool.core.progress.ProgressLog.line", said)
    monkeypatch.setattr("buildtool.build.pipeline.make_plan", make_plan)
    monkeypatch.setattr("buildtool.build.pipeline.stage", stage)
    monkeypatch.setattr("buildtool.build.pipeline.bake", build)
    builds = [threading.Thread(target=main, args=(["build", "cpu"],)) for _ in range(2)]
    builds[0].start()
    assert baking.wait(60)
    builds[1].start()
    for thread in builds:
        thread.join(60)
    assert order == ["plan", "stage", "bake", "baked"] * 2
