"""Where benches say their bars: a JSON line each on standard output, and all of them below reports/.

`python tests/bench/bench_NAME.py` writes reports/bench/NAME/bench-NAME.json when it has run as a whole, and
changes no file that git knows. `make keep-results BENCH=NAME` copies the results to docs/results/, from where
README and the docs take their figures. Progress goes to standard error.
"""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from buildtool.core.files import write_text

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "reports" / "bench"
_BEGUN = time.monotonic()

# what each bench measures: its results are older than their code once one of these files has changed
ALL = ("buildtool", "probes", "images")
IMAGES = ("buildtool/build", "buildtool/engine", "images")
PLACEMENT = ("probes/placement",)
KERNELS = ("kernels", "expert_kernels", "launch", "proof")
MEASURED = {
    "amd": (*(f"probes/placement/packing/{name}.py" for name in KERNELS), "tests/amd"),
    "audit": ("buildtool/audit", "buildtool/image", "buildtool/gpucode", "probes/core/quoting.py"),
    "build": IMAGES,
    "device-full": ("probes/measure",),
    "device-quick": ("probes/measure",),
    "device-noise": ("probes/measure",),
    "digest": IMAGES,
    "doctor": ("buildtool/doctor",),
    "fit": ("probes/fit",),
    "fit-gpu": ("probes/fit",),
    "gpucode-stack": ("buildtool/prune", "buildtool/gpucode", "buildtool/image"),
    "gpucode-wheels": ("buildtool/prune", "buildtool/gpucode", "buildtool/image"),
    "front": ("compose/nginx.conf",),
    "images": IMAGES,
    "launch": ("buildtool/launch", "probes/training"),
    "layout": IMAGES,
    "observe": ("buildtool/keep", "buildtool/observe", "images/left_out.py"),
    "placement": PLACEMENT,
    "placement-summary": ("tests/device/placing_summary.py",),  # judges what others measured
    "probes": ("probes/measure", "probes/records"),
    "prune": ("buildtool/prune", "buildtool/gpucode", *IMAGES),
    "sbom": ("buildtool/sbom", "buildtool/audit/packages.py", "buildtool/image"),
    "scan": ("probes/throughput",),
    "scan-gpu": ("probes/throughput",),
    "service": ("images/service",),
    "train": ("probes/training",),
    "training": PLACEMENT,
    "trouble": IMAGES,
    "watch": ("probes/watch",),
    "watch-gpu": ("probes/watch",),
}


def measured(bench: str) -> tuple[str, ...]:
    """Files and folders of the code that a bench measures: all of it where nobody has said which."""
    group = bench.partition("-")[0]
    return MEASURED.get(bench, MEASURED.get(group, ALL))


def code_digest(paths: Iterable[str]) -> str:
    """Of what is in the files: the same in every checkout, whatever its history."""
    digest = hashlib.sha256()
    for path in sorted({file for each in paths for file in _files(ROOT / each)}):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterable[Path]:
    """The file itself, or all in a folder but bytecode and the lock that a build writes there."""
    if path.is_file():
        return [path]
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and file.suffix != ".pyc" and file.name != "variants.lock.json"
    ]


class Board:
    """Prints each bar, remembers whether one was missed, and keeps the results.

    `name` is the results file's, from the program's own name unless given. Where only a part is run
    (`whole` is false) the last results of the whole stay as they are. `results`: the folder for what is kept.
    """

    def __init__(
        self, name: str = "", *, command: str = "", whole: bool = True, results: Path | None = None
    ) -> None:
        self.missed = False
        self.whole = whole
        self._name = name or Path(sys.argv[0]).stem.removeprefix("bench_").replace("_", "-")
        self._command = command or f"make bench-{self._name}"
        self.results = results or RUNS / self._name
        self._file = self.results / f"bench-{self._name}.json" if whole else None
        self._code = code_digest(measured(self._name))
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

    @property
    def rows(self) -> tuple[dict[str, object], ...]:
        """All lines so far."""
        return tuple(self._rows)

    def finish(self) -> int:
        """Write the results and return the exit code: 1 where a bar was missed."""
        ran = {
            "bench": self._name,
            "command": self._command,
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.monotonic() - self._begun, 1),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "code": self._code,
            "load": [self._load_before, _load()],
        }
        if self._file:
            write_text(self._file, json.dumps({**ran, "rows": self._rows}, indent=1) + "\n")
        unjudged = sum("waived" in row for row in self._rows)
        found = "a bar was missed" if self.missed else "no bar was missed" if unjudged else "all bars hold"
        tell(f"{found}{f', {unjudged} not judged' if unjudged else ''}; {self._file or 'a part: not kept'}")
        return int(self.missed)


def _short(value: float) -> float:
    """Counts as they are, measurements to six digits."""
    return int(value) if isinstance(value, int) else float(f"{value:.6g}")


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def tell(line: str) -> None:
    """Progress, with the seconds since the bench began."""
    print(f"[{time.monotonic() - _BEGUN:6.1f}s] {line}", file=sys.stderr, flush=True)
