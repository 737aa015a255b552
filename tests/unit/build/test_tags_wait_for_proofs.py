"""A tag moves once every image of its build is proved: until then the old tag names the old image."""

import contextlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from standin_engine import Killed, StandinEngine, build_on

from buildtool.build import catalog
from buildtool.core.errors import EngineUnavailable, Exit
from buildtool.core.files import scratch
from buildtool.engine.tags import temporary_names, temporary_prefix

VARIANTS = catalog.load().select(("cpu", "cpu-extras"))
OWN = {f"docker.io/weir/{each.name}:latest": each.name for each in VARIANTS}
MORE = ("--tag", "team/{variant}:1")
AFTER = {tag: f"sha256:{name}-1" for tag, name in OWN.items()}
AFTER |= {f"docker.io/team/{each.name}:1": f"sha256:{each.name}-1" for each in VARIANTS}
FAULTS = {
    "interrupted": KeyboardInterrupt(),
    "the engine fails": EngineUnavailable("gone"),
    "killed": Killed(),
}


@pytest.fixture
def engine() -> StandinEngine:
    return with_old_images()


def with_old_images() -> StandinEngine:
    made = StandinEngine()
    made.names = {tag: f"sha256:{name}-0" for tag, name in OWN.items()}
    made.proved = set(made.names.values())
    return made


def broken_promises(engine: StandinEngine) -> Iterator[str]:
    """Tags that name an unproved image."""
    for name, image in engine.names.items():
        if image not in engine.proved and "/weir-building:" not in name:
            yield f"{name} names {image}"


def temporary(engine: StandinEngine) -> list[str]:
    return [name for name in engine.names if "/weir-building:" in name]


def test_a_build_that_succeeds_moves_all_tags_and_leaves_no_other(
    engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_on(engine, monkeypatch, tmp_path, VARIANTS, *MORE) == Exit.OK
    assert engine.names == AFTER


@pytest.mark.thorough
def test_at_each_of_30_points_an_old_tag_names_the_old_image_and_none_an_unproved_one(
    engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_on(engine, monkeypatch, tmp_path / "whole", VARIANTS, *MORE)
    points = [(at, late) for at in range(len(engine.done)) for late in (False, True)]
    assert len(points) >= 30
    for number, (fault, (at, late)) in enumerate(product(FAULTS.values(), points)):
        after_a_fault(fault, at, tmp_path / str(number), late=late)


def after_a_fault(fault: BaseException, at: int, folder: Path, *, late: bool) -> None:
    """Check what a build leaves that fails in (or, `late`, after) the engine's call of this number."""
    engine = with_old_images()
    before = dict(engine.names)
    engine.fault, engine.fault_at, engine.late = fault, at, late
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        code = build_on(engine, patch, folder, VARIANTS, *MORE)
        left = {name: image for name, image in engine.names.items() if name not in temporary(engine)}
        assert left in (before, AFTER), engine.done
        assert left == AFTER or code != Exit.OK
    assert list(broken_promises(engine)) == [], engine.done
    engine.fault = None
    with pytest.MonkeyPatch.context() as patch:
        assert build_on(engine, patch, folder, VARIANTS, *MORE) == Exit.OK
    assert engine.names == AFTER


@pytest.mark.parametrize("bad", ["cpu", "cpu-extras"])
def test_one_image_that_fails_its_proof_leaves_every_tag_where_it_was(
    bad: str, engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(engine.names)
    engine.bad = {f"sha256:{bad}-1"}
    assert build_on(engine, monkeypatch, tmp_path, VARIANTS, *MORE) == Exit.BUILD
    assert engine.names == before


def test_what_a_killed_build_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(
    engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch(tmp_path / "state") as folder, temporary_names(engine, "weir-building", folder) as living:  # type: ignore[arg-type]
        dead = temporary_prefix("weir-building", tmp_path / "state") + "0" * 16
        other = "weir-building:0123456789-" + "0" * 16  # of another directory of states
        for name in (living, dead, other):
            engine.names[f"docker.io/library/{name}-cpu"] = "sha256:x"
        build_on(engine, monkeypatch, tmp_path, VARIANTS)
        assert [name[18:-4] for name in temporary(engine)] == [living, other]
    assert [name[18:-4] for name in temporary(engine)] == [other]


def test_a_build_in_another_container_keeps_its_images_though_its_state_has_the_same_path(
    engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of a CI share the host's engine, and each has its own /root/.cache/weir."""
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another-container")
        theirs = f"{temporary_prefix('weir-building', tmp_path / 'state')}{'0' * 16}-cpu"
    engine.names[f"docker.io/library/{theirs}"] = "sha256:x"
    build_on(engine, monkeypatch, tmp_path, VARIANTS)
    assert temporary(engine) == [f"docker.io/library/{theirs}"]


def test_an_image_of_somebody_else_does_not_lose_its_name_without_a_word(
    engine: StandinEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_on(engine, monkeypatch, tmp_path, VARIANTS)
    said = capsys.readouterr().err
    assert "until now weir/cpu:latest was an image that no build with" in said
    assert "docker tag sha256:cpu-0 weir/cpu:latest" in said
    engine.run_number = 2
    build_on(engine, monkeypatch, tmp_path, VARIANTS)
    assert "until now" not in capsys.readouterr().err
