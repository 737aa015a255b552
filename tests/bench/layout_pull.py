"""From `docker pull` to the first inference: how layers are compressed and divided, and what bytecode does.

Every image has the files of `cpu`, in layers that no other image has, so that a pull brings all of it. They
are pulled by turns from a registry on loopback whose blobs are out of the page cache; a container then runs
until the service has passed its first inference. The first case is the image as it was before issue 29 (the
parent of commit f1244323): BuildKit's zstd 1 in a layer each for base, torch, packages and service, without
bytecode. It is made here by libzstd's level 1, which gave 192.2 MB where BuildKit's own gave 186.2. Others
have the layer of bytecode that a build writes, or that of every module, written by the image's own Python.
"""

import io
import json
import os
import statistics
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from board import Board, tell

from buildtool.build import publish
from buildtool.build.layer_store import LayerStore
from buildtool.engine.reference import parse_new_name
from buildtool.image.flatten import flattened, tar_chunks
from buildtool.image.layer_writer import COMPRESSIONS, Compression, LayerWriter, TarMembers
from buildtool.image.streams import decompressed, peek, sniff
from buildtool.image.written import LayerFile, WrittenImage, written_image

ROUNDS = 3
READY_LIMIT_S = 180
LARGE = "opt/weir/lib/torch/lib/libtorch_cpu.so"  # most of the largest layer
ZSTD_1, ZSTD_3 = Compression("zstd", 1), COMPRESSIONS["zstd"]
GZIP, NONE = COMPRESSIONS["gzip"], COMPRESSIONS["none"]
WRITES_BYTECODE = ["-e", "PYTHONDONTWRITEBYTECODE=", "-e", "PYTHONPYCACHEPREFIX=/tmp/bytecode"]
GIVE = (
    "import sys, tarfile; tar = tarfile.open(fileobj=sys.stdout.buffer, mode='w|');"
    "tar.add('/tmp/bytecode', arcname=''); tar.close()"
)


@dataclass(frozen=True)
class Case:
    """One way to store the image."""

    name: str
    compression: Compression
    layers: str = "as now"  # "one", "split": the largest file in a layer of its own
    bytecode: str = "own"  # "all" modules', "none"


FORMER = Case("before issue 29", ZSTD_1, bytecode="none")
BUILT = Case("as built", ZSTD_3)
CASES = (
    FORMER,
    BUILT,
    Case("zstd 3, no bytecode", ZSTD_3, bytecode="none"),
    Case("zstd 1", ZSTD_1),
    Case("gzip 6", GZIP),
    Case("none", NONE),
    Case("one layer", ZSTD_3, layers="one"),
    Case("split", ZSTD_3, layers="split"),
    Case("bytecode of all", ZSTD_3, bytecode="all"),
)


def quiet(*words: str) -> str:
    return subprocess.run(
        words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout


# ---- images


def bytecode_of(ref: str) -> dict[str, bytes]:
    """Bytecode of every module by its path in the image."""
    name = f"t-bytecode-{os.getpid()}"
    words = ["docker", "run", "--rm", "--name", name, "--network=none", *WRITES_BYTECODE, ref]
    container = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_ready(container)
        threading.Thread(target=container.stdout.read, daemon=True).start()  # type: ignore[union-attr]
        places = ["/opt/weir/lib", "/opt/weir/app", "/usr/lib/python3.11"]
        subprocess.run(
            ["docker", "exec", name, "python3", "-m", "compileall", "-q", *places],
            check=False,
            capture_output=True,
        )
        return files_of(name)
    finally:
        subprocess.run(["docker", "kill", name], check=False, capture_output=True)
        container.wait()


def files_of(container: str) -> dict[str, bytes]:
    words = ["docker", "exec", container, "python3", "-c", GIVE]
    data = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            if info.isfile() and info.name.endswith(".pyc"):
                folder, _, name = info.name.strip("/").rpartition("/")
                file = tar.extractfile(info)
                assert file
                files[f"{folder}/__pycache__/{name}"] = file.read()
    return files


def tar_of(store: LayerStore, layer: LayerFile) -> Iterator[bytes]:
    """A layer, not compressed."""
    head, chunks = peek(store.content(layer))
    return decompressed(chunks, sniff(head), place="a layer")


def made(
    case: Case, image: WrittenImage, origin: LayerStore, to: LayerStore, extra: dict[str, bytes]
) -> WrittenImage:
    """The image in this case's form, in the store `to`; every layer begins with a file that no other has."""
    tars: list[Iterable[bytes]]
    *below, bytecode, service = image.layers
    kept = [*below, *([bytecode] if case.bytecode == "own" else []), service]
    if case.layers == "one":
        tars = [tar_chunks(flattened([lambda each=each: origin.content(each) for each in kept]))]
    else:
        tars = [tar_of(origin, layer) for layer in kept]
        if case.layers == "split":
            tars = [part for layer in kept for part in divided(tar_of(origin, layer))]
    layers = [put(to, case, number, copied(tar)) for number, tar in enumerate(tars)]
    if extra:

        def write(writer: LayerWriter) -> None:
            members = TarMembers(writer, 1)
            for path, content in sorted(extra.items()):
                members.file(path, len(content), [content])

        layers.append(put(to, case, len(layers), write))
    made_image = written_image(json.loads(image.config), layers, [])
    to.put(made_image)
    return made_image


def copied(chunks: Iterable[bytes]) -> Callable[[LayerWriter], None]:
    def write(writer: LayerWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)

    return write


def put(store: LayerStore, case: Case, number: int, write: Callable[[LayerWriter], None]) -> LayerFile:
    def make(writer: LayerWriter) -> LayerFile:
        mark = f"{case.name} {number} {time.time_ns()}".encode()
        info = tarfile.TarInfo(f"opt/weir-bench-{number}")
        info.size = len(mark)
        writer.write(info.tobuf(tarfile.PAX_FORMAT) + mark + bytes(-len(mark) % tarfile.BLOCKSIZE))
        write(writer)
        writer.write(bytes(2 * tarfile.BLOCKSIZE))  # again, where it is a copied archive: nobody reads on
        return writer.finish()

    return store.bring(store.key("bench-pull", case.name, number, time.time_ns()), make)[0]


def divided(chunks: Iterator[bytes]) -> list[Iterable[bytes]]:
    """A layer's members but for the largest file, then that alone; the layer as it is where it lacks it."""
    data = io.BytesIO(b"".join(chunks))
    with tarfile.open(fileobj=data) as tar:
        members = tar.getmembers()
        if LARGE not in {info.name for info in members}:
            return [[data.getvalue()]]
        parts: list[Iterable[bytes]] = []
        for large in (False, True):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as part:
                for info in members:
                    if (info.name == LARGE) == large:
                        part.addfile(info, tar.extractfile(info) if info.isreg() else None)
            parts.append([out.getvalue()])
    return parts


# ---- pulls and starts


def wait_ready(process: "subprocess.Popen[str]") -> None:
    """Return at the service's line that its first inference passed. Raises RuntimeError without one."""
    said: list[str] = []
    guard = threading.Timer(READY_LIMIT_S, process.kill)
    guard.start()
    try:
        for line in process.stdout or ():
            said.append(line)
            if "ready weights=" in line:
                return
    finally:
        guard.cancel()
    raise RuntimeError(f"it didn't become ready:\n{''.join(said[-5:])}")


def evict(folder: Path) -> None:
    """Take the registry's blobs out of the page cache."""
    for path in folder.rglob("data"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def pull_and_start(ref: str, storage: Path) -> tuple[float, float]:
    """Seconds of `docker pull`, and from then to the first inference; the image is gone before and after."""
    evict(storage)
    name = f"t-pulled-{os.getpid()}"
    begun = time.monotonic()
    quiet("docker", "pull", "-q", ref)
    pulled = time.monotonic()
    words = ["docker", "run", "--rm", "--name", name, "--network=none", ref]
    container = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_ready(container)
        return pulled - begun, time.monotonic() - pulled
    finally:
        subprocess.run(["docker", "kill", name], check=False, capture_output=True)
        container.communicate()
        subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)


def pull_bars(
    board: Board,
    image: WrittenImage,
    store: LayerStore,
    registry: Callable[[Path], object],
    rounds: int = ROUNDS,
) -> None:
    """The table, and the bar: the image as it is built against the former one."""
    with TemporaryDirectory(dir="/var/tmp", prefix="weir-pull-") as folder_name:
        folder = Path(folder_name)
        with registry(folder / "registry") as host:  # type: ignore[attr-defined]
            refs, rows = {}, {}
            every: dict[str, bytes] = {}
            for case in CASES:
                to = LayerStore(folder / "state", case.compression)
                if case.bytecode == "all":
                    quiet("docker", "pull", "-q", refs[FORMER])
                    every = bytecode_of(refs[FORMER])
                    subprocess.run(
                        ["docker", "image", "rm", "-f", refs[FORMER]], check=False, capture_output=True
                    )
                each = made(case, image, store, to, every if case.bytecode == "all" else {})
                refs[case] = f"{host}/pull/{case.name.replace(' ', '-').replace(',', '')}:1"
                pushed = publish.Pushed(folder / "pushed")
                publish.push(
                    each, parse_new_name(refs[case]), store=to, pushed=pushed, progress=lambda _line: None
                )
                rows[case] = (sum(layer.n_bytes for layer in each.layers), list[tuple[float, float]]())
                subprocess.run(["rm", "-rf", str(folder / "state")], check=True)
                tell(f"{case.name}: {rows[case][0]:,} bytes")
            for _ in range(rounds):
                for case in CASES:
                    pulled = pull_and_start(refs[case], folder / "registry/storage")
                    rows[case][1].append(pulled)
                    tell(f"{case.name}: pulled in {pulled[0]:.1f} s, ready {pulled[1]:.1f} s later")
    report(board, rows)


def report(board: Board, rows: dict[Case, tuple[int, list[tuple[float, float]]]]) -> None:
    former = [sum(each) for each in rows[FORMER][1]]
    ratios = {}
    for case, (stored, seconds) in rows.items():
        both = [sum(each) for each in seconds]
        ratios[case] = statistics.median(a / b for a, b in zip(both, former, strict=True))
        board.figure(
            f"pull to first inference: {case.name}", statistics.median(both), "s", stored=stored,
            pull_s=[round(pull, 1) for pull, _ in seconds], start_s=[round(start, 1) for _, start in seconds],
            of_former=round(ratios[case], 3),
        )  # fmt: skip
    board.bar("pull to first inference, of today's", ratios[BUILT], 0.6, "of the former image's time")
