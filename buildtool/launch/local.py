"""torchrun on this machine: the runs one after another, in the foreground."""

from buildtool.core.command import CommandFailed, find, run_streaming
from buildtool.core.errors import ConfigError, EnvironmentMissing
from buildtool.core.progress import Progress
from buildtool.launch.engine import Ended, Engine, Output, Text
from buildtool.launch.job import Job
from buildtool.launch.words import KILL_AFTER_S, exports, in_image, torchrun_line
from probes.core.quoting import Unquotable, shell

TIMED_OUT = 124  # of coreutils' timeout; 137 where SIGTERM wasn't enough


def render(job: Job) -> tuple[Text, ...]:
    """A script for each run. Raises ConfigError for more than one node, and for what can't be quoted."""
    if job.nodes > 1:
        raise ConfigError(f"torchrun on this machine can't have {job.nodes} nodes", "add: --nodes 1")
    static = ("--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={job.port}")
    try:
        where = " ".join(map(shell, (*static, *job.options)))
        before = " ".join(map(shell, in_image(job)))
        limit = f"timeout --kill-after={KILL_AFTER_S} {job.minutes * 60}"
        return tuple(
            Text(
                f"{each.name}.sh",
                f"{exports(job)}\nmkdir -p -- {shell(each.out)} || exit\n"
                f"exec {limit} {before}{' ' if before else ''}{torchrun_line(job, each, where)}\n",
            )
            for each in job.runs()
        )
    except Unquotable as error:
        raise ConfigError(f"a script can't hold the command: {error}", "put it into a script") from error


def check(job: Job, progress: Progress) -> None:
    """Whether what the script starts is installed."""
    render(job)
    for program in ("timeout", *in_image(job)[:1]) if job.image else ("timeout", "torchrun"):
        path = find(program)
        if path is None:
            hint = "install torch, and activate its environment" if program == "torchrun" else ""
            raise EnvironmentMissing(f"`{program}` is not installed", hint or f"install {program}")
        progress(f"{program} is {path}")


def submit(job: Job, progress: Progress) -> str:
    """Nothing is submitted: `follow` runs it."""
    check(job, progress)
    return "here"


def follow(job: Job, _job_id: str, progress: Progress) -> tuple[Ended, ...]:
    """Run it all, a run after another."""
    ended = []
    for each, script in zip(job.runs(), render(job), strict=True):
        progress(f"{each.name}: begins")
        output = Output(progress)
        try:
            run_streaming(["sh", "-c", script.text], progress=output)
            ended.append(Ended(each.name, ok=True, state="ended with 0"))
        except CommandFailed as error:
            late = f", after {job.minutes} min" if error.code == TIMED_OUT else ""
            ended.append(Ended(each.name, False, f"ended with {error.code}{late}", output.cause))
    return tuple(ended)


LOCAL = Engine(render, check, submit, follow)
