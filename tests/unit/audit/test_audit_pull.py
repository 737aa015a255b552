"""An image that the engine lacks is pulled for an audit, said so first; ids and files never are."""

from pathlib import Path
from typing import Any

import pytest
from image_maker import Image
from report_maker import BASE, SERVICE, FakeEngine

from buildtool.cli.program import main
from buildtool.core.errors import Exit
from buildtool.engine import registry
from buildtool.engine.reference import Reference

REF = "ghcr.example/team/tiny:1"


class Shelf(FakeEngine):
    """An engine that holds the images in `held`."""

    held: set[str]

    def inspect(self, ref: str) -> dict[str, Any] | None:
        return {"Id": ref} if ref in self.held else None


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What was pulled, and for which platform, into an engine that is empty at first."""
    engine = Shelf(Image([BASE, SERVICE], ref=REF))
    engine.held = set()
    asked = list[tuple[str, str | None]]()

    def pull(name: Reference, *, progress: Any, platform: str | None) -> None:
        asked.append((str(name), platform))
        engine.held.add(str(name))

    monkeypatch.setattr(registry, "pull", pull)
    monkeypatch.setattr("buildtool.engine.client.Engine", lambda: engine)
    return asked


def test_an_image_that_the_engine_lacks_is_pulled_once_and_said_so_first(
    pulled: list[tuple[str, str | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["audit", REF]) == Exit.OK
    assert pulled == [(REF, None)]
    told = capsys.readouterr()
    assert told.err.startswith(f"the engine doesn't have {REF}; pulling it\n")
    assert told.err.count("pulling it") == 1
    assert "tiny" in told.out


def test_a_diff_pulls_what_the_engine_lacks(pulled: list[tuple[str, str | None]]) -> None:
    assert main(["diff", REF, REF]) == Exit.OK
    assert pulled == [(REF, None)]


@pytest.mark.parametrize(
    ("second", "code"),
    [("Team/X", Exit.USAGE), ("none.tar", Exit.DATA), ("./none", Exit.DATA), ("none.json", Exit.DATA)],
)
def test_a_second_image_that_cannot_be_is_refused_before_the_first_is_pulled(
    second: str,
    code: Exit,
    pulled: list[tuple[str, str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", REF, second]) == code
    assert pulled == []


def test_an_image_is_pulled_for_the_platform_that_is_asked_for(pulled: list[tuple[str, str | None]]) -> None:
    assert main(["audit", REF, "--platform", "linux/amd64"]) == Exit.OK
    assert pulled == [(REF, "linux/amd64")]


@pytest.mark.parametrize("verb", [["audit"], ["diff", REF]])
def test_no_pull_keeps_what_an_engine_holds_as_it_is(
    verb: list[str], pulled: list[tuple[str, str | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, REF, "--no-pull"]) == Exit.DATA
    assert f"leave --no-pull out, or pull it first: docker pull {REF}" in capsys.readouterr().err
    assert not pulled


@pytest.mark.parametrize(
    ("source", "code", "why"),
    [
        ("0123456789ab", Exit.DATA, "an id can't be pulled"),
        (f"sha256:{'0' * 64}", Exit.DATA, "an id can't be pulled"),
        ("image.tar", Exit.DATA, "No such file"),
        ("reports/image.tar.xz", Exit.DATA, "No such file"),
        ("./layout", Exit.DATA, "No such file"),
        ("image.oci", Exit.DATA, "No such file"),
        ("main.json", Exit.DATA, "No such file"),
        ("Reports/Main", Exit.USAGE, "no image can be called"),
    ],
)
def test_a_missing_file_or_an_id_is_not_asked_of_a_registry(
    source: str,
    code: Exit,
    why: str,
    pulled: list[tuple[str, str | None]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["audit", source]) == code
    assert why in capsys.readouterr().err
    assert not pulled
