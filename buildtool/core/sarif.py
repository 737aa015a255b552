"""SARIF 2.1.0 documents, within what GitHub's code scanning accepts: the audit and the linter fill them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from probes.core.codec import Json
from probes.core.quoting import sarif

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
# GitHub code scanning takes no more ("SARIF support for code scanning", upload limits)
MAX_RESULTS = 5_000
MAX_BYTES = 10_000_000
_SPARE_BYTES = 100_000  # for what surrounds the results


@dataclass(frozen=True)
class SarifTool:
    """The tool that reports: its name, version and rules."""

    name: str
    version: str
    rules: Sequence[Json]


def sarif_document(
    tool: SarifTool, results: Sequence[dict[str, Json]], *, left_out: int, bases: Mapping[str, Json]
) -> str:
    """A SARIF document of one run. `results` are those that code scanning accepts: see `fitting_results`."""
    run: dict[str, Json] = {
        "tool": {"driver": {"name": tool.name, "version": tool.version, "rules": [*tool.rules]}},
        "originalUriBaseIds": dict(bases),
        "columnKind": "unicodeCodePoints",
        "results": [*results],
    }
    if left_out:
        note = f"{left_out} results were left out, because code scanning accepts no more"
        run["invocations"] = [
            {"executionSuccessful": True, "toolExecutionNotifications": [{"message": {"text": sarif(note)}}]}
        ]
    whole: Json = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(whole) + "\n"


def fitting_results(results: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The first results, as many as code scanning accepts."""
    left, kept = MAX_BYTES - _SPARE_BYTES, []
    for result in results[:MAX_RESULTS]:
        # twice: the result, and what its rule may repeat of it
        left -= 2 * len(json.dumps(result))
        if left < 0:
            break
        kept.append(result)
    return kept
