"""Which layers of an image belong to its base image, inferred from its history: no manifest records it."""

import re
from dataclasses import dataclass

from buildtool.audit.read.documents import ImageConfig
from probes.shared.quoting import terminal

_CMD = re.compile(r"(/bin/sh -c #\(nop\)\s++)?CMD\b")
# `ADD file:0123 in / ` by docker, debuerreotype's note by Debian, `ADD rootfs.tar /` by buildkit
_ADDED_TO_ROOT = re.compile(r"(?:/bin/sh -c #\(nop\)\s++)?ADD (\S++)( in)? /\s*+(?:$|#)")
_BY_DEBIAN = "# debian.sh "
_NAME = "org.opencontainers.image.base.name"


@dataclass(frozen=True)
class Base:
    """The lowest `n_layers` layers, and what shows it; 0 where nothing shows a base."""

    n_layers: int = 0
    told_by: str = ""
    name: str = ""


def find_base(config: ImageConfig) -> Base:
    """The base of an image that was built on one; a base image itself has none."""
    n_layers = len(config.diff_ids)
    name = terminal(config.labels.get(_NAME, ""))
    if sum(step.has_layer for step in config.history) != n_layers:
        return Base()
    below = 0
    ends: list[int] = []
    for step in config.history:
        below += step.has_layer
        if _CMD.match(step.command) and 0 < below < n_layers:
            ends.append(below)
    if ends:
        return Base(ends[-1], "the CMD that ends it in the history", name)
    made = [step.command for step in config.history if step.has_layer]
    if n_layers > 1 and _adds_root_tree(made[0]):
        return Base(1, "its first step, which adds a root file system", name)
    return Base()


def _adds_root_tree(command: str) -> bool:
    added = _ADDED_TO_ROOT.match(command)
    if not added:
        return command.startswith(_BY_DEBIAN)
    what, by_docker = added.groups()
    return what.startswith("file:") if by_docker else "rootfs" in what or ".tar" in what[1:]
