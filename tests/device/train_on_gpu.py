"""The bars of `weir probe epochs` that need a GPU; run by run_train.sh, which sets PYTHONPATH.

`pair`: our loop against a bare one, in blocks of four epochs, on one GPU. `bars FILE`: what a report of one
GPU says. `trouble FILE`: out of memory. `two FILE`: scaling efficiency over two GPUs or more.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from board import Board
from train_pair import judged

from probes.core.unknown import Unknown
from probes.training import figures
from probes.training.report import named_epochs

PAIR = Path(__file__).parents[1] / "bench" / "train_pair.py"
# model, batch, precision, samples of an epoch, tokens, blocks, the loader's workers; before the first run but
# for samples and blocks: 9 pairs of epochs of a second had ratios of 0.88 to 1.16 on an H200, which moved
# slowly. 30 and 20 blocks of four epochs are about a minute of computing each there.
PAIRS = (
    ("bert-base", 64, "amp-bf16", 1024, 128, 30, 0),
    ("resnet-50", 128, "amp-bf16", 1280, 128, 20, 4),
)
WITHIN = 0.02
EFFICIENT = 0.92


def pair(board: Board, *, smoke: bool) -> None:
    """Our loop against a bare one."""
    for model, batch, precision, samples, tokens, blocks, workers in PAIRS:
        if smoke:
            batch, samples, tokens, blocks = 1, 2, 8, 2  # noqa: PLW2901
        words = [model, batch, precision, samples, tokens, blocks, workers, 0, "cpu" if smoke else "gpu"]
        done = subprocess.run(
            [sys.executable, str(PAIR), *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
        name = f"{model}, batch {batch}, {precision}"
        if done.returncode or not done.stdout:
            board.line({"bar": f"{name}: our loop / bare", "failed": done.stderr[-600:]})
            board.missed = True
        else:
            judged(board, name, done.stdout)


def bars(board: Board, path: Path) -> None:
    """What a report of one GPU says of each case."""
    report, _ = named_epochs(path)
    for case in figures.cases_of(report):
        parts, rate, energy = figures.parts(case), figures.rate(case), figures.energy_j(case)
        assert not isinstance(parts, Unknown)
        assert not isinstance(rate, Unknown)
        name = f"{case.settings.model}, batch {case.settings.batch}, {case.settings.precision}"
        bound = figures.bound_of(case)
        board.bar(f"{name}: |parts / wall - 1|", abs(parts.total / parts.wall - 1), WITHIN, "ratio")
        board.figure(
            f"{name}: samples/s",
            rate.value,
            "1/s",
            sem=rate.error,
            n=rate.n,
            library=case.library,
            bound=str(bound),
            joules_per_epoch=str(energy) if isinstance(energy, Unknown) else energy.value,
        )
    failed = [run for run in report.runs if run.state != "done"]
    for run in failed:
        board.figure(f"{run.name} failed", figures.cause_of(run), "")


def trouble(board: Board, path: Path) -> None:
    """A batch that no card holds: a message with rank, step and cause."""
    report, _ = named_epochs(path)
    causes = [figures.cause_of(run) for run in report.runs]
    ok = sum("rank 0, step" in cause and "out of memory" in cause for cause in causes)
    board.bar(
        "out of memory on the GPU is named with rank, step, cause", ok, len(causes), "runs", at_least=True
    )
    board.line({"causes": causes})


def two(board: Board, path: Path) -> None:
    """Efficiency over several GPUs."""
    report, _ = named_epochs(path)
    cases = figures.cases_of(report)
    for case in cases:
        efficiency = figures.efficiency(case, cases)
        if case.world == 1:
            continue
        settings = case.settings
        name = f"{settings.model}, {case.world} GPUs, {settings.scaling}, batch {settings.batch} a card"
        if isinstance(efficiency, Unknown):
            board.waive(name, efficiency.reason)
            continue
        if case.settings.scaling == "strong":
            board.bar(
                f"{name}: efficiency",
                efficiency.value,
                EFFICIENT,
                "ratio",
                at_least=True,
                sem=efficiency.error,
            )
        else:
            board.figure(f"{name}: efficiency", efficiency.value, "ratio", sem=efficiency.error)


def main() -> int:
    """Judge one group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=("pair", "bars", "trouble", "two"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    name = args.group if args.file is None else f"{args.group}-{args.file.stem}"
    board = Board(
        f"train-gpu-{name}", command="tests/device/run_train.sh", whole=not args.smoke, results=args.out
    )
    if args.group == "pair":
        pair(board, smoke=args.smoke)
    else:
        {"bars": bars, "trouble": trouble, "two": two}[args.group](board, args.file)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
