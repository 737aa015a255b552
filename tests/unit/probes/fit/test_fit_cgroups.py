"""Groups for trials: where they are made, with what limit, and that a limit of our own isn't escaped."""

import os
from pathlib import Path

import pytest

from probes.core.unknown import Unknown
from probes.fit.limits import NAME, V1, V2, Parent, group, parent


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_version_1_makes_groups_below_its_own(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/user/me\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/user/me/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    found = parent(root)
    assert found == Parent(root / "sys/fs/cgroup/memory/user/me", V1)


def test_version_1_in_a_container_makes_groups_at_the_mount(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "629145600",
        },
    )
    assert parent(root) == Parent(root / "sys/fs/cgroup/memory", V1)


def version_2(root: Path, limit: str) -> Path:
    return tree(
        root,
        {
            "proc/self/cgroup": "0::/slice/me\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/cgroup.subtree_control": "cpu memory",
            "sys/fs/cgroup/slice/cgroup.subtree_control": "",
            "sys/fs/cgroup/slice/memory.max": "max",
            "sys/fs/cgroup/slice/me/cgroup.subtree_control": "",
            "sys/fs/cgroup/slice/me/memory.max": limit,
        },
    )


def test_version_2_makes_groups_where_the_memory_controller_is_handed_down(tmp_path: Path) -> None:
    root = version_2(tmp_path, "max")
    assert parent(root) == Parent(root / "sys/fs/cgroup", V2)


def test_a_trial_does_not_escape_the_limit_of_our_own_group(tmp_path: Path) -> None:
    assert isinstance(parent(version_2(tmp_path, "1073741824")), Unknown)


def test_without_a_memory_controller_there_is_a_reason(tmp_path: Path) -> None:
    found = parent(tree(tmp_path, {"proc/self/cgroup": "0::/\n"}))
    assert isinstance(found, Unknown)
    assert "cgroup" in found.reason


def test_a_group_whose_name_is_no_text_is_found(tmp_path: Path) -> None:
    own = Path(os.fsdecode(b"m\xfc\x85 e"))
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            f"sys/fs/cgroup/memory/{own}/memory.limit_in_bytes": "9223372036854771712",
            "proc/self/status": "",
        },
    )
    (root / "proc/self/cgroup").write_bytes(b"4:memory:/m\xfc\x85 e\n0::/\n")
    assert parent(root) == Parent(root / "sys/fs/cgroup/memory" / own, V1)


def test_a_hostile_path_of_our_own_group_leads_nowhere(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {"proc/self/cgroup": "4:memory:/../../etc\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1"},
    )
    assert isinstance(parent(root), Unknown)


@pytest.mark.parametrize(("files", "swap"), [(V2, "0"), (V1, "4096")])
def test_a_group_has_the_budget_as_its_limit_and_no_swap(tmp_path: Path, files: object, swap: str) -> None:
    below = Parent(tmp_path, V2 if files == V2 else V1)
    with group(below, 4096, 1) as made:
        assert (made.path / made.files.limit).read_text() == "4096"
        assert (made.path / made.files.swap).read_text() == swap
        assert made.kills() == 0
        (made.path / made.files.kills).write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
        assert made.kills() == 2
        assert made.path.name.startswith(NAME)
