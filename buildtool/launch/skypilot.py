"""SkyPilot: a task's YAML. `sky` finds machines, starts the task on each node and shows its log."""

from buildtool.core.command import CommandFailed, run_streaming
from buildtool.core.errors import ConfigError
from buildtool.core.files import scratch, write_text
from buildtool.core.progress import Progress
from buildtool.core.yaml_text import dump
from buildtool.launch.engine import Ended, Engine, Output, Text
from buildtool.launch.job import Job
from buildtool.launch.words import KILL_AFTER_S, torchrun_line
from probes.core.codec import Json
from probes.core.quoting import Unquotable, shell


def render(job: Job) -> tuple[Text, ...]:
    """A task for each run. Raises ConfigError for cards without a name, and for what can't be quoted."""
    if job.gpus and not job.gpu:
        raise ConfigError("SkyPilot chooses machines by the name of a card", "add: --gpu MI300X")
    try:
        return tuple(
            Text(f"{each.name}.yaml", dump(_task(job, index))) for index, each in enumerate(job.runs())
        )
    except Unquotable as error:
        raise ConfigError(f"a task can't hold the command: {error}", "put it into a script") from error


def _task(job: Job, index: int) -> dict[str, Json]:
    run = job.runs()[index]
    where = (
        f'--nnodes={job.nodes} --node-rank="$SKYPILOT_NODE_RANK" '
        f'--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={job.port}'
    )
    limit = f"timeout --kill-after={KILL_AFTER_S} {job.minutes * 60}"
    resources: dict[str, Json] = {"cpus": f"{job.cpus * job.processes}+"}
    if job.memory:
        resources["memory"] = f"{_gib(job.memory)}+"
    if job.gpus:
        resources["accelerators"] = f"{job.gpu}:{job.gpus}"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task: dict[str, Json] = {"name": run.name, "num_nodes": job.nodes, "resources": resources}
    if job.mounts:
        task["file_mounts"] = {
            path: {"source": source, "mode": "MOUNT"} if "://" in source else source
            for path, source in job.mounts.items()
        }
    task["envs"] = dict(job.variables)
    task["run"] = f"mkdir -p -- {shell(run.out)} || exit\nexec {limit} {torchrun_line(job, run, where)}\n"
    return task


def _gib(memory: str) -> float | int:
    size = int(memory[:-3])
    return size if memory.endswith("GiB") else round(size / 1024, 3)


def _sky(job: Job, progress: Progress, *words: str) -> None:
    """`sky launch` of each task: its cluster is called after the task."""
    for text in render(job):
        name = text.name.removesuffix(".yaml")
        with scratch() as folder:
            write_text(folder / text.name, text.text)
            options = ["--yes", f"--cluster={name}", *words, *job.options]
            run_streaming(["sky", "launch", *options, str(folder / text.name)], progress=progress)


def check(job: Job, progress: Progress) -> None:
    """Have `sky launch --dryrun` judge it."""
    _sky(job, progress, "--dryrun")


def submit(job: Job, progress: Progress) -> str:
    """Start every task; SkyPilot calls their clusters by the tasks' names."""
    _sky(job, progress, "--detach-run")
    return job.name


def follow(job: Job, _job_id: str, progress: Progress) -> tuple[Ended, ...]:
    """Show each task's log until it ends; `sky logs` exits with 0 where the task succeeded."""
    ended = []
    for each in job.runs():
        output = Output(progress)
        try:
            run_streaming(["sky", "logs", each.name], progress=output)
            ended.append(Ended(each.name, ok=True, state="succeeded"))
        except CommandFailed as error:
            ended.append(Ended(each.name, False, f"`sky logs` ended with {error.code}", output.cause))
    return tuple(ended)


SKYPILOT = Engine(render, check, submit, follow)
