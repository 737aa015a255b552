"""Where benches say their bars: a JSON line each on standard output, and all of them in docs/results/.

`python tests/bench/bench_NAME.py` writes docs/results/bench-NAME.json when it has run as a whole; README and
the docs take their figures from there (`make readme-figures`). Progress goes to standard error.
"""

import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from buildtool.files import write_text

RESULTS = Path(__file__).parents[2] / "docs" / "results"
_BEGUN = time.monotonic()


class Board:
    """Prints each bar, remembers whether one was missed, and keeps the results.

    `name` is the results file's, from the program's own name unless given. Where only a part is run
    (`whole` is false) the last results of the whole stay as they are.
    """

    def __init__(
        self, name: str = "", *, command: str = "", whole: bool = True, results: Path = RESULTS
    ) -> None:
        self.missed = False
        self.whole = whole
        self._name = name or Path(sys.argv[0]).stem.removeprefix("bench_").replace("_", "-")
        self._command = command or f"make bench-{self._name}"
        self.results = results
        self._file = results / f"bench-{self._name}.json" if whole else None
        self._rows: list[dict[str, object]] = []
        self._load_before = _load()
        self._begun = time.monotonic()

    def bar(
        self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False, **more: object
    ) -> None:
        """A figure and what it must not exceed (`at_least`: fall below)."""
        ok = value >= limit if at_least else value <= limit
        self.missed |= not ok
        must_be = "at least" if at_least else "at most"
        row = {"bar": name, "value": _short(value), "must_be": must_be, "limit": limit, "unit": unit}
        self.line({**row, "ok": ok, **more})

    def waive(self, name: str, why: str) -> None:
        """A bar that can't be judged here, and why."""
        self.line({"bar": name, "value": None, "waived": why})

    def figure(self, name: str, value: float | str, unit: str, **more: object) -> None:
        """A result without a limit, for README and the docs."""
        self.line(
            {
                "figure": name,
                "value": value if isinstance(value, str) else _short(value),
                "unit": unit,
                **more,
            }
        )

    def line(self, row: dict[str, object]) -> None:
        """Anything else worth a line."""
        self._rows.append(row)
        print(json.dumps(row), flush=True)

    def finish(self) -> int:
        """Write the results and return the exit code: 1 where a bar was missed."""
        ran = {
            "bench": self._name,
            "command": self._command,
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.monotonic() - self._begun, 1),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "load": [self._load_before, _load()],
        }
        if self._file:
            write_text(self._file, json.dumps({**ran, "rows": self._rows}, indent=1) + "\n")
        tell(
            ("a bar was missed" if self.missed else "all bars hold") + f"; {self._file or 'a part: not kept'}"
        )
        return int(self.missed)


def _short(value: float) -> float:
    """Counts as they are, measurements to six digits."""
    return int(value) if isinstance(value, int) else float(f"{value:.6g}")


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def tell(line: str) -> None:
    """Progress, with the seconds since the bench began."""
    print(f"[{time.monotonic() - _BEGUN:6.1f}s] {line}", file=sys.stderr, flush=True)
