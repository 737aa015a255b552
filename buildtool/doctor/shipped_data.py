"""Reads the data that comes with this program: compatibility, and the linter's rules."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from buildtool.doctor.compatibility import Compatibility, read
from buildtool.doctor.lint.fault import Rule
from buildtool.yamltext import Limits, parse
from probes.shared.codec import decode

FILE = Path(__file__).parent / "data" / "compatibility.yaml"
RULES = FILE.parent / "rules.yaml"
LIMITS = Limits(depth=8, nodes=50_000)


@cache
def compatibility() -> Compatibility:
    """The data. Raises ConfigError or DataError for a damaged installation."""
    return read(parse(FILE.read_text(encoding="utf-8"), str(FILE), LIMITS).data)


@cache
def rules() -> Mapping[str, Rule]:
    """The linter's rules by id. Raises as `compatibility`."""
    data = parse(RULES.read_text(encoding="utf-8"), str(RULES), LIMITS).data
    return {name: decode(Rule, one, name) for name, one in data.items()} if isinstance(data, dict) else {}
