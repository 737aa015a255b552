"""`weir launch`: hand a command and an image to Slurm, SkyPilot, Kubernetes or torchrun; collect reports."""

import argparse
import typing
from dataclasses import MISSING, fields
from pathlib import Path

from buildtool.core.errors import Exit
from buildtool.launch.job import Container, EngineName, Job, Vendor
from probes.core.output import Parser, echo, error, flag, option, progress, whole, write

if typing.TYPE_CHECKING:
    from probes.core.codec import Json

# option -> metavar, what it is; texts and numbers of a description, whose defaults are Job's
_TEXTS = {
    "name": ("NAME", "name of the job"),
    "image": ("IMAGE", "image to run in: a .sqsh or .sif, or a registry's reference; none without it"),
    "memory": ("SIZE", "memory of each node, e.g. 64GiB; the engine's default without it"),
    "gpu": ("NAME", "card, as the engine calls it; any without it"),
    "queue": ("NAME", "partition of Slurm, or queue of Kueue; the engine's default without it"),
    "runtime": ("NAME", "Kubeflow's ClusterTrainingRuntime"),
}
_NUMBERS = {
    "nodes": "nodes",
    "processes": "processes of each node",
    "cpus": "processors of each process",
    "gpus": "cards of each node",
    "minutes": "minutes after which the engine ends it",
    "warning-s": "Slurm: seconds before that at which SIGUSR1 comes",
    "grace-s": "Slurm: seconds that ranks get to end once one has ended; 0: they don't wait for each other",
    "port": "port of the rendezvous; on Slurm, up to 999 above it",
}
_CHOICES = {
    "engine": (EngineName, "what starts it"),
    "container": (Container, "what runs the image on Slurm and here"),
    "vendor": (Vendor, "maker of the cards, which Kubernetes and Apptainer have to know"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments: a description's keys, and what to do with it."""
    parser.usage = "%(prog)s [JOB.yaml] [options] [-- COMMAND ...]"
    assert isinstance(parser, Parser)
    parser.behind = "command"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="JOB.yaml | -- COMMAND",
        help="description with the keys that are options here, and `command`, a list of words; and after --, "
        "the command itself; in its words {out}, {batch}, {rank} and {node} are replaced",
    )
    act = parser.add_mutually_exclusive_group()
    flag(act, "--dry-run", "print what would be handed to the engine, and change nothing")
    flag(act, "--check", "have the engine judge it without starting it: sbatch --test-only, kubectl, sky")
    flag(act, "--detach", "submit it, and don't wait for its end")
    option(act, "--follow", "ID", "don't submit: follow a job that was, and collect its reports")
    usual = {each.name: each.default for each in fields(Job) if each.default is not MISSING}
    for name, (choices, what) in _CHOICES.items():
        parser.add_argument(
            f"--{name}", choices=typing.get_args(choices), help=f"{what} (default: {usual[name]})"
        )
    option(parser, "--out", "DIR", "folder for logs, checkpoints and reports, which every node has", Path)
    for name, (metavar, what) in _TEXTS.items():
        end = f" (default: {usual[name]})" if usual.get(name) else ""
        option(parser, f"--{name}", metavar, what + end)
    for name, what in _NUMBERS.items():
        default = usual[name.replace("-", "_")]
        option(parser, f"--{name}", "N", f"{what} (default: {default})", whole(0, 10**9))
    for name, metavar, what, read in (
        ("env", "NAME=VALUE", "variable of every process", str),
        ("mount", "INSIDE=OUTSIDE", "path, volume claim or bucket that the image gets", str),
        ("batch", "N", "run it with this batch size, too: an array on Slurm", whole(1, 1 << 31)),
        ("option", "WORD", "further word for sbatch, kubectl, sky launch or torchrun", str),
    ):
        more = f"{what}; may be repeated"
        parser.add_argument(f"--{name}", action="append", metavar=metavar, default=[], help=more, type=read)


def run(args: argparse.Namespace) -> int:
    """Render, check, submit, follow, collect; 1 where a run failed."""
    from buildtool.core.errors import ConfigError
    from buildtool.core.progress import ProgressLog
    from buildtool.launch.engines import ENGINES
    from buildtool.launch.job import load

    path, command = _split(args.words)
    command += args.command
    job = load(path, _given(args, command))
    engine = ENGINES[job.engine]
    texts = engine.render(job)
    if args.dry_run:
        for text in texts:
            write(f"# {text.name}\n{text.text}" if len(texts) > 1 else text.text)
        return int(Exit.OK)
    if job.engine == "local" and (args.detach or args.follow):
        raise ConfigError("torchrun runs here in the foreground", "leave --detach and --follow out")
    log = ProgressLog()
    if args.check:
        engine.check(job, log.line)
        echo(f"{job.engine} takes it: {', '.join(text.name for text in texts)}")
        return int(Exit.OK)
    job_id = args.follow or engine.submit(job, log.line)
    if args.detach:
        echo(f"submitted: {job_id}; add to the same command: --follow {job_id}")
        return int(Exit.OK)
    try:
        ended = engine.follow(job, job_id, log.line)
    except KeyboardInterrupt:
        if job.engine != "local":
            error(f"it runs on; add to the same command: --follow {job_id}")
        raise
    for each in ended:
        echo(f"{each.run}: {each.state}")
        for line in each.cause:
            error(f"  {line}")
    _collect(job)
    return int(Exit.OK if all(each.ok for each in ended) else Exit.FINDINGS)


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The file, which is what ends like one, and a command that has no -- before it."""
    if words and words[0].endswith((".yaml", ".yml")):
        return Path(words[0]), words[1:]
    return None, words


def _given(args: argparse.Namespace, command: list[str]) -> "dict[str, Json]":
    from buildtool.core.errors import ConfigError

    given: dict[str, Json] = {}
    for name in (*_CHOICES, *_TEXTS, *_NUMBERS):
        key = name.replace("-", "_")
        if getattr(args, key) is not None:
            given[key] = getattr(args, key)
    if args.out is not None:
        given["out"] = str(args.out.absolute())
    for key, pairs, form in (
        ("env", args.env, "--env NAME=VALUE"),
        ("mounts", args.mount, "--mount INSIDE=OUTSIDE"),
    ):
        for pair in pairs:
            if "=" not in pair:
                raise ConfigError(f"{pair!r} has no value", f"write it as {form}")
        if pairs:
            given[key] = dict(pair.split("=", 1) for pair in pairs)
    if args.batch:
        given["batches"] = list(args.batch)
    if args.option:
        given["options"] = list(args.option)
    if command:
        given["command"] = list(command)
    return given


def _collect(job: Job) -> None:
    """Show what the nodes have reported, by the probes' own verbs."""
    from buildtool.launch.collect import commands
    from probes.cli import program

    found, missing = commands(job)
    for what in missing:
        error(f"error: {what}")
    if not found:
        progress(f"no reports below {job.out} on this machine")
    for words in found:
        program.main(words)
