"""Every wait of the runtime is needed: without any one of them some random placement reads stale weights."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from late_lanes import Stale
from test_random_placements import run

from probes.placement.runtime import engine, place

SOURCE = Path(engine.__file__).read_text()


def waits():
    """The lines of engine.py on which a lane waits."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait"
    ]


def without(line):
    """The engine's class with that line doing nothing."""
    lines = SOURCE.splitlines()
    indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    lines[line - 1] = " " * indent + "pass"
    spec = importlib.util.spec_from_loader("engine_without_a_wait", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile("\n".join(lines), engine.__file__, "exec"), module.__dict__)
    return module.Engine


def test_the_runtime_waits_in_five_places():
    assert len(waits()) == 5


@pytest.mark.parametrize("number", range(5))
def test_without_a_wait_some_placement_is_wrong(number, monkeypatch):
    monkeypatch.setattr(place, "Engine", without(waits()[number]))
    with pytest.raises((Stale, AssertionError)):
        sum(run(seed) for seed in range(300))
