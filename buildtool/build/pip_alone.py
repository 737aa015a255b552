"""pip that starts no other program: `python -P pip_alone.py download --python-version=3.12 ...`.

A package that isn't a wheel says by code of its own what it is (setup.py, a build backend), and pip runs that
code as the user who builds. `--only-binary` keeps pip from choosing such a package on an index, and not from
following a path, a URL or a repository that a requirement names directly, which a wheel's own metadata can
do as well. All of that runs in programs that pip starts, so none is started here.

pip chooses files for the Python that is asked for, and what these files require for the one that it runs on:
`x; python_version >= "3.12"` would be left out in silence on an older one. Here both are the one asked for.
"""

import runpy
import sys
from types import FrameType

STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
# what of pip may start one: its question for a password (keyring), and which musl this host has
ALLOWED = {"pip._internal.network.auth", "pip._vendor.packaging._musllinux"}
REFUSAL = "only wheels are taken: this one would run code of its own on this host"


def refuse(event: str, _arguments: tuple[object, ...]) -> None:
    """An audit hook. Raises OSError where a program is about to start."""
    if event in STARTS and not _is_allowed(sys._getframe()):
        raise OSError(REFUSAL)


def _is_allowed(frame: FrameType | None) -> bool:
    while frame and frame.f_globals.get("__name__") not in ALLOWED:
        frame = frame.f_back
    return frame is not None


def judge_markers_for(python: str) -> None:
    """Have pip judge the markers of requirements by this version of Python, such as "3.12"."""
    from pip._vendor.packaging import markers

    host = markers.default_environment
    wanted = {"python_version": python, "python_full_version": f"{python}.0"}
    vars(markers)["default_environment"] = lambda: {**host(), **wanted}


if __name__ == "__main__":
    sys.addaudithook(refuse)
    for word in sys.argv:
        if word.startswith("--python-version="):
            judge_markers_for(word.partition("=")[2])
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
