"""Every wait of the runtime is needed: without any one of them some random placement reads stale weights."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from late_lanes import Stale
from test_random_placements import run

from probes.placement.runtime import engine, placed_model

SOURCE = Path(engine.__file__).read_text()
WAITS = 5


def waits():
    """The lines of engine.py on which a stream waits. For replayed passes: `test_handed_over.py`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait"
        and ast.unparse(node.func.value) in ("stream", "self.streams.compute")
        and ast.unparse(node.args[0]) != "decode_buffer.computed"
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


def test_every_wait_is_tried():
    assert len(waits()) == WAITS


@pytest.mark.parametrize("number", range(WAITS))
def test_without_a_wait_some_placement_is_wrong(number, monkeypatch):
    monkeypatch.setattr(placed_model, "Engine", without(waits()[number]))
    # packed weights that are stale may not be unpackable at all
    with pytest.raises((Stale, AssertionError, IndexError, RuntimeError)):
        list(map(run, range(400)))
