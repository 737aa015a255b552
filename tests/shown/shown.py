"""Every command that README and the site show, and how each is tested: run for real, or parsed with a reason.

A command stands in a fenced block of the kind `console`, after `$ `. `tests/docker/test_docs_run.py` runs all
but those in NOT_RUN, page by page. `tests/unit/docs` gives every one to the parser of its program.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "tools"))

from parsers import Refused, parse, programs  # noqa: E402

AMD, NVIDIA, WSL = "needs an AMD card", "needs an NVIDIA card", "needs Windows with WSL"
TORCH = "needs torch on the host; tests/docker runs the same program in the image"
PLACED = "needs torch on the host; tests/torch runs the verb with a small model"
LOADED = (
    "takes minutes; tests/loopback runs the verb against stand-ins, tests/unit those that show its report"
)
BEFORE = "`make test` has just run it"
INSIDE = "runs these tests"
REGISTRY = "needs a registry of the reader's; tests/docker pushes to one on loopback"
INSTALLED = "tests/docker/test_installed.py installs the package into an environment of its own"
MINUTES = "takes minutes; tests/docker makes a pruned image, a build and a probe run of their own"
AUDITED = "audits a whole image once more; another page's command does it with more outputs"
REPORTED = "`make images` has just audited it; tests/docker/test_docs_run.py puts its report there"
SIGNED = "reads the whole image; `make bench-sbom` writes, signs and verifies it, tests/unit/sbom a small one"
SQUASHFS = "needs squashfs-tools; `make bench-layout` makes the file and runs it"
REMOVES = "would remove what other tests use; tests/unit/build removes all of it from made places"
TUTORIAL = "tests/torch runs it with a small model"
MODEL = "qwen2.5-3b"
LORA = "--lora 16 --checkpointing --attention eager --tokens 1024 --batch 1 --accumulate 16"
OBSERVED = "takes minutes; `make bench-observe` does it with an image of its own"
NOT_RUN = {
    f"weir probe epochs {MODEL} {LORA} --samples 64 --json try.json": TUTORIAL,
    "weir probe watch --jsonl job/watch-here.jsonl --report watch.json --torch-allocator -- python3 -m "
    f"probes.training.worker {MODEL} {LORA} --samples 512 --epochs 3 "
    "--checkpoint-every 8 --out job": TUTORIAL,
    "weir probe epochs --from job --json job.json": TUTORIAL,
    "weir probe html job.json --out job.html": TUTORIAL,
    "weir probe epochs mytrain:model --data mytrain:samples --lora 16 --batch 1 --accumulate 16 "
    "--json mine.json": TUTORIAL,
    "weir fits qwen2.5-3b 'MI50 16GB' --task lora": "ends with 1, as it doesn't fit; tests/torch runs it",
    "weir probe epochs bert-base --batch 32,64 --precision fp32,amp-bf16 --processes 1,2 "
    "--scaling strong,weak --json epochs.json": TORCH,
    "weir probe html epochs.json": TORCH,
    "make images": BEFORE,
    "make docs": BEFORE,
    "make check": BEFORE,
    "make test": INSIDE,
    "make clean": "would remove the environment that runs these tests",
    "weir clean --caches": REMOVES,
    "weir clean --images": REMOVES,
    "weir clean --all": REMOVES,
    "make thorough": "takes longer than `make test`, which runs a part of it",
    "make mutants": "takes minutes, and is judged by a person",
    "weir audit weir/rocm:latest": AUDITED,
    "weir audit weir/rocm:latest --targets gfx906 --json rocm.json --html rocm.html": AUDITED,
    "weir audit weir/rocm:latest --targets gfx906 --json rocm.json": REPORTED,
    "weir audit weir/cpu:latest --json main.json": REPORTED,
    "weir prune weir/rocm:latest --targets gfx906 --dry-run": "audits a whole image once more; "
    "tests/docker does it with two of its libraries",
    "weir audit cpu.tar": AUDITED,
    "weir observe --keep images/cpu.keep --workload 'python3 tests/bench/observe_workload.py' "
    "weir/cpu": OBSERVED,
    "weir observe --keep images/cpu.keep weir/cpu -- python3 -m probes run --quick --out /tmp": OBSERVED,
    "weir observe --keep images/cpu.keep weir/cpu -- python3 -m probes --help": OBSERVED,
    "weir build cpu --keep images/cpu.keep --workload 'python3 tests/bench/observe_workload.py'": OBSERVED,
    "weir ablate compose.yaml api --workload 'python3 tests/bench/observe_workload.py'": OBSERVED,
    "make probe": MINUTES,
    "make images VARIANTS=rocm GPU_TARGETS=gfx906": MINUTES,
    "python3 -m venv .venv && .venv/bin/pip install -e .": INSTALLED,
    "weir build --update-lock": "fetches every input again",
    "weir build rocm --targets gfx803": MINUTES,
    "weir prune weir/rocm:latest --targets gfx906": MINUTES,
    "weir build --tag 'registry.example/team/{variant}:1.0' --push": REGISTRY,
    "weir build cpu --push --tag registry.example/team/cpu:1.0": REGISTRY,
    "weir build cpu --sqsh cpu.sqsh": SQUASHFS,
    "weir build cpu --push --tag registry.example/team/cpu:1.0 --sign key.pem": REGISTRY,
    "weir verify registry.example/team/cpu:1.0 --key key.pub": REGISTRY,
    "weir build cpu --layout cpu-signed --sign key.pem": SIGNED,
    "weir verify cpu-signed --key key.pub": SIGNED,
    "weir sbom weir/cpu:latest --output cpu.cdx.json": SIGNED,
    "weir sbom weir/cpu:latest --format spdx --output cpu.spdx.json": SIGNED,
    "weir build cpu --compression gzip --layout cpu-gzip": MINUTES,
    "docker compose run --rm probe python3 -m probes run --out /reports": MINUTES,
    "weir probe run --quick": TORCH,
    "weir probe throughput --url http://127.0.0.1:8000 --dim 12 --slo-ms 500": LOADED,
    "weir probe throughput --url http://127.0.0.1:8000 --into reports/throughput/scan.json": LOADED,
    "weir probe html reports/throughput/scan.json": LOADED,
    "weir probe throughput --model encoder --device cpu --backend pytorch --precision fp32 "
    "--max-batch 8 --trials 24 --aim 0 --out reports/served": TORCH,
    "weir probe throughput --url http://127.0.0.1:8000 --dim 128 --most-callers 8 --quick-load "
    "--into reports/served/*.json": LOADED,
    "weir probe html reports/served/*.json": LOADED,
    "weir probe compare before.json after.json": LOADED,
    "weir probe prometheus reports/throughput/scan.json": LOADED,
    "weir probe run spill scenarios --vram 4GiB": TORCH,
    "python3 -m probes run transfer breakeven --against /opt/torch-next/bin/python3": "needs a second Python "
    "with torch; tests/loopback runs two processes in turns, tests/unit the whole run",
    "weir probe throughput --device gpu --precision fp16 --precision fp32 "
    "--inputs copied --inputs in-place": NVIDIA,
    "weir probe throughput --model net.pt --shape 2x100 --shape 7x100": "needs a model of the reader's; "
    "tests/torch runs a TorchScript file",
    "weir probe place qwen2.5-3b --vram 4GiB --compare accelerate": PLACED,
    "weir probe place qwen2.5-3b --vram 4GiB --compare accelerate --compare resident": PLACED,
    "weir probe place ./my-checkpoint --vram 4GiB --host 12GiB --compare accelerate": PLACED,
    "weir probe fit qwen2.5-0.5b --measure cpu --vram 3GiB --tokens 256 --limit 100": PLACED,
    "weir probe fit opt-folder/config.json --measure cpu --vram 2GiB --tokens 256": PLACED,
    "docker compose up -d --wait api-cuda": NVIDIA,
    "docker compose up -d --wait api-wsl": WSL,
    "RENDER_GID=$(stat -c %g /dev/dri/renderD128) docker compose up -d --wait api-rocm": AMD,
    "RENDER_GID=$(stat -c %g /dev/dri/renderD128) make probe PROBE=probe-rocm": AMD,
    "make probe PROBE=probe-cuda": NVIDIA,
    "make probe PROBE=probe-wsl": WSL,
}

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
INLINE = re.compile(r"(?<!`)`(?P<text>(?:weir|make|python3 -m (?:buildtool|probes)) [^`\n]+)`(?!`)")
SUBSTITUTED = re.compile(r"<\(([^()]+)\)")  # a command whose output another one reads
SETTINGS = re.compile(r"^(?:\w+=(?:\$\([^)]*\)|'[^']*'|\S+)\s+)+")
ORDER = ("README.md", "docs/tutorial", "docs/howto", "CONTRIBUTING.md", "docs")
COMPOSE_VERBS = {"up", "down", "run", "logs", "ps", "config"}
NOT_SHOWN = {"docs/tools"}


@dataclass(frozen=True)
class Command:
    """One shown command, as it is typed, without prompt and comment."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of the program, without settings in front."""
        return shlex.split(SETTINGS.sub("", self.text))

    @property
    def settings(self) -> list[str]:
        """The names of the variables that are set in front."""
        found = SETTINGS.match(self.text)
        return re.findall(r"(?:^|\s)(\w+)=", found[0]) if found else []


class Unaccounted(Exception):
    """A command that nothing tests."""


def pages() -> list[Path]:
    """README and the site's pages that are files, in the order in which they are read."""
    found: list[Path] = []
    for place in ORDER:
        path = ROOT / place
        found += [path] if path.is_file() else sorted(path.rglob("*.md"))
    return [path for path in dict.fromkeys(found) if not _inside(path, NOT_SHOWN)]


def _inside(path: Path, folders: set[str]) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def commands(page: Path) -> list[Command]:
    """The commands of one page, in order."""
    return [
        Command(page.relative_to(ROOT).as_posix(), text) for text in typed(page.read_text(encoding="utf-8"))
    ]


def typed(markdown: str) -> Iterator[str]:
    """What stands after the prompts of console blocks; a line that ends with a backslash goes on."""
    for block in FENCE.finditer(markdown):
        if block["kind"] == "console":
            for line in block["body"].replace("\\\n", " ").splitlines():
                if line.strip().startswith("$ "):
                    yield " ".join(uncommented(line.strip()[2:]).split())


def uncommented(line: str) -> str:
    """The line without its comment."""
    return re.sub(r"\s#\s.*", "", line)


def forwarded(words: Sequence[str]) -> list[str]:
    """`weir probe ...` as the command line that its words are passed on to; others as they are."""
    return ["python3", "-m", "probes", *words[2:]] if list(words[:2]) == ["weir", "probe"] else list(words)


def check(command: Command) -> None:
    """Parse a command by its program's own means. Raises Refused, and Unaccounted where there are none."""
    for inner in SUBSTITUTED.findall(command.text):
        check(Command(command.page, inner))
    words = forwarded(command.words)
    mains = programs()
    if words[0] == "weir":
        parse(mains["weir"], words[1:])
    elif words[:2] == ["python3", "-m"] and f"python3 -m {words[2]}" in mains:
        parse(mains[f"python3 -m {words[2]}"], words[3:])
    elif words[0] == "make":
        check_make(words[1:], command.settings)
    elif words[:3] == ["python3", "-m", "venv"] and "pip install" in command.text:
        check_install(command.text)
    elif words[:2] == ["docker", "compose"]:
        check_compose(words[2:], command.settings)
    elif command.text in NOT_RUN:
        raise Unaccounted(f"{command.page}: `{command.text}` is neither run nor parsed: tests/shown/shown.py")


def check_install(text: str) -> None:
    """Does a new environment get this checkout, with extras that it has? Raises Refused."""
    found = re.fullmatch(r"python3 -m venv (\S+) && (\S+)/bin/pip install -e '?\.(?:\[([a-z,-]+)\])?'?", text)
    if not found or found[1] != found[2]:
        raise Refused(f"`{text}` doesn't install this checkout into the environment that it makes")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if not set((found[3] or "").split(",")) - {""} <= set(extras):
        raise Refused(f"the package has no such extras: {found[3]}")


def check_make(words: Sequence[str], settings: Sequence[str]) -> None:
    """Does the Makefile have these targets and variables? Raises Refused."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    assigned = [word.split("=")[0] for word in words if "=" in word]
    for name in assigned:
        if f"$({name})" not in text:
            raise Refused(f"the Makefile doesn't use {name}")
    for word in words:
        if "=" not in word and word not in targets:
            raise Refused(f"the Makefile has no target {word}")
    check_settings(settings)


def check_compose(words: Sequence[str], settings: Sequence[str]) -> None:
    """Are these services of ours and verbs of compose, and do we have what runs in one? Raises Refused."""
    services = compose_services()
    verb = next((word for word in words if word in COMPOSE_VERBS), None)
    if verb is None:
        raise Refused(f"no verb of compose in {list(words)}")
    named = [word for word in words[words.index(verb) + 1 :] if not word.startswith("-")]
    inside = named[1:] and list(words[words.index(named[0]) + 1 :]) if verb == "run" else []
    unknown = set(named[:1] if verb == "run" else named) - services
    if unknown:
        raise Refused(f"compose.yaml has no service {', '.join(sorted(unknown))}")
    if inside:
        check(Command("compose", shlex.join(inside)))
    check_settings(settings)


@cache
def compose_services() -> frozenset[str]:
    """The services of all compose files."""
    files = (ROOT / "compose.yaml", *(ROOT / "compose").glob("*.yaml"))
    return frozenset(name for file in files for name in yaml.safe_load(file.read_text())["services"])


def check_settings(names: Sequence[str]) -> None:
    """Does any compose file read these variables? Raises Refused."""
    texts = [path.read_text() for path in (ROOT / "compose.yaml", *(ROOT / "compose").glob("*.yaml"))]
    for name in names:
        if not any(f"${{{name}" in text or f"{name}:" in text for text in texts):
            raise Refused(f"no compose file reads {name}")


def mentions(page: Path) -> Iterator[str]:
    """Commands within a sentence, in backticks."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for span in INLINE.finditer(text):
        yield span["text"]


def check_mention(text: str) -> None:
    """Do the verbs, targets and options of a mention exist? It may be incomplete. Raises Refused."""
    words = forwarded(re.sub(r"[()|]", " ", text).split())
    if words[0] == "make":
        check_make([word for word in words[1:] if re.fullmatch(r"[a-z-]+|[A-Z_]+=\S*", word)], ())
        return
    program, rest = ("weir", words[1:]) if words[0] == "weir" else (" ".join(words[:3]), words[3:])
    verb = [word for word in rest[:2] if re.fullmatch(r"[a-z]+", word)]
    known = usage(program, tuple(verb))
    for option in (word.split("=")[0] for word in rest if word.startswith("--")):
        if option not in known:
            raise Refused(f"`{text}`: {program} {' '.join(verb)} has no option {option}")


@cache
def usage(program: str, verb: tuple[str, ...]) -> frozenset[str]:
    """The options of a verb. Raises Refused where there is no such verb."""
    from parsers import parser_of, subparsers

    main = programs()[program]
    parser = parser_of(main, [*verb, "--help"])
    for word in verb:
        below = subparsers(parser)
        if word in below:
            parser = below[word]
        elif below:
            raise Refused(f"{program} has no verb {word}")
    return frozenset(name for action in parser._actions for name in action.option_strings)
