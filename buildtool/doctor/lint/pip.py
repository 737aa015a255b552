"""What pip is asked for, on a command line or in a requirements file: which torch comes of it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from buildtool.doctor.lint.rules import Fault, Word, extra_needed

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
SAME = {
    "-i": "--index-url",
    "--default-index": "--index-url",
    "-f": "--find-links",
    "--index": "--extra-index-url",
}


@dataclass(frozen=True)
class PipRequest:
    """What one pip command or file asks for."""

    line: int
    requirements: tuple[tuple["Requirement", Word], ...]
    options: tuple[tuple[str, Word], ...]
    unreadable: tuple[Word, ...] = ()

    def all(self, name: str) -> list[Word]:
        """The values of an option."""
        return [word for one, word in self.options if one == name]

    def torch(self) -> list[tuple["Requirement", Word]]:
        """What of torch's family is asked for."""
        return [(one, word) for one, word in self.requirements if one.name.lower() in TORCH]

    @property
    def flavours(self) -> set[str]:
        """cpu, cu130, rocm7.2: of the indexes and of local versions."""
        found = {match[1] for _, word in self.options for match in INDEX.finditer(word.text)}
        for one, _ in self.requirements:
            local = re.search(r"\+(cpu|cu\d{2,3}|rocm[\d.]+)", f"{one.specifier} {one.url or ''}")
            found |= {local[1]} if local else set()
        return found


def requirement(text: str) -> "Requirement | None":
    """A requirement as packaging reads it; None for what it refuses."""
    with extra_needed():
        from packaging.requirements import InvalidRequirement, Requirement
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def request_of_command(words: Sequence[Word]) -> PipRequest | None:
    """What `pip install ...` asks for, from the words after `install`."""
    options: list[tuple[str, Word]] = []
    found = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        name, equals, value = word.text.partition("=")
        if not word.text.startswith("-"):
            parsed = requirement(word.text)
            found += [(parsed, word)] if parsed else []
        elif equals and name.startswith("--"):
            options.append((SAME.get(name, name), Word(value, word.line)))
        elif word.text in OPTIONS_WITH_VALUE and place < len(words):
            options.append((SAME.get(word.text, word.text), words[place]))
            place += 1
        else:
            options.append((word.text, Word("", word.line)))
    return PipRequest(words[0].line if words else 0, tuple(found), tuple(options))


def pip_faults(asked: PipRequest) -> Iterator[Fault]:
    """Faults that don't depend on where it is asked."""
    torch = asked.torch()
    indexes, extra = asked.all("--index-url"), asked.all("--extra-index-url")
    exact = all(_is_exact(str(one.specifier)) or one.url for one, _ in torch)
    if torch and indexes and extra and not exact:
        yield Fault(extra[0].line, "indexes-mixed", extra[0].text)
    elif torch and extra and not indexes and not exact and INDEX.search(" ".join(w.text for w in extra)):
        yield Fault(extra[0].line, "extra-index-for-torch", extra[0].text)
    kinds = {re.sub(r"[\d.]+", "", flavour) for flavour in asked.flavours}
    if {"cu", "rocm"} <= kinds or _package_kinds(asked) >= {"cu", "rocm"}:
        yield Fault(line_of(asked, "rocm"), "builds-mixed", ", ".join(sorted(asked.flavours)) or "packages")
    yield from _index_faults(asked, torch)
    yield from _pair_faults(torch)


def _is_exact(specifier: str) -> bool:
    return bool(re.fullmatch(r"==[\w.]+\+[\w.]+", specifier))


def _package_kinds(asked: PipRequest) -> set[str]:
    names = " ".join(one.name for one, _ in asked.requirements)
    local = {re.sub(r"[\d.]+", "", flavour) for flavour in asked.flavours} & {"cu", "rocm"}
    found = {"cu"} if any(CUDA_PACKAGES.match(name) for name in names.split()) else set()
    return found | ({"rocm"} if any(ROCM_PACKAGES.match(name) for name in names.split()) else set()) | local


def line_of(asked: PipRequest, text: str) -> int:
    """The line of the first requirement or option that contains a text; the request's own otherwise."""
    texts = [(str(one), word.line) for one, word in asked.requirements]
    texts += [(word.text, word.line) for _, word in asked.options]
    return next((line for one, line in texts if text in one), asked.line)


def _index_faults(asked: PipRequest, torch: list[tuple["Requirement", Word]]) -> Iterator[Fault]:
    """A version that the only index doesn't have."""
    only = {match[1] for word in asked.all("--index-url") for match in INDEX.finditer(word.text)}
    newest = NEWEST.get(next(iter(only))) if len(only) == 1 and not asked.all("--extra-index-url") else None
    for one, word in torch:
        least = least_version(str(one.specifier))
        if newest and one.name.lower() == "torch" and least and least > newest:
            yield Fault(word.line, "torch-not-in-index", f"{word.text} from {next(iter(only))}")


def least_version(specifier: str) -> tuple[int, int] | None:
    """The lowest major and minor that a specifier accepts, where it has a lower bound."""
    found = re.search(r"(?:==|>=|~=|>)\s*(\d{1,9})\.(\d{1,9})(?!\d)", specifier)
    return (int(found[1]), int(found[2])) if found else None


def _pair_faults(torch: list[tuple["Requirement", Word]]) -> Iterator[Fault]:
    pinned = {}
    for one, word in torch:
        match = re.match(r"==(\d{1,9}\.\d{1,9})(?!\d)", str(one.specifier))
        if match:
            pinned[one.name.lower()] = (match[1], word)
    if "torch" not in pinned:
        return
    release = pinned["torch"][0]
    wanted = {"torchvision": VISION.get(release), "torchaudio": release if _minor(release) <= 11 else None}
    for name, right in wanted.items():
        if right and name in pinned and pinned[name][0] != right:
            yield Fault(
                pinned[name][1].line,
                "torch-pair",
                f"torch {release} with {name} {pinned[name][0]}, not {right}",
            )


def _minor(release: str) -> int:
    return int(release.partition(".")[2])


def python_faults(asked: PipRequest, minor: int) -> Iterator[Fault]:
    """A torch without wheels for Python 3.`minor`."""
    for one, word in asked.torch():
        least = least_version(str(one.specifier))
        bounds = PYTHONS.get(least) if least and one.name.lower() == "torch" else None
        pinned = str(one.specifier).startswith("==")
        if bounds and (minor < bounds[0] or (pinned and minor > bounds[1])):
            yield Fault(word.line, "python-without-wheel", f"{word.text} on Python 3.{minor}")


# ---- requirements files ------------------------------------------------------------------------------


def request_of_file(text: str) -> PipRequest:
    """What a requirements file asks for; `unreadable` are the lines that pip would refuse."""
    options: list[tuple[str, Word]] = []
    found, refused = [], []
    for word in _joined(text):
        line = re.sub(r"(^|\s)#.*$", "", word.text).strip()
        if not line:
            continue
        if line.startswith("-"):
            name, value = [*re.split(r"[=\s]\s*", line, maxsplit=1), ""][:2]
            options.append((SAME.get(name, name), Word(value, word.line)))
            continue
        parsed = requirement(re.split(r"\s--?\w", line, maxsplit=1)[0].strip())
        if parsed:
            found.append((parsed, Word(line, word.line)))
        elif not re.match(r"[\w+.-]*://|\.{0,2}/|\.$|[\w./-]+\.(whl|zip|tar\.gz)(\[|$)|git\+|\$\{", line):
            refused.append(Word(line, word.line))
    return PipRequest(1, tuple(found), tuple(options), tuple(refused))


def _joined(text: str) -> Iterator[Word]:
    """Lines, with those that end in a backslash put together."""
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


def lint_requirements(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a requirements file."""
    asked = request_of_file(text)
    for word in asked.unreadable:
        yield Fault(word.line, "requirement-unreadable", word.text[:80])
    yield from pip_faults(asked)
    if not for_cpu:
        return
    for flavour in sorted(asked.flavours - {"cpu"}):
        yield Fault(line_of(asked, flavour), "gpu-wheel-in-cpu-file", flavour)
    for one, word in asked.requirements:
        if CUDA_PACKAGES.match(one.name) or ROCM_PACKAGES.match(one.name):
            yield Fault(word.line, "gpu-wheel-in-cpu-file", word.text)
        elif one.name.lower() == "torch" and not asked.flavours and not one.url:
            yield Fault(word.line, "plain-torch", word.text)
