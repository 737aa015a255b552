"""The routes of a card on a host: what runs, what it takes, what is missing for it. Pure."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
from buildtool.doctor.host import Display, Host, Platform, Python
from buildtool.gpucode.target import target_of_override
from probes.core.codec import DERIVED
from probes.core.quoting import command
from probes.core.unknown import Unknown

KFD = "/dev/kfd"
CPU_BUILD = "(CPU build)"  # in the data, behind a torch that computes on the CPU
# by builds, the variants of images/variants.yaml for their cards; `cuda` has torch 2.11 of the same CUDA 13.0
SHIPPED = {"torch2.9-rocm6.4": "rocm", "torch2.14-cu130": "cuda"}
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
    targets: tuple[str, ...]  # whose code such an image keeps
    has_torch: bool = field(default=False, metadata=DERIVED)  # whether `torch` names one

    @property
    def computes_on_card(self) -> bool:
        """Whether a published torch computes on the card by this route: neither a CPU build nor Vulkan."""
        return self.runs != "no" and self.has_torch and CPU_BUILD not in self.torch

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


def best_of(routes: Sequence[Route]) -> Route | None:
    """The first that is usable and runs, else usable and runs in part, else runs once something is added."""
    order = sorted(routes, key=lambda route: (route.runs == "no", not route.usable, route.runs != "yes"))
    return order[0] if order and order[0].runs != "no" else None


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
    routes = [
        _route(answer, target, host, data=data, today=today)
        for answer in answers
        if host.platform in answer.platforms
    ]
    return _ordered(routes)


def supposed_routes(
    target: str, platform: Platform, data: Compatibility, *, today: datetime.date
) -> list[Route]:
    """The routes of a target on no particular host: nothing is missing there, and no Python is found."""
    known = data.target(target)
    answers = known.answers if known else ()
    routes = [
        _route(answer, target, None, data=data, today=today)
        for answer in answers
        if platform in answer.platforms
    ]
    return _ordered(routes)


def _ordered(routes: Sequence[Route]) -> list[Route]:
    return sorted(routes, key=lambda route: (not route.usable, route.runs == "no", RANKS.index(route.rank)))


def _route(
    answer: Answer, target: str, host: Host | None, *, data: Compatibility, today: datetime.date
) -> Route:
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
        needs=tuple(_needs(answer, target, host, data=data)) if host and _can_lack(answer, host) else (),
        pythons_here=_fitting(host.pythons if host else (), known.get("python")),
        variant_line=variant_line(answer, target, data),
        command=_command(answer, target),
        targets=(_shown_target(answer, target),),
        has_torch="torch" in known and bool(known["torch"].value),
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
    version = re.match(r"nvidia (\d{1,9})\b", driver) if isinstance(driver, str) else None
    if wanted.value and version and int(version[1]) < int(wanted.value):
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
    variant = "rocm" if answer.variant else SHIPPED.get(answer.build)
    if variant:
        return command("weir", "build", variant, "--targets", _shown_target(answer, target))
    return OWN_VARIANT


def _shown_target(answer: Answer, target: str) -> str:
    """What the card reports: with an override, another's target."""
    return target_of_override(answer.override).processor if answer.override else target
