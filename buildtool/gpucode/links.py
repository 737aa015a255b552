"""Resolves paths and symbolic links inside a root: of a tree, or of an archive. Pure."""

import posixpath
from collections.abc import Mapping

_MAX_LINKS = 40  # as many as Linux follows
_MAX_PARTS = 4096  # of a path that links keep making longer

_Node = dict[str, "_Node | str"]  # names below a directory -> directory, or a link's target


def normal_path(path: str) -> str:
    """A path below the root, without `.`, `..` and slashes at its ends."""
    return posixpath.normpath("/" + path).lstrip("/")


class Links:
    """All symbolic links below a root, followed as the kernel does and never out of the root."""

    def __init__(self, said: Mapping[str, str]) -> None:
        """`said` maps the path of each link to its target."""
        self._root: _Node = {}
        for path, to in said.items():
            node = self._root
            *directories, name = path.split("/")
            for directory in directories:
                below = node.setdefault(directory, {})
                if not isinstance(below, dict):
                    break  # that directory is a link itself: the path leads elsewhere
                node = below
            else:
                node[name] = to

    def place(self, path: str) -> str | None:
        """Where a name itself is: links on the way are followed, the last part isn't; None for a loop."""
        directory, _, name = path.rpartition("/")
        led = self.destination(directory)
        return led if led is None else f"{led}/{name}".lstrip("/")

    def destination(self, path: str) -> str | None:
        """Where a path leads in the end, whether or not something is there; None for a loop."""
        passed: list[tuple[str, _Node]] = []
        pending = path.split("/")[::-1]
        followed = 0
        while pending:
            part = pending.pop()
            if part == "..":
                del passed[-1:]
            elif part not in ("", "."):
                below = (passed[-1][1] if passed else self._root).get(part)
                if isinstance(below, str):
                    followed += 1
                    pending += below.split("/")[::-1]
                    if followed > _MAX_LINKS or len(pending) > _MAX_PARTS:
                        return None
                    if below.startswith("/"):
                        passed.clear()
                else:
                    passed.append((part, below or {}))
        return "/".join(name for name, _ in passed)
