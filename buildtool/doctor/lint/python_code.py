"""Python inside scripts and images: device names that no torch has. Parsed, never run."""

import ast
from collections.abc import Iterator

from buildtool.doctor.lint.rules import Fault

NOT_DEVICES = ("rocm", "hip", "amd", "amdgpu", "radeon")
TAKE_A_DEVICE = {"device", "to", "set_default_device", "autocast", "Generator"}


def lint_python(text: str, first_line: int = 1) -> Iterator[Fault]:
    """Faults of a program; none for a text that isn't Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = [
                keyword.value
                for keyword in node.keywords
                if keyword.arg in ("device", "device_type", "map_location")
            ]
            first = node.args[:1] if _called(node) in TAKE_A_DEVICE else []
            for value in [*first, *named]:
                yield from _device(value, first_line)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _device(node: ast.expr, first_line: int) -> Iterator[Fault]:
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    if text.partition(":")[0].lower() in NOT_DEVICES:
        yield Fault(first_line + node.lineno - 1, "device-rocm", text)
    for part in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ():
        yield from _device(part, first_line)
