"""How this process was started, so that hints name a command that the reader can type there.

On the host that is `weir`, or `python -m buildtool` from a checkout; in a container, where only the probes
are, `python -m probes`.
"""

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROGRAM = "weir"


def host_command() -> str:
    """What starts the host's program."""
    return PROGRAM if _is_weir() else "python -m buildtool"


def probe_command() -> str:
    """What starts the probes."""
    return f"{PROGRAM} probe" if _is_weir() else "python -m probes"


@cache
def tool_version() -> str:
    """The version of the installed package; `source` where it isn't installed, as in our images."""
    try:
        return version("gpu-weir")
    except PackageNotFoundError:
        return "source"


def _is_weir() -> bool:
    return bool(sys.argv) and Path(sys.argv[0]).stem == PROGRAM
