"""What a run that was watched is refused for, and how it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from buildtool.cli.program import build_parser
from buildtool.core.errors import ConfigError, ProofFailed
from buildtool.observe import runs


class Container:
    """A container that ends well, whatever it is told."""

    pid, url, name = 1, "", "c"

    def exit_code(self) -> int:
        return 0

    def full_log(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return lambda: None


class Watch:
    """A watch that has seen some paths."""

    paths: frozenset[str] = frozenset()

    def __init__(self, _pid: int) -> None:
        """Watch nothing."""

    def finish(self) -> frozenset[str]:
        return self.paths

    def close(self) -> None:
        """End."""


def test_a_run_that_opened_nothing_gives_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def served(*_: object) -> Iterator[Container]:
        yield Container()

    monkeypatch.setattr(runs, "served", served)
    monkeypatch.setattr(runs, "is_local", lambda *_: True)
    monkeypatch.setattr(runs, "Fanotify", Watch)
    monkeypatch.setattr(runs, "run_streaming", lambda *_, **__: None)
    monkeypatch.setattr(runs.Served, "stop", lambda _: None)
    said: list[str] = []

    def observed() -> runs.Observation:
        engine: Any = None
        return runs.observe(engine, "image", runs.Workload("true"), method="", progress=said.append)

    with pytest.raises(ProofFailed, match="no file of the image was opened"):
        observed()
    monkeypatch.setattr(Watch, "paths", frozenset({"/a"}))
    assert observed().paths == {"/a"}
    assert said[-1] == "the workload has passed; stopping the container"


@pytest.mark.parametrize("text", ["/tmp", ":/data", "/tmp:data", "/no/such/folder:/data"])
def test_what_mounts_nothing_is_refused_before_a_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")
    with pytest.raises(ConfigError):
        runs.mounts([text])


def test_mounts_are_passed_on_as_they_are() -> None:
    assert runs.mounts(["/tmp:/data:ro", "cache:/cache"]) == ("/tmp:/data:ro", "cache:/cache")


def test_a_path_on_another_machine_is_its_engines_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    assert runs.mounts(["/no/such/folder:/data"]) == ("/no/such/folder:/data",)
    with pytest.raises(ConfigError):
        runs.mounts(["/tmp:data"])


@pytest.mark.parametrize(
    "words",
    [
        ["weir/cpu", "--keep", "a.keep", "--gpus", "--", "python3", "-c", "print(1)"],
        ["--keep", "a.keep", "weir/cpu", "--gpus", "--", "python3", "-c", "print(1)"],
        ["--keep", "a.keep", "--gpus", "weir/cpu", "--", "python3", "-c", "print(1)"],
    ],
)
def test_options_stand_before_the_image_or_behind_it(words: list[str]) -> None:
    args = build_parser({"observe"}, "weir").parse_args(["observe", *words])
    assert (args.image, str(args.keep), args.gpus) == ("weir/cpu", "a.keep", True)
    assert [*args.words, *args.command] == ["python3", "-c", "print(1)"]


def test_a_command_without_options_needs_no_dashes() -> None:
    args = build_parser({"observe"}, "weir").parse_args(["observe", "weir/cpu", "true"])
    assert (args.image, args.words, args.command) == ("weir/cpu", ["true"], [])
