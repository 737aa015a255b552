"""Exit codes are an interface of scripts: each stays what the documentation says."""

import pytest

from buildtool.core import errors
from buildtool.core.errors import Exit, ToolError

CODES = {
    "BuildFailed": 4,
    "ConfigError": 2,
    "DataError": 5,
    "EngineForbidden": 3,
    "EngineUnavailable": 3,
    "EnvironmentMissing": 3,
    "ProofFailed": 4,
    "SourceUnreachable": 3,
    "ToolError": 4,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_no_kind_of_failure_changes_its_exit_code(name: str, code: int) -> None:
    error = getattr(errors, name)("it broke", "mend it")
    assert (error.exit_code, error.args, error.message, error.hint) == (
        code,
        ("it broke",),
        "it broke",
        "mend it",
    )
    assert str(error) == "it broke\n  mend it"


def test_an_exit_that_is_no_failure_has_its_number_too() -> None:
    assert (Exit.OK, Exit.FINDINGS, Exit.INTERRUPTED) == (0, 1, 130)
    assert sorted(Exit) == [0, 1, 2, 3, 4, 5, 130]


def test_a_failure_without_a_hint_is_its_message_alone() -> None:
    assert (str(ToolError("it broke")), ToolError("it broke").hint) == ("it broke", "")
