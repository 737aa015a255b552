"""Bytecode of the modules that the service imports at its start, so that no container compiles them again.

The image's own Python writes it, on this host: its root file system's interpreter, run by the loader beside
it, without an engine and without root. It compiles, and runs nothing of a wheel.
"""

import json
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from buildtool.build.payload import APP
from buildtool.build.runtimes import write_entry
from buildtool.core.command import CommandFailed, run
from buildtool.core.errors import EnvironmentMissing
from buildtool.core.files import write_text
from buildtool.image.flatten import Entry
from buildtool.image.layer_writer import TarMembers, pieces_of
from buildtool.image.tar import normal_path

SCRIPT = Path(__file__).parent / "compile_modules.py"
LIMIT_S = 600
_IMPORT = re.compile(r"^(?:from\s+([\w.]+)\s+import\s+([\w, ]*)|import\s+([\w., ]+))", re.MULTILINE)
# of a root file system: the interpreter, its library and what these link to
_PYTHON = r"usr/(?:bin/python{0}|lib/python{0}/.+\.(?:pyc?|so)|{1})"
_LIBRARIES = (
    r"lib(?:64)?/(?:[^/]+/)?(?:ld-linux[^/]*|lib(?:bz2|c|dl|expat|lzma|m|pthread|rt|util|z))\.so[^/]*"
)


def imported_names(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The dotted names in the import statements that the service's files run at once: not in functions."""
    names: set[str] = set()
    for path, content in files.items():
        if path.startswith(f"{APP}/service/") and path.endswith(".py"):
            for base, members, plain in _IMPORT.findall(content.decode("utf-8", "replace")):
                names |= {base, *(f"{base}.{_first(each)}" for each in members.split(","))} if base else set()
                names |= {_first(each) for each in plain.split(",")}
    return tuple(sorted(name for name in names if name.strip(".") == name != ""))


def write_bytecode(
    members: TarMembers,
    rootfs: Path,
    wheels: Sequence[Path],
    modules: Sequence[str],
    *,
    python: str,
    epoch: int,
    folder: Path,
) -> None:
    """Write what `modules` import into a layer; nothing where the root file system has no Python `python`.

    That is a version ("3.11"); `folder` is a scratch directory. Raises EnvironmentMissing where the Python
    can't run on this host, OSError.
    """
    from buildtool.build.wheel_layer import KEPT, SITE, UNNEEDED  # and the library: see image_writer

    root, job, out = folder / "root", folder / "job.json", folder / "bytecode.zip"
    _unpack_python(rootfs, python, root)
    program = root / f"usr/bin/python{python}"
    if not program.is_file():
        return
    said = {
        "wheels": list(map(str, wheels)), "modules": list(modules), "site": SITE, "epoch": epoch,
        "left_out": UNNEEDED.pattern, "kept": KEPT.pattern,
    }  # fmt: skip
    write_text(job, json.dumps(said))
    loader = next(root.rglob("ld-linux*.so.*"), root / "no loader")
    libraries = {str(path.parent) for path in root.rglob("libc.so.*")}
    words = ["env", "-i", "PYTHONHASHSEED=0", "LC_ALL=C.UTF-8", "timeout", str(LIMIT_S), str(loader)]
    words += ["--library-path", ":".join(sorted(libraries)), str(program)]
    try:
        run([*words, "-S", "-s", "-B", str(SCRIPT), str(job), str(out)])
    except CommandFailed as error:
        raise EnvironmentMissing(
            f"the image's own Python {python} doesn't run on this host: {error.tail or error.message}",
            "if programs may not run from that disk (noexec), name another place: WEIR_STATE=DIR, TMPDIR=DIR",
        ) from error
    with zipfile.ZipFile(out) as made:
        for name in sorted(made.namelist()):
            content = made.read(name)
            members.file(name, len(content), [content])


def _unpack_python(rootfs: Path, version: str, root: Path) -> None:
    """Write a root file system's Python, and what it links to, below `root`."""
    wanted = re.compile(_PYTHON.format(re.escape(version), _LIBRARIES))
    with tarfile.open(rootfs) as tar:
        for info in tar:
            info.name = normal_path(info.name)
            file = tar.extractfile(info) if info.isreg() else None
            is_link = info.issym() and "/" not in info.linkname  # to what is beside it
            if wanted.fullmatch(info.name) and (file or is_link):
                pieces = pieces_of(cast(BinaryIO, file)) if file else iter([b""])
                write_entry(Entry(info, pieces), root)


def _first(text: str) -> str:
    """The name in `name as other`."""
    return (text.split() or [""])[0]
