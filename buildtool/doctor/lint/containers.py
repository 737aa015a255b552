"""Rules for containers that are started: by `docker run`, a compose service or a devcontainer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from buildtool.doctor.lint.rules import Checks, Fault, Word

AMD_IMAGE = re.compile(r"(^|/)rocm/|rocm|(^|[-_:.])hip([-_:.]|$)|gfx\d", re.I)
NVIDIA_IMAGE = re.compile(r"nvcr\.io/|(^|/)nvidia/|cuda", re.I)
TRAINS = re.compile(r"\btrain|torchrun|deepspeed|accelerate launch|num[_-]workers|finetun|fine-tun", re.I)
# options of `docker run` that take no value
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
        return [value for option, value in self.options if option == name]

    @property
    def image_name(self) -> str:
        """The image's name; empty where none is given."""
        return self.image.text if self.image else ""

    @property
    def devices(self) -> str:
        """All devices in one text."""
        return " ".join(word.text for word in self.all("device"))

    @property
    def is_amd(self) -> bool:
        """Whether it is for AMD's cards, by its image, devices and variables."""
        variables = any(name.startswith(("HSA_", "HIP_", "ROCR_", "AMD_")) for name in self.environment)
        devices = "/dev/kfd" in self.devices or "amd.com/gpu" in self.devices
        return bool(AMD_IMAGE.search(self.image_name)) or devices or variables

    @property
    def has_gpu(self) -> bool:
        """Whether any card is passed on."""
        return bool(re.search(r"/dev/(kfd|dxg|nvidia)|gpu=", self.devices) or self.all("gpus"))


container_checks = Checks[[Container]]()


@container_checks.add
def _devices(container: Container) -> Iterator[Fault]:
    devices = container.all("device")
    for word in devices:
        if "/dev/fdk" in word.text:
            yield Fault(word.line, "dev-fdk", word.text)
    kfd = next((word for word in devices if "/dev/kfd" in word.text), None)
    dri = next((word for word in devices if "/dev/dri" in word.text), None)
    dxg = next((word for word in devices if "/dev/dxg" in word.text), None)
    is_rocm_image = not container.builds and bool(AMD_IMAGE.search(container.image_name))
    if kfd and dxg:
        yield Fault(dxg.line, "kfd-and-dxg", dxg.text)
    elif kfd and not dri and "$" not in container.devices.replace(kfd.text, ""):
        yield Fault(kfd.line, "kfd-without-dri", kfd.text)
    elif dri and not kfd and not dxg and is_rocm_image and "/dev/fdk" not in container.devices:
        yield Fault(dri.line, "dri-without-kfd", dri.text)


@container_checks.add
def _groups(container: Container) -> Iterator[Fault]:
    for word in container.all("group-add"):
        if word.text == "render":
            yield Fault(word.line, "render-group-by-name", word.text)


@container_checks.add
def _runtimes(container: Container) -> Iterator[Fault]:
    for word in container.all("gpus"):
        if container.is_amd:
            yield Fault(word.line, "gpus-flag-for-amd", f"--gpus {word.text}")
    for word in container.all("runtime"):
        if word.text == "nvidia" and container.is_amd:
            yield Fault(word.line, "nvidia-runtime-for-amd", word.text)


@container_checks.add
def _no_devices(container: Container) -> Iterator[Fault]:
    passes_some = container.devices or any(container.all(name) for name in ("gpus", "runtime", "privileged"))
    if container.image and re.match(r"(docker\.io/)?rocm/", container.image.text) and not passes_some:
        yield Fault(container.image.line, "rocm-without-devices", container.image.text)


@container_checks.add
def _privileges(container: Container) -> Iterator[Fault]:
    for word in container.all("privileged"):
        if word.text.lower() != "false":
            yield Fault(word.line, "privileged", "privileged")
    for word in container.all("security-opt"):
        if re.fullmatch(r"seccomp[=:]unconfined", word.text):
            yield Fault(word.line, "seccomp-unconfined", word.text)
    for word in container.all("cap-add"):
        if word.text.upper().removeprefix("CAP_") == "SYS_PTRACE":
            yield Fault(word.line, "ptrace", word.text)


@container_checks.add
def _shared_memory(container: Container) -> Iterator[Fault]:
    ipc = any(word.text == "host" for word in container.all("ipc"))
    sizes = container.all("shm-size")
    if ipc and sizes:
        yield Fault(sizes[0].line, "shm-without-effect", sizes[0].text)
    mounts = [*container.all("volume"), *container.all("tmpfs"), *container.all("mount")]
    mounted = any("/dev/shm" in word.text for word in mounts)
    name = container.image_name
    needs_it = TRAINS.search(container.command) or re.search(r"pytorch|rocm/vllm", name)
    if container.has_gpu and needs_it and not (ipc or sizes or mounted):
        yield Fault(container.line, "shm-missing", name or "a container with a GPU")


@container_checks.add
def _variables(container: Container) -> Iterator[Fault]:
    for name, value in container.environment.items():
        if name == "NVIDIA_VISIBLE_DEVICES" and container.is_amd:
            yield Fault(value.line, "nvidia-variable-for-amd", name)
        if name == "HSA_OVERRIDE_GFX_VERSION":
            yield from override_value(value)
    detects = "HSA_ENABLE_DXG_DETECTION" in container.environment
    if "/dev/dxg" in container.devices and container.is_amd and not detects:
        yield Fault(container.line, "dxg-without-detection", "/dev/dxg")


@container_checks.add
def _image(container: Container) -> Iterator[Fault]:
    if container.image and not container.builds:
        yield from unpinned_image(container.image)


def override_value(word: Word) -> Iterator[Fault]:
    """A fault for a value of HSA_OVERRIDE_GFX_VERSION that isn't a version."""
    text = word.text.strip("\"'")
    if text and "$" not in text and not re.fullmatch(r"\d{1,2}\.\d\.\d{1,2}", text):
        yield Fault(word.line, "override-not-a-version", text)


def unpinned_image(image: Word) -> Iterator[Fault]:
    """A fault for an image named without a version, unless the name has variables."""
    name = image.text.strip("\"'")
    if not name or "$" in name or "{" in name or "@sha256:" in name or name == "scratch":
        return
    tag = name.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield Fault(image.line, "image-latest", name)


# ---- docker's command line ---------------------------------------------------------------------------


def container_of_command(words: Sequence[Word]) -> Container | None:
    """The container of `docker run ...`, from the words after the program's name; None for other verbs."""
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        rest = rest[1:]
    rest = rest[1:] if rest and rest[0].text == "container" else rest
    if not rest or rest[0].text not in ("run", "create"):
        return None
    options, after = _options(rest[1:])
    variables = {}
    for name, value in options:
        if name == "env":
            key, _, text = value.text.partition("=")
            variables[key] = Word(text, value.line)
    return Container(
        line=rest[0].line,
        image=after[0] if after else None,
        options=tuple(options),
        environment=variables,
        command=" ".join(word.text for word in after[1:]),
    )


def run_arguments(words: Sequence[Word]) -> list[tuple[str, Word]]:
    """Options of `docker run` alone, as a devcontainer's runArgs has them."""
    return _options(words)[0]


def _options(words: Sequence[Word]) -> tuple[list[tuple[str, Word]], list[Word]]:
    """Options by their long names with their values, and the words after them."""
    options: list[tuple[str, Word]] = []
    index = 0
    while index < len(words) and words[index].text.startswith("-"):
        word = words[index]
        name, value = _option(word.text)
        index += 1
        if value is None and name not in SWITCHES and index < len(words):
            value, index = words[index].text, index + 1
        options.append((name, Word(value or "", word.line)))
    return options, list(words[index:])


def _option(text: str) -> tuple[str, str | None]:
    """An option's long name, and its value where that is in the same word."""
    long = OPTION.fullmatch(text)
    if long:
        return long[1], long[2]
    letters = text[1:]
    if letters and all(letter in SHORT for letter in letters):
        return SHORT[letters[-1]], ""
    index = next((n for n, letter in enumerate(letters) if letter not in SHORT), len(letters))
    name, value = letters[index : index + 1], letters[index + 1 :]
    return LONG.get(name, name), value or None
