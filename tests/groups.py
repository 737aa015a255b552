"""Runs a group of tests, and says last what failed: libraries write to the terminal while a program ends.

    groups.py GROUP PYTEST-ARGUMENT...    run one, by the Python that runs this
    groups.py GROUP... --outcome          a line for each, then the tests that failed: the end of `make test`

What became of a group is kept in .weir/tests/GROUP.json, with its slowest tests and those that keep a
processor busy longest.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".weir" / "tests"
WANTED = "WEIR_TEST_OUTCOME"  # conftest.py writes it there
SHOWN = 7  # failed tests: with make's own words they are the last ten lines


@dataclass(frozen=True)
class Outcome:
    """What became of a group; `failed` are tests, or files that couldn't be collected."""

    group: str
    code: int | None  # pytest's exit code; None: it didn't come to its end
    tests: int
    seconds: float
    processor_s: float  # of pytest and of the programs that it waited for, not of what an engine runs for it
    failed: list[str]
    # tests and their seconds: of the clock, of a processor
    slowest: list[tuple[str, float]] = field(default_factory=list)
    busiest: list[tuple[str, float]] = field(default_factory=list)

    def line(self) -> str:
        if self.code is None:
            return f"{self.group:<14}  no results: it didn't run, or was killed"
        said = f"{len(self.failed)} failed" if self.failed else "all passed"
        if self.code and not self.failed:
            said = f"exit code {self.code}, although no test failed"
        took = f"{self.seconds:.0f} s ({self.processor_s:.0f} s of a processor)"
        return f"{self.group:<14}  {self.tests:>5} tests in {took}: {said}"


def run(group: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest in a process of its own, to its very end."""
    KEPT.mkdir(parents=True, exist_ok=True)
    found, kept = KEPT / f"{group}.run", KEPT / f"{group}.json"
    for path in (found, kept):
        path.unlink(missing_ok=True)
    begun, busy = time.monotonic(), _children_s()
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    code = subprocess.run(command, env={**os.environ, WANTED: str(found)}, check=False).returncode
    told = json.loads(found.read_text()) if found.exists() else {"tests": 0, "failed": []}
    seconds, spent = time.monotonic() - begun, _children_s() - busy
    outcome = Outcome(group, code, seconds=seconds, processor_s=spent, **told)
    kept.write_text(json.dumps(asdict(outcome)))
    return outcome


def _children_s() -> float:
    """Processor time of all programs that were waited for, in seconds."""
    taken = os.times()
    return taken.children_user + taken.children_system


def load(group: str) -> Outcome:
    """As it was kept."""
    kept = KEPT / f"{group}.json"
    return Outcome(**json.loads(kept.read_text())) if kept.exists() else Outcome(group, None, 0, 0, 0, [])


def report(outcomes: Sequence[Outcome]) -> int:
    """Say what became of the groups, what failed last; 1 where something did."""
    for outcome in outcomes:
        print(outcome.line())
    failed = [f"FAILED {outcome.group}: {name}" for outcome in outcomes for name in outcome.failed]
    for line in failed[: SHOWN if len(failed) <= SHOWN else SHOWN - 1]:
        print(line)
    if len(failed) > SHOWN:
        print(f"and {len(failed) - SHOWN + 1} more: see .weir/tests")
    return int(any(outcome.code != 0 for outcome in outcomes))


def main(words: Sequence[str]) -> int:
    if words[-1] == "--outcome":
        return report([load(group) for group in words[:-1]])
    outcome = run(words[0], words[1:])
    print()  # a library's last line may have no end
    report([outcome])
    return outcome.code if outcome.code and outcome.code > 0 else int(outcome.code != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
