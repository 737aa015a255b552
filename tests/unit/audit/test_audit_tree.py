"""The tree that the map is drawn from: no byte lost, sums exact, small enough to keep."""

import json
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_maker import file, tar
from report_maker import BASE, HOSTILE, SERVICE, a_row, audited

from buildtool.audit import treemap
from buildtool.audit.kinds import Kind
from buildtool.audit.treemap import NO_TREE, Tree, TreeCounter, TreeRow, _Nearest

NAMES = st.sampled_from([b"a", b"b", b"c"])
FILES = st.lists(
    st.tuples(
        st.lists(NAMES, max_size=4).map(b"/".join),
        st.integers(1, 100_000),
        st.integers(0, 2),
        st.sampled_from([Kind.LIBRARY, Kind.DATA]),
        st.booleans(),
    ),
    max_size=40,
)


def name_of(owner: int, directory: bytes, layer: int) -> tuple[str, str]:
    return ("deb", f"package {owner}") if owner else ("unowned", "unowned")


def counted(files: list[tuple[bytes, int, int, Kind, bool]]) -> Tree:
    counter = TreeCounter(sum(size for _, size, *_ in files))
    for at, (directory, size, owner, kind, visible) in enumerate(files):
        add = {"layer": at % 2, "owner": owner, "kind": kind, "targets": (), "parts": {}, "visible": visible}
        counter.add(directory, b"f%d" % at, size, **add)  # type: ignore[arg-type]
    return counter.tree(name_of)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(FILES)
def test_layers_groups_and_kinds_stay_exact(files: list[tuple[bytes, int, int, Kind, bool]]) -> None:
    wanted: Counter[tuple[int, str, str]] = Counter()
    for at, (directory, size, owner, kind, _) in enumerate(files):
        wanted[at % 2, name_of(owner, directory, at % 2)[0], kind.value] += size
    found: Counter[tuple[int, str, str]] = Counter()
    for row in counted(files).rows:
        found[row.layer, row.group, row.kind] += row.unpacked_bytes
    assert found == wanted
    assert sum(row.n_files for row in counted(files).rows) == len(files)
    assert sum(row.visible_bytes for row in counted(files).rows) == sum(f[1] for f in files if f[4])


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(FILES)
def test_the_sum_below_every_directory_that_is_named_is_exact(
    files: list[tuple[bytes, int, int, Kind, bool]],
) -> None:
    rows = counted(files).rows
    for path in {row.path for row in rows if not row.is_file}:
        inside = f"{path}/" if path else ""
        below = [row for row in rows if (row.path == path and not row.is_file) or row.path.startswith(inside)]
        true = sum(
            size for directory, size, *_ in files if f"{directory.decode()}/".startswith(inside) or not path
        )
        assert sum(row.unpacked_bytes for row in below) == true


def test_what_is_small_counts_for_the_directory_above_and_small_owners_are_added_up() -> None:
    files = [(b"big", 10_000_000, 1, Kind.DATA, True), (b"big/x/y", 10, 1, Kind.DATA, True)]
    files += [(b"big/z", 10, 2, Kind.DATA, True)]
    rows = counted(files).rows
    assert [(row.path, row.is_file, row.unpacked_bytes) for row in rows] == [
        ("big", False, 10),
        ("big", False, 10),
        ("big/f0", True, 10_000_000),
    ]
    both = counted([*files, (b"big", 10, 2, Kind.DATA, True), (b"big", 10, 1, Kind.DATA, True)]).rows
    small = [row for row in both if not row.is_file and row.layer == 1]
    assert [(row.owner, row.target, row.unpacked_bytes, row.n_files) for row in small] == [("", "", 20, 2)]


def test_code_inside_a_library_is_apart_from_the_library_and_the_file_is_one() -> None:
    counter = TreeCounter(100)
    parts = {(Kind.GPU_CODE, "gfx906"): 60, (Kind.GPU_CODE, "gfx90a"): 30}
    add = {"layer": 0, "owner": 1, "kind": Kind.LIBRARY, "targets": (), "parts": parts, "visible": True}
    counter.add(b"opt", b"lib.so", 100, **add)  # type: ignore[arg-type]
    rows = {(row.kind, row.target): row for row in counter.tree(name_of).rows}
    sizes = {key: row.unpacked_bytes for key, row in rows.items()}
    assert sizes == {("gpu code", "gfx906"): 60, ("gpu code", "gfx90a"): 30, ("shared libraries", ""): 10}
    assert {row.path for row in rows.values()} == {"opt/lib.so"}
    assert sum(row.n_files for row in rows.values()) == 1


def test_the_tree_of_an_image_holds_all_its_bytes_and_shows_the_hidden() -> None:
    report = audited(BASE, SERVICE)
    rows = report.tree.rows
    assert sum(row.unpacked_bytes for row in rows) == report.totals.unpacked_bytes
    assert sum(row.visible_bytes for row in rows) == report.totals.visible_bytes
    hidden = [row for row in rows if row.visible_bytes < row.unpacked_bytes]
    assert [(row.path, row.layer, row.unpacked_bytes) for row in hidden] == [("usr/share/doc/readme", 0, 30)]
    groups: Counter[str] = Counter()
    for row in rows:
        groups[row.group] += row.unpacked_bytes
    assert groups == {name: n for name, n in report.owners.items() if n}


def test_names_in_the_tree_have_no_control_characters() -> None:
    names = [name.encode("utf-8", "surrogateescape") for name in HOSTILE if "\0" not in name]
    report = audited(tar(*(file(name, bytes(50)) for name in names)))
    assert all(row.path.isprintable() for row in report.tree.rows)
    assert len(report.tree.rows) >= len(names)


@pytest.mark.thorough
def test_the_tree_grows_coarser_before_it_grows_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        (
            b"usr/lib/python3/dist-packages/p%d" % (at // 8),
            1000 + (at // 8 % 50) ** 3,
            at % 3,
            Kind.DATA,
            True,
        )
        for at in range(1600)
    ]
    fine = counted(files)
    monkeypatch.setattr(treemap, "MAX_ROWS", 100)
    coarse = counted(files)
    assert len(fine.rows) > 100 >= len(coarse.rows)
    assert coarse.least_bytes > fine.least_bytes
    assert sum(row.unpacked_bytes for row in coarse.rows) == sum(row.unpacked_bytes for row in fine.rows)


def test_the_largest_tree_of_ordinary_names_is_below_three_megabytes() -> None:
    row = a_row("usr/lib/python3/dist-packages/torch/_inductor/codegen/cuda", 123_456_789)
    assert len(json.dumps([asdict(row)], indent=2)) * treemap.MAX_ROWS < 3_000_000


Row = tuple[str, bool, int]


def rows_of(found: Tree) -> list[Row]:
    return [(row.path, row.is_file, row.unpacked_bytes) for row in found.rows]


def some(*files: tuple[bytes, int]) -> list[tuple[bytes, int, int, Kind, bool]]:
    """Files of one layer, owner and kind; `counted` puts every other one into the layer above."""
    empty = (b"empty", 0, 1, Kind.DATA, True)
    return [row for directory, size in files for row in ((directory, size, 1, Kind.DATA, True), empty)]


def test_a_place_is_kept_that_holds_one_in_5000_bytes_of_the_image() -> None:
    large = (b"large", 49_962)
    found = counted(some((b"a", 10), (b"b", 9), (b"c/d", 5), (b"c/d", 5), (b"e/f", 5), (b"e/f", 4), large))
    assert found.least_bytes == 10
    assert rows_of(found) == [
        ("", False, 18),
        ("a/f0", True, 10),
        ("c/d", False, 10),
        ("large/f12", True, 49_962),
    ]
    assert counted(some((b"a", 49_999))).least_bytes == 9
    assert counted(some((b"a", 4999))).least_bytes == 1
    assert counted([]) == NO_TREE == Tree(1, ())


def test_what_small_directories_hold_together_is_kept_at_the_one_above_them() -> None:
    found = counted(some((b"a/b/c", 6), (b"a/b/d", 6), (b"a/e", 3), (b"f", 49_985)))
    assert rows_of(found) == [("a", False, 3), ("a/b", False, 12), ("f/f6", True, 49_985)]


def test_each_directory_on_the_way_to_a_kept_one_is_looked_at_once() -> None:
    steps = 0

    class Counted(bytes):
        def rpartition(self, sep: bytes, /) -> tuple[bytes, bytes, bytes]:  # type: ignore[override]
            nonlocal steps
            steps += 1
            head, slash, tail = super().rpartition(sep)
            return Counted(head), slash, tail

    nearest = _Nearest({b"", b"a"})
    deep = b"a" + b"/d" * 50
    assert (nearest.of(Counted(deep)), steps) == (b"a", 50)
    assert (nearest.of(Counted(deep + b"/e/f")), steps) == (b"a", 52)
    assert (nearest.of(Counted(b"b")), steps) == (b"", 53)


def test_rows_come_by_path_and_the_larger_first() -> None:
    files = [(b"b", 30, 1, Kind.DATA, True), (b"a", 20, 2, Kind.DATA, True), (b"a", 25, 1, Kind.DATA, True)]
    counter = TreeCounter(1)
    for directory, size, owner, kind, visible in files:
        add = {"layer": 0, "owner": owner, "kind": kind, "targets": (), "parts": {}, "visible": visible}
        counter.add(directory, b"x", size, **add)  # type: ignore[arg-type]
    assert [(row.path, row.owner, row.unpacked_bytes) for row in counter.tree(name_of).rows] == [
        ("a/x", "package 1", 25),
        ("a/x", "package 2", 20),
        ("b/x", "package 1", 30),
    ]


def test_the_least_that_is_kept_is_doubled_until_the_rows_are_few_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = some((b"a", 10), (b"b", 20), (b"c", 1000))
    fine = [("a/f0", True, 10), ("b/f2", True, 20), ("c/f4", True, 1000)]
    coarse = [("", False, 30), ("c/f4", True, 1000)]
    coarser = [("", False, 10), ("b/f2", True, 20), ("c/f4", True, 1000)]
    for limit, n, least, rows in (("MAX_ROWS", 3, 32, coarse), ("MAX_PATH_CHARS", 12, 16, coarser)):
        with monkeypatch.context() as patched:
            patched.setattr(treemap, limit, n)
            assert (counted(files).least_bytes, rows_of(counted(files))) == (1, fine)
            patched.setattr(treemap, limit, n - 1)
            assert (counted(files).least_bytes, rows_of(counted(files))) == (least, rows)


def test_a_tree_that_can_not_grow_small_enough_ends_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(treemap, "MAX_ROWS", 0)
    found = counted(some((b"a", 1000), (b"b", 24)))
    assert (found.least_bytes, rows_of(found)) == (2048, [("", False, 1024)])


@pytest.mark.thorough
def test_a_tree_of_more_than_8000_rows_or_two_million_characters_is_made_coarser() -> None:
    def finest(n_files: int, prefix: bytes = b"") -> int:
        counter = TreeCounter(n_files)
        for at in range(n_files):
            add = {"layer": 0, "owner": 1, "kind": Kind.DATA, "targets": (), "parts": {}, "visible": True}
            counter.add(b"", prefix + b"%05d" % at, 1, **add)  # type: ignore[arg-type]
        return counter.tree(name_of).least_bytes

    assert finest(8001) == finest(500, b"x" * 3996) == 2
    assert finest(500, b"x" * 3995) == 1


def test_a_row_shows_all_of_a_file() -> None:
    counter = TreeCounter(100)
    parts = {(Kind.GPU_CODE, "gfx906"): 60}
    for layer, visible in ((0, False), (1, True)):
        counter.add(
            b"opt",
            b"k\xff.so",
            100,
            layer=layer,
            owner=1,
            kind=Kind.LIBRARY,
            targets=("a", "b"),
            parts=parts,
            visible=visible,
        )
    path = "opt/k\\xff.so"
    assert set(counter.tree(name_of).rows) == {
        TreeRow(path, True, 0, "deb", "package 1", "gpu code", "gfx906", 60, 0, 0),
        TreeRow(path, True, 0, "deb", "package 1", "shared libraries", "a+b", 40, 0, 1),
        TreeRow(path, True, 1, "deb", "package 1", "gpu code", "gfx906", 60, 60, 0),
        TreeRow(path, True, 1, "deb", "package 1", "shared libraries", "a+b", 40, 40, 1),
    }


def test_several_small_owners_of_a_place_are_one_row_and_a_large_or_single_one_is_its_own() -> None:
    def owners(*sizes: int) -> list[tuple[str, int, int]]:
        counter = TreeCounter(50_000)  # 10 bytes are the least that is kept
        for owner, size in enumerate(sizes, 1):
            for part in (size // 2, size - size // 2):
                add = {
                    "layer": 0,
                    "owner": owner,
                    "kind": Kind.DATA,
                    "targets": (),
                    "parts": {},
                    "visible": True,
                }
                counter.add(b"d", b"x%d" % owner, part, **add)  # type: ignore[arg-type]
        return [(row.owner, row.unpacked_bytes, row.n_files) for row in counter.tree(name_of).rows]

    assert owners(12, 9) == [("package 1", 12, 2), ("package 2", 9, 2)]
    assert owners(12, 9, 8) == [("", 17, 4), ("package 1", 12, 2)]
    assert owners(10, 9, 8) == [("", 17, 4), ("package 1", 10, 2)]
    assert owners(12, 10, 8) == [("package 1", 12, 2), ("package 2", 10, 2), ("package 3", 8, 2)]
