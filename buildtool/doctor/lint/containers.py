"""Containers that are started, by `docker run`, a compose service or a devcontainer, and their faults."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from buildtool.doctor.lint.rules import Fault, Word

AMD_IMAGE = re.compile(r"(^|/)rocm/|rocm|(^|[-_:.])hip([-_:.]|$)|gfx\d", re.I)
NVIDIA_IMAGE = re.compile(r"nvcr\.io/|(^|/)nvidia/|cuda", re.I)
TRAINS = re.compile(r"\btrain|torchrun|deepspeed|accelerate launch|num[_-]workers|finetun|fine-tun", re.I)
# of `docker run`, those that take no value
SWITCHES = {
    "detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck", "oom-kill-disable",
    "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "replace", "no-hosts",
}  # fmt: skip
SHORT = {"d": "detach", "i": "interactive", "t": "tty", "P": "publish-all", "q": "quiet"}
LONG = {
    "v": "volume",
    "e": "env",
    "p": "publish",
    "u": "user",
    "w": "workdir",
    "m": "memory",
    "h": "hostname",
}
OPTION = re.compile(r"--([a-z0-9-]+)(?:=(.*))?", re.S)


@dataclass(frozen=True)
class Container:
    """A container as it is started."""

    line: int
    image: Word | None
    options: tuple[tuple[str, Word], ...] = ()  # by docker run's long names
    environment: Mapping[str, Word] = field(default_factory=dict)
    command: str = ""
    builds: bool = False  # the image is built from a Dockerfile next to it

    def all(self, name: str) -> list[Word]:
        """The values of an option."""
        return [word for one, word in self.options if one == name]

    @property
    def devices(self) -> str:
        """All devices in one text."""
        return " ".join(word.text for word in self.all("device"))

    @property
    def is_amd(self) -> bool:
        """By its image, devices and variables."""
        named = self.image is not None and bool(AMD_IMAGE.search(self.image.text))
        variables = any(name.startswith(("HSA_", "HIP_", "ROCR_", "AMD_")) for name in self.environment)
        return named or "/dev/kfd" in self.devices or "amd.com/gpu" in self.devices or variables

    @property
    def has_gpu(self) -> bool:
        """Whether any card is passed on."""
        return bool(re.search(r"/dev/(kfd|dxg|nvidia)|gpu=", self.devices) or self.all("gpus"))


def container_of_command(words: Sequence[Word]) -> Container | None:
    """The container of `docker run ...`, from the words after the program's name; None for other verbs."""
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        rest = rest[1:]
    rest = rest[1:] if rest and rest[0].text == "container" else rest
    if not rest or rest[0].text not in ("run", "create"):
        return None
    options, left = _options(rest[1:])
    image = left[0] if left else None
    variables = {}
    for name, word in options:
        if name == "env":
            key, _, value = word.text.partition("=")
            variables[key] = Word(value, word.line)
    command = " ".join(word.text for word in left[1:])
    return Container(rest[0].line, image, tuple(options), variables, command)


def _options(words: Sequence[Word]) -> tuple[list[tuple[str, Word]], list[Word]]:
    """Options with their values, and what follows them."""
    found: list[tuple[str, Word]] = []
    place = 0
    while place < len(words) and words[place].text.startswith("-"):
        word = words[place]
        name, value = _option(word.text)
        place += 1
        if value is None and name not in SWITCHES and place < len(words):
            value, place = words[place].text, place + 1
        found.append((name, Word(value or "", word.line)))
    return found, list(words[place:])


def _option(text: str) -> tuple[str, str | None]:
    long = OPTION.fullmatch(text)
    if long:
        return long[1], long[2]
    letters = text[1:]
    if letters and all(letter in SHORT for letter in letters):
        return SHORT[letters[-1]], ""
    place = next((n for n, letter in enumerate(letters) if letter not in SHORT), len(letters))
    first, after = letters[place : place + 1], letters[place + 1 :]
    return LONG.get(first, first), after or None


def run_arguments(words: Sequence[Word]) -> list[tuple[str, Word]]:
    """Options alone, as a devcontainer's runArgs has them."""
    return _options(words)[0]


# ---- judging -----------------------------------------------------------------------------------------


def container_faults(box: Container) -> Iterator[Fault]:
    """Every fault of one container."""
    yield from _device_faults(box)
    yield from _runtime_faults(box)
    yield from _privilege_faults(box)
    yield from _memory_faults(box)
    yield from _variable_faults(box)
    if box.image and not box.builds:
        yield from unpinned_image(box.image)


def _device_faults(box: Container) -> Iterator[Fault]:
    devices = box.all("device")
    for word in devices:
        if "/dev/fdk" in word.text:
            yield Fault(word.line, "dev-fdk", word.text)
    kfd = next((word for word in devices if "/dev/kfd" in word.text), None)
    dri = next((word for word in devices if "/dev/dri" in word.text), None)
    dxg = next((word for word in devices if "/dev/dxg" in word.text), None)
    if kfd and dxg:
        yield Fault(dxg.line, "kfd-and-dxg", dxg.text)
    elif kfd and not dri and "$" not in box.devices.replace(kfd.text, ""):
        yield Fault(kfd.line, "kfd-without-dri", kfd.text)
    elif dri and not kfd and not dxg and _is_rocm_image(box) and "/dev/fdk" not in box.devices:
        yield Fault(dri.line, "dri-without-kfd", dri.text)
    for word in box.all("group-add"):
        if word.text == "render":
            yield Fault(word.line, "render-group-by-name", word.text)


def _is_rocm_image(box: Container) -> bool:
    return box.image is not None and not box.builds and bool(AMD_IMAGE.search(box.image.text))


def _runtime_faults(box: Container) -> Iterator[Fault]:
    for word in box.all("gpus"):
        if box.is_amd:
            yield Fault(word.line, "gpus-flag-for-amd", f"--gpus {word.text}")
    for word in box.all("runtime"):
        if word.text == "nvidia" and box.is_amd:
            yield Fault(word.line, "nvidia-runtime-for-amd", word.text)
    name = box.image.text if box.image else ""
    passed = box.devices or box.all("gpus") or box.all("runtime") or box.all("privileged")
    if re.match(r"(docker\.io/)?rocm/", name) and not passed:
        yield Fault(box.image.line if box.image else box.line, "rocm-without-devices", name)


def _privilege_faults(box: Container) -> Iterator[Fault]:
    for word in box.all("privileged"):
        if word.text.lower() != "false":
            yield Fault(word.line, "privileged", "privileged")
    for word in box.all("security-opt"):
        if re.fullmatch(r"seccomp[=:]unconfined", word.text):
            yield Fault(word.line, "seccomp-unconfined", word.text)
    for word in box.all("cap-add"):
        if word.text.upper().removeprefix("CAP_") == "SYS_PTRACE":
            yield Fault(word.line, "ptrace", word.text)


def _memory_faults(box: Container) -> Iterator[Fault]:
    ipc = any(word.text == "host" for word in box.all("ipc"))
    sizes = box.all("shm-size")
    if ipc and sizes:
        yield Fault(sizes[0].line, "shm-without-effect", sizes[0].text)
    mounted = any(
        "/dev/shm" in word.text for word in [*box.all("volume"), *box.all("tmpfs"), *box.all("mount")]
    )
    name = box.image.text if box.image else ""
    likely = TRAINS.search(box.command) or re.search(r"pytorch|rocm/vllm", name)
    if box.has_gpu and likely and not (ipc or sizes or mounted):
        yield Fault(box.line, "shm-missing", name or "a container with a GPU")


def _variable_faults(box: Container) -> Iterator[Fault]:
    for name, word in box.environment.items():
        if name == "NVIDIA_VISIBLE_DEVICES" and box.is_amd:
            yield Fault(word.line, "nvidia-variable-for-amd", name)
        if name == "HSA_OVERRIDE_GFX_VERSION":
            yield from override_value(word)
    if "/dev/dxg" in box.devices and box.is_amd and "HSA_ENABLE_DXG_DETECTION" not in box.environment:
        yield Fault(box.line, "dxg-without-detection", "/dev/dxg")


def override_value(word: Word) -> Iterator[Fault]:
    """A value of HSA_OVERRIDE_GFX_VERSION that isn't one."""
    text = word.text.strip("\"'")
    if text and "$" not in text and not re.fullmatch(r"\d{1,2}\.\d\.\d{1,2}", text):
        yield Fault(word.line, "override-not-a-version", text)


def unpinned_image(image: Word) -> Iterator[Fault]:
    """An image named without a version; names with variables and stages are the caller's to leave out."""
    name = image.text.strip("\"'")
    if not name or "$" in name or "{" in name or "@sha256:" in name or name == "scratch":
        return
    tag = name.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield Fault(image.line, "image-latest", name)
