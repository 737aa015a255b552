"""`__all__` names what a module offers: each name exists, and nobody takes a name that is not in it."""

import importlib
from pathlib import Path

import pytest
from architecture import taken

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for top in ("buildtool", "probes")
    for path in sorted((ROOT / top).rglob("*.py"))
    if not path.name.startswith("__")
}


EXPORTING = [name for name, path in MODULES.items() if "\n__all__ = " in path.read_text()]


@pytest.mark.parametrize("name", EXPORTING)
def test_a_module_has_every_name_that_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    assert [one for one in module.__all__ if not hasattr(module, one)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_no_module_takes_from_another_what_that_one_does_not_export() -> None:
    offered = {name: set(importlib.import_module(name).__all__) for name in EXPORTING}
    for path in MODULES.values():
        for module, names in taken(path):
            if module in offered:
                assert {name for name in names if f"{module}.{name}" not in MODULES} <= offered[module], path
