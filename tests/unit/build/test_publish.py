"""`weir build --tag --push`: names are settled first; what is unproved or over budget stays here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standin_engine import StandinEngine, build_on

from buildtool.build import catalog, publish
from buildtool.cli.arguments import extra_names
from buildtool.cli.program import main
from buildtool.core.errors import ConfigError, EnvironmentMissing, Exit
from buildtool.core.model import Variant

CPU, ROCM = catalog.load().select(("cpu", "rocm"))
NAME = "ghcr.example/team/cpu:1"


def names(*tags: str, variants: tuple[Variant, ...] = (CPU,)) -> dict[str, list[str]]:
    found = extra_names(tags, variants, (CPU, ROCM))
    return {variant: [str(name) for name in each] for variant, each in found.items()}


def test_a_name_is_given_to_one_image_alone() -> None:
    assert names("a/b", "a/b:2") == {"cpu": ["a/b:latest", "a/b:2"]}
    assert names("a/b", "a/b:latest", "docker.io/a/b") == {"cpu": ["docker.io/a/b:latest"]}
    for tags in (("a/b:1",), ("x-{variant}:1", "x-rocm:1")):
        with pytest.raises(ConfigError, match=r"to two images: \w+ and \w+\n.*\{variant\}"):
            names(*tags, variants=(CPU, ROCM))


@pytest.mark.parametrize("built", [(CPU,), (CPU, ROCM)])
def test_the_own_name_of_another_variant_is_refused_whether_that_is_built_or_not(
    built: tuple[Variant, ...],
) -> None:
    for tag in ("weir/rocm", "weir/rocm:latest", "docker.io/weir/rocm:latest"):
        with pytest.raises(ConfigError, match=r"give cpu the name \S+, which is that of the variant rocm"):
            names(tag, variants=built)
    assert names("weir/{variant}:latest", variants=built)["cpu"] == ["weir/cpu:latest"]


def test_a_template_names_every_variant() -> None:
    assert names("g.io/me/{variant}:1", variants=(CPU, ROCM)) == {
        "cpu": ["g.io/me/cpu:1"],
        "rocm": ["g.io/me/rocm:1"],
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tag", "Team/CPU"], "no image can be called"),
        (["--tag", f"x@sha256:{'0' * 64}"], "a digest can't be given"),
        (["--push"], "docker.io/weir/cpu:latest"),
        (["rocm", "--tag", "x:1"], "to two images"),
        (["--tag", "weir/rocm:latest"], "which is that of the variant rocm"),
    ],
)
def test_a_bad_name_is_refused_before_an_engine_is_asked(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise AssertionError("an engine was looked for")

    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", refuse)
    assert main(["build", "cpu", *words]) == Exit.USAGE
    assert why in capsys.readouterr().err


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Builds `cpu` without an engine; the exit code and what was done, in order."""

    def run(
        *words: str, verdict: str = "pass", refused: tuple[str, BaseException] | None = None
    ) -> tuple[int, list[str]]:
        engine = StandinEngine()
        done = engine.done

        def push(image: Any, name: object, **_more: object) -> str:
            done.append(f"push {image.digest} {name}")
            if refused and str(name) == refused[0]:
                raise refused[1]
            return "sha256:pushed"

        with monkeypatch.context() as patch:
            patch.setattr(publish, "push", push)
            code = build_on(engine, patch, tmp_path, (CPU,), *words, verdict=verdict)
        return code, [line for line in done if line.split()[0] in ("run", "save", "tag", "push")]

    return run


OWN = "tag sha256:cpu-1 weir/cpu:latest"


def test_names_and_a_push_come_after_proof_and_audit(built: Callable[..., tuple[int, list[str]]]) -> None:
    code, done = built("--tag", NAME, "--push")
    assert code == Exit.OK
    proved = ["run sha256:cpu-1", "save sha256:cpu-1"]
    assert done == [*proved, OWN, f"tag sha256:cpu-1 {NAME}", f"push sha256:cpu-1 {NAME}"]


def test_an_image_over_its_budget_gets_no_name_of_the_users_and_is_not_pushed(
    built: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, done = built("--tag", NAME, "--push", verdict="fail")
    assert code == Exit.FINDINGS
    assert done[-1] == OWN
    said = capsys.readouterr().out
    assert "nothing was pushed: weir/cpu:latest over budget" in said
    assert "no name of --tag was given to what is over its budget: weir/cpu:latest" in said


def test_a_push_without_an_audit_needs_the_proof_alone(built: Callable[..., tuple[int, list[str]]]) -> None:
    _, done = built("--tag", NAME, "--push", "--no-audit")
    assert done == ["run sha256:cpu-1", OWN, f"tag sha256:cpu-1 {NAME}", f"push sha256:cpu-1 {NAME}"]


def test_a_pushed_name_is_told_with_its_digest(
    built: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    built("--tag", NAME, "--push")
    assert f"pushed {NAME}@sha256:pushed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "code"),
    [(EnvironmentMissing("the registry refuses"), Exit.ENVIRONMENT), (KeyboardInterrupt(), Exit.INTERRUPTED)],
)
def test_what_a_push_that_ends_halfway_left_out_is_listed(
    fault: BaseException,
    code: Exit,
    built: Callable[..., tuple[int, list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tags = [word for name in ("a/x:1", "a/x:2", "a/x:3") for word in ("--tag", name)]
    ended, done = built(*tags, "--push", refused=("a/x:2", fault))
    assert ended == code
    assert done[-1] == "push sha256:cpu-1 a/x:2"
    told = capsys.readouterr().out
    assert "pushed a/x:1@sha256:pushed\nnot pushed: a/x:2, a/x:3\n" in told
