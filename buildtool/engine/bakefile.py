"""A plan as the text that `docker buildx bake` reads. Pure."""

import json
from typing import Any

from probes.core.codec import Json
from probes.core.quoting import bake_text


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as the JSON that bake reads, in which no text is a template."""
    return json.dumps(_literal(plan), indent=2, sort_keys=True)


def _literal(value: Json) -> Json:
    """The value with all its texts, keys too, quoted against bake's interpolation."""
    match value:
        case dict():
            return {bake_text(key): _literal(item) for key, item in value.items()}
        case list():
            return [_literal(item) for item in value]
        case str():
            return bake_text(value)
        case _:
            return value
