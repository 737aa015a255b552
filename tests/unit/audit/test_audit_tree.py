"""The tree that the map is drawn from: no byte lost, sums exact, small enough to keep."""

import json
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_maker import file, tar
from report_maker import BASE, HOSTILE, SERVICE, a_row, audited

from buildtool.audit import tree
from buildtool.audit.kinds import Kind
from buildtool.audit.tree import Tree, TreeCounter

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
    for at, (directory, size, owner, kind, shown) in enumerate(files):
        add = {"layer": at % 2, "owner": owner, "kind": kind, "targets": (), "parts": {}, "shown": shown}
        counter.add(directory, b"f%d" % at, size, **add)  # type: ignore[arg-type]
    return counter.tree(name_of)


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
    assert [(row.owner, row.unpacked_bytes, row.n_files) for row in small] == [("", 20, 2)]


def test_code_inside_a_library_is_apart_from_the_library_and_the_file_is_one() -> None:
    counter = TreeCounter(100)
    parts = {(Kind.GPU_CODE, "gfx906"): 60, (Kind.GPU_CODE, "gfx90a"): 30}
    add = {"layer": 0, "owner": 1, "kind": Kind.LIBRARY, "targets": (), "parts": parts, "shown": True}
    counter.add(b"opt", b"lib.so", 100, **add)  # type: ignore[arg-type]
    rows = {(row.kind, row.target): row for row in counter.tree(name_of).rows}
    sizes = {key: row.unpacked_bytes for key, row in rows.items()}
    assert sizes == {("gpu code", "gfx906"): 60, ("gpu code", "gfx90a"): 30, ("shared libraries", ""): 10}
    assert {row.path for row in rows.values()} == {"opt/lib.so"}
    assert sum(row.n_files for row in rows.values()) == 1


def test_the_tree_of_an_image_holds_all_its_bytes_and_tells_the_hidden() -> None:
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
    monkeypatch.setattr(tree, "MAX_ROWS", 100)
    coarse = counted(files)
    assert len(fine.rows) > 100 >= len(coarse.rows)
    assert coarse.least_bytes > fine.least_bytes
    assert sum(row.unpacked_bytes for row in coarse.rows) == sum(row.unpacked_bytes for row in fine.rows)


def test_the_largest_tree_of_ordinary_names_is_below_three_megabytes() -> None:
    row = a_row("usr/lib/python3/dist-packages/torch/_inductor/codegen/cuda", 123_456_789)
    assert len(json.dumps([asdict(row)], indent=2)) * tree.MAX_ROWS < 3_000_000
