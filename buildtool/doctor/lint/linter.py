"""The linter: recognises what a file is and returns its faults; never raises for a file's content."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from buildtool.doctor.lint.compose import lint_compose, lint_devcontainer
from buildtool.doctor.lint.dockerfiles import lint_dockerfile
from buildtool.doctor.lint.jobs import lint_apptainer, lint_slurm
from buildtool.doctor.lint.pip import lint_requirements
from buildtool.doctor.lint.python_code import lint_python
from buildtool.doctor.lint.rules import Fault
from buildtool.doctor.lint.shell import Context, lint_script

MOST_BYTES = 256 << 10  # such files are a few kilobytes
Kind = Literal[
    "dockerfile", "compose", "devcontainer", "requirements", "slurm", "apptainer", "python", "shell"
]
BINARY = b"\x00"
CPU = re.compile(r"(^|[-_.])cpu([-_.]|$)", re.I)  # in the name of a file that is for CPUs
# the names of files of a kind; the first that matches counts
NAMES: tuple[tuple[Kind, str], ...] = (
    ("dockerfile", r"(docker|container)file([-_.].*)?|.*[-_.](docker|container)file"),
    ("devcontainer", r"\.?devcontainer(-.*)?\.json"),
    ("compose", r"(docker-|podman-)?compose.*\.ya?ml|.*\.ya?ml"),
    ("requirements", r".*requirements.*\.(txt|in)|constraints.*\.txt|.*\.req"),
    ("apptainer", r".*\.def|singularity(\..*)?|apptainer(\..*)?"),
    ("slurm", r".*\.(sbatch|slurm|slrm)"),
    ("python", r".*\.py"),
    ("shell", r".*\.(sh|bash|ksh|zsh)"),
)


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
    for kind, pattern in NAMES:
        if re.fullmatch(pattern, base):
            return _shell_or_slurm(kind, text)
    first = text.lstrip()
    if re.match(r"(?i)(#.*\n|\s)*(ARG\s+\w+.*\n(#.*\n|\s)*)*FROM\s+\S", first):
        return "dockerfile"
    if re.match(r"(?i)bootstrap\s*:", first):
        return "apptainer"
    if re.match(r"#!.*\bpython", first):
        return "python"
    if re.match(r"(#.*\n|\s)*(services|version|name|include)\s*:", first):
        return "compose"
    return _shell_or_slurm("shell", text)


def _shell_or_slurm(kind: Kind, text: str) -> Kind:
    """The kind, or `slurm` for a shell script with #SBATCH directives."""
    return "slurm" if kind == "shell" and re.search(r"^#SBATCH\s", text, re.MULTILINE) else kind


def _faults(name: str, text: str) -> Iterator[Fault]:
    for_cpu = bool(CPU.search(PurePath(name).name))
    match kind_of(name, text):
        case "dockerfile":
            yield from lint_dockerfile(text, for_cpu=for_cpu)
        case "compose":
            yield from lint_compose(text, name)
        case "devcontainer":
            yield from lint_devcontainer(text, name)
        case "requirements":
            yield from lint_requirements(text, for_cpu=for_cpu)
        case "slurm":
            yield from lint_slurm(text)
        case "apptainer":
            yield from lint_apptainer(text, for_cpu=for_cpu)
        case "python":
            yield from lint_python(text)
        case "shell":
            yield from lint_script(text, 1, Context(for_cpu=for_cpu))
