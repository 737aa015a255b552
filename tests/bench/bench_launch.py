"""`weir launch` on a real Slurm of three nodes on this machine: preemptions, failures, templates, engines.

Written down before the first run: 20 moments, drawn by seed 31 and even between 0 and 15 s after Slurm calls
the job running, each moment a preemption by a job of a higher partition; 5 dead ranks and 3 hanging ones at moments
of the same draw. All are shown, none is drawn again.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from board import ROOT, Board, tell

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
sys.path.insert(0, str(ROOT / "tests" / "unit" / "launch"))

from cluster import Cluster, slurm  # noqa: E402
from runs import STEPS, Launched, launched, trained, training, workers  # noqa: E402

SEED, PREEMPTIONS, LATEST_S, EPOCHS = 31, 20, 15.0, 40
DEAD, HANGING = 5, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("preempted", "failures"), help="a part (default: all)")
    only = parser.parse_args().only
    board = Board(whole=only is None)
    drawn = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder, slurm(Path(folder), 3) as cluster:
        if only in (None, "preempted"):
            preempted(board, cluster, drawn)
        if only in (None, "failures"):
            failures(board, cluster, drawn)
        left = cluster.ask("squeue", "--noheader")
        board.bar("jobs left in Slurm", len(left.splitlines()), 0, "jobs")
        ranks = [pid for node in cluster.names for pid in workers(cluster, node)]
        board.bar("ranks left on the nodes", len(ranks), 0, "processes")
    return board.finish()


def preempted(board: Board, cluster: Cluster, drawn: random.Random) -> None:
    """As many jobs as it takes for 20 preemptions: one that ends before its moment doesn't count as one."""
    plain = launched(cluster, cluster.folder / "plain", "--nodes", "2", command=trained(epochs=EPOCHS))
    assert plain.ended(900) == 0, plain.text[-2000:]
    wanted = [plain.rank(n)["losses"] for n in (0, 1)]
    tell(f"uninterrupted: {len(wanted[0])} steps, losses {wanted[0][0]:.4f} to {wanted[0][-1]:.4f}")
    moments = [drawn.uniform(0, LATEST_S) for _ in range(PREEMPTIONS)]
    resumed, identical, jobs, lost, rows = 0, 0, 0, 0, []
    while moments:
        jobs += 1
        out = cluster.folder / f"preempted-{jobs}"
        run = launched(cluster, out, "--nodes", "2", command=trained(epochs=EPOCHS))
        restarts = 0
        while moments and (moment := one_preemption(cluster, run, restarts, moments)) is not None:
            came_back = came_back_again(cluster, run, restarts)
            restarts += came_back
            resumed += came_back
            rows.append({"job": jobs, "after_s": round(moment, 2), "resumed": came_back, "at_step": run.step})
            tell(f"{rows[-1]}")
        code = run.ended(900)
        same = code == 0 and [run.rank(n)["losses"] for n in (0, 1)] == wanted
        identical += same
        numbers = [each["number"] for each in run.rank(0)["epochs"]]
        lost += EPOCHS - len(set(numbers))
        if not same:
            tell(run.text[-3000:])
    board.bar("preempted and resumed", resumed, PREEMPTIONS, f"of {PREEMPTIONS}", at_least=True, each=rows)
    board.bar("jobs whose loss curve is identical, bit by bit", identical, jobs, f"of {jobs}", at_least=True)
    board.bar("lost epochs", lost, 0, "epochs", steps=len(wanted[0]), by_step=STEPS)


def one_preemption(
    cluster: Cluster, run: Launched, restarts: int, moments: list[float]
) -> float | None:
    """Preempt the job at the next moment; None where it has ended before."""

    def begun() -> bool:
        job = cluster.job(run.job_id)
        return over(job) or (job["JobState"] == "RUNNING" and int(job["Restarts"]) >= restarts)

    cluster.wait(begun, "the job to run")
    time.sleep(moments[0])
    if over(cluster.job(run.job_id)):
        return None
    cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    return moments.pop(0)


def came_back_again(cluster: Cluster, run: Launched, restarts: int) -> bool:
    def back() -> bool:
        job = cluster.job(run.job_id)
        again = int(job["Restarts"]) > restarts and job["JobState"] == "RUNNING"
        return again or over(job)

    cluster.wait(back, "the job to be resumed")
    return int(cluster.job(run.job_id)["Restarts"]) > restarts


def over(job: dict[str, str]) -> bool:
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def failures(board: Board, cluster: Cluster, drawn: random.Random) -> None:
    """A rank that is killed, and one that stops without a word: does a message name rank, step and cause?"""
    for kind, number, count in (("dead", signal.SIGKILL, DEAD), ("hanging", signal.SIGSTOP, HANGING)):
        named, waits, messages = 0, [], []
        for index in range(count):
            out = cluster.folder / f"{kind}-{index}"
            command = trained(epochs=400, timeout=15)
            run = launched(cluster, out, "--nodes", "2", "--grace-s", "20", command=command)
            victim = drawn.choice(("n1", "n2"))
            training(cluster, run, victim)
            time.sleep(3 + drawn.uniform(0, 5))
            pid = workers(cluster, victim)[0]
            os.kill(pid, number)
            begun = time.monotonic()
            code = run.ended(180)
            waits.append(round(time.monotonic() - begun, 1))
            lines = [line for line in run.text.splitlines() if "error: rank" in line and ", step " in line]
            messages.append(lines[-1].strip() if lines else run.text[-300:])
            named += bool(code == 1 and lines and f"{victim}: task" in run.text)
            if number is signal.SIGSTOP:
                subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)
        board.bar(
            f"{kind} rank: a message with rank, step and cause, and all ranks ended",
            named,
            count,
            f"of {count}",
            at_least=True,
            seconds=waits,
            messages=messages,
        )


if __name__ == "__main__":
    sys.exit(main())
