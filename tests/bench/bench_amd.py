"""Our kernels' machine code for AMD's GPUs on an emulated machine: bits, operations, planted faults, counts.

Nothing here is timed on a card, or was run on one. Cases are those of `probes.placement.packing.proof`, which
`weir probe prove` runs on a card; targets are gfx1100 (RDNA 3), gfx90a (CDNA 2), gfx942 (CDNA 3) and
gfx1201 (RDNA 4). With buffer operations, Triton's default, all cases run; without them every fifth.

    .venv-torch/bin/python tests/bench/bench_amd.py [--record]

`--record` writes the results' digests to probes/placement/packing/proof.json.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from board import ROOT, Board, tell

from buildtool.core.files import write_text

AMD = ROOT / "tests" / "amd"
BAR_TARGETS = ("gfx1100", "gfx90a", "gfx942")
TARGETS = (*BAR_TARGETS, "gfx1201")
SHARES = 4  # of a target's cases, that a process takes
FAULTS = 70  # planted for each target of the bar
VECTORS = 200
_PACKING = ROOT / "probes" / "placement" / "packing"


def main() -> int:
    begun = time.monotonic()
    board = Board()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_lines, ["amd_child.py", target, f"{share}/{SHARES}"], True)
            for target in TARGETS
            for share in range(SHARES)
        ]
        jobs += [pool.submit(_lines, ["amd_child.py", target, "3/5"], False) for target in TARGETS]
        planted = [pool.submit(_lines, ["planted.py", target, str(FAULTS)], True) for target in BAR_TARGETS]
        rows = [row for job in jobs for row in job.result()]
        faults = [row for job in planted for row in job.result()]
    _bits(board, rows)
    _operations(board, rows)
    _faults(board, faults)
    _counts(board, rows)
    pruned(board)
    board.bar("amd, the whole bench", time.monotonic() - begun, 600, "s")
    if "--record" in sys.argv:
        _record(rows)
    return board.finish()


def _lines(words: list[str], buffers: bool) -> list[dict]:
    settled = {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "AMDGCN_USE_BUFFER_OPS": str(int(buffers)),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(AMD / words[0]), *words[1:]],
        env={**os.environ, **settled},
        check=False,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tell(f"{' '.join(words)}, buffer operations {'on' if buffers else 'off'}: {len(rows)} lines")
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return rows


def _bits(board: Board, rows: list[dict]) -> None:
    for row in rows:
        if row["wrong"]:
            board.line({"wrong": row["wrong"], "case": row["case"], "target": row["target"]})
    with_buffers = [row for row in rows if row["buffers"] and row["target"] in BAR_TARGETS]
    right = sum(not row["wrong"] for row in with_buffers)
    board.bar("amd, cases right of 9 kernels x 3 targets x 20", right, 540, "cases", at_least=True)
    without = [row for row in rows if not row["buffers"]]
    right = sum(not row["wrong"] for row in without)
    board.bar("amd, cases right without buffer operations", right, len(without), "cases", at_least=True)
    more = [row for row in rows if row["buffers"] and row["target"] not in BAR_TARGETS]
    board.figure("amd, cases right on gfx1201 of 180", sum(not row["wrong"] for row in more), "cases")


def used_operations(rows: Iterable[dict]) -> set[str]:
    """Names of what was executed, both halves of dual ones."""
    from operations import common_name

    names = {part for row in rows for name in row["instructions"] for part in name.split("+")}
    return {common_name(name.replace("_DUAL_", "_")).replace("V_CMPX_", "V_CMP_") for name in names}


def _operations(board: Board, rows: list[dict]) -> None:
    sys.path.insert(0, str(AMD))
    from operations import OPERATIONS
    from test_operations import JUDGED, compared

    used = used_operations(rows)
    arithmetic = sorted(name for name in used if name in OPERATIONS)
    agreeing = 0
    for name in arithmetic:
        if name in JUDGED:
            board.line({"operation": name, "judged": JUDGED[name]})
            continue
        wrong = compared(name, VECTORS)
        agreeing += not wrong
        if wrong:
            board.line({"operation": name, "disagrees": len(wrong), "first": wrong[0]})
    judged = sum(name in JUDGED for name in arithmetic)
    board.bar(
        "amd, arithmetic operations as their pseudocode",
        agreeing,
        len(arithmetic) - judged,
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


def _faults(board: Board, faults: list[dict]) -> None:
    by_kind = Counter(row["kind"] for row in faults)
    found = Counter(row["kind"] for row in faults if row["found"])
    board.line({"planted": {kind: f"{found[kind]} of {count}" for kind, count in by_kind.items()}})
    for row in faults:
        if not row["found"]:
            board.line(
                {
                    "not found": row["kind"],
                    "effect": row["effect"],
                    "target": row["target"],
                    "case": row["case"],
                    "fault": row["fault"],
                }
            )
    board.bar("amd, planted faults", len(faults), 200, "faults", at_least=True)
    effective = [row for row in faults if row["found"] or row["effect"] != "none"]
    share = sum(found.values()) / max(1, len(effective))
    board.figure("amd, planted faults found of those that changed any state", share, "share")
    board.bar(
        "amd, planted faults found", sum(found.values()) / max(1, len(faults)), 0.95, "share", at_least=True
    )


def counts_of(rows: Iterable[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """By kernel and target: a wave's instructions, times its lanes, and transactions of 64 bytes, a weight.

    Of the case with most weights of Gaussian ones.
    """
    from standin_amd import WAVES

    best: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = row["kernel"], row["target"]
        if not row["buffers"] or row["wrong"] or not row["case"].endswith("gaussian"):
            continue
        if key not in best or row["weights"] > best[key]["weights"]:
            best[key] = row
    counts: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (kernel, target), row in sorted(best.items()):
        counts[kernel][target] = {
            "instructions": round(sum(row["instructions"].values()) * WAVES[target] / row["weights"], 1),
            "transactions": round(
                sum(row["transactions"].get(name, 0) for name in ("loads", "stores")) / row["weights"], 4
            ),
        }
    return dict(counts)


def _counts(board: Board, rows: list[dict]) -> None:
    for kernel, by_target in counts_of(rows).items():
        board.line({"counted a weight": kernel} | by_target)


def pruned(board: Board) -> None:
    """Nothing runs a library's kernel yet: docs/decisions/0102. So the bar is missed."""
    board.bar(
        "amd, kernels of a pruned library with the same results as before", 0, 1, "kernels", at_least=True
    )


def _record(rows: list[dict]) -> None:
    digests: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["buffers"] and not row["wrong"]:
            digests[row["case"]][row["target"]] = row["digest"]
    write_text(_PACKING / "proof.json", json.dumps(digests, indent=0, sort_keys=True) + "\n")
    tell(f"wrote {_PACKING / 'proof.json'}")


if __name__ == "__main__":
    sys.exit(main())
