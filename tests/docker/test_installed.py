"""The package from `pip install` alone, in a fresh venv outside the checkout: it builds and prunes images."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from standins import make_torch, package_index

from buildtool.engine.client import Engine
from probes.core.commit import NOTE

ROOT = Path(__file__).parents[2]
VARIANT = f"t-installed-{os.getpid()}"
FAT = f"weir/{VARIANT}:fat"
NOT_SHIPPED = {"variants.lock.json"}
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with what git tracks here, at a commit of its own; nothing but tests writes into it."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked("."):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text(f"{COMMIT}\n")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


def wheel_of(source: Path, folder: Path) -> Path:
    """The wheel of a checkout or of an sdist."""
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the backend and the version of it that pyproject.toml asks for."""
    folder = tmp_path_factory.mktemp("sdist")
    wanted = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]
    pip(sys.executable, "install", "--no-compile", "--target", str(folder / "backend"), *wanted["requires"])
    build = f"import {wanted['build-backend']} as backend; backend.build_sdist({str(folder)!r})"
    path = {**os.environ, "PYTHONPATH": str(folder / "backend")}
    subprocess.run([sys.executable, "-c", build], cwd=source, env=path, check=True, capture_output=True)
    [made] = folder.glob("*.tar.gz")
    return made


@dataclass(frozen=True)
class Installed:
    """`weir` in a venv of its own, run in a folder that knows nothing of the checkout."""

    program: Path
    folder: Path

    def weir(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "WEIR_"))}
        own = {"XDG_CACHE_HOME": str(self.folder / "cache"), **environment}
        return subprocess.run(
            [self.program, *words],
            cwd=self.folder,
            env=kept | own,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    pip(str(folder / "venv/bin/python"), "install", "--no-compile", str(wheel), "pip")
    yield Installed(folder / "venv/bin/weir", folder)
    engine = Engine()
    for ref in (FAT, f"weir/{VARIANT}:gfx906", f"weir/{VARIANT}:latest"):
        engine.remove_tag(ref)


def pip(python: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "-q", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def tracked(folder: str) -> list[str]:
    """What a checkout holds: what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_a_wheel_holds_every_file_of_images_and_no_other_copy_exists(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("buildtool/images/")}
        assert held == {
            f"buildtool/{name}" for name in tracked("images") if Path(name).name not in NOT_SHIPPED
        }
        for name in tracked("images"):
            if f"buildtool/{name}" in held:
                assert archive.read(f"buildtool/{name}") == (ROOT / name).read_bytes()
    assert not (ROOT / "buildtool/images").exists()


def docker_archive(files: Mapping[str, bytes]) -> bytes:
    """An image of one layer, as `docker save` writes it."""
    layer = tar(files)
    diff_id = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [diff_id]}}
    manifest = [{"Config": "config.json", "RepoTags": ["tiny:1"], "Layers": ["layer.tar"]}]
    documents = {"config.json": config, "manifest.json": manifest}
    return tar({"layer.tar": layer} | {name: json.dumps(value).encode() for name, value in documents.items()})


def tar(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def test_a_build_leaves_nothing_in_the_checkout(wheel: Path, sdist: Path, source: Path) -> None:
    assert wheel.is_file()
    assert sdist.is_file()
    found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert found - {".git/HEAD"} == set(tracked("."))
    assert not [path for path in source.rglob("*") if path.name == "build" and path.parent == source]
    assert not list(source.glob("*.egg-info"))


def test_a_wheel_lacks_no_file_of_the_packages_and_has_no_other(wheel: Path) -> None:
    shipped = {name for folder in ("buildtool", "probes") for name in tracked(folder)}
    shipped |= {f"buildtool/{name}" for name in tracked("images") if Path(name).name not in NOT_SHIPPED}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert held == shipped | {NOTE}
        assert archive.read(NOTE).decode() == COMMIT


def test_an_sdist_gives_the_wheel_that_the_checkout_gives(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(wheel_of(sdist, tmp_path)) as other:
        names = set(one.namelist())
        assert names == set(other.namelist())
        for name in names:
            # this lists the others, and their order is that of the directory
            assert name.endswith("/RECORD") or one.read(name) == other.read(name), name


def test_an_installed_package_knows_its_commit_and_answers(installed: Installed) -> None:
    version = installed.weir("--version").stdout
    assert version == installed.weir("probe", "--version").stdout
    assert version.endswith(f" (commit {COMMIT[:12]})\n")
    (installed.folder / "image.tar").write_bytes(docker_archive({"etc/motd": b"hello"}))
    for words, said in (
        (["audit", "image.tar", "--all"], "etc/motd"),
        (["doctor", "--card", "wx4100"], "gfx803"),
        (["probe", "plan", "qwen2.5-3b", "--vram", "4GiB", "--machine", "wx4100"], "qwen2.5-3b"),
        (["build", "--help"], "--update-lock"),
        (["completion", "man"], ".TH WEIR 1"),
        (["clean", "--caches", "--dry-run"], "images"),
    ):
        done = installed.weir(*words)
        assert said in done.stdout, (words, done.stdout, done.stderr)
        assert done.returncode in (0, 1), (words, done.stderr)
    assert {path.name for path in installed.folder.iterdir()} <= {"venv", "image.tar", "cache"}


def test_an_installed_package_plans_from_its_own_catalog(installed: Installed) -> None:
    done = installed.weir("plan", "cpu-naive")
    assert done.returncode == 0, done.stderr
    dockerfile = json.loads(done.stdout)["bake"]["target"]["cpu-naive"]["dockerfile"]
    assert Path(dockerfile).is_file()
    assert not Path(dockerfile).is_relative_to(ROOT)


@pytest.fixture(scope="module")
def built(installed: Installed) -> Iterator[str]:
    """An image by the installed package, on the root file system of `cpu` and with a stand-in for torch."""
    text = (ROOT / "images/variants.yaml").read_text()
    bootstrap = text[text.index("      - bootstrap:") : text.index("    torch:")]
    catalog, state = installed.folder / "variants.yaml", installed.folder / "state"
    state.mkdir()
    (state / "rootfs").symlink_to(ROOT / ".weir/rootfs")
    with package_index(installed.folder / "index") as index:
        make_torch(index.files, "9.1.0+cpu")
        index.refresh()
        source = f'{{name: standin-index, build: cpu, require: ["torch==9.1.0+cpu"], index: "{index.url}"}}'
        catalog.write_text(
            "schema_version: 1\nsource_date_epoch: 1767225600\nvariants:\n"
            f"  {VARIANT}:\n    summary: built by an installed package\n"
            f'    python: "3.11"\n    base:\n{bootstrap}    torch:\n      - {source}\n    wheels: []\n'
        )
        done = installed.weir(
            *("build", VARIANT, "--catalog", str(catalog), "--no-audit"), WEIR_STATE=str(state)
        )
        assert done.returncode == 0, done.stderr
        yield f"weir/{VARIANT}:latest"


def test_an_installed_package_builds_and_proves_an_image(installed: Installed, built: str) -> None:
    assert Engine().inspect(built) is not None
    assert (installed.folder / "variants.lock.json").exists()
    assert (installed.folder / f"state/reports/images/{VARIANT}.build.json").exists()
    assert not (installed.folder / "reports").exists()


def test_an_installed_package_prunes_and_proves_an_image(installed: Installed, built: str) -> None:
    context = installed.folder / "fat"
    context.mkdir()
    for card in ("gfx803", "gfx906"):
        (context / f"Kernels_{card}.co").write_text(card)
    (context / "Dockerfile").write_text(f"FROM {built}\nCOPY *.co /opt/\n")
    make = ["docker", "buildx", "build", "--builder=default", "-q", "-t", FAT, str(context)]
    subprocess.run(make, check=True, capture_output=True)
    done = installed.weir("prune", FAT, "--targets", "gfx906")
    assert done.returncode == 0, done.stderr
    assert "1 file for other cards" in done.stdout
    assert "computes" in done.stdout  # the proof ran, from the package's own smoke.py
    assert (installed.folder / "cache/weir").is_dir()
