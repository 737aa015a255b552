"""Time and memory of every reader on long texts, and of whole audits with such texts in each of its places.

Each reader is screened with short texts (every unit, every pair); the slowest are read again at 1 MiB, in a
process of their own whose peak is measured.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import image_maker as make
from audit_inputs import Outcome, watched
from long_texts import CHARACTERS, MIB, READERS, Reader, repeated, screening

from buildtool.audit.formats import FILE_FORMATS
from buildtool.cli import program
from buildtool.image.reader import host_platform

SCREENED_BYTES = 8 << 10
EXITS = ("0", "1", "2", "5")
SLOWEST = 12  # texts of each reader that are read at their full length


@dataclass(frozen=True)
class Slowest:
    """The worst of many readings (processor seconds, peak of the process), and what was read."""

    seconds: float = 0.0
    peak_mib: float = 0.0
    what: str = ""
    failed: tuple[str, ...] = ()

    def with_one(self, outcome: Outcome, what: str) -> "Slowest":
        """The worst so far, and one more."""
        return Slowest(
            max(self.seconds, outcome.cpu_seconds),
            max(self.peak_mib, outcome.peak_mib),
            what if outcome.cpu_seconds > self.seconds else self.what,
            self.failed if outcome.said in EXITS else (*self.failed, f"{what}: {outcome.said}"),
        )


def of_reader(name: str, scratch: Path) -> tuple[Slowest, int]:
    """The slowest texts for one reader, and how many texts it was screened with."""
    reader = READERS[name]
    took = [_seconds(reader, text) for text in screening(reader, SCREENED_BYTES)]
    chosen = set(heapq.nlargest(SLOWEST, range(len(took)), key=took.__getitem__))
    worst = Slowest()
    for number, text in enumerate(screening(reader, MIB)):
        if number in chosen:
            outcome = watched(lambda text=text: _read(reader, text), scratch)
            worst = worst.with_one(outcome, f"{text[:24]!r}...")
    return worst, len(took)


def _seconds(reader: Reader, text: bytes) -> float:
    begun = process_time()
    reader.reads(text)
    return process_time() - begun


def _read(reader: Reader, text: bytes) -> int:
    reader.reads(text)
    return 0


Place = Callable[[bytes], make.Image]


def _image(*members: bytes, **more: object) -> make.Image:
    return make.Image([make.tar(*members)], architecture=host_platform().architecture, **more)  # type: ignore[arg-type]


def _names(text: bytes) -> make.Image:
    """A file in a directory for each part of the text, as long as a path may be."""
    parts = {text[at : at + 2000].strip(b"/") for at in range(0, len(text), 2000)}
    records = (
        {"path": b"a/" + part + b"/" + part} for part in parts if part.strip(b"./\0") and b"\0" not in part
    )
    return _image(*(make.pax(record) + make.file("x", b"1") for record in records))


def _status(text: bytes) -> make.Image:
    return _image(make.file("var/lib/dpkg/status", text), make.file("var/lib/dpkg/info/a.list", b"/usr/a\n"))


def _list(text: bytes) -> make.Image:
    status = b"Package: a\nArchitecture: amd64\n\n" * 1000
    return _image(make.file("var/lib/dpkg/status", status), make.file("var/lib/dpkg/info/a.list", text))


def _record(text: bytes) -> make.Image:
    site = "usr/lib/python3/dist-packages/a-1.dist-info"
    return _image(make.file(f"{site}/RECORD", text), make.file(f"{site}/METADATA", b"Name: a\n" + text))


def _conda(text: bytes) -> make.Image:
    inside = text.decode("latin-1").translate({ord('"'): "x", ord("\\"): "x"} | dict.fromkeys(range(32), "x"))
    words = (inside[at : at + 60] for at in range(0, len(inside), 60))
    record = make.dump({"name": "a", "version": "1", "files": list(words)})
    return _image(
        make.file("opt/conda/conda-meta/a.json", record), make.file("opt/conda/conda-meta/b.json", text)
    )


def _settings(text: bytes) -> make.Image:
    parts = [text[at : at + (250 << 10)] for at in range(0, len(text), 250 << 10)]
    return _image(
        *(make.file(f"app/{n}{end}", part) for n, part in enumerate(parts) for end in (".env", ".py"))
    )


def _history(text: bytes) -> make.Image:
    word = text.decode("latin-1")
    steps = [{"created_by": word}, {"created_by": "CMD " + word, "empty_layer": True}]
    return _image(make.file("a", b"1" * 70_000), history=steps)


def _labels(text: bytes) -> make.Image:
    word = text.decode("latin-1")
    return _image(make.file("a", b"1"), labels={"a": word, "io.weir.gpu-targets": word}, env=[f"X={word}"])


def _code(text: bytes) -> make.Image:
    return _image(make.file("usr/lib/a.so", b"__CLANG_OFFLOAD_BUNDLE__" + text), make.file("b.co", text))


PLACES: dict[str, Place] = {
    "names": _names,
    "dpkg status": _status,
    "dpkg list": _list,
    "RECORD and METADATA": _record,
    "conda-meta": _conda,
    "settings": _settings,
    "history": _history,
    "labels and ENV": _labels,
    "libraries": _code,
}
_UNITS = (b"a/b\n", b"token=", b"Package: a1\n\n", b"../a", b'{"a":', b"gfx11xx", b"ADD rootfs", b"# ")


def of_audits(place: str, scratch: Path) -> tuple[Slowest, int]:
    """Whole audits, with all reports written, of images with 1 MiB of each unit in one place."""
    worst = Slowest()
    units = (*CHARACTERS, *_UNITS)
    file = scratch / "image.tar"
    reports = [f"--{form}={scratch / form}" for form in FILE_FORMATS]
    words = ["audit", str(file), "--all", *reports, "--targets", "gfx906"]
    for unit in units:
        file.write_bytes(make.archive(make.docker_25(PLACES[place](repeated(unit, MIB)))))
        worst = worst.with_one(watched(lambda: program.main(words), scratch), f"{unit!r}...")
        for path in scratch.iterdir():
            path.unlink()
    return worst, len(units)
