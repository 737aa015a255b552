"""Slurm job scripts and Apptainer definitions."""

import re
from collections.abc import Iterator

from buildtool.doctor.lint import containers, shell
from buildtool.doctor.lint.rules import Fault, Word
from buildtool.doctor.lint.shell import Context
from buildtool.doctor.lint.shell_parser import Command, commands_in, comments_in

DIRECTIVE = re.compile(r"#SBATCH\s+(--?[\w-]+)(?:[=\s]\s*(\S+))?")
GPU_OPTIONS = (
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


def lint_slurm(text: str) -> Iterator[Fault]:
    """Every fault of a job script."""
    commands = commands_in(text)
    first = min(
        (word.line for command in commands for word in (*command.settings, *command.words)[:1]), default=10**9
    )
    given: dict[str, str] = {}
    for comment in comments_in(text):
        found = DIRECTIVE.match(comment.text)
        if not found:
            continue
        if comment.line > first:
            yield Fault(comment.line, "slurm-late-directive", comment.text[:80])
            continue
        given[found[1]] = found[2] or ""
        if found[1] in WRONG_OPTIONS:
            yield Fault(comment.line, "slurm-gpu-option", found[1])
    yield from _launches(commands, given)
    yield from shell.lint_script(text, 1, Context())


def _launches(commands: list[Command], given: dict[str, str]) -> Iterator[Fault]:
    asks = any(option in given for option in GPU_OPTIONS) or "gpu" in given.get("--constraint", "").lower()
    per_node = given.get("--ntasks-per-node", "")
    has_several = per_node.isdecimal() and per_node.lstrip("0") not in ("", "1")
    for command in commands:
        words = [word.text for word in command.words]
        line = command.words[0].line if command.words else 1
        srun_asks = any(re.match(r"--(gpus|gres)", word) for word in words)
        is_gpu = command.name in ("apptainer", "singularity") and bool({"--nv", "--rocm"} & set(words))
        is_gpu = is_gpu or any(word in ("nvidia-smi", "rocm-smi", "rocminfo") for word in words[:1])
        if is_gpu and not asks and not srun_asks and given:
            yield Fault(line, "slurm-without-gpu", " ".join(words[:4]))
        starts = next(
            (
                word
                for word in words
                if word in ("torchrun", "torch.distributed.run", "torch.distributed.launch")
            ),
            "",
        )
        if (
            starts
            and "srun" in words[:1]
            and has_several
            and not any(w.startswith("--ntasks-per-node=1") for w in words)
        ):
            yield Fault(line, "torchrun-per-task", f"{starts} with --ntasks-per-node={per_node}")


def srun_inner(text: str) -> Iterator[Fault]:
    """Apptainer behind srun."""
    for command in commands_in(text):
        if command.name == "srun":
            words = list(command.words)
            place = next((n for n, w in enumerate(words) if w.text in ("apptainer", "singularity")), None)
            if place is not None:
                yield from shell.apptainer_faults(words[place + 1 :])


def lint_apptainer(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a definition file."""
    header, sections = _sections(text)
    source = next((word for key, word in header if key == "from"), None)
    bootstrap = next((word for key, word in header if key == "bootstrap"), None)
    if not bootstrap:
        yield Fault(1, "unreadable", "there is no Bootstrap")
        return
    image = source.text if source else ""
    if source and bootstrap.text in ("docker", "library", "shub", "oras"):
        yield from containers.unpinned_image(source)
    for name, line, body in sections:
        if name not in SECTIONS:
            yield Fault(line, "apptainer-section", f"%{name}")
        if name in SHELL_SECTIONS:
            where = Context(image=image, builds=True, variables=frozenset(_exported(body)), for_cpu=for_cpu)
            yield from shell.lint_script(body, line + 1, where)
        elif name == "environment":
            yield from _environment(body, line + 1)


def _sections(text: str) -> tuple[list[tuple[str, Word]], list[tuple[str, int, str]]]:
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
    return header, [(name, line, "\n".join(body)) for name, line, body in sections]


def _exported(body: str) -> Iterator[str]:
    for command in commands_in(body):
        if command.name == "export":
            yield from (word.text.partition("=")[0] for word in command.arguments())


def _environment(body: str, first_line: int) -> Iterator[Fault]:
    for command in commands_in(body, first_line):
        for word in (*command.settings, *command.words):
            if word.text.startswith("HSA_OVERRIDE_GFX_VERSION="):
                yield Fault(word.line, "override-in-image", word.text)
                yield from containers.override_value(Word(word.text.partition("=")[2], word.line))
