"""Keep-lists: the same runs give the same file, runs merge, and what isn't one is refused by line."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from buildtool.core.errors import DataError
from buildtool.keep.keep_list import KeepList, is_line, merge_into, read_keep_list
from buildtool.keep.margin import Node, Tree


def test_runs_merge_into_the_same_file_in_either_order(tmp_path: Path) -> None:
    runs = ["/b", "/a/ä", "/a/x y"], ["/b", "/a", "torch.onnx"]
    texts = []
    for name, order in (("one", runs), ("two", runs[::-1])):
        for lines in order:
            keep, _ = merge_into(tmp_path / name, lines)
        assert read_keep_list(tmp_path / name) == keep
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    before = (tmp_path / "one").stat().st_mtime_ns
    assert merge_into(tmp_path / "one", runs[0])[1] == 0
    assert (tmp_path / "one").stat().st_mtime_ns == before, "nothing new: the file stays as it is"


def test_runs_that_end_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    lines = [f"/{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda line: merge_into(tmp_path / "new" / "keep", [line]), lines))
    assert read_keep_list(tmp_path / "new" / "keep").lines == frozenset(lines)


@pytest.mark.parametrize(
    "text", ["/a\nusr/bin/x\n", "/a\n/b\x1b[31m\n", "/a\rb\n", "- /a\n", "/a\n.relative\n", "/b\u2028\n"]
)
def test_what_is_no_path_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "keep").write_bytes(text.encode())
    with pytest.raises(DataError, match=r"keep, line \d") as refused:
        read_keep_list(tmp_path / "keep")
    assert "\x1b" not in str(refused.value)


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    (tmp_path / "keep").write_bytes(b"# mine\r\n/a\r\ntorch.onnx\r\n")
    kept = read_keep_list(tmp_path / "keep")
    assert kept == KeepList(frozenset({"/a", "torch.onnx"}), comments=("# mine",))


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keep").write_bytes(b"\xff\xfe")
    for name in ("keep", "absent"):
        with pytest.raises(DataError, match=name):
            read_keep_list(tmp_path / name)


def test_lines_name_files_directories_and_patterns() -> None:
    files = frozenset({"a/b", "a/c.py", "d/e/f", "odd[1].py", "odd1.py"})
    keep = KeepList(frozenset({"/a/*.py", "/d", "/odd[1].py", "/none", "torch"}))
    assert keep.select(files) == (frozenset({"a/c.py", "d/e/f", "odd[1].py"}), ("/none",))
    assert keep.modules == ("torch",)


def test_paths_through_links_name_what_they_lead_to_and_restored_ones_have_to_be_there() -> None:
    links = {"lib": Node("link", target="usr/lib"), "usr/lib/a": Node("link", target="b")}
    tree = Tree({**links, "usr/lib/b": Node("file"), "usr/lib/x/y": Node("file")})
    keep = KeepList(frozenset({"/lib/a", "/lib/x/"}))
    assert keep.select(tree.files, tree.resolve) == ({"usr/lib/b", "usr/lib/x/y"}, ())
    keep.restoring(["/lib/b"]).select(tree.files, tree.resolve)
    with pytest.raises(DataError, match="no /lib/misspelt"):
        keep.restoring(["/lib/misspelt"]).select(tree.files, tree.resolve)


def test_comments_of_a_list_stay_when_a_run_adds_to_it(tmp_path: Path) -> None:
    path = tmp_path / "keep"
    path.write_text("# for the night shift\n/b\n# until March\n")
    for line in ("/a", "/c"):
        merge_into(path, [line])
    own = "# for the night shift\n# until March\n/a\n/b\n/c\n"
    assert path.read_text().partition("\n")[2] == own


@pytest.mark.thorough
def test_a_long_list_of_another_image_is_not_compared_with_every_path() -> None:
    files = frozenset(f"lib/{number}/x" for number in range(20_000))
    keep = KeepList(frozenset(f"/gone/{number}" for number in range(50_000)) | {"/lib/77"})
    chosen, unused = keep.select(files)
    assert chosen == {"lib/77/x"}
    assert len(unused) == 50_000
    with pytest.raises(DataError, match="1,001 patterns"):
        KeepList(frozenset(f"/*{number}" for number in range(1001))).select(files)


def test_keys_of_gpu_code_are_lines_and_no_modules() -> None:
    line = "gpu-code:" + "a" * 64
    assert is_line(line)
    assert not is_line(line[:-1])
    keep = KeepList(frozenset({line, "torch"}))
    assert (keep.modules, keep.gpu_code) == (("torch",), frozenset({"a" * 64}))


@pytest.mark.parametrize("text", ["a/b", "", "/a\nb", "a..b", "1a", "--x", "/\u202e"])
def test_what_no_line_can_hold_is_none(text: str) -> None:
    assert not is_line(text)
