"""The largest files and directories of an image."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest

from buildtool.audit.read.merge import Merged
from probes.shared.quoting import terminal


@dataclass(frozen=True)
class FileRow:
    """One of the largest visible files."""

    path: str
    unpacked_bytes: int
    layer: int
    owner: str


def largest_files(merged: Merged, count: int, name_of: Callable[[int], str]) -> tuple[FileRow, ...]:
    """Visible files; `name_of` gives the owner of a row."""
    best: list[tuple[int, int]] = []
    for index, start in zip(merged.layers, merged.starts, strict=True):
        rows = (
            (size, start + at) for at, size in enumerate(index.sizes) if size and merged.shown[start + at]
        )
        best = nlargest(count, [*best, *nlargest(count, rows)])
    return tuple(
        FileRow(terminal(merged.path(row)), size, merged.layer_of(row), name_of(row)) for size, row in best
    )


def largest_directories(own: Mapping[bytes, int], count: int) -> tuple[tuple[bytes, int], ...]:
    """From the bytes directly in each; those that a single child fills to nine tenths are left out."""
    best: list[tuple[int, bytes]] = []
    fullest: Counter[bytes] = Counter()  # of each directory of one level, its largest child
    for level in sums_by_level(own):
        above: Counter[bytes] = Counter()
        for directory, n_bytes in level.items():
            parent = directory.rpartition(b"/")[0]
            above[parent] = max(above[parent], n_bytes)
        telling = ((n, path) for path, n in level.items() if fullest[path] < 0.9 * n)
        best = nlargest(count, [*best, *nlargest(count, telling)])
        fullest = above
    return tuple((path, n_bytes) for n_bytes, path in best)


def sums_by_level(own: Mapping[bytes, int]) -> Iterator[Mapping[bytes, int]]:
    """Bytes below each directory but the root, from those directly in each.

    The deepest directories come first, one level at a time: paths may be long and many.
    """
    levels: defaultdict[int, Counter[bytes]] = defaultdict(Counter)
    for directory, n_bytes in own.items():
        levels[directory.count(b"/") + 1 if directory else 0][directory] = n_bytes
    for depth in range(max(levels, default=0), 0, -1):
        level = levels.pop(depth, Counter())
        for directory, n_bytes in level.items():
            levels[depth - 1][directory.rpartition(b"/")[0]] += n_bytes
        yield level
