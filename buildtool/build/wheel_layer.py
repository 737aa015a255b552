"""Installs wheels into a layer: what `pip install` would make, less what no service needs.

`installer` decides where each file of a wheel goes, what its scripts are and what RECORD says; here that
goes into a tar instead of a directory. Nothing is unpacked on this host, and no code of a wheel runs.
"""

import base64
import configparser
import csv
import hashlib
import io
import os
import posixpath
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from installer import install
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, InvalidRecordEntry, RecordEntry
from installer.scripts import Script
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme, construct_record_file, fix_shebang

from buildtool.core.errors import DataError
from buildtool.image.layer_writer import TarMembers, pieces_of
from buildtool.image.streams import ReadAhead
from buildtool.prune.archives import ZIP_FAULTS

PREFIX = "opt/weir"
SITE = f"{PREFIX}/lib"
LARGE_BYTES = 16 << 20
INTERPRETER = "/usr/bin/env python3"  # that of the image
INSTALLER = b"weir\n"
FOLDERS = {
    "purelib": SITE,
    "platlib": SITE,
    "scripts": f"{PREFIX}/bin",
    "headers": f"{PREFIX}/share/include",
    "data": f"{PREFIX}/share",
}
# headers, static libraries, CMake files, tests, and what type checkers read
UNNEEDED = re.compile(
    r"\.(?:a|h|hpp|hxx|cuh|cmake|pc|pyi)$"
    r"|^torch/(?:include|test|share)/"
    r"|^torch/bin/(?!torch_shm_manager)"
    r"|^torch/lib/lib(?:torchbind_test|jitbackend_test|backend_with_compiler|aoti_custom_ops)\.so$"
    r"|(?:^|/)tests?/(?!__init__\.py$).*\.(?:py|json|txt|npz|npy|png)$"
)
KEPT = re.compile(r"^torch/(?:testing|_inductor|utils)/")  # reached at run time, whatever their names say
_FAULTS = (
    *ZIP_FAULTS,
    InstallerError,
    InvalidRecordEntry,
    configparser.Error,
    LookupError,
    AssertionError,
    csv.Error,
)


def install_wheels(wheels: Mapping[str, Path], members: TarMembers) -> None:
    """Install wheels, by their names, into a layer. Raises DataError for one that can't be, OSError."""
    written: dict[str, Hash] = {}
    for name, path in sorted(wheels.items()):
        try:
            with zipfile.ZipFile(path) as archive:
                archive.filename = name  # a pruned one lies under another name
                destination = _Layer(members, written)
                install(_Source(archive), destination, additional_metadata={"INSTALLER": INSTALLER})
        except (*_FAULTS, DataError) as error:
            reason = error.message if isinstance(error, DataError) else error
            raise DataError(
                f"{name} can't be installed: {reason}", "leave it out, or name another version of it"
            ) from error


class _Sized(io.RawIOBase):
    """A file of a wheel, of known length."""

    def __init__(self, stream: BinaryIO, n_bytes: int) -> None:
        super().__init__()
        self.stream, self.n_bytes = stream, n_bytes


@contextmanager
def _inflated(file: _Sized) -> Iterator[Iterable[bytes]]:
    """A file's bytes in pieces; those of a large one are inflated beside what hashes and compresses them."""
    if file.n_bytes < LARGE_BYTES:
        yield pieces_of(file.stream)
        return
    with ReadAhead(pieces_of(file.stream)) as pieces:
        yield pieces


class _Hashed:
    """Bytes in pieces, hashed while they pass."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self._hash = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._hash.update(piece)
            yield piece

    def value(self) -> Hash:
        """What RECORD says of the bytes that have passed."""
        text = base64.urlsafe_b64encode(self._hash.digest()).decode().rstrip("=")
        return Hash("sha256", text)


class _Source(WheelFile):
    """A wheel whose files have a length; bytecode in it is passed over, as by pip."""

    def get_contents(self) -> Iterator[WheelContentElement]:
        """The files in the wheel's order."""
        for elements, stream, is_executable in super().get_contents():
            path = elements[0]
            if path == self.data_dir:  # the library would look for its folder without end
                raise DataError(f"it has a file in place of the folder {path!r}")
            if "__pycache__" not in path.split("/")[:-1]:
                sized = _Sized(stream, self._zipfile.getinfo(path).file_size)
                yield elements, cast(BinaryIO, sized), is_executable


class _Layer(WheelDestination):
    """Writes what a wheel asks for into a layer, less what UNNEEDED names.

    `written` are the hashes of the files that this layer has, by path: where two wheels have the very same
    file, as namespace packages do, it is written once.
    """

    def __init__(self, members: TarMembers, written: dict[str, Hash]) -> None:
        self._members = members
        self._written = written
        self._left_out: set[str] = set()

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """One file of the wheel, or nothing for an unneeded one."""
        name = os.fspath(path)
        if UNNEEDED.search(name) and not KEPT.match(name):
            self._left_out.add(name)
            return RecordEntry(name, None, None)
        if isinstance(stream, _Sized):
            if scheme != "scripts":
                with _inflated(stream) as pieces:
                    return self._write(scheme, name, stream.n_bytes, pieces, executable=is_executable)
            stream = stream.stream
        content = stream.read()
        if scheme == "scripts":
            with fix_shebang(io.BytesIO(content), INTERPRETER) as fixed:
                content = fixed.read()
        return self._write(scheme, name, len(content), [content], executable=is_executable)

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:
        """A script that calls an entry point."""
        script = Script(name, module, attr, section)  # type: ignore[arg-type]
        path, content = script.generate("/usr/bin/python3", "posix")
        content = f"#!{INTERPRETER}\n".encode() + content.partition(b"\n")[2]  # which it would quote
        return self._write(Scheme("scripts"), path, len(content), [content], executable=True)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """Write RECORD without the files that were left out: it lists what is there."""

        def prefix(other: Scheme) -> str | None:
            if other == scheme:
                return None
            return posixpath.relpath(FOLDERS[other], start=FOLDERS[scheme]) + "/"

        there = [(place, entry) for place, entry in records if entry.path not in self._left_out]
        with construct_record_file(there, prefix) as file:
            content = file.read()
        self._write(scheme, record_file_path, len(content), [content], executable=False)

    def _write(
        self, scheme: Scheme, name: str, n_bytes: int, pieces: Iterable[bytes], *, executable: bool
    ) -> RecordEntry:
        folder = FOLDERS[scheme]
        path = posixpath.normpath(posixpath.join(folder, name))
        if not path.startswith(f"{folder}/"):
            raise DataError(f"it has a file outside of its place: {name!r}")
        hashed = _Hashed(pieces)
        if self._members.holds(path):
            for _ in hashed:
                pass
            if hashed.value() != self._written[path]:
                raise DataError(f"another wheel has another file at /{path}")
        else:
            self._members.file(path, n_bytes, hashed, executable=executable)
            self._written[path] = hashed.value()
        return RecordEntry(name, self._written[path], n_bytes)
