"""Pruned inputs are kept by content and targets; cards that a stack lacks are an error when asked for."""

import fcntl
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.build import pipeline
from buildtool.build.catalog import load
from buildtool.build.lockfile import Lock, spec_sha256
from buildtool.build.plan import ImagePlan, labels, unresolved
from buildtool.build.rootfs import recipe_sha256
from buildtool.build.wheels import WheelCache
from buildtool.build.workplace import Workplace
from buildtool.cli.arguments import amd_targets, chosen_targets
from buildtool.cli.program import main
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.model import Bootstrap, PinnedBase, Resolved, TorchBuild
from buildtool.gpucode.source import TargetMissing
from buildtool.gpucode.target import TargetId, parse_targets
from buildtool.prune import inputs as pruned
from buildtool.prune.inputs import Inspections, PruneCache, PrunedInput, PrunedInputs

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
    cache.bring(rootfs, "bb", every, verify=verify)  # represents itself, and is used each time
    assert asked == ["aa", "bb", "bb"]


def test_an_input_without_foreign_code_represents_itself(cache: PruneCache, rootfs: Path) -> None:
    whole = cache.bring(rootfs, "aa", parse_targets("gfx803,gfx906"))
    assert whole.path == rootfs
    assert not list(rootfs.parent.glob("pruned/*.tar"))


def test_the_cache_forgets_the_oldest(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = cache.bring(rootfs, "00", GFX906).path.stat().st_size
    monkeypatch.setattr(pruned, "KEPT_BYTES", 2 * n_bytes)
    made = [cache.bring(rootfs, digest, GFX906).path for digest in ("aa", "bb", "cc")]
    assert [path.exists() for path in made] == [False, True, True]
    assert not list(made[0].parent.glob(f"{made[0].stem}.*"))


def test_what_this_run_uses_is_never_evicted(
    cache: PruneCache, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned, "KEPT_BYTES", 2 * rootfs.stat().st_size - 1)
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
    monkeypatch.setattr(pruned, "KEPT_BYTES", 2 * rootfs.stat().st_size - 1)
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
    staged = tmp_path / "c/rocm"
    pipeline.stage_context(staged, resolved, wheels, (), rootfs=rootfs, epoch=7, pruned=inputs)
    assert (staged / "rootfs.tar").samefile(found.path)
    manifest = staged / "payload/opt/weir/weir-prune.json"
    assert manifest.read_text() == inputs.manifest()
    assert 0 <= manifest.stat().st_mtime <= 7


def planned(targets: str, *, prune: bool = True) -> ImagePlan:
    rocm = replace(load().select(("rocm",))[0], gpu_targets=tuple(targets.split(",")), prune=prune)
    return ImagePlan(rocm, unresolved(rocm), Path("context"))


def test_a_target_asked_for_by_name_must_be_there() -> None:
    with pytest.raises(
        TargetMissing, match=r"rocm: .*no code for gfx1201, but .*gfx1100, gfx803, gfx906"
    ) as told:
        planned("gfx906,gfx1201").with_targets(HAD, every_target=True)
    assert "--targets gfx1100" in told.value.hint


def test_a_target_that_nobody_asked_for_is_left_out_aloud() -> None:
    found, remark = planned("gfx906,gfx1036").with_targets(HAD, every_target=False)
    assert found.variant.gpu_targets == ("gfx906",)
    assert "gfx1036" in remark
    with pytest.raises(TargetMissing):
        planned("gfx1036").with_targets(HAD, every_target=False)


def test_generic_code_serves_its_family() -> None:
    generic = (TargetId("gfx11-generic"),)
    found, remark = planned("gfx906,gfx1103").with_targets((*HAD, *generic), every_target=True)
    assert (found.variant.gpu_targets, remark) == (("gfx1103", "gfx906"), "")


def test_without_pruning_nothing_is_left_out_or_inspected() -> None:
    whole = planned("gfx906,gfx1036", prune=False)
    assert whole.with_targets((), every_target=True) == (whole, "")
    assert whole.scanned_inputs == ()


def test_an_archive_is_inspected_once_for_its_content(rootfs: Path, tmp_path: Path) -> None:
    verified: list[str] = []

    def verify(_path: Path, sha256: str) -> None:
        verified.append(sha256)

    looked = Inspections(tmp_path / "inspected", print)
    assert looked.known("aa") is None
    assert looked.targets(rootfs, "aa", verify=verify) == {TargetId("gfx803"), TargetId("gfx906")}
    rootfs.unlink()
    again = Inspections(tmp_path / "inspected", print)
    assert again.targets(rootfs, "aa", verify=verify) == again.known("aa") == looked.known("aa")
    assert verified == ["aa"]
    for damage in ("[", '["nonsense"]', "7", ""):
        next((tmp_path / "inspected").glob("*.json")).write_text(damage)
        assert again.known("aa") is None


def test_asked_targets_win_over_cards_and_cards_over_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.cli.arguments.amd_targets", lambda: ("gfx1100",))
    assert chosen_targets("gfx906;gfx803", print) == ("gfx803", "gfx906")
    assert chosen_targets(None, print) == ("gfx1100",)
    rocm, cpu = (load().for_cards(("gfx1100",)).select((name,))[0] for name in ("rocm", "cpu"))
    assert rocm.gpu_targets == ("gfx1100",)
    by_card = next(source for source in rocm.torch if source.is_by_card)
    assert "torch[device-gfx1100]" in by_card.for_card(rocm.first_target).require
    assert cpu.gpu_targets == ()
    assert load().select(("rocm",))[0].gpu_targets == ("gfx906", "gfx1030", "gfx1100")


def test_each_variant_gets_the_cards_of_its_own_maker() -> None:
    both = load().for_cards(("gfx1100", "sm_90"))
    assert [v.gpu_targets for v in both.select(("rocm", "cuda"))] == [("gfx1100",), ("sm_90",)]
    (cuda,) = load().for_cards(("gfx1100",)).select(("cuda",))
    assert cuda.gpu_targets == ("gfx1100",), "which its wheels have no code for: said, not passed over"
    (rocm,) = load().for_cards(("sm_90",), asked=False).select(("rocm",))
    assert rocm.gpu_targets == load().select(("rocm",))[0].gpu_targets, (
        "this machine's card is another maker's"
    )


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "built"),
    [
        ([], ("gfx1030", "gfx1100", "gfx906")),
        (["--targets", "gfx1036"], None),
        (["--targets", "gfx906"], ("gfx906",)),
    ],
    ids=["found here", "asked for and missing", "asked for"],
)
def test_a_card_that_the_stack_lacks_gives_way_to_the_files_list_unless_it_was_asked_for(
    words: list[str], built: tuple[str, ...] | None, workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    lock_rocm(workplace)
    code = main(["plan", "rocm", *words])
    if built is None:
        assert code == Exit.USAGE
        assert "no code for gfx1036" in capsys.readouterr().err
    else:
        run = json.loads(capsys.readouterr().out)["images"]["rocm"]["config"]
        assert run["Labels"]["io.weir.gpu-targets"] == ",".join(built)


def test_plan_says_before_the_first_build_what_was_asked_for(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known of the inputs yet, so no card is left out."""
    assert not workplace.lock.exists()
    assert main(["plan", "rocm"]) == Exit.OK
    run = json.loads(capsys.readouterr().out)["images"]["rocm"]["config"]
    assert run["Labels"]["io.weir.gpu-targets"] == "gfx1036"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Of a machine with a card that Debian's ROCm has no code for."""
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    monkeypatch.setenv("WEIR_LOCK", str(tmp_path / "lock.json"))
    monkeypatch.setattr("buildtool.cli.arguments.amd_targets", lambda: ("gfx1036",))
    return Workplace(tmp_path, tmp_path / "lock.json", lambda _line: None)


def test_a_locked_stack_with_nothing_to_cut_fails_in_the_plan_as_in_the_build(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch comes with a registry's image, so no input has GPU code that could be looked for."""
    file = tmp_path / "v.yaml"
    file.write_text(
        "schema_version: 1\nsource_date_epoch: 1\nvariants:\n  one:\n    summary: s\n    dockerfile: naive\n"
        '    python: "3.11"\n    base: [{registry: "a:1"}]\n    torch: [{name: t, build: rocm}]\n'
        "    gpu_targets: [gfx906]\n    prune: true\n"
    )
    assert main(["plan", "--catalog", str(file)]) == Exit.OK, "nothing is known of its inputs yet"
    [variant] = load(file).variants
    base = PinnedBase("registry", "a:1", f"sha256:{'a' * 64}")
    resolved = Resolved("one", spec_sha256(variant), "t", TorchBuild.ROCM, "3.11", base)
    Lock.load(workplace.lock).put(resolved)
    with pytest.raises(TargetMissing):
        workplace.image(variant, resolved).with_targets(frozenset(), every_target=False)
    capsys.readouterr()
    assert main(["plan", "--catalog", str(file)]) == Exit.USAGE
    assert "there is no GPU code at all" in capsys.readouterr().err


def lock_rocm(workplace: Workplace) -> None:
    """As an earlier build left it: Debian's root file system is locked, and known to serve three cards."""
    with tarfile.open(workplace.state / "rootfs.tar", "w") as tar:
        for card in ("gfx906", "gfx1030", "gfx1100"):
            tar.addfile(tarfile.TarInfo(f"usr/lib/Kernels_{card}.co"))
    lock = Lock.load(workplace.lock)
    [rocm] = load().select(("rocm",))
    debian = next(source for source in rocm.torch if not source.require)
    base = PinnedBase("bootstrap", "trixie", "aa")
    resolved = Resolved("rocm", spec_sha256(rocm), debian.name, TorchBuild.CPU, "3.13", base)
    lock.put(resolved)
    workplace.inspections.targets(workplace.state / "rootfs.tar", "aa", verify=lambda _path, _sha256: None)


def test_labels_name_the_targets_and_whether_foreign_code_went() -> None:
    rocm = load().for_cards(("gfx906",)).select(("rocm",))[0]
    told = labels(rocm, unresolved(rocm))
    assert (told["io.weir.gpu-targets"], told["io.weir.pruned"]) == ("gfx906", "yes")
    assert labels(replace(rocm, prune=False), unresolved(rocm))["io.weir.pruned"] == "no"


def test_other_targets_need_no_other_inputs_unless_wheels_are_made_by_card(tmp_path: Path) -> None:
    rocm = load().select(("rocm",))[0]
    other = replace(rocm, gpu_targets=("gfx803",), prune=False)
    assert spec_sha256(rocm) == spec_sha256(other)
    lock = Lock(tmp_path / "lock.json")
    base = PinnedBase("bootstrap", "bookworm", "aa")
    found = Resolved("rocm", spec_sha256(rocm), rocm.torch[0].name, TorchBuild.ROCM, "3.13", base)
    lock.put(found)
    assert lock.get(rocm) == lock.get(other) == found
    lock.put(replace(found, gpu_target=rocm.first_target))
    assert Lock.load(lock.path).get(rocm) == replace(found, gpu_target="gfx906")
    assert lock.get(other) is None


def test_what_a_recipe_cuts_is_part_of_its_name() -> None:
    plain = Bootstrap("trixie", ("python3",))
    cutting = replace(plain, cut=("usr/lib/*/gconv",))
    assert recipe_sha256(plain, 7) != recipe_sha256(cutting, 7)


def test_an_unpruned_input_is_used_as_it_is(tmp_path: Path) -> None:
    inputs = PrunedInputs(GFX906, {"aa": PrunedInput(tmp_path / "small", {})})
    assert inputs.path("aa", tmp_path / "big") == tmp_path / "small"
    assert inputs.path("bb", tmp_path / "big") == tmp_path / "big"
