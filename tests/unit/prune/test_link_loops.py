"""Symbolic links in a circle are no obstacle to pruning a tree."""

from pathlib import Path

from buildtool.gpucode.target import TargetId
from buildtool.prune.trees import prune_tree


def test_links_in_a_circle_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("/a")
    (tmp_path / "directory").symlink_to(".")
    (tmp_path / "f").write_bytes(b"x")
    result = prune_tree(tmp_path, (TargetId("gfx1100"),))
    assert not result.deleted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "directory", "f", "loop"]
