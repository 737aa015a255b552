"""Wheels and root file systems: what is asked of pip and mmdebstrap, and what of their answers is refused."""

import hashlib
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildtool.build import rootfs
from buildtool.build.rootfs import (
    PURGE,
    RootfsCache,
    bootstrap_error,
    environment,
    mmdebstrap_command,
    recipe_sha256,
    tree_directory,
)
from buildtool.build.wheels import WheelCache, failure_reason, foreign_to, pinned_requirement, platform_tags
from buildtool.core.command import CommandFailed
from buildtool.core.errors import BuildFailed, DataError, EnvironmentMissing, SourceUnreachable, ToolError
from buildtool.core.model import Bootstrap, TorchBuild, TorchSource, Wheel


def wheels(*names: str) -> list[Wheel]:
    return [Wheel(f"{name}-1-py3-none-any.whl", "", 1) for name in names]


@pytest.mark.parametrize(
    ("build", "names", "strangers"),
    [
        (TorchBuild.CPU, ("torch", "idna"), set()),
        (TorchBuild.CPU, ("torch", "nvidia_cudnn_cu13", "triton"), {"nvidia-cudnn-cu13", "triton"}),
        (TorchBuild.ROCM, ("torch", "pytorch_triton_rocm"), set()),
        (TorchBuild.ROCM, ("torch", "cuda_toolkit"), {"cuda-toolkit"}),
        (TorchBuild.CUDA, ("torch", "nvidia_nccl_cu13", "triton"), set()),
        (TorchBuild.CUDA, ("torch", "rocm_sdk_core"), {"rocm-sdk-core"}),
    ],
)
def test_marks_of_another_build_are_seen(
    build: TorchBuild, names: tuple[str, ...], strangers: set[str]
) -> None:
    assert foreign_to(build, wheels(*names)) == strangers


def test_torch_is_pinned_to_the_file_at_hand_and_keeps_its_extras() -> None:
    torch = Path("torch-2.12.0+rocm10.0-cp311-cp311-linux_x86_64.whl")
    assert pinned_requirement("torch[device-gfx1100]", torch) == "torch[device-gfx1100]==2.12.0+rocm10.0"
    assert pinned_requirement("torch>=2", torch) == "torch==2.12.0+rocm10.0"
    for other in ("torch-extras>=2", "torch.extras>=2", "torchvision"):
        assert pinned_requirement(other, torch) == other


@pytest.mark.parametrize("written", ["Torch>=2", "TORCH", "torch [x] >=2"])
def test_torch_is_torch_however_it_is_written(written: str) -> None:
    """`require: [Torch]` asked pip for nothing, and wasn't pinned."""
    pinned = pinned_requirement(written, Path("torch-2.12.0-cp311-cp311-linux_x86_64.whl"))
    assert pinned.replace("[x]", "") == "torch==2.12.0"


def test_platform_tags_go_from_the_bases_glibc_down() -> None:
    tags = platform_tags("x86_64")
    assert tags[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)


def test_the_decisive_line_of_pips_failure_is_kept() -> None:
    tail = "WARNING: Retrying: Name or service not known\nERROR: No matching distribution found for torch"
    assert failure_reason(CommandFailed(["pip"], 1, tail)) == "Retrying: Name or service not known"
    assert failure_reason(CommandFailed(["pip"], 1, "")) == "pip printed nothing"
    conflict = "  The user requested (constraint) torch<=2\nERROR: ResolutionImpossible: for help visit"
    assert failure_reason(CommandFailed(["pip"], 1, conflict)) == "The user requested (constraint) torch<=2"


def test_a_damaged_cached_wheel_is_named_and_removed(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, lambda _line: None)
    good = Wheel("a-1-py3-none-any.whl", "00" * 32, 3)
    cache.path(good).parent.mkdir()
    cache.path(good).write_bytes(b"bad")
    assert cache.holds(good)
    with pytest.raises(DataError, match=r"a-1-py3-none-any\.whl is corrupt"):
        cache.verify([good])
    assert not cache.holds(good)


def test_a_cached_root_file_system_that_changed_on_disk_is_not_used(tmp_path: Path) -> None:
    cache = RootfsCache(tmp_path, lambda _line: None)
    recipe = Bootstrap("bookworm", ("tini",))
    path = cache.path(recipe, 1)
    path.write_bytes(b"whole")
    path.with_suffix(".sha256").write_text(hashlib.sha256(b"whole").hexdigest())
    _, pin = cache.bring(recipe, 1)
    cache.verify(path, pin)
    path.write_bytes(b"whomp")
    with pytest.raises(DataError, match="is corrupt"):
        cache.verify(path, pin)
    assert not path.exists()


def test_a_root_file_system_rewritten_with_its_sha256_is_not_taken_for_newer_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RootfsCache(tmp_path, lambda _line: None)
    recipe = Bootstrap("bookworm", ("tini",))
    locked = hashlib.sha256(b"made of packages").hexdigest()
    path = cache.path(recipe, 1)
    path.write_bytes(b"rewritten")
    path.with_suffix(".sha256").write_text(hashlib.sha256(b"rewritten").hexdigest())
    monkeypatch.setattr(cache, "_make", lambda _base, path, _epoch: path.write_bytes(b"made of packages"))
    assert cache.bring(recipe, 1, locked_as=locked) == (path, locked)
    assert path.read_bytes() == b"made of packages"
    monkeypatch.delattr(cache, "_make")
    assert cache.bring(recipe, 1, locked_as=locked) == (path, locked)


def test_a_moved_mirror_makes_one_root_file_system_for_all_variants_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variant locked to the old one had it made again, under the feet of the variant before."""
    cache = RootfsCache(tmp_path, lambda _line: None)
    recipe = Bootstrap("bookworm", ("tini",))
    made: list[Path] = []

    def make(_base: Bootstrap, path: Path, _epoch: int) -> None:
        made.append(path)
        path.write_bytes(b"%d" % len(made))

    monkeypatch.setattr(cache, "_make", make)
    found = {cache.bring(recipe, 1, locked_as="00" * 32) for _variant in ("cpu", "cpu-extras")}
    found |= {cache.bring(recipe, 1, update=True) for _variant in ("cpu", "cpu-extras")}
    assert len(made) == len(found) == 1
    again = RootfsCache(tmp_path, lambda _line: None)
    monkeypatch.setattr(again, "_make", make)
    again.bring(recipe, 1, update=True)
    assert len(made) == 2


def test_a_locked_root_file_system_without_its_sha256_is_not_made_again(tmp_path: Path) -> None:
    """Where the mirror was gone when it was to be made again, the one that is locked was lost."""
    cache = RootfsCache(tmp_path, lambda _line: None)
    recipe = Bootstrap("bookworm", ("tini",))
    path = cache.path(recipe, 1)
    path.write_bytes(b"whole")
    pin = hashlib.sha256(b"whole").hexdigest()
    assert cache.bring(recipe, 1, locked_as=pin) == (path, pin)
    assert path.with_suffix(".sha256").read_text() == pin


@pytest.mark.parametrize(("mirror", "says"), [(None, True), ("a mirror", False)])
def test_a_host_whose_apt_names_no_debian_mirror_is_told_so(
    mirror: str | None, says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = making(tmp_path, monkeypatch, Bootstrap("bookworm", ("tini",)), mirror=mirror)
    assert ("apt names no Debian mirror" in said) is says


def test_debians_missing_keys_are_what_a_host_without_them_is_told_to_install() -> None:
    """As on Ubuntu, where the hint was `apt-get update`, which works there."""
    line = "E: The repository 'http://x bookworm InRelease' is not signed."
    assert (
        "debian-archive-keyring" in bootstrap_error(CommandFailed(["mmdebstrap"], 1, line), "bookworm").hint
    )


def test_a_catalogs_names_that_remove_and_cut_nothing_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Bootstrap("bookworm", ("tini",), remove=("perll", "perl"), cut=("usr/bin/per", "usr/bin/perl*"))
    line = "dpkg: warning: ignoring request to remove perll which isn't installed"
    said = making(tmp_path, monkeypatch, asked, printed=line)
    assert "perll of the catalog's `remove` isn't installed" in said
    assert "nothing matches 'usr/bin/per' of the catalog's `cut`" in said
    assert "usr/bin/perl*" not in said


def making(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: Bootstrap,
    *,
    mirror: str | None = "a mirror",
    printed: str = "",
) -> str:
    """What is said while a stand-in of mmdebstrap prints that and makes a tree with perl in it."""

    def mmdebstrap(words: list[str], *, progress: Callable[[str], None], env: Mapping[str, str]) -> None:
        assert env["TMPDIR"]
        progress(printed)
        with tarfile.open(words[words.index("--") + 2], "w:") as tar:
            tar.addfile(tarfile.TarInfo("./usr/bin/perl"))

    said: list[str] = []
    monkeypatch.setattr(rootfs, "host_mirror", lambda: mirror)
    monkeypatch.setattr(rootfs, "find", Path)
    monkeypatch.setattr(rootfs, "_namespace_prefix", tuple)
    monkeypatch.setattr(rootfs, "run_streaming", mmdebstrap)
    RootfsCache(folder, said.append).bring(base, 1)
    return "\n".join(said)


FAILED = (
    "E: setup failed: E: apt-get ... failed",
    "I: removing tempdir /x...",
    "E: mmdebstrap failed to run",
)


@pytest.mark.parametrize(
    ("code", "said", "kind", "shown"),
    [
        (
            1,
            ("Err:1 http://x InRelease", "E: Failed to fetch http://x"),
            SourceUnreachable,
            "E: Failed to fetch http",
        ),
        (
            1,
            ("E: The repository 'http://x nosuch' does not have a Release file.",),
            SourceUnreachable,
            "nosuch",
        ),
        (1, ("E: Unable to locate package nosuch",), SourceUnreachable, "Unable to locate package nosuch"),
        (25, ("dpkg: error: 1 expected program not found",), BuildFailed, "exited with 25"),
        (25, ("dpkg: error: 1 expected program not found",), BuildFailed, "dpkg: error: 1 expected program"),
        (-9, ("I: extracting archives...",), BuildFailed, "was killed"),
        (1, ("unshare: sigprocmask unblock failed: Invalid argument",), BuildFailed, "was killed"),
        (1, ("dpkg: x: No space left on device",), EnvironmentMissing, "disk full"),
    ],
)
def test_what_mmdebstrap_died_of_is_what_is_shown(
    code: int, said: tuple[str, ...], kind: type[ToolError], shown: str
) -> None:
    error = bootstrap_error(CommandFailed(["mmdebstrap"], code, "\n".join([*said, *FAILED])), "bookworm")
    assert type(error) is kind
    assert shown in error.message
    assert "removing tempdir" not in error.message
    assert error.hint


def test_a_folders_group_and_default_acl_decide_no_mode_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    monkeypatch.setattr("os.removexattr", lambda _path, name: removed.append(name))
    tmp_path.chmod(0o2770)
    with tree_directory(tmp_path) as place:
        assert place.resolve() == tmp_path
    assert tmp_path.stat().st_mode & 0o7777 == 0o755
    assert removed == ["system.posix_acl_default", "system.posix_acl_access"] * 2


@pytest.mark.parametrize(
    ("user", "above", "inside"), [(1000, 0o700, False), (1000, 0o711, True), (0, 0o700, True)]
)
def test_a_home_that_is_closed_to_others_does_not_keep_a_user_from_making_a_tree(
    monkeypatch: pytest.MonkeyPatch, user: int, above: int, inside: bool
) -> None:
    """mmdebstrap works as another user then, who can't get to a state directory below such a home."""
    monkeypatch.setattr("os.geteuid", lambda: user)
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are closed
        folder = Path(home) / "state"
        folder.mkdir()
        Path(home).chmod(above)
        with tree_directory(folder) as place:
            assert (place.resolve() == folder.resolve()) is inside
            assert place.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("yesterdays", ["cut short", "00" * 32])
def test_a_root_file_system_made_again_is_not_vouched_for_by_an_old_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yesterdays: str
) -> None:
    """Killed between the tar and its digest, the next run must not find yesterday's digest next to it."""
    cache = RootfsCache(tmp_path, lambda _line: None)
    recipe = Bootstrap("bookworm", ("tini",))
    digest = cache.path(recipe, 1).with_suffix(".sha256")
    digest.write_text(yesterdays)

    def killed(*_args: object) -> None:
        assert not digest.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_make", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.bring(recipe, 1)


def test_a_wheel_that_vanished_is_reported_and_no_traceback(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, lambda _line: None)
    with pytest.raises(DataError, match="corrupt"):
        cache.verify([Wheel("a-1-py3-none-any.whl", "00" * 32, 3)])


@pytest.mark.parametrize("wrong", [{"filename": "b-1-py3-none-any.whl"}, {"stored_bytes": 4}])
def test_a_lock_edited_by_hand_is_not_fetched_again_for_ever(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name was "corrupt" in each build, and for other bytes each asked the index again."""

    def pip(words: list[str], **_more: object) -> None:
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "a-1-py3-none-any.whl", "w") as made:
            made.writestr("a.py", "")

    monkeypatch.setattr("buildtool.build.wheels.run_streaming", pip)
    cache = WheelCache(tmp_path, lambda _line: None)
    [honest] = cache.tools()
    cache.fetch([honest], "3.11", index=None)
    with pytest.raises(DataError, match="hasn't its name or its bytes"):
        cache.fetch([replace(honest, **wrong)], "3.11", index=None)


def test_a_wheel_whose_metadata_an_index_gave_and_itself_cannot_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(words: list[str], **_more: object) -> None:
        path = Path(words[words.index("--dest") + 1]) / "a-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("a-1.dist-info/METADATA", "Provides-Extra: x")
        path.write_bytes(path.read_bytes().replace(b"Provides", b"provided"))  # another checksum

    monkeypatch.setattr("buildtool.build.wheels.run_streaming", pip)
    cache = WheelCache(tmp_path, lambda _line: None)
    with pytest.raises(DataError, match="is not a wheel, or it is damaged"):
        cache.resolve(TorchSource("base", TorchBuild.CPU), "3.11", ["a[x]"])


def test_a_wheel_cut_short_is_not_taken_for_whole(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, lambda _line: None)
    wanted = Wheel("a-1-py3-none-any.whl", "00" * 32, 30)
    cache.path(wanted).parent.mkdir()
    cache.path(wanted).write_bytes(b"short")
    assert not cache.holds(wanted)


def test_mmdebstrap_gets_packages_mirror_and_what_to_remove() -> None:
    base = Bootstrap("bookworm", ("python3", "tini"), ("perl",))
    command = mmdebstrap_command(base, Path("out.tar"), "mirror")
    assert "--include=python3,tini" in command
    assert command[-3:] == ["bookworm", "out.tar", "mirror"]
    assert environment(base, {}, 7)["WEIR_REMOVE"] == "perl"
    assert mmdebstrap_command(base, Path("out.tar"), None)[-1] == "out.tar"


def hook_of(command: list[str]) -> str:
    return next(word for word in command if word.startswith("--customize-hook="))


def test_what_a_catalog_names_is_neither_an_option_nor_part_of_the_hooks_script() -> None:
    """`remove: ["x; touch y"]` ran on the host, and `suite: --setup-hook=touch y` was an option."""
    plain = mmdebstrap_command(Bootstrap("bookworm", ("tini",)), Path("out.tar"), "mirror")
    evil = Bootstrap("--setup-hook=touch y", ("tini",), ("x; touch y", "$(touch y)"), ("'; touch y; '",))
    command = mmdebstrap_command(evil, Path("out.tar"), "mirror")
    assert hook_of(command) == hook_of(plain) == f"--customize-hook={PURGE}"
    assert command[-4:] == ["--", "--setup-hook=touch y", "out.tar", "mirror"]
    assert environment(evil, {}, 7)["WEIR_REMOVE"] == "$(touch y)\nx; touch y"


def test_a_requirement_is_no_option_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def record(args: list[str], **_: object) -> None:
        ran.append(args)
        raise CommandFailed(args, 1, "")

    monkeypatch.setattr("buildtool.build.wheels.run_streaming", record)
    monkeypatch.setattr("buildtool.build.wheels._connection_settings", dict)
    cache = WheelCache(tmp_path, lambda _line: None)
    index = "http://example.invalid/simple"
    for source in (TorchSource("t", TorchBuild.CPU), TorchSource("t", TorchBuild.CPU, ("torch",), index)):
        with pytest.raises(SourceUnreachable):
            cache.resolve(source, "3.11", ["--index-url=evil"])
    for args in ran:
        options = args[: args.index("--")]
        assert "--index-url=evil" not in options
    assert f"--index-url={index}" in ran[1]


def test_hosts_of_other_tastes_bootstrap_in_the_same_environment() -> None:
    way_out = {"PATH": "/usr/bin", "HTTPS_PROXY": "http://proxy:3128", "no_proxy": "localhost"}
    tastes = {"PYTHONPATH": "/x", "LANG": "de_DE.UTF-8", "HOME": "/home/me", "PERL5LIB": "/y", "DEBUG": "1"}
    base = Bootstrap("bookworm", ("tini",))
    plain = environment(base, way_out, 7)
    assert plain == environment(base, way_out | tastes, 7)
    assert way_out.items() <= plain.items()
    assert plain["SOURCE_DATE_EPOCH"] == "7"
    assert plain["PYTHONDONTWRITEBYTECODE"] == "1"


def test_a_recipe_is_named_by_what_it_asks_for_whatever_the_order() -> None:
    one = recipe_sha256(Bootstrap("s", ("a", "b")), 1)
    assert one == recipe_sha256(Bootstrap("s", ("b", "a")), 1)
    assert one != recipe_sha256(Bootstrap("s", ("a",)), 1)
    assert one != recipe_sha256(Bootstrap("s", ("a", "b")), 2)
