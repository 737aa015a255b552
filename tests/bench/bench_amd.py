"""Our kernels' machine code for AMD's GPUs on an emulated machine: bits, operations, planted faults, counts.

Nothing here is timed on a card, or was run on one. Cases are those of `probes.placement.packing.proof`, which
`weir probe prove` runs on a card; targets are gfx1100 (RDNA 3), gfx90a (CDNA 2) and gfx942 (CDNA 3). With
buffer operations, Triton's default, all cases run; without them, and on gfx1201 (RDNA 4), every fifth. Faults
are planted by the rule of decision 131. Debian's rocBLAS, of which kernels run before and after it
is pruned, is downloaded (166 MB) and stays in .weir/bench. What an interrupted run has done there with the
same code is not done again; the whole is timed only where nothing was.

    .venv-torch/bin/python tests/bench/bench_amd.py [--record]

`--record` writes the results' digests to probes/placement/packing/proof.json.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from board import ROOT, Board, code_digest, measured, tell

from buildtool.core.files import write_text
from buildtool.engine.provision import host_mirror
from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import prune_file

AMD = ROOT / "tests" / "amd"
sys.path += [str(AMD), str(ROOT / "tests" / "torch" / "packing")]
BAR_TARGETS = ("gfx1100", "gfx90a", "gfx942")
OTHER_TARGET = "gfx1201"
TARGETS = (*BAR_TARGETS, OTHER_TARGET)
SHARES = 4  # of a target's cases, that a process takes
FAULTS = 70  # planted for each target of the bar
VECTORS = 200
PARTS = ROOT / ".weir" / "bench" / "amd"
ROCBLAS = ROOT / ".weir" / "bench" / "rocblas"
LIBRARY_TARGETS = ("gfx1100", "gfx90a")
LIBRARY = "usr/lib/x86_64-linux-gnu/librocblas.so.0.1"
_PACKING = ROOT / "probes" / "placement" / "packing"


def main() -> int:
    begun, resumed = time.monotonic(), PARTS.exists()
    board = Board()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_lines, ["amd_child.py", target, f"{share}/{SHARES}"], True)
            for target in BAR_TARGETS
            for share in range(SHARES)
        ]
        planted = [pool.submit(_lines, ["planted.py", target, str(FAULTS)], True) for target in BAR_TARGETS]
        jobs += [pool.submit(_lines, ["amd_child.py", target, "3/5"], False) for target in BAR_TARGETS]
        jobs.append(pool.submit(_lines, ["amd_child.py", OTHER_TARGET, "3/5"], True))
        counted = [pool.submit(_lines, ["amd_child.py", target, "counted"], True) for target in TARGETS]
        libraries = pool.submit(_libraries)
        rows = [row for job in jobs for row in job.result()]
        faults = [row for job in planted for row in job.result()]
    _bits(board, rows)
    _operations(board, rows)
    _faults(board, faults)
    _counts(board, [row for job in counted for row in job.result()])
    _pruned(board, libraries.result())
    seconds = time.monotonic() - begun
    if resumed:
        board.waive(
            "amd, the whole bench", f"{seconds:.0f} s after an interrupted run: parts of it were kept"
        )
    else:
        board.bar("amd, the whole bench", seconds, 600, "s")
    shutil.rmtree(PARTS, ignore_errors=True)
    if "--record" in sys.argv:
        _record(rows)
    return board.finish()


def _lines(words: list[str], buffers: bool) -> list[dict]:
    from children import lines

    digest = code_digest(measured("amd"))
    kept = PARTS / digest / f"{'-'.join(words).replace('/', ' of ')}{'' if buffers else ' without buffers'}"
    if kept.exists():
        return json.loads(kept.read_text())
    rows = lines(AMD / words[0], *words[1:], AMDGCN_USE_BUFFER_OPS=str(int(buffers)))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, json.dumps(rows))
    tell(f"{' '.join(words)}, buffer operations {'on' if buffers else 'off'}: {len(rows)} lines")
    return rows


def _bits(board: Board, rows: list[dict]) -> None:
    for row in rows:
        if row["wrong"]:
            board.line({"wrong": row["wrong"], "case": row["case"], "target": row["target"]})
    with_buffers = [row for row in rows if row["buffers"] and row["target"] in BAR_TARGETS]
    right = sum(not row["wrong"] for row in with_buffers)
    kernels = len({row["kernel"] for row in with_buffers})
    board.bar("amd, kernels", kernels, 8, "kernels", at_least=True)
    board.bar(
        f"amd, cases right of {kernels} kernels x 3 targets x 20", right, kernels * 60, "cases", at_least=True
    )
    without = [row for row in rows if not row["buffers"]]
    right = sum(not row["wrong"] for row in without)
    board.bar("amd, cases right without buffer operations", right, len(without), "cases", at_least=True)
    more = [row for row in rows if row["buffers"] and row["target"] not in BAR_TARGETS]
    right = sum(not row["wrong"] for row in more)
    board.figure(f"amd, cases right on gfx1201 of {len(more)}", right, "cases")


def used_operations(rows: Iterable[dict]) -> set[str]:
    """Names of what was executed, both halves of dual ones."""
    from operations import common_name

    names = {part for row in rows for name in row["instructions"] for part in name.split("+")}
    return {common_name(name.replace("_DUAL_", "_")).replace("V_CMPX_", "V_CMP_") for name in names}


def _operations(board: Board, rows: list[dict]) -> None:
    from operations import OPERATIONS
    from test_operations import compared

    used = used_operations(rows)
    arithmetic = sorted(name for name in used if name in OPERATIONS)
    agreeing = 0
    for name in arithmetic:
        wrong = compared(name, VECTORS)
        agreeing += not wrong
        if wrong:
            board.line({"operation": name, "disagrees": len(wrong), "first": wrong[0]})
    board.bar(
        "amd, arithmetic operations as their pseudocode",
        agreeing,
        len(arithmetic),
        "operations",
        at_least=True,
    )
    others = sorted(used - set(OPERATIONS))
    board.line(
        {"memory, lanes, matrices, control, tested in tests/amd/test_machine.py or by the cases": others}
    )
    board.waive(
        "amd, disagreements with tinygrad's emulator",
        "its emulator isn't in its wheel; operations are compared with the pseudocode that it is made from",
    )


def _faults(board: Board, drawn: list[dict]) -> None:
    faults = [row for row in drawn if row["is fault"]]
    by_kind = Counter(row["kind"] for row in faults)
    found = Counter(row["kind"] for row in faults if row["found"])
    board.line({"planted": {kind: f"{found[kind]} of {count}" for kind, count in by_kind.items()}})
    for row in drawn:
        became = "no fault" if not row["is fault"] else "found" if row["found"] else "not found"
        board.line({"drawn": row["kind"], "became": became} | row)
    board.bar("amd, planted faults", len(faults), 200, "faults", at_least=True)
    share = sum(found.values()) / max(1, len(faults))
    board.bar("amd, planted faults found", share, 0.95, "share", at_least=True)
    board.figure("amd, drawn changes that are no fault by the rule", len(drawn) - len(faults), "changes")
    of_all = sum(bool(row["found"]) for row in drawn) / max(1, len(drawn))
    board.figure("amd, found of all drawn changes", of_all, "share")


def _counts(board: Board, rows: list[dict]) -> None:
    by_kernel: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        if row["wrong"]:
            raise RuntimeError(f"{row['case']} on {row['target']}: {row['wrong']}")
        by_kernel[row["kernel"]][row["target"]] = row["a weight"]
    for kernel, by_target in by_kernel.items():
        board.line({"counted a weight": kernel} | by_target)


def _libraries() -> tuple[Path, dict[str, Path]] | str:
    """Debian's rocBLAS, and by target a copy that is pruned to it; or why there is none."""
    whole, mirror = ROCBLAS / LIBRARY, host_mirror()
    if not whole.exists():
        if not mirror or not shutil.which("dpkg-deb"):
            return "it needs apt-get, dpkg-deb and a Debian mirror"
        for folder in ("lists/partial", "cache/archives/partial"):
            (ROCBLAS / folder).mkdir(parents=True, exist_ok=True)
        (ROCBLAS / "sources.list").write_text(f"deb {mirror} trixie main\n")
        options = {
            "Dir::Etc::SourceList": ROCBLAS / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": ROCBLAS / "lists",
            "Dir::Cache": ROCBLAS / "cache",
        }
        apt = [
            "apt-get",
            "-q",
            *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        ]
        for command in ([*apt, "update"], [*apt, "download", "librocblas0"]):
            done = subprocess.run(command, cwd=ROCBLAS, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{' '.join(command[-2:])} failed: {done.stderr[-300:]}"
        package = next(ROCBLAS.glob("librocblas0_*.deb"))
        whole.parent.mkdir(parents=True, exist_ok=True)
        partial = whole.with_suffix(".partial")
        unpack = ["dpkg-deb", "--fsys-tarfile", package]
        with partial.open("wb") as file, subprocess.Popen(unpack, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-xO", f"./{LIBRARY}"], stdin=archive.stdout, stdout=file, check=True)
        partial.replace(whole)
        package.unlink()
    pruned = {target: ROCBLAS / f"pruned-{target}.so" for target in LIBRARY_TARGETS}
    for target, out in pruned.items():
        prune_file(whole, parse_targets(target), out=out)
    tell("rocBLAS is pruned")
    return whole, pruned


def _pruned(board: Board, libraries: tuple[Path, dict[str, Path]] | str) -> None:
    """Kernels of rocBLAS, found as the runtime does, before and after pruning."""
    name = "amd, kernels of a pruned rocBLAS with the same results as before"
    if isinstance(libraries, str):
        board.waive(name, libraries)
        return
    import library

    whole, pruned = libraries
    same = 0
    for target, path in pruned.items():
        for kernel in library.KERNELS:
            before, after = library.Call(kernel), library.Call(kernel)
            executed = before.launch(library.holder(whole, target, kernel), target)
            after.launch(library.holder(path, target, kernel), target)
            right = not before.wrong() and before.y.tobytes() == after.y.tobytes()
            same += right
            bytes_ = {"before": whole.stat().st_size, "after": path.stat().st_size}
            instructions = sum(executed.instructions.values())
            board.line(
                {
                    "rocBLAS": kernel,
                    "target": target,
                    "same": right,
                    "executed": instructions,
                    "bytes": bytes_,
                }
            )
    board.bar(name, same, len(pruned) * len(library.KERNELS), "kernels", at_least=True)


def _record(rows: list[dict]) -> None:
    digests: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["buffers"] and not row["wrong"]:
            digests[row["case"]][row["target"]] = row["digest"]
    write_text(_PACKING / "proof.json", json.dumps(digests, indent=0, sort_keys=True) + "\n")
    tell(f"wrote {_PACKING / 'proof.json'}")


if __name__ == "__main__":
    sys.exit(main())
