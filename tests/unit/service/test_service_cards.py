"""A pruned image on another card: a sentence that says what to type, before any GPU runtime is asked."""

import json
from pathlib import Path

import pytest
from service.errors import DeviceMissing
from service.inference import device
from service.inference.device import check_cards, check_targets, targets_of_cards, targets_of_image

NODE = "cpu_cores_count 0\nsimd_count 240\ngfx_target_version {}\nvendor_id 4098\n"


def topology(folder: Path, *versions: int) -> Path:
    for number, version in enumerate(versions):
        (folder / str(number)).mkdir()
        (folder / str(number) / "properties").write_text(NODE.format(version))
    return folder


def manifest(folder: Path, *targets: str) -> Path:
    path = folder / "weir-prune.json"
    path.write_text(json.dumps({"schema_version": 1, "targets": targets, "runs": []}))
    return path


def test_a_foreign_card_is_reported_with_the_command_that_helps() -> None:
    with pytest.raises(DeviceMissing, match="this image holds gfx906, this machine has gfx1100") as caught:
        check_targets(("gfx906",), ("gfx1100",))
    assert "make images GPU_TARGETS=gfx1100" in caught.value.hint


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ((), ("gfx1100",)),
        (("gfx906",), ()),
        (("gfx906", "gfx1100"), ("gfx1100",)),
        (("gfx90a:xnack+",), ("gfx90a",)),
        (("gfx906",), ("gfx1036", "gfx906")),
        (("gfx11-generic",), ("gfx1103",)),
    ],
    ids=["not pruned", "no card", "held", "held with a feature", "one of two cards held", "a family"],
)
def test_anything_else_goes_on(held: tuple[str, ...], found: tuple[str, ...]) -> None:
    check_targets(held, found)


def test_cards_are_read_from_the_topology_as_llvm_writes_them(tmp_path: Path) -> None:
    assert targets_of_cards(topology(tmp_path, 0, 80003, 90010, 110000, 110000), {}) == (
        "gfx803",
        "gfx90a",
        "gfx1100",
    )


def test_an_override_says_what_the_card_passes_for(tmp_path: Path) -> None:
    nodes = topology(tmp_path, 0, 100301)
    assert targets_of_cards(nodes, {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}) == ("gfx1030",)
    assert targets_of_cards(nodes, {"HSA_OVERRIDE_GFX_VERSION": "nonsense"}) == ("gfx1031",)


def test_no_topology_and_no_manifest_mean_nothing_to_say(tmp_path: Path) -> None:
    assert targets_of_cards(tmp_path / "none", {}) == ()
    assert targets_of_image(tmp_path / "none") == ()
    (tmp_path / "odd").write_text('{"targets": 3}')
    assert targets_of_image(tmp_path / "odd") == ()


def test_only_a_gpu_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MANIFEST", manifest(tmp_path, "gfx906"))
    monkeypatch.setattr(device, "TOPOLOGY", topology(tmp_path, 110000))
    check_cards("cpu", {})
    with pytest.raises(DeviceMissing):
        check_cards("rocm:0", {})
