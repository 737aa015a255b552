"""`weir probe fit --measure gpu` on this GPU: the largest batch under a cap against brute force, predictions.

Cases run side by side, each process with a cap of its own. One runs alone first, for the driver's context.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import fit_cases
from board import Board, tell
from fit_cases import MIB, Case, Seen, bert, gpt2, qwen, run, train

from probes.core.errors import ProbeError
from probes.fit.report import Question
from probes.fit.search import Hint
from probes.fit.worker import SearchRequest, measure
from probes.placement.planner.machine import profile

MODEL = qwen(1024, 8, heads=16, vocabulary=16000)
GIB = 1024 * MIB
CASES = (
    Case("adamw fp32", MODEL, 4 * GIB, train(tokens=512)),
    Case("adamw amp-bf16", MODEL, 4 * GIB, train(tokens=512, precision="amp-bf16"), tuned=True),
    Case("adamw bf16", MODEL, 2 * GIB, train(tokens=512, precision="bf16")),
    Case("checkpointing bf16", MODEL, 2 * GIB, train(tokens=1024, precision="bf16", checkpointing=True)),
    Case("checkpointing fp32", MODEL, 3 * GIB, train(tokens=512, checkpointing=True), tuned=True),
    Case("LoRA bf16", MODEL, 2 * GIB, train(tokens=512, precision="bf16", lora_rank=16)),
    Case(
        "LoRA checkpointing",
        MODEL,
        2 * GIB,
        train(tokens=1024, precision="bf16", lora_rank=16, checkpointing=True),
        tuned=True,
    ),
    Case("sgd bf16", MODEL, 2 * GIB, train(tokens=512, precision="bf16", optimizer="sgd"), tuned=True),
    Case("accumulated bf16", MODEL, 2 * GIB, train(tokens=512, precision="bf16", accumulate=3)),
    Case("gpt2 fp32", gpt2(768, 6), 2 * GIB, train(tokens=256), tuned=True),
    Case("bert amp-bf16", bert(768, 6), 2 * GIB, train(tokens=256, precision="amp-bf16")),
    Case("inference bf16", MODEL, GIB, Question("m", tokens=4096, precision="bf16"), tuned=True),
)


def measure_alone() -> int | None:
    """Bytes of the driver's context, of a search that has the GPU to itself."""
    case = CASES[2]
    ask = SearchRequest(
        json.dumps(dict(case.config)), case.asked, "gpu", "batch", case.budget, Hint(1), 2, 60.0
    )
    contexts = [t.context_bytes for t in measure(ask, lambda trial: None).trials]
    return max((n for n in contexts if isinstance(n, int)), default=None)


def tried(case: Case) -> Seen | str:
    if case.asked.lora_rank and find_spec("peft") is None:
        return "LoRA needs peft, which isn't on this machine: pip install peft"
    try:
        seen = run(case, "gpu", profile("h200"), limit_s=100.0)
        report(seen)
        return seen
    except (ProbeError, OSError, ValueError) as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side-by-side", type=int, default=12)
    args = parser.parse_args()
    board = Board("fit-gpu", command="tests/device/run_fit.sh", results=args.out)
    alone = measure_alone()
    if isinstance(alone, int):
        board.figure("context of the driver", alone / MIB, "MiB", by="NVML and torch")
    with ThreadPoolExecutor(args.side_by_side) as pool:
        found = [*zip(CASES, pool.map(tried, CASES), strict=True)]
    seen = [each for _, each in found if isinstance(each, Seen)]
    for case, each in found:
        if isinstance(each, str):
            board.waive(f"fit on a GPU, {case.name}", each)
        else:
            board.line(row(each))
    board.bar(
        "fit on a GPU, largest batch exact", sum(s.exact for s in seen), len(CASES), "cases", at_least=True
    )
    board.bar("fit on a GPU, longest case", max((s.seconds for s in seen), default=0.0), 120, "s")
    for place, how in enumerate(("rules", "trace")):
        held = [
            abs(s.errors[place]) for s in seen if not s.case.tuned and isinstance(s.measured.peak_bytes, int)
        ]
        board.bar(
            f"fit on a GPU, memory predicted by {how}, held-out half", max(held, default=1.0), 0.05, "share"
        )
    return board.finish()


def row(seen: Seen) -> dict[str, object]:
    measured = seen.measured
    known = isinstance(measured.peak_bytes, int)
    return {
        "case": seen.case.name,
        "largest": measured.largest.fits,
        "exact": seen.exact,
        "predicted": seen.guess,
        "peak_mib": round(measured.peak_bytes / MIB, 1) if isinstance(measured.peak_bytes, int) else None,
        "rules_mib": round(seen.rules_bytes / MIB, 1),
        "trace_mib": round(seen.trace_bytes / MIB, 1),
        "rules_error": round(seen.errors[0], 4) if known else None,
        "trace_error": round(seen.errors[1], 4) if known else None,
        "reserved_mib": [
            round(t.reserved_bytes / MIB) if isinstance(t.reserved_bytes, int) else None
            for t in measured.trials
        ],
        "sizes": [f"{t.size} {t.verdict}" for t in measured.trials],
        "brute": list(seen.brute)[-3:],
        "seconds": round(seen.seconds, 1),
        "tuned": seen.case.tuned,
        "said": [t.said[:160] for t in measured.trials if t.verdict == "crashed"],
        "at_size": str(measured.at_size),
    }


def report(seen: Seen) -> None:
    peak = seen.measured.peak_bytes
    rules, trace = seen.errors if isinstance(peak, int) else (0.0, 0.0)
    largest, exact = seen.measured.largest.fits, "exact" if seen.exact else "NOT EXACT"
    tell(
        f"{seen.case.name}: largest {largest} (predicted {seen.guess}), brute force up to "
        f"{max(seen.brute, default=0)}, {exact}; rules {rules:+.1%}, trace {trace:+.1%}; "
        f"{len(seen.measured.trials)} trials, {seen.seconds:.0f} s"
    )


if __name__ == "__main__":
    assert fit_cases
    print(json.dumps({"python": sys.version.split()[0]}))
    sys.exit(main())
