"""Where benches say their bars (a JSON line each, on standard output) and their progress (standard error)."""

import json
import sys
import time

_BEGUN = time.monotonic()


class Board:
    """Prints each bar and remembers whether one was missed."""

    def __init__(self) -> None:
        self.missed = False

    def bar(
        self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False, **more: object
    ) -> None:
        ok = value >= limit if at_least else value <= limit
        self.missed |= not ok
        self.line({"bar": name, "value": round(value, 4), "limit": limit, "unit": unit, "ok": ok, **more})

    def waive(self, name: str, why: str) -> None:
        self.line({"bar": name, "value": None, "waived": why})

    def line(self, row: dict[str, object]) -> None:
        print(json.dumps(row), flush=True)


def tell(line: str) -> None:
    """Progress, with the seconds since the bench began."""
    print(f"[{time.monotonic() - _BEGUN:6.1f}s] {line}", file=sys.stderr, flush=True)
