"""`weir launch` on a real Slurm of three nodes on this machine: preemptions, failures, templates, engines.

Written down before the first run: 20 moments, drawn by seed 31 and even between 0 and 15 s after Slurm calls
the job running, each moment a preemption by a job of a higher partition; 5 dead ranks and 3 hanging ones at
moments of the same draw; templates: every combination of GRID. All are shown, none is drawn again.
Added after the first 10, most of which fell into the start of Python and torch: 20 more, 0 to 8 s after a
rank has asked for its first sample.

Only Slurm is real here: of the other engines the rendered command is run by a shell, with the variables that
the engine sets.
"""

import argparse
import itertools
import json
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

import jsonschema
import yaml
from cluster import Cluster, slurm
from runs import STEPS, Launched, launched, trained, training, workers
from test_launch import CASES, CLUSTERS, HOSTILE, SCHEMAS, job, kubernetes_expands

from buildtool.core.progress import Progress
from buildtool.launch.engines import ENGINES
from buildtool.launch.job import Job, load

SEED, PREEMPTIONS, EPOCHS = 31, 20, 40
LATEST_S = {"running": 15.0, "training": 8.0}  # after Slurm says so; after the first sample
DEAD, HANGING = 5, 3
LONG = 200  # epochs that take more than 90 s on any machine: their samples alone take 102 s
PARTS = ("running", "training", "failures", "templates", "engines", "limit", "lost", "array", "fleet")
GRID: dict[str, list[object]] = {
    "container": ["none", "pyxis", "charliecloud", "apptainer"],
    "nodes": [1, 3],
    "gpus": [0, 2],
    "batches": [[], [32, 64]],
    "memory": ["", "2GiB"],
    "queue": ["", "urgent"],
    "command": [["python3", "t.py"], list(HOSTILE)],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="a part (default: all)")
    parser.add_argument("--quick", action="store_true", help="2 preemptions, a dead and a hanging rank")
    args = parser.parse_args()
    board = Board(whole=not (args.only or args.quick))
    drawn = random.Random(SEED)
    preemptions, dead, hanging = (2, 1, 1) if args.quick else (PREEMPTIONS, DEAD, HANGING)
    works = {
        "running": lambda cluster: preempted(board, cluster, drawn, preemptions, "running"),
        "training": lambda cluster: preempted(board, cluster, drawn, preemptions, "training"),
        "failures": lambda cluster: failures(board, cluster, drawn, dead, hanging),
        "templates": lambda cluster: templates(board, cluster),
        "engines": lambda cluster: engines(board, cluster),
        "limit": lambda cluster: limit(board, cluster),
        "lost": lambda cluster: lost_node(board, cluster),
        "array": lambda cluster: array(board, cluster),
        "fleet": lambda cluster: fleet(board, cluster),
    }
    with tempfile.TemporaryDirectory() as folder, slurm(Path(folder), 3) as cluster:
        for part in [args.only] if args.only else PARTS:
            works[part](cluster)
        left = cluster.ask("squeue", "--noheader")
        board.bar("jobs left in Slurm", len(left.splitlines()), 0, "jobs")
        ranks = [pid for node in cluster.names for pid in workers(cluster, node)]
        board.bar("ranks left on the nodes", len(ranks), 0, "processes")
    return board.finish()


def preempted(board: Board, cluster: Cluster, drawn: random.Random, count: int, since: str) -> None:
    """As many jobs as it takes for 20 preemptions: one that ends before its moment doesn't count as one."""
    plain = launched(
        cluster, cluster.folder / f"plain-{since}", "--nodes", "2", command=trained(epochs=EPOCHS)
    )
    assert plain.ended(900) == 0, plain.text[-2000:]
    wanted = [plain.rank(n)["losses"] for n in (0, 1)]
    tell(f"uninterrupted: {len(wanted[0])} steps, losses {wanted[0][0]:.4f} to {wanted[0][-1]:.4f}")
    moments = [drawn.uniform(0, LATEST_S[since]) for _ in range(count)]
    resumed, finished, identical, jobs, lost, rows = 0, 0, 0, 0, 0, []
    while moments:
        jobs += 1
        out = cluster.folder / f"{since}-{jobs}"
        run = launched(cluster, out, "--nodes", "2", command=trained(epochs=EPOCHS))
        restarts = 0
        while moments and (moment := one_preemption(cluster, run, restarts, moments, since)) is not None:
            came_back = came_back_again(cluster, run, restarts)
            restarts += came_back
            resumed += came_back
            # its last step was done before the signal was seen: nothing was left to resume
            finished += not came_back and cluster.state(run.job_id) == "COMPLETED"
            rows.append({"job": jobs, "after_s": round(moment, 2), "resumed": came_back, "at_step": run.step})
            tell(f"{rows[-1]}")
        code = run.ended(900)
        same = code == 0 and [run.rank(n)["losses"] for n in (0, 1)] == wanted
        identical += same
        numbers = [each["number"] for each in run.rank(0)["epochs"]]
        lost += EPOCHS - len(set(numbers))
        if not same:
            tell(run.text[-3000:])
    board.bar(
        f"preempted after {since}, and resumed, or at its last step and done",
        resumed + finished,
        count,
        f"of {count}",
        at_least=True,
        resumed=resumed,
        done=finished,
        each=rows,
    )
    board.bar(
        f"after {since}: jobs whose loss curve is identical, bit by bit",
        identical,
        jobs,
        f"of {jobs}",
        at_least=True,
    )
    board.bar(f"after {since}: lost epochs", lost, 0, "epochs", steps=len(wanted[0]), by_step=STEPS)


def one_preemption(
    cluster: Cluster, run: Launched, restarts: int, moments: list[float], since: str
) -> float | None:
    """Preempt the job at the next moment; None where it has ended before."""

    def begun() -> bool:
        job = cluster.job(run.job_id)
        return over(job) or (job["JobState"] == "RUNNING" and int(job["Restarts"]) >= restarts)

    cluster.wait(begun, "the job to run")
    if since == "training":
        training(cluster, run, restarts)
    time.sleep(moments[0])
    if over(cluster.job(run.job_id)):
        return None
    words = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.ask("sbatch", "--parsable", *words)
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


def failures(board: Board, cluster: Cluster, drawn: random.Random, dead: int, hanging: int) -> None:
    """A rank that is killed, and one that stops without a word: does a message name rank, step and cause?"""
    for kind, number, count in (("dead", signal.SIGKILL, dead), ("hanging", signal.SIGSTOP, hanging)):
        named, waits, messages = 0, [], []
        for index in range(count):
            out = cluster.folder / f"{kind}-{index}"
            command = trained(epochs=400, timeout=45)
            run = launched(cluster, out, "--nodes", "2", "--grace-s", "20", command=command)
            victim = drawn.choice(("n1", "n2"))
            training(cluster, run)
            time.sleep(drawn.uniform(0, 5))
            pid = workers(cluster, victim)[0]
            os.kill(pid, number)
            begun = time.monotonic()
            code = run.ended(180)
            waits.append(round(time.monotonic() - begun, 1))
            lines = [line for line in run.text.splitlines() if "error: rank" in line and ", step " in line]
            messages.append(lines[-1].strip() if lines else run.text[-300:])
            left = [each for node in cluster.names for each in workers(cluster, node)]
            named += bool(code == 1 and lines and f"{victim}: task" in run.text and not left)
        board.bar(
            f"{kind} rank: a message with rank, step and cause, and all ranks ended",
            named,
            count,
            f"of {count}",
            at_least=True,
            seconds=waits,
            messages=messages,
        )


def templates(board: Board, cluster: Cluster) -> None:
    """Every combination of GRID, and the descriptions that unit tests have: do the judges take them?"""
    os.environ.update(cluster.environment)  # for the engine's own programs
    taken = 0
    cases = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    for number, case in enumerate(cases):
        image = {"image": "/images/a b.sqsh"} if case["container"] != "none" else {}
        place = cluster.folder / "templates" / f"it's $(odd) #{number}"
        description = load(None, {"out": str(place), "engine": "slurm", "gpu": "mi50", **case, **image})
        taken += accepted(description)
    board.bar(
        "templates that `sbatch --test-only` takes", taken, len(cases), f"of {len(cases)}", at_least=True
    )
    valid, count = 0, 0
    for engine, case in itertools.product(CLUSTERS, CASES):
        for text in ENGINES[engine].render(job(engine, **case)):
            for document in yaml.safe_load_all(text.text):
                kind = document.get("kind", "SkyPilot")
                schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
                count += 1
                valid += jsonschema.Draft202012Validator(schema).is_valid(document)
    board.bar("SkyPilot, TrainJob, JobSet, Job valid by schema", valid, count, f"of {count}", at_least=True)


def accepted(description: Job) -> bool:
    said: list[str] = []
    quiet: Progress = said.append
    try:
        ENGINES["slurm"].check(description, quiet)
    except Exception as error:
        tell(f"refused: {error} {said}")
        return False
    return True


def engines(board: Board, cluster: Cluster) -> None:
    """The same description on every engine: what each rank was told, compared with the first engine's."""
    words = [word for word in HOSTILE if "{out}" not in word]
    same, count = 0, 0
    for nodes, processes in ((1, 1), (1, 2), (2, 2)):
        told: dict[str, list[str]] = {}
        for engine in ("local", "slurm", *CLUSTERS):
            if engine == "local" and nodes > 1:
                continue
            out = cluster.folder / f"told-{engine}-{nodes}-{processes}"
            out.mkdir()
            script = str(ROOT / "tests" / "slurm" / "told.py")
            shape = {"nodes": nodes, "processes": processes, "cpus": 2, "port": 28_000 + count % 900}
            own = {f"OWN_{number}": word for number, word in enumerate(words)}
            described = {"command": [sys.executable, script, "{out}", *words], "env": own, **shape}
            started(
                cluster,
                job(
                    engine,
                    out=str(out),
                    **({"mounts": {str(out): "claim"}} if engine in CLUSTERS else {}),
                    **described,
                ),
            )
            told[engine] = [path.read_text() for path in sorted(out.glob("told-*.json"))]
        first = next(iter(told.values()))
        for engine, texts in told.items():
            count += 1
            same += len(texts) == nodes * processes and texts == first
            if texts != first:
                tell(f"{engine} {nodes} x {processes}: {texts} and not {first}")
    board.bar(
        "same command and environment as the first engine's run", same, count, f"of {count}", at_least=True
    )


def started(cluster: Cluster, description: Job) -> None:
    """Run it: here and on Slurm as `weir launch` does, else each node's command by a shell."""
    engine = ENGINES[description.engine]
    if description.engine in ("local", "slurm"):
        os.environ.update(cluster.environment)
        ended = engine.follow(description, engine.submit(description, tell), tell)
        assert all(each.ok for each in ended), ended
        return
    document = list(yaml.safe_load_all(engine.render(description)[0].text))[-1]
    running = []
    for node in range(description.nodes):
        line, env = node_command(document, description, node)
        running.append(subprocess.Popen(["sh", "-c", line], env={**os.environ, **env}))
    assert [each.wait(300) for each in running] == [0] * description.nodes


def node_command(document: dict, description: Job, node: int) -> tuple[str, dict[str, str]]:
    """What an engine starts on a node: its shell's line and variables, Kubernetes' replacements done."""
    if "run" in document:
        ips = "\n".join(["127.0.0.1"] * description.nodes)
        return document["run"], {
            **document["envs"],
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": ips,
        }
    spec = document["spec"]
    if "trainer" in spec:
        trainer = spec["trainer"]
        pet = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": node}
        pet |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": description.port}
        container, own = trainer, {f"PET_{name}": str(value) for name, value in pet.items()}
    else:
        pods = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
        container, own = pods["template"]["spec"]["containers"][0], {"JOB_COMPLETION_INDEX": str(node)}
    line = kubernetes_expands(container["command"][-1], {"A": "replaced"})
    for name in (
        f"{description.name}-node-0-0.{description.name}",
        f"{description.name}-0.{description.name}",
    ):
        line = line.replace(f"--master-addr={name}", "--master-addr=127.0.0.1")  # no cluster's DNS is here
    values = {each["name"]: kubernetes_expands(each["value"], {"A": "replaced"}) for each in container["env"]}
    return line, {**values, **own}


def limit(board: Board, cluster: Cluster) -> None:
    """A job that takes longer than Slurm allows it at a time."""
    limited = launched(
        cluster,
        cluster.folder / "limit",
        "--nodes",
        "2",
        "--minutes",
        "2",
        "--warning-s",
        "30",
        command=trained(epochs=LONG),
    )
    code = limited.ended(900)
    restarts = int(cluster.job(limited.job_id)["Restarts"])
    whole = code == 0 and len(limited.rank(0)["losses"]) == LONG * STEPS
    if not whole:
        tell(limited.text[-3000:])
    board.bar(
        "a job longer than its time limit: all steps, over restarts",
        int(whole and restarts > 0),
        1,
        "yes",
        at_least=True,
        restarts=restarts,
    )


def lost_node(board: Board, cluster: Cluster) -> None:
    """A node that neither answers nor closes its connections."""
    lost = launched(
        cluster,
        cluster.folder / "lost",
        "--nodes",
        "2",
        command=trained("--checkpoint-every", "10", epochs=30),
    )
    training(cluster, lost)
    cluster.wait((lost.out / "checkpoint.pt").exists, "a checkpoint")
    gone = cluster.processes("n2")
    for pid in gone:
        os.kill(pid, signal.SIGSTOP)  # as of a node that is off
    tell(f"n2 is gone: {len(gone)} processes")
    code = lost.ended(900)
    whole = code == 0 and len(lost.rank(0)["losses"]) == 30 * STEPS and lost.rank(1)["node"] == "n3"
    board.bar(
        "a lost node: requeued by Slurm, resumed on others, all steps",
        int(whole),
        1,
        "yes",
        at_least=True,
        nodes=[lost.rank(n)["node"] for n in (0, 1)],
        resumed_at=lost.rank(0)["resumed_at"],
    )
    for pid in gone:
        subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)
    cluster.start_node("n2")
    cluster.wait(lambda: cluster.idle() == 3, "n2 to be back")


def array(board: Board, cluster: Cluster) -> None:
    """A run for each batch size."""
    sizes = ("4", "8", "16")
    words = [word for size in sizes for word in ("--batch", size)]
    several = launched(
        cluster, cluster.folder / "array", "--nodes", "2", *words, command=trained(epochs=2, batch="{batch}")
    )
    code = several.ended(900)
    done = sum(several.rank(0, f"batch-{size}")["settings"]["batch"] == int(size) for size in sizes)
    page = (several.out / "report.html").is_file()
    if code or not page:
        tell(several.text[-3000:])
    board.bar(
        "an array over batch sizes: runs that one page has",
        done if code == 0 and page else 0,
        3,
        "of 3",
        at_least=True,
    )


def fleet(board: Board, cluster: Cluster) -> None:
    """Probes on every node, in turns since the nodes share one machine; one of them with fewer threads."""
    threads = "OMP_NUM_THREADS=$(test $SLURMD_NODENAME = n2 && echo 1 || echo 2)"
    probe = f"{threads} {sys.executable} -m probes run transfer --quick"
    command = (
        "sh",
        "-c",
        'flock "$1" sh -c "$2"',
        "sh",
        "{out}/turn",
        f"{probe} --out '{{out}}'/$SLURMD_NODENAME",
    )
    run = launched(
        cluster, cluster.folder / "fleet", "--nodes", "3", "--grace-s", "0", "--cpus", "2", command=command
    )
    code = run.ended(900)
    text = run.text
    named = [line for line in text.splitlines() if " is odd: " in line]
    board.bar(
        "the odd node of a fleet is named",
        int(code == 0 and len(named) == 1 and "n2 is odd" in named[0]),
        1,
        "yes",
        at_least=True,
        said=named or text[-1500:],
    )


if __name__ == "__main__":
    sys.exit(main())
