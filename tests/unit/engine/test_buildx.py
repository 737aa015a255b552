"""A bake that the engine's own race ends is tried once more; everything else is reported as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.core.command import CommandFailed, Completed, relay
from buildtool.core.errors import BuildFailed, EnvironmentMissing
from buildtool.engine import buildx

LOST = "ERROR: failed to solve: parent snapshot sha256:0123 does not exist: not found"
PLAN: dict[str, Any] = {"target": {"one": {}}}


@pytest.fixture
def bake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, list[str]]]:
    """Bakes with a buildx that fails with the given words, one run each, before it succeeds."""

    def run(*failures: str) -> tuple[object, list[str]]:
        waiting, said = list(failures), list[str]()

        def run_streaming(command: list[str], **_more: object) -> Completed:
            said.append("run")
            if waiting:
                raise CommandFailed(command, 1, waiting.pop(0))
            (path,) = (word.partition("=")[2] for word in command if word.startswith("--metadata-file="))
            Path(path).write_text(json.dumps({"one": {"containerimage.digest": "sha256:1"}}))
            return Completed("", "")

        monkeypatch.setattr(buildx, "run_streaming", run_streaming)
        engine: Any = SimpleNamespace(inspect=lambda _digest: {}, info=lambda: None)
        try:
            return buildx.bake_plan(PLAN, engine=engine, progress=said.append), said
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


@pytest.mark.parametrize("verbose", [False, True])
def test_a_verbose_build_hides_no_line_of_buildkit(monkeypatch: pytest.MonkeyPatch, verbose: bool) -> None:
    lines = ["#1 [internal] load build definition", "#2 [base 1/2] FROM scratch", "#2 sha256:00 1.2MB / 4MB"]
    said = list[str]()

    def run_streaming(command: list[str], *, progress: Callable[[str], None], **_more: object) -> Completed:
        for line in lines:
            progress(line)
        raise CommandFailed(command, 1, "ERROR: step failed")

    monkeypatch.setattr(buildx, "run_streaming", run_streaming)
    engine: Any = SimpleNamespace(info=lambda: None)
    with pytest.raises(BuildFailed, match="build VARIANT --verbose"):
        buildx.bake_plan(PLAN, engine=engine, progress=said.append, verbose=verbose)
    assert said == (lines if verbose else lines[1:2])


def test_a_line_is_relayed_as_its_program_wrote_it_when_all_are_asked_for() -> None:
    for verbose, heard in ((False, ["b"]), (True, ["a", "Saved b"])):
        said = list[str]()
        hear = relay(
            said.append, lambda line: line[6:] if line.startswith("Saved") else None, verbose=verbose
        )
        for line in ("a", "Saved b"):
            hear(line)
        assert said == heard
