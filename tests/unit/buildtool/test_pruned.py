"""Pruned inputs are kept by content and targets; cards that a stack lacks are an error when asked for."""

import fcntl
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool import context, pruned
from buildtool.catalog import load
from buildtool.cli import main
from buildtool.commands.build import chosen_targets
from buildtool.errors import BuildFailed, ConfigError, Exit
from buildtool.gpucode.target import TargetId, parse_targets
from buildtool.host import amd_targets
from buildtool.lock import spec_sha256
from buildtool.model import Bootstrap, PinnedBase, Resolved, TorchBuild, Variant
from buildtool.plan import labels, unresolved
from buildtool.pruned import CardsUnserved, PruneCache, PrunedInput, PrunedInputs, served_targets
from buildtool.rootfs import environment, recipe_sha256
from buildtool.wheels import WheelCache

GFX906 = parse_targets("gfx906")
HAD = parse_targets("gfx803,gfx906,gfx1100")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    path = tmp_path / "trixie.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("Kernels_gfx803.co", "Kernels_gfx906.co", "other"):
            file = tmp_path / name
            file.write_text(name)
            tar.add(file, f"usr/lib/{name}")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> PruneCache:
    return PruneCache(tmp_path / "pruned", lambda _line: None)


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_an_input_is_pruned_once_for_its_content_and_targets(cache: PruneCache, rootfs: Path) -> None:
    first = cache.bring(rootfs, "aa", GFX906)
    assert names(first.path) == ["usr/lib/Kernels_gfx906.co", "usr/lib/other"]
    made = first.path.stat().st_mtime_ns
    assert cache.bring(rootfs, "aa", GFX906).path.stat().st_mtime_ns == made
    assert cache.bring(rootfs, "bb", GFX906).path != first.path
    assert cache.bring(rootfs, "aa", HAD[:1]).path != first.path
    assert {code.processor for code in first.had} == {"gfx803", "gfx906"}


def test_an_archive_that_somebody_deleted_is_made_again(cache: PruneCache, rootfs: Path) -> None:
    path = cache.bring(rootfs, "aa", GFX906).path
    path.unlink()
    assert cache.bring(rootfs, "aa", GFX906).path.exists()


def test_a_pruned_archive_that_changed_on_disk_is_not_used(cache: PruneCache, rootfs: Path) -> None:
    path = cache.bring(rootfs, "aa", GFX906).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    assert cache.bring(rootfs, "aa", GFX906).path.read_bytes() == whole


def test_an_original_is_verified_before_it_is_pruned_or_used(cache: PruneCache, rootfs: Path) -> None:
    asked: list[str] = []

    def verify(_path: Path, sha256: str) -> None:
        asked.append(sha256)

    cache.bring(rootfs, "aa", GFX906, verify=verify)
    cache.bring(rootfs, "aa", GFX906, verify=verify)  # pruned already: the original isn't used
    assert asked == ["aa"]
    every = parse_targets("gfx803,gfx906")
    cache.bring(rootfs, "bb", every, verify=verify)
    cache.bring(rootfs, "bb", every, verify=verify)  # stands for itself, and is used each time
    assert asked == ["aa", "bb", "bb"]


def test_an_input_without_foreign_code_stands_for_itself(cache: PruneCache, rootfs: Path) -> None:
    whole = cache.bring(rootfs, "aa", parse_targets("gfx803,gfx906"))
    assert whole.path == rootfs
    assert not list(rootfs.parent.glob("pruned/*.tar"))


def test_the_cache_forgets_the_oldest(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned, "KEPT_PRUNES", 2)
    made = [cache.bring(rootfs, digest, GFX906).path for digest in ("aa", "bb", "cc")]
    assert [path.exists() for path in made] == [False, True, True]
    assert not list(made[0].parent.glob(f"{made[0].stem}.*"))


def test_what_this_run_uses_is_never_evicted(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned, "KEPT_PRUNES", 1)
    found = [cache.bring(rootfs, f"{number:02}", GFX906) for number in range(7)]
    assert all(one.path.exists() for one in found)
    kept = found.pop(0).path
    del found
    other = PruneCache(kept.parent, lambda _line: None).bring(rootfs, "zz", GFX906)
    assert other.path.exists()
    assert not kept.exists()


def test_what_another_run_uses_is_never_evicted(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned, "KEPT_PRUNES", 1)
    path = cache.bring(rootfs, "aa", GFX906).path
    with path.with_suffix(".lock").open() as other:  # a lock belongs to an open file, not to a process
        fcntl.flock(other, fcntl.LOCK_SH)
        cache.bring(rootfs, "bb", GFX906)
        assert path.exists()
    cache.bring(rootfs, "cc", GFX906)
    assert [each.name for each in path.parent.glob(f"{path.stem}.*")] == []


def test_a_run_that_was_killed_between_archive_and_list_leaves_nothing_for_ever(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pruned, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.bring(rootfs, "aa", GFX906)
    assert not list((rootfs.parent / "pruned").glob("*.tar"))


def test_the_manifest_names_targets_and_what_went(cache: PruneCache, rootfs: Path) -> None:
    found = cache.bring(rootfs, "aa", GFX906)
    told = json.loads(PrunedInputs(GFX906, {"aa": found}).manifest())
    assert told["targets"] == ["gfx906"]
    assert told["runs"][0]["archive"] == "trixie.tar"
    assert told["runs"][0]["deleted"][0]["path"] == "usr/lib/Kernels_gfx803.co"
    assert told["runs"][0]["saved_bytes"] == len("Kernels_gfx803.co")


def test_the_context_gets_the_pruned_input_and_the_manifest(
    cache: PruneCache, rootfs: Path, tmp_path: Path
) -> None:
    found = cache.bring(rootfs, "aa", GFX906)
    resolved = Resolved("rocm", "", "s", TorchBuild.CPU, "3.13", PinnedBase("bootstrap", "trixie", "aa"))
    wheels = WheelCache(tmp_path / "wheels", lambda _line: None)
    inputs = PrunedInputs(GFX906, {"aa": found})
    staged = context.stage(tmp_path / "c", resolved, wheels, (), rootfs=rootfs, epoch=7, pruned=inputs)
    assert (staged / "rootfs.tar").samefile(found.path)
    manifest = staged / "payload/opt/weir/weir-prune.json"
    assert manifest.read_text() == inputs.manifest()
    assert 0 <= manifest.stat().st_mtime <= 7


def test_a_target_asked_for_by_name_must_be_there() -> None:
    asked = parse_targets("gfx906,gfx1201")
    with pytest.raises(
        ConfigError, match=r"nothing for gfx1201; they have gfx1100, gfx803, gfx906"
    ) as caught:
        served_targets("rocm", asked, HAD, asked=True, say=print)
    assert "such as gfx1100" in caught.value.hint


def test_a_target_that_nobody_asked_for_is_left_out_aloud() -> None:
    said: list[str] = []
    found = served_targets("rocm", parse_targets("gfx906,gfx1036"), HAD, asked=False, say=said.append)
    assert found == GFX906
    assert "gfx1036" in said[0]
    with pytest.raises(ConfigError):
        served_targets("rocm", parse_targets("gfx1036"), HAD, asked=False, say=said.append)


def test_generic_code_serves_its_family() -> None:
    generic = (TargetId("gfx11-generic"),)
    assert served_targets("rocm", HAD[1:2], (*HAD, *generic), asked=True, say=print) == HAD[1:2]


def test_asked_targets_win_over_cards_and_cards_over_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.host.amd_targets", lambda: ("gfx1100",))
    assert chosen_targets("gfx906;gfx803", print) == (True, ("gfx803", "gfx906"))
    assert chosen_targets(None, print) == (False, ("gfx1100",))
    rocm, cpu = (load(gpu_targets=("gfx1100",)).select((name,))[0] for name in ("rocm", "cpu"))
    assert rocm.gpu_targets == ("gfx1100",)
    assert "torch[device-gfx1100]" in [text for source in rocm.torch for text in source.require]
    assert cpu.gpu_targets == ()
    assert load().select(("rocm",))[0].gpu_targets == ("gfx906", "gfx1030", "gfx1100")


def kfd_node(root: Path, number: int, properties: str) -> Path:
    node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    node.mkdir(parents=True)
    (node / "properties").write_text(properties)
    return node / "properties"


def test_cards_come_from_the_kernels_topology(tmp_path: Path) -> None:
    for number, (simds, version) in enumerate(((0, 0), (240, 90006), (96, 110000), (96, 110000))):
        kfd_node(tmp_path, number, f"simd_count {simds}\ngfx_target_version {version}\n")
    assert amd_targets(tmp_path, {}) == ("gfx1100", "gfx906")
    assert amd_targets(tmp_path / "none", {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}) == ()


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("80003", "gfx803"), ("90006", "gfx906"), ("90010", "gfx90a"), ("90012", "gfx90c"),
        ("90402", "gfx942"), ("90500", "gfx950"), ("100300", "gfx1030"), ("100306", "gfx1036"),
        ("110001", "gfx1101"), ("110501", "gfx1151"), ("120001", "gfx1201"),
    ],
)  # fmt: skip
def test_a_cards_target_is_decoded_as_the_compiler_writes_it(
    tmp_path: Path, version: str, target: str
) -> None:
    node = kfd_node(tmp_path, 1, f"simd_count 96\ngfx_target_version {version}\n")
    assert amd_targets(tmp_path, {}) == (target,)
    node.write_text("simd_count 96\n")
    assert amd_targets(tmp_path, {}) == (), "an old kernel doesn't tell: the file's list serves"


def test_a_card_counts_as_what_the_user_lets_it_pass_for(tmp_path: Path) -> None:
    kfd_node(tmp_path, 1, "simd_count 96\ngfx_target_version 100301\n")
    assert amd_targets(tmp_path, {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}) == ("gfx1030",)
    with pytest.raises(ConfigError, match="HSA_OVERRIDE_GFX_VERSION"):
        amd_targets(tmp_path, {"HSA_OVERRIDE_GFX_VERSION": "gfx1030"})


@pytest.mark.parametrize(
    ("words", "tried"),
    [([], [("gfx1036",), ("gfx906", "gfx1030", "gfx1100")]), (["--targets", "gfx1036"], [("gfx1036",)])],
    ids=["found here", "asked for"],
)
def test_a_card_that_the_stack_lacks_gives_way_to_the_files_list_unless_it_was_asked_for(
    words: list[str], tried: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []

    def prepare(_place: object, _catalog: object, variants: list[Variant], **_: object) -> None:
        seen.append(variants[0].gpu_targets)
        raise CardsUnserved("rocm: nothing for it") if len(seen) == 1 else BuildFailed("far enough")

    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    monkeypatch.setattr("buildtool.host.amd_targets", lambda: ("gfx1036",))
    monkeypatch.setattr("buildtool.provision.ensure_engine", lambda *_, **__: None)
    monkeypatch.setattr("buildtool.pipeline.prepare", prepare)
    code = main(["build", "rocm", *words])
    assert (seen, code) == (tried, Exit.USAGE if words else Exit.BUILD)


def test_labels_tell_the_targets_and_whether_foreign_code_went() -> None:
    rocm = load(gpu_targets=("gfx906",)).select(("rocm",))[0]
    told = labels(rocm, unresolved(rocm))
    assert (told["io.weir.gpu-targets"], told["io.weir.pruned"]) == ("gfx906", "yes")
    assert labels(replace(rocm, prune=False), unresolved(rocm))["io.weir.pruned"] == "no"


def test_other_targets_need_no_other_inputs() -> None:
    rocm = load().select(("rocm",))[0]
    assert spec_sha256(rocm) == spec_sha256(replace(rocm, gpu_targets=("gfx803",), prune=False))


def test_what_a_recipe_cuts_is_part_of_its_name_and_of_what_its_hook_reads() -> None:
    plain = Bootstrap("trixie", ("python3",))
    cutting = replace(plain, cut=("usr/lib/*/gconv",))
    assert recipe_sha256(plain, 7) != recipe_sha256(cutting, 7)
    assert environment(cutting, {}, 7)["WEIR_CUT"] == "usr/lib/*/gconv"
    assert environment(plain, {}, 7)["WEIR_CUT"] == ""


def test_an_unpruned_input_is_used_as_it_is(tmp_path: Path) -> None:
    inputs = PrunedInputs(GFX906, {"aa": PrunedInput(tmp_path / "small", (), {})})
    assert inputs.path("aa", tmp_path / "big") == tmp_path / "small"
    assert inputs.path("bb", tmp_path / "big") == tmp_path / "big"
