"""The command that every engine starts, as a line for a shell: torchrun's, or the rank's own. Pure."""

from collections.abc import Mapping

from buildtool.launch.job import BATCH, NODE, OUT, RANK, Job, Run
from probes.core.quoting import shell

# the name of the node by its engine, else its own
NODE_NAME = '"${SLURMD_NODENAME:-$(hostname)}"'
KILL_AFTER_S = 30  # from SIGTERM to SIGKILL


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word for a shell: each key of `values` in it becomes that shell expression, the rest is quoted."""
    pieces = [word]
    for key in values:
        pieces = [piece for each in pieces for piece in _split(each, key)]
    return "".join(values.get(p) or shell(p) for p in pieces if p) or "''"


def _split(text: str, key: str) -> list[str]:
    parts = text.split(key)
    return [piece for part in parts for piece in (part, key)][:-1]


def rank_line(job: Job, values: Mapping[str, str]) -> str:
    """The command of a rank as a shell's words."""
    return " ".join(filled(word, values) for word in job.command)


def known(run: Run) -> dict[str, str]:
    """What a run knows of placeholders when it is rendered."""
    return {OUT: shell(run.out), BATCH: run.batch}


def torchrun_line(job: Job, run: Run, where: str) -> str:
    """What starts the ranks of a node: torchrun with a static rendezvous, `where` saying which node it is.

    Words with {rank} or {node} have their values in the ranks alone, so a shell runs them there. torchrun
    reads the words after the first as `string.Template`s, of which it knows $local_rank: dollars are doubled.
    """
    values = known(run)
    if any(key in word for word in job.command for key in (RANK, NODE)):
        line = rank_line(job, {**values, RANK: '"$RANK"', NODE: NODE_NAME})
        command, arguments = "sh", f"-c {shell(f'exec {line}')}"
    else:
        command = filled(job.command[0], values)
        arguments = " ".join(filled(word, values) for word in job.command[1:])
    words = ["torchrun", f"--nproc-per-node={job.processes}", where, "--no-python", command]
    return " ".join(filter(None, (*words, arguments.replace("$", "$$"))))


def in_image(job: Job) -> list[str]:
    """The words before a command that runs in the image: charliecloud's or Apptainer's; none for others."""
    mounts = {job.out: job.out, **job.mounts}
    binds = [f"--bind={outside}:{inside}" for inside, outside in mounts.items()]
    match job.container:
        case "charliecloud":
            return ["ch-run", *binds, job.image, "--"]
        case "apptainer":
            gpus = {"amd": ["--rocm"], "nvidia": ["--nv"], "unknown": []}[job.vendor] if job.gpus else []
            return ["apptainer", "exec", *binds, *gpus, job.image]
        case "none" | "pyxis":
            return []


def exports(job: Job) -> str:
    """The job's own variables, for a shell."""
    return "export " + " ".join(f"{name}={shell(value)}" for name, value in job.variables.items())
