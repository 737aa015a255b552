"""Every folder and file of unit tests runs alone: it finds what it imports from other tests."""

import re
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
IMPORTS = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
ADDED = re.compile(r'^sys\.path\.\w+\(.*"(\w+)"\)', re.MULTILINE)  # a folder that the file adds by itself


def roots(file: Path) -> set[Path]:
    """What pytest puts on the path for a file: its folder, and those above that have a conftest.

    A folder of a package counts as the one that the package is in.
    """
    above = [file.parent, *(folder for folder in file.parents if (folder / "conftest.py").exists())]
    return {folder.parent if (folder / "__init__.py").exists() else folder for folder in above}


def missing(file: Path, homes: dict[str, set[Path]]) -> list[str]:
    text, own = file.read_text(), roots(file)
    added = set(ADDED.findall(text))
    return [
        f"{file.relative_to(UNIT)}: {name}"
        for name in sorted(set(IMPORTS.findall(text)))
        if name in homes and not homes[name] & own and not any(home.name in added for home in homes[name])
    ]


@pytest.mark.thorough
def test_no_test_needs_a_module_that_only_another_folders_tests_bring() -> None:
    files = sorted(UNIT.parent.rglob("*.py"))
    homes: dict[str, set[Path]] = {}
    for file in files:
        homes.setdefault(file.stem, set()).add(file.parent)
        if file.name == "__init__.py":
            homes.setdefault(file.parent.name, set()).add(file.parents[1])
    homes.pop("conftest", None)
    found = [fault for file in files if file.is_relative_to(UNIT) for fault in missing(file, homes)]
    assert found == []
