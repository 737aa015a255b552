"""A catalog with one variant for this host's card, which `weir build --catalog` builds. Pure."""

import json
from dataclasses import asdict

from buildtool.doctor.advise import Advice
from buildtool.doctor.routes import CardAdvice, Route, best_of
from buildtool.errors import ConfigError
from buildtool.model import Base, Catalog, Registry
from probes.shared.quoting import terminal

NAME = "here"


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
        "    dockerfile: slim",
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
