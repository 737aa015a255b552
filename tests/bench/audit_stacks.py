"""Random layer stacks, applied by umoci and the engine on real file systems, and by the audit in its index.

Many stacks share an image, each below a directory of its own: rules of layers know no more than paths.
"""

import os
import random
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import image_maker as make

from buildtool.image.archive import open_archive
from buildtool.image.merge import Tree as MergedTree
from buildtool.image.merge import merge
from buildtool.image.reader import ImageContents, host_platform, read_image
from buildtool.image.tar import SYMLINK

Tree = dict[str, int | str]  # path -> bytes of a file, or a link's target
NAMES = ("a", "b", "c")
CONTAINER, REF = "bench-stacks", "bench/stacks:1"  # for engines, which keep images by name
Oracle = Callable[[Path, Path], Tree]  # layout of an image named REF, where to apply its layers -> the result
VERBS = ("file", "file", "file", "dir", "link", "hard", "gone", "opaque")


def find_umoci(work: Path) -> Path | None:
    """umoci of this host, else of the distribution's package, unpacked in `work`; None without either."""
    found = shutil.which("umoci")
    if found:
        return Path(found)
    got = subprocess.run(["apt-get", "download", "umoci"], cwd=work, capture_output=True, check=False)
    packages = list(work.glob("umoci_*.deb"))
    if got.returncode or not packages:
        return None
    subprocess.run(["dpkg", "-x", packages[0], work / "umoci-root"], check=True)
    return work / "umoci-root" / "usr" / "bin" / "umoci"


def differences(apply: Oracle, work: Path, numbers: Sequence[int], together: int = 100) -> int:
    """How many of these random stacks an oracle and the audit disagree on."""
    wrong = 0
    for first in range(0, len(numbers), together):
        group = numbers[first : first + together]
        layers = [b"".join(rows) for rows in zip(*map(random_stack, group), strict=True)]
        image = make.Image(
            [layer + make.END for layer in layers], architecture=host_platform().architecture, ref=REF
        )
        with tempfile.TemporaryDirectory(dir=work) as name:
            layout = make.layout_directory(make.docker_25(image) | named_index(image), Path(name) / "layout")
            ours = by_audit(read_image(open_archive(layout), label="stacks"))
            theirs = apply(layout, Path(name) / "applied")
        wrong += sum(below(ours, number) != below(theirs, number) for number in group)
    return wrong


def has_told_parents(number: int) -> bool:
    """Is a stack as builders write it? Engines follow links above untold parents in some layers only."""
    return number % 3 != 0


def named_index(image: make.Image) -> make.Members:
    """umoci and engines find images by these annotations."""
    row = make.descriptor(
        image.manifest(),
        "application/vnd.oci.image.manifest.v1+json",
        annotations={
            "org.opencontainers.image.ref.name": "stacks",
            "io.containerd.image.name": f"docker.io/{REF}",
        },
    )
    return {"index.json": make.index_of(row)}


def random_stack(number: int) -> list[bytes]:
    """Four layers of a stack, each some members without the archive's end."""
    chance = random.Random(number)
    make_layer = layer_of_a_builder if has_told_parents(number) else layer_through_links
    return [b"".join([make.folder(f"s{number:05}"), *make_layer(chance, f"s{number:05}")]) for _ in range(4)]


def layer_of_a_builder(chance: random.Random, root: str) -> Iterator[bytes]:
    """Each path once, its parents as directories before it, as engines write what a step has changed."""
    steps = {random_path(chance, 3): chance.choice(VERBS) for _ in range(chance.randint(1, 7))}
    made: list[str] = []
    told: set[str] = set()
    for path, verb in sorted(steps.items()):
        if any(steps.get(above, "dir") not in ("dir", "opaque") for above in above_of(path)):
            continue  # one layer that has a file and something below it is nobody's
        needed = [*above_of(path), *([path] if verb in ("dir", "opaque") else [])]
        yield from (make.folder(f"{root}/{needs}") for needs in needed if needs not in told)
        told.update(needed)
        if verb != "dir":
            yield member(chance, root, path, (verb, made))


def layer_through_links(chance: random.Random, root: str) -> Iterator[bytes]:
    """Parents that aren't told and may be links, of this layer or one below, as hand-made layers have."""
    made: list[str] = []
    verb = chance.choice(
        ("link", "gone")
    )  # not both: what a whiteout below one's own link means, no rule says
    paths = {random_path(chance, 3) for _ in range(chance.randint(1, 6))}
    for path in sorted(paths, key=lambda path: (path.count("/"), path)):
        if path.count("/") < 2:
            yield member(chance, root, path, (verb, made))
        else:  # files have names that no directory has, wherever the links above them lead
            yield member(chance, root, path[:-1] + chance.choice("xyz"), ("file", made))


def member(chance: random.Random, root: str, path: str, step: tuple[str, list[str]]) -> bytes:
    verb, made = step
    directory, _, name = f"{root}/{path}".rpartition("/")
    match verb:
        case "gone":
            return make.file(f"{directory}/.wh.{name}")
        case "opaque":
            return make.file(f"{root}/{path}/.wh..wh..opq")
        case "link":
            later = [other for other in NAMES if other > name]  # so that no links make a circle
            return make.symlink(f"{root}/{path}", chance.choice((*later, "missing", ".")))
        case "hard" if made:
            return make.hardlink(f"{root}/{path}", f"{root}/{chance.choice(made)}")
    made.append(path)
    return make.file(f"{root}/{path}", bytes([65 + chance.randrange(26)]) * chance.randint(1, 9))


def random_path(chance: random.Random, depth: int) -> str:
    return "/".join(chance.choice(NAMES) for _ in range(chance.randint(1, depth)))


def above_of(path: str) -> Sequence[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def by_audit(contents: ImageContents) -> Tree:
    merged = merge([layer.index for layer in contents.layers if layer.index])
    tree: Tree = {}
    waiting: list[tuple[str, MergedTree]] = [("", merged.tree)]
    while waiting:
        directory, held = waiting.pop()
        for raw, row in held.items():
            path = f"{directory}/{raw.decode()}".lstrip("/")
            if isinstance(row, dict):
                waiting.append((path, row))
                continue
            layer = merged.layer_of(row)
            index, at = merged.layers[layer], row - merged.starts[layer]
            if index.kinds[at] == SYMLINK:
                tree[path] = index.links[at].decode()
            else:
                tree[path] = merged.size(merged.links.get(row, row))
    return tree


def by_umoci(umoci: Path, layout: Path, bundle: Path) -> Tree:
    command = [umoci, "unpack", "--rootless", "--image", f"{layout}:stacks", bundle]
    subprocess.run(command, check=True, capture_output=True)
    root = bundle / "rootfs"
    tree: Tree = {}
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder) / name
            state = path.lstat()
            if stat.S_ISREG(state.st_mode):
                tree[str(path.relative_to(root))] = state.st_size
            elif stat.S_ISLNK(state.st_mode):
                tree[str(path.relative_to(root))] = str(path.readlink())
    return tree


def by_engine(layout: Path, scratch: Path) -> Tree:
    """What the engine's storage (overlayfs, mostly) makes of the layers. Raises CalledProcessError."""
    exported = scratch.with_suffix(".tar")
    archive = subprocess.Popen(["tar", "-C", layout, "-c", "."], stdout=subprocess.PIPE)
    try:
        engine("load", stdin=archive.stdout)
        engine("create", "--name", CONTAINER, REF, "true")
        engine("export", CONTAINER, "-o", str(exported))
    finally:
        archive.communicate()
        for words in (("rm", "--force", CONTAINER), ("rmi", "--force", REF)):
            subprocess.run(["docker", *words], check=False, capture_output=True)
    tree: Tree = {}
    with tarfile.open(exported) as reader:
        for row in reader:
            if row.issym():
                tree[row.name] = row.linkname
            elif row.isreg() or row.islnk():
                tree[row.name] = reader.getmember(row.linkname).size if row.islnk() else row.size
    return tree


def engine(*words: str, stdin: IO[bytes] | None = None) -> None:
    """One command of the engine's. Raises CalledProcessError."""
    subprocess.run(["docker", *words], stdin=stdin, check=True, capture_output=True)


def below(tree: Tree, number: int) -> Tree:
    prefix = f"s{number:05}/"
    return {path: what for path, what in tree.items() if path.startswith(prefix)}
