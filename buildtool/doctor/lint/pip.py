"""Rules for what pip is asked to install, on a command line or in a requirements file."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from buildtool.doctor.lint.rules import Checks, Fault, Word, extra_needed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TORCH = ("torch", "torchvision", "torchaudio")
INDEX = re.compile(r"/whl/(?:nightly/|test/)?(cpu|cu\d{2,3}|rocm[\d.]+|xpu)\b")
# torch -> torchvision of the same release (PyTorch, previous versions; TheRock RELEASES.md)
VISION = {
    "2.0": "0.15", "2.1": "0.16", "2.2": "0.17", "2.3": "0.18", "2.4": "0.19", "2.5": "0.20", "2.6": "0.21",
    "2.7": "0.22", "2.8": "0.23", "2.9": "0.24", "2.10": "0.25", "2.11": "0.26", "2.12": "0.27", "2.13":
    "0.28",
}  # fmt: skip
# index -> the newest torch in it (PyTorch, previous versions; InvokeAI issue 7146 for 5.6)
NEWEST = {
    "rocm5.6": (2, 2), "rocm5.7": (2, 3), "rocm6.0": (2, 4), "rocm6.1": (2, 6), "rocm6.2": (2, 5),
    "rocm6.2.4": (2, 7), "rocm6.3": (2, 9), "rocm6.4": (2, 9), "cu118": (2, 7), "cu121": (2, 5), "cu124":
    (2, 6),
}  # fmt: skip
# torch -> Pythons it has wheels for (PyTorch RELEASE.md, release compatibility matrix)
PYTHONS = {
    (2, 0): (8, 11), (2, 1): (8, 11), (2, 2): (8, 12), (2, 3): (8, 12), (2, 4): (8, 12), (2, 5): (9, 13),
    (2, 6): (9, 13), (2, 7): (9, 13), (2, 8): (9, 13), (2, 9): (10, 14), (2, 10): (10, 14), (2, 11): (10, 14),
    (2, 12): (10, 14), (2, 13): (10, 15), (2, 14): (10, 15),
}  # fmt: skip
CUDA_PACKAGES = re.compile(
    r"nvidia-(cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvtx|nvjitlink)|cupy-cuda|onnxruntime-gpu$",
    re.I,
)
ROCM_PACKAGES = re.compile(
    r"pytorch-triton-rocm|triton-rocm|rocm-sdk|amd-torch|jax-rocm|onnxruntime-rocm", re.I
)
OPTIONS_WITH_VALUE = {
    "-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "-f",
    "--find-links", "-t", "--target", "--prefix", "--root", "--python-version", "--platform", "--abi",
    "--implementation", "--timeout", "--retries", "--proxy", "--cert", "--cache-dir", "--upgrade-strategy",
    "--progress-bar", "--src", "-e", "--editable", "--no-binary", "--only-binary", "--trusted-host",
    "--report", "--log", "-p", "--python", "--index", "--default-index", "--config-settings", "-C",
    "--index-strategy", "--torch-backend",
}  # fmt: skip
# other spellings of an option -> the one that the rules look for
SYNONYMS = {
    "-i": "--index-url",
    "--default-index": "--index-url",
    "-f": "--find-links",
    "--index": "--extra-index-url",
}


@dataclass(frozen=True)
class PipRequest:
    """What one pip command or requirements file asks for."""

    line: int
    requirements: tuple[tuple["Requirement", Word], ...]
    options: tuple[tuple[str, Word], ...]
    unreadable: tuple[Word, ...] = ()  # lines of a file that pip would refuse

    def all(self, name: str) -> list[Word]:
        """The values of an option."""
        return [value for option, value in self.options if option == name]

    def torch(self) -> list[tuple["Requirement", Word]]:
        """The requirements of torch, torchvision and torchaudio."""
        return [(each, word) for each, word in self.requirements if each.name.lower() in TORCH]

    @property
    def flavours(self) -> set[str]:
        """The builds that indexes and local versions name: cpu, cu130, rocm7.2."""
        flavours = {match[1] for _, value in self.options for match in INDEX.finditer(value.text)}
        for each, _ in self.requirements:
            local = re.search(r"\+(cpu|cu\d{2,3}|rocm[\d.]+)", f"{each.specifier} {each.url or ''}")
            flavours |= {local[1]} if local else set()
        return flavours

    @property
    def apis(self) -> set[str]:
        """The flavours without their versions: cpu, cu, rocm, xpu."""
        return {re.sub(r"[\d.]+", "", flavour) for flavour in self.flavours}


def requirement(text: str) -> "Requirement | None":
    """A requirement as packaging reads it; None for what it refuses."""
    with extra_needed():
        from packaging.requirements import InvalidRequirement, Requirement
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def request_of_command(words: Sequence[Word]) -> PipRequest:
    """What `pip install ...` asks for, from the words after `install`."""
    options: list[tuple[str, Word]] = []
    requirements = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, equals, value = word.text.partition("=")
        if not word.text.startswith("-"):
            parsed = requirement(word.text)
            requirements += [(parsed, word)] if parsed else []
        elif equals and name.startswith("--"):
            options.append((SYNONYMS.get(name, name), Word(value, word.line)))
        elif word.text in OPTIONS_WITH_VALUE and index < len(words):
            options.append((SYNONYMS.get(word.text, word.text), words[index]))
            index += 1
        else:
            options.append((word.text, Word("", word.line)))
    return PipRequest(words[0].line if words else 0, tuple(requirements), tuple(options))


def line_of(request: PipRequest, text: str) -> int:
    """The line of the first requirement or option that contains a text; the request's own otherwise."""
    texts = [(str(each), word.line) for each, word in request.requirements]
    texts += [(value.text, value.line) for _, value in request.options]
    return next((line for candidate, line in texts if text in candidate), request.line)


# ---- rules, wherever pip is asked --------------------------------------------------------------------

request_checks = Checks[[PipRequest]]()


@request_checks.add
def _several_indexes(request: PipRequest) -> Iterator[Fault]:
    torch = request.torch()
    indexes, extra = request.all("--index-url"), request.all("--extra-index-url")
    exact = all(re.fullmatch(r"==[\w.]+\+[\w.]+", str(each.specifier)) or each.url for each, _ in torch)
    if not torch or not extra or exact:
        return
    if indexes:
        yield Fault(extra[0].line, "indexes-mixed", extra[0].text)
    elif INDEX.search(" ".join(word.text for word in extra)):
        yield Fault(extra[0].line, "extra-index-for-torch", extra[0].text)


@request_checks.add
def _builds_mixed(request: PipRequest) -> Iterator[Fault]:
    names = [each.name for each, _ in request.requirements]
    apis = request.apis
    apis |= {"cu"} if any(map(CUDA_PACKAGES.match, names)) else set()
    apis |= {"rocm"} if any(map(ROCM_PACKAGES.match, names)) else set()
    if {"cu", "rocm"} <= apis:
        flavours = ", ".join(sorted(request.flavours))
        yield Fault(line_of(request, "rocm"), "builds-mixed", flavours or "packages")


@request_checks.add
def _not_in_index(request: PipRequest) -> Iterator[Fault]:
    """A torch that is newer than the newest in the only index."""
    indexes = {match[1] for word in request.all("--index-url") for match in INDEX.finditer(word.text)}
    if len(indexes) != 1 or request.all("--extra-index-url"):
        return
    (index,) = indexes
    newest = NEWEST.get(index)
    for each, word in request.torch():
        least = least_version(str(each.specifier))
        if newest and each.name.lower() == "torch" and least and least > newest:
            yield Fault(word.line, "torch-not-in-index", f"{word.text} from {index}")


@request_checks.add
def _pairs(request: PipRequest) -> Iterator[Fault]:
    """A torchvision or torchaudio of another release than torch."""
    pinned = {}
    for each, word in request.torch():
        match = re.match(r"==(\d{1,9}\.\d{1,9})(?!\d)", str(each.specifier))
        if match:
            pinned[each.name.lower()] = (match[1], word)
    if "torch" not in pinned:
        return
    release = pinned["torch"][0]
    audio = release if int(release.partition(".")[2]) <= 11 else None
    for name, right in {"torchvision": VISION.get(release), "torchaudio": audio}.items():
        if right and name in pinned and pinned[name][0] != right:
            version, word = pinned[name]
            yield Fault(word.line, "torch-pair", f"torch {release} with {name} {version}, not {right}")


def python_faults(request: PipRequest, minor: int) -> Iterator[Fault]:
    """A torch without wheels for Python 3.`minor`."""
    for each, word in request.torch():
        least = least_version(str(each.specifier))
        bounds = PYTHONS.get(least) if least and each.name.lower() == "torch" else None
        pinned = str(each.specifier).startswith("==")
        if bounds and (minor < bounds[0] or (pinned and minor > bounds[1])):
            yield Fault(word.line, "python-without-wheel", f"{word.text} on Python 3.{minor}")


def least_version(specifier: str) -> tuple[int, int] | None:
    """The lowest major and minor that a specifier accepts; None where it has no lower bound."""
    match = re.search(r"(?:==|>=|~=|>)\s*(\d{1,9})\.(\d{1,9})(?!\d)", specifier)
    return (int(match[1]), int(match[2])) if match else None


# ---- requirements files ------------------------------------------------------------------------------


def lint_requirements(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a requirements file; `for_cpu` where its name says that it is for CPUs."""
    request = request_of_file(text)
    for word in request.unreadable:
        yield Fault(word.line, "requirement-unreadable", word.text[:80])
    yield from request_checks(request)
    if for_cpu:
        yield from _gpu_builds(request)


def _gpu_builds(request: PipRequest) -> Iterator[Fault]:
    """What doesn't belong in a file for CPUs."""
    for flavour in sorted(request.flavours - {"cpu"}):
        yield Fault(line_of(request, flavour), "gpu-wheel-in-cpu-file", flavour)
    for each, word in request.requirements:
        if CUDA_PACKAGES.match(each.name) or ROCM_PACKAGES.match(each.name):
            yield Fault(word.line, "gpu-wheel-in-cpu-file", word.text)
        elif each.name.lower() == "torch" and not request.flavours and not each.url:
            yield Fault(word.line, "plain-torch", word.text)


def request_of_file(text: str) -> PipRequest:
    """What a requirements file asks for."""
    options: list[tuple[str, Word]] = []
    requirements, refused = [], []
    for word in _joined(text):
        line = re.sub(r"(^|\s)#.*$", "", word.text).strip()
        if not line:
            continue
        if line.startswith("-"):
            name, value = [*re.split(r"[=\s]\s*", line, maxsplit=1), ""][:2]
            options.append((SYNONYMS.get(name, name), Word(value, word.line)))
            continue
        parsed = requirement(re.split(r"\s--?\w", line, maxsplit=1)[0].strip())
        if parsed:
            requirements.append((parsed, Word(line, word.line)))
        elif not re.match(r"[\w+.-]*://|\.{0,2}/|\.$|[\w./-]+\.(whl|zip|tar\.gz)(\[|$)|git\+|\$\{", line):
            refused.append(Word(line, word.line))
    return PipRequest(1, tuple(requirements), tuple(options), tuple(refused))


def _joined(text: str) -> Iterator[Word]:
    """Lines, those that end in a backslash joined with what follows."""
    waiting, start = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        start = start if waiting else number
        if line.rstrip().endswith("\\"):
            waiting += line.rstrip()[:-1] + " "
            continue
        yield Word(waiting + line, start)
        waiting = ""
    if waiting:
        yield Word(waiting, start)
