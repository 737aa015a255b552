"""The text that `weir doctor` prints. Pure."""

from collections.abc import Iterator, Sequence

from buildtool.doctor.advice import Advice
from buildtool.doctor.host import Display, EngineFacts, Host, TorchBuild
from buildtool.doctor.routes import CardAdvice, Route
from buildtool.engine.host import Row
from probes.core.units import binary_bytes, decimal_bytes
from probes.core.unknown import Unknown
from probes.records.facts import Link

VERDICTS = {"yes": "runs", "partly": "runs in part", "no": "doesn't run"}


def answer_text(host: Host, advice: Advice, rows: Sequence[Row]) -> str:
    """Facts, cards with their routes, remarks, what is missing; the last line is the next command."""
    lines = [*host_lines(host), ""]
    for card, display in zip(advice.cards, host.displays, strict=True):
        lines += [*card_lines(card, display), ""]
    lines += [f"{remark.about}: {remark.text}{_typed(remark.command)}" for remark in advice.remarks]
    lines += [f"{row.thing}: {row.state}{_typed(row.next_step)}" for row in rows]
    above = "\n".join(lines).rstrip("\n")
    return f"{above}\n\nnext, type:\n  {advice.next_step}"


def _typed(text: str) -> str:
    return f"\n  {text}" if text else ""


def host_lines(host: Host) -> Iterator[str]:
    """The facts, a line each."""
    yield f"host: {_text(host.distribution)}, kernel {_text(host.kernel)}, {host.machine}, {host.platform}"
    inside = [text for text in (host.container,) if text != "none seen"]
    virtual = [f"virtual machine ({host.virtual})"] if isinstance(host.virtual, str) else []
    if inside or virtual:
        yield f"inside: {', '.join([*(f'container ({text})' for text in inside), *virtual])}"
    limit = f", limit {binary_bytes(host.ram_limit_bytes)}" if isinstance(host.ram_limit_bytes, int) else ""
    yield (
        f"memory: {_binary(host.ram_total_bytes)}, {_binary(host.ram_available_bytes)} available{limit}; "
        f"{host.cpus} CPUs; disk for images: {_decimal(host.disk_free_bytes)} free"
    )
    yield f"engine: {engine_text(host.engine)}"
    if host.cdi_kinds:
        yield f"CDI devices: {', '.join(host.cdi_kinds)}"
    yield f"GPU driver: {_text(host.gpu_driver)}"
    for node in host.nodes:
        may = "can be opened" if node.opens_for(host.user) else "can't be opened"
        group = f"group {node.group} ({_text(node.group_name)}), mode {node.mode}"
        yield f"device file: {node.path}, {group}, {may} by {host.user.name}"
    for python in host.pythons:
        torch = (
            f", torch {python.torch.version} ({python.torch.api})"
            if isinstance(python.torch, TorchBuild)
            else ""
        )
        yield f"Python: {_text(python.version)} ({python.place}){torch}"


def engine_text(engine: EngineFacts | Unknown) -> str:
    """The engine in one line."""
    if isinstance(engine, Unknown):
        return f"none: {engine.reason}"
    store = "containerd image store" if engine.containerd_store else "classic image store"
    extras = [
        word
        for word, is_so in (("rootless", engine.rootless), ("CDI", bool(engine.cdi_directories)))
        if is_so
    ]
    return ", ".join([f"Docker {engine.version}", store, *extras, f"compose {_text(engine.compose)}"])


def card_lines(card: CardAdvice, display: Display) -> Iterator[str]:
    """One card, and its routes with what each takes."""
    vram = f", VRAM {binary_bytes(card.vram_bytes)}" if isinstance(card.vram_bytes, int) else ""
    driver = f", driver {display.driver}" if isinstance(display.driver, str) else ""
    yield f"card: {card.product} ({_text(card.target)}, {card.pci_id}){vram}{driver}{_link(display)}"
    if not card.routes:
        yield "  no route is known: this target is not in the data"
    for route in card.routes:
        yield from _route_lines(route)


def _link(display: Display) -> str:
    """The best link, and what it is now: an idle one trains down."""
    best, now = display.max_link, display.link
    if not isinstance(best, Link):
        return ""
    at_present = f", now Gen{now.generation} x{now.lanes}" if isinstance(now, Link) and now != best else ""
    return f", link Gen{best.generation} x{best.lanes}{at_present}"


def _route_lines(route: Route) -> Iterator[str]:
    old = " (its source is older than a year)" if route.stale else ""
    first, _, last = route.python.partition("-")
    python = first if first == last else route.python
    yield f"  {route.rank}: {VERDICTS[route.runs]}. {route.says}{old}"
    if route.runs == "no":
        return
    yield f"    torch {route.torch}; {route.runtime}; Python {python}"
    yield f"    get it: {route.get}"
    if route.variant_line:
        yield f"    variants.yaml: {route.variant_line}"
    yield from (f"    needs: {need}" for need in route.needs)


def _text(value: str | Unknown) -> str:
    return value if isinstance(value, str) else value.reason


def _binary(value: int | Unknown) -> str:
    return binary_bytes(value) if isinstance(value, int) else str(value)


def _decimal(value: int | Unknown) -> str:
    return decimal_bytes(value) if isinstance(value, int) else str(value)
