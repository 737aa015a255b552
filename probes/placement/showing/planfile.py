"""A plan as a file: JSON, its schema, and its way back."""

from pathlib import Path
from typing import Final

from probes.errors import ReportError
from probes.placement.models.reading import named_path
from probes.placement.soundness import flaw
from probes.placement.values import CARDS_SCHEMA, PLAN_SCHEMA, CardsPlan, Plan
from probes.records.json_schema import document
from probes.records.reportfiles import reading
from probes.shared import files
from probes.shared.codec import decode, load

MOST_BYTES: Final = 64 << 20  # of a file; that of 100 blocks has 30 kB


def plan_schema() -> str:
    """The JSON Schema of plans."""
    return document(
        Plan,
        title="Weir placement plan",
        description="Where each block of a model goes on a machine, what that takes and how long a pass "
        "should last. All figures are predicted; `constants` says from what.",
        versions={"schema": (PLAN_SCHEMA,)},
    )


def cards_schema() -> str:
    """The JSON Schema of plans over several cards."""
    return document(
        CardsPlan,
        title="Weir placement plan over several cards",
        description="A model cut into stages, one for each of several equal cards, each with a plan of its "
        "own. All figures are predicted.",
        versions={"schema": (CARDS_SCHEMA,)},
    )


def read_plan(path: Path | str) -> Plan | CardsPlan:
    """The plan in a file. Raises UsageError, and ReportError, naming the file and what doesn't fit."""
    path = named_path(path, "plan")
    again = "make it again: plan MODEL --vram SIZE --json FILE"
    with reading(path, again):
        value = load(files.read_text(path, most_bytes=MOST_BYTES))
        schema = value.get("schema") if isinstance(value, dict) else None
        found: Plan | CardsPlan
        if schema == PLAN_SCHEMA:
            found = decode(Plan, value, "plan")
        elif schema == CARDS_SCHEMA:
            found = decode(CardsPlan, value, "plan")
        else:
            raise ReportError(f"it is not a plan of the schema {PLAN_SCHEMA} or {CARDS_SCHEMA}")
    parts = (found,) if isinstance(found, Plan) else found.cards
    if why := next(filter(None, map(flaw, parts)), "" if parts else "it is for no card"):
        raise ReportError(f"{path} is not a plan that can be followed: {why}", again)
    return found
