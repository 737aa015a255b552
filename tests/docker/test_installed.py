"""The package from `pip install` alone, in a fresh venv outside the checkout: it builds and prunes images."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from standins import make_torch, package_index

from buildtool.engine.client import Engine

ROOT = Path(__file__).parents[2]
VARIANT = f"t-installed-{os.getpid()}"
FAT = f"weir/{VARIANT}:fat"
NOT_SHIPPED = {"variants.lock.json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git tracks; building one in the checkout itself would leave `build/` there."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked("."):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(folder / "source"))
    [made] = folder.glob("*.whl")
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
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip(str(folder / "venv/bin/python"), "install", str(wheel))
    yield Installed(folder / "venv/bin/weir", folder)
    engine = Engine()
    for ref in (FAT, f"weir/{VARIANT}:gfx906", f"weir/{VARIANT}:latest"):
        engine.remove_tag(ref)


def pip(python: str, *words: str) -> None:
    command = [python, "-m", "pip", words[0], "-q", "--disable-pip-version-check", *words[1:]]
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


def test_an_installed_package_plans_from_its_own_catalog(installed: Installed) -> None:
    done = installed.weir("plan", "cpu")
    assert done.returncode == 0, done.stderr
    dockerfile = json.loads(done.stdout)["target"]["cpu"]["dockerfile"]
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
            f"  {VARIANT}:\n    summary: built by an installed package\n    dockerfile: slim\n"
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
