"""`weir clean` shows what Weir keeps, and removes that alone: no link's target, no image of somebody else."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.build import storage
from buildtool.build.storage import Group, Places, Stored
from buildtool.build.workplace import Workplace
from buildtool.cli import clean
from buildtool.cli.program import main
from buildtool.core.errors import BuildFailed, EngineUnavailable, Exit, ToolError
from buildtool.engine.client import ImageRow
from buildtool.engine.reference import parse_reference
from buildtool.engine.tags import temporary_prefix
from probes.core.files import scratch
from probes.core.unknown import Unknown

WHEEL, SEAL = "a" * 64, "b" * 64
CPU, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
LABELS = {"io.weir.variant": "cpu", "io.weir.pruned": "no"}


class StandinEngine:
    """Images by their rows; those in `used` have a container, and the engine refuses to remove them."""

    def __init__(self, *rows: ImageRow, used: str = "") -> None:
        self.rows = list(rows)
        self.used = used

    def left_containers(self) -> tuple[str, ...]:
        return ()

    def images(self, *, label: str) -> tuple[ImageRow, ...]:
        return tuple(row for row in self.rows if label in row.Labels)

    def build_cache_bytes(self) -> int:
        return 77

    def remove_tag(self, ref: str) -> None:
        if ref == self.used:
            raise BuildFailed(f"the engine refused: a container uses {ref}")
        self.rows = [replace(row, RepoTags=tuple(t for t in row.RepoTags if t != ref)) for row in self.rows]
        self.rows = [row for row in self.rows if row.RepoTags]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Those of an installed package, with something of each kind."""
    state = tmp_path / "state"
    write(state / "wheels" / WHEEL / "torch-1.whl", 1000)
    write(state / "rootfs/bookworm-0123456789abcdef.tar", 136)
    write(state / "rootfs/bookworm-0123456789abcdef.sha256", 64)
    (state / "rootfs/bookworm-0123456789abcdef.lock").touch()
    write(state / "proved" / SEAL, 30)
    write(state / "packed/abc123.packed", 4)
    write(state / "context/cpu/payload/file", 50)
    os.link(state / "wheels" / WHEEL / "torch-1.whl", state / "context/cpu/torch-1.whl")
    write(state / "reports/images/cpu.json", 7)
    write(state / "variants.lock.json", 9)
    (state / "build.lock").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    found = Places(state, state, state / "reports", state / "variants.lock.json", None)
    monkeypatch.setattr(Places, "here", staticmethod(lambda: found))
    return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandinEngine:
    made = StandinEngine()
    monkeypatch.setattr(clean, "_engine", lambda: made)
    return made


@pytest.fixture
def weir(
    places: Places, engine: StandinEngine, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run(*words: str) -> tuple[int, str]:
        code = main(["clean", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def write(path: Path, n_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * n_bytes)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def rows_of(places: Places, engine: object = EngineUnavailable("no engine")) -> list[Stored]:
    return storage.survey(places, engine)  # type: ignore[arg-type]


def row_at(rows: list[Stored], end: str) -> Stored:
    [found] = [row for row in rows if row.place.endswith(end)]
    return found


def test_a_file_with_two_names_counts_once(places: Places) -> None:
    rows = rows_of(places)
    sizes = {Path(row.place).name: row.bytes for row in rows if row.group is Group.CACHES}
    assert sizes == {"wheels": 1000, "rootfs": 200, "proved": 30, "packed": 4, "context": 50}
    assert {Path(row.place).name for row in rows if row.group is Group.REPORTS} == {
        "cpu.json",
        "variants.lock.json",
    }


def test_without_a_named_group_nothing_is_removed(
    weir: Callable[..., tuple[int, str]], places: Places
) -> None:
    before = files(places.state)
    for words in ([], ["--dry-run"], ["--all", "--dry-run"], ["--json"]):
        code, _ = weir(*words)
        assert (code, files(places.state)) == (Exit.OK, before)
    assert "clean --caches" in weir()[1]
    assert "clean --reports" not in weir("--caches", "--dry-run")[1]


def test_caches_go_and_reports_and_pins_stay(weir: Callable[..., tuple[int, str]], places: Places) -> None:
    code, said = weir("--caches")
    assert code == Exit.OK
    assert said.count("; removed") == 5
    assert files(places.state) == {"build.lock", "reports/images/cpu.json", "variants.lock.json"}


def test_a_second_run_finds_nothing(weir: Callable[..., tuple[int, str]], places: Places) -> None:
    assert weir("--all")[0] == Exit.OK
    assert files(places.state) == {"build.lock"}
    code, said = weir("--all")
    assert code == Exit.OK
    assert said.startswith("weir keeps nothing on this host")
    assert "removed\n" not in said


def test_nothing_that_a_link_leads_to_is_removed(
    weir: Callable[..., tuple[int, str]], places: Places, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    write(away / SEAL, 5)
    write(away / "file", 5)
    (places.state / "audited").symlink_to(away)
    (places.state / "wheels" / ("c" * 64)).symlink_to(away)
    (places.state / "wheels" / WHEEL / "link").symlink_to(away)
    (places.state / "context/cpu/link").symlink_to(away / "file")
    (places.state / "reports/images/link.json").symlink_to(away / "file")
    code, said = weir("--all")
    assert code == Exit.OK
    assert files(away) == {SEAL, "file"}
    assert (places.state / "audited").is_symlink()
    assert (places.state / "wheels" / ("c" * 64)).is_symlink()
    assert not (places.state / "context").exists()
    assert "a link to another place" in said


def test_what_weir_did_not_make_stays_in_a_folder_that_it_uses(
    weir: Callable[..., tuple[int, str]], places: Places
) -> None:
    """WEIR_STATE may name any folder, even one that has `wheels` already."""
    write(places.state / "wheels/mine.whl", 3)
    write(places.state / "thesis.tex", 3)
    write(places.state / "context/talk/slides.tex", 3)
    code, said = weir("--all")
    assert code == Exit.OK
    assert files(places.state) == {"build.lock", "wheels/mine.whl", "thesis.tex", "context/talk/slides.tex"}
    assert "mine.whl" in said[said.index("not removed by weir") :]


def test_nothing_is_removed_while_a_build_holds_its_lock(
    weir: Callable[..., tuple[int, str]], places: Places
) -> None:
    before = files(places.state)
    with (places.state / "build.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert weir()[0] == Exit.OK
        code, said = weir("--all")
    assert (code, files(places.state)) == (Exit.ENVIRONMENT, before)
    assert "nothing was removed" in said
    assert weir("--all")[0] == Exit.OK


@pytest.mark.parametrize("below", ["", "wheels", "containers"])
def test_nothing_is_removed_while_a_run_holds_a_scratch_directory(
    below: str, weir: Callable[..., tuple[int, str]], places: Places
) -> None:
    """A proof and an audit come after the lock is given back."""
    with scratch(places.state / below):
        assert weir("--caches")[0] == Exit.ENVIRONMENT
    assert weir("--caches")[0] == Exit.OK


def test_files_of_killed_runs_are_removed(weir: Callable[..., tuple[int, str]], places: Places) -> None:
    name = f".weir-{'0' * 16}.partial"
    write(places.state / "wheels" / name / "part", 6)
    write(places.state.parent / "tmp" / name, 6)
    code, said = weir("--caches")
    assert code == Exit.OK
    assert said.count("files of killed runs") == 2
    assert not (places.state / "wheels").exists()
    assert not files(places.state.parent / "tmp")


def test_a_folder_that_cannot_be_written_is_named_and_the_rest_is_removed(
    weir: Callable[..., tuple[int, str]], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        if WHEEL in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        shutil_rmtree(path)

    shutil_rmtree = shutil.rmtree
    monkeypatch.setattr(storage.shutil, "rmtree", refuse)
    code, said = weir("--caches")
    assert code == Exit.FINDINGS
    assert f"not removed: {places.state}/wheels/{WHEEL}: Permission denied" in said
    assert not (places.state / "rootfs").exists()


def test_what_something_is_mounted_in_stays(
    weir: Callable[..., tuple[int, str]], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "has_mounts", lambda path: path.name == "cpu")
    code, said = weir("--caches")
    assert (code, files(places.state / "context")) == (Exit.FINDINGS, {"cpu/payload/file", "cpu/torch-1.whl"})
    assert "something is mounted in it" in said


def test_what_another_run_removes_while_it_is_looked_at_counts_for_nothing(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, context = Path.iterdir, places.state / "context"
    (context / f".weir-{'0' * 16}.partial").mkdir()
    (context / "new/payload").mkdir(parents=True)

    def vanishing(path: Path) -> Iterator[Path]:
        if path == places.state / "reports/images":
            shutil.rmtree(path)
        found = list(listed(path))
        for name in (".weir-0000000000000000.partial", "file", SEAL):
            if path / name in found:
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", vanishing)
    rows = [row for row in rows_of(places) if row.what != "images"]
    assert not [row for row in rows if isinstance(row.bytes, Unknown) or row.group is None]
    assert row_at(rows, "/context").bytes == 0, "its only other file is a wheel of the cache"


def test_what_another_run_is_removing_is_removed(
    weir: Callable[..., tuple[int, str]], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree

    def contended(path: Path) -> None:
        (entry,) = path.iterdir()
        real(entry) if entry.is_dir() else entry.unlink()
        monkeypatch.setattr(shutil, "rmtree", real)
        raise FileNotFoundError(2, "No such file or directory", str(entry))

    monkeypatch.setattr(shutil, "rmtree", contended)
    code, said = weir("--caches")
    assert code == Exit.OK, said
    assert files(places.state) == {"build.lock", "reports/images/cpu.json", "variants.lock.json"}


def test_a_folder_that_cannot_be_read_has_an_unknown_size(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "cpu":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert isinstance(row_at(rows_of(places), "/context").bytes, Unknown)


# ---- images ------------------------------------------------------------------------------------------------


def image(*names: str, labels: dict[str, str] = LABELS, ident: str = CPU) -> ImageRow:
    return ImageRow(ident, names, 500, labels)


@pytest.mark.parametrize(
    "foreign",
    [
        image("weir/cpu:latest", labels={}),  # of the same name
        image("weir/cpu:mine"),  # made from ours, whose labels it has
        image("me/cpu:latest"),
        image("weir/other:latest"),
        image("weir/cpu-mine:latest"),
        image("registry.example/weir/cpu:latest"),
        image("weir-building:0123456789-x-cpu"),  # of another state directory
        image(),
        image("weir/:latest", labels={"io.weir.variant": "../.."}),
    ],
)
def test_an_image_that_may_be_somebody_elses_stays(
    foreign: ImageRow, weir: Callable[..., tuple[int, str]], engine: StandinEngine
) -> None:
    engine.rows = [foreign]
    assert weir("--all")[0] == Exit.OK
    assert engine.rows == [foreign]


def test_images_that_builds_from_here_named_are_removed(
    weir: Callable[..., tuple[int, str]], engine: StandinEngine, places: Places
) -> None:
    record = Workplace(places.state, places.lock or places.state, print).named(parse_reference("me/cpu:1"))
    write(record, 0)
    record.write_text(CPU)
    stranger = image("you/cpu:1", ident=OTHER)
    killed = f"{temporary_prefix('weir-building', places.state)}00-cpu"
    engine.rows = [image("me/cpu:1", "weir/cpu:latest", killed), stranger]
    code, said = weir("--images")
    assert (code, engine.rows) == (Exit.OK, [stranger])
    assert "docker rmi you/cpu:1" in said
    assert not record.exists()
    assert (places.state / "wheels").exists()


def test_a_name_that_was_moved_to_another_image_since_is_not_ours(
    weir: Callable[..., tuple[int, str]], engine: StandinEngine, places: Places
) -> None:
    record = Workplace(places.state, places.state, print).named(parse_reference("me/cpu:1"))
    write(record, 0)
    record.write_text(CPU)
    engine.rows = [image("me/cpu:1", ident=OTHER)]
    assert weir("--images")[0] == Exit.OK
    assert engine.rows == [image("me/cpu:1", ident=OTHER)]


def test_an_image_in_use_stays_with_the_record_that_builds_keep_of_it(
    weir: Callable[..., tuple[int, str]], engine: StandinEngine, places: Places
) -> None:
    write(places.state / "named" / SEAL, 71)
    engine.rows, engine.used = [image("weir/cpu:latest")], "weir/cpu:latest"
    code, said = weir("--all")
    assert (code, files(places.state)) == (Exit.FINDINGS, {"build.lock", f"named/{SEAL}"})
    assert "a container uses weir/cpu:latest" in said


def test_without_an_engine_images_are_unknown_and_files_are_removed(
    weir: Callable[..., tuple[int, str]], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure: ToolError = EngineUnavailable("no Docker engine answers")
    monkeypatch.setattr(clean, "_engine", lambda: failure)
    assert "unknown  images; no Docker engine answers" in weir()[1]
    assert weir("--caches")[0] == Exit.OK
    code, _ = weir("--all")
    assert (code, files(places.state)) == (Exit.FINDINGS, {"build.lock"})


def test_json_has_sizes_in_bytes_and_what_was_removed(
    weir: Callable[..., tuple[int, str]], engine: StandinEngine
) -> None:
    engine.rows = [image("weir/cpu:latest")]
    document = json.loads(weir("--images", "--json")[1])
    found = {row["what"]: (row["group"], row["bytes"], row["removed"]) for row in document["stored"]}
    assert document["schema_version"] == 1
    assert found["image"] == ("images", 500, True)
    assert found["wheels for builds"] == ("caches", 1000, False)
    assert found["build cache of the engine"] == (None, 77, False)


def test_the_places_are_those_that_builds_and_placements_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(__file__).parents[3]
    found = Places.here({"HOME": str(tmp_path), "XDG_CACHE_HOME": ""})
    assert found.states == (root / ".weir", tmp_path / ".cache/weir")
    assert found.reports == root / "reports"
    named = Places.here({"WEIR_STATE": str(tmp_path / "s"), "WEIR_LOCK": "/mine.json"})
    assert (named.states, named.lock) == ((tmp_path / "s",), None)
