"""Judges what a fresh container said of itself (images/smoke.py). Pure: the running is the engine's."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from buildtool.errors import ProofFailed
from buildtool.model import Resolved, TorchBuild, Variant

COMMAND = ["python3", "-B", "/opt/weir/app/smoke.py"]
MARK = "SMOKE "


@dataclass(frozen=True)
class Proof:
    """What an image was seen doing."""

    python: str
    torch_version: str
    torch_build: TorchBuild
    rocminfo: str  # "not installed", or its first line


def judge(variant: Variant, resolved: Resolved, *, exit_code: int, stdout: str, stderr: str) -> Proof:
    """The proof, or ProofFailed saying which promise is broken."""
    facts = facts_of(stdout)
    if exit_code or facts is None:
        said = "\n".join((stdout + stderr).strip().splitlines()[-8:])
        raise ProofFailed(
            f"{variant.ref} doesn't run: `{' '.join(COMMAND)}` exited with {exit_code}\n{said}",
            f"look inside: docker run --rm -it --entrypoint sh {variant.ref}",
        )
    torch = facts["torch"]
    found = build_of(torch["hip"], torch["cuda"])
    if found is not resolved.torch_build:
        raise ProofFailed(
            f"{variant.ref} holds torch {torch['version']}, a {found.value} build; "
            f"source {resolved.torch_source} promises a {resolved.torch_build.value} build",
            "a requirement replaced torch: pin it in `wheels`, or look at the plan: python -m buildtool plan",
        )
    if not torch["product_ok"]:
        raise ProofFailed(f"{variant.ref}: torch {torch['version']} computes a wrong matrix product")
    if not facts["python"].startswith(resolved.python + "."):
        raise ProofFailed(
            f"{variant.ref} runs Python {facts['python']}, its wheels are for {resolved.python}"
        )
    missing = [name for name in ("service", "probes") if not facts[name]]
    if missing:
        raise ProofFailed(f"{variant.ref} lacks its payload: {', '.join(missing)} can't be imported")
    return Proof(facts["python"], torch["version"], found, _rocminfo(facts["rocminfo"]))


def facts_of(stdout: str) -> dict[str, Any] | None:
    """What images/smoke.py said; None when it said nothing."""
    line = next((text for text in stdout.splitlines() if text.startswith(MARK)), None)
    return dict(json.loads(line.removeprefix(MARK))) if line else None


def told(facts: dict[str, Any]) -> str:
    """The facts in a line."""
    torch = facts["torch"]
    return f"torch {torch['version']} computes, rocminfo {_rocminfo(facts['rocminfo'])}"


def to_seal(proof: Proof) -> str:
    """A proof as text, kept under the image's digest: what was proved once needn't be run again."""
    return json.dumps(asdict(proof) | {"torch_build": proof.torch_build.value})


def from_seal(text: str) -> Proof:
    """The proof that `to_seal` wrote."""
    data = json.loads(text)
    return Proof(**data | {"torch_build": TorchBuild(data["torch_build"])})


def build_of(hip: str | None, cuda: str | None) -> TorchBuild:
    """Which build a torch is, by `torch.version`: a file's name or version label proves nothing."""
    if hip:
        return TorchBuild.ROCM
    return TorchBuild.CUDA if cuda else TorchBuild.CPU


def _rocminfo(facts: dict[str, object]) -> str:
    if not facts["present"]:
        return "not installed"
    said = str(facts["said"]).splitlines()
    return f"runs (exit {facts['exit_code']}: {said[0] if said else 'silent'})"
