"""How this process was started, so that hints name a command that the reader can type there.

On the host that is `weir`, or `python3 -m buildtool` from a checkout; in a container, where only the probes
are, `python3 -m probes`.
"""

import sys
from functools import cache
from pathlib import Path

from probes.core.commit import commit_of
from probes.core.quoting import command

PROGRAM = "weir"


def host_command() -> str:
    """The command that starts the host's program."""
    return PROGRAM if _is_weir() else "python3 -m buildtool"


def probe_command() -> str:
    """The command that starts the probes."""
    return f"{PROGRAM} probe" if _is_weir() else "python3 -m probes"


def probe_line(*words: str | Path) -> str:
    """A line to paste that starts the probes with these words: no path is read as an option."""
    shown = (f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else word for word in words)
    return command(*probe_command().split(), *map(str, shown))


@cache
def tool_version() -> str:
    """The version of the installed package; `source` where it isn't installed, as in our images."""
    # here, because Ctrl-C while a program is imported is a traceback, and this takes half of that time
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpu-weir")
    except PackageNotFoundError:
        return "source"


def version_line() -> str:
    """What `--version` prints: the version and, where it is known, the commit's first twelve digits."""
    commit = commit_of(Path(__file__).parents[2])
    return f"gpu-weir {tool_version()}{f' (commit {commit[:12]})' if commit else ''}"


def _is_weir() -> bool:
    return bool(sys.argv) and Path(sys.argv[0]).stem == PROGRAM
