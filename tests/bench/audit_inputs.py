"""Inputs of the audit's bench: a vast image that is mostly holes, header streams, a child that is watched."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import image_maker as make

from buildtool.image.reader import host_platform

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Outcome:
    """How a watched child ended: `said` is its exit code, or the name of what escaped it."""

    said: str
    seconds: float  # on the wall's clock
    cpu_seconds: float  # of all its threads: what others' load doesn't change
    peak_mib: float
    written: tuple[str, ...]  # files that it opened for writing outside of its directory


def watched(action: Callable[[], int], scratch: Path) -> Outcome:
    """Run in a fork with `scratch` as its directory; everything it opens, makes or removes elsewhere is told.

    The peak is what the fork takes beyond this process' own memory, plus that of an audit of nothing.
    """
    reader, writer = os.pipe()
    inherited_mib = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    begun = os.times().elapsed
    child = os.fork()
    if child == 0:
        os.close(reader)
        said, elsewhere = _in_child(action, scratch)
        os.write(writer, "\n".join((said, *elsewhere)).encode("utf-8", "replace")[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = pipe.read().decode().split("\n")
    _, status, usage = os.wait4(child, 0)
    seconds = os.times().elapsed - begun
    said = lines[0] if os.waitstatus_to_exitcode(status) == 0 and lines[0] else f"died, status {status}"
    cpu_seconds = usage.ru_utime + usage.ru_stime
    peak_mib = max(usage.ru_maxrss / 1024 - inherited_mib, 0) + _idle_mib()
    return Outcome(said, seconds, cpu_seconds, peak_mib, tuple(lines[1:]))


@cache
def _idle_mib() -> float:
    """Peak memory of an audit that has nothing to read."""
    return audited_with_peak(Path("/dev/null/nothing"))[1]


def _in_child(action: Callable[[], int], scratch: Path) -> tuple[str, list[str]]:
    elsewhere: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & _WRITING and flags & os.O_TMPFILE != os.O_TMPFILE
            if (
                writes
                and isinstance(path, str | bytes)
                and not os.fsdecode(path).startswith((str(scratch), "/dev/"))
            ):
                elsewhere.append(f"open {os.fsdecode(path)} {mode}")
        elif event in ("os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.chmod", "os.chown"):
            elsewhere.append(f"{event} {args[0]!r}")

    os.chdir(scratch)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sys.addaudithook(hook)
    try:
        return str(action()), elsewhere
    except BaseException as error:  # whatever escapes is what the bench looks for
        return f"{type(error).__name__}: {error}", elsewhere


# the kernel's own high-water mark: getrusage would count this process' memory from before the exec, too
PEAK = """
import re, sys
from buildtool import cli
from buildtool.cli import audit  # everything that reads
code = cli.main(sys.argv[1:])
print(code, re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def audited_with_peak(file: Path) -> tuple[int, float]:
    """Exit code and peak memory in MiB of `buildtool audit`."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "audit", file], capture_output=True, text=True, check=False
    )
    code, kib = done.stderr.splitlines()[-1].split()
    return int(code), int(kib) / 1024


def vast_image(path: Path, *, n_bytes: int, n_files: int, n_layers: int = 10) -> None:
    """An archive with plain layers: one file in a hundred shares the bytes, and is a hole on disk."""
    size = n_bytes // (n_files // 100)
    spans: list[tuple[int, int]] = []
    diff_ids = []
    with path.open("wb") as out:
        for layer in range(n_layers):
            parts = list(_vast_layer(layer, n_files // n_layers, size))
            length = sum(len(part) if isinstance(part, bytes) else part for part in parts)
            digest = hashlib.sha256()
            name = f"{layer:064x}/layer.tar"
            out.write(make.header(name.encode(), b"\x80" + length.to_bytes(11, "big")))
            spans.append((out.tell(), length))
            for part in parts:
                if isinstance(part, bytes):
                    digest.update(part)
                    out.write(part)
                else:
                    _hash_zeros(digest, part)
                    out.seek(part, os.SEEK_CUR)
            diff_ids.append(f"sha256:{digest.hexdigest()}")
        config = make.dump(
            {
                "architecture": host_platform().architecture,
                "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": diff_ids},
            }
        )
        layers = [f"{layer:064x}/layer.tar" for layer in range(n_layers)]
        saved = make.dump([{"Config": "config.json", "RepoTags": ["vast:1"], "Layers": layers}])
        out.write(make.file("config.json", config) + make.file("manifest.json", saved) + make.END)


def _vast_layer(layer: int, n_files: int, size: int) -> Iterator[bytes | int]:
    small = b"x" * 700
    for at in range(n_files):
        name = f"usr/lib/python3/dist-packages/package{layer}_{at // 40}/module_{at}.py".encode()
        if at % 100:
            yield make.header(name, len(small)) + make.padded(small)
        else:
            yield make.header(b"opt/data/%d_%d.bin" % (layer, at), b"\x80" + size.to_bytes(11, "big"))
            yield size + -size % 512
    yield make.END


def _hash_zeros(digest: "hashlib._Hash", n_bytes: int) -> None:
    zeros = bytes(1 << 20)
    for _ in range(n_bytes >> 20):
        digest.update(zeros)
    digest.update(bytes(n_bytes & ((1 << 20) - 1)))


def header_stream(rounds: int) -> Iterator[bytes]:
    """Small files, 10,000 a round, without the archive's end: in chunks as a decompressor gives them."""
    members = (
        make.file(f"usr/lib/python3/dist-packages/package{at // 40}/m{at}.py", b"x" * 300)
        for at in range(10_000)
    )
    body = b"".join(members)
    for _ in range(rounds):
        yield from make.chunks(body, 1 << 18)
    yield make.END
