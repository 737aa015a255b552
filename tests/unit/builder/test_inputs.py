"""Wheels and root file systems: what is asked of pip and mmdebstrap, and what of their answers is refused."""

import hashlib
from pathlib import Path

import pytest

from buildtool.builder.rootfs import CUSTOMIZE, RootfsCache, environment, mmdebstrap_command, recipe_sha256
from buildtool.builder.wheels import WheelCache, _pin, _reason, foreign_to, platform_tags
from buildtool.command import CommandFailed
from buildtool.errors import DataError, SourceUnreachable
from buildtool.model import Bootstrap, TorchBuild, TorchSource, Wheel


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
    assert _pin("torch[device-gfx1100]", torch) == "torch[device-gfx1100]==2.12.0+rocm10.0"
    assert _pin("torch>=2", torch) == "torch==2.12.0+rocm10.0"
    assert _pin("torch-extras>=2", torch) == "torch-extras>=2"


def test_platform_tags_go_from_the_bases_glibc_down() -> None:
    tags = platform_tags("x86_64")
    assert tags[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)


def test_the_decisive_line_of_pips_failure_is_kept() -> None:
    tail = "WARNING: Retrying: Name or service not known\nERROR: No matching distribution found for torch"
    assert _reason(CommandFailed(["pip"], 1, tail)) == "Retrying: Name or service not known"
    assert _reason(CommandFailed(["pip"], 1, "")) == "pip printed nothing"


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


def test_a_wheel_cut_short_is_not_taken_for_whole(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, lambda _line: None)
    wanted = Wheel("a-1-py3-none-any.whl", "00" * 32, 30)
    cache.path(wanted).parent.mkdir()
    cache.path(wanted).write_bytes(b"short")
    assert not cache.holds(wanted)


def test_mmdebstrap_gets_packages_mirror_and_what_to_empty() -> None:
    base = Bootstrap("bookworm", ("python3", "tini"), ("perl",))
    command = mmdebstrap_command(base, Path("out.tar"), "mirror")
    assert "--include=python3,tini" in command
    assert command[-3:] == ["bookworm", "out.tar", "mirror"]
    assert "etc/apt/sources.list" in hook_of(command)
    assert environment(base, {}, 7)["WEIR_REMOVE"] == "perl"
    assert mmdebstrap_command(base, Path("out.tar"), None)[-1] == "out.tar"


def hook_of(command: list[str]) -> str:
    return next(word for word in command if word.startswith("--customize-hook="))


def test_what_a_catalog_names_is_neither_an_option_nor_part_of_the_hooks_script() -> None:
    """`remove: ["x; touch y"]` ran on the host, and `suite: --setup-hook=touch y` was an option."""
    plain = mmdebstrap_command(Bootstrap("bookworm", ("tini",)), Path("out.tar"), "mirror")
    evil = Bootstrap("--setup-hook=touch y", ("tini",), ("x; touch y", "$(touch y)"), ("'; touch y; '",))
    command = mmdebstrap_command(evil, Path("out.tar"), "mirror")
    assert hook_of(command) == hook_of(plain) == f"--customize-hook={CUSTOMIZE}"
    assert command[-4:] == ["--", "--setup-hook=touch y", "out.tar", "mirror"]
    told = environment(evil, {}, 7)
    assert (told["WEIR_REMOVE"], told["WEIR_CUT"]) == ("x; touch y\n$(touch y)", "'; touch y; '")


def test_a_requirement_is_no_option_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def record(args: list[str], **_: object) -> None:
        ran.append(args)
        raise CommandFailed(args, 1, "")

    monkeypatch.setattr("buildtool.builder.wheels.run_loud", record)
    monkeypatch.setattr("buildtool.builder.wheels._connection_settings", dict)
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
