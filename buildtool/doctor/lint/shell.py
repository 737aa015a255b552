"""Rules for shell commands: in scripts, in RUN and %post of image builds, and in what containers run.

A rule for a single command joins `command_checks`, one for what a whole script or RUN does `script_checks`.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buildtool.doctor.lint import pip
from buildtool.doctor.lint.containers import (
    AMD_IMAGE,
    NVIDIA_IMAGE,
    container_checks,
    container_of_command,
    override_value,
)
from buildtool.doctor.lint.python_code import lint_python
from buildtool.doctor.lint.rules import Checks, Fault, Word
from buildtool.doctor.lint.shell_parser import NO_NAME, Command, commands_in

SHELLS = ("sh", "bash", "dash", "zsh", "ash")
PYTHON = re.compile(r"python(3(\.\d+)?)?|pypy3?")
PIP = re.compile(r"pip(3(\.\d+)?)?")
MOST_DEPTH = 4  # of scripts within scripts
GPU_IMAGE = re.compile(r"rocm|cuda|nvidia|nvcr\.io|pytorch|torch|vllm|triton|xpu|habana|jetson|l4t|amd", re.I)
DISTRIBUTIONS = re.compile(
    r"^(docker\.io/)?(library/)?(python|debian|ubuntu|alpine|fedora|archlinux|rockylinux|almalinux|centos)(:|@|$)"
    r"|/(python|ubi\d)"
)
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION="
NO_CACHE_VARIABLES = {"PIP_NO_CACHE_DIR", "UV_NO_CACHE"}
INDEX_VARIABLES = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "UV_TORCH_BACKEND"}
DRIVER_PACKAGE = re.compile(r"nvidia-driver-|amdgpu-dkms|nvidia-dkms|xserver-xorg-video-nvidia")
USES_PACKAGE_LISTS = {"install", "upgrade", "dist-upgrade", "full-upgrade", "build-dep", "satisfy"}
INSTALLERS = (
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
SETTINGS_FILE = re.compile(
    r"(^|/)(activate|\.?(bash|z)?rc|\.?(bash_)?profile|conda\.sh|nvm\.sh|env|setup\.(ba|z)?sh)$"
)
APPTAINER_OPTIONS_WITH_VALUE = {
    "-B", "--bind", "--env", "--env-file", "-H", "--home", "--pwd", "--cwd", "-W", "--workdir", "-o",
    "--overlay", "--mount", "--network", "--app", "-S", "--scratch", "--security", "--add-caps",
    "--drop-caps",
}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """Where a command stands."""

    image: str = ""  # the base image of a build, empty in a script
    builds: bool = False  # in a Dockerfile or an Apptainer definition: it ends up in an image
    caches: frozenset[str] = frozenset()  # targets of cache mounts
    variables: frozenset[str] = frozenset()  # ENV and ARG that are set
    for_cpu: bool = False  # the file's name says that it is for CPUs
    depth: int = 0  # of scripts within scripts

    @property
    def is_rocm(self) -> bool:
        """Whether the base image has ROCm."""
        return bool(re.search(r"rocm", self.image, re.I))

    @property
    def is_cuda(self) -> bool:
        """Whether the base image has CUDA."""
        return bool(re.search(r"nvidia/cuda|nvcr\.io|cuda\d|cuda:", self.image, re.I))


command_checks = Checks[[Command, Context]]()
script_checks = Checks[[Sequence[Command], Context]]()


def lint_script(text: str, first_line: int, context: Context) -> Iterator[Fault]:
    """Every fault of a script that begins at a line of its file."""
    commands = commands_in(text, first_line)
    for command in commands:
        yield from command_checks(command, context)
    yield from script_checks(commands, context)


def container_command_faults(text: str, line: int, context: Context) -> Iterator[Fault]:
    """Faults of the command that a container runs: it isn't this host's, so only its Python is looked at."""
    if context.depth < MOST_DEPTH and "torch" in text:
        for command in commands_in(text, line):
            yield from _code_in_arguments(command, replace(context, depth=context.depth + 1))


def exec_form(text: str) -> str | None:
    """The command of an exec form, `["a", "b"]`, as a script; None for a shell form."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return " ".join(map(str, words)) if isinstance(words, list) else None


# ---- any command -------------------------------------------------------------------------------------


@command_checks.add
def _override(command: Command, _context: Context) -> Iterator[Fault]:
    exported = command.arguments() if command.name in ("export", "") else []
    for word in (*command.settings, *exported, *command.words):
        if word.text.startswith(OVERRIDE):
            yield from override_value(Word(word.text.removeprefix(OVERRIDE), word.line))


@command_checks.add
def _docker_run(command: Command, context: Context) -> Iterator[Fault]:
    if command.name in ("docker", "podman", "nerdctl"):
        container = container_of_command(command.arguments())
        if container:
            yield from container_checks(container)
            yield from container_command_faults(container.command, container.line, context)


@command_checks.add
def _groups(command: Command, _context: Context) -> Iterator[Fault]:
    words = command.arguments() if command.name == "usermod" else []
    for option, value in itertools.pairwise(words):
        groups = value.text.split(",")
        if re.fullmatch(r"-\w*G|--groups", option.text) and "video" in groups and "render" not in groups:
            yield Fault(option.line, "video-without-render", value.text)


@command_checks.add
def _apptainer(command: Command, _context: Context) -> Iterator[Fault]:
    if command.name in ("apptainer", "singularity"):
        yield from apptainer_faults(command.arguments())


def apptainer_faults(words: Sequence[Word]) -> Iterator[Fault]:
    """Faults of `apptainer exec`, `run` and `shell`, from the words after the program's name."""
    if not words or words[0].text not in ("exec", "run", "shell"):
        return
    flags, image, after = _apptainer_parts(words[1:])
    if not image:
        return
    texts = {flag.text for flag in flags}
    amd, nvidia = bool(AMD_IMAGE.search(image.text)), bool(NVIDIA_IMAGE.search(image.text))
    for flag in flags:
        if flag.text == "--nv" and amd:
            yield Fault(flag.line, "apptainer-nv-for-amd", image.text)
        if flag.text == "--rocm" and nvidia and not amd:
            yield Fault(flag.line, "apptainer-rocm-for-cuda", image.text)
    late = next((word for word in after[:2] if word.text in ("--nv", "--rocm", "--nvccli")), None)
    if late:
        yield Fault(late.line, "apptainer-flag-order", late.text)
    elif (amd or nvidia) and not texts & {"--nv", "--rocm", "--nvccli"} and "$" not in " ".join(texts):
        yield Fault(image.line, "apptainer-without-gpu", image.text)


def _apptainer_parts(words: Sequence[Word]) -> tuple[list[Word], Word | None, list[Word]]:
    """The flags, the image, and the words after it."""
    index, flags = 0, []
    while index < len(words) and words[index].text.startswith(("-", "$")):
        flags.append(words[index])
        index += 2 if words[index].text in APPTAINER_OPTIONS_WITH_VALUE else 1
    image = words[index] if index < len(words) else None
    return flags, image, list(words[index + 1 :])


@command_checks.add
def _code_in_arguments(command: Command, context: Context) -> Iterator[Fault]:
    """Faults of Python and shell scripts on the command line, or fed to the command."""
    name, words = command.name, command.arguments()
    pairs = itertools.pairwise(words)
    inline = next((code for option, code in pairs if re.fullmatch(r"-\w*c", option.text)), None)
    if PYTHON.fullmatch(name):
        if inline:
            yield from lint_python(inline.text.replace('\\"', '"'), inline.line)
        for heredoc in command.heredocs:
            yield from lint_python(heredoc.text, heredoc.line)
    elif name in SHELLS and context.depth < MOST_DEPTH:
        deeper = replace(context, depth=context.depth + 1)
        if inline:
            yield from lint_script(inline.text, inline.line, deeper)
        for heredoc in command.heredocs:
            yield from lint_script(heredoc.text, heredoc.line, deeper)
    elif PYTHON.fullmatch(command.piped_into):
        for heredoc in command.heredocs:
            yield from lint_python(heredoc.text, heredoc.line)


# ---- pip install -------------------------------------------------------------------------------------


@command_checks.add
def _pip_install(command: Command, context: Context) -> Iterator[Fault]:
    words = pip_words(command)
    if not words:
        return
    request = replace(pip.request_of_command(words), line=command.line)
    yield from pip.request_checks(request)
    yield from _torch_for_image(request, context)
    yield from _pip_cache(command, request, context)


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


def _torch_for_image(request: pip.PipRequest, context: Context) -> Iterator[Fault]:
    """A torch that doesn't fit the base image, or a file that is for CPUs."""
    torch = [(each, word) for each, word in request.torch() if each.name.lower() == "torch"]
    build_named = (
        request.flavours
        or any(each.url for each, _ in torch)
        or any(request.all(name) for name in ("--find-links", "--index-url", "--torch-backend"))
        or any(request.all(name) for name in ("-c", "--constraint"))
    )
    if torch and not build_named and not INDEX_VARIABLES & context.variables and context.builds:
        word = torch[0][1]
        if context.is_rocm:
            yield Fault(word.line, "torch-replaces-rocm", word.text)
        elif DISTRIBUTIONS.search(context.image) and not GPU_IMAGE.search(context.image):
            yield Fault(word.line, "plain-torch", word.text)
    for flavour in sorted(request.flavours):
        line = pip.line_of(request, flavour)
        if flavour.startswith("cu") and context.is_rocm:
            yield Fault(line, "cuda-wheel-for-rocm", flavour)
        if flavour.startswith("rocm"):
            yield from _rocm_wheel(flavour, line, context)
        if context.for_cpu and flavour != "cpu":
            yield Fault(line, "gpu-wheel-in-cpu-file", flavour)
    python = re.search(r"(?:^|/)python:3\.(\d{1,3})(?!\d)", context.image)
    if python:
        yield from pip.python_faults(request, int(python[1]))


def _rocm_wheel(flavour: str, line: int, context: Context) -> Iterator[Fault]:
    if context.is_cuda:
        yield Fault(line, "rocm-wheel-for-cuda", flavour)
    if not context.is_rocm:
        return
    of_image = re.search(r":(?:rocm)?(\d+\.\d+)", context.image)
    of_image = of_image or re.search(r"rocm[-_/:]?(?:.*?[:_-])?(\d+\.\d+)", context.image)
    of_wheel = re.match(r"rocm(\d+\.\d+)", flavour)
    if of_image and of_wheel and of_image[1] != of_wheel[1]:
        yield Fault(line, "wheel-of-another-rocm", f"{flavour} in {context.image}")


def _pip_cache(command: Command, request: pip.PipRequest, context: Context) -> Iterator[Fault]:
    texts = {word.text for word in command.words}
    set_here = any(word.text.partition("=")[0] in NO_CACHE_VARIABLES for word in command.settings)
    off = {"--no-cache-dir", "--no-cache"} & texts or NO_CACHE_VARIABLES & context.variables or set_here
    if context.builds and not off and not context.caches and (request.requirements or request.options):
        is_uv = command.program()[0].text == "uv"
        yield Fault(request.line, "pip-cache", "uv pip install" if is_uv else "pip install")


# ---- a command whose effect ends up in an image ------------------------------------------------------


@command_checks.add
def _piped_installer(command: Command, context: Context) -> Iterator[Fault]:
    interpreters = (*SHELLS, "python", "python3")
    if context.builds and command.name in ("curl", "wget") and command.piped_into in interpreters:
        yield Fault(command.line, "piped-installer", f"{command.name} | {command.piped_into}")


@command_checks.add
def _driver(command: Command, context: Context) -> Iterator[Fault]:
    if not context.builds:
        return
    words = command.arguments()
    texts = {word.text for word in words}
    if command.name == "amdgpu-install" and not texts & {"--no-dkms", "--list-usecase"}:
        yield Fault(command.line, "driver-in-image", command.name)
    if command.name in ("apt-get", "apt", "dnf", "yum") and "install" in texts:
        for word in words:
            if DRIVER_PACKAGE.match(word.text):
                yield Fault(word.line, "driver-in-image", word.text)


@command_checks.add
def _sudo(command: Command, context: Context) -> Iterator[Fault]:
    if context.builds and command.words and command.words[0].text == "sudo":
        yield Fault(command.line, "sudo-in-image", "sudo")


@command_checks.add
def _weights(command: Command, context: Context) -> Iterator[Fault]:
    texts = [word.text for word in command.arguments()]
    downloads = texts[:1] in (["download"], ["pull"])
    if context.builds and downloads and command.name in ("huggingface-cli", "hf", "ollama"):
        yield Fault(command.line, "weights-in-layer", " ".join([command.name, *texts[:2]]))


# ---- what the commands of one RUN do together --------------------------------------------------------


@script_checks.add
def _apt(commands: Sequence[Command], context: Context) -> Iterator[Fault]:
    if not context.builds:
        return
    apt = [command for command in commands if command.name in ("apt-get", "apt")]
    verbs = [_verb(command) for command in apt]
    lines = {verb: command.line for verb, command in zip(verbs, apt, strict=True) if command.words}
    cleaned = any("/apt" in target for target in context.caches) or any(map(_removes_lists, commands))
    if "update" in verbs and "install" in verbs and not cleaned:
        yield Fault(lines["update"], "apt-lists", "apt-get update")
    uses_lists = USES_PACKAGE_LISTS & set(verbs) or any(map(_may_install, commands))
    if "update" in verbs and not uses_lists:
        yield Fault(lines["update"], "apt-update-alone", "apt-get update")
    answers = any(command.name == "yes" for command in commands)
    for command, verb in zip(apt, verbs, strict=True):
        if verb == "install" and not _is_unattended(command) and not answers:
            yield Fault(command.line, "apt-without-yes", "install")


def _verb(command: Command) -> str:
    """The first argument that isn't an option; empty where there is none."""
    return next((word.text for word in command.arguments() if not word.text.startswith("-")), "")


def _removes_lists(command: Command) -> bool:
    texts = [word.text for word in command.words]
    if command.name == "rm":
        return "/var/lib/apt" in " ".join(texts)
    return command.name == "find" and "/var/lib/apt/lists" in {text.rstrip("/") for text in texts}


def _may_install(command: Command) -> bool:
    """Whether a program other than apt may use the package lists: rosdep, a script, xargs."""
    program = command.program()
    first = program[0].text if program else ""
    runs_a_file = command.name in (*SHELLS, ".", "source") and len(program) > 1
    is_script = (
        "$" in first or first.endswith(".sh") or (first.startswith((".", "/")) and "/bin/" not in first)
    )
    calls_apt = {"apt-get", "apt", "--with-deps", "install-deps"} & {word.text for word in program[1:]}
    return command.name in INSTALLERS or is_script or runs_a_file or bool(calls_apt)


def _is_unattended(command: Command) -> bool:
    """Whether apt asks no question, or a variable may keep it from asking."""
    texts = [word.text for word in command.arguments()]
    return any(
        re.fullmatch(r"-[a-zA-Z]*y[a-zA-Z]*|-qq+|--yes|--assume-yes|--download-only|-d|-s", text)
        or "$" in text
        for text in texts
    )


@script_checks.add
def _conda(commands: Sequence[Command], context: Context) -> Iterator[Fault]:
    if not context.builds:
        return
    conda = [command for command in commands if command.name in ("conda", "mamba", "micromamba")]
    installs = [
        command
        for command in conda
        if {"install", "create", "update"} & {word.text for word in command.arguments()[:3]}
    ]
    cleans = any("clean" in [word.text for word in command.arguments()[:2]] for command in conda)
    removes = any(
        command.name == "rm" and "pkgs" in " ".join(word.text for word in command.words)
        for command in commands
    )
    cached = any("pkgs" in target for target in context.caches)
    if installs and not cleans and not removes and not cached:
        yield Fault(installs[0].line, "conda-cache", installs[0].name)


@script_checks.add
def _no_effect(commands: Sequence[Command], context: Context) -> Iterator[Fault]:
    """A RUN that only changes a shell that ends."""
    if not context.builds or not commands:
        return
    names = {command.name for command in commands}
    if names <= {"cd"} or names <= {"export"} or all(map(_activates, commands)):
        yield Fault(commands[0].line, "no-effect", " ".join(word.text for word in commands[0].words[:3]))


def _activates(command: Command) -> bool:
    """Whether a command only changes the shell's settings."""
    sourced = (command.arguments() or [NO_NAME])[0].text
    if command.name in ("source", ".") and SETTINGS_FILE.search(sourced):
        return True
    return [word.text for word in command.words[:2]] == ["conda", "activate"]


@script_checks.add
def _late_cleanup(commands: Sequence[Command], context: Context) -> Iterator[Fault]:
    """A RUN that only removes what an earlier layer keeps."""
    if not context.builds or not commands:
        return
    text = " ".join(word.text for command in commands for word in command.words)
    if _only_cleans({command.name for command in commands}, text):
        yield Fault(commands[0].line, "cleaned-too-late", text[:80])


def _only_cleans(names: set[str], text: str) -> bool:
    if names <= {"rm"}:
        return bool(re.search(r"/var/lib/apt/lists|/root/\.cache|/tmp/\*|/var/cache/", text))
    if names <= {"apt-get", "apt"}:
        return bool({"clean", "autoremove"} & set(text.split())) and "install" not in text
    return text in ("pip cache purge", "conda clean -afy", "conda clean --all")
