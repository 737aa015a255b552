"""The largest files and directories of an image."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    return tuple(
        FileRow(terminal(merged.path(row)), merged.size(row), merged.layer_of(row), name_of(row))
        for row in _largest(merged, count)
    )


def largest_directories(own: Mapping[bytes, int], count: int) -> tuple[tuple[bytes, int], ...]:
    """From the bytes directly in each; those that a single child fills to nine tenths are left out."""
    levels: defaultdict[int, Counter[bytes]] = defaultdict(Counter)
    for directory, n_bytes in own.items():
        levels[depth_of(directory)][directory] = n_bytes
    best: list[tuple[int, bytes]] = []
    fullest: Counter[bytes] = Counter()  # of each directory of one level, its largest child
    for depth in range(max(levels, default=0), 0, -1):  # one level at a time: paths may be long and many
        above: Counter[bytes] = Counter()
        for directory, n_bytes in levels[depth].items():
            parent = directory.rpartition(b"/")[0]
            levels[depth - 1][parent] += n_bytes
            above[parent] = max(above[parent], n_bytes)
        telling = ((n, path) for path, n in levels.pop(depth).items() if fullest[path] < 0.9 * n)
        best = nlargest(count, [*best, *nlargest(count, telling)])
        fullest = above
    return tuple((path, n_bytes) for n_bytes, path in best)


def depth_of(directory: bytes) -> int:
    """Names in a directory's path; 0 for the root."""
    return directory.count(b"/") + 1 if directory else 0


def _largest(merged: Merged, count: int) -> Sequence[int]:
    best: list[tuple[int, int]] = []
    for index, start in zip(merged.layers, merged.starts, strict=True):
        rows = (
            (size, start + at) for at, size in enumerate(index.sizes) if size and merged.shown[start + at]
        )
        best = nlargest(count, [*best, *nlargest(count, rows)])
    return [row for _, row in best]
