"""The largest files and directories of an image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from buildtool.audit.merge import Merged


@dataclass(frozen=True)
class TopFile:
    """One of the largest visible files."""

    path: bytes
    unpacked_bytes: int
    layer: int
    owner: str


def largest_files(merged: Merged, count: int, name_of: Callable[[int], str]) -> tuple[TopFile, ...]:
    """Visible files; `name_of` tells the owner of a row."""
    return tuple(
        TopFile(merged.path(row), merged.size(row), merged.layer_of(row), name_of(row))
        for row in _largest(merged, count)
    )


def largest_directories(own: Mapping[bytes, int], count: int) -> tuple[tuple[bytes, int], ...]:
    """From the bytes directly in each; those that a single child fills to nine tenths are left out."""
    below: Counter[bytes] = Counter()
    for directory, n_bytes in own.items():
        below[directory] += n_bytes
        above = directory
        while above:
            above = above.rpartition(b"/")[0]
            below[above] += n_bytes
    fullest: Counter[bytes] = Counter()
    for directory, n_bytes in below.items():
        if directory:
            parent = directory.rpartition(b"/")[0]
            fullest[parent] = max(fullest[parent], n_bytes)
    telling = ((path, n) for path, n in below.items() if path and fullest[path] < 0.9 * n)
    return tuple(nlargest(count, telling, key=lambda row: (row[1], row[0])))


def _largest(merged: Merged, count: int) -> Sequence[int]:
    best: list[tuple[int, int]] = []
    for index, start in zip(merged.layers, merged.starts, strict=True):
        rows = (
            (size, start + at) for at, size in enumerate(index.sizes) if size and merged.shown[start + at]
        )
        best = nlargest(count, [*best, *nlargest(count, rows)])
    return [row for _, row in best]
