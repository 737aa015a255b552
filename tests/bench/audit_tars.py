"""Tars as the audit's walker and Go's archive/tar read them: outside corpora, and mutated headers.

Go's reader and the corpora come from Debian's packages, unpacked in scratch. Nothing of them is kept.
"""

import bz2
import lzma
import math
import os
import signal
import struct
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mutated
from audit_inputs import watched
from board import Board

from buildtool.image.errors import ImageError
from buildtool.image.layer import index_layer
from buildtool.image.tar import DEVICE, DIRECTORY, FILE, HARDLINK, SYMLINK, TarReader

CHUNK = 1 << 16
GO_PACKAGES = ("golang-1.19-go", "golang-1.19-src")
PYTHON_PACKAGE = "libpython3.11-testsuite"
_SOURCE = Path(__file__).with_name("tar_by_go.go")
_KINDS = {ord("0"): FILE, ord("7"): FILE, ord("S"): FILE, ord("1"): HARDLINK, ord("2"): SYMLINK} | {
    ord("3"): DEVICE, ord("4"): DEVICE, ord("6"): DEVICE, ord("5"): DIRECTORY, ord("X"): None,
}  # fmt: skip

_OPENERS: Mapping[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
VALUES = 2000  # of each numeric field
LIMIT_S = 20.0
STRICT_BY_DOCS: frozenset[str] = frozenset()  # none of these tars meets a limit that docs/audit.md lists

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


def judge_corpora(board: Board, work: Path) -> None:
    """Go's and CPython's test data, and headers with mutated numbers, as Go's reader and we read them."""
    root = fetched((*GO_PACKAGES, PYTHON_PACKAGE), work)
    if root is None:
        board.waive(
            "outside corpora against Go's reader", "apt-get has no packages of Go and CPython's tests"
        )
        return
    go, tars = go_reader(root, work), list(corpora(root))
    counts = _verdicts(board, go, tars)
    board.bar("outside corpora: tars", len(tars), 40, "tars", at_least=True)
    _report(board, "outside corpora", counts, len(tars))
    counts = Counter()
    for name in mutated.NAMES:
        members = [(name, mutated.archive_of(row)) for row in mutated.mutated(name, VALUES)]
        counts += _verdicts(board, go, members)
    _report(board, "mutated headers against Go's reader", counts, len(mutated.NAMES) * VALUES)


def _verdicts(board: Board, go: GoReader, tars: Sequence[tuple[str, bytes]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (name, content), theirs in zip(tars, go.listings([content for _, content in tars]), strict=True):
        try:
            with _limited():
                ours = by_audit(content)
                found = verdict(ours, theirs)
        except TimeoutError:
            found = "hang"
        if found == "strict" and name.rpartition("/")[2] in STRICT_BY_DOCS:
            found = "strict as the docs say"
        counts[found] += 1
        if found in ("hang", "wrong", "strict"):
            board.line({"tar": name, "found": found, "we": ours.refused[:200], "Go": theirs.refused[:200]})
    return counts


def _report(board: Board, what: str, counts: Counter[str], total: int) -> None:
    board.line({what: dict(counts)})
    board.bar(f"{what}: hangs", counts["hang"], 0, f"of {total}")
    board.bar(f"{what}: wrong trees", counts["wrong"], 0, f"of {total}")
    board.bar(f"{what}: refused by us alone, and not listed in the docs", counts["strict"], 0, f"of {total}")


def judge_mutations(board: Board, work: Path) -> None:
    """Each numeric field with each of its values: the walker advances, in little time and memory."""
    slowest, peak, stuck = 0.0, 0.0, 0
    for name in mutated.NAMES:
        outcome = watched(partial(_slowest_ms, name), work)
        if outcome.said.isdigit():
            slowest = max(slowest, int(outcome.said) / 1000)
        else:
            stuck += 1
            board.line({"mutated": name, "said": outcome.said[:300]})
        peak = max(peak, outcome.peak_mib)
    fields = f"of {len(mutated.NAMES)} fields, {VALUES:,} values each"
    board.bar("mutated headers: the walker hangs, stands still or fails", stuck, 0, fields)
    board.bar("mutated headers: slowest 1 MiB", slowest, 2, "s")
    board.bar("mutated headers: peak memory", peak, 256, "MiB")


def _slowest_ms(name: str) -> int:
    slowest = 0.0
    for number, member in enumerate(mutated.mutated(name, VALUES)):
        n_bytes = (1 << 20) if number % 20 == 0 else (1 << 14)  # 1 MiB for each would take five minutes
        content = mutated.archive_of(member, n_bytes)
        begun = time.process_time()
        with _limited():
            by_audit(content)
            with suppress(ImageError):
                index_layer(TarReader(_pieces(content), place="tar"), place="tar")
        slowest = max(slowest, (time.process_time() - begun) * (1 << 20) / max(len(content), n_bytes))
    return math.ceil(slowest * 1000)


@contextmanager
def _limited() -> Iterator[None]:
    """Raises TimeoutError in what takes longer than any honest reading."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    earlier = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


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
    reader = TarReader(_pieces(archive), place="tar")
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
    except ImageError as fault:
        return Listing(tuple(rows), fault.message)
    return Listing(tuple(rows))


def _pieces(archive: bytes) -> Iterator[bytes]:
    return (archive[at : at + CHUNK] for at in range(0, len(archive), CHUNK))


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
        for path in sorted((root / folder).rglob("*.tar*")):
            if path.is_file() and path.suffix in _OPENERS:
                yield f"{folder}/{path.name}", _OPENERS[path.suffix](path.read_bytes())
