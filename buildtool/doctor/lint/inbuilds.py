"""Commands of a RUN or a %post: what is wrong with them because they end up in an image."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buildtool.doctor.lint.fault import Fault
from buildtool.doctor.lint.shell_words import NO_NAME, Command

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
class Where:
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


def together(commands: Sequence[Command], where: Where) -> Iterator[Fault]:
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


def _conda_faults(commands: Sequence[Command], where: Where) -> Iterator[Fault]:
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
