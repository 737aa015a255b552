"""What every engine has: files, a check, a start, and an end that can be awaited."""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from buildtool.core.progress import Progress
from buildtool.launch.job import Job

POLL_S = 5.0  # a site's controller answers many users
MOST_FAILURES = 20  # of a question to the controller, one after another


LAST_LINES = 20
_CAUSE = re.compile(r"\berror: |failed \(exitcode")  # of a rank, srun, slurmstepd; of torchrun


@dataclass(frozen=True)
class Text:
    """One rendered file: a batch script, or a YAML document."""

    name: str
    text: str


@dataclass(frozen=True)
class Ended:
    """How a run ended, in the engine's words. `cause`: lines that say why it failed."""

    run: str
    ok: bool
    state: str
    cause: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """One engine. All but `render` raise EnvironmentMissing and CommandFailed."""

    render: Callable[[Job], tuple[Text, ...]]
    check: Callable[[Job, Progress], None]  # have the engine itself judge the files, starting nothing
    submit: Callable[[Job, Progress], str]  # start it; returns the engine's id of it
    follow: Callable[[Job, str, Progress], tuple[Ended, ...]]  # pass on what it prints, until it has ended


class Output:
    """Passes lines on as they come, and keeps those that look like the cause of a failure."""

    def __init__(self, progress: Progress, before: str = "") -> None:
        self._progress = progress
        self._before = before
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._errors: deque[str] = deque(maxlen=LAST_LINES)

    def __call__(self, line: str) -> None:
        """Pass a line on."""
        self._progress(f"{self._before}{line}")
        (self._errors if _CAUSE.search(line) else self._last).append(line)

    @property
    def cause(self) -> tuple[str, ...]:
        """Each line once; the last ones where none names an error."""
        return tuple(dict.fromkeys(self._errors or self._last))
