"""An answer of `fit` as a file: its JSON form, its schema, and how it is read again."""

from pathlib import Path
from typing import Final

from probes.fit.question import FIT_SCHEMA, FitReport
from probes.records.json_schema import document
from probes.records.reportfiles import holds, json_of, reading
from probes.shared import files
from probes.shared.codec import check_figures, decode
from probes.shared.invocation import probe_command

MOST_BYTES: Final = 16 << 20


def is_fit(path: Path) -> bool:
    """Whether a file holds an answer of `fit`; a file that can't be read doesn't."""
    return holds(path, "schema", FIT_SCHEMA, most_bytes=MOST_BYTES)


def named_fit(path: Path, *, name: Path | None = None) -> tuple[FitReport, str]:
    """The answer in a file, and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} fit MODEL --json FILE"):
        text = files.read_text(path, most_bytes=MOST_BYTES)
        value = json_of(text)
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
