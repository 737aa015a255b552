"""`weir probe fit --measure cpu`: the largest size against brute force on 14 cases, and predicted memory.

Ten cases are capped by RLIMIT_DATA: heap and anonymous maps in whole pages, beyond those of the process
before the model was built, with one thread. Four (`cgroup`) are capped by a memory cgroup for each trial
where this machine lets us make one, else by RLIMIT_DATA too; each row says which it was. The measured peak
is that of resident memory without files. Brute force knows the answer's neighbourhood and nothing else of
the search: it tries every size within 3 of it, all from 1 on where it is at most 8, half of it and twice as
much, each in a fork of a process that has only imported torch and transformers.
Half of the cases, marked `tuned`, were in sight when the rules were written; the bar is on the other half.

    .venv-torch/bin/python tests/bench/bench_fit.py [NAME...]
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from board import Board, tell
from fit_cases import MIB, Case, Seen, bert, gpt2, opt, qwen, run, train, vit

from probes.fit.limits import CGROUP_LIMIT
from probes.fit.report import Question

SMALL = qwen(256, 4)
WIDER = qwen(384, 3)
CASES = (
    Case("adamw fp32", SMALL, 256 * MIB, train(), tuned=True),
    Case("sgd fp32, cgroup", SMALL, 256 * MIB, train(optimizer="sgd"), cap="auto"),
    Case("momentum fp32, 64 tokens", WIDER, 256 * MIB, train(tokens=64, optimizer="momentum")),
    Case("adamw amp-bf16", SMALL, 256 * MIB, train(precision="amp-bf16"), tuned=True),
    Case("adamw bf16", WIDER, 200 * MIB, train(precision="bf16")),
    Case("checkpointing fp32", qwen(256, 6), 256 * MIB, train(checkpointing=True)),
    Case("LoRA fp32", SMALL, 200 * MIB, train(lora_rank=16), tuned=True),
    Case("LoRA checkpointing, cgroup", SMALL, 200 * MIB, train(lora_rank=8, checkpointing=True), cap="auto"),
    Case("accumulated fp32", SMALL, 256 * MIB, train(accumulate=2, optimizer="momentum"), tuned=True),
    Case("gpt2 fp32", gpt2(256, 4), 256 * MIB, train(), tuned=True),
    Case("bert fp32, cgroup", bert(256, 6), 256 * MIB, train(tokens=256), cap="auto"),
    Case(
        "inference fp32, longest sequence",
        SMALL,
        256 * MIB,
        Question("m", batch=64, precision="fp32"),
        axis="tokens",
        tuned=True,
    ),
    Case("opt fp32, no rules", opt(256, 4), 256 * MIB, train()),
    Case("vit fp32, no rules, cgroup", vit(192, 4), 256 * MIB, train(optimizer="momentum"), cap="auto"),
)
SIDE_BY_SIDE = 6  # at most; each has one thread


def main() -> int:
    wanted = set(sys.argv[1:])
    cases = [case for case in CASES if not wanted or case.name in wanted]
    results = os.environ.get("OUT")
    board = Board(whole=not wanted, results=Path(results) if results else None)
    if find_spec("peft") is None:
        for case in cases:
            if case.asked.lora_rank:
                board.waive(f"fit, {case.name}", "peft isn't installed: pip install peft")
        cases = [case for case in cases if not case.asked.lora_rank]
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
        "largest batch exact on 12 cases",
        "memory predicted within 5 %",
        "LoRA, checkpointing, AdamW",
    ):
        board.waive(
            f"fit on a GPU, {name}",
            "needs a GPU: tests/device/run_fit.sh; its results are docs/results/bench-fit-gpu.json",
        )
    return board.finish()


def tried(case: Case) -> Seen:
    seen = run(case, "cpu")
    rules, trace = seen.errors
    exact = "exact" if seen.exact else f"NOT EXACT {seen.brute}"
    largest, guess = seen.measured.largest.fits, seen.guess
    tell(
        f"{case.name}: largest {largest} of {seen.tried} (predicted {guess}), {exact}; rules {rules:+.1%}, "
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
        "brute_force_tried": list(seen.tried),
        "predicted": seen.guess,
        "measured_mib": round(peak / MIB, 1) if isinstance(peak, int) else None,
        "rules": round(rules, 4),
        "trace": round(trace, 4),
        "trials": len(seen.measured.trials),
        "seconds": round(seen.seconds, 1),
        "cap": "cgroup" if seen.measured.cap == CGROUP_LIMIT else "process",
        "ended": seen.measured.ended,
        "held_out": not seen.case.tuned,
    }


if __name__ == "__main__":
    sys.exit(main())
