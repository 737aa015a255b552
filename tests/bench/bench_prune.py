"""The bars of the pruner, one JSON line each: a fuzz run, real libraries with their own loader, images.

Run by `make bench-prune`, as root: it makes Debian root file systems with ROCm 5.5 and 6.4 in .weir/bench
(5 GB, they stay), prunes their libraries to each of three cards, and lets their own runtime, comgr and LLVM
judge the results in a chroot; then it builds the `rocm` image for each card (prune_images.py), which takes
another 5 GB for as long as it runs. Parts of it: `--only libraries --library librocsparse --targets gfx906`.
Exit code 1 when a bar is missed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from board import Board, tell
from prune_fuzz import fuzz_bars
from prune_images import image_bars

from buildtool.build.rootfs import environment, mmdebstrap_command
from buildtool.core.command import run_streaming
from buildtool.core.errors import ToolError
from buildtool.core.model import Bootstrap
from buildtool.engine.provision import host_mirror
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.scan import iter_bundles
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import open_source, prune_file

BENCH = Path(__file__).parents[2] / ".weir" / "bench"
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
OPTIONS = (
    "--dpkgopt=path-exclude=/usr/lib/*/rocblas/*",  # 5 GB of kernels that no bar looks at
    '--aptopt=Acquire::Check-Valid-Until "false"',  # a mirror's copy of a moving suite may be weeks old
)
# a suite's packages, and which libraries of it are measured
SUITES = {
    Bootstrap("trixie", ("librocblas0", "librocsolver0", "python3")): ("librocblas", "librocsolver"),
    Bootstrap("forky", ("librocblas4", "librocsparse1", "llvm-21", "python3")): (
        "librocblas",
        "librocsparse",
    ),
}
REFEREE = "llvm-objdump-21"  # of the last suite; LLVM before 20 doesn't list HIP bundles

TARGETS = ("gfx906", "gfx803", "gfx1100")
ROUNDS = 3  # of what is timed; the median counts
GROUPS = ("fuzz", "libraries", "images")

ROOT = Path(__file__).parents[2]

PRUNE = """
import resource, sys, time
from pathlib import Path
from buildtool.prune.trees import prune_file
from buildtool.gpucode.target import parse_targets
begun = time.perf_counter()
prune_file(Path(sys.argv[1]), parse_targets(sys.argv[2]), out=Path(sys.argv[3]))
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
LOAD = """
import ctypes, glob, os, sys
hip = ctypes.CDLL(sorted(glob.glob("/usr/lib/*/libamdhip64.so.*"))[0], mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)
count = ctypes.c_int(-1)
print(hip.hipGetDeviceCount(ctypes.byref(count)), count.value)
"""
# asks the runtime's own look-up about the first 4096 bytes of every bundle, as the runtime does
LOOK_UP = """
import ctypes, glob, json, sys
comgr = ctypes.CDLL(sorted(glob.glob("/usr/lib/*/libamd_comgr.so.*"))[0])
class Data(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_uint64)]
class Info(ctypes.Structure):
    _fields_ = [("isa", ctypes.c_char_p), ("size", ctypes.c_size_t), ("offset", ctypes.c_uint64)]
comgr.amd_comgr_create_data.argtypes = [ctypes.c_int, ctypes.POINTER(Data)]
comgr.amd_comgr_set_data.argtypes = [Data, ctypes.c_size_t, ctypes.c_char_p]
comgr.amd_comgr_lookup_code_object.argtypes = [Data, ctypes.POINTER(Info), ctypes.c_size_t]
isas = sys.argv[2].split(",")
answers = []
with open(sys.argv[1], "rb") as library:
    for start in json.loads(sys.argv[3]):
        library.seek(start)
        data = Data()
        assert comgr.amd_comgr_create_data(16, ctypes.byref(data)) == 0
        assert comgr.amd_comgr_set_data(data, 4096, library.read(4096)) == 0
        infos = (Info * len(isas))(*[Info(b"amdgcn-amd-amdhsa--" + i.encode(), 0, 0) for i in isas])
        assert comgr.amd_comgr_lookup_code_object(data, infos, len(isas)) == 0
        found = []
        for info in infos:
            library.seek(start + info.offset)
            found.append(bool(info.size) and library.read(4) == b"\\x7fELF")
        answers.append(found)
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Code:
    """A code object as LLVM extracts it."""

    sha256: str
    n_bytes: int


@dataclass(frozen=True)
class Whole:
    """A library as Debian ships it, and what its judges say of it."""

    path: Path
    root: Path
    objects: dict[str, Code]
    symbols: set[bytes]
    loads: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--targets", default=",".join(TARGETS), help="comma-separated; each is pruned to alone"
    )
    parser.add_argument("--fuzz", type=int, default=20_000, help="mangled files")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="some of the bars")
    parser.add_argument("--library", default="", help="only libraries with this in their names")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    board = Board(whole=args == parser.parse_args([]))
    try:
        if "fuzz" in args.only:
            fuzz_bars(board, args.fuzz)
        if "libraries" in args.only:
            library_bars(board, args.targets.split(","), args.library)
        if "images" in args.only:
            llvm = Referee(bring_tree(list(SUITES)[-1]))
            image_bars(board, args.targets.split(","), llvm)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; scratch files, images and build cache of the bench are gone", file=sys.stderr)
        return 130
    board.waive("a pruned HIP library launches", "needs an AMD GPU: load-checked, not launched")
    board.waive("a pruned CUDA library launches", "needs a GPU: tests/device/test_prune_launch.py")
    return board.finish()


def library_bars(board: Board, targets: Sequence[str], wanted: str) -> None:
    """Raises CommandFailed when Debian's mirror doesn't serve."""
    trees = {bootstrap.suite: bring_tree(bootstrap) for bootstrap in SUITES}
    referee = Referee(list(trees.values())[-1])
    for bootstrap, names in SUITES.items():
        root = trees[bootstrap.suite]
        for path in real_libraries(root, names):
            if wanted in path.name:
                tell(f"{path.name}: asking the judges about the original")
                loads = chrooted(root, LOAD, path)
                whole = Whole(path, root, referee.objects(path), exported(path), loads)
                for target in targets:
                    tell(f"{path.name}: pruning to {target}")
                    with workplace(root) as folder:
                        measure(board, whole, target, folder=folder, referee=referee)


def bring_tree(bootstrap: Bootstrap) -> Path:
    """A suite's root file system as a directory, made if it isn't here. Raises CommandFailed."""
    tree, partial = BENCH / bootstrap.suite, BENCH / f".{bootstrap.suite}"
    BENCH.mkdir(parents=True, exist_ok=True)
    with (BENCH / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benches use the trees
        if not tree.exists():
            shutil.rmtree(partial, ignore_errors=True)
            made = mmdebstrap_command(bootstrap, partial, host_mirror())
            command = ["--format=directory" if word == "--format=tar" else word for word in made]
            command[1:1] = OPTIONS
            surroundings = environment(bootstrap, os.environ, 0)
            run_streaming(
                command, progress=lambda line: tell(line) if line[:2] == "I:" else None, env=surroundings
            )
            partial.rename(tree)
    return tree


def real_libraries(root: Path, names: tuple[str, ...]) -> list[Path]:
    found = [path for name in names for path in (root / LIBRARIES).glob(f"{name}.so.*")]
    return sorted(path for path in found if not path.is_symlink())


@contextmanager
def workplace(root: Path | None) -> Iterator[Path]:
    """A folder that the chroot sees too."""
    folder = Path(tempfile.mkdtemp(prefix="bench-prune-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Referee:
    """LLVM's own extraction of code objects, run in the suite that has it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def objects(self, library: Path) -> dict[str, Code]:
        """The code objects but for the host's, by the name that the bundler gives them."""
        with workplace(self._root) as folder:
            place = folder / "lib.so"
            os.link(library, place)
            inside = f"/{place.relative_to(self._root)}"
            script = f"cd {folder.name} && {REFEREE} --offloading {inside}"
            subprocess.run(["chroot", self._root, "sh", "-c", script], check=True, capture_output=True)
            found = {p.name: Code(digest(p), p.stat().st_size) for p in folder.iterdir() if p != place}
            return {name: value for name, value in found.items() if ".host-" not in name}

    def bytes_by_target(self, library: Path) -> dict[str, int]:
        """Bytes of the code objects by processor."""
        found: Counter[str] = Counter()
        for name, code in self.objects(library).items():
            found[name.rpartition("--")[2].partition(":")[0]] += code.n_bytes
        return found


def measure(board: Board, whole: Whole, target: str, *, folder: Path, referee: Referee) -> None:
    library, out = whole.path, folder / "pruned.so"
    name = f"{library.name} {target}"
    ratio, peak_kib = time_against_cp(library, target, out)
    before, after = library.stat().st_size, out.stat().st_size
    board.bar(f"{name}: size", after / before, 0.15, "of the original", before_bytes=before)
    board.bar(f"{name}: time", ratio, 3, "of cp's")
    board.bar(f"{name}: peak memory", peak_kib / 1024, 300, "MiB")
    foreign = sum(code.n_bytes for key, code in whole.objects.items() if not key.endswith(target))
    off = abs((before - after) / foreign - 1)
    board.bar(f"{name}: saving off by", off, 0.01, "of the foreign code that LLVM extracts")
    other = next(t for t in TARGETS if t != target)
    steps_check(board, name, library, out, targets=(target, other))
    kept = {key: value for key, value in whole.objects.items() if key.endswith(target)}
    board.bar(f"{name}: objects that the referee finds", len(kept), 1, "objects", at_least=True)
    same = kept == referee.objects(out)
    board.bar(f"{name}: objects that the referee finds different", not same, 0, f"of {len(kept)}")
    differing = len(whole.symbols ^ exported(out))
    board.bar(f"{name}: exported symbols that differ", differing, 0, f"of {len(whole.symbols)}")
    runtime_check(board, name, whole, out, targets=(target, other))


def steps_check(board: Board, name: str, library: Path, out: Path, *, targets: tuple[str, str]) -> None:
    """{A, B}, then {A}, must equal {A}; and {A} twice {A}."""
    both, twice = out.with_name("both.so"), out.with_name("twice.so")
    prune_file(library, parse_targets(",".join(targets)), out=both)
    prune_file(both, parse_targets(targets[0]), out=twice)
    board.bar(f"{name}: two steps differ from one", digest(twice) != digest(out), 0, "files")
    both.unlink()
    prune_file(out, parse_targets(targets[0]), out=twice)
    board.bar(f"{name}: second prune differs", digest(twice) != digest(out), 0, "files")
    twice.unlink()


def time_against_cp(library: Path, target: str, out: Path) -> tuple[float, int]:
    """How much longer a prune takes than `cp` of the same file, in turns; and the prune's peak in KiB."""
    copies, prunes = [], []
    for _ in range(ROUNDS):
        copies.append(timed_copy(library, out.with_name("copy")))
        prunes.append(prune_in_a_process(library, target, out))
    ratio = statistics.median(row[0] for row in prunes) / statistics.median(copies)
    return ratio, max(row[1] for row in prunes)


def timed_copy(library: Path, copy: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", library, copy], check=True)
    seconds = time.perf_counter() - begun
    copy.unlink()
    return seconds


def prune_in_a_process(library: Path, target: str, out: Path) -> tuple[float, int]:
    words = [sys.executable, "-c", PRUNE, str(library), target, str(out)]
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    seconds, peak_kib = done.stdout.split()
    return float(seconds), int(peak_kib)


def digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def exported(library: Path) -> set[bytes]:
    """Name, address and size of every symbol that others may use."""
    said = subprocess.run(["nm", "-D", "-S", "--defined-only", library], check=True, capture_output=True)
    return set(said.stdout.splitlines())


def chrooted(root: Path, script: str, library: Path, *words: str) -> str:
    """What Python says in a suite's root file system, about a library in it."""
    command = ["chroot", root, "python3", "-c", script, f"/{library.relative_to(root)}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"


def runtime_check(board: Board, name: str, whole: Whole, out: Path, *, targets: tuple[str, str]) -> None:
    after = chrooted(whole.root, LOAD, out)
    board.line({f"{name}: hipGetDeviceCount, result and count": after, "before": whole.loads})
    wrong = after != whole.loads or after.startswith("failed")
    board.bar(f"{name}: fails to load, or the runtime answers otherwise", wrong, 0, "libraries")
    with open_source(out) as (source, _):
        starts = bundle_starts(source)
    answers = json.loads(chrooted(whole.root, LOOK_UP, out, ",".join(targets), json.dumps(starts)))
    wrong_bundles = sum(answer != [True, False] for answer in answers)
    board.bar(f"{name}: bundles where comgr answers wrongly", wrong_bundles, 0, f"of {len(answers)}")


def bundle_starts(source: Source) -> list[int]:
    section = read_elf(source).section(".hip_fatbin")
    assert section is not None
    return [place.start for place in iter_bundles(source, section.offset, section.file_end)]


if __name__ == "__main__":
    sys.exit(main())
