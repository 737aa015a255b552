"""`cpu-naive` as it was really built, kept as lists of files, and judged by the audit of today.

It takes 15 GB and minutes to build, so its Python files were listed once (`--record`), with those of the
`cpu` image and with the bytes that CUDA truly costs: files that no wheel of the `cpu` image has, nor their
bytecode. Both images must hold one version of torch. What is inside files isn't kept, so neither image has
findings about copies or about code in libraries.
"""

import argparse
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from buildtool.audit.claims import CUDA, saved_bytes
from buildtool.audit.counts import gather_facts
from buildtool.audit.findings import find_waste
from buildtool.audit.packages import Manager, Package, assign_unlisted_files, find_owners
from buildtool.engine.client import Engine
from buildtool.image.archive import StreamArchive
from buildtool.image.documents import parse_config
from buildtool.image.layer import LayerIndex
from buildtool.image.merge import merge
from buildtool.image.reader import Attestations, ImageContents, Layer, host_platform, read_image
from buildtool.image.tar import FILE

RECORDED = Path(__file__).parent / "recorded" / "cpu-naive.txt.xz"
ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".weir" / "context" / "cpu" / "wheels"
NAIVE, SLIM = "weir/cpu-naive:latest", "weir/cpu:latest"
_VERSION = re.compile(r"-[^/-]*(?=\.dist-info/)")
_BYTECODE = re.compile(r"__pycache__/(.+)\.cpython-[0-9]+\.pyc$")


@dataclass
class PythonLayer:
    """An image's Python distributions: their files, by path, with their bytes."""

    files: dict[Package, dict[str, int]] = field(default_factory=dict)

    @property
    def unpacked_bytes(self) -> int:
        """The sum of all files."""
        return sum(sum(files.values()) for files in self.files.values())


@dataclass(frozen=True)
class Recorded:
    """What was kept. `cuda_bytes` is counted by the wheels' lists, not by the audit."""

    made: str
    cuda_bytes: int
    naive: PythonLayer
    slim: PythonLayer


@dataclass(frozen=True)
class Judged:
    """What the audit of today says of it."""

    cuda_bytes: int  # of the finding; 0 without one
    predicted_bytes: int  # of the Python layer, after every remedy that the `cpu` image has had
    remedies: frozenset[str]


def judge(recorded: Recorded) -> Judged:
    """Audit both lists. The `cpu` image has had those remedies whose findings are in `cpu-naive` alone."""
    facts, slim = (
        gather_facts(contents_of(NAIVE, recorded.naive)),
        gather_facts(contents_of(SLIM, recorded.slim)),
    )
    findings = {row.id: row for row in find_waste(facts)}
    remedies = frozenset(findings) - {row.id for row in find_waste(slim)}
    left = sum(facts.layer_bytes) - saved_bytes(facts.claims, remedies)
    return Judged(findings[CUDA].bytes if CUDA in findings else 0, left, remedies)


def contents_of(ref: str, layer: PythonLayer) -> ImageContents:
    """An image of these files alone, with the databases that tell their owners."""
    index = LayerIndex()
    for package, files in layer.files.items():
        told = {
            "RECORD": "".join(f"{path},,\n" for path in files),
            "METADATA": f"Name: {package.name}\nVersion: {package.version}\n",
        }
        for path, n_bytes in files.items():
            directory, _, name = f"{package.place}/{path}".rpartition("/")
            if name in told and directory.endswith(".dist-info"):
                index.captured[len(index.names)] = zlib.compress(told[name].encode())
            index.dirs.append(directory.encode())
            index.names.append(name.encode())
            index.sizes.append(n_bytes)
            index.kinds.append(FILE)
    platform = host_platform()
    config = {
        "architecture": platform.architecture,
        "os": platform.os,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]},
    }
    return ImageContents(
        ref=ref,
        digest=None,
        manifest_digest=None,
        config_digest="",
        config=parse_config(json.dumps(config).encode(), place=ref),
        layers=(Layer(None, "", None, 0, None, index),),
        attestations=Attestations(),
        notes=(),
    )


def load(path: Path = RECORDED) -> Recorded:
    """What `--record` wrote."""
    layers: dict[str, PythonLayer] = {}
    head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    files: dict[str, int] = {}
    for line in lines:
        match line.split("\t"):
            case ["image", ref]:
                layer = layers[ref] = PythonLayer()
            case ["distribution", place, name, version]:
                files = layer.files[Package(Manager.PYTHON, name, version, place)] = {}
            case [directory]:
                folder = directory
            case [name, size]:
                files[folder + name] = int(size)
    return Recorded(**json.loads(head), naive=layers[NAIVE], slim=layers[SLIM])


def dump(recorded: Recorded) -> bytes:
    """One line a directory, then one a file: what compresses well."""
    lines = [json.dumps({"made": recorded.made, "cuda_bytes": recorded.cuda_bytes})]
    for ref, layer in ((NAIVE, recorded.naive), (SLIM, recorded.slim)):
        lines.append(f"image\t{ref}")
        for package, files in sorted(layer.files.items(), key=lambda row: row[0].name):
            lines.append(f"distribution\t{package.place}\t{package.name}\t{package.version}")
            told = None
            for directory, name, n_bytes in sorted(_split(files)):
                if directory != told:
                    lines.append(directory)
                    told = directory
                lines.append(f"{name}\t{n_bytes}")
    return lzma.compress("\n".join(lines).encode(), preset=9)


def _split(files: dict[str, int]) -> Iterator[tuple[str, str, int]]:
    for path, n_bytes in files.items():
        directory, slash, name = path.rpartition("/")
        yield directory + slash, name, n_bytes


def python_layer(contents: ImageContents) -> PythonLayer:
    """The visible files of an image that Python distributions own."""
    merged = merge([layer.index or LayerIndex() for layer in contents.layers])
    ownership = find_owners(merged)
    assign_unlisted_files(merged, ownership)
    found = PythonLayer()
    for row, owner in enumerate(ownership.owner):
        package = ownership.packages[owner]
        if package.manager is Manager.PYTHON and merged.content_visible[row]:
            path = merged.path(row).decode().removeprefix(f"{package.place}/")
            found.files.setdefault(package, {})[path] = merged.size(row)
    return found


def without_wheels(layer: PythonLayer, wheels: Path) -> int:
    """Bytes of the files that no wheel below a directory has, nor makes as bytecode."""
    names = {name for wheel in wheels.rglob("*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    there = {_VERSION.sub("", name) for name in names}
    there |= {f"{name.removesuffix('RECORD')}INSTALLER" for name in there if name.endswith("/RECORD")}
    return sum(
        n_bytes
        for files in layer.files.values()
        for path, n_bytes in files.items()
        if _BYTECODE.sub(r"\1.py", _VERSION.sub("", path)) not in there
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="WORDS", required=True, help="what was built, and when")
    made = parser.parse_args().record
    naive, slim = (
        python_layer(
            read_image(StreamArchive(Engine().save(ref), label=ref), label=ref, ref=ref, from_engine=True)
        )
        for ref in (NAIVE, SLIM)
    )
    RECORDED.write_bytes(dump(Recorded(made, without_wheels(naive, WHEELS), naive, slim)))


if __name__ == "__main__":
    sys.exit(main())
