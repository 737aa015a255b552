"""Slurm: a batch script whose `srun` starts every rank itself, with a static rendezvous.

The script requeues the job when the ranks have exited with 75 (EX_TEMPFAIL): they got SIGUSR1, before the
time limit or a preemption, and have written a checkpoint. It runs on the host, where `scontrol` is.
"""

import re
import time
from pathlib import Path

from buildtool.core.command import CommandFailed, run, run_streaming
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.files import write_text
from buildtool.core.progress import Progress
from buildtool.launch.engine import MOST_FAILURES, POLL_S, Ended, Engine, Output, Text
from buildtool.launch.job import BATCH, NODE, OUT, RANK, Job
from buildtool.launch.words import NODE_NAME, in_image, rank_line
from probes.core.quoting import Unquotable, shell

CHECKPOINTED = 75  # <sysexits.h> EX_TEMPFAIL, as probes/training exits
PORTS = 1000  # jobs on one node differ in their ids, and so in their ports
MOST_LOG_BYTES = 64 << 20

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# of squeue: the job is over, and so is its log
_REQUEUED = {"PREEMPTED", "NODE_FAIL"}  # may come before it waits again: seen twice, it is over
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"} | _REQUEUED


def render(job: Job) -> tuple[Text, ...]:
    """The batch script; one for all batch sizes. Raises ConfigError for what can't be quoted."""
    try:
        return (Text(f"{job.name}.sbatch", "\n".join((*_directives(job), "", *_body(job), ""))),)
    except Unquotable as error:
        raise ConfigError(
            f"a batch script can't hold the command: {error}", "put it into a script"
        ) from error


def _directives(job: Job) -> list[str]:
    log = f"{job.out}/{job.name}-{'%A_%a' if job.batches else '%j'}.log"
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.processes),
        "cpus-per-task": str(job.cpus),
        "mem": job.memory.removesuffix("iB"),
        "gres": ":".join(word for word in ("gpu", job.gpu, str(job.gpus)) if word) if job.gpus else "",
        "partition": job.queue,
        "time": str(job.minutes),
        "signal": f"USR1@{job.warning_s}" if job.warning_s else "",
        "array": f"0-{len(job.batches) - 1}" if job.batches else "",
        "output": log,
        "open-mode": "append",  # a requeued job goes on in its log
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    return ["#!/bin/bash", *(f"#SBATCH {directive(word)}" for word in (*words, "--requeue", *job.options))]


def directive(word: str) -> str:
    r"""A word in a line of #SBATCH: in double quotes, in which a backslash takes the meaning of both."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return word if _PLAIN.fullmatch(word) else f'"{escaped}"'


def _body(job: Job) -> list[str]:
    lines = ["set -u", "trap '' USR1  # is for the ranks"]
    if job.batches:
        lines += [
            f"batches=({' '.join(map(str, job.batches))})",
            "batch=${batches[$SLURM_ARRAY_TASK_ID]}",
            f'out={shell(job.out)}/batch-"$batch"',
        ]
    else:
        lines += ["batch=", f"out={shell(job.out)}"]
    return [
        *lines,
        'mkdir -p -- "$out" || exit',
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        f"MASTER_PORT=$(({job.port} + SLURM_JOB_ID % {PORTS}))",
        "export MASTER_ADDR MASTER_PORT",
        f"{_srun(job)} \\",
        f'  sh -c {shell(_rank(job))} sh "$batch" "$out"',
        "code=$?",
        f'if [ "$code" = {CHECKPOINTED} ]; then',
        '  echo "weir: checkpointed; requeued as $SLURM_JOB_ID"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]


def _srun(job: Job) -> str:
    words = ["srun", "--label", f"--cpus-per-task={job.cpus}", f"--wait={job.grace_s}"]
    if job.container == "pyxis":
        mounts = ",".join(
            f"{outside}:{inside}" for inside, outside in {job.out: job.out, **job.mounts}.items()
        )
        words += [f"--container-image={job.image}", f"--container-mounts={mounts}"]
    return " ".join(map(shell, words))


def _rank(job: Job) -> str:
    """What `srun` starts for each rank: torchrun's variables, the job's own, then the command."""
    ours = {
        "RANK": "$SLURM_PROCID",
        "LOCAL_RANK": "$SLURM_LOCALID",
        "GROUP_RANK": "$SLURM_NODEID",
        "WORLD_SIZE": "$SLURM_NTASKS",
        "LOCAL_WORLD_SIZE": str(job.processes),
        **{name: shell(value) for name, value in job.variables.items()},
    }
    exports = " ".join(f"{name}={value}" for name, value in ours.items())
    values = {OUT: '"$2"', BATCH: '"$1"', RANK: '"$RANK"', NODE: NODE_NAME}
    container = "".join(f"{shell(word)} " for word in in_image(job))
    # a signal that comes before the command handles it would end it: it is ignored until then
    return f"trap '' USR1; export {exports}; exec {container}{rank_line(job, values)}"


def _script(job: Job) -> Path:
    """The script, written to where it stays beside the log."""
    (script,) = render(job)
    path = Path(job.out) / script.name
    write_text(path, script.text)
    return path


def check(job: Job, progress: Progress) -> None:
    """Have `sbatch --test-only` judge the script."""
    run_streaming(["sbatch", "--test-only", str(_script(job))], progress=progress)


def submit(job: Job, progress: Progress) -> str:
    """Submit it; the id is Slurm's."""
    answer = run(["sbatch", "--parsable", str(_script(job))]).stdout.strip()
    job_id = answer.split(";")[0]
    if not job_id.isdecimal():
        raise DataError(f"sbatch answered {answer[:80]!r}, not a job's number", "see: squeue --me")
    progress(f"submitted as Slurm's job {job_id}")
    return job_id


def follow(job: Job, job_id: str, progress: Progress) -> tuple[Ended, ...]:
    """Show states and the log as they come, until every run is over."""
    if not job_id.isdecimal():
        raise ConfigError(f"{job_id!r} is no number of a Slurm job", "see: squeue --me")
    names = [each.name for each in job.runs()]
    logs = []
    for number, name in enumerate(names):
        task = f"_{number}" if job.batches else ""
        output = Output(progress, f"{name}: " if job.batches else "")
        logs.append(_Log(Path(job.out) / f"{job.name}-{job_id}{task}.log", output))
    shown: dict[int, str] = {}
    failures, ends = 0, 0
    while True:
        try:
            states, failures = _states(job_id), 0
        except CommandFailed as error:  # the controller may be restarting
            failures += 1
            if failures > MOST_FAILURES:
                raise
            progress(error.tail)
            time.sleep(POLL_S)
            continue
        for number, name in enumerate(names):
            state = states.get(number if job.batches else 0) or states.get(-1, "")
            logs[number].pass_on()
            if state and state != shown.get(number):
                progress(f"{name}: {state}")
                shown[number] = state
        words = {_word(shown.get(number, "")) for number in range(len(names))}
        ends = ends + 1 if words <= _OVER else 0
        if not states or ends > (1 if words & _REQUEUED else 0):
            break
        time.sleep(POLL_S)
    ended = []
    for number, name in enumerate(names):
        logs[number].pass_on(last=True)
        state = shown.get(number, "unknown to Slurm, which forgets jobs after MinJobAge: see sacct")
        ok = _word(state) == "COMPLETED"
        ended.append(Ended(name, ok, state, () if ok else logs[number].output.cause))
    return tuple(ended)


def _word(state: str) -> str:
    return state.partition(" ")[0]


def _states(job_id: str) -> dict[int, str]:
    """Each task of the array, 0 where there is none, with its state; -1: all that haven't begun.

    Empty where Slurm knows the job no more.
    """
    try:
        lines = run(
            ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%K|%T|%r|%N"]
        ).stdout
    except CommandFailed as error:
        if "Invalid job id" in error.tail:
            return {}
        raise
    states = {}
    for line in lines.splitlines():
        task, state, reason, nodes = (*line.split("|"), "", "", "")[:4]
        number = int(task) if task.isdecimal() else (0 if task == "N/A" else -1)
        why = nodes if state == "RUNNING" else reason
        states[number] = f"{state} ({why})" if why and why != "None" else state
    return states


class _Log:
    """A log that grows."""

    def __init__(self, path: Path, output: Output) -> None:
        self._path = path
        self._read = 0
        self.output = output

    def pass_on(self, *, last: bool = False) -> None:
        """The lines that have come since the last look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read(MOST_LOG_BYTES)
        except FileNotFoundError:
            return
        whole = new if last else new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            self.output(line)


SLURM = Engine(render, check, submit, follow)
