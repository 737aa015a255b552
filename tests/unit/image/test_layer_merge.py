"""Layers merged by the OCI rules, checked rule by rule; `test_layer_merge_model` checks random ones."""

import pytest
from image_maker import chunks, file, folder, hardlink, symlink, tar

from buildtool.image import merge as merging
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedTar
from buildtool.image.layer import LayerIndex, index_layer, split_path
from buildtool.image.merge import Finder, Merged, merge
from buildtool.image.tar import TarReader


def layer(*members: bytes) -> LayerIndex:
    return index_layer(TarReader(chunks(tar(*members)), place="t"), place="t")


def merged(*layers: tuple[bytes, ...]) -> Merged:
    return merge([layer(*members) for members in layers])


def shown(result: Merged) -> dict[str, int]:
    return {
        result.path(row).decode(): result.size(row)
        for row in range(len(result.content_visible))
        if result.content_visible[row]
    }


def visible(result: Merged) -> set[str]:
    return {result.path(row).decode() for row, seen in enumerate(result.visible) if seen}


def test_a_later_layer_replaces_a_file() -> None:
    assert shown(merged((file("a", b"1"), file("b", b"22")), (file("a", b"333"),))) == {"a": 3, "b": 2}


def test_a_whiteout_hides_a_file_and_a_directory_below() -> None:
    below = (folder("d"), file("d/x", b"1"), file("a", b"1"), file("ab", b"1"))
    assert shown(merged(below, (file(".wh.d"), file(".wh.a")))) == {"ab": 1}


def test_whiteouts_speak_of_lower_layers_wherever_they_stand() -> None:
    for upper in (
        (file("d/new", b"1"), file("d/.wh..wh..opq")),
        (file("d/.wh..wh..opq"), file("d/new", b"1")),
    ):
        assert shown(merged((folder("d"), file("d/old", b"1")), upper)) == {"d/new": 1}
    for upper in ((file("a", b"22"), file(".wh.a")), (file(".wh.a"), file("a", b"22"))):
        assert shown(merged((file("a", b"1"),), upper)) == {"a": 2}


def test_a_whiteout_of_what_is_not_there_does_nothing() -> None:
    assert shown(merged((file("a", b"1"),), (file(".wh.b"), file("x/.wh.y"), file("x/.wh..wh..opq")))) == {
        "a": 1
    }


def test_a_bare_whiteout_is_malformed() -> None:
    with pytest.raises(MalformedTar, match="names nothing"):
        layer(file("d/.wh."))


def test_bookkeeping_of_aufs_is_no_content() -> None:
    assert layer(folder(".wh..wh.plnk"), file(".wh..wh.aufs", b"x")).n_entries == 0


def test_a_file_replaces_a_directory_and_the_other_way_round() -> None:
    assert shown(merged((folder("d"), file("d/x", b"1")), (file("d", b"22"),))) == {"d": 2}
    assert shown(merged((file("d", b"22"),), (folder("d"), file("d/x", b"1")))) == {"d/x": 1}
    assert shown(merged((file("d", b"22"),), (file("d/x", b"1"),))) == {"d/x": 1}


def test_a_directory_over_a_directory_keeps_its_content() -> None:
    assert shown(merged((folder("d"), file("d/x", b"1")), (folder("d"),))) == {"d/x": 1}


def test_parents_are_followed_through_links() -> None:
    base = (folder("usr/lib"), symlink("lib", "usr/lib"), file("usr/lib/x", b"1"))
    assert shown(merged(base, (file("lib/x", b"22"),))) == {"lib/x": 2}
    assert shown(merged(base, (file("lib/.wh.x"),))) == {}
    assert shown(merged((*base, symlink("a", "/lib/../../lib")), (file("a/.wh.x"),))) == {}


def test_a_directory_in_the_place_of_a_link_replaces_it() -> None:
    base = (folder("usr/lib"), symlink("lib", "usr/lib"), file("usr/lib/x", b"1"))
    assert shown(merged(base, (folder("lib"), file("lib/x", b"22")))) == {"usr/lib/x": 1, "lib/x": 2}


def test_a_link_that_a_directory_replaces_does_not_lead_whiteouts_elsewhere() -> None:
    base = (symlink("a", "c"), folder("c"), file("c/x", b"1"))
    assert shown(merged(base, (folder("a"), file("a/.wh..wh..opq"), file("a/y", b"22")))) == {
        "c/x": 1,
        "a/y": 2,
    }
    assert shown(merged(base, (folder("a"), file("a/.wh.x")))) == {"c/x": 1}
    assert shown(merged(base, (file("a/.wh.x"),))) == {}


@pytest.mark.parametrize(
    ("base", "upper"),
    [
        ((symlink("a", "c"), file("c/b/x", b"1")), (folder("a"), file("a/b/.wh.x"))),
        ((symlink("d/e/l", "/c"), file("c/x", b"1")), (folder("d/e/l"), file("d/e/l/.wh.x"))),
        (
            (file("d/k/z"), symlink("d/l", "/c"), file("c/x", b"1")),
            (folder("d/l"), file("d/k/.wh.z"), file("d/l/.wh.x")),
        ),
    ],
)
def test_a_link_on_any_level_that_a_directory_replaces_does_not_lead_whiteouts_elsewhere(
    base: tuple[bytes, ...], upper: tuple[bytes, ...]
) -> None:
    assert sum(shown(merged(base, upper)).values()) == 1


def test_a_link_that_its_own_layer_replaces_leads_nowhere_afterwards() -> None:
    base = (folder("d"), symlink("l", "d"))
    for again in (folder("l"), file("l", b"22")):
        assert visible(merged(base, (file("l/x", b"1"), again, file("l/y", b"1")))) == {"l/x", "l/y"}
        result = merged(base, (file("l/x", b"1"), again, file("l/y", b"1")))
        assert (Finder(result).names(b"d"), Finder(result).names(b"l")) == ((b"x",), (b"y",))


def test_a_member_that_replaces_the_link_in_its_own_path_changes_where_the_next_one_goes() -> None:
    result = merged((symlink("l", "."),), (file("l/l", b"1"), file("l/y", b"1")))
    assert (Finder(result).names(b""), Finder(result).names(b"l")) == ((b"l",), (b"y",))


def test_a_path_without_links_is_found_without_descending_name_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = merged((file("a/b/c/x", b"1"),))
    monkeypatch.delattr(merging._Walker, "_descend")
    assert Finder(result).row(b"a/b/c/x") == 0


def test_new_directories_beside_one_another_are_made_without_descending_to_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descended = []
    descend = merging._Walker._descend

    def counted(self: merging._Walker, directory: bytes) -> object:
        descended.append(directory)
        return descend(self, directory)

    monkeypatch.setattr(merging._Walker, "_descend", counted)
    result = merged(tuple(file(f"a/b/{n}/x") for n in range(50)))
    assert (len(Finder(result).names(b"a/b")), descended) == (50, [b"a/b/0"])
    descended.clear()
    assert sum(merged((file("a/x"), file("a/b/x"), file("a/b/c/x"), file("a/y"))).visible) == 4
    assert descended == [b"a"]


def test_links_in_a_circle_are_malformed() -> None:
    with pytest.raises(MalformedTar, match="circle"):
        merged((symlink("a", "b"), symlink("b", "a")), (file("a/x", b"1"),))


def test_a_hard_link_keeps_the_content_of_a_removed_path() -> None:
    result = merged((file("a", b"333"), hardlink("b", "a")), (file(".wh.a"),))
    assert visible(result) == {"b"}
    assert shown(result) == {"a": 3}


def test_content_is_waste_when_all_its_links_are_gone() -> None:
    assert shown(merged((file("a", b"333"), hardlink("b", "a")), (file(".wh.a"), file("b", b"1")))) == {
        "b": 1
    }


def test_hard_links_cross_layers_and_chain() -> None:
    result = merged(
        (file("a", b"333"),), (hardlink("b", "./a"),), (hardlink("c", "b"), file(".wh.a"), file(".wh.b"))
    )
    assert shown(result) == {"a": 3}
    assert result.dangling == ()


def test_a_hard_link_to_what_the_layer_has_removed_before_is_another_whiteout() -> None:
    """On overlayfs, where the target's place holds a device that stands for nothing (tried in containerd)."""
    below = (file("f", b"22"), file("g", b"333"), file("n", b"1"))
    for upper in (
        (file(".wh.f"), hardlink("g", "f")),
        (file(".wh.f"), hardlink("k", "./f"), hardlink("g", "k")),
    ):
        result = merged(below, upper)
        assert shown(result) == {"n": 1}
        assert visible(result) == {"n"}
        assert result.dangling == ()
    assert shown(merged(below, (file(".wh.f"), file("f", b"4444"), hardlink("g", "f")))) == {"f": 4, "n": 1}


def test_hard_links_to_nothing_are_counted() -> None:
    assert len(merged((hardlink("b", "../../etc/passwd"),)).dangling) == 1


@pytest.mark.parametrize(
    ("target", "content"),
    [
        *(("../a", 1), ("../../a", 1), ("/../a", 1), ("missing/../a", 1), ("a/../a", 1), ("a/", 1)),
        *(("d/e/../../a", 1), ("l/../a", 2), ("../l/../a", 2), ("l/../../a", 1), ("./../d/a", 2)),
    ],
)
def test_hard_links_that_lead_upwards_end_where_engines_end(target: str, content: int) -> None:
    base = (file("a", b"1"), folder("d/e"), file("d/a", b"22"), symlink("l", "d/e"))
    for result in (merged((*base, hardlink("d/e/h", target))), merged(base, (hardlink("d/e/h", target),))):
        assert [result.size(row) for row in result.links.values()] == [content]
        assert result.dangling == ()


@pytest.mark.parametrize("target", ["", ".", "..", "d", "d/..", "../none", "l/../../../none"])
def test_hard_links_to_directories_or_nothing_dangle(target: str) -> None:
    base = (folder("d/e"), symlink("l", "d/e"))
    assert len(merged((*base, hardlink("h", target))).dangling) == 1


def test_a_hard_link_to_a_symbolic_link_is_followed_like_it() -> None:
    base = (folder("d"), symlink("l", "d"), hardlink("h", "l"))
    result = merged(base, (file("h/x", b"1"), file("d/y", b"1"), file("h/.wh.z")), (file("h/.wh.y"),))
    assert {path: size for path, size in shown(result).items() if size} == {"h/x": 1}
    assert isinstance(result.tree[b"h"], int)
    assert Finder(result).row(b"h/x") == Finder(result).row(b"d/x") is not None


def test_links_to_what_is_not_there_make_its_directory_and_none_on_the_way() -> None:
    result = merged((symlink("l", "none/../d"), file("l/x", b"1")))
    assert set(result.tree) == {b"l", b"d"}


def test_of_doubled_paths_in_one_layer_the_last_counts() -> None:
    assert shown(merged((file("a", b"1"), file("./a", b"22"), file("/a", b"333")))) == {"/a".strip("/"): 3}


def test_paths_stay_inside_the_root() -> None:
    assert split_path(b"../../etc/../x//./y") == (b"x", b"y")
    assert split_path(b"/..") == (b"", b"")
    assert visible(merged((file("../../evil", b"1"), file("/abs//f/./g", b"1")))) == {"evil", "abs/f/g"}


def test_a_path_is_found_through_links() -> None:
    result = merged((folder("usr/lib"), symlink("lib", "usr/lib"), file("usr/lib/x", b"1"), folder("d")))
    finder = Finder(result)
    assert finder.row(b"lib/x") == finder.row(b"usr/lib/x") is not None
    assert finder.row(b"d") is None
    assert finder.row(b"no/such") is None


def test_what_a_directory_holds_is_found_and_nothing_for_what_is_no_directory() -> None:
    finder = Finder(merged((folder("d/e"), file("d/x", b"1"), symlink("l", "d"), file("f"))))
    assert sorted(finder.names(b"d")) == sorted(finder.names(b"l")) == [b"e", b"x"]
    assert sorted(finder.names(b"")) == [b"d", b"f", b"l"]
    assert finder.names(b"f") == finder.names(b"none") == finder.names(b"d/x/y") == ()
    assert finder.row(b"f/x") is finder.row(b"") is None


def test_a_directory_beyond_the_longest_path_is_not_looked_for() -> None:
    """Package lists are data from strangers: a line of megabytes names nothing that could be there."""
    finder = Finder(merged((folder("d"), file("d/x", b"1"))))
    longest = b"d/" + b"./" * ((LIMITS.path_bytes - 4) // 2) + b"."
    assert (len(longest), finder.row(longest + b"/x")) == (LIMITS.path_bytes - 1, 1)
    assert finder.row(longest + b"//x") is None


def test_directories_that_a_list_names_are_forgotten_before_they_fill_the_memory() -> None:
    finder = Finder(merged((file("d/x", b"1"),)))
    held = []
    for n in range(20_001):
        finder.row(b"%d/x" % n)
        held.append(len(finder._known))
    assert (max(held), held[-1]) == (20_000, 1)
    assert finder.row(b"d/x") == 0


def test_names_in_the_targets_of_links_are_counted_to_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = merged((folder("a/b"), file("a/b/x", b"1"), symlink("l", "a/./b")))
    for steps, found in ((6, 1), (5, None)):
        monkeypatch.setattr(merging, "LIMITS", Limits(link_steps=steps))
        finder = Finder(result)
        assert finder.row(b"l/x") == 1
        if found:
            assert finder.row(b"l/../b/x") == found
        else:
            with pytest.raises(LimitExceeded, match=r"more than 5 names") as told:
                finder.row(b"l/../b/x")
            assert told.value.place == "b'l/../b'"


def test_a_circle_is_reported_by_the_directory_that_leads_into_it() -> None:
    with pytest.raises(MalformedTar) as told:
        merged((symlink("a", "b"), symlink("b", "a")), (file("d/../a/x", b"1"), file("a/y/x", b"1")))
    assert told.value.place == "b'a'"


def test_content_is_shown_where_a_file_holds_it_and_not_where_a_link_does() -> None:
    result = merged((symlink("l", "a"), hardlink("h", "l"), hardlink("none", "x"), hardlink("too", "none")))
    assert (list(result.visible), list(result.content_visible)) == ([1] * 4, [0] * 4)
    assert (result.links, result.dangling) == ({1: 0, 3: 2}, (2,))
