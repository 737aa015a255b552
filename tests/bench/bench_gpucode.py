"""The bars of GPU code wherever it is, one JSON line each: foreign wheels, and PyTorch's CUDA stack.

`make bench-gpucode` downloads them one at a time with pip (14 GB in all, 10 GB of disk at most) and keeps
none. Each is unpacked, counted by the audit's reader of layers and by `whole_scan.py`, which reads every byte
and knows nothing of `buildtool.gpucode`; then it is pruned to the card that it has most machine code for, and
judged by readelf, by the loader and by the scan; then with `--strip`, and judged again. Parts: `--only
wheels`, `--only stack`. Exit code 1 when a bar is missed.

The 30 wheels are drawn by this rule, written down before the first run. Of a list of all packages of the
registry (name, version, month, rank among the most downloaded, summary), those from 2022 on whose name or
summary has none of placeholder, reserved, reservation, metapackage, nightly; for HIP the names that match
`(-rocm[0-9-]*|-hip(-\\d+)?)$|^jax-rocm\\d+-|^rocm-sdk-libraries|^amd-libhip`, for CUDA those among the 15,000
most downloaded that match `-cu1[123](-|$)|cuda1[123]x?(-|$)|-gpu(-|$)|^nvidia-[a-z]+$` or are bitsandbytes,
xformers, torch, vllm or sgl-kernel. Sorted by the SHA-256 of the name, they are `gpucode_wheels.txt`. From
its top, wheels in which `whole_scan.py` finds GPU code count, until there are 10 for HIP and 20 for CUDA. A
package without a binary wheel for Linux on x86-64, of more than 1.2 GB, or without GPU code doesn't count;
each such line is in the results.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from board import Board, tell
from whole_scan import code_digests, whole_scan

from buildtool.core.compression import zstd
from buildtool.gpucode.elf import SHF_ALLOC, read_elf
from buildtool.gpucode.scan import find_code
from buildtool.gpucode.source import BadTarget
from buildtool.gpucode.target import TargetId, parse_targets, serves_any
from buildtool.image.layer import HASHED_BYTES, LayerIndex, index_layer
from buildtool.image.layer_writer import ZSTD
from buildtool.image.tar import TarReader
from buildtool.prune.manifest import TreeResult
from buildtool.prune.trees import open_source, prune_tree

DRAWN = Path(__file__).with_name("gpucode_wheels.txt")
WANTED = {"hip": 10, "cuda": 20}
MOST_WHEEL_BYTES = 1_200_000_000
MOST_BYTES = 10_000_000_000  # of downloads for the wheels
GROUPS = ("wheels", "stack")
# what pip installs with torch 2.11.0 on Linux: the CUDA stack of PyTorch, with CUDA 13.0
STACK = (
    "torch==2.11.0",
    "triton==3.6.0",
    "nvidia-cublas==13.1.0.3",
    "nvidia-cuda-cupti==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cufft==12.0.0.61",
    "nvidia-cufile==1.15.1.6",
    "nvidia-curand==10.4.0.35",
    "nvidia-cusolver==12.0.4.66",
    "nvidia-cusparse==12.6.3.3",
    "nvidia-nvjitlink==13.0.88",
    "nvidia-nvtx==13.0.85",
    "nvidia-cudnn-cu13==9.19.0.56",
    "nvidia-cusparselt-cu13==0.8.0",
    "nvidia-nccl-cu13==2.28.9",
    "nvidia-nvshmem-cu13==3.4.5",
)
STACK_CARD = "sm_90"
CUOBJDUMP = "nvidia-cuda-cuobjdump==13.5.37"  # NVIDIA's own reader, of fat binaries in their usual sections
# libraries with code where few readers look; those of the stack are counted with it
NAMED = (
    "nvidia-cufft-cu12==11.3.0.4",
    "nvidia-cufft==12.5.0.14",
    "nvidia-cusparse-cu12==12.5.10.65",
    "tensorflow-rocm==2.14.0.600",
)
LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GROUPS, help="one of the two parts")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no wheel after these")
    args = parser.parse_args()
    missed = 0
    if args.only in (None, "wheels"):
        board = Board("gpucode-wheels", command="make bench-gpucode")
        wheel_bars(board, time.monotonic() + 60 * args.minutes)
        missed |= board.finish()
    if args.only in (None, "stack"):
        board = Board("gpucode-stack", command="make bench-gpucode")
        stack_bars(board)
        missed |= board.finish()
    return missed


# Wheels.


class Totals:
    """Sums over all wheels, for the bars."""

    def __init__(self) -> None:
        self.counted = Counter[str]()  # wheels by vendor
        self.downloaded = 0
        self.differing = 0  # wheels in which audit and scan differ by more than 0.1 %
        self.unread = 0
        self.false_alarms = 0
        self.damages: list[str] = []


def wheel_bars(board: Board, until: float) -> None:
    totals = Totals()
    lines = DRAWN.read_text().splitlines()
    rows = [[line for line in lines if line.startswith(f"{vendor} ")] for vendor in WANTED]
    for line in (line for turn in zip_longest(*rows) for line in turn if line):  # by turns
        vendor, requirement = line.split()
        more = totals.counted[vendor] < WANTED[vendor] and totals.downloaded < MOST_BYTES
        if more and time.monotonic() < until:
            with_wheel(board, totals, requirement, vendor)
    for requirement in NAMED:
        with_wheel(board, totals, requirement, "")
    for vendor, wanted in WANTED.items():
        board.bar(
            f"foreign wheels with {vendor} code", totals.counted[vendor], wanted, "wheels", at_least=True
        )
    board.bar("wheels whose bytes differ from the scan's by more than 0.1 %", totals.differing, 0, "wheels")
    board.bar("files that the audit couldn't read", totals.unread, 0, "files")
    board.bar("false `no code for this card`", totals.false_alarms, 0, "cards")
    board.bar("damages by prunes", len(totals.damages), 0, "damages", which=totals.damages[:20])


def with_wheel(board: Board, totals: Totals, requirement: str, vendor: str) -> None:
    tell(requirement)
    with tempfile.TemporaryDirectory(prefix="bench-gpucode-") as name:
        folder = Path(name)
        try:
            totals.downloaded += unpacked(requirement, folder / "tree", folder)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            board.line({"wheel": requirement, "not counted": str(error)[-200:]})
            return
        measure_tree(board, totals, requirement, folder / "tree", vendor)


def unpacked(requirement: str, tree: Path, scratch: Path) -> int:
    """Download a wheel and unpack it into `tree`; returns its bytes. Raises OSError with the reason."""
    failure = ""
    for python in ("3.12", "3.11", "3.10"):
        folder = scratch / "wheel"
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        words += ["--disable-pip-version-check", "--python-version", python, "-d", str(folder), requirement]
        script = f'ulimit -f {MOST_WHEEL_BYTES // 1024}; exec "$@"'
        env = {**os.environ, "TMPDIR": str(scratch)}
        done = subprocess.run(
            ["bash", "-c", script, "-", *words],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=1200,
        )
        wheels = list(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            size = wheels[0].stat().st_size
            with zipfile.ZipFile(wheels[0]) as archive:
                archive.extractall(tree)
            shutil.rmtree(folder)
            return size
        failure = next(
            (line for line in done.stderr.splitlines() if "ERROR" in line or "File too large" in line), ""
        )
        failure = failure.split("(from")[0].strip() or f"pip ended with {done.returncode}"
    raise OSError(failure)


def measure_tree(board: Board, totals: Totals, name: str, tree: Path, vendor: str, *, card: str = "") -> None:
    """Count a tree by both readers, prune it and judge that; with a card, to that one and with `--strip`."""
    files = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
    large = [path for path in files if path.stat().st_size >= HASHED_BYTES]
    scanned = {path: found for path in large if (found := whole_scan(path))}
    if not scanned:
        board.line({"wheel": name, "not counted": "no GPU code in it"})
        return
    totals.counted[vendor] += 1
    index = audited(tree)
    audit = sum((Counter(code) for code in index.gpu_code.values()), Counter[str]())
    scan = sum(scanned.values(), Counter[str]())
    off = abs(audit.total() / scan.total() - 1)
    totals.differing += off > 0.001
    totals.unread += len(index.unread)
    cards = {target for target in map(card_of, scan) if target}
    missing = [
        str(card)
        for card in cards
        if not any(serves_any(code, [card]) for code in map(target_of, audit) if code)
    ]
    totals.false_alarms += len(missing)
    row: dict[str, object] = {
        "wheel": name, "audit_bytes": audit.total(), "scan_bytes": scan.total(), "off": round(off, 6),
        "audit_unread": [f"{index.path(at).decode()}: {why}" for at, why in index.unread.items()],
    }  # fmt: skip
    most = max((key for key in scan if card_of(key)), key=lambda key: scan[key], default="")
    if card:
        row |= prune_facts(totals, name, tree, sorted(scanned), card, strip=True)
    elif most:
        row |= prune_facts(totals, name, tree, sorted(scanned), most, strip=False)
        left = [path for path in sorted(scanned) if path.exists()]
        row["stripped"] = prune_facts(totals, f"{name}, --strip", tree, left, most, strip=True)
    board.line(row)


def audited(tree: Path) -> LayerIndex:
    """The tree as the audit reads a layer of it."""
    with layer_of(tree) as chunks:
        return index_layer(TarReader(chunks, place="tree"), place="tree")


@contextmanager
def layer_of(tree: Path) -> Iterator[Iterator[bytes]]:
    """The tree as a layer's tar, in pieces."""
    words = ["tar", "-C", str(tree), "-cf", "-", "."]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield iter(lambda: process.stdout.read(1 << 18) if process.stdout else b"", b"")


def stored_bytes(tree: Path) -> int:
    """What a registry stores of the tree: holes are zeros in a tar, which take next to nothing compressed."""
    packing = zstd.ZstdCompressor(level=ZSTD.level)
    with layer_of(tree) as chunks:
        return sum(len(packing.compress(chunk)) for chunk in chunks) + len(packing.flush())


def target_of(name: str) -> TargetId | None:
    try:
        return TargetId.parse(name)
    except BadTarget:
        return None


def card_of(name: str) -> TargetId | None:
    """The card that machine code of this name is for; None for PTX and the like."""
    return target_of(name) if name.startswith(("sm_", "gfx")) and "generic" not in name else None


def prune_facts(
    totals: Totals, name: str, tree: Path, libraries: Sequence[Path], card: str, *, strip: bool
) -> dict[str, object]:
    """Prune the tree to one card, and what the judges say of it; adds to the damages."""
    targets = parse_targets(card)
    kept = {path: code_digests(path, card) for path in libraries}
    judged = {path: (readelf_faults(path), loads(path)) for path in libraries if is_elf(path)}
    bytes_before = sum(path.stat().st_size for path in libraries)
    planned = prune_tree(tree, targets, strip=strip, dry_run=True)
    result = prune_tree(tree, targets, strip=strip)
    again = prune_tree(tree, targets, strip=strip)
    damages = []
    if outcome(planned) != outcome(result):
        damages.append("the dry run foretold something else")
    if again.changed:
        damages.append("a second prune changes something")
    left = [path for path in libraries if path.exists()]
    for path in left:
        where = path.relative_to(tree).as_posix()
        if code_digests(path, card) != kept[path]:
            damages.append(f"{where}: other code for {card}")
        if path in judged:
            if readelf_faults(path) - judged[path][0]:
                damages.append(f"{where}: readelf {sorted(readelf_faults(path))[:2]}")
            if loads(path) != judged[path][1]:
                damages.append(f"{where}: the loader says {loads(path)}, before {judged[path][1]}")
    totals.damages += [f"{name}: {damage}" for damage in damages]
    after = sum((whole_scan(path) for path in left), Counter[str]())
    return {
        "card": card, "libraries": len(libraries), "cut": len(result.pruned), "deleted": len(result.deleted),
        "bytes_before": bytes_before, "saved_bytes": result.saved_bytes, "zeroed_bytes": result.zeroed_bytes,
        "code_bytes_after": after.total(), "loaded": sum(why == "" for _, why in judged.values()),
        "refused": [f"{row.path}: {row.reason}"[:200] for row in result.refused], "damages": damages,
    }  # fmt: skip


def outcome(result: TreeResult) -> tuple[object, ...]:
    return result.deleted, result.pruned, result.refused, result.untouched


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def readelf_faults(path: Path) -> set[str]:
    """What readelf finds wrong with the file's headers, versions and notes."""
    words = ["readelf", "-hlSdVnW", str(path)]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    return {line for line in done.stderr.splitlines() if line} | ({f"exit {done.returncode}"} - {"exit 0"})


def loads(path: Path) -> str:
    """Why the loader refuses the library, empty where it loads."""
    words = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    return "" if done.returncode == 0 else f"{done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


# PyTorch's CUDA stack.


def stack_bars(board: Board) -> None:
    totals = Totals()
    with tempfile.TemporaryDirectory(prefix="bench-gpucode-") as name:
        folder = Path(name)
        tree = folder / "tree"
        for requirement in STACK:
            tell(requirement)
            unpacked(requirement, tree, folder)
        unpacked(CUOBJDUMP, folder / "cuobjdump", folder)
        tool = next((folder / "cuobjdump").rglob("bin/cuobjdump"))
        tool.chmod(0o755)
        listed = cuobjdump_lists(tool, tree)
        before, stored_before = tree_bytes(tree), stored_bytes(tree)
        measure_tree(board, totals, "PyTorch's CUDA stack", tree, "cuda", card=STACK_CARD)
        after, on_disk, stored = tree_bytes(tree), disk_bytes(tree), stored_bytes(tree)
        left = cuobjdump_lists(tool, tree)
        board.line({"figure": "bytes that are left, by what they are", "unit": "MB", **byte_table(tree)})
    board.bar("CUDA stack: bytes differ from the scan's by more than 0.1 %", totals.differing, 0, "stacks")
    board.bar("CUDA stack: damages by the prune", len(totals.damages), 0, "damages", which=totals.damages)
    board.figure("CUDA stack: cubins that cuobjdump lists", listed.total(), "cubins", left=left.total())
    kept = {key: count for key, count in listed.items() if key[1] == STACK_CARD}
    board.bar(
        f"CUDA stack: cubins for {STACK_CARD} by cuobjdump", sum(kept.values()), 1, "cubins", at_least=True
    )
    lost = {str(key): [count, left[key]] for key, count in kept.items() if left[key] != count}
    board.bar(
        f"CUDA stack: libraries whose {STACK_CARD} cubins differ by cuobjdump",
        len(lost),
        0,
        "libraries",
        which=lost,
    )
    board.waive("CUDA stack: outputs bit-identical to the unpruned stack's", "needs an H100 or H200")
    board.waive("CUDA stack with the keep-list", "needs a card: tests/device/run_observe.sh")
    board.bar(
        f"CUDA stack pruned to {STACK_CARD}: files' lengths", after / 1e9, 2.6, "GB", before_gb=before / 1e9
    )
    board.bar(f"CUDA stack pruned to {STACK_CARD}: on a disk that knows holes", on_disk / 1e9, 2.6, "GB")
    board.figure(
        "CUDA stack stored, a layer by zstd -3", stored / 1e9, "GB", before_gb=round(stored_before / 1e9, 3)
    )


def cuobjdump_lists(tool: Path, tree: Path) -> Counter[tuple[str, str]]:
    """Cubins by library and target, as `cuobjdump --list-elf` counts them: `ELF file 1: a.1.sm_90.cubin`."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(tree.rglob("*.so*")):
        if path.is_symlink() or path.stat().st_size < HASHED_BYTES:
            continue
        done = subprocess.run([tool, "--list-elf", path], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            found[path.name, line.split(".")[-2]] += line.endswith(".cubin")
    return found


def byte_table(tree: Path) -> dict[str, float]:
    """Where a tree's bytes are: GPU code by kind, what else segments load, and files that aren't ELF."""
    table = Counter[str]()
    for path in tree.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        size = path.stat().st_size
        if not is_elf(path):
            kind = (
                "headers" if "include" in path.parts else "Python" if path.suffix == ".py" else "other files"
            )
            table[kind] += size
            continue
        with open_source(path) as (source, _):
            elf = read_elf(source)
            sections = Counter[str]()
            for each in elf.sections:
                key = each.name if each.name in (".text", ".rodata", ".eh_frame") else "other loaded sections"
                sections[key if each.flags & SHF_ALLOC else "nothing loads"] += each.file_bytes
            for place in find_code(source):
                section = next((s for s in elf.sections if s.offset <= place.start < s.file_end), None)
                for code in place.codes:
                    name = code.name.partition("_")[0] if not code.is_blank else "zeros"
                    table[f"GPU code: {name}"] += code.stored_bytes
                    key = section.name if section and section.name == ".rodata" else "other loaded sections"
                    sections[key] -= code.stored_bytes
            table.update(sections)
            table["headers and padding"] += max(size - sum(each.file_bytes for each in elf.sections), 0)
    return {key: round(n / 1e6, 1) for key, n in sorted(table.items(), key=lambda row: -row[1])}


def tree_files(tree: Path) -> Iterator[os.stat_result]:
    return (path.stat() for path in tree.rglob("*") if path.is_file() and not path.is_symlink())


def tree_bytes(tree: Path) -> int:
    return sum(status.st_size for status in tree_files(tree))


def disk_bytes(tree: Path) -> int:
    """Bytes on the disk: holes take none."""
    return sum(512 * status.st_blocks for status in tree_files(tree))


if __name__ == "__main__":
    sys.exit(main())
