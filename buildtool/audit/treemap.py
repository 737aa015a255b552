"""An image's bytes by place, small enough to draw: directories and large files, each with what is in it.

A directory or file is kept when it holds 0.02 % of the image; smaller ones count for the
directory above. Layers, owner groups and kinds stay exact, and so does the sum below every kept directory.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from heapq import nlargest

from buildtool.audit.kinds import Kind
from buildtool.image.layer import join_path
from buildtool.image.merge import Merged
from probes.core.quoting import terminal


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
            (size, start + at)
            for at, size in enumerate(index.sizes)
            if size and merged.content_visible[start + at]
        )
        best = nlargest(count, [*best, *nlargest(count, rows)])
    return tuple(
        FileRow(terminal(merged.path(row)), size, merged.layer_of(row), name_of(row)) for size, row in best
    )


def largest_directories(own: Mapping[bytes, int], count: int) -> tuple[tuple[bytes, int], ...]:
    """Those with most bytes below, from those directly in each; not what one child fills to nine tenths."""
    best: list[tuple[int, bytes]] = []
    fullest: Counter[bytes] = Counter()  # of each directory of one level, its largest child
    for level in sums_by_level(own):
        above: Counter[bytes] = Counter()
        for directory, n_bytes in level.items():
            parent = directory.rpartition(b"/")[0]
            above[parent] = max(above[parent], n_bytes)
        kept = ((n, path) for path, n in level.items() if fullest[path] < 0.9 * n)
        best = nlargest(count, [*best, *nlargest(count, kept)])
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


MAX_ROWS = 8000  # some 2.5 MB of JSON
MAX_PATH_CHARS = 2_000_000  # of all rows: a path may have 4 KiB
KEPT_SHARE = 5000  # this fraction of the image's bytes: about 700 rows for an image of 20,000 files

_File = tuple[bytes, bytes, int, int, Kind, str]  # directory, name if large, layer, owner, kind, GPU target
NameOf = Callable[[int, bytes, int], tuple[str, str]]  # owner's number, directory, layer -> group and name


@dataclass(frozen=True)
class TreeRow:
    """Bytes of one layer, owner and kind at one place: a file, or a directory's small files together.

    `owner` is empty where several small ones were added up, `target` where it isn't GPU code for one.
    `n_files` leaves out empty files and hard links.
    """

    path: str
    is_file: bool
    layer: int
    group: str
    owner: str
    kind: str
    target: str
    unpacked_bytes: int
    visible_bytes: int
    n_files: int


@dataclass(frozen=True)
class Tree:
    """The rows, in the order of their paths; `least_bytes` is the smallest size of a place that is kept."""

    least_bytes: int = 1
    rows: tuple[TreeRow, ...] = ()


NO_TREE = Tree()


@dataclass(slots=True)
class _Sums:
    """Running sums of one TreeRow, in the order of its last fields."""

    unpacked_bytes: int = 0
    visible_bytes: int = 0
    n_files: int = 0

    def add(self, other: "_Sums") -> None:
        self.unpacked_bytes += other.unpacked_bytes
        self.visible_bytes += other.visible_bytes
        self.n_files += other.n_files


_Coarse = tuple[bytes, bool, int, str, str]  # path, is it a file, layer, owner group, kind
_Fine = tuple[str, str]  # owner, GPU target
_SEVERAL: _Fine = ("", "")


class TreeCounter:
    """Counts files as they come by, one at a time, then makes the tree."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._least = max(1, total_bytes // KEPT_SHARE)
        self._sums: dict[_File, _Sums] = {}

    def add(
        self,
        directory: bytes,
        name: bytes,
        size: int,
        *,
        layer: int,
        owner: int,
        kind: Kind,
        targets: tuple[str, ...],
        parts: Mapping[tuple[Kind, str], int],
        visible: bool,
    ) -> None:
        """One file; `parts` is what inside it is of another kind, by kind and GPU target."""
        place = directory, name if size >= self._least else b"", layer, owner
        rest = size
        for (part, target), n_bytes in parts.items():
            self._count((*place, part, target), n_bytes, visible=visible)
            rest -= n_bytes
        self._count((*place, kind, "+".join(targets)), rest, visible=visible).n_files += 1

    def _count(self, file: _File, n_bytes: int, *, visible: bool) -> _Sums:
        sums = self._sums.get(file)
        if sums is None:
            sums = self._sums[file] = _Sums()
        sums.unpacked_bytes += n_bytes
        if visible:
            sums.visible_bytes += n_bytes
        return sums

    def tree(self, name_of: NameOf) -> Tree:
        """All rows, with small ones merged; coarser where there are too many to draw."""
        least = self._least
        while True:
            rows = self._rows(name_of, least)
            small = len(rows) <= MAX_ROWS and sum(len(row.path) for row in rows) <= MAX_PATH_CHARS
            if small or least > self._total:
                return Tree(least, tuple(sorted(rows, key=lambda row: (row.path, -row.unpacked_bytes))))
            least *= 2

    def _rows(self, name_of: NameOf, least: int) -> list[TreeRow]:
        nearest, large = _Nearest(self._kept_directories(least)), self._large_files(least)
        cells: defaultdict[_Coarse, defaultdict[_Fine, _Sums]] = defaultdict(lambda: defaultdict(_Sums))
        for (directory, name, layer, owner, kind, target), sums in self._sums.items():
            group, owner_name = name_of(owner, directory, layer)
            is_file = (directory, name) in large
            path = join_path(directory, name) if is_file else nearest.of(directory)
            cells[path, is_file, layer, group, kind.value][owner_name, target].add(sums)
        return [
            TreeRow(terminal(path), is_file, layer, group, owner, kind, target, *astuple(sums))
            for (path, is_file, layer, group, kind), parts in cells.items()
            for (owner, target), sums in _merged(parts, least).items()
            if sums.unpacked_bytes
        ]

    def _large_files(self, least: int) -> set[tuple[bytes, bytes]]:
        sizes: Counter[tuple[bytes, bytes]] = Counter()
        for (directory, name, *_), sums in self._sums.items():
            if name:
                sizes[directory, name] += sums.unpacked_bytes
        return {file for file, n_bytes in sizes.items() if n_bytes >= least}

    def _kept_directories(self, least: int) -> set[bytes]:
        own: Counter[bytes] = Counter()
        for (directory, *_), sums in self._sums.items():
            own[directory] += sums.unpacked_bytes
        below = sums_by_level(own)
        return {b"", *(path for level in below for path, n_bytes in level.items() if n_bytes >= least)}


def _merged(parts: Mapping[_Fine, _Sums], least: int) -> Mapping[_Fine, _Sums]:
    """Small owners and targets of one place are merged, unless there is only one."""
    small = [fine for fine, sums in parts.items() if sums.unpacked_bytes < least]
    if len(small) < 2:
        return parts
    several = _Sums()
    for fine in small:
        several.add(parts[fine])
    large = {fine: sums for fine, sums in parts.items() if sums.unpacked_bytes >= least}
    return {**large, _SEVERAL: several}


class _Nearest:
    """Finds the kept directory at or above one; each directory on the way is examined once."""

    def __init__(self, kept: set[bytes]) -> None:
        self._known = {directory: directory for directory in kept}

    def of(self, directory: bytes) -> bytes:
        """Return the nearest directory that is kept."""
        passed = []
        while directory not in self._known:
            passed.append(directory)
            directory = directory.rpartition(b"/")[0]
        nearest = self._known[directory]
        self._known.update(dict.fromkeys(passed, nearest))
        return nearest
