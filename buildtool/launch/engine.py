"""What every engine has: files, a check, a start, and an end that can be awaited."""

from collections.abc import Callable
from dataclasses import dataclass

from buildtool.core.progress import Progress
from buildtool.launch.job import Job

POLL_S = 2.0


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
