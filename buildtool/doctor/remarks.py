"""What stands out on a host beside its cards: access, overrides, torch builds that are useless here. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from buildtool.doctor.hostfacts import EngineFacts, Host, Python, TorchBuild
from buildtool.doctor.routes import CardAdvice
from buildtool.gpucode.errors import BadTarget
from buildtool.gpucode.target import target_of_override
from probes.shared.quoting import command
from probes.shared.unknown import Unknown


@dataclass(frozen=True)
class Remark:
    """Something about this host that a user should know, and what to type about it."""

    about: str
    text: str
    command: str = ""


def remarks_on(host: Host, cards: Sequence[CardAdvice]) -> Iterable[Remark]:
    """What else stands out: device files, overrides, torch builds that can't use the card, limits."""
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
