"""A pruned image on another card: a sentence that says what to type, before any GPU runtime is asked."""

import json
from pathlib import Path

import pytest

from buildtool.prune import manifest as prune_manifest
from probes.hardware import prune_manifest as prunemanifest
from probes.hardware.prune_manifest import foreign_card, held_targets, mismatch


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


def test_a_foreign_card_is_reported_with_the_command_that_helps(tmp_path: Path, manifest: Path) -> None:
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


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("10.3.1", "gfx1031"),
        ("9.0.10", "gfx90a"),
        ("11.0", "gfx1100,gfx1102,gfx906"),  # no version of three numbers changes nothing
        ("11.0.0.0", "gfx1100,gfx1102,gfx906"),
        ("a.0.6", "gfx1100,gfx1102,gfx906"),
        ("", "gfx1100,gfx1102,gfx906"),
    ],
)
def test_cards_are_reported_in_order_or_as_what_they_pass_for(
    override: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "weir-prune.json").write_text('{"targets": ["gfx1200", "gfx1201", "sm_90", "oddity"]}')
    root = machine(tmp_path, 110002, 90006, 0, 110000, 90006)
    said = foreign_card(root, {"HSA_OVERRIDE_GFX_VERSION": override}, tmp_path / "weir-prune.json")
    assert said.startswith(
        f"this image holds gfx1200, gfx1201, this machine has {', '.join(told.split(','))}:"
    )
    assert f"GPU_TARGETS={told}`" in said


def test_an_override_makes_no_card_where_there_is_none(tmp_path: Path, manifest: Path) -> None:
    assert foreign_card(tmp_path, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, manifest) == ""


def test_one_family_among_the_targets_is_given_the_benefit_of_the_doubt() -> None:
    assert mismatch(("gfx906", "gfx11-generic"), ("gfx1201",)) == ""
    assert mismatch(("gfx906", "gfx1100"), ("gfx1201", "gfx1100")) == ""
    assert mismatch((), ("gfx1100",)) == ""
    assert mismatch(("gfx906:xnack-", "gfx1100"), ("gfx1201",))


def test_a_manifest_is_read_where_a_pruned_image_has_it_and_as_large_as_it_may_be() -> None:
    assert Path("/", prune_manifest.IMAGE_PATH) == prunemanifest.MANIFEST
    assert prune_manifest.MAX_BYTES == prunemanifest.MOST_BYTES
