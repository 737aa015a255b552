"""A prune of a tree lists what goes before it goes, and touches nothing that a hostile tree points at."""

import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gpucode.cutting import cuda
from gpucode.maker import Spec, bundles, make_library, nv_fatbin

from buildtool.cli.program import main
from buildtool.core.errors import ConfigError, DataError, EnvironmentMissing, Exit, ToolError
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.prune import manifest as manifest_module
from buildtool.prune import trees
from buildtool.prune.manifest import FILE_NAME, journal
from buildtool.prune.trees import Links, prune_tree

LIBRARY = make_library(Spec(bundles(["gfx906", "gfx803", "gfx1100"]))).data
GFX906 = parse_targets("gfx906")
SECRET = "root:x:0:0"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "lib").mkdir(parents=True)
    for number in range(5):
        (root / "lib" / f"Kernels{number}_gfx803.co").write_bytes(b"foreign" * (number + 1))
    (root / "lib" / "Kernels_gfx906.co").write_bytes(b"ours")
    for name in ("a", "b"):
        (root / "lib" / f"lib{name}.so").write_bytes(LIBRARY)
    return root


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the tree that nothing may change."""
    path = tmp_path / "passwd"
    path.write_text(SECRET)
    yield path
    assert path.read_text() == SECRET


def prune(root: Path, *more: str) -> int:
    return main(["prune", str(root), "--targets", "gfx906", *more])


def runs(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["runs"])


def gone_and_cut(root: Path) -> tuple[set[str], set[str]]:
    """What is really gone from a fresh `tree`, and which of its libraries were cut."""
    names = {f"lib/Kernels{number}_gfx803.co" for number in range(5)}
    libraries = [root / "lib" / f"lib{name}.so" for name in ("a", "b")]
    cut = {f"lib/{path.name}" for path in libraries if path.stat().st_size != len(LIBRARY)}
    return {name for name in names if not (root / name).exists()}, cut


def listed(run: dict[str, Any]) -> tuple[set[str], set[str]]:
    return {row["path"] for row in run["deleted"]}, {row["path"] for row in run["pruned"]}


def whole(path: Path) -> bool:
    """Is a library either the original or a cut one that still holds its code?"""
    data = path.read_bytes()
    found = set(scan_file(Source.of_bytes(data)))
    return data == LIBRARY or found == {"gfx906"}


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Broken(BaseException):
    """A process that is killed: nothing handles it."""


def test_every_run_is_listed(tree: Path) -> None:
    assert prune(tree, "--hsa-override", "11.0.0") == Exit.OK
    assert prune(tree) == Exit.OK
    first, second = runs(tree / FILE_NAME)
    assert (first["targets"], second["targets"]) == (["gfx1100", "gfx906"], ["gfx906"])
    assert (first["finished"], second["finished"]) == (True, True)
    assert first["saved_bytes"] > 0
    assert first["pruned"][0]["removed_bytes"].keys() == {"gfx803"}
    assert not list(tree.glob("*.journal"))


def test_a_prune_that_changes_nothing_leaves_no_list(tree: Path) -> None:
    assert prune(tree) == Exit.OK
    before = (tree / FILE_NAME).read_bytes()
    assert prune(tree) == Exit.OK
    assert (tree / FILE_NAME).read_bytes() == before
    assert prune(tree, "--manifest", str(tree.parent / "other.json")) == Exit.OK
    assert not (tree.parent / "other.json").exists()


def test_with_a_full_disk_nothing_is_deleted_before_the_journal_is_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "write", full)
    assert prune(tree) == Exit.ENVIRONMENT
    assert gone_and_cut(tree) == (set(), set())
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in tree.iterdir()) == ["lib"]


@pytest.mark.thorough
@pytest.mark.parametrize("writes", range(1, 8))
def test_a_disk_that_fills_up_midway_loses_nothing_that_is_not_listed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writes: int
) -> None:
    left, real = writes, os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        return real(descriptor, data) if left >= 0 else full()

    monkeypatch.setattr(os, "write", write)
    code = prune(tree)
    monkeypatch.undo()
    gone, cut = gone_and_cut(tree)
    if code == Exit.OK:
        assert (len(gone), len(cut)) == (5, 2)
        return
    assert code == Exit.ENVIRONMENT
    assert "space" in capsys.readouterr().err
    assert all(whole(tree / "lib" / f"lib{name}.so") for name in ("a", "b"))
    found = listed(runs(tree / FILE_NAME)[0]) if (tree / FILE_NAME).exists() else (set(), set())
    assert found == (gone, cut)
    assert prune(tree) == Exit.OK
    both = [listed(run) for run in runs(tree / FILE_NAME)]
    assert set().union(*(row[0] for row in both)) == gone_and_cut(tree)[0]
    assert len(gone_and_cut(tree)[0]) == 5


def test_a_list_that_cannot_be_written_in_the_end_stays_as_a_journal_and_is_added_later(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object) -> None:
        raise EnvironmentMissing("no space left")

    monkeypatch.setattr(manifest_module, "write_text", no_room)
    assert prune(tree) == Exit.ENVIRONMENT
    assert f"{FILE_NAME}.journal" in capsys.readouterr().err
    monkeypatch.undo()
    gone = gone_and_cut(tree)
    assert len(gone[0]) == 5
    assert prune(tree) == Exit.OK
    [run] = runs(tree / FILE_NAME)
    assert listed(run) == gone
    assert not run["finished"]


@pytest.mark.thorough
@pytest.mark.parametrize("unlinks", range(7))
def test_what_a_killed_prune_did_is_listed_by_the_next_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, unlinks: int
) -> None:
    left, real = unlinks, Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= path.suffix == ".co"
        if left < 0:
            raise Broken
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(manifest_module.Journal, "close", lambda self: os.close(self._descriptor))
    with suppress(Broken):
        prune(tree)
    monkeypatch.undo()
    done = gone_and_cut(tree)
    journal_file = tree / f"{FILE_NAME}.journal"
    journal_file.write_bytes(journal_file.read_bytes() + b'{"deleted": {"pa')  # cut while it was written
    assert prune(tree) == Exit.OK
    found = runs(tree / FILE_NAME)
    assert listed(found[0]) == done if any(done) else found[0]["finished"]
    assert not journal_file.exists()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_killed_prune_that_put_zeros_in_place_of_code_is_listed_though_lengths_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    library = tmp_path / "libzeroed.so"
    before = cuda([nv_fatbin([(2, 90, 600)])], data=nv_fatbin([(2, 80, 9000), (2, 90, 700)]))
    library.write_bytes(before)
    real = manifest_module.Journal.announce

    def announce(self: manifest_module.Journal, changes: Any) -> None:
        real(self, changes)
        if not is_replaced:
            raise Broken

    monkeypatch.setattr(manifest_module.Journal, "announce", announce)
    monkeypatch.setattr(manifest_module.Journal, "close", lambda self: os.close(self._descriptor))
    with suppress(Broken):
        main(["prune", str(tmp_path), "--targets", "sm_90"])
    monkeypatch.undo()
    assert library.stat().st_size == len(before)
    assert (library.read_bytes() != before) == is_replaced
    assert main(["prune", str(tmp_path), "--targets", "sm_90"]) == Exit.OK
    first, *more = runs(tmp_path / FILE_NAME)
    assert listed(first) == (set(), {library.name})
    assert first["finished"] != is_replaced
    assert more == []


def test_two_prunes_of_one_tree_do_not_mix(tree: Path) -> None:
    with (
        journal(tree / FILE_NAME, tree, GFX906),
        pytest.raises(ConfigError, match="another prune is running"),
        journal(tree / FILE_NAME, tree, GFX906),
    ):
        pass
    assert gone_and_cut(tree) == (set(), set())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", [
        "{}", "[]", "no json", '{"schema_version": 9, "runs": []}', "[" * 100_000,
        '{"schema_version": 1, "runs": [1e999]}', '{"schema_version": 1, "runs": "abc"}',
        *(f'{{"schema_version": 1, "runs": {"[" * n}{"]" * n}}}' for n in range(100, 1001, 10)),
    ],
)  # fmt: skip
def test_a_list_of_something_else_is_not_overwritten(tree: Path, text: str) -> None:
    (tree / FILE_NAME).write_text(text)
    assert prune(tree) == Exit.DATA
    assert (tree / FILE_NAME).read_text() == text
    assert gone_and_cut(tree) == (set(), set())


@pytest.mark.parametrize("text", ["x\n", "[]\n", "{}\n", '{"root": "/", "targets": []}\n{"deleted": 1}\n'])
def test_a_journal_of_something_else_is_not_overwritten(tree: Path, text: str) -> None:
    path = tree / f"{FILE_NAME}.journal"
    path.write_text(text)
    assert prune(tree) == Exit.DATA
    assert path.read_text() == text
    assert gone_and_cut(tree) == (set(), set())


@pytest.mark.parametrize(
    ("root", "fields"),
    [
        ("a\\u0000b", {}), ("/etc", {"path": "a\0b"}), ("/etc", {"path": "\ud800"}), ("/etc", {"path": 7}),
        ("/etc", {"bytes_before": math.inf}), ("/etc", {"bytes_after": 10**600}),
        ("/etc", {"kept_bytes": {"gfx906": "x"}}), ("/etc", {"kept_bytes": []}),
    ],
)  # fmt: skip
def test_a_planted_journal_with_impossible_values_is_no_traceback(
    tree: Path, root: str, fields: dict[str, Any]
) -> None:
    row = {"path": "passwd", "bytes_before": 1, "bytes_after": 0, "kept_bytes": {}, "removed_bytes": {}}
    text = f'{{"root": "{root}", "targets": []}}\n{json.dumps({"pruned": row | fields})}\n'
    (tree / f"{FILE_NAME}.journal").write_text(text)
    assert prune(tree) == Exit.DATA
    assert gone_and_cut(tree) == (set(), set())


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}.journal"])
@pytest.mark.parametrize("text", [b"\xff\n", b"\0\n", b"[]\n", b"5\n", b"{}\n"])
def test_a_list_that_is_damaged_is_refused_in_words(tree: Path, name: str, text: bytes) -> None:
    (tree / name).write_bytes(text)
    with pytest.raises(DataError) as refused, journal(tree / FILE_NAME, tree, parse_targets("gfx906")):
        raise AssertionError("the prune began")
    assert not re.search("codec|indices|attribute|subscriptable", refused.value.message)
    assert (tree / name).read_bytes() == text


@pytest.mark.parametrize("depth", [300, 900, 950])
def test_a_planted_journal_that_is_nested_deeply_is_no_traceback(tree: Path, depth: int) -> None:
    kept = f'{{"a": {"[" * depth}{"]" * depth}}}'
    row = f'{{"path": "x", "bytes_before": 1, "bytes_after": 0, "kept_bytes": {kept}, "removed_bytes": {{}}}}'
    (tree / f"{FILE_NAME}.journal").write_text(f'{{"root": "/", "targets": []}}\n{{"pruned": {row}}}\n')
    assert prune(tree) == Exit.DATA
    assert gone_and_cut(tree) == (set(), set())


def test_a_journal_that_cannot_be_removed_is_no_traceback(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / f"{FILE_NAME}.journal").touch()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert prune(tree) == Exit.ENVIRONMENT
    assert "can't be removed: Permission denied" in capsys.readouterr().err


def test_a_journal_whose_prune_ends_meanwhile_is_not_listed_twice(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal_file = tree / f"{FILE_NAME}.journal"
    gone = {"path": "gone_gfx803.co", "freed_bytes": 1, "targets": ["gfx803"]}
    head = {"root": str(tree), "targets": ["gfx906"]}
    journal_file.write_text(f"{json.dumps(head)}\n{json.dumps({'deleted': gone})}\n")
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        journal_file.unlink(missing_ok=True)  # its prune closes it between our opening and locking it
        monkeypatch.undo()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert prune(tree) == Exit.OK
    assert "gone_gfx803.co" not in listed(runs(tree / FILE_NAME)[0])[0]
    assert len(runs(tree / FILE_NAME)) == 1


def test_a_journal_that_another_prune_takes_for_a_dead_one_stops_the_first(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        (tree / f"{FILE_NAME}.journal").unlink(missing_ok=True)  # the other one saw it before it was locked
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert prune(tree) == Exit.USAGE
    assert gone_and_cut(tree) == (set(), set())


@pytest.mark.parametrize("fault", [FileNotFoundError, PermissionError])
def test_a_file_that_cannot_be_looked_at_during_the_walk_is_no_traceback(
    tree: Path, monkeypatch: pytest.MonkeyPatch, fault: type[OSError]
) -> None:
    """Another process removes it, its directory may be listed but not searched, or its path is too long."""

    class Entry:
        name = "liba.so"

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            raise fault(errno.EACCES, "no", "liba.so")

    class Listing(list[Entry]):
        def __enter__(self) -> "Listing":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda _: Listing([Entry()]))
    assert prune(tree) == (Exit.OK if fault is FileNotFoundError else Exit.ENVIRONMENT)


@pytest.mark.parametrize(
    "name", [FILE_NAME, f"{FILE_NAME}.journal", f".{FILE_NAME}.tmp", "lib/.liba.so.weir-link"]
)
def test_a_planted_link_leads_no_write_out_of_the_tree(tree: Path, secret: Path, name: str) -> None:
    (tree / name).symlink_to(secret)
    os.link(tree / "lib/liba.so", tree / "lib/libc.so")
    code = prune(tree)
    assert code == (Exit.DATA if name.startswith(FILE_NAME) else Exit.OK)
    assert (tree / name).is_symlink()
    assert (gone_and_cut(tree) == (set(), set())) == (code == Exit.DATA)


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}.journal"])
def test_a_planted_pipe_does_not_stop_a_prune(tree: Path, name: str) -> None:
    os.mkfifo(tree / name)
    assert prune(tree) == Exit.DATA


def test_a_file_that_looks_like_a_temporary_one_of_ours_is_kept(tree: Path) -> None:
    os.link(tree / "lib/liba.so", tree / "lib/libc.so")
    for name in ("liba.so", "libc.so"):
        (tree / f"lib/.{name}.weir-link").write_text("mine")
    assert prune(tree) == Exit.OK
    assert all((tree / f"lib/.{name}.weir-link").read_text() == "mine" for name in ("liba.so", "libc.so"))
    assert (tree / "lib/liba.so").samefile(tree / "lib/libc.so")


def test_what_a_killed_prune_left_beside_a_library_goes_and_what_lives_stays(tree: Path) -> None:
    dead, alive = (tree / f"lib/.weir-{digit * 16}.partial" for digit in "ab")
    dead.write_bytes(b"x")
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert prune(tree) == Exit.OK
    assert (dead.exists(), alive.exists()) == (False, True)


def test_temporary_names_cannot_be_foreseen(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def look(*_: object) -> None:
        seen.append({path.name for path in (tree / "lib").iterdir()})

    monkeypatch.setattr(trees, "verify_prune", look)
    prune_tree(tree, GFX906)
    first, second = ({name for name in names if name.startswith(".")} for names in seen)
    assert len(first | second) == 2


def test_loops_of_links_are_no_traceback(tree: Path) -> None:
    (tree / "lib/loop").symlink_to("loop")
    (tree / "lib/ping").symlink_to("pong/x")
    (tree / "lib/pong").symlink_to("ping/x")
    (tree / "up").symlink_to("../../../../../etc")
    assert prune(tree) == Exit.OK


@pytest.fixture
def deep(tree: Path) -> Iterator[Path]:
    """A tree deeper than Python recurses; pytest couldn't remove it either."""
    here = os.open(tree, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=here)
        here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    yield tree
    for _ in range(1100):
        here, below = os.open("..", os.O_RDONLY, dir_fd=here), here
        os.close(below)
        os.rmdir("d", dir_fd=here)
    os.close(here)


@pytest.mark.thorough
def test_a_deep_tree_is_no_traceback(deep: Path) -> None:
    assert prune(deep) in (Exit.OK, Exit.ENVIRONMENT)


def test_names_bring_no_escape_sequences_to_the_terminal(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "lib/\x1b[2J_gfx803.co").write_bytes(b"x")
    (tree / "lib/\x1b[2J.so").write_bytes(LIBRARY[:5000])
    (tree / "lib/\x1b[3J.so").write_bytes(LIBRARY)
    for more in (["--dry-run"], []):
        prune(tree, *more)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
    assert prune(tree / "lib/\x1b[3J.so") == Exit.OK
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_a_manifest_elsewhere_follows_the_users_own_link(tree: Path, tmp_path: Path) -> None:
    link, real = tmp_path / "list.json", tmp_path / "real.json"
    link.symlink_to(real)
    assert prune(tree, "--manifest", str(link)) == Exit.OK
    assert link.is_symlink()
    assert len(runs(real)) == 1
    assert not (tree / FILE_NAME).exists()


def test_a_directory_that_cannot_be_written_is_said_before_anything_goes(tree: Path) -> None:
    for place in (tree / "no" / "such.json", Path("/proc/weir.json")):
        with pytest.raises((EnvironmentMissing, DataError)), journal(place, tree, GFX906):
            raise AssertionError("the prune must not begin")


def test_an_error_keeps_its_kind_when_the_list_fails_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise EnvironmentMissing("no space left")

    monkeypatch.setattr(manifest_module, "_finished", lambda _result: {"x": 1})
    monkeypatch.setattr(manifest_module, "write_text", no_room)
    with pytest.raises(DataError, match="first") as caught, journal(tree / FILE_NAME, tree, GFX906):
        raise DataError("first")
    assert isinstance(caught.value, ToolError)
    assert "journal" in caught.value.message


@pytest.mark.parametrize(
    ("path", "leads"),
    [
        ("lib", "usr/lib"), ("lib/x", "usr/lib/x"), ("abs/x", "usr/lib/x"), ("usr/up", "etc"), ("loop", None),
        ("out", "etc"), ("lib/../x", "usr/x"), ("a/b", "a/b"), ("grow", None), ("", ""),
    ],
)  # fmt: skip
def test_links_are_followed_as_the_kernel_does_inside_the_root(path: str, leads: str | None) -> None:
    links = Links({
        "lib": "usr/lib", "abs": "/lib", "usr/up": "../etc", "loop": "loop", "out": "../../../etc",
        "grow": "grow/" * 500, "lib/under": "x",
    })  # fmt: skip
    assert links.destination(path) == leads
