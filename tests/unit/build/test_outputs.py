"""What `weir build` writes beside an engine's image: layouts, squashfs files, conda environments."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.build import catalog, conda, pipeline, plan, runtimes, squashfs
from buildtool.build.layer_store import LayerStore, require_layout_or_nothing
from buildtool.cli import build
from buildtool.cli.program import main
from buildtool.core.errors import ConfigError, DataError, EngineUnavailable, EnvironmentMissing, Exit
from buildtool.core.model import BuiltImage, PinnedBase, Resolved, TorchBuild, Wheel
from buildtool.core.yaml_text import Limits, parse
from buildtool.image.written import written_image

CPU = catalog.load().select(("cpu",))[0]
BASE = PinnedBase("bootstrap", "bookworm", "a" * 64)
WHEELS = (
    Wheel("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "0" * 64, 1),
    Wheel("PyYAML-6.0-py3-none-any.whl", "1" * 64, 1),
)
RESOLVED = Resolved("cpu", "", "pytorch-cpu-index", TorchBuild.CPU, "3.11", BASE, WHEELS)


def test_a_conda_environment_has_the_versions_of_the_lock_and_torchs_own_index() -> None:
    text = conda.environment_text(CPU, RESOLVED)
    data: Any = parse(text, "x", Limits(depth=9, nodes=99)).data
    python, pip, wheels = data["dependencies"]
    assert (data["name"], python, pip) == ("weir-cpu", "python=3.11", "pip")
    assert wheels["pip"] == [
        "--extra-index-url=https://download.pytorch.org/whl/cpu", "pyyaml==6.0", "torch==2.13.0+cpu",
    ]  # fmt: skip


def test_a_digest_that_is_a_path_names_no_file(tmp_path: Path) -> None:
    """A registry's header, or a lock from elsewhere, said where a base's manifest was to be written."""
    theirs = tmp_path / "bashrc"
    theirs.write_text("mine")
    for digest in (str(theirs), "sha256:../../bashrc", "sha256:" + "a" * 63):
        with pytest.raises(DataError, match="no digest"):
            LayerStore(tmp_path / "state").document(digest, lambda _: b"theirs")
    assert theirs.read_text() == "mine"


def test_a_layout_with_other_images_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oci-layout").write_text("{}")
    (tmp_path / "index.json").write_text('{"manifests": [{}, {}]}')
    with pytest.raises(DataError, match="holds 2 images"):
        require_layout_or_nothing(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="current directory"):
        require_layout_or_nothing(Path())


def test_a_layout_with_files_of_the_users_beside_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "oci-layout").write_text("{}")
    (tmp_path / "index.json").write_text('{"manifests": [{}]}')
    require_layout_or_nothing(tmp_path)
    (tmp_path / "notes\x1b.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds more than an OCI layout.*notes\\x1b\.txt"):
        require_layout_or_nothing(tmp_path)


def test_a_torch_of_debians_is_no_conda_environment() -> None:
    with pytest.raises(ConfigError, match="not as a wheel"):
        conda.environment_text(CPU, replace(RESOLVED, wheels=WHEELS[1:]))


HOSTILE = 'a\'b\n$(touch /tmp/x) "c"'


def test_what_enroot_starts_is_the_images_and_no_text_becomes_a_command(tmp_path: Path) -> None:
    config = {
        "Env": ["A=1", "B=x y", "C=a\nD=2"], "WorkingDir": str(tmp_path), "Labels": {HOSTILE: HOSTILE},
        "Entrypoint": ["printf", "%s|"], "Cmd": [HOSTILE],
    }  # fmt: skip
    files = squashfs.enroot_files(config)
    assert files["etc/environment"] == b"A=1\nB=x y\n", "a line each"
    script = files["etc/rc"].decode()
    assert [line for line in script.splitlines() if line.startswith("#")] == [script.splitlines()[0]]
    assert "exec printf '%s|' \"$@\"" in script
    assert squashfs.enroot_files({})["etc/rc"].decode().endswith("exec /bin/sh\nfi\n")


def test_enroot_gives_images_for_amd_the_devices_of_the_host_and_others_none() -> None:
    for labels in ({"io.weir.gpu-targets": "gfx906"}, {"io.weir.torch.build": "rocm"}):
        lines = squashfs.enroot_files({"Labels": labels})["etc/fstab"].decode().splitlines()
        assert [line.split()[:3] for line in lines] == [[p, p, "none"] for p in ("/dev/kfd", "/dev/dri")]
        assert all("nofail" in line.split()[3].split(",") for line in lines), "a host without the card starts"
    for labels in ({}, {"io.weir.gpu-targets": "sm_90", "io.weir.torch.build": "cuda"}):
        assert "etc/fstab" not in squashfs.enroot_files({"Labels": labels})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["cpu", "rocm", "--layout", "out"], "two things would be written to"),
        (["cpu", "--layout", "out", "--sqsh", "out"], "two things would be written to"),
        (["cpu-naive", "--sqsh", "x-{variant}"], "which BuildKit makes by a Dockerfile"),
    ],
)
def test_a_mistake_in_what_is_asked_for_is_found_before_anything_is_built(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*_args: object, **_more: object) -> None:
        raise AssertionError("an engine was looked for")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "Engine", refuse)
    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", refuse)
    assert main(["build", *words]) == Exit.USAGE
    assert why in capsys.readouterr().err


def test_a_directory_of_the_users_is_not_replaced_by_a_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert main(["build", "cpu", "--layout", str(tmp_path)]) == Exit.DATA
    assert "no OCI layout" in capsys.readouterr().err


def test_an_engine_is_installed_only_where_nothing_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise EngineUnavailable("no Docker engine answers")

    monkeypatch.setattr(build, "Engine", gone)
    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", lambda *_, **__: "installed")
    no_output = {"push": False, "layout": None, "sqsh": None, "conda": None, "yes": False, "verbose": False}
    options: Any = SimpleNamespace(candidates=[[CPU]])
    said: list[str] = []

    def engine(**given: object) -> object:
        return build._engine(SimpleNamespace(**no_output | given), options, said.append)  # type: ignore[arg-type]

    assert engine() == "installed"
    for asked in ({"layout": "x"}, {"sqsh": "x"}, {"conda": "x"}, {"push": True}):
        assert engine(**asked) is None
    assert said == ["no Docker engine answers; writing images without one"] * 4
    options.candidates = [[CPU], [replace(CPU, dockerfile=Path("x"))]]
    assert engine(layout="x") == "installed", "a Dockerfile needs one"


def test_an_image_that_nothing_here_can_run_is_shown_as_not_proved() -> None:
    planned = plan.ImagePlan(CPU, RESOLVED, Path("c"))
    image = BuiltImage("cpu", CPU.ref, "sha256:" + "a" * 64)
    text = pipeline.built_text([planned], [image], [None])
    assert "2.13.0+cpu (not proved)" in text
    assert "3.11 (not proved)" in text


def test_without_any_runtime_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "find", lambda _program: None)
    image = written_image({}, [], [])
    runner = runtimes.LocalRunner({image.digest: image}, SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentMissing, match="bubblewrap") as missing:
        runner.run(image.digest, ["true"])
    assert "apt-get install bubblewrap" in missing.value.hint
