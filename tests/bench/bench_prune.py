"""The bars of the pruner, one JSON line each: real libraries, the real loader and comgr, a fuzz run.

    python tests/bench/bench_prune.py --libraries DIR [--root ROOTFS] [--referee llvm-objdump] [--targets ...]

DIR holds ROCm libraries (Debian's librocblas, librocsolver, librocsparse). ROOTFS is the root of a
distribution with Python, libamdhip64 and libamd_comgr to chroot into (needs root). What isn't given is
printed as waived, with the reason. Exit code 1 when a bar is missed.
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

from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.prune import plan_prune
from buildtool.gpucode.rewrite import open_source, prune_file
from buildtool.gpucode.scan import iter_bundles, scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets

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
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument(
        "--referee", default="llvm-objdump", help="one that lists HIP bundles: LLVM 20 or later"
    )
    parser.add_argument("--targets", default="gfx906", help="comma-separated; each is pruned to alone")
    parser.add_argument("--fuzz", type=int, default=5000, help="mangled files")
    args = parser.parse_args()
    board = Board()
    fuzz(board, args.fuzz)
    libraries = real_libraries(args.libraries) if args.libraries else []
    if not libraries:
        board.waive("real libraries", "no --libraries with ROCm libraries in it")
    for library in libraries:
        for target in args.targets.split(","):
            with workplace(args.root) as folder:
                measure(board, library, target, folder=folder, root=args.root, referee=args.referee)
    return int(board.missed)


def real_libraries(folder: Path) -> list[Path]:
    return sorted(
        p for p in folder.rglob("*.so.*") if p.is_file() and not p.is_symlink() and gpu_bytes(p) > 1 << 20
    )


def gpu_bytes(path: Path) -> int:
    with open_source(path) as (source, _):
        return scan_file(source.size, source.read_at).section_bytes


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


def measure(
    board: Board, library: Path, target: str, *, folder: Path, root: Path | None, referee: str
) -> None:
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
    if root is None:
        board.waive(f"{name}: load and look-up", "no --root")
    else:
        runtime_check(board, name, out, (target, other), root)


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


def referee_check(board: Board, name: str, library: Path, out: Path, *, target: str, referee: str) -> None:
    """LLVM's own extraction of both files; the kept objects must be the same bytes under the same names."""
    program = shutil.which(referee)
    if program is None:
        board.waive(f"{name}: referee", f"no {referee}")
        return
    kept = extracted(program, library, out.parent / "before", target)
    found = extracted(program, out, out.parent / "after", "")
    if not kept:
        board.waive(f"{name}: referee", f"{referee} doesn't list HIP bundles (older than LLVM 20)")
        return
    device = {key: value for key, value in found.items() if ".host-" not in key}
    board.bar(f"{name}: objects that the referee finds different", kept != device, 0, f"of {len(kept)}")


def extracted(program: str, library: Path, folder: Path, target: str) -> dict[str, str]:
    folder.mkdir()
    place = folder / "lib.so"
    place.symlink_to(library)
    subprocess.run([program, "--offloading", str(place)], check=True, capture_output=True)
    found = {p.name: digest(p) for p in folder.iterdir() if p != place and p.name.endswith(target)}
    shutil.rmtree(folder)
    return found


def runtime_check(board: Board, name: str, out: Path, targets: tuple[str, str], root: Path) -> None:
    inside = "/" + str(out.relative_to(root))

    def chrooted(script: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["chroot", str(root), "python3", "-c", script, inside, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    loaded = chrooted(LOAD)
    if "cannot open shared object" in loaded.stderr:
        board.waive(f"{name}: loads", loaded.stderr.strip().splitlines()[-1])
    else:
        board.bar(
            f"{name}: fails to load", loaded.returncode != 0, 0, f"hipGetDeviceCount {loaded.stdout.strip()}"
        )
    with open_source(out) as (source, _):
        starts = bundle_starts(source)
    answers = json.loads(chrooted(LOOK_UP, ",".join(targets), json.dumps(starts)).stdout)
    wrong = sum(answer != [True, False] for answer in answers)
    board.bar(f"{name}: bundles where comgr answers wrongly", wrong, 0, f"of {len(answers)}")


def bundle_starts(source: Source) -> list[int]:
    section = read_elf(source).section(".hip_fatbin")
    assert section is not None
    return [place.start for place in iter_bundles(source, section.offset, section.file_end)]


if __name__ == "__main__":
    sys.exit(main())
