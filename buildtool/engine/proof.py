"""The proof of an image: judges what images/smoke.py printed in a fresh container. Pure."""

import json
from dataclasses import asdict, astuple, dataclass
from typing import Any

from buildtool.core.errors import ProofFailed
from buildtool.core.model import Resolved, TorchBuild, Variant
from buildtool.core.shipped import state_directory
from probes.core.codec import decode, encode, load
from probes.core.invocation import host_command
from probes.core.quoting import command, terminal

COMMAND = ["python3", "-B", "/opt/weir/app/smoke.py"]
SERVICE_ALONE = [*COMMAND, "--service"]  # where the rest was seen in an image with the same layers below
MARK = "SMOKE "
MAX_FACTS = 64 << 10  # characters of the line; an honest one has 400
SHOWN_LINES = 8  # of a failed container's output
SHOWN_CHARACTERS = 500  # of each line
_OF_THE_SERVICE = ("python", "uid", "service", "probes")  # facts that SERVICE_ALONE gives
_MAX_TEXT = 1000  # characters of one fact; rocminfo's are the longest, 200


class MalformedFacts(ProofFailed):
    """A container's output doesn't have the form that images/smoke.py writes."""


@dataclass(frozen=True)
class _Rocminfo:
    present: bool
    exit_code: int = 0
    said: str = ""


@dataclass(frozen=True)
class Facts:
    """What images/smoke.py reported about its image. Texts come from the image and may hold anything."""

    python: str
    uid: int
    torch_version: str
    hip: str | None
    cuda: str | None
    product_ok: bool
    service: bool
    probes: bool
    rocminfo: str  # "not installed", or its exit code and first line


@dataclass(frozen=True)
class Proof:
    """What was observed of an image."""

    python: str
    torch_version: str
    torch_build: TorchBuild
    rocminfo: str  # "not installed", or its first line
    seen_in: str = ""  # the digest of the image in which torch and rocminfo ran, where that is another one


@dataclass(frozen=True)
class Seen:
    """What was observed of an image, for those that differ from it in the service alone."""

    facts: Facts
    digest: str


def judge(
    variant: Variant,
    resolved: Resolved,
    *,
    exit_code: int,
    stdout: str,
    stderr: str,
    below: Seen | None = None,
) -> Proof:
    """The proof of an image. Raises ProofFailed, which names what isn't as the variant promises.

    `below` is what was seen of the layers below the service, where SERVICE_ALONE has run.
    """
    new = f"{variant.ref} stays as it was: the new image"
    try:
        facts = facts_of(stdout, below)
    except MalformedFacts as error:
        raise ProofFailed(f"{new}: {error.message}", _look_inside(variant)) from error
    if exit_code or facts is None:
        raise ProofFailed(
            f"{new} doesn't run: `{' '.join(COMMAND)}` exited with {exit_code}\n"
            + output_tail(stdout + stderr),
            _look_inside(variant),
        )
    build = build_of(facts.hip, facts.cuda)
    version = terminal(facts.torch_version)
    if build is not resolved.torch_build:
        raise ProofFailed(
            f"{new} holds torch {version}, a {build.value} build; "
            f"source {resolved.torch_source} promises a {resolved.torch_build.value} build",
            f"a requirement replaced torch: pin it in `wheels`, or look at the plan: {host_command()} plan",
        )
    if not facts.product_ok:
        raise ProofFailed(f"{new} has a torch {version} that computes a wrong matrix product")
    if not facts.python.startswith(resolved.python + "."):
        raise ProofFailed(f"{new} runs Python {terminal(facts.python)}, its wheels are for {resolved.python}")
    missing = [name for name in ("service", "probes") if not getattr(facts, name)]
    if missing:
        raise ProofFailed(f"{new} lacks its payload: {', '.join(missing)} can't be imported")
    return Proof(facts.python, facts.torch_version, build, facts.rocminfo, below.digest if below else "")


def facts_of(stdout: str, below: Seen | None = None) -> Facts | None:
    """What images/smoke.py reported; None when it printed nothing.

    What SERVICE_ALONE leaves out is taken from `below`.
    Raises MalformedFacts for an answer of another form: the image's maker wrote it.
    """
    line = next((text for text in stdout.splitlines() if text.startswith(MARK)), None)
    if line is None:
        return None
    if len(line) > MAX_FACTS:
        raise MalformedFacts(f"its smoke test answers with {len(line):,} characters")
    try:
        top: Any = load(line.removeprefix(MARK))
        rest: dict[str, Any]
        if below:
            rest = asdict(below.facts)
        else:
            rest = {"torch_version": top["torch"]["version"], "rocminfo": _rocminfo(top["rocminfo"])}
            top |= top["torch"]
        facts = decode(Facts, {**top, **rest, **{key: top[key] for key in _OF_THE_SERVICE}}, "answer")
        if any(isinstance(fact, str) and len(fact) > _MAX_TEXT for fact in astuple(facts)):
            raise ValueError("a fact of more characters than any has")
    except (ValueError, TypeError, LookupError) as error:
        shown = terminal(line[:SHOWN_CHARACTERS])
        raise MalformedFacts(f"its smoke test doesn't answer as images/smoke.py does: {shown}") from error
    return facts


def facts_text(facts: Facts) -> str:
    """The facts in one line."""
    return f"torch {terminal(facts.torch_version)} computes, rocminfo {terminal(facts.rocminfo)}"


def output_tail(output: str) -> str:
    """The last lines of a container's output, quoted: the image's maker chose the characters."""
    lines = output.strip().splitlines()[-SHOWN_LINES:]
    return "\n".join(terminal(line[:SHOWN_CHARACTERS]) for line in lines)


def to_seal(proof: Proof | Seen) -> str:
    """A proof as text, kept under the image's digest: one proof per digest is enough."""
    return json.dumps(encode(proof))


def from_seal(text: str) -> Proof:
    """The proof that `to_seal` wrote. Raises ValueError for a damaged text."""
    return decode(Proof, load(text), "proof")


def seen_from_seal(text: str) -> Seen:
    """The observation that `to_seal` wrote. Raises ValueError for a damaged text."""
    return decode(Seen, load(text), "seen")


def build_of(hip: str | None, cuda: str | None) -> TorchBuild:
    """Which build a torch is, by `torch.version`: a file's name or version label proves nothing."""
    if hip:
        return TorchBuild.ROCM
    return TorchBuild.CUDA if cuda else TorchBuild.CPU


def _rocminfo(answer: object) -> str:
    report = decode(_Rocminfo, answer, "rocminfo")
    if not report.present:
        return "not installed"
    return f"runs (exit {report.exit_code}: {report.said.splitlines()[0] if report.said else 'silent'})"


def _look_inside(variant: Variant) -> str:
    """The commands that start a failed image, which has no name of its own in the engine."""
    run = command("docker", "run", "--rm", "-it", "--entrypoint", "sh", "look")
    if variant.dockerfile:
        bake = command("docker", "buildx", "bake", "-f", "-", "--set", f"{variant.name}.tags=look")
        return f"look inside: {host_command()} plan {variant.name} | jq .bake | {bake} && {run}"
    layout = f"oci:{state_directory()}/layout:{unproved(variant.name)}"
    return f"look inside: {command('skopeo', 'copy', layout, 'docker-daemon:look:latest')} && {run}"


def unproved(variant: str) -> str:
    """The name of a failed image in the layout of the state directory."""
    return f"{variant}.unproved"
