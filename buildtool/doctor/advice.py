"""What a host's facts and the compatibility data mean, and the one command to type next. Pure."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from buildtool.doctor.compatibility import Compatibility
from buildtool.doctor.host import Display, EngineFacts, Host, Platform, Python, TorchBuild
from buildtool.doctor.routes import OWN_VARIANT, CardAdvice, best_of, card_advice
from buildtool.gpucode.source import BadTarget
from buildtool.gpucode.target import TargetId, target_of_override
from probes.core.quoting import command
from probes.core.unknown import Unknown

CPU_COMMAND = command("weir", "build", "cpu")
CPU_IMAGE, ROCM_IMAGE, CUDA_IMAGE = "weir/cpu:latest", "weir/rocm:latest", "weir/cuda:latest"
OWN_IMAGE = "weir/here:latest"  # of OWN_VARIANT


@dataclass(frozen=True)
class Remark:
    """Something about this host that a user should know, and what to type about it."""

    about: str
    text: str
    command: str = ""


@dataclass(frozen=True)
class Advice:
    """What the doctor advises for a host: routes for its cards, remarks, the next command."""

    cards: tuple[CardAdvice, ...]
    remarks: tuple[Remark, ...]
    next_step: str


def advise(host: Host, data: Compatibility, today: datetime.date) -> Advice:
    """Routes for each card of the host, remarks, and one command to type next."""
    cards = tuple(card_advice(display, host, data, today=today) for display in host.displays)
    remarks = tuple(remarks_on(host, cards))
    return Advice(cards, remarks, next_step(host, cards, remarks))


def supposed_host(host: Host, display: Display, platform: Platform) -> Host:
    """This host as if a card that isn't here were its only one, on a platform."""
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


# ---- the command to type next ------------------------------------------------------------------------------


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
        return _start_command(CPU_IMAGE, host) if _has(host, CPU_IMAGE) else CPU_COMMAND
    alike = [
        route
        for route in commanded
        if (route.runs, route.rank) == (best.runs, best.rank) and not route.override
    ]
    shipped = [route.command for route in alike if route.command != OWN_VARIANT]
    typed = shipped[0] if shipped else best.command
    is_cuda = typed.startswith(command("weir", "build", "cuda"))
    image = OWN_IMAGE if typed == OWN_VARIANT else CUDA_IMAGE if is_cuda else ROCM_IMAGE
    if _has(host, image, best.targets):
        typed = _start_command(image, host)
    return f"export HSA_OVERRIDE_GFX_VERSION={best.override}; {typed}" if best.override else typed


def for_card(advice: Advice, asked: Sequence[str]) -> Advice:
    """The advice on a card that isn't here: a command that writes its variant names it by `asked`."""
    own = OWN_VARIANT.replace("weir doctor", command("weir", "doctor", *asked), 1)

    def named(card: CardAdvice) -> CardAdvice:
        routes = [replace(route, command=route.command.replace(OWN_VARIANT, own)) for route in card.routes]
        return replace(card, routes=tuple(routes))

    next_step = advice.next_step.replace(OWN_VARIANT, own)
    return replace(advice, next_step=next_step, cards=tuple(map(named, advice.cards)))


def _has(host: Host, image: str, targets: Sequence[str] = ()) -> bool:
    """Whether the engine has that image for these cards; never for a supposed host, which needs a build."""
    images = host.engine.images if isinstance(host.engine, EngineFacts) and not host.supposed else ()
    return any(own.name == image and set(targets) <= set(own.targets) for own in images)


def _start_command(image: str, host: Host) -> str:
    """The command that starts a service with an image that is here, or at least tries it on the card."""
    assert isinstance(host.engine, EngineFacts)
    torch = next(own.torch for own in host.engine.images if own.name == image)
    if not host.composed:
        run = command("docker", "run", "--rm", "-p", "127.0.0.1:8000:8000", image)
        return run if image == CPU_IMAGE else command("weir", "doctor", "--prove", image)
    if image == CPU_IMAGE:
        return command("docker", "compose", "up")
    service = "cuda" if torch == "cuda" else "wsl" if host.platform == "wsl" else "rocm"
    variable = f"WEIR_{'CUDA' if torch == 'cuda' else 'ROCM'}_IMAGE"
    named = "" if image in (ROCM_IMAGE, CUDA_IMAGE) else f"{variable}={image} "
    return named + command("docker", "compose", "up", f"api-{service}")


# ---- remarks -----------------------------------------------------------------------------------------------


def remarks_on(host: Host, cards: Sequence[CardAdvice]) -> Iterable[Remark]:
    """Remarks on the engine, device files, overrides, torch builds that can't use the card, limits."""
    yield from _engine_remarks(host)
    yield from _access_remarks(host)
    yield from _override_remarks(host, cards)
    for python in host.pythons:
        if isinstance(python.torch, TorchBuild):
            yield from _torch_remarks(python, python.torch, cards)
    limit, total = host.ram_limit_bytes, host.ram_total_bytes
    if isinstance(limit, int) and isinstance(total, int) and limit < total:
        yield Remark("memory", "this container may use less memory than the host has")
    if not host.displays and host.platform == "wsl":
        typed = command("weir", "doctor", "--card", "RX 7900", "--on", "wsl")
        yield Remark("cards", "WSL shows /dev/dxg and not which AMD card it is; ask about it by name:", typed)
    if not host.displays and host.platform == "linux":
        yield Remark("cards", "no AMD or NVIDIA card is on the PCI bus here: the CPU image is what runs")


def _engine_remarks(host: Host) -> Iterable[Remark]:
    engine = host.engine
    if isinstance(engine, Unknown):
        return
    amd = any(display.maker == "amd" for display in host.displays)
    if amd and engine.rootless and "amd" in engine.runtimes:
        yield Remark("engine", "AMD's container runtime doesn't support a rootless engine: pass device files")
    if amd and not gpus_flag_works(engine, host.cdi_kinds):
        yield Remark(
            "engine", "`--gpus all` doesn't reach an AMD card on this engine: pass /dev/kfd and a render node"
        )
    if isinstance(engine.compose, str) and numbers_of(engine.compose) < (2, 20, 0):
        yield Remark("compose", f"compose {engine.compose} is older than 2.20, which compose.yaml needs")


def gpus_flag_works(engine: EngineFacts, cdi_kinds: Sequence[str]) -> bool:
    """Whether `--gpus all` finds AMD cards.

    Docker 28.3 does with AMD's runtime where NVIDIA's is absent, 29.3 through CDI (moby 49952, 52048).
    """
    version = numbers_of(engine.version)
    by_runtime = version >= (28, 3, 0) and "amd" in engine.runtimes and "nvidia" not in engine.runtimes
    by_cdi = version >= (29, 3, 0) and "amd.com/gpu" in cdi_kinds and bool(engine.cdi_directories)
    return by_runtime or by_cdi


def numbers_of(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, 0 where there are fewer."""
    numbers = [int(word[:9]) for word in re.findall(r"\d+", version)[:3]]
    return tuple([*numbers, 0, 0, 0][:3])


def _access_remarks(host: Host) -> Iterable[Remark]:
    for node in host.nodes:
        if not node.opens_for(host.user):
            name = node.group_name if isinstance(node.group_name, str) else ""
            typed = command("sudo", "usermod", "-aG", name, host.user.name) if name else ""
            text = (
                f"{node.path} (group {node.group}{f', {name}' if name else ''}, mode {node.mode}) can't be "
                f"opened by {host.user.name}; a container needs --group-add {node.group}"
            )
            yield Remark("device files", text, typed)


def _override_remarks(host: Host, cards: Sequence[CardAdvice]) -> Iterable[Remark]:
    if not host.override:
        return
    try:
        shown = target_of_override(host.override).processor
    except BadTarget as error:
        yield Remark(
            "override", f"HSA_OVERRIDE_GFX_VERSION: {error.message}", "unset HSA_OVERRIDE_GFX_VERSION"
        )
        return
    for card in cards:
        if isinstance(card.target, str) and card.target.startswith("gfx") and card.target != shown:
            advised = any(route.override == host.override and route.runs != "no" for route in card.routes)
            verdict = (
                "a known route, which risks wrong results" if advised else "not a route that is known to work"
            )
            text = f"HSA_OVERRIDE_GFX_VERSION makes {card.product} ({card.target}) report {shown}: {verdict}"
            yield Remark("override", text, "" if advised else "unset HSA_OVERRIDE_GFX_VERSION")


def _torch_remarks(python: Python, torch: TorchBuild, cards: Sequence[CardAdvice]) -> Iterable[Remark]:
    """A torch that can't use the cards that are here."""
    targets = [card.target for card in cards if isinstance(card.target, str)]
    makers = {"hip" if target.startswith("gfx") else "cuda" for target in targets}
    if makers and torch.api not in makers:
        named = {
            "cpu": "a CPU build",
            "cuda": f"a CUDA {torch.cuda} build",
            "hip": f"a ROCm {torch.hip} build",
        }
        yield Remark(
            "torch",
            f"torch {torch.version} of {python.place} is {named[torch.api]}: it can't use {targets[0]}",
        )
    release = re.match(r"(\d{1,9})\.(\d{1,9})\b", torch.hip)
    if "gfx906" in targets and release and (int(release[1]), int(release[2])) >= (6, 4):
        text = f"torch {torch.version} of {python.place}: ROCm 6.4 has no matrix kernels for gfx906"
        yield Remark("torch", text)
    old = [t for t in targets if t.startswith("sm_") and int(t[3:]) < 75]
    if old and torch.cuda.startswith("13"):
        text = f"torch {torch.version} of {python.place}: CUDA 13 builds have no kernels for {old[0]}"
        yield Remark("torch", text)
