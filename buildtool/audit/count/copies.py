"""The same content more than once in an image, and what made the copies."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from buildtool.audit.read.merge import Merged
from probes.shared.quoting import terminal

ROCM_TWICE = "ROCm in /opt/rocm and in torch/lib"
TWO_COPIES = "copied by two COPY steps"
LATER_RUN = "copied, or hard-linked, by a RUN in a later layer"
ONE_LAYER = "copies within a layer"
CHOWN = "chown or chmod in a later layer"
BROKEN_LINK = "a hard link made in a later layer"
SECOND_COPY = "the same COPY again"
REWRITTEN = "rewritten by a later layer"

_OWNERSHIP = re.compile(r"\bch(own|mod|grp)\b(?!=)")  # not COPY --chown=
_COPY = re.compile(r"(^|\s)(COPY|ADD)\s")


@dataclass(frozen=True)
class Maker:
    """What the command that made a layer can have done; computed once per layer, as commands may be long."""

    changes_owners: bool
    copies: bool

    @classmethod
    def of(cls, command: str) -> "Maker":
        """From the command's text, which is empty where the history doesn't record it."""
        return cls(bool(_OWNERSHIP.search(command)), bool(_COPY.search(command)))


@dataclass(frozen=True)
class Duplicate:
    """Visible files of the same content, `unpacked_bytes` each, and what made the copies."""

    unpacked_bytes: int
    wasted_bytes: int  # of all copies but one
    paths: tuple[str, ...]
    cause: str = ""  # in reports that were saved before there was one


@dataclass(frozen=True)
class Copies:
    """Duplicates, largest waste first; `extra` are the rows that could be links to another."""

    duplicates: tuple[Duplicate, ...]
    extra: frozenset[int]


def find_copies(merged: Merged, makers: Sequence[Maker]) -> Copies:
    """Group visible files by content. `makers` are what made each layer."""
    groups: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, digest in index.digests.items():
            if merged.shown[start + at]:
                groups[index.sizes[at], digest].append(start + at)
    found, extra = [], []
    for (size, _), rows in groups.items():
        if len(rows) > 1:
            paths = sorted(merged.path(row) for row in rows)
            cause = _cause(merged, makers, rows, paths)
            found.append(Duplicate(size, size * (len(rows) - 1), tuple(map(terminal, paths)), cause))
            extra += rows[1:]
    ordered = sorted(found, key=lambda row: (-row.wasted_bytes, row.paths))
    return Copies(tuple(ordered), frozenset(extra))


def cause_of_rewriting(merged: Merged, maker: Maker, row: int) -> str:
    """Why a layer made by `maker` repeats at `row` the content that the same path had in a lower layer."""
    if maker.changes_owners:
        return CHOWN
    if row in merged.linked:
        return BROKEN_LINK
    return SECOND_COPY if maker.copies else REWRITTEN


def _cause(merged: Merged, makers: Sequence[Maker], rows: list[int], paths: list[bytes]) -> str:
    if any(path.startswith(b"opt/rocm") for path in paths) and any(b"/torch/lib/" in path for path in paths):
        return ROCM_TWICE
    layers = {merged.layer_of(row) for row in rows}
    if len(layers) == 1:
        return ONE_LAYER
    return TWO_COPIES if all(makers[layer].copies for layer in layers) else LATER_RUN
