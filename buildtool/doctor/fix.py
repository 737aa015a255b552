"""The texts that `weir doctor --fix` and `--variants` write for this host. Pure.

`--fix`: settings in `.env` and an overlay for compose, with groups as numbers, because an image has other
names for them or none. `--variants`: a catalog with one variant.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from buildtool.core.errors import ConfigError
from buildtool.core.model import Base, Catalog, Registry
from buildtool.doctor.advice import Advice, numbers_of
from buildtool.doctor.host import EngineFacts, Host
from buildtool.doctor.routes import CardAdvice, Route, best_of
from probes.core.quoting import terminal
from probes.core.unknown import Unknown

ENV, BASE, OVERLAY = ".env", "compose.yaml", "compose.here.yaml"
OVERRIDE_COMPOSE = (2, 24, 4)  # the first compose that knows `!override`
AMD_KIND, NVIDIA_KIND = "amd.com/gpu", "nvidia.com/gpu"
NAME = "here"  # of the variant
_VALUE = re.compile(
    r"""\s*(?:export\s+)?(COMPOSE_FILE|COMPOSE_PATH_SEPARATOR)\s*=\s*(["']?)(.*?)\2\s*(?:\s#.*)?"""
)
_SETTING = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=")
_HEAD = "# Written by `weir doctor --fix` for this host; `docker compose config` shows what comes of it.\n"


@dataclass(frozen=True)
class Change:
    """A file as it shall be. `before` is None for a new one."""

    path: str
    before: str | None
    after: str

    @property
    def is_needed(self) -> bool:
        """Whether anything differs."""
        return self.before != self.after

    def lines(self) -> list[str]:
        """The lines that go and those that come, marked."""
        old, new = (self.before or "").splitlines(), self.after.splitlines()
        gone = [f"- {line}" for line in old if line not in new]
        return gone + [f"+ {line}" for line in new if line not in old]


def changes(host: Host, advice: Advice, before: dict[str, str | None]) -> list[Change]:
    """What has to be written for this host; `before` is the content of the files now, by name."""
    overlay = overlay_text(host)
    values = settings(host, advice)
    if overlay:
        values["COMPOSE_FILE"] = compose_files(before.get(ENV) or "")
    candidates = [Change(OVERLAY, before.get(OVERLAY), overlay)] if overlay else []
    if values:
        candidates.append(Change(ENV, before.get(ENV), env_text(before.get(ENV) or "", values)))
    return [change for change in candidates if change.is_needed]


def settings(host: Host, advice: Advice) -> dict[str, str]:
    """Variables for compose.yaml's services, of this host's device files and cards."""
    render, kfd = host.node("/dev/dri/renderD"), host.node("/dev/kfd")
    if not render or not kfd:
        return {}
    values = {"RENDER_NODE": render.path, "RENDER_GID": str(render.group), "VIDEO_GID": str(kfd.group)}
    best = best_of([route for card in advice.cards for route in card.routes if route.usable])
    return values | ({"HSA_OVERRIDE_GFX_VERSION": best.override} if best and best.override else {})


def compose_files(existing: str) -> str:
    """The setting COMPOSE_FILE of an `.env` file with our two files beside those that it names already."""
    settings = {match[1]: match for match in map(_VALUE.fullmatch, existing.split("\n")) if match}
    separator = settings["COMPOSE_PATH_SEPARATOR"][3] if "COMPOSE_PATH_SEPARATOR" in settings else ":"
    quote, text = settings["COMPOSE_FILE"].group(2, 3) if "COMPOSE_FILE" in settings else ("", "")
    files = [file for file in text.split(separator) if file]
    known = {file.removeprefix("./") for file in files}
    first, last = ([file] if file not in known else [] for file in (BASE, OVERLAY))
    return f"{quote}{separator.join([*first, *files, *last])}{quote}"


def env_text(existing: str, values: dict[str, str]) -> str:
    """The settings in an `.env` file: lines of other settings stay as they are, ours are replaced."""
    lines = existing.removesuffix("\n").split("\n") if existing else []  # compose knows no other line ends
    left, kept = dict(values), []
    for line in lines:
        named = _SETTING.match(line)
        name = named[1] if named else ""
        if name in left:
            kept.append(f"{name}={left.pop(name)}")
        elif name not in values:
            kept.append(line)
    return "\n".join([*kept, *(f"{name}={value}" for name, value in left.items())]) + "\n"


def overlay_text(host: Host) -> str:
    """The overlay; empty where compose.yaml with the settings does, or compose is too old for one."""
    engine = host.engine
    if isinstance(engine, Unknown) or isinstance(engine.compose, Unknown):
        return ""
    if numbers_of(engine.compose) < OVERRIDE_COMPOSE:
        return ""
    services = [*_amd_services(host, engine), *_nvidia_services(host, engine)]
    return _HEAD + "services:\n" + "\n".join(services) + "\n" if services else ""


def _amd_services(host: Host, engine: EngineFacts) -> list[str]:
    render = [node for node in host.nodes if node.path.startswith("/dev/dri/renderD")]
    kfd = host.node("/dev/kfd")
    if not kfd or not render:
        return []
    by_cdi = AMD_KIND in host.cdi_kinds and bool(engine.cdi_directories)
    if not by_cdi and len(render) < 2:
        return []  # compose.yaml passes one node, which .env names
    devices = [f"{AMD_KIND}=all"] if by_cdi else [kfd.path, *(node.path for node in render)]
    groups = dict.fromkeys(str(node.group) for node in (kfd, *render))
    return [
        f"  {name}:\n    devices: !override {_flow(devices)}\n    group_add: !override {_flow(list(groups))}"
        for name in ("api-rocm", "probe-rocm")
    ]


def _nvidia_services(host: Host, engine: EngineFacts) -> list[str]:
    """CDI where NVIDIA's runtime isn't registered: compose.yaml asks the runtime's driver."""
    seen = host.node("/dev/nvidiactl") and NVIDIA_KIND in host.cdi_kinds and engine.cdi_directories
    if not seen or "nvidia" in engine.runtimes:
        return []
    device = _flow([f"{NVIDIA_KIND}=all"])
    return [
        f"  {name}:\n    deploy: !reset null\n    devices: {device}" for name in ("api-cuda", "probe-cuda")
    ]


def _flow(texts: Sequence[str]) -> str:
    """A list of texts in YAML's flow style, of which JSON is a part; compose reads `$$` as a dollar sign."""
    return json.dumps([text.replace("$", "$$") for text in texts], ensure_ascii=False)


def shown(changed: Sequence[Change], *, written: bool) -> str:
    """The changes, before they are made."""
    if not changed:
        return "nothing to change: the settings are this host's already"
    lines = []
    for change in changed:
        lines += [f"{change.path}{'' if change.before is not None else ' (new)'}:"]
        lines += [f"  {line}" for line in change.lines()]
    return "\n".join([*lines, "writing them" if written else "nothing was written (--dry-run)"])


def variant_text(advice: Advice, shipped: Catalog) -> str:
    """The catalog's text; wheels and base are the shipped variants'. Raises ConfigError for no route."""
    for card in advice.cards:
        best = best_of([route for route in card.routes if route.variant_line])
        if best:
            return _text(card, best, shipped)
    raise ConfigError(
        "no card of this host has a torch to build an image with", "weir doctor lists the routes"
    )


def _text(card: CardAdvice, route: Route, shipped: Catalog) -> str:
    (model,) = shipped.select(("rocm",))
    lines = [
        f"# Written by `weir doctor --variants` for {terminal(card.product)} ({card.target}).",
        "schema_version: 1",
        f"source_date_epoch: {shipped.source_date_epoch}",
        "variants:",
        f"  {NAME}:",
        f"    summary: {json.dumps(f'torch {route.torch} for {card.target}, as weir doctor advises.')}",
        f"    python: {json.dumps(model.python)}",
        "    base:",
        *(f"      - {_base(base)}" for base in model.base),
        "    torch:",
        f"      {route.variant_line}",
        f"    wheels: {json.dumps(model.wheels)}",
    ]
    if route.targets:
        lines += [f"    gpu_targets: {json.dumps(route.targets)}", "    prune: true"]
    return "\n".join(lines) + "\n"


def _base(base: Base) -> str:
    """An item of the list `base:`, in JSON, which YAML holds."""
    if isinstance(base, Registry):
        return json.dumps({"registry": base.ref})
    return json.dumps({"bootstrap": {name: value for name, value in asdict(base).items() if value}})
