"""Runs a Python program and reports what torch's allocator holds, for `weir probe watch --torch-allocator`.

It is given to the program's own Python by its path, so it needs only the standard library and works without
this package: `python allocatorhook.py script.py ...`, `-m module ...` or `-c code ...`. It never imports
torch: it looks whether the program has. What it writes, a JSON line each time, goes to the descriptor in
WEIR_ALLOCATOR_FD.
"""

import json
import os
import runpy
import sys
import threading
import time
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

VARIABLE = "WEIR_ALLOCATOR_FD"
EVERY_S = 0.25
SNAPSHOT_EVERY_S = 5.0  # listing every block takes milliseconds


def held(torch: Any, device: int) -> dict[str, int]:  # noqa: ANN401 - a module that this one never imports
    """The allocator's counters of one device, in bytes."""
    stats: Mapping[str, int] = torch.cuda.memory_stats(device)
    return {
        "device": device,
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "most_allocated": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "most_reserved": stats.get("reserved_bytes.all.peak", 0),
        "split": stats.get("inactive_split_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "out_of_memory": stats.get("num_ooms", 0),
    }


def largest_free(torch: Any, device: int) -> int:  # noqa: ANN401
    """The largest free block within what the allocator has reserved."""
    blocks = (
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )
    return max(blocks, default=0)


class Reporter(threading.Thread):
    """Writes a line for each device whenever something changed."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(daemon=True)
        self._descriptor = descriptor
        self._most: dict[int, int] = {}
        self._snapshot_s = -SNAPSHOT_EVERY_S
        self._last: dict[int, dict[str, int]] = {}

    def run(self) -> None:
        """Report until the program ends."""
        while True:
            self.report()
            time.sleep(EVERY_S)

    def report(self) -> None:
        """Report once, if the program uses torch on a GPU."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        with suppress(Exception):  # whatever is wrong here must not reach the program
            if cuda is not None and cuda.is_initialized():
                for device in range(cuda.device_count()):
                    self._one(torch, device)

    def _one(self, torch: Any, device: int) -> None:  # noqa: ANN401
        found = held(torch, device)
        if not found["most_reserved"] or found == self._last.get(device):
            return
        self._last[device] = dict(found)
        if found["reserved"] > self._most.get(device, 0):
            if time.monotonic() - self._snapshot_s >= SNAPSHOT_EVERY_S:
                self._snapshot_s = time.monotonic()
                found["largest_free"] = largest_free(torch, device)
            self._most[device] = found["reserved"]
        os.write(self._descriptor, json.dumps(found).encode() + b"\n")


def run(words: list[str]) -> None:
    """Run a program as `python WORDS...` would."""
    if words[:1] == ["-m"]:
        sys.argv = words[1:]
        _import_first_from(os.getcwd())  # noqa: PTH109
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[:1] == ["-c"]:
        sys.argv = ["-c", *words[2:]]
        _import_first_from("")
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(words[1], "<string>", "exec"), main_module.__dict__)
    else:
        sys.argv = words
        _import_first_from(os.path.dirname(os.path.abspath(words[0])))  # noqa: PTH100, PTH120
        runpy.run_path(words[0], run_name="__main__")


def _import_first_from(place: str) -> None:
    """Set `sys.path[0]` to the program's directory, as Python does unless it was started with -P or -I."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has no -P
        sys.path[0] = place


def main() -> None:
    """Start the reporter and the program."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdecimal():
        run(sys.argv[1:])
        return
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    reporter = Reporter(descriptor)
    reporter.start()
    try:
        run(sys.argv[1:])
    finally:
        reporter.report()


if __name__ == "__main__":
    main()
