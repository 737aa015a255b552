"""Rules for Slurm job scripts and Apptainer definitions."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buildtool.doctor.lint.containers import override_value, unpinned_image
from buildtool.doctor.lint.rules import Checks, Fault, Word
from buildtool.doctor.lint.shell import OVERRIDE, Context, apptainer_faults, lint_script
from buildtool.doctor.lint.shell_parser import Command, commands_in, comments_in

DIRECTIVE = re.compile(r"#SBATCH\s+(--?[\w-]+)(?:[=\s]\s*(\S+))?")
GPU_OPTIONS = (  # of sbatch
    "--gpus",
    "--gres",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gpus-per-socket",
    "-G",
    "--tres-per-task",
)
WRONG_OPTIONS = ("--gpu", "--gpus-per-nodes", "--gpu-per-node", "--ntask", "--cpu-per-task", "--node")
SECTIONS = {
    "setup", "files", "post", "test", "environment", "startscript", "runscript", "labels", "help",
    "arguments", "pre", "appinstall", "appenv", "applabels", "appfiles", "apphelp", "apprun", "apptest",
    "appstart",
}  # fmt: skip
SHELL_SECTIONS = {"post", "setup", "pre", "appinstall"}
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Job:
    """A Slurm job script: its commands, and its #SBATCH directives before and after the first of them."""

    commands: Sequence[Command]
    directives: Sequence[tuple[str, str, Word]]  # option, value, comment
    late: Sequence[Word]

    @property
    def options(self) -> dict[str, str]:
        """The options that sbatch reads, with their values."""
        return {option: value for option, value, _ in self.directives}


job_checks = Checks[[Job]]()


def lint_slurm(text: str) -> Iterator[Fault]:
    """Every fault of a job script."""
    yield from job_checks(_job(text))
    yield from lint_script(text, 1, Context())


def _job(text: str) -> Job:
    commands = commands_in(text)
    first = min(
        (word.line for command in commands for word in (*command.settings, *command.words)[:1]), default=10**9
    )
    directives, late = [], []
    for comment in comments_in(text):
        if match := DIRECTIVE.match(comment.text):
            if comment.line > first:
                late.append(comment)
            else:
                directives.append((match[1], match[2] or "", comment))
    return Job(commands, directives, late)


@job_checks.add
def _directives(job: Job) -> Iterator[Fault]:
    for comment in job.late:
        yield Fault(comment.line, "slurm-late-directive", comment.text[:80])
    for option, _, comment in job.directives:
        if option in WRONG_OPTIONS:
            yield Fault(comment.line, "slurm-gpu-option", option)


@job_checks.add
def _gpu_programs(job: Job) -> Iterator[Fault]:
    """A program that needs a GPU, in a job that asks for none."""
    options = job.options
    asks = any(name in options for name in GPU_OPTIONS) or "gpu" in options.get("--constraint", "").lower()
    if asks or not options:
        return
    for command in job.commands:
        words = [word.text for word in command.words]
        in_container = command.name in ("apptainer", "singularity") and {"--nv", "--rocm"} & set(words)
        needs_gpu = in_container or words[:1] in (["nvidia-smi"], ["rocm-smi"], ["rocminfo"])
        if needs_gpu and not any(re.match(r"--(gpus|gres)", word) for word in words):
            yield Fault(command.line, "slurm-without-gpu", " ".join(words[:4]))


@job_checks.add
def _torchrun(job: Job) -> Iterator[Fault]:
    tasks = job.options.get("--ntasks-per-node", "")
    if not tasks.isdecimal() or tasks.lstrip("0") in ("", "1"):
        return
    for command in job.commands:
        words = [word.text for word in command.words]
        launcher = next((word for word in words if word in LAUNCHERS), "")
        single = any(word.startswith("--ntasks-per-node=1") for word in words)
        if launcher and words[0] == "srun" and not single:
            yield Fault(command.line, "torchrun-per-task", f"{launcher} with --ntasks-per-node={tasks}")


@job_checks.add
def _srun_apptainer(job: Job) -> Iterator[Fault]:
    for command in job.commands:
        if command.name == "srun":
            texts = [word.text for word in command.words]
            start = next((n for n, text in enumerate(texts) if text in ("apptainer", "singularity")), None)
            if start is not None:
                yield from apptainer_faults(command.words[start + 1 :])


# ---- Apptainer definitions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """An Apptainer definition: its header, and its sections with their lines and texts."""

    header: Sequence[tuple[str, Word]]
    sections: Sequence[tuple[str, int, str]]
    for_cpu: bool

    def first(self, key: str) -> Word | None:
        """The value of a key of the header."""
        return next((value for name, value in self.header if name == key), None)


definition_checks = Checks[[Definition]]()


def lint_apptainer(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a definition file."""
    definition = _definition(text, for_cpu=for_cpu)
    if definition.first("bootstrap"):
        yield from definition_checks(definition)
    else:
        yield Fault(1, "unreadable", "there is no Bootstrap")


def _definition(text: str, *, for_cpu: bool) -> Definition:
    header: list[tuple[str, Word]] = []
    sections: list[tuple[str, int, list[str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        begins = re.match(r"%(\w+)", line)
        pair = re.match(r"(\w+)\s*:\s*(.*)", line)
        if begins:
            sections.append((begins[1].lower(), number, []))
        elif sections:
            sections[-1][2].append(line)
        elif pair:
            header.append((pair[1].lower(), Word(pair[2].strip(), number)))
    return Definition(header, [(name, line, "\n".join(body)) for name, line, body in sections], for_cpu)


@definition_checks.add
def _base(definition: Definition) -> Iterator[Fault]:
    source, bootstrap = definition.first("from"), definition.first("bootstrap")
    if source and bootstrap and bootstrap.text in ("docker", "library", "shub", "oras"):
        yield from unpinned_image(source)


@definition_checks.add
def _section_names(definition: Definition) -> Iterator[Fault]:
    for name, line, _ in definition.sections:
        if name not in SECTIONS:
            yield Fault(line, "apptainer-section", f"%{name}")


@definition_checks.add
def _scripts(definition: Definition) -> Iterator[Fault]:
    source = definition.first("from")
    for name, line, body in definition.sections:
        if name in SHELL_SECTIONS:
            context = Context(
                image=source.text if source else "",
                builds=True,
                variables=frozenset(_exported(body)),
                for_cpu=definition.for_cpu,
            )
            yield from lint_script(body, line + 1, context)


def _exported(body: str) -> Iterator[str]:
    for command in commands_in(body):
        if command.name == "export":
            yield from (word.text.partition("=")[0] for word in command.arguments())


@definition_checks.add
def _environment(definition: Definition) -> Iterator[Fault]:
    for name, line, body in definition.sections:
        for command in commands_in(body, line + 1) if name == "environment" else ():
            for word in (*command.settings, *command.words):
                if word.text.startswith(OVERRIDE):
                    yield Fault(word.line, "override-in-image", word.text)
                    yield from override_value(Word(word.text.removeprefix(OVERRIDE), word.line))
