"""Registry bases and package indexes, on stand-ins: which source serves, what is pinned, what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from standins import ROOT, Index, Shop, make_torch, make_wheel, package_index, registry

from buildtool.build import catalog
from buildtool.build.rootfs import RootfsCache
from buildtool.core.errors import Exit, SourceUnreachable
from buildtool.core.model import Bootstrap
from buildtool.engine.client import Engine

NAME = f"standin-{os.getpid()}"
REF = f"weir/{NAME}:latest"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stand-in for python:3.11-slim in a registry on loopback; yields its reference."""
    folder = tmp_path_factory.mktemp("registry")
    loaded = catalog.load()
    recipe = next(b for b in loaded.select(("cpu",))[0].base if isinstance(b, Bootstrap))
    rootfs, _ = RootfsCache(ROOT / ".weir/rootfs", print).bring(recipe, loaded.source_date_epoch)
    with registry(folder) as address:
        ref = f"{address}/standin/python:3.11-slim"
        push_base(folder, rootfs, ref, "first")
        yield ref
    subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)


def push_base(folder: Path, rootfs: Path, ref: str, mark: str) -> None:
    context = folder / "base"
    context.mkdir(exist_ok=True)
    (context / "rootfs.tar").unlink(missing_ok=True)
    os.link(rootfs, context / "rootfs.tar")
    (context / "Dockerfile").write_text(f"FROM scratch\nADD rootfs.tar /\nLABEL standin={mark}\n")
    subprocess.run(["docker", "build", "-q", "-t", ref, str(context)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["docker", "push", "-q", ref], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as found:
        yield found


@pytest.fixture
def shop(tmp_path: Path, base: str, index: Index) -> Iterator[Shop]:
    """A catalog with a registry base and torch from an index that gives a stand-in ROCm build."""
    (tmp_path / "shop").mkdir()
    made = Shop(tmp_path / "shop")
    make_torch(index.files, "9.1.0+rocm9.9", hip="9.9")
    index.refresh()
    made.write(
        variant(
            base,
            f'{{name: standin-index, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{index.url}"}}',
        )
    )
    yield made
    subprocess.run(["docker", "image", "rm", "-f", REF], check=False, capture_output=True)


def variant(base: str, *torch: str) -> str:
    sources = "".join(f"      - {source}\n" for source in torch)
    return (
        f"  {NAME}:\n    summary: stand-in for a registry base and a ROCm wheel index\n"
        f'    python: "3.11"\n    base: [{{registry: "{base}"}}]\n    torch:\n{sources}    wheels: []\n'
    )


def test_a_registry_base_and_a_rocm_index_make_a_proved_image(shop: Shop, base: str) -> None:
    done = shop.build("--no-audit")
    assert done.returncode == Exit.OK, done.stderr
    assert "9.1.0+rocm9.9 (rocm, from standin-index)" in done.stdout
    locked = shop.lock["variants"][NAME]  # type: ignore[index]
    assert locked["base"]["origin"] == "registry"
    assert locked["base"]["pin"].startswith("sha256:")
    assert locked["wheels"][0]["filename"] == "torch-9.1.0+rocm9.9-py3-none-any.whl"
    labels = Engine().inspect(REF)["Config"]["Labels"]  # type: ignore[index]
    assert labels["io.weir.source.base"] == f"registry:{base}"
    assert labels["org.opencontainers.image.base.digest"] == locked["base"]["pin"]
    assert labels["io.weir.source.torch"] == "standin-index"
    assert shop.leftovers() == []


def test_a_proved_image_is_named_and_pushed(shop: Shop, base: str) -> None:
    name = f"{base.partition('/')[0]}/pushed/{{variant}}:1"
    done = shop.build("--no-audit", "--tag", name, "--push", "--platform", "linux/amd64", "--verbose")
    assert done.returncode == Exit.OK, done.stderr
    ref = name.format(variant=NAME)
    engine = Engine()
    assert engine.inspect(ref)["Id"] == engine.inspect(REF)["Id"]  # type: ignore[index]
    assert f"pushed {ref}@{engine.registry_digest(ref)}" in done.stdout
    assert "Looking in indexes" in done.stderr, "a line that only --verbose shows"
    subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)


def test_an_image_without_its_proof_is_not_pushed(shop: Shop, base: str, index: Index) -> None:
    make_torch(index.files, "9.2.0+rocm9.9", cuda="12")
    index.refresh()
    source = f'{{name: standin-index, build: rocm, require: ["torch==9.2.0+rocm9.9"], index: "{index.url}"}}'
    shop.write(variant(base, source))
    ref = f"{base.partition('/')[0]}/unproved/standin:1"
    assert shop.build("--no-audit", "--tag", ref, "--push").returncode == Exit.BUILD
    assert Engine().inspect(ref) is None
    with pytest.raises(SourceUnreachable):
        Engine().registry_digest(ref)


def test_a_state_directory_and_a_catalog_with_any_signs_in_their_path_build(
    tmp_path: Path, base: str, index: Index
) -> None:
    make_torch(index.files, "9.1.0+rocm9.9", hip="9.9")
    index.refresh()
    shop = Shop(tmp_path / "a b'c\"d${HOME}%{x}[z]")
    shop.folder.mkdir()
    source = f'{{name: standin-index, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{index.url}"}}'
    shop.write(variant(base, source))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.OK, done.stderr
    subprocess.run(["docker", "image", "rm", "-f", REF], check=False, capture_output=True)


def test_a_locked_base_stays_when_its_tag_moves(shop: Shop, base: str, tmp_path: Path) -> None:
    assert shop.build("--no-audit").returncode == Exit.OK
    pinned = shop.lock["variants"][NAME]["base"]["pin"]  # type: ignore[index]
    loaded = catalog.load()
    recipe = next(b for b in loaded.select(("cpu",))[0].base if isinstance(b, Bootstrap))
    push_base(
        tmp_path,
        RootfsCache(ROOT / ".weir/rootfs", print).path(recipe, loaded.source_date_epoch),
        base,
        "moved",
    )
    assert shop.build("--no-audit").returncode == Exit.OK
    assert shop.lock["variants"][NAME]["base"]["pin"] == pinned  # type: ignore[index]
    assert shop.build("--no-audit", "--update-lock").returncode == Exit.OK
    assert shop.lock["variants"][NAME]["base"]["pin"] != pinned  # type: ignore[index]


def test_a_torch_that_is_not_the_promised_build_breaks_the_build(shop: Shop, index: Index) -> None:
    make_torch(index.files, "9.1.0+rocm9.9", cuda="13.0")  # its name says ROCm, itself says CUDA
    index.refresh()
    done = shop.build("--no-audit")
    assert done.returncode == Exit.BUILD, done.stderr
    assert "a cuda build; source standin-index promises a rocm build" in done.stderr


def test_a_cuda_wheel_beside_torch_disqualifies_a_source(shop: Shop, index: Index, base: str) -> None:
    make_wheel(index.files, "nvidia_cublas", "1.0", {"nvidia/x.py": ""})
    wheel = make_torch(index.files, "9.2.0+rocm9.9", hip="9.9")
    add_requirement(wheel, "nvidia-cublas==1.0")
    index.refresh()
    first = f'{{name: tainted, build: rocm, require: ["torch==9.2.0+rocm9.9"], index: "{index.url}"}}'
    second = f'{{name: clean, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{index.url}"}}'
    shop.write(variant(base, first, second))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.OK, done.stderr
    assert "torch source tainted gives a build other than rocm: it brings nvidia-cublas" in done.stdout
    assert "from clean" in done.stdout


def add_requirement(wheel: Path, requirement: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            extra = f"Requires-Dist: {requirement}\n".encode() if name.endswith("METADATA") else b""
            archive.writestr(name, data + extra)


def test_an_unreachable_index_is_skipped_and_reported(shop: Shop, index: Index, base: str) -> None:
    dead = '{name: dead, build: rocm, require: ["torch==1.0+rocm1"], index: "http://127.0.0.1:1/simple/"}'
    alive = f'{{name: alive, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{index.url}"}}'
    shop.write(variant(base, dead, alive))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.OK, done.stderr
    assert "skipped torch source dead" in done.stdout


def test_when_no_source_answers_each_is_named(shop: Shop, base: str) -> None:
    dead = '{name: dead, build: rocm, require: ["torch==1.0+rocm1"], index: "http://127.0.0.1:1/simple/"}'
    shop.write(variant(base, dead))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.ENVIRONMENT
    assert "no source of torch answers" in done.stderr
    assert "torch source dead" in done.stderr
    assert not (shop.folder / "lock.json").exists()
    assert shop.leftovers() == []


def test_a_dead_registry_without_another_base_is_reported(shop: Shop, index: Index) -> None:
    source = f'{{name: alive, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{index.url}"}}'
    shop.write(variant("127.0.0.1:1/nobody/home:1", source))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.ENVIRONMENT
    assert "registry base 127.0.0.1:1/nobody/home:1" in done.stderr


def test_an_index_that_changed_a_locked_wheel_is_refused(shop: Shop, index: Index) -> None:
    assert shop.build("--no-audit").returncode == Exit.OK
    for cached in (shop.state / "wheels").glob("*/torch-*.whl"):
        cached.unlink()
    make_torch(index.files, "9.1.0+rocm9.9", hip="6.6.6")
    index.refresh()
    done = shop.build("--no-audit")
    assert done.returncode == Exit.DATA
    assert "differs from the locked one" in done.stderr


def test_a_wheel_cut_short_in_transit_is_refused(shop: Shop, index: Index) -> None:
    wheel = next(index.files.glob("torch-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:300])  # the page still names the whole file's hash
    done = shop.build("--no-audit")
    assert done.returncode == Exit.ENVIRONMENT
    assert "torch source standin-index" in done.stderr
    assert shop.leftovers() == []


def test_a_corrupt_cached_wheel_is_named_removed_and_fetched_again(shop: Shop) -> None:
    assert shop.build("--no-audit").returncode == Exit.OK
    [cached] = (shop.state / "wheels").glob("*/torch-*.whl")
    data = bytearray(cached.read_bytes())
    data[len(data) // 2] ^= 0xFF
    cached.write_bytes(data)
    done = shop.build("--no-audit", "--no-cache")
    assert done.returncode == Exit.DATA
    assert "torch-9.1.0+rocm9.9-py3-none-any.whl is corrupt" in done.stderr
    assert shop.build("--no-audit").returncode == Exit.OK


def test_what_plan_prints_is_what_the_build_hands_to_bake(shop: Shop) -> None:
    """A `docker` in the way keeps the bake file of the build; the inputs are locked by then."""
    catalog_file = shop.folder / "variants.yaml"
    catalog_file.write_text(
        catalog_file.read_text().replace("    python:", "    dockerfile: naive\n    python:")
    )
    assert shop.build("--no-audit").returncode == Exit.OK
    programs, handed = shop.folder / "programs", shop.folder / "handed.json"
    programs.mkdir()
    docker = shutil.which("docker")
    keep = f'[ "$2" != bake ] || exec {docker} "$@" < <(tee {handed})\n'
    (programs / "docker").write_text(f'#!/bin/bash\n{keep}exec {docker} "$@"\n')
    (programs / "docker").chmod(0o755)
    assert shop.build("--no-audit", PATH=f"{programs}:{os.environ['PATH']}").returncode == Exit.OK
    plan = [sys.executable, "-m", "buildtool", "plan", "--catalog", str(shop.folder / "variants.yaml")]
    printed = subprocess.run(plan, env=shop.environment(), capture_output=True, text=True, check=True)
    [given] = re.findall(rf"weir-building:\S+-{NAME}", handed.read_text())  # until it is proved
    expected = json.loads(handed.read_text().replace(given, REF))
    assert json.loads(printed.stdout) == {"images": {}, "bake": expected}
    assert "sha256:" in printed.stdout
    assert "not-resolved-yet" not in printed.stdout
