"""`weir probe fit --measure cpu`: the largest size against brute force on 12 cases, and predicted memory.

The budget of a CPU trial is RLIMIT_DATA: heap and anonymous maps in whole pages, beyond those of the process
before the model was built, with one thread. The measured peak is that of resident memory without files.
Half of the cases, marked `tuned`, were in sight when the rules were written; the bar is on the other half.

    .venv-torch/bin/python tests/bench/bench_fit.py [NAME...]
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from board import RESULTS, Board, tell
from fit_cases import MIB, Case, Seen, bert, gpt2, qwen, run, train

from probes.fit.question import Question

SMALL = qwen(512, 4)
CASES = (
    Case("adamw fp32", SMALL, 400 * MIB, train(), tuned=True),
    Case("sgd fp32", SMALL, 260 * MIB, train(optimizer="sgd")),
    Case("momentum fp32, 64 tokens", qwen(768, 3), 400 * MIB, train(tokens=64, optimizer="momentum")),
    Case("adamw amp-bf16", SMALL, 400 * MIB, train(precision="amp-bf16"), tuned=True),
    Case("adamw bf16", qwen(768, 3), 300 * MIB, train(precision="bf16")),
    Case("checkpointing fp32", qwen(512, 6), 500 * MIB, train(checkpointing=True)),
    Case("LoRA fp32", SMALL, 260 * MIB, train(lora_rank=16), tuned=True),
    Case("LoRA checkpointing", SMALL, 240 * MIB, train(lora_rank=8, checkpointing=True)),
    Case("accumulated fp32", SMALL, 400 * MIB, train(accumulate=2, optimizer="momentum"), tuned=True),
    Case("gpt2 fp32", gpt2(512, 4), 400 * MIB, train(), tuned=True),
    Case("bert fp32", bert(512, 4), 500 * MIB, train(tokens=256)),
    Case("inference fp32", SMALL, 300 * MIB, Question("m", tokens=2048, precision="fp32"), tuned=True),
)
SIDE_BY_SIDE = 6  # at most; each has one thread


def main() -> int:
    wanted = set(sys.argv[1:])
    cases = [case for case in CASES if not wanted or case.name in wanted]
    results = os.environ.get("OUT")
    board = Board(whole=not wanted, results=Path(results) if results else RESULTS)
    with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1)) as pool:
        found = [*pool.map(tried, cases)]
    for seen in found:
        board.line(row(seen))
    exact = sum(seen.exact for seen in found)
    board.bar("fit, largest size exact against brute force", exact, len(cases), "cases", at_least=True)
    board.bar("fit, longest case", max(seen.seconds for seen in found), 120, "s")
    for place, how in enumerate(("rules", "a trace")):
        for half, tuned in (("held-out half", False), ("half in sight", True)):
            errors = [abs(seen.errors[place]) for seen in found if seen.case.tuned == tuned]
            name = f"fit, memory predicted by {how}, {half}"
            if errors and not tuned:
                board.bar(name, max(errors), 0.05, "share")
            elif errors:
                board.figure(name, max(errors), "share")
    for name in (
        "largest batch exact on 6 of 12 cases",
        "memory predicted within 5 %",
        "LoRA, checkpointing, AdamW",
    ):
        board.waive(f"fit on a GPU, {name}", "needs a GPU: tests/device/run_fit.sh; not yet measured on one")
    return board.finish()


def tried(case: Case) -> Seen:
    seen = run(case, "cpu")
    rules, trace = seen.errors
    exact = "exact" if seen.exact else f"NOT EXACT {seen.brute}"
    largest, guess = seen.measured.largest.fits, seen.guess
    tell(
        f"{case.name}: largest {largest} (predicted {guess}), {exact}; rules {rules:+.1%}, "
        f"trace {trace:+.1%}; {len(seen.measured.trials)} trials, {seen.seconds:.0f} s {seen.measured.ended}"
    )
    return seen


def row(seen: Seen) -> dict[str, object]:
    peak = seen.measured.peak_bytes
    rules, trace = seen.errors
    return {
        "case": seen.case.name,
        "largest": seen.measured.largest.fits,
        "exact": seen.exact,
        "predicted": seen.guess,
        "measured_mib": round(peak / MIB, 1) if isinstance(peak, int) else None,
        "rules": round(rules, 4),
        "trace": round(trace, 4),
        "trials": len(seen.measured.trials),
        "seconds": round(seen.seconds, 1),
        "held_out": not seen.case.tuned,
    }


if __name__ == "__main__":
    sys.exit(main())
