"""Two images side by side."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from report_maker import HOSTILE, a_finding, a_row, small_report, with_findings, with_tree

from buildtool.audit.diff import Change, diff, render_diff_markdown, render_diff_table
from buildtool.audit.packages import PackageRow
from buildtool.audit.report import GpuCode, to_json
from buildtool.audit.treemap import NO_TREE
from buildtool.cli import diff as command
from buildtool.core.errors import ConfigError


def package(name: str, version: str, n_bytes: int) -> PackageRow:
    return PackageRow("deb", name, version, "", n_bytes, n_bytes, 1)


def test_an_image_differs_in_nothing_from_itself() -> None:
    found = diff(small_report(), small_report())
    lists = (found.owners, found.kinds, found.gpu_code, found.packages, found.places, found.findings)
    assert lists == ((),) * 6


def test_owners_kinds_and_gpu_code_are_compared_the_largest_difference_first() -> None:
    before = replace(
        small_report(), owners={"deb": 5, "python": 7, "same": 1}, gpu_code=GpuCode({"gfx906": 9}, {})
    )
    after = replace(small_report(), owners={"deb": 6, "conda": 100, "same": 1}, gpu_code=GpuCode({}, {}))
    found = diff(before, after)
    assert found.owners == (Change("conda", None, 100), Change("python", 7, None), Change("deb", 5, 6))
    assert [row.delta_bytes for row in found.owners] == [100, -7, 1]
    assert found.gpu_code == (Change("gfx906", 9, None),)


def test_a_changed_version_is_reported_even_at_equal_bytes() -> None:
    before = replace(
        small_report(), packages=(package("a", "1", 5), package("b", "1", 5), package("c", "1", 5))
    )
    after = replace(
        small_report(), packages=(package("a", "2", 5), package("b", "1", 5), package("d", "1", 5))
    )
    assert set(diff(before, after).packages) == {
        Change("a (deb)", 5, 5, "1 -> 2"),
        Change("c (deb)", 5, None, "1 -> none"),
        Change("d (deb)", None, 5, "none -> 1"),
    }


def test_places_are_reported_where_the_change_is_and_not_at_every_directory_above() -> None:
    before = with_tree(a_row("usr/lib", 100), a_row("usr/lib/x/big.so", 1000, is_file=True))
    after = with_tree(
        a_row("usr/lib", 105), a_row("usr/lib/x/big.so", 3000, is_file=True), a_row("opt/new", 50)
    )
    assert diff(before, after).places == (
        Change("usr/lib/x/big.so", 1000, 3000),
        Change("opt/new", None, 50),
    )


def test_a_directory_is_reported_where_several_things_in_it_changed() -> None:
    after = with_tree(a_row("lib/a", 60), a_row("lib/b", 40))
    names = [row.name for row in diff(with_tree(a_row("lib", 1)), after).places]
    assert names == ["lib", "lib/a", "lib/b"]


def test_reports_without_places_are_compared_by_the_rest() -> None:
    found = diff(replace(small_report(), tree=NO_TREE), small_report())
    assert found.least_bytes is None
    assert "places can't be compared" in render_diff_table(found)


def test_findings_are_summed_by_id() -> None:
    found = diff(
        with_findings(a_finding(n_bytes=1), a_finding(n_bytes=2)), with_findings(a_finding(n_bytes=9))
    )
    assert found.findings == (Change("caches", 3, 9),)


def test_the_table_has_both_sides_and_says_what_it_leaves_out() -> None:
    owners = {f"owner{n}": 10**n for n in range(5)}
    text = render_diff_table(
        diff(replace(small_report(), owners={}), replace(small_report(), owners=owners)), 3
    )
    assert ["owner4", "-", "10.00", "kB", "+10.00", "kB"] in [line.split() for line in text.splitlines()]
    assert "... and 2 more" in text
    assert "unpacked" in text


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\udc80" not in name])
def test_names_break_no_table_of_the_markdown(name: str) -> None:
    plain, hostile = (
        render_diff_markdown(diff(small_report(), replace(small_report(), owners={one: 5})))
        for one in ("name", name)
    )
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert "<script" not in hostile
    assert "<img" not in hostile


def test_the_verb_reads_saved_reports_and_writes_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, report in (("a", with_findings()), ("b", with_findings(a_finding()))):
        (tmp_path / f"{name}.json").write_text(to_json(report))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--markdown", str(tmp_path / "d.md")]
    assert command.run(parser.parse_args(words)) == 0
    assert "caches" in capsys.readouterr().out
    assert "| caches" in (tmp_path / "d.md").read_text()
    with pytest.raises(ConfigError, match="is not a count"):
        command.run(parser.parse_args([*words, "--top", "-1"]))


def test_what_a_side_lacks_counts_as_nothing_in_a_change() -> None:
    changes = (Change("x", None, 5), Change("x", 5, None), Change("x", 7, 5), Change("x", None, None))
    assert [row.delta_bytes for row in changes] == [5, -5, -2, 0]


def test_equal_differences_are_reported_in_the_order_of_their_names() -> None:
    names = ("b", "d", "a", "e", "c")
    found = diff(replace(small_report(), kinds={}), replace(small_report(), kinds=dict.fromkeys(names, 5)))
    assert [row.name for row in found.kinds] == sorted(names)


def test_packages_of_one_name_are_added_up_and_reported_with_all_their_versions() -> None:
    before = replace(small_report(), packages=(package("a", "2", 5), package("a", "1", 6)))
    pip = replace(package("a", "2", 5), manager="pip")
    after = replace(small_report(), packages=(package("a", "2", 7), pip))
    assert diff(before, after).packages == (
        Change("a (pip)", None, 5, "none -> 2"),
        Change("a (deb)", 11, 7, "1, 2 -> 2"),
    )
    larger = replace(small_report(), packages=(package("a", "2", 8), package("a", "1", 6)))
    assert diff(before, larger).packages == (Change("a (deb)", 11, 14, "1, 2"),)


def test_a_directory_is_left_out_where_nine_tenths_of_its_change_are_one_thing() -> None:
    def names(child: int, whole: int) -> list[str]:
        after = with_tree(a_row("lib/a", child), a_row("lib", whole - child))
        before = with_tree(a_row("other", 1))
        grown, shrunk = diff(before, after).places, diff(after, before).places
        assert [row.name for row in shrunk] == [row.name for row in grown]
        return [row.name for row in grown]

    assert names(90, 100) == ["lib/a"]
    assert names(89, 100) == ["lib", "lib/a"]


def test_places_need_what_the_coarser_of_both_reports_keeps() -> None:
    before = with_tree(a_row("a/x", 100), a_row("b/x", 100), least_bytes=10)
    after = with_tree(a_row("a/x", 150), a_row("b/x", 149), least_bytes=50)
    found = diff(before, after)
    assert found.places == (Change("a/x", 100, 150),)
    assert found.least_bytes == 50
    assert diff(after, before).least_bytes == 50


def test_a_diff_holds_both_reports() -> None:
    before, after = with_findings(a_finding()), small_report()
    found = diff(before, after)
    assert (found.before, found.after) == (before, after)
