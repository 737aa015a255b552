"""The bars of `weir probe epochs` that a CPU can show; those of GPUs are tests/device/run_train.sh's.

Run by `make bench-train`, in the environment that has torch. Prints one JSON line a bar; exit code 1 where
one is missed. What is drawn is drawn by these rules, from fixed seeds, and every case counts.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from board import Board, tell
from train_pair import judged

sys.path.append(str(Path(__file__).parents[1] / "torch"))

from training_ranks import Ranks, ranks_of

from probes.core.unknown import Unknown
from probes.training import figures
from probes.training.report import report_of, run_in

HERE = Path(__file__).parent
WITHIN = 0.02
PLANTED, FAILED, RESUMED = 50, 10, 20  # of each kind
FEW = ("--batch", 4, "--epochs", 2, "--threads", 1)
# processes, blocks of four epochs of 32 steps; a BERT of 4 layers, width 128
LOOPS = ((1, 20), (2, 20))
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


def loop(board: Board) -> None:
    """Our loop against one that is written by hand, epoch by epoch in turns."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG), encoding="utf-8")
        for world, blocks in LOOPS:
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr",
                "127.0.0.1",
            ]
            words = [config, 8, "fp32", 256 * world, 32, blocks, 0, 1, "cpu"]
            done = subprocess.run(
                [*launcher, "--nproc-per-node", str(world), str(HERE / "train_pair.py"), *map(str, words)],
                capture_output=True,
                text=True,
                check=True,
            )
            judged(board, f"{world} process{'es' * (world > 1)}", done.stdout)


def planted(board: Board) -> None:
    """A slow loader, a straggler and a slow link: is each one the bound?

    The fourth series, whose rule and seed were written down before its only run: two or three ranks, times of
    1.5 to 4, a loader that is slow on all ranks or on a drawn one, each drawn. What is planted lasts so many
    times the rest of the step before it, at least 10 ms: so it is the largest part of a step, whatever else
    runs. The first series (two ranks, times of 1.5 to 3, a slow loader on all ranks in even cases) was held
    by the fourth form of what is planted: until then its length was set by a run before it. The second, with
    this rule, was stopped after 39 of 50 loaders: what ranks tell each other of a step was exchanged in the
    backward, where quick ranks waited for the slow one and seemed to compute. The third had 50 loaders, 50
    stragglers and 41 links, at a load of 4: a slow link began before the backward was over, and what a busy
    machine added to that was neither in its length nor in the exchange.
    """
    worst = 0.0
    with Ranks() as ranks, TemporaryDirectory() as folder:
        for kind in ("loader", "straggler", "link"):
            drawn, named, lines = random.Random(f"{kind}, fourth series"), 0, []
            for case in range(PLANTED):
                world, times = drawn.choice((2, 3)), drawn.uniform(1.5, 4)
                rank, on_all = drawn.randrange(world), kind == "loader" and drawn.random() < 0.5
                plant = {"kind": kind, "times": times}
                if kind == "straggler" or (kind == "loader" and not on_all):
                    plant["rank"] = rank
                out = Path(folder) / f"{kind}-{case}"
                ranks.run(out, *FEW, world=world, plant=plant)
                found = _case(out)
                parts, bound = figures.parts(found), figures.bound_of(found)
                assert not isinstance(parts, Unknown)
                worst = max(worst, abs(parts.total / parts.wall - 1))
                wanted = {
                    "loader": ("data", None, None) if on_all else ("straggler", rank, "data"),
                    "straggler": ("straggler", rank, "compute"),
                    "link": ("exchange", None, None),
                }[kind]
                ok = not isinstance(bound, Unknown) and (bound.cause, bound.rank, bound.of) == wanted
                named += ok
                if not ok:
                    asked = f"case {case}, {world} ranks, {times:.2f} times, wanted {wanted}"
                    lines.append(f"{asked}: {figures.costs(found)}")
            board.bar(f"planted {kind}: named", named, PLANTED, "cases", at_least=True, others=lines)
    board.bar(f"|parts / wall - 1|, worst of {3 * PLANTED} planted runs", worst, WITHIN, "ratio")


def _case(out: Path) -> figures.Case:
    (case,) = figures.cases_of(report_of((run_in(out),)))
    return case


FAULTS = {
    "memory": "out of memory in compute",
    "nan": "the loss is nan",
    "kill": "rank 1 left no report",
    "hang": "compute",
    "full": "can't write the checkpoint of step",
}


def failed(board: Board) -> None:
    """Failures in a drawn step: a message with rank, step and cause, all ranks end, a whole checkpoint."""
    with Ranks() as ranks, TemporaryDirectory() as folder:
        for kind, cause in FAULTS.items():
            drawn, told, ended, whole, others = random.Random(kind), 0, 0, 0, []
            for case in range(FAILED):
                out = Path(folder) / f"{kind}-{case}"
                step = drawn.randrange(5, 20)
                plant = {"kind": kind, "rank": 0 if kind == "full" else 1, "step": step}
                timeout = 5 if kind == "hang" else 60
                codes, log = ranks.run(
                    out, *FEW, "--timeout", timeout, "--checkpoint-every", 2, world=2, plant=plant
                )
                message = figures.cause_of(run_in(out))
                wrote = step + step % 2  # a full disk is met by the next checkpoint
                where = wrote if kind == "full" else step
                ok = cause in message and "Traceback" not in log
                ok &= f"rank {plant['rank']}" in message
                ok &= f"step {where}" in message or (kind == "kill" and f"step {where - 1}" in message)
                told += ok
                ended += all(codes)
                content = torch.load(out / "checkpoint.pt", weights_only=True)
                last = wrote - 2 if kind == "full" else (step - 1) // 2 * 2
                codes, _ = ranks.run(out, *FEW, "--resume", world=2)
                whole += content["place"]["step"] == last and codes == [0, 0]
                if not ok:
                    others.append(f"step {step}: {message}")
            name = f"{kind} in a drawn step"
            board.bar(
                f"{name}: rank, step and cause are said", told, FAILED, "runs", at_least=True, others=others
            )
            board.bar(f"{name}: all ranks end", ended, FAILED, "runs", at_least=True)
            board.bar(f"{name}: the last checkpoint is whole", whole, FAILED, "runs", at_least=True)


def resumed(board: Board) -> None:
    """SIGUSR1 in a drawn step, at a drawn rank: checkpointed, resumed, the same losses."""
    drawn, same, others = random.Random("resumed"), 0, []
    long = (*FEW, "--epochs", 12)
    with Ranks() as ranks, TemporaryDirectory() as folder:
        ranks.run(Path(folder) / "whole", *long, world=2)
        whole = [report["losses"] for report in ranks_of(Path(folder) / "whole")]
        for case in range(RESUMED):
            out = Path(folder) / str(case)
            # steps of 20 ms: ranks look every 50 steps at most, stop 50 later, and the run has 144
            plant = {"kind": "usr1", "rank": drawn.randrange(2), "step": drawn.randrange(1, 17), "pace": 0.02}
            first, _ = ranks.run(out, *long, world=2, plant=plant)
            codes, _ = ranks.run(out, *long, "--resume", world=2)
            losses = [report["losses"] for report in ranks_of(out)]
            ok = first == [75, 75] and codes == [0, 0] and losses == whole
            same += ok
            if not ok:
                others.append({**plant, "codes": [first, codes], "same": losses == whole})
    name = "preempted in a drawn step, resumed: the same losses, bit by bit"
    board.bar(name, same, RESUMED, "runs", at_least=True, others=others)


GPU = "needs a GPU: tests/device/run_train.sh"
GROUPS: dict[str, Callable[[Board], None]] = {
    "loop": loop,
    "planted": planted,
    "failed": failed,
    "resumed": resumed,
}


def main() -> int:
    """Run all groups, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    args = parser.parse_args()
    board = Board(whole=not args.groups)
    for name in args.groups or GROUPS:
        tell(f"{name} ...")
        GROUPS[name](board)
    if not args.groups:
        board.waive("2 GPUs, DDP, BERT-base and ResNet-50, amp-bf16: efficiency", GPU)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
