"""The bars of the pruner, one JSON line each: real libraries, the real loader and comgr, a fuzz run.

Run by `make bench-prune`, as root: it makes Debian root file systems with ROCm 5.5 and 6.4 in .weir/bench
(8 GB), prunes their libraries, and lets their own runtime, comgr and LLVM judge the results in a chroot.
Exit code 1 when a bar is missed.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buildtool.command import run_loud
from buildtool.errors import ToolError
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.prune import plan_prune
from buildtool.gpucode.rewrite import open_source, prune_file
from buildtool.gpucode.scan import iter_bundles
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.model import Bootstrap
from buildtool.rootfs import host_mirror, mmdebstrap_command

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

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit"))  # for the damaged files of the unit tests

PRUNE = """
import resource, sys, time
from pathlib import Path
from buildtool.gpucode.rewrite import prune_file
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


class Board:
    """Prints each bar and remembers whether one was missed."""

    def __init__(self) -> None:
        self.missed = False

    def bar(self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        ok = value >= limit if at_least else value <= limit
        self.missed |= not ok
        self.line({"bar": name, "value": round(value, 4), "limit": limit, "unit": unit, "ok": ok})

    def waive(self, name: str, why: str) -> None:
        self.line({"bar": name, "value": None, "waived": why})

    def line(self, row: dict[str, object]) -> None:
        print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="gfx906", help="comma-separated; each is pruned to alone")
    parser.add_argument("--fuzz", type=int, default=5000, help="mangled files")
    args = parser.parse_args()
    board = Board()
    fuzz(board, args.fuzz)
    try:
        trees = {bootstrap.suite: bring_tree(bootstrap) for bootstrap in SUITES}
    except ToolError as error:
        board.waive("real libraries", str(error))
        return 1
    referee = Referee(list(trees.values())[-1])
    for bootstrap, names in SUITES.items():
        root = trees[bootstrap.suite]
        for library in real_libraries(root, names):
            for target in args.targets.split(","):
                with workplace(root) as folder:
                    measure(board, library, target, folder=folder, root=root, referee=referee)
    return int(board.missed)


def bring_tree(bootstrap: Bootstrap) -> Path:
    """A suite's root file system as a directory, made if it isn't here. Raises CommandFailed."""
    tree = BENCH / bootstrap.suite
    if not tree.exists():
        partial = BENCH / f".{bootstrap.suite}"
        shutil.rmtree(partial, ignore_errors=True)
        BENCH.mkdir(parents=True, exist_ok=True)
        command = mmdebstrap_command(bootstrap, partial, host_mirror())
        command[1:1] = ["--format=directory", *OPTIONS]
        run_loud(command, say=lambda line: print(line, file=sys.stderr) if line[:2] == "I:" else None)
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


def fuzz(board: Board, count: int) -> None:
    from gpucode.mangle import mangled, seeds, structured, survives

    originals = seeds()
    pruned = crashes = 0
    for number in range(count):
        try:
            pruned += survives(mangled(originals[number % len(originals)], random.Random(number)))
        except Exception as error:
            crashes += 1
            board.line({"crash": number, "error": repr(error)[:200]})
    cases = [case for seed in originals[:3] for case in structured(seed)]
    pruned += sum(map(survives, cases))
    board.bar("fuzz: files tried", count + len(cases), 5060, "files", at_least=True)
    board.bar("fuzz: anything but a checked result or a typed refusal", crashes, 0, "files")
    board.line({"fuzz: ended in a checked result": pruned, "refused": count + len(cases) - pruned})
    board.bar("fuzz: files changed on refusal", changed_on_refusal(originals[0]), 0, "files")


def changed_on_refusal(library: bytes) -> int:
    from gpucode.mangle import mangled

    changed = 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lib.so"
        for number in range(200):
            data = mangled(library, random.Random(number))
            path.write_bytes(data)
            try:
                prune_file(path, parse_targets("gfx906"))
            except Exception:
                changed += path.read_bytes() != data or len(list(path.parent.iterdir())) != 1
    return changed


class Referee:
    """LLVM's own extraction of code objects, run in the suite that has it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def objects(self, library: Path, target: str) -> dict[str, str]:
        """Names of the code objects whose names end so -> SHA-256."""
        with workplace(self._root) as folder:
            place = folder / "lib.so"
            os.link(library, place)
            inside = f"/{place.relative_to(self._root)}"
            script = f"cd {folder.name} && {REFEREE} --offloading {inside}"
            subprocess.run(["chroot", self._root, "sh", "-c", script], check=True, capture_output=True)
            return {p.name: digest(p) for p in folder.iterdir() if p != place and p.name.endswith(target)}


def measure(board: Board, library: Path, target: str, *, folder: Path, root: Path, referee: Referee) -> None:
    name = f"{library.name} {target}"
    out = folder / "pruned.so"
    copy_s = timed_copy(library, folder)
    seconds, peak_kib = prune_in_a_process(library, target, out)
    before, after = library.stat().st_size, out.stat().st_size
    board.bar(f"{name}: size", after / before, 0.15, "of the original")
    board.bar(f"{name}: time", seconds / copy_s, 3, "of cp's")
    board.bar(f"{name}: peak memory", peak_kib / 1024, 300, "MiB")
    with open_source(library) as (source, _):
        foretold = plan_prune(source, parse_targets(target)).saved_bytes
    board.bar(f"{name}: predicted saving off by", abs(foretold / (before - after) - 1), 0.01, "of the saving")
    other = next(t for t in ("gfx1100", "gfx906") if t != target)
    both, twice = folder / "both.so", folder / "twice.so"
    prune_file(library, parse_targets(f"{target},{other}"), out=both)
    prune_file(both, parse_targets(target), out=twice)
    board.bar(f"{name}: two steps differ from one", digest(twice) != digest(out), 0, "files")
    both.unlink()
    prune_file(out, parse_targets(target), out=twice)
    board.bar(f"{name}: second prune differs", digest(twice) != digest(out), 0, "files")
    twice.unlink()
    referee_check(board, name, library, out, target=target, referee=referee)
    before, after = exported(library), exported(out)
    board.bar(f"{name}: exported symbols that differ", len(before ^ after), 0, f"of {len(before)}")
    runtime_check(board, name, out, (target, other), root=root, original=library)


def timed_copy(library: Path, folder: Path) -> float:
    """`cp` of the same file, its cache as warm as the prune's after it."""
    copy = folder / "copy"
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


def referee_check(
    board: Board, name: str, library: Path, out: Path, *, target: str, referee: Referee
) -> None:
    """The kept objects must be the same bytes under the same names."""
    kept = referee.objects(library, target)
    found = {key: value for key, value in referee.objects(out, "").items() if ".host-" not in key}
    board.bar(f"{name}: objects that the referee finds", len(kept), 1, "objects", at_least=True)
    board.bar(f"{name}: objects that the referee finds different", kept != found, 0, f"of {len(kept)}")


def exported(library: Path) -> set[bytes]:
    """Name, address and size of every symbol that others may use."""
    said = subprocess.run(["nm", "-D", "-S", "--defined-only", library], check=True, capture_output=True)
    return set(said.stdout.splitlines())


def runtime_check(
    board: Board, name: str, out: Path, targets: tuple[str, str], *, root: Path, original: Path
) -> None:
    def chrooted(script: str, library: Path, *words: str) -> str:
        command = ["chroot", root, "python3", "-c", script, f"/{library.relative_to(root)}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"

    before, after = (chrooted(LOAD, library) for library in (original, out))
    board.line({f"{name}: hipGetDeviceCount, result and count": after, "before": before})
    wrong = after != before or after.startswith("failed")
    board.bar(f"{name}: fails to load, or the runtime answers otherwise", wrong, 0, "libraries")
    with open_source(out) as (source, _):
        starts = bundle_starts(source)
    answers = json.loads(chrooted(LOOK_UP, out, ",".join(targets), json.dumps(starts)))
    wrong_bundles = sum(answer != [True, False] for answer in answers)
    board.bar(f"{name}: bundles where comgr answers wrongly", wrong_bundles, 0, f"of {len(answers)}")


def bundle_starts(source: Source) -> list[int]:
    section = read_elf(source).section(".hip_fatbin")
    assert section is not None
    return [place.start for place in iter_bundles(source, section.offset, section.file_end)]


if __name__ == "__main__":
    sys.exit(main())
