"""The tree that an image's layers make together, as one stream of members: what squashfs and directories get.

Two passes over the layers: the first finds whose member each path is, as engines apply layers (whiteouts,
opaque directories, links on the way to a path), the second gives those members with their content.
"""

import io
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

from buildtool.core.errors import DataError
from buildtool.image.streams import decompressed, peek, sniff
from buildtool.image.tar import normal_path

Open = Callable[[], Iterator[bytes]]  # a layer's bytes, as stored
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MAX_LINKS = 40  # on the way to a path, as Linux: path_resolution(7)


@dataclass
class _Tree:
    """Where each path of the merged tree comes from."""

    members: dict[str, tuple[int, int]] = field(default_factory=dict)  # path -> layer and position there
    links: dict[str, str] = field(default_factory=dict)  # symbolic links -> their targets
    hard: dict[str, tuple[int, str]] = field(default_factory=dict)  # hard links -> layer and target
    directories: set[str] = field(default_factory=lambda: {""})  # also those that are no members
    names: dict[str, set[str]] = field(default_factory=dict)  # directory -> the paths in it

    def place(self, path: str) -> str:
        """A path with the links on the way to its last part followed. Raises DataError for a circle."""
        followed = 0
        done, rest = "", [part for part in posixpath.dirname(path).split("/") if part]
        while rest:
            part = rest.pop(0)
            here = f"{done}/{part}" if done else part
            if here in self.links:
                followed += 1
                if followed > _MAX_LINKS:
                    raise DataError(f"links on the way to /{path} lead in a circle")
                target = normal_path(posixpath.join("/", done, self.links[here]))
                done, rest = "", [*(each for each in target.split("/") if each), *rest]
            else:
                done = here
        return posixpath.join(done, posixpath.basename(path))

    def add(self, path: str, at: tuple[int, int], *, is_directory: bool) -> None:
        """Put a member into the tree, in place of what was there; a directory keeps what is in it."""
        if not (is_directory and path in self.directories):
            self.remove(path)
        above = posixpath.dirname(path)
        while above not in self.directories:  # which no member needs to have made
            self.remove(above)
            self.directories.add(above)
            self.names.setdefault(posixpath.dirname(above), set()).add(above)
            above = posixpath.dirname(above)
        self.names.setdefault(posixpath.dirname(path), set()).add(path)
        self.members[path] = at
        if is_directory:
            self.directories.add(path)

    def remove(self, path: str, *, below: int | None = None, itself: bool = True) -> None:
        """Take out a path with all in it, or what is in it alone; of what layers `below` a number have."""
        waiting = [path] if itself else [*self.names.get(path, ())]
        while waiting:
            each = waiting.pop()
            waiting += self.names.get(each, ())
            if below is not None and self.members.get(each, (-1, 0))[0] >= below:
                continue
            self.members.pop(each, None)
            self.links.pop(each, None)
            self.hard.pop(each, None)
            if below is None:
                self.directories.discard(each)
                self.names.pop(each, None)


@dataclass(frozen=True)
class Entry:
    """A member of the merged tree; `content` gives a regular file's bytes until the next entry is taken."""

    info: tarfile.TarInfo  # its name is the path in the tree, without a leading slash
    content: Iterator[bytes]
    layer: int = 0  # whose member it is, from the bottom


def flattened(layers: Sequence[Open]) -> Iterator[Entry]:
    """Every member of the merged tree, each path once, a directory before what is in it.

    Raises DataError for layers that can't be read.
    """
    try:
        yield from _flattened(layers)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"a layer is damaged: {error}", "make or fetch the image again") from error


def _flattened(layers: Sequence[Open]) -> Iterator[Entry]:
    tree, places = _Tree(), []
    for number, layer in enumerate(layers):
        with _opened(layer) as tar:
            places.append(_apply(tar, number, tree))
    # the content of a hard link whose target is another file by now goes to the first such link
    heirs: dict[tuple[int, str], list[str]] = {}
    for path, (number, target) in tree.hard.items():
        if tree.members.get(target, (number, 0))[0] != number or target not in tree.members:
            heirs.setdefault((number, target), []).append(path)
    for number, layer in enumerate(layers):
        with _opened(layer) as tar:
            for at, info in enumerate(tar):
                path = places[number][at]
                kept = tree.members.get(path) == (number, at)
                waiting = [] if kept else heirs.get((number, path), [])
                if info.isreg() and waiting:
                    yield _entry(tar, info, waiting[0], number)
                    for other in waiting[1:]:
                        yield Entry(_link(info, other, waiting[0]), iter(()), number)
                elif kept and info.islnk():
                    if tree.hard[path] not in heirs:
                        yield Entry(_link(info, path, tree.hard[path][1]), iter(()), number)
                elif kept:
                    yield _entry(tar, info, path, number)


def _apply(tar: tarfile.TarFile, number: int, tree: _Tree) -> list[str]:
    """Apply a layer to the tree; the path of each of its members, empty for one that isn't in a tree."""
    paths = []
    for at, info in enumerate(tar):
        path = tree.place(normal_path(info.name))
        folder, name = posixpath.split(path)
        if name.startswith(_WHITEOUT):
            hidden = folder if name == _OPAQUE else posixpath.join(folder, name[len(_WHITEOUT) :])
            tree.remove(hidden, below=number, itself=name != _OPAQUE)
            paths.append("")
            continue
        paths.append(path)
        if not path:
            continue
        linked = _content_of(tree, number, info) if info.islnk() else None
        tree.add(path, (number, at), is_directory=info.isdir())
        if info.issym():
            tree.links[path] = info.linkname
        if linked is not None:
            tree.hard[path] = linked
    return paths


def _content_of(tree: _Tree, number: int, link: tarfile.TarInfo) -> tuple[int, str]:
    """The layer and the path of the content that a hard link names, through other links."""
    target = tree.place(normal_path(link.linkname))
    layer, _ = tree.members.get(target, (number, 0))
    return tree.hard.get(target, (layer, target))


def _entry(tar: tarfile.TarFile, info: tarfile.TarInfo, path: str, layer: int) -> Entry:
    own = copy(info)
    own.name = path
    return Entry(own, _content(tar, info) if info.isreg() else iter(()), layer)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(info)
    while file and (piece := file.read(1 << 20)):
        yield piece


def _link(info: tarfile.TarInfo, path: str, target: str) -> tarfile.TarInfo:
    own = copy(info)
    own.name, own.type, own.linkname, own.size = path, tarfile.LNKTYPE, target, 0
    return own


def _opened(layer: Open) -> tarfile.TarFile:
    head, chunks = peek(layer())
    plain = decompressed(chunks, sniff(head), place="a layer")
    stream = io.BufferedReader(_Chunks(plain), 1 << 20)
    return tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape")


class _Chunks(io.RawIOBase):
    """Chunks as a file that is read forwards."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """The next bytes; 0 at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        n_bytes = min(len(buffer), len(self._rest))
        buffer[:n_bytes] = self._rest[:n_bytes]
        self._rest = self._rest[n_bytes:]
        return n_bytes


def tar_chunks(entries: Iterator[Entry]) -> Iterator[bytes]:
    """Entries as a tar, in chunks, without names of users; attributes other than file capabilities go."""
    for entry in entries:
        info = copy(entry.info)
        info.uname = info.gname = ""
        kept = {"SCHILY.xattr.security.capability"} & info.pax_headers.keys()
        info.pax_headers = {key: info.pax_headers[key] for key in kept}
        info.mtime = int(info.mtime)
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        yield from entry.content
        yield bytes(-info.size % tarfile.BLOCKSIZE if info.isreg() else 0)
    yield bytes(2 * tarfile.BLOCKSIZE)


def is_device(info: tarfile.TarInfo) -> bool:
    """A device or a named pipe, which only root can make."""
    return not (info.isreg() or info.isdir() or info.issym() or info.islnk())


def mode_of(info: tarfile.TarInfo) -> int:
    """A mode that lets its owner read it, and list and change a directory."""
    return stat.S_IMODE(info.mode) | (0o700 if info.isdir() else 0o400)
