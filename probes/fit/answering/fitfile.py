"""An answer of `fit` as a file: its JSON form, its schema, and how it is read again."""

from pathlib import Path
from typing import Final

from probes.errors import ReportError
from probes.fit.question import FIT_SCHEMA, FitReport
from probes.records.json_schema import document
from probes.records.reportfiles import json_of, reading, word_under
from probes.shared import files
from probes.shared.codec import check_figures, decode, shown
from probes.shared.invocation import probe_command

MOST_BYTES: Final = 16 << 20
FAMILY: Final = FIT_SCHEMA.rpartition("/")[0] + "/"  # of any version


def is_fit(path: Path) -> bool:
    """Whether a file holds an answer of `fit`, of any version; a file that can't be read doesn't."""
    return bool(word_under(path, "schema", FAMILY, most_bytes=MOST_BYTES))


def named_fit(path: Path, *, name: Path | None = None) -> tuple[FitReport, str]:
    """The answer in a file, and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} fit MODEL --json FILE"):
        text = files.read_text(path, most_bytes=MOST_BYTES)
        value = json_of(text)
        version = value.get("schema") if isinstance(value, dict) else None
        if version != FIT_SCHEMA:
            raise ReportError(
                f"its schema is {shown(version)}, this program reads {FIT_SCHEMA}",
                "read it with the Weir that wrote it",
            )
        check_figures(value)
        return decode(FitReport, value, "answer"), text


def fit_schema() -> str:
    """The JSON Schema of answers."""
    return document(
        FitReport,
        title="Weir fit",
        description="What a model takes in a pass or a training step, and the largest batch and longest "
        "sequence within a budget. What is under `measured` comes from trials; all else is predicted.",
        versions={"schema": (FIT_SCHEMA,)},
    )
