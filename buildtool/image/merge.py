"""Applies layers by the OCI rules, without writing files: what is visible at the end, and what is waste.

Whiteouts apply to lower layers only, wherever they are in the tar; a non-directory replaces a
directory and the other way round; parents are resolved through symbolic links inside the image, as
engines do (containerd's fs.RootPath). Time is linear in the layers' bytes: a path costs its own names,
and the names that symbolic links add to paths are bounded for the whole image.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from buildtool.image.errors import LIMITS, LimitExceeded, MalformedTar
from buildtool.image.layer import LayerIndex, split_path
from buildtool.image.tar import DIRECTORY, FILE, HARDLINK, SYMLINK

Tree = dict[bytes, "int | Tree"]  # name -> row of the last member there, or what the directory holds
_REMEMBERED = 20_000  # directories; a hostile package list names as many as it has lines
_HOPS = 255  # as many links as containerd follows in one path


@dataclass(frozen=True)
class Merged:
    """The image's file system, and every member of every layer: a row each, numbered across all layers.

    `visible[row]` is 1 for members, except directories, that are in the final tree, `content_visible[row]`
    for files whose content some visible path has: a hard link keeps the content of a removed path. `links`
    maps a hard link's row to the row that holds the content. `dangling` are links without a target.
    """

    layers: Sequence[LayerIndex]
    starts: Sequence[int]  # first row of each layer
    tree: Tree
    visible: bytearray
    content_visible: bytearray
    links: dict[int, int]
    dangling: tuple[int, ...]

    @cached_property
    def linked(self) -> frozenset[int]:
        """Rows that hard links lead to."""
        return frozenset(self.links.values())

    def layer_of(self, row: int) -> int:
        """The layer's position, bottom first."""
        return bisect_right(self.starts, row) - 1

    def digest(self, row: int) -> bytes | None:
        """The content's digest, None for files that were too small to be hashed."""
        layer = self.layer_of(row)
        return self.layers[layer].digests.get(row - self.starts[layer])

    def path(self, row: int) -> bytes:
        """A member's path without a leading slash."""
        layer = self.layer_of(row)
        return self.layers[layer].path(row - self.starts[layer])

    def size(self, row: int) -> int:
        """Bytes of content that this member itself brings; 0 for a hard link."""
        layer = self.layer_of(row)
        return self.layers[layer].sizes[row - self.starts[layer]]


class Finder:
    """Looks up paths in a merged tree.

    Caches few directories, because paths of one directory mostly come together.
    """

    def __init__(self, merged: Merged) -> None:
        self._walker = _Walker(merged.layers, merged.starts, merged.tree, merged.links)
        self._known: dict[bytes, Tree | None] = {}

    def row(self, path: bytes) -> int | None:
        """The row at a path; None for a missing path and for directories."""
        directory, _, name = path.rpartition(b"/")
        holder = self._holder(directory)
        row = holder.get(name) if holder is not None else None
        return row if isinstance(row, int) else None

    def names(self, directory: bytes) -> tuple[bytes, ...]:
        """What a directory holds; nothing for one that isn't there."""
        return tuple(self._holder(directory) or ())

    def _holder(self, directory: bytes) -> Tree | None:
        if directory not in self._known:
            if len(directory) >= LIMITS.path_bytes:
                return None  # no member has such a path
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[directory] = self._walker.holder(directory)
        return self._known[directory]


def merge(layers: Sequence[LayerIndex]) -> Merged:
    """Apply the layers, bottom first. Raises MalformedTar for parents that are links in a circle."""
    starts = [0, *accumulate(index.n_entries for index in layers)]
    total = starts.pop()
    merger = _Merger(layers, starts, total)
    for position in range(len(layers)):
        merger.apply(position)
    content_visible = bytearray(total)
    kinds = b"".join(bytes(index.kinds) for index in layers)
    for row in range(total):
        if merger.visible[row]:
            content = merger.links.get(row, row)
            if kinds[content] == FILE:
                content_visible[content] = 1
    return Merged(
        layers, starts, merger.tree, merger.visible, content_visible, merger.links, tuple(merger.dangling)
    )


class _Walker:
    """Finds the directory that a path leads to in a tree."""

    def __init__(
        self, layers: Sequence[LayerIndex], starts: Sequence[int], tree: Tree, links: dict[int, int]
    ) -> None:
        self._layers, self._starts, self.tree, self.links = layers, starts, tree, links
        self._link_steps = 0

    def holder(self, directory: bytes) -> Tree | None:
        """What a directory holds, links in its path followed; None when it isn't there."""
        entry: int | Tree | None = self.tree
        for part in directory.split(b"/") if directory else ():  # quick where no link and no `..` is met
            entry = entry.get(part) if isinstance(entry, dict) else None
            if not isinstance(entry, dict):
                return self._descend(directory)[1][-1]
        return entry if isinstance(entry, dict) else None

    def link(self, row: int) -> bytes | None:
        """A symbolic link's target, None for other members. A hard link to one is one, too."""
        row = self.links.get(row, row)
        position = bisect_right(self._starts, row) - 1
        index, at = self._layers[position], row - self._starts[position]
        return index.links[at] if index.kinds[at] == SYMLINK else None

    def _descend(self, directory: bytes) -> tuple[list[bytes], list[Tree | None]]:
        """The names of the directory's real path, and what is there at the root and at each of them.

        Engines accept `..` after a name that doesn't exist or isn't a directory: its place is None. Raises
        MalformedTar for links in a circle, and LimitExceeded.
        """
        names: list[bytes] = []
        trail: list[Tree | None] = [self.tree]
        waiting = directory.split(b"/")[::-1]
        hops = _HOPS
        while waiting:
            part = waiting.pop()
            if part in (b"", b".", b".."):
                if part == b".." and names:
                    names.pop()
                    trail.pop()
                continue
            above = trail[-1]
            child = above.get(part) if above is not None else None
            target = self.link(child) if isinstance(child, int) else None
            if target is None:
                names.append(part)
                trail.append(child if isinstance(child, dict) else None)
                continue
            hops -= 1
            if hops < 0:
                raise MalformedTar("symbolic links in a circle", place=repr(directory))
            if target[:1] == b"/":
                del names[:], trail[1:]
            waiting += target.split(b"/")[::-1]
            self._count_steps(target.count(b"/") + 1, directory)
        return names, trail

    def _count_steps(self, steps: int, directory: bytes) -> None:
        self._link_steps += steps
        if self._link_steps > LIMITS.link_steps:
            message = f"symbolic links lead through more than {LIMITS.link_steps:,} names"
            raise LimitExceeded(message, place=repr(directory))


class _Merger(_Walker):
    """The tree while layers are applied."""

    def __init__(self, layers: Sequence[LayerIndex], starts: Sequence[int], total: int) -> None:
        super().__init__(layers, starts, {}, {})
        self.visible = bytearray(total)
        self.dangling: list[int] = []
        self._known: dict[bytes, Tree] = {}
        self._removed: dict[tuple[bytes, bytes], int] = {}

    def apply(self, position: int) -> None:
        """Apply one layer: first what it removes, then what it adds."""
        index, start = self._layers[position], self._starts[position]
        self._known, self._removed = {}, {}
        self._apply_whiteouts(index)
        directory, entries = None, self.tree
        for at, (parent, name, kind) in enumerate(zip(index.dirs, index.names, index.kinds, strict=True)):
            if parent is not directory or not self._known:
                directory, entries = parent, self._holder_for(parent)
            old = entries.get(name)
            if kind == DIRECTORY:
                if not isinstance(old, dict):
                    if old is not None:
                        self.hide(old)
                    entries[name] = {}
                continue
            if kind == HARDLINK and not self._link(
                start + at, index.links[at], to_removed=at in index.links_to_removed
            ):
                if old is not None:
                    self.hide(entries.pop(name))
                continue
            if old is not None:
                self.hide(old)
            entries[name] = start + at
            self.visible[start + at] = 1

    def hide(self, row: "int | Tree") -> None:
        """Hide a member, or a whole directory."""
        waiting = [row]
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                waiting += item.values()
                self._known = {}
            else:
                self.visible[item] = 0
                if self._known and self.link(item) is not None:
                    self._known = {}

    def _holder_for(self, directory: bytes) -> Tree:
        """What a directory holds; it and its parents are created where something else or nothing is there."""
        holder = self._known.get(directory)
        if holder is None:
            above, _, name = directory.rpartition(b"/")
            parent = self._known.get(above)
            entry = parent.get(name) if parent is not None else None
            if parent is not None and entry is None:
                entry = self._create(parent, name)
            holder = entry if isinstance(entry, dict) else self._create_all(directory)
            self._known[directory] = holder
        return holder

    def _create_all(self, directory: bytes) -> Tree:
        names, trail = self._descend(directory)
        parent = holder = self.tree
        for name, entry in zip(names, trail[1:], strict=True):
            parent, holder = holder, self._create(holder, name) if entry is None else entry
        if b"/".join(names) == directory:  # the next directory is often a sibling of this one
            self._known[directory.rpartition(b"/")[0]] = parent
        return holder

    def _create(self, holder: Tree, name: bytes) -> Tree:
        """A new directory, replacing anything else at its place."""
        old = holder.get(name)
        if old is not None:
            self.hide(old)
        directory: Tree = {}
        holder[name] = directory
        return directory

    def _apply_whiteouts(self, index: LayerIndex) -> None:
        if not (index.opaque or index.whiteouts):
            return
        rows = zip(index.dirs, index.names, index.kinds, strict=True)
        own = {(directory, name) for directory, name, kind in rows if kind == DIRECTORY}
        for directory in dict.fromkeys(index.opaque):
            holder = self._below(directory, own)
            if holder:
                self.hide(dict(holder))
                holder.clear()
        for directory, name in index.whiteouts:
            holder = self._below(directory, own)
            if holder is not None and name in holder:
                removed = holder.pop(name)
                self.hide(removed)
                if isinstance(removed, int):
                    self._removed[directory, name] = removed

    def _below(self, directory: bytes, own: set[tuple[bytes, bytes]]) -> Tree | None:
        """What a directory held in lower layers.

        A link there that is replaced by the layer's `own` directory isn't followed: its target is another
        directory, which the whiteout isn't about.
        """
        if not directory:
            return self.tree
        above, _, name = directory.rpartition(b"/")
        holder, parts = self.tree, directory.split(b"/")
        if above in self._known:  # the last whiteout was often next to this one
            holder, parts = self._known[above], [name]
        for at, part in enumerate(parts):
            if at == len(parts) - 1:
                self._known[above] = holder
            child = holder.get(part)
            if child is None:
                return None
            if isinstance(child, int):
                place = b"/".join(parts[:at]) if len(parts) > 1 else above
                return None if (place, part) in own else self.holder(directory)
            holder = child
        return holder

    def _link(self, row: int, target: bytes, *, to_removed: bool) -> bool:
        """Find a hard link's content, as engines do: links on the way are followed, but not the last name.

        False for another name of a whiteout, which is what overlayfs keeps in the target's place.
        """
        directory, _, name = target.rstrip(b"/").rpartition(b"/")
        holder = self.holder(directory)
        row_of_target = holder.get(name) if holder is not None else None
        if row_of_target is None and to_removed:
            return False
        if row_of_target is None:  # a lower layer's file may be linked to and then removed in one layer
            row_of_target = self._removed.get(split_path(target))
        if isinstance(row_of_target, int):
            self.links[row] = self.links.get(row_of_target, row_of_target)
        else:
            self.dangling.append(row)
        return True
