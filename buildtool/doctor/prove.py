"""`weir doctor --prove`: what an image's torch promises, tried on this host's card by the probes in it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from buildtool.core.errors import EnvironmentMissing, ProofFailed
from buildtool.doctor.fix import NVIDIA_KIND
from buildtool.doctor.host import EngineFacts, Host
from buildtool.engine.client import Devices
from probes.core.codec import Misfit, decode
from probes.core.quoting import terminal

COMMAND = ["python3", "-B", "-m", "probes", "doctor", "--json"]
NODES = re.compile(r"/dev/(kfd|dxg|dri/renderD\d+)")
MOST_CHECKS, MOST_TEXT = 20, 400


@dataclass(frozen=True)
class Check:
    """A claim that was tried in the container. Texts come from the image and may hold anything."""

    name: str
    holds: bool
    said: str


def devices_of(host: Host) -> Devices:
    """How a container gets this host's cards: device files and groups, a CDI device, or NVIDIA's runtime.

    Raises EnvironmentMissing where there is no card.
    """
    nodes = [node for node in host.nodes if NODES.fullmatch(node.path)]
    if nodes:
        groups = tuple(sorted({str(node.group) for node in nodes}))
        return Devices(paths=tuple(node.path for node in nodes), groups=groups)
    if not host.node("/dev/nvidiactl"):
        raise EnvironmentMissing(
            "no card is here to prove an image on", "weir doctor lists what this host has"
        )
    runtimes = host.engine.runtimes if isinstance(host.engine, EngineFacts) else ()
    if "nvidia" not in runtimes and NVIDIA_KIND in host.cdi_kinds:
        return Devices(cdi=(f"{NVIDIA_KIND}=all",))
    return Devices(nvidia=True)


def checks_of(exit_code: int, stdout: str, stderr: str) -> tuple[Check, ...]:
    """The checks that the container reported. Raises ProofFailed where it reported none."""
    begin = stdout.find("{")
    try:
        report = json.loads(stdout[begin:]) if begin >= 0 else None
        rows = report["checks"] if isinstance(report, dict) else []
        checks = tuple(decode(Check, row, "checks") for row in rows[:MOST_CHECKS])
    except (ValueError, KeyError, TypeError, RecursionError, Misfit):
        checks = ()
    if not checks:
        last = terminal((stdout + stderr).strip()[-MOST_TEXT:], keep="\n")
        raise ProofFailed(
            f"the image tried nothing on the card (exit code {exit_code})\n{last}",
            "build it again, so that it has these probes: weir build",
        )
    return checks


def lines(image: str, passed: Devices, checks: Sequence[Check]) -> list[str]:
    """What was tried, a line each."""
    given = [*passed.paths, *passed.cdi, *(["all NVIDIA cards"] if passed.nvidia else [])]
    shown = [f"{image} with {' '.join(given)}"]
    for check in checks:
        verdict = "holds" if check.holds else "FAILS"
        shown.append(f"  {terminal(check.name)}: {verdict}: {terminal(check.said[:MOST_TEXT])}")
    return shown
