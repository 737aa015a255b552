"""Small archives that once took long or much memory: bombs, long runs of a character, deep trees, odd sizes.

Each case is made when its turn comes, so that the bench doesn't hold them all.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import bombs
import image_maker as make
from image_maker import file, folder, header, pax, symlink, tar

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GIB, MIB = 1 << 30, 1 << 20
DEEP = "d/" * 2000
Case = tuple[str, Callable[[], bytes]]


def cases() -> Iterator[Case]:
    """Names, and what makes the archive."""
    yield from _bombs()
    yield from _sizes()
    yield from _long_runs()
    yield from _deep_trees()


def write(made: Callable[[], bytes], file: Path) -> None:
    """Make a case in a process of its own, so that its memory isn't counted for the audit that reads it."""
    child = os.fork()
    if child == 0:
        file.write_bytes(made())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _bombs() -> Iterator[Case]:
    yield "bomb: zstd, 16 GiB", lambda: bombs.archive_with(bombs.layer_of_zeros(16 * GIB))
    yield "bomb: gzip, 8 GiB", lambda: bombs.archive_with(bombs.layer_of_zeros(8 * GIB, packed="gzip"))
    yield "bomb: a compressed archive, 16 GiB", lambda: bombs.packed_archive(16 * GIB)
    yield "bomb: 20 layers of 1 GiB", lambda: bombs.many_layers(20, GIB)
    yield "bomb: small files, 16 GiB", lambda: bombs.archive_with(_small_files(16 * GIB))


def _sizes() -> Iterator[Case]:
    for digits in (b"00000000008", b"00000000019", b"99999999999", b"-0000000001"):
        odd = header(b"a", digits + b"\0") + tar(file("b"))
        yield f"size: {digits.decode()}", partial(_image, odd)
        yield f"size of a blob: {digits.decode()}", partial(bytes, odd)


def _long_runs() -> Iterator[Case]:
    runs = {"spaces": b" ", "colons": b":", "line breaks": b"\n", "letters": b"a", "commas": b","}
    paths = ("var/lib/dpkg/status", "s/x-1.dist-info/RECORD", "s/x-1.dist-info/METADATA", "root/.env")
    for name, text in runs.items():
        for path in paths:
            for size in (255 << 10, 15 * MIB):
                yield f"long runs: {size >> 10} KiB of {name} in {path}", partial(_run, path, text, size)


def _deep_trees() -> Iterator[Case]:
    below = [pax({"path": DEEP + "x"}) + file("s")]
    links = [pax({"linkpath": "d/../" * 800 + f"l{n + 1}"}) + symlink(f"l{n}", "x") for n in range(200)]
    links += [folder("l200"), folder("d")]
    again = [symlink("again", "d") + file(f"l0/{n}", b"x") for n in range(3000)]
    trees: dict[str, tuple[list[bytes], Callable[[], Iterable[bytes]]]] = {
        "20,000 whiteouts in one directory": (below, partial(_deep, f"{DEEP}.wh.%d", 20_000)),
        "whiteouts in 3,000 directories": (below, partial(_deep, f"{DEEP}%d/.wh.x", 3000)),
        "files in 3,000 directories": ([file("big", b"x" * 20_000_000)], partial(_deep, f"{DEEP}%d/f", 3000)),
        "600 directories that share nothing": (below, partial(_deep, f"%d/{DEEP}f", 600)),
        "20,000 opaque markers": (below, partial(_deep, f"{DEEP}%.0s.wh..wh..opq", 20_000)),
        "every path through 200 long links": (links, partial(_deep, "l0/%d/x", 3000)),
        "links that are replaced all the time": (links, lambda: again),
    }
    for name, (lower, upper) in trees.items():
        yield f"deep: {name}", lambda lower=lower, upper=upper: _image(tar(*lower), tar(*upper()))


def _image(*layers: bytes) -> bytes:
    return make.archive(make.docker_25(make.Image(list(layers), lambda layer: zstd.compress(layer, 1))))


def _run(path: str, text: bytes, size: int) -> bytes:
    return _image(tar(file(path, b"Package" + text * size)))


def _deep(path: str, count: int) -> Iterator[bytes]:
    return (pax({"path": path % n}) + file("s", b"x") for n in range(count))


def _small_files(n_bytes: int) -> bytes:
    """A layer of 32 KiB files of zeros without end."""
    members = b"".join(header(b"f", 32 << 10) + bytes(32 << 10) for _ in range(64 * MIB // (33 << 10)))
    return zstd.compress(members, 3) * (n_bytes // len(members))
