"""A bake that the engine's own race ends is tried once more; everything else is told as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.command import CommandFailed, Completed
from buildtool.engine import buildx
from buildtool.errors import BuildFailed, EnvironmentMissing

LOST = "ERROR: failed to solve: parent snapshot sha256:0123 does not exist: not found"
PLAN: dict[str, Any] = {"target": {"one": {}}}


@pytest.fixture
def bake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, list[str]]]:
    """Bakes with a buildx that fails with the given words, one run each, before it succeeds."""

    def run(*failures: str) -> tuple[object, list[str]]:
        waiting, said = list(failures), list[str]()

        def run_loud(command: list[str], **_more: object) -> Completed:
            said.append("run")
            if waiting:
                raise CommandFailed(command, 1, waiting.pop(0))
            (path,) = (word.partition("=")[2] for word in command if word.startswith("--metadata-file="))
            Path(path).write_text(json.dumps({"one": {"containerimage.digest": "sha256:1"}}))
            return Completed("", "")

        monkeypatch.setattr(buildx, "run_loud", run_loud)
        engine: Any = SimpleNamespace(inspect=lambda _digest: {}, info=lambda: None)
        try:
            return buildx.bake_plan(PLAN, engine=engine, say=said.append), said
        except (BuildFailed, EnvironmentMissing) as error:
            return error, said

    return run


def test_a_layer_that_others_removed_during_the_build_does_not_fail_it(
    bake: Callable[..., tuple[object, list[str]]],
) -> None:
    digests, said = bake(LOST)
    assert digests == {"one": "sha256:1"}
    told = (
        "the engine lost a layer while it built (parent snapshot sha256:0123 does not exist); "
        "building once more"
    )
    assert said == ["run", told, "run"]


def test_a_build_is_tried_no_third_time(bake: Callable[..., tuple[object, list[str]]]) -> None:
    error, said = bake(LOST, LOST)
    assert isinstance(error, BuildFailed)
    assert "parent snapshot sha256:0123 does not exist" in error.message
    assert said.count("run") == 2


@pytest.mark.parametrize("words", ["ERROR: process exited with 1", "no space left on device"])
def test_a_step_that_fails_is_not_run_again(
    bake: Callable[..., tuple[object, list[str]]], words: str
) -> None:
    error, said = bake(words)
    assert isinstance(error, BuildFailed | EnvironmentMissing)
    assert said == ["run"]
