"""Commands that are typed, in scripts, RUN and %post: what each does wrong, given where it stands."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from buildtool.doctor.lint import containers, pip, pythons
from buildtool.doctor.lint.fault import Fault, Word
from buildtool.doctor.lint.inbuilds import SHELLS, Where, one_in_a_build, together
from buildtool.doctor.lint.shell_words import Command, commands_in

PYTHON = re.compile(r"python(3(\.\d+)?)?|pypy3?")
PIP = re.compile(r"pip(3(\.\d+)?)?")
MOST_DEPTH = 4  # of scripts within scripts
GPU_IMAGE = re.compile(r"rocm|cuda|nvidia|nvcr\.io|pytorch|torch|vllm|triton|xpu|habana|jetson|l4t|amd", re.I)
DISTRIBUTIONS = re.compile(
    r"^(docker\.io/)?(library/)?(python|debian|ubuntu|alpine|fedora|archlinux|rockylinux|almalinux|centos)(:|@|$)"
    r"|/(python|ubi\d)"
)


def judged(text: str, first_line: int, where: Where) -> Iterator[Fault]:
    """Every fault of a script."""
    commands = commands_in(text, first_line)
    for command in commands:
        yield from _one(command, where)
    if where.builds:
        yield from together(commands, where)


def _one(command: Command, where: Where) -> Iterator[Fault]:
    name, rest = command.name, command.arguments()
    for word in [*command.settings, *(rest if name in ("export", "") else []), *command.words]:
        if word.text.startswith("HSA_OVERRIDE_GFX_VERSION="):
            yield from containers.override(Word(word.text.partition("=")[2], word.line))
    if name in ("docker", "podman", "nerdctl"):
        box = containers.started_by(rest)
        yield from containers.judged(box) if box else ()
        yield from _inner(box.command, box.line, where) if box else ()
    yield from _pip_faults(command, where)
    yield from _language_faults(command, where)
    if name == "usermod":
        yield from _group_faults(rest)
    if name in ("apptainer", "singularity"):
        yield from apptainer_faults(rest)
    if where.builds:
        yield from one_in_a_build(command)


def _inner(text: str, line: int, where: Where) -> Iterator[Fault]:
    """The command that a container runs is not this host's: only its Python is looked at."""
    if where.depth < MOST_DEPTH and "torch" in text:
        for command in commands_in(text, line):
            yield from _language_faults(command, replace(where, depth=where.depth + 1))


# ---- Python and pip ----------------------------------------------------------------------------------


def _language_faults(command: Command, where: Where) -> Iterator[Fault]:
    """Programs in other languages on the command line or fed to it."""
    name, rest = command.name, command.arguments()
    inline = next(
        (rest[n + 1] for n, word in enumerate(rest[:-1]) if re.fullmatch(r"-\w*c", word.text)), None
    )
    if PYTHON.fullmatch(name):
        if inline:
            yield from pythons.judged(inline.text.replace('\\"', '"'), inline.line)
        for heredoc in command.heredocs:
            yield from pythons.judged(heredoc.text, heredoc.line)
    elif name in SHELLS and where.depth < MOST_DEPTH:
        deeper = replace(where, depth=where.depth + 1)
        if inline:
            yield from judged(inline.text, inline.line, deeper)
        for heredoc in command.heredocs:
            yield from judged(heredoc.text, heredoc.line, deeper)
    elif PYTHON.fullmatch(command.piped_into):
        for heredoc in command.heredocs:
            yield from pythons.judged(heredoc.text, heredoc.line)


def pip_words(command: Command) -> list[Word] | None:
    """The words after `pip install` or `uv pip install`; None for other commands."""
    words = command.program()
    texts = [word.text for word in words]
    if texts and PYTHON.fullmatch(command.name) and "-m" in texts[:6]:
        words = words[texts.index("-m") + 1 :]
    elif texts[:2] == ["uv", "pip"]:
        words = words[1:]
    if not words or not PIP.fullmatch(words[0].text.rpartition("/")[2]):
        return None
    rest = words[1:]
    while rest and rest[0].text.startswith("-"):
        rest = rest[1:]
    return rest[1:] if rest and rest[0].text == "install" else None


def _pip_faults(command: Command, where: Where) -> Iterator[Fault]:
    words = pip_words(command)
    asked = pip.asked_by(words) if words else None
    if not asked or not words:
        return
    asked = replace(asked, line=command.words[0].line)
    yield from pip.judged(asked)
    yield from _torch_faults(asked, where)
    is_uv = command.program()[0].text == "uv"
    texts = {word.text for word in words} | {word.text for word in command.words}
    kept = not ({"--no-cache-dir", "--no-cache"} & texts)
    free = where.caches or where.variables & {"PIP_NO_CACHE_DIR", "UV_NO_CACHE"}
    inline = any(word.text.startswith(("PIP_NO_CACHE_DIR=", "UV_NO_CACHE=")) for word in command.settings)
    if where.builds and kept and not free and not inline and (asked.requirements or asked.options):
        yield Fault(asked.line, "pip-cache", "uv pip install" if is_uv else "pip install")


def _torch_faults(asked: pip.Asked, where: Where) -> Iterator[Fault]:
    torch = [(one, word) for one, word in asked.torch() if one.name.lower() == "torch"]
    flavours = asked.flavours
    named = (
        flavours or any(one.url for one, _ in torch) or asked.all("--find-links") or asked.all("--index-url")
    )
    named = named or asked.all("--torch-backend") or asked.all("-c") or asked.all("--constraint")
    set_elsewhere = {
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_CONSTRAINT",
        "UV_TORCH_BACKEND",
    } & where.variables
    if torch and not named and not set_elsewhere and where.builds:
        if where.is_rocm:
            yield Fault(torch[0][1].line, "torch-replaces-rocm", torch[0][1].text)
        elif DISTRIBUTIONS.search(where.image) and not GPU_IMAGE.search(where.image):
            yield Fault(torch[0][1].line, "plain-torch", torch[0][1].text)
    for flavour in sorted(flavours):
        line = pip._line_of(asked, flavour)
        if flavour.startswith("cu") and where.is_rocm:
            yield Fault(line, "cuda-wheel-for-rocm", flavour)
        if flavour.startswith("rocm"):
            yield from _rocm_faults(flavour, line, where)
        if where.for_cpu and flavour != "cpu":
            yield Fault(line, "gpu-wheel-in-cpu-file", flavour)
    python = re.search(r"(?:^|/)python:3\.(\d{1,3})(?!\d)", where.image)
    if python:
        yield from pip.python_faults(asked, int(python[1]))


def _rocm_faults(flavour: str, line: int, where: Where) -> Iterator[Fault]:
    if where.is_cuda:
        yield Fault(line, "rocm-wheel-for-cuda", flavour)
    other = re.search(r"rocm[-_/:]?(?:.*?[:_-])?(\d+\.\d+)", where.image) if where.is_rocm else None
    named = re.search(r":(?:rocm)?(\d+\.\d+)", where.image) or other
    mine = re.match(r"rocm(\d+\.\d+)", flavour)
    if where.is_rocm and named and mine and named[1] != mine[1]:
        yield Fault(line, "wheel-of-another-rocm", f"{flavour} in {where.image}")


# ---- other programs ----------------------------------------------------------------------------------


def _group_faults(rest: Sequence[Word]) -> Iterator[Fault]:
    for number, word in enumerate(rest[:-1]):
        if re.fullmatch(r"-\w*G|--groups", word.text):
            groups = rest[number + 1].text.split(",")
            if "video" in groups and "render" not in groups:
                yield Fault(word.line, "video-without-render", rest[number + 1].text)


def apptainer_faults(rest: Sequence[Word]) -> Iterator[Fault]:
    """Options of `apptainer exec` and its siblings."""
    if not rest or rest[0].text not in ("exec", "run", "shell"):
        return
    flags, image, after = _apptainer_parts(rest[1:])
    if not image:
        return
    texts = {word.text for word in flags}
    amd, nvidia = (
        bool(containers.AMD_IMAGE.search(image.text)),
        bool(containers.NVIDIA_IMAGE.search(image.text)),
    )
    late = next((word for word in after[:2] if word.text in ("--nv", "--rocm", "--nvccli")), None)
    for word in flags:
        if word.text == "--nv" and amd:
            yield Fault(word.line, "apptainer-nv-for-amd", image.text)
        if word.text == "--rocm" and nvidia and not amd:
            yield Fault(word.line, "apptainer-rocm-for-cuda", image.text)
    if late:
        yield Fault(late.line, "apptainer-flag-order", late.text)
    elif (amd or nvidia) and not texts & {"--nv", "--rocm", "--nvccli"} and "$" not in " ".join(texts):
        yield Fault(image.line, "apptainer-without-gpu", image.text)


_APPTAINER_VALUES = {
    "-B",
    "--bind",
    "--env",
    "--env-file",
    "-H",
    "--home",
    "--pwd",
    "--cwd",
    "-W",
    "--workdir",
    "-o",
    "--overlay",
    "--mount",
    "--network",
    "--app",
    "-S",
    "--scratch",
    "--security",
    "--add-caps",
    "--drop-caps",
}


def _apptainer_parts(words: Sequence[Word]) -> tuple[list[Word], Word | None, list[Word]]:
    place, flags = 0, []
    while place < len(words) and words[place].text.startswith(("-", "$")):
        flags.append(words[place])
        place += 2 if words[place].text in _APPTAINER_VALUES else 1
    image = words[place] if place < len(words) else None
    return flags, image, list(words[place + 1 :])


def exec_form(text: str) -> str | None:
    """The command of an exec form, `["a", "b"]`, as a script; None for a shell form."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return " ".join(map(str, words)) if isinstance(words, list) else None
