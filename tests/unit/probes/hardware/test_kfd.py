"""The KFD topology, as both programs read it."""

from pathlib import Path

from probe_trees import lay, node

from probes.hardware import sysfs

SIMDS = {"simd_count": 64}


def test_processors_and_cards_without_a_name_are_no_targets(tmp_path: Path) -> None:
    tree = node(0, simd_count=0, gfx_target_version=0)
    tree |= node(1, **SIMDS, gfx_target_version=90010) | node(2, **SIMDS, gfx_target_version=80003)
    tree |= node(3, **SIMDS, gfx_target_version=0) | node(4, **SIMDS, gfx_target_version=90010)
    root = lay(tmp_path, tree)
    assert sysfs.kfd_targets(root) == ("gfx803", "gfx90a")
    assert [place.name for place, _ in sysfs.kfd_gpus(root)] == ["1", "2", "3", "4"]


def test_a_machine_without_the_driver_has_no_targets(tmp_path: Path) -> None:
    assert sysfs.kfd_targets(tmp_path) == ()
    assert sysfs.properties(tmp_path) == {}


def test_a_property_without_a_value_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "properties").write_text("simd_count \n\nname\nlocal_mem_size  7 \n")
    found = sysfs.properties(tmp_path)
    assert [sysfs.decimal(found.get(name)) for name in ("simd_count", "name", "local_mem_size")] == [0, 0, 7]
