"""Every variable of the compose files is in .env.example with its default, and in the service's settings."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "compose.yaml", *sorted((ROOT / "compose").glob("*.yaml"))]
EXAMPLE = dict(re.findall(r"^# (\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^{}]*))?(?::\+[^{}]*)?\}")


def passed_on(path: Path) -> set[str]:
    """Variables without a value, which take the host's."""
    services = yaml.safe_load(path.read_text())["services"].values()
    return {
        name for each in services for name, value in (each.get("environment") or {}).items() if value is None
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_variable_of_compose_is_in_the_example_with_its_default(path: Path) -> None:
    for name, default in VARIABLE.findall(path.read_text()):
        assert name in EXAMPLE, f"{path.name}: {name}"
        assert not default or EXAMPLE[name] in (default, ""), name
    for name in passed_on(path):
        assert EXAMPLE.get(name) == "", f"{path.name}: {name}"


def test_the_example_and_the_docs_have_no_variable_that_compose_does_not_read() -> None:
    read = {name for path in FILES for name, _ in VARIABLE.findall(path.read_text())}
    read |= {name for path in FILES for name in passed_on(path)}
    assert set(EXAMPLE) == read
    told = (ROOT / "docs" / "service.md").read_text()
    ends = set(re.findall(r"`\.\.\.(_\w+)`", told))
    for name in read:
        assert name in told or any(name.endswith(end) for end in ends), name


def test_the_example_can_be_read_by_compose_and_changes_nothing_as_it_is() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
