"""What a host's facts and the compatibility data mean: routes for each card, and the one next step. Pure."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from buildtool.doctor.compatibility import (
    RANKS,
    Answer,
    CardName,
    Cell,
    Compatibility,
    Rank,
    Runs,
    cells,
    python_range,
)
from buildtool.doctor.hostfacts import Display, EngineFacts, Host, Platform, Python, TorchBuild
from buildtool.gpucode.errors import BadTarget
from buildtool.gpucode.target import TargetId, target_of_override
from probes.shared.quoting import command
from probes.shared.unknown import Unknown

KFD = "/dev/kfd"
CPU_COMMAND = command("weir", "build", "cpu")
SHIPPED_BUILD = "torch2.9-rocm6.4"  # which the variant `rocm` of images/variants.yaml takes first
OWN_VARIANT = "weir doctor --variants here.yaml && weir build --catalog here.yaml"
ROUTE_CELLS = ("runtime", "torch", "python", "get")


@dataclass(frozen=True)
class Route:
    """One answer for one card on this host. `needs` is what this host lacks for it."""

    rank: Rank
    runs: Runs
    says: str
    override: str
    runtime: str
    torch: str
    python: str
    get: str
    sources: tuple[str, ...]
    stale: tuple[str, ...]  # of those, the ones older than a year
    needs: tuple[str, ...]
    pythons_here: tuple[str, ...]  # of this host, those that the torch is published for
    variant_line: str  # for the list `torch:` of a variant in variants.yaml
    command: str  # what to type for this route; empty where it isn't an image of ours
    targets: tuple[str, ...]  # whose code such an image keeps; none for CUDA

    @property
    def usable(self) -> bool:
        """It runs, and nothing is missing."""
        return self.runs != "no" and not self.needs


@dataclass(frozen=True)
class CardAdvice:
    """One card with its routes, the usable ones first."""

    product: str
    pci_id: str
    target: str | Unknown
    vram_bytes: int | Unknown
    routes: tuple[Route, ...]

    @property
    def best(self) -> Route | None:
        """The first route that runs, even if something is missing for it."""
        return best_of(self.routes)

    @property
    def rank(self) -> Rank:
        """The best route's rank; `none` without one."""
        return self.best.rank if self.best else "none"


def best_of(routes: Sequence[Route]) -> Route | None:
    """The first that is usable and runs, else usable and runs in part, else runs once something is added."""
    order = sorted(routes, key=lambda route: (route.runs == "no", not route.usable, route.runs != "yes"))
    return order[0] if order and order[0].runs != "no" else None


@dataclass(frozen=True)
class Remark:
    """Something about this host that a user should know, and what to type about it."""

    about: str
    text: str
    command: str = ""


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


# ---- cards -------------------------------------------------------------------------------------------


def card_advice(display: Display, host: Host, data: Compatibility, *, today: datetime.date) -> CardAdvice:
    """The routes of one card."""
    named = data.card(display.product)
    target = display.target if isinstance(display.target, str) else _known_target(named, display)
    product = display.name if isinstance(display.name, str) else named.product if named else display.product
    routes = routes_for(target, host, data, today=today) if isinstance(target, str) else ()
    return CardAdvice(product, display.pci_id, target, display.vram_bytes, tuple(routes))


def _known_target(named: CardName | None, display: Display) -> str | Unknown:
    return named.target if named else Unknown(f"{display.product} is not in our list of cards")


def routes_for(target: str, host: Host, data: Compatibility, *, today: datetime.date) -> list[Route]:
    """The routes of a target on the host's platform: usable ones, those that need something, and refusals."""
    known = data.target(target)
    answers = known.answers if known else ()
    found = [
        _route(answer, target, host, data=data, today=today)
        for answer in answers
        if host.platform in answer.platforms
    ]
    return sorted(found, key=lambda route: (not route.usable, route.runs == "no", RANKS.index(route.rank)))


def _route(answer: Answer, target: str, host: Host, *, data: Compatibility, today: datetime.date) -> Route:
    known = cells(answer, data, target)
    names = dict.fromkeys([*([answer.source] if answer.source else []), *(c.source for c in known.values())])
    texts = {name: str(known.get(name, "")) for name in ROUTE_CELLS}
    return Route(
        rank=answer.rank,
        runs=answer.runs,
        says=answer.says,
        override=answer.override or "",
        **texts,
        sources=tuple(f"{data.sources[name].what}, {data.sources[name].date}" for name in names),
        stale=tuple(name for name in names if data.sources[name].is_stale(today)),
        needs=tuple(_needs(answer, target, host, data=data)) if _can_lack(answer, host) else (),
        pythons_here=_fitting(host.pythons, known.get("python")),
        variant_line=variant_line(answer, target, data),
        command=_command(answer, target),
        targets=(_shown_target(answer, target),) if target.startswith("gfx") else (),
    )


def _can_lack(answer: Answer, host: Host) -> bool:
    return answer.runs != "no" and not host.supposed


def _needs(answer: Answer, target: str, host: Host, *, data: Compatibility) -> Iterable[str]:
    """What the route takes and this host doesn't have."""
    build = data.build(answer.build)
    runtime = cells(answer, data, target).get("runtime")
    if target.startswith("gfx"):
        if runtime and runtime.value.startswith("ROCm"):
            yield from _amd_needs(host)
        return
    if isinstance(host.gpu_driver, Unknown) and host.platform == "linux":
        yield "NVIDIA's kernel driver isn't loaded"
    if build:
        yield from _driver_need(build.driver, host.gpu_driver)


def _amd_needs(host: Host) -> Iterable[str]:
    if host.platform == "wsl" and not host.node("/dev/dxg"):
        yield "/dev/dxg isn't here: the Windows driver has no WSL support, or WSL is version 1"
    if host.platform == "linux" and not host.node(KFD):
        yield f"{KFD} isn't here: the kernel driver amdgpu isn't loaded, or it is hidden from this container"


def _driver_need(wanted: Cell, driver: str | Unknown) -> Iterable[str]:
    found = re.match(r"nvidia (\d+)", driver) if isinstance(driver, str) else None
    if wanted.value and found and int(found[1]) < int(wanted.value):
        yield f"driver {wanted.value} or later; this host has {driver}"


def _fitting(pythons: Sequence[Python], cell: Cell | None) -> tuple[str, ...]:
    bounds = python_range(cell)
    if not bounds:
        return ()
    return tuple(
        python.place
        for python in pythons
        if isinstance(python.version, str) and bounds[0] <= _version(python.version) <= bounds[1]
    )


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def variant_line(answer: Answer, target: str, data: Compatibility) -> str:
    """The item for the list `torch:` of a variant in variants.yaml; empty for a route that isn't a wheel."""
    build = data.build(answer.build)
    if not build or answer.runs == "no":
        return ""
    kind = "rocm" if target.startswith("gfx") else "cuda"
    require = f'"{build.requirement(target)}", numpy'
    return f'- {{name: {build.id}, build: {kind}, require: [{require}], index: "{build.index}"}}'


def _command(answer: Answer, target: str) -> str:
    """The shipped variant where its torch is this route's, else a variant of one's own."""
    if answer.runs == "no" or not (answer.build or answer.variant):
        return ""
    if answer.variant or answer.build == SHIPPED_BUILD:
        return command("weir", "build", "rocm", "--targets", _shown_target(answer, target))
    return OWN_VARIANT


def _shown_target(answer: Answer, target: str) -> str:
    """What the card reports: with an override, another's target."""
    return target_of_override(answer.override).processor if answer.override else target


# ---- remarks -----------------------------------------------------------------------------------------


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
    if isinstance(engine.compose, str) and _triple(engine.compose) < (2, 20, 0):
        yield Remark("compose", f"compose {engine.compose} is older than 2.20, which compose.yaml needs")


def gpus_flag_works(engine: EngineFacts, cdi_kinds: Sequence[str]) -> bool:
    """Whether `--gpus all` finds AMD cards.

    Docker 28.3 does with AMD's runtime where NVIDIA's is absent, 29.3 through CDI (moby 49952, 52048).
    """
    version = _triple(engine.version)
    by_runtime = version >= (28, 3, 0) and "amd" in engine.runtimes and "nvidia" not in engine.runtimes
    by_cdi = version >= (29, 3, 0) and "amd.com/gpu" in cdi_kinds and bool(engine.cdi_directories)
    return by_runtime or by_cdi


def _triple(version: str) -> tuple[int, ...]:
    numbers = [int(word) for word in re.findall(r"\d+", version)[:3]]
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
    release = re.match(r"(\d+)\.(\d+)", torch.hip)
    if "gfx906" in targets and release and (int(release[1]), int(release[2])) >= (6, 4):
        text = f"torch {torch.version} of {python.place}: ROCm 6.4 has no matrix kernels for gfx906"
        yield Remark("torch", text)
    old = [t for t in targets if t.startswith("sm_") and int(t[3:]) < 75]
    if old and torch.cuda.startswith("13"):
        text = f"torch {torch.version} of {python.place}: CUDA 13 builds have no kernels for {old[0]}"
        yield Remark("torch", text)


# ---- the next step -----------------------------------------------------------------------------------


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
        return CPU_COMMAND
    alike = [one for one in commanded if (one.runs, one.rank) == (best.runs, best.rank) and not one.override]
    shipped = [one.command for one in alike if one.command != OWN_VARIANT]
    typed = shipped[0] if shipped else best.command
    return f"export HSA_OVERRIDE_GFX_VERSION={best.override}; {typed}" if best.override else typed


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
