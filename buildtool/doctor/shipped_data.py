"""Reads the compatibility data that comes with this program."""

from functools import cache
from pathlib import Path

from buildtool.doctor.compatibility import Compatibility, read
from buildtool.yamltext import Limits, parse

FILE = Path(__file__).parent / "data" / "compatibility.yaml"
LIMITS = Limits(depth=8, nodes=50_000)


@cache
def compatibility() -> Compatibility:
    """The data. Raises ConfigError or DataError for a damaged installation."""
    return read(parse(FILE.read_text(encoding="utf-8"), str(FILE), LIMITS).data)
