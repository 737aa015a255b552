"""Reads a saved JSON report.

Its text is trusted no more than an image's: control characters are escaped again.
"""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from buildtool.audit.report.schema import SCHEMA_VERSION, AuditReport
from buildtool.errors import DataError
from buildtool.jsontext import Json
from probes.shared import files
from probes.shared.codec import Misfit, decode, load
from probes.shared.invocation import host_command
from probes.shared.quoting import terminal

MAX_REPORT_BYTES = 64 << 20
_LARGEST = (1 << 63) - 1  # of a count of bytes or of anything else


def read_report(path: Path) -> AuditReport:
    """The report in a file. Raises DataError for one that can't be read or isn't a report."""
    try:
        text = files.read_text(path, most_bytes=MAX_REPORT_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(
                f"{path} is too large to be read as an audit report: more than {MAX_REPORT_BYTES >> 20} MiB",
                "audit the image itself",
            ) from error
        raise DataError(f"can't read {path}: {error.strerror or error}", "check the path") from error
    except UnicodeDecodeError as error:
        raise _not_a_report(f"{path}: not UTF-8 text") from error
    return parse_report(text, str(path))


def parse_report(text: str, label: str) -> AuditReport:
    """The report that `schema.to_json` wrote. Raises DataError naming the faulty place."""
    try:
        document = load(text)
    except ValueError as error:
        raise _not_a_report(f"{label}: not JSON ({error})") from error
    try:
        top = _trusted(document, label)
        if isinstance(top, Mapping) and (version := top.get("schema_version")) != SCHEMA_VERSION:
            raise Misfit(
                f"{label}: schema_version is {repr(version)[:60]}, this program reads {SCHEMA_VERSION}"
            )
        return decode(AuditReport, top, label)
    except Misfit as error:
        raise _not_a_report(error) from error


def _trusted(value: Json, where: str) -> Json:
    """With text fit for a terminal; what isn't a count of anything is refused."""
    if isinstance(value, str):
        return terminal(value, keep="\n\t")
    if isinstance(value, Mapping):
        return {terminal(key): _trusted(item, f"{where}.{key[:60]}") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_trusted(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, int) and not 0 <= value <= _LARGEST:
        raise Misfit(f"{where}: expected a count, found '{str(value)[:60]}'")
    return value


def _not_a_report(why: object) -> DataError:
    return DataError(
        terminal(f"{why}: this is not an audit report"),
        f"write one with: {host_command()} audit IMAGE --json FILE",
    )
