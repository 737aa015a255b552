"""What a host's facts and the compatibility data mean, and the one command to type next. Pure."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

from buildtool.doctor.compatibility import Compatibility
from buildtool.doctor.hostfacts import Display, EngineFacts, Host, Platform
from buildtool.doctor.remarks import Remark, remarks_on
from buildtool.doctor.routes import OWN_VARIANT, CardAdvice, best_of, card_advice
from buildtool.gpucode.errors import BadTarget
from buildtool.gpucode.target import TargetId
from probes.shared.quoting import command
from probes.shared.unknown import Unknown

CPU_COMMAND = command("weir", "build", "cpu")
CPU_IMAGE, ROCM_IMAGE = "weir/cpu:latest", "weir/rocm:latest"
OWN_IMAGE = "weir/here:latest"  # of OWN_VARIANT


@dataclass(frozen=True)
class Advice:
    """Everything that the doctor says about a host, beside the facts."""

    cards: tuple[CardAdvice, ...]
    remarks: tuple[Remark, ...]
    next_step: str


def advise(host: Host, data: Compatibility, today: datetime.date) -> Advice:
    """Routes for each card of the host, remarks, and one command to type next."""
    cards = tuple(card_advice(display, host, data, today=today) for display in host.displays)
    remarks = tuple(remarks_on(host, cards))
    return Advice(cards, remarks, next_step(host, cards, remarks))


def next_step(host: Host, cards: Sequence[CardAdvice], remarks: Sequence[Remark]) -> str:
    """The one command to type next."""
    if isinstance(host.engine, Unknown):
        return (
            command("weir", "engine")
            if host.user.number == 0
            else command("sudo", "systemctl", "start", "docker")
        )
    if isinstance(host.engine.buildx, Unknown) or isinstance(host.engine.compose, Unknown):
        return command("weir", "engine")
    wrong = [remark.command for remark in remarks if remark.about == "override" and remark.command]
    if wrong:
        return wrong[0]
    commanded = [route for card in cards for route in card.routes if route.usable and route.command]
    best = best_of(commanded)
    if not best:
        return _started(CPU_IMAGE, host) if _has(host, CPU_IMAGE) else CPU_COMMAND
    alike = [one for one in commanded if (one.runs, one.rank) == (best.runs, best.rank) and not one.override]
    shipped = [one.command for one in alike if one.command != OWN_VARIANT]
    typed = shipped[0] if shipped else best.command
    image = ROCM_IMAGE if typed != OWN_VARIANT else OWN_IMAGE
    if _has(host, image, best.targets):
        typed = _started(image, host)
    return f"export HSA_OVERRIDE_GFX_VERSION={best.override}; {typed}" if best.override else typed


def _has(host: Host, image: str, targets: Sequence[str] = ()) -> bool:
    """Whether that image is here, for these cards. For a card that isn't here, the answer is how to build."""
    images = host.engine.images if isinstance(host.engine, EngineFacts) and not host.supposed else ()
    return any(one.name == image and set(targets) <= set(one.targets) for one in images)


def _started(image: str, host: Host) -> str:
    """What starts a service with an image that is here, or at least tries it on the card."""
    assert isinstance(host.engine, EngineFacts)
    torch = next(one.torch for one in host.engine.images if one.name == image)
    if not host.composed:
        run = command("docker", "run", "--rm", "-p", "127.0.0.1:8000:8000", image)
        return run if image == CPU_IMAGE else command("weir", "doctor", "--prove", image)
    if image == CPU_IMAGE:
        return command("docker", "compose", "up")
    service = "cuda" if torch == "cuda" else "wsl" if host.platform == "wsl" else "rocm"
    named = "" if image == ROCM_IMAGE else f"WEIR_{'CUDA' if torch == 'cuda' else 'ROCM'}_IMAGE={image} "
    return named + command("docker", "compose", "up", f"api-{service}")


def asked_host(host: Host, display: Display, platform: Platform) -> Host:
    """This host as if it had only a named card, on a platform: the answer for a card that isn't here."""
    return replace(
        host, displays=(display,), platform=platform, nodes=(), pythons=(), override="", supposed=True
    )


def is_target(text: str) -> bool:
    """Whether a text is a GPU target: gfx803, sm_90."""
    try:
        TargetId.parse(text)
    except BadTarget:
        return False
    return True
