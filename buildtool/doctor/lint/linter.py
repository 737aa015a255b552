"""One file in, its faults out: recognises what it is, reads it with bounds, never raises for its content."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from buildtool.doctor.lint import compose, dockerfiles, jobs, pip, python_code, shell
from buildtool.doctor.lint.rules import Fault
from buildtool.doctor.lint.shell import Context

MOST_BYTES = 256 << 10  # such files are a few kilobytes
Kind = Literal[
    "dockerfile", "compose", "devcontainer", "requirements", "slurm", "apptainer", "python", "shell"
]
BINARY = b"\x00"
CPU = re.compile(r"(^|[-_.])cpu([-_.]|$)", re.I)


def lint(name: str, data: bytes) -> list[Fault]:
    """The faults of a file, in the order of its lines, each once."""
    if len(data) > MOST_BYTES:
        return [Fault(1, "too-large", f"more than {MOST_BYTES} bytes")]
    if BINARY in data:
        return [Fault(1, "unreadable", "binary, or UTF-16: such files are UTF-8")]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return [Fault(data.count(b"\n", 0, error.start) + 1, "unreadable", "not UTF-8")]
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        return []
    return sorted(set(_faults(name, text)))


def kind_of(name: str, text: str) -> Kind:
    """What a file is, by its name, else by how it begins."""
    base = PurePath(name).name.lower()
    for kind, pattern in _NAMES:
        if re.fullmatch(pattern, base):
            return _more_exactly(kind, text)
    first = text.lstrip()
    if re.match(r"(?i)(#.*\n|\s)*(ARG\s+\w+.*\n(#.*\n|\s)*)*FROM\s+\S", first):
        return "dockerfile"
    if re.match(r"(?i)bootstrap\s*:", first):
        return "apptainer"
    if re.match(r"#!.*\bpython", first):
        return "python"
    if re.match(r"(#.*\n|\s)*(services|version|name|include)\s*:", first):
        return "compose"
    return _more_exactly("shell", text)


_NAMES: tuple[tuple[Kind, str], ...] = (
    ("dockerfile", r"(docker|container)file([-_.].*)?|.*[-_.](docker|container)file"),
    ("devcontainer", r"\.?devcontainer(-.*)?\.json"),
    ("compose", r"(docker-|podman-)?compose.*\.ya?ml|.*\.ya?ml"),
    ("requirements", r".*requirements.*\.(txt|in)|constraints.*\.txt|.*\.req"),
    ("apptainer", r".*\.def|singularity(\..*)?|apptainer(\..*)?"),
    ("slurm", r".*\.(sbatch|slurm|slrm)"),
    ("python", r".*\.py"),
    ("shell", r".*\.(sh|bash|ksh|zsh)"),
)


def _more_exactly(kind: Kind, text: str) -> Kind:
    return "slurm" if kind == "shell" and re.search(r"^#SBATCH\s", text, re.MULTILINE) else kind


def _faults(name: str, text: str) -> Iterator[Fault]:
    for_cpu = bool(CPU.search(PurePath(name).name))
    match kind_of(name, text):
        case "dockerfile":
            yield from dockerfiles.lint_dockerfile(text, for_cpu=for_cpu)
        case "compose":
            yield from compose.lint_compose(text, name)
        case "devcontainer":
            yield from compose.lint_devcontainer(text, name)
        case "requirements":
            yield from pip.lint_requirements(text, for_cpu=for_cpu)
        case "slurm":
            yield from jobs.lint_slurm(text)
            yield from jobs.srun_inner(text)
        case "apptainer":
            yield from jobs.lint_apptainer(text, for_cpu=for_cpu)
        case "python":
            yield from python_code.lint_python(text)
        case "shell":
            yield from shell.lint_script(text, 1, Context(for_cpu=for_cpu))
