"""Tars as the audit's walker and Go's archive/tar read them: outside corpora, and mutated headers.

Go's reader and the corpora come from Debian's packages, unpacked in scratch. Nothing of them is kept.
"""

import os
import struct
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildtool.audit.faults import ImageFault
from buildtool.audit.tarwalk import DEVICE, DIRECTORY, FILE, HARDLINK, SYMLINK, TarReader

CHUNK = 1 << 16
GO_PACKAGES = ("golang-1.19-go", "golang-1.19-src")
PYTHON_PACKAGE = "libpython3.11-testsuite"
_SOURCE = Path(__file__).with_name("tar_by_go.go")
_KINDS = {ord("0"): FILE, ord("7"): FILE, ord("S"): FILE, ord("1"): HARDLINK, ord("2"): SYMLINK} | {
    ord("3"): DEVICE, ord("4"): DEVICE, ord("6"): DEVICE, ord("5"): DIRECTORY, ord("X"): None,
}  # fmt: skip

Row = tuple[bytes, int, int, int, bytes]  # name, kind, bytes and CRC-32 of the content (-1: sparse), link


@dataclass(frozen=True)
class Listing:
    """A tar's members up to its end, or up to what a reader refused."""

    rows: tuple[Row, ...]
    refused: str = ""


class GoReader:
    """Go's archive/tar in a program of ours."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def listings(self, archives: Sequence[bytes]) -> list[Listing]:
        """What it makes of each archive, up to a type that engines refuse."""
        sent = b"".join(struct.pack(">Q", len(archive)) + archive for archive in archives)
        said = subprocess.run([self._program], input=sent, capture_output=True, check=True).stdout
        found: list[Listing] = []
        rows: list[Row] = []
        refused = ""
        for line in said.decode().splitlines():
            if line == "end" or line.startswith("error: "):
                found.append(
                    Listing(tuple(rows), refused or line.removeprefix("error: ").removeprefix("end"))
                )
                rows, refused = [], ""
            elif not refused:
                flag, row = _row_of(line)
                if flag != ord("g"):  # engines pass over global headers
                    refused = "" if row else f"engines know no type {flag}"
                    rows += [row] if row else []
        assert len(found) == len(archives)
        return found


def fetched(packages: Sequence[str], work: Path) -> Path | None:
    """The packages of Debian's, unpacked below `work`; None where apt-get can't bring them."""
    folder = work / "debs"
    folder.mkdir(exist_ok=True)
    got = subprocess.run(["apt-get", "download", *packages], cwd=folder, capture_output=True, check=False)
    if got.returncode:
        return None
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, work / "unpacked"], check=True)
        package.unlink()
    return work / "unpacked"


def go_reader(root: Path, work: Path) -> GoReader:
    """Our program, compiled by the Go that `fetched` unpacked."""
    home = root / "usr" / "lib" / "go-1.19"
    program = work / "tar_by_go"
    surroundings = {
        "PATH": f"{home}/bin:{os.defpath}", "HOME": str(work), "GOROOT": str(home),
        "GO111MODULE": "off", "GOCACHE": str(work / "go-cache"), "CGO_ENABLED": "0", "GOFLAGS": "",
    }  # fmt: skip
    subprocess.run([home / "bin" / "go", "build", "-o", program, _SOURCE], env=surroundings, check=True)
    return GoReader(program)


def by_audit(archive: bytes) -> Listing:
    """The same by our walker. Sparse files, whose content Go expands, have no size and sum here."""
    reader = TarReader((archive[at : at + CHUNK] for at in range(0, len(archive), CHUNK)), place="tar")
    rows: list[Row] = []
    behind = 0
    try:
        for name, kind, size, link in reader:
            assert reader.offset > behind, "the walker doesn't advance"
            behind, total = reader.offset, 0
            for piece in reader.content():
                assert piece
                total = zlib.crc32(piece, total)
            rows.append((name, kind, size, total, link))
    except ImageFault as fault:
        return Listing(tuple(rows), fault.message)
    return Listing(tuple(rows))


def verdict(ours: Listing, theirs: Listing) -> str:
    """`alike`, `wrong` (another tree), `strict` (refused by us alone) or `lax` (by them alone)."""
    both = min(len(ours.rows), len(theirs.rows))
    if not all(map(_same, ours.rows[:both], theirs.rows[:both])):
        return "wrong"
    if ours.refused and not theirs.refused:
        return "strict"
    if theirs.refused and not ours.refused:
        return "lax"
    return "alike" if ours.refused or len(ours.rows) == len(theirs.rows) else "wrong"


def _same(ours: Row, theirs: Row) -> bool:
    sparse = theirs[2] < 0
    return (*ours[:2], ours[4]) == (*theirs[:2], theirs[4]) and (sparse or ours[2:4] == theirs[2:4])


def _row_of(line: str) -> tuple[int, Row | None]:
    flag, size, total, name, link, form = line.split()
    kind = _KINDS.get(int(flag))
    if kind is None:
        return int(flag), None
    target = bytes.fromhex(link[:-1]) if kind in (HARDLINK, SYMLINK) else b""
    content = (int(size), int(total)) if kind == FILE and form == "whole" else (0, 0)
    content = (-1, -1) if form == "sparse" and kind == FILE else content
    return int(flag), (bytes.fromhex(name[:-1]), kind, *content, target)


def corpora(root: Path) -> Iterator[tuple[str, bytes]]:
    """Every tar of Go's and CPython's test data."""
    for folder in ("usr/share/go-1.19", "usr/lib/python3.11/test"):
        for path in sorted((root / folder).rglob("*.tar")):
            yield f"{folder}/{path.name}", path.read_bytes()
