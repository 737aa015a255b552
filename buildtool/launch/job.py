"""What is to run, on how many nodes, in which image: one description for every engine.

It comes from a YAML file, from options, or from both, where options win. All of it is text from outside: what
an engine gives a meaning to (names, paths, variables) is checked here, and everything else is quoted where
it is rendered.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from buildtool.core.errors import ConfigError
from buildtool.core.yaml_text import Document, Limits, parse
from probes.core.codec import Json, Misfit, decode
from probes.core.files import read_text
from probes.core.spelling import guess

EngineName = Literal["local", "slurm", "skypilot", "trainjob", "jobset", "job"]
Container = Literal["none", "pyxis", "charliecloud", "apptainer"]
Vendor = Literal["unknown", "amd", "nvidia"]

LIMITS = Limits(depth=4, nodes=4000)
MAX_BYTES = 1 << 20
MOST_NODES, MOST_PROCESSES, MOST_BATCHES = 100_000, 1024, 1000  # Slurm's MaxArraySize is 1001 by default
OUT, BATCH, RANK, NODE = "{out}", "{batch}", "{rank}", "{node}"

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a DNS label, with room for what engines append
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(
    r"/[^,:%\\\x00-\x1f\x7f\"]*"
)  # absolute; without what pyxis, ch-run and sbatch give a meaning
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MEMORY = re.compile(r"[1-9][0-9]{0,6}[MG]iB")
# set for every rank by the engines
RESERVED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Job:
    """One description. `{out}`, `{batch}`, `{rank}` and `{node}` in words of the command are replaced."""

    command: tuple[str, ...]  # of each process, words; torchrun's variables say which rank it is
    out: str  # absolute: the folder for reports, checkpoints and logs, which all nodes have
    name: str = "weir"
    engine: EngineName = "local"
    image: str = ""  # a .sqsh or .sif for Slurm, a reference for Kubernetes and SkyPilot; "": none
    container: Container = "none"  # what runs the image on Slurm and here
    nodes: int = 1
    processes: int = 1  # of each node
    cpus: int = 1  # of each process
    memory: str = ""  # of each node, 64GiB; "": the engine's default
    gpus: int = 0  # of each node
    gpu: str = ""  # the card, as the engine calls it
    vendor: Vendor = "unknown"  # of the cards, where Kubernetes or Apptainer has to know
    minutes: int = 60  # after which the engine ends it
    warning_s: int = 90  # Slurm: SIGUSR1 comes so long before that
    grace_s: int = (
        60  # Slurm: what ranks are given to end once one has ended; 0: they don't wait for each other
    )
    port: int = 29500  # of the rendezvous
    queue: str = ""  # Slurm's partition, Kueue's queue
    runtime: str = "torch-distributed"  # Kubeflow's ClusterTrainingRuntime
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)  # path inside -> path outside, claim or bucket
    batches: tuple[int, ...] = ()  # one run for each, in a folder of its own
    options: tuple[str, ...] = ()  # further words for the engine's own command

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.processes

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every rank, beside torchrun's: OMP_NUM_THREADS as many as `cpus`."""
        return {"OMP_NUM_THREADS": str(self.cpus), **self.env}

    def runs(self) -> tuple["Run", ...]:
        """A run for each batch size, or the one."""
        if not self.batches:
            return (Run(self.name, self.out, ""),)
        return tuple(Run(f"{self.name}-{b}", f"{self.out}/batch-{b}", str(b)) for b in self.batches)


@dataclass(frozen=True)
class Run:
    """One start of the command."""

    name: str
    out: str
    batch: str


def load(path: Path | None, options: Mapping[str, Json]) -> Job:
    """The description in a file, with options over it. Raises ConfigError, naming file, line and key."""
    document = _read(path) if path else Document("the command line", {})
    data = document.data
    if not isinstance(data, dict):
        raise document.error((), "expected keys with values", "begin with: command: [python3, train.py]")
    known = [each.name for each in fields(Job)]
    for key in data:
        if key not in known:
            raise document.error(
                (key,), f"unknown key {key!r}", f"{guess(key, known)}there are: {', '.join(known)}"
            )
    merged: dict[str, Json] = {**data, **options}
    for key in ("command", "out"):
        if not merged.get(key):
            way = "end the line with: -- COMMAND" if key == "command" else "name a folder: --out DIR"
            raise ConfigError(f"{document.name} has no `{key}`", way)
    try:
        job = decode(Job, merged, "job")
    except Misfit as error:
        hint = "in quotes a number is a text" if "text" in str(error) or "str" in str(error) else ""
        raise ConfigError(f"{document.name}: {error}", hint or "see: weir launch --help") from error
    for key, what, hint in _faults(job):
        raise document.error((key,), what, hint)
    return job


def _read(path: Path) -> Document:
    try:
        text = read_text(path, most_bytes=MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"can't read {path}: {why}", "name a YAML file, or give options alone") from error
    return parse(text, str(path), LIMITS)


def _faults(job: Job) -> "typing.Iterator[tuple[str, str, str]]":
    """What engines can't take: the key, what is wrong, what to write."""
    yield from _wrong_texts(job)
    for key, value, least, most in (
        ("nodes", job.nodes, 1, MOST_NODES),
        ("processes", job.processes, 1, MOST_PROCESSES),
        ("cpus", job.cpus, 1, 4096),
        ("gpus", job.gpus, 0, MOST_PROCESSES),
        ("minutes", job.minutes, 1, 60 * 24 * 365),
        ("warning_s", job.warning_s, 0, 65535),
        ("grace_s", job.grace_s, 0, 65535),
        ("port", job.port, 1024, 64000),
        *(("batches", batch, 1, 1 << 31) for batch in job.batches),
    ):
        if not least <= value <= most:
            yield key, f"{value} is not within {least} and {most}", ""
    if job.engine == "slurm" and job.warning_s >= 60 * job.minutes:
        yield "warning_s", f"{job.warning_s} s before the limit is before the start", "give more minutes"
    if len(job.batches) > MOST_BATCHES or len(set(job.batches)) < len(job.batches):
        yield "batches", f"expected at most {MOST_BATCHES} sizes, each once", ""
    if job.container == "none" and job.image and job.engine in ("local", "slurm"):
        yield "container", "nothing is named that runs the image", "pyxis, charliecloud or apptainer"
    if job.container != "none" and not (job.image and job.engine in ("local", "slurm")):
        yield "container", f"{job.container} runs an image on Slurm or here", "name an image, or leave it out"
    if BATCH in " ".join(job.command) and not job.batches:
        yield "command", f"{BATCH} has no value", "list the sizes: batches: [32, 64]"


def _wrong_texts(job: Job) -> "typing.Iterator[tuple[str, str, str]]":
    for run in job.runs():
        if not _NAME.fullmatch(run.name):
            hint = "small letters, digits and -, at most 40 with the batch size, a letter first"
            yield "name", f"{run.name!r} is no name", hint
    for key, text in (("queue", job.queue), ("gpu", job.gpu), ("runtime", job.runtime)):
        if text and not _WORD.fullmatch(text):
            yield key, f"{text!r} is no name", "letters, digits, and . _ - within"
    if job.image.startswith("-"):
        yield "image", f"{job.image!r} would pass for an option", "name a file or a reference"
    if job.memory and not _MEMORY.fullmatch(job.memory):
        yield "memory", f"{job.memory!r} is no size", "write it as 64GiB or 512MiB"
    if not job.command[0] or job.command[0].startswith("-"):
        yield "command", f"{job.command[0]!r} would pass for an option, or for none", "name a program first"
    yield from _wrong_paths(job)
    for variable in job.env:
        if not _VARIABLE.fullmatch(variable) or variable in RESERVED:
            yield (
                "env",
                f"{variable!r} can't be set",
                f"letters, digits and _, and none of {', '.join(RESERVED)}",
            )
    texts = {
        "command": job.command,
        "options": job.options,
        "env": job.env.values(),
        "mounts": job.mounts.values(),
        "image": (job.image,),
    }
    for key, text in ((key, text) for key, group in texts.items() for text in group):
        if not text.isprintable():
            yield key, f"{text!r} holds a control character", "put it into a file, and name that"


def _wrong_paths(job: Job) -> "typing.Iterator[tuple[str, str, str]]":
    places = [("out", job.out), *(("mounts", path) for path in job.mounts)]
    if job.container != "none":  # whose options mount OUTSIDE:INSIDE
        places += [("mounts", path) for path in job.mounts.values()]
    for key, path in places:
        if not _PATH.fullmatch(path) or ".." in path.split("/") or not path.isprintable():
            yield key, f"{path!r} can't be a path here", 'an absolute path without , : % \\ " and ..'
