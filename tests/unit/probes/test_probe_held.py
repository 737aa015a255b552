"""A pruned image on another card: a sentence that says what to type, before any GPU runtime is asked."""

import json
from pathlib import Path

import pytest

from probes.held import foreign_card, held_targets, mismatch


def machine(root: Path, *versions: int) -> Path:
    for number, version in enumerate(versions):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"simd_count {version and 240}\ngfx_target_version {version}\n")
    return root


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "weir-prune.json"
    path.write_text(json.dumps({"schema_version": 1, "targets": ["gfx906", "sm_90"], "runs": []}))
    return path


def test_a_foreign_card_is_told_with_the_command_that_helps(tmp_path: Path, manifest: Path) -> None:
    said = foreign_card(machine(tmp_path, 0, 110000), {}, manifest)
    assert said.startswith("this image holds gfx906, this machine has gfx1100: ")
    assert "make images GPU_TARGETS=gfx1100" in said


def test_a_held_card_and_one_that_passes_for_it_are_fine(tmp_path: Path, manifest: Path) -> None:
    root = machine(tmp_path, 0, 90002)
    assert foreign_card(root, {}, manifest)
    assert foreign_card(root, {"HSA_OVERRIDE_GFX_VERSION": "9.0.6"}, manifest) == ""
    assert mismatch(("gfx90a:xnack+",), ("gfx90a",)) == ""
    assert mismatch(("gfx11-generic",), ("gfx1103",)) == ""


def test_a_card_that_an_old_kernel_cannot_name_is_no_foreign_card(tmp_path: Path, manifest: Path) -> None:
    root = machine(tmp_path, 110000)
    (root / "sys/class/kfd/kfd/topology/nodes/0/properties").write_text("simd_count 240\n")
    assert foreign_card(root, {}, manifest) == ""


def test_no_card_or_no_manifest_means_nothing_to_say(tmp_path: Path, manifest: Path) -> None:
    assert foreign_card(tmp_path, {}, manifest) == ""
    assert foreign_card(machine(tmp_path, 110000), {}, tmp_path / "none") == ""
    manifest.write_text('{"targets": 3}')
    assert held_targets(manifest) == ()
