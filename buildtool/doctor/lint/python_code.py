"""Python in scripts, images and command lines: device names that torch doesn't know. Parsed, never run."""

import ast
from collections.abc import Iterator

from buildtool.doctor.lint.rules import Checks, Fault

NOT_DEVICES = ("rocm", "hip", "amd", "amdgpu", "radeon")
TAKE_A_DEVICE = {"device", "to", "set_default_device", "autocast", "Generator"}
DEVICE_KEYWORDS = ("device", "device_type", "map_location")

call_checks = Checks[[ast.Call, int]]()  # of a call, and of the number of lines above the program


def lint_python(text: str, first_line: int = 1) -> Iterator[Fault]:
    """The faults of a program that begins at a line; none for a text that isn't Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from call_checks(node, first_line - 1)


@call_checks.add
def _devices(call: ast.Call, above: int) -> Iterator[Fault]:
    devices = [keyword.value for keyword in call.keywords if keyword.arg in DEVICE_KEYWORDS]
    if _function(call) in TAKE_A_DEVICE:
        devices += call.args[:1]
    for device in devices:
        yield from _device(device, above)


def _function(call: ast.Call) -> str:
    """The name of the function or method that is called; empty where it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _device(node: ast.expr, above: int) -> Iterator[Fault]:
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    if text.partition(":")[0].lower() in NOT_DEVICES:
        yield Fault(above + node.lineno, "device-rocm", text)
    for part in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ():
        yield from _device(part, above)
