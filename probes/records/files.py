"""Reads and writes files of all kinds of reports: tells them apart, and names the file in every refusal."""

import errno
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from probes.core import files
from probes.core.codec import Json, check_figures, load, shown
from probes.core.errors import ReportError

_REASONS = {
    errno.ENXIO: "nobody reads this pipe",
    errno.EAGAIN: "its reader doesn't keep up",
    errno.EPIPE: "its reader has gone",
}


def word_under(path: Path, key: str, start: str, *, most_bytes: int) -> str:
    """The text under a key of a file's JSON object if it begins with `start`; empty otherwise.

    Empty also for a file that can't be read.
    """
    try:
        text = files.read_text(path, most_bytes=most_bytes)
        # most files are of another kind: they are not parsed for this alone
        value = load(text) if json.dumps(start)[:-1] in text else None
    except (OSError, ValueError):
        return ""
    word = value.get(key) if isinstance(value, dict) else None
    return word if isinstance(word, str) and word.startswith(start) else ""


def json_of(text: str) -> Json:
    """The JSON value of a text. Raises ReportError."""
    try:
        return load(text)
    except ValueError as error:
        raise ReportError(f"not JSON: {error}") from error


def of_schema(path: Path, schema: str, *, most_bytes: int) -> tuple[Json, str]:
    """The JSON value of a file that says it is of a schema, and its text. Raises ReportError and OSError."""
    text = files.read_text(path, most_bytes=most_bytes)
    value = json_of(text)
    version = value.get("schema") if isinstance(value, dict) else None
    if version != schema:
        raise ReportError(
            f"its schema is {shown(version)}, this program reads {schema}",
            "read it with the Weir that wrote it",
        )
    check_figures(value)
    return value, text


@contextmanager
def reading(path: Path, make_one: str, verdict: str = "can't be used") -> Iterator[None]:
    """Raises ReportError, which names the file, where the block can't read it or make sense of it.

    `make_one` is what to type for a report that can be read.
    """
    try:
        yield
    except OSError as error:
        raise ReportError(f"can't read {path}: {error.strerror or error}", make_one) from error
    except UnicodeDecodeError as error:
        raise ReportError(f"can't read {path}: not UTF-8 text", make_one) from error
    except ValueError as error:
        raise ReportError(f"{path} is broken: {str(error)[:200]}", make_one) from error
    except ReportError as error:
        raise ReportError(f"{path} {verdict}: {error.message}", error.hint or make_one) from error


@contextmanager
def writing(path: Path, way_out: str) -> Iterator[None]:
    """Raises ReportError, which names the file and the way out, where the block can't write it."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"can't write {path}: {reason(error)}", way_out) from error


def reason(error: OSError) -> str:
    """Why a file can't be written, as a user sees it."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


@contextmanager
def reserving(path: Path | None, way_out: str) -> Iterator[Path | None]:
    """Where to write at the end of the block. Raises ReportError, as `writing`, now where that can't be."""
    with ExitStack() as stack:
        with writing(path or Path(), way_out):
            place = stack.enter_context(files.reserved(path)) if path else None
        yield place
