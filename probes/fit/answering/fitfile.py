"""An answer of `fit` as a file: its JSON form, its schema, and how it is read again."""

import json
from pathlib import Path
from typing import Final

from probes.errors import ReportError
from probes.fit.question import FIT_SCHEMA, FitReport
from probes.records.json_schema import document
from probes.shared import files
from probes.shared.codec import Misfit, check_figures, decode, encode, load
from probes.shared.invocation import probe_command

MOST_BYTES: Final = 16 << 20


def to_json(report: FitReport) -> str:
    """The answer as a file holds it."""
    return json.dumps(encode(report), indent=1, allow_nan=False) + "\n"


def is_fit(path: Path) -> bool:
    """Whether a file holds an answer of `fit`; a file that can't be read doesn't."""
    try:
        value = load(files.read_text(path, most_bytes=MOST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.get("schema") == FIT_SCHEMA


def named_fit(path: Path, *, name: Path | None = None) -> tuple[FitReport, str]:
    """The answer in a file, and the text that it was read from. Raises ReportError, which calls it `name`."""
    make_one = f"make one: {probe_command()} fit MODEL --json FILE"
    try:
        text = files.read_text(path, most_bytes=MOST_BYTES)
        value = load(text)
        check_figures(value)
        return decode(FitReport, value, "answer"), text
    except OSError as error:
        raise ReportError(f"can't read {name or path}: {error.strerror or error}", make_one) from error
    except (UnicodeDecodeError, Misfit, ValueError) as error:
        raise ReportError(f"{name or path} can't be used: {str(error)[:200]}", make_one) from error


def fit_schema() -> str:
    """The JSON Schema of answers."""
    return document(
        FitReport,
        title="Weir fit",
        description="What a model takes in a pass or a training step, and the largest batch and longest "
        "sequence within a budget. What is under `measured` comes from trials; all else is predicted.",
        versions={"schema": (FIT_SCHEMA,)},
    )
