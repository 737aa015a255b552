"""Commands that are typed, in scripts, RUN and %post: what each does wrong, given where it stands."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buildtool.doctor.lint import containers, pip, python_code
from buildtool.doctor.lint.rules import Fault, Word
from buildtool.doctor.lint.shell_parser import NO_NAME, Command, commands_in

SHELLS = ("sh", "bash", "dash", "zsh", "ash")
_USES_LISTS = {"install", "upgrade", "dist-upgrade", "full-upgrade", "build-dep", "satisfy"}
_INSTALLERS = (
    "rosdep",
    "mk-build-deps",
    "aptitude",
    "nala",
    "apt-fast",
    "ansible-playbook",
    "make",
    "tasksel",
)
# what is sourced to change the shell alone; any other file may do anything
_SETTINGS = re.compile(
    r"(^|/)(activate|\.?(bash|z)?rc|\.?(bash_)?profile|conda\.sh|nvm\.sh|env|setup\.(ba|z)?sh)$"
)


@dataclass(frozen=True)
class Context:
    """Where a command stands."""

    image: str = ""  # the base image of a build, empty in a script
    builds: bool = False  # in a Dockerfile or an Apptainer definition: it ends up in an image
    caches: frozenset[str] = frozenset()  # targets of cache mounts
    variables: frozenset[str] = frozenset()  # ENV and ARG that are set
    for_cpu: bool = False  # the file says that it is for CPUs
    depth: int = 0

    @property
    def is_rocm(self) -> bool:
        """The base image has ROCm."""
        return bool(re.search(r"rocm", self.image, re.I))

    @property
    def is_cuda(self) -> bool:
        """The base image has CUDA."""
        return bool(re.search(r"nvidia/cuda|nvcr\.io|cuda\d|cuda:", self.image, re.I))


def one_in_a_build(command: Command) -> Iterator[Fault]:
    """Commands that are wrong in an image only."""
    name, rest = command.name, command.arguments()
    texts = [word.text for word in rest]
    line = command.words[0].line if command.words else 0
    if name in ("curl", "wget") and command.piped_into in (*SHELLS, "python", "python3"):
        yield Fault(line, "piped-installer", f"{name} | {command.piped_into}")
    if name == "amdgpu-install" and "--no-dkms" not in texts and "--list-usecase" not in texts:
        yield Fault(line, "driver-in-image", name)
    if name in ("apt-get", "apt", "dnf", "yum") and "install" in texts:
        for word in rest:
            if re.match(r"nvidia-driver-|amdgpu-dkms|nvidia-dkms|xserver-xorg-video-nvidia", word.text):
                yield Fault(word.line, "driver-in-image", word.text)
    if command.words and command.words[0].text == "sudo":
        yield Fault(line, "sudo-in-image", "sudo")
    if name in ("huggingface-cli", "hf", "ollama") and texts[:1] in (["download"], ["pull"]):
        yield Fault(line, "weights-in-layer", " ".join([name, *texts[:2]]))


def together(commands: Sequence[Command], where: Context) -> Iterator[Fault]:
    """What the commands of one RUN do together."""
    apt = [command for command in commands if command.name in ("apt-get", "apt")]
    verbs = [next((w.text for w in command.arguments() if not w.text.startswith("-")), "") for command in apt]
    cleaned = any(
        command.name == "rm" and "/var/lib/apt" in " ".join(w.text for w in command.words)
        for command in commands
    )
    cleaned = cleaned or any("/apt" in place for place in where.caches)
    cleaned = cleaned or any(_removes_lists(command) for command in commands)
    lines = {verb: command.words[0].line for verb, command in zip(verbs, apt, strict=True) if command.words}
    if "update" in verbs and "install" in verbs and not cleaned:
        yield Fault(lines["update"], "apt-lists", "apt-get update")
    alone = not _USES_LISTS & set(verbs) and not any(_may_install(command) for command in commands)
    if "update" in verbs and alone:
        yield Fault(lines["update"], "apt-update-alone", "apt-get update")
    for command, verb in zip(apt, verbs, strict=True):
        if verb == "install" and not _says_yes(command) and "yes" not in {c.name for c in commands}:
            yield Fault(command.words[0].line, "apt-without-yes", "install")
    yield from _conda_faults(commands, where)
    yield from _lonely_faults(commands)


def _may_install(command: Command) -> bool:
    """Whether another program than apt may install packages of the lists: rosdep, a script, xargs."""
    program = command.program()
    first = program[0].text if program else ""
    runs_a_file = command.name in (*SHELLS, ".", "source") and len(program) > 1
    is_script = (
        "$" in first or first.endswith(".sh") or (first.startswith((".", "/")) and "/bin/" not in first)
    )
    return (
        command.name in _INSTALLERS
        or is_script
        or runs_a_file
        or bool({"apt-get", "apt", "--with-deps", "install-deps"} & {word.text for word in program[1:]})
    )


def _removes_lists(command: Command) -> bool:
    return command.name == "find" and "/var/lib/apt/lists" in {w.text.rstrip("/") for w in command.words}


def _says_yes(command: Command) -> bool:
    texts = [word.text for word in command.arguments()]
    short = any(re.fullmatch(r"-[a-zA-Z]*y[a-zA-Z]*|-qq+", text) for text in texts)
    return short or any(
        text in ("--yes", "--assume-yes", "--download-only", "-d", "-s") or "$" in text for text in texts
    )


def _conda_faults(commands: Sequence[Command], where: Context) -> Iterator[Fault]:
    conda = [command for command in commands if command.name in ("conda", "mamba", "micromamba")]
    installs = [c for c in conda if {"install", "create", "update"} & {w.text for w in c.arguments()[:3]}]
    cleans = any("clean" in [w.text for w in command.arguments()[:2]] for command in conda)
    removed = any(
        command.name == "rm" and "pkgs" in " ".join(w.text for w in command.words) for command in commands
    )
    if installs and not cleans and not removed and not any("pkgs" in place for place in where.caches):
        yield Fault(installs[0].words[0].line, "conda-cache", installs[0].name)


def _lonely_faults(commands: Sequence[Command]) -> Iterator[Fault]:
    """A RUN that only changes a shell that ends, or removes what an earlier layer keeps."""
    if not commands:
        return
    names = {command.name for command in commands}
    line = commands[0].words[0].line if commands[0].words else 0
    activates = all(
        (command.name in ("source", ".") and _SETTINGS.search((command.arguments() or [NO_NAME])[0].text))
        or [w.text for w in command.words[:2]] == ["conda", "activate"]
        for command in commands
    )
    if names <= {"cd"} or names <= {"export"} or activates:
        yield Fault(line, "no-effect", " ".join(word.text for word in commands[0].words[:3]))
    removed = " ".join(word.text for command in commands for word in command.words)
    if _cleans(names, removed):
        yield Fault(line, "cleaned-too-late", removed[:80])


def _cleans(names: set[str], text: str) -> bool:
    """Whether a whole RUN only removes caches."""
    if names <= {"rm"}:
        return bool(re.search(r"/var/lib/apt/lists|/root/\.cache|/tmp/\*|/var/cache/", text))
    if names <= {"apt-get", "apt"}:
        return bool({"clean", "autoremove"} & set(text.split())) and "install" not in text
    return text in ("pip cache purge", "conda clean -afy", "conda clean --all")


PYTHON = re.compile(r"python(3(\.\d+)?)?|pypy3?")
PIP = re.compile(r"pip(3(\.\d+)?)?")
MOST_DEPTH = 4  # of scripts within scripts
GPU_IMAGE = re.compile(r"rocm|cuda|nvidia|nvcr\.io|pytorch|torch|vllm|triton|xpu|habana|jetson|l4t|amd", re.I)
DISTRIBUTIONS = re.compile(
    r"^(docker\.io/)?(library/)?(python|debian|ubuntu|alpine|fedora|archlinux|rockylinux|almalinux|centos)(:|@|$)"
    r"|/(python|ubi\d)"
)


def lint_script(text: str, first_line: int, where: Context) -> Iterator[Fault]:
    """Every fault of a script."""
    commands = commands_in(text, first_line)
    for command in commands:
        yield from _one(command, where)
    if where.builds:
        yield from together(commands, where)


def _one(command: Command, where: Context) -> Iterator[Fault]:
    name, rest = command.name, command.arguments()
    for word in [*command.settings, *(rest if name in ("export", "") else []), *command.words]:
        if word.text.startswith("HSA_OVERRIDE_GFX_VERSION="):
            yield from containers.override_value(Word(word.text.partition("=")[2], word.line))
    if name in ("docker", "podman", "nerdctl"):
        box = containers.container_of_command(rest)
        yield from containers.container_faults(box) if box else ()
        yield from container_command_faults(box.command, box.line, where) if box else ()
    yield from _pip_faults(command, where)
    yield from _language_faults(command, where)
    if name == "usermod":
        yield from _group_faults(rest)
    if name in ("apptainer", "singularity"):
        yield from apptainer_faults(rest)
    if where.builds:
        yield from one_in_a_build(command)


def container_command_faults(text: str, line: int, where: Context) -> Iterator[Fault]:
    """The command that a container runs is not this host's: only its Python is looked at."""
    if where.depth < MOST_DEPTH and "torch" in text:
        for command in commands_in(text, line):
            yield from _language_faults(command, replace(where, depth=where.depth + 1))


# ---- Python and pip ----------------------------------------------------------------------------------


def _language_faults(command: Command, where: Context) -> Iterator[Fault]:
    """Programs in other languages on the command line or fed to it."""
    name, rest = command.name, command.arguments()
    inline = next(
        (rest[n + 1] for n, word in enumerate(rest[:-1]) if re.fullmatch(r"-\w*c", word.text)), None
    )
    if PYTHON.fullmatch(name):
        if inline:
            yield from python_code.lint_python(inline.text.replace('\\"', '"'), inline.line)
        for heredoc in command.heredocs:
            yield from python_code.lint_python(heredoc.text, heredoc.line)
    elif name in SHELLS and where.depth < MOST_DEPTH:
        deeper = replace(where, depth=where.depth + 1)
        if inline:
            yield from lint_script(inline.text, inline.line, deeper)
        for heredoc in command.heredocs:
            yield from lint_script(heredoc.text, heredoc.line, deeper)
    elif PYTHON.fullmatch(command.piped_into):
        for heredoc in command.heredocs:
            yield from python_code.lint_python(heredoc.text, heredoc.line)


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


def _pip_faults(command: Command, where: Context) -> Iterator[Fault]:
    words = pip_words(command)
    asked = pip.request_of_command(words) if words else None
    if not asked or not words:
        return
    asked = replace(asked, line=command.words[0].line)
    yield from pip.pip_faults(asked)
    yield from _torch_faults(asked, where)
    is_uv = command.program()[0].text == "uv"
    texts = {word.text for word in words} | {word.text for word in command.words}
    kept = not ({"--no-cache-dir", "--no-cache"} & texts)
    free = where.caches or where.variables & {"PIP_NO_CACHE_DIR", "UV_NO_CACHE"}
    inline = any(word.text.startswith(("PIP_NO_CACHE_DIR=", "UV_NO_CACHE=")) for word in command.settings)
    if where.builds and kept and not free and not inline and (asked.requirements or asked.options):
        yield Fault(asked.line, "pip-cache", "uv pip install" if is_uv else "pip install")


def _torch_faults(asked: pip.PipRequest, where: Context) -> Iterator[Fault]:
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
        line = pip.line_of(asked, flavour)
        if flavour.startswith("cu") and where.is_rocm:
            yield Fault(line, "cuda-wheel-for-rocm", flavour)
        if flavour.startswith("rocm"):
            yield from _rocm_faults(flavour, line, where)
        if where.for_cpu and flavour != "cpu":
            yield Fault(line, "gpu-wheel-in-cpu-file", flavour)
    python = re.search(r"(?:^|/)python:3\.(\d{1,3})(?!\d)", where.image)
    if python:
        yield from pip.python_faults(asked, int(python[1]))


def _rocm_faults(flavour: str, line: int, where: Context) -> Iterator[Fault]:
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
