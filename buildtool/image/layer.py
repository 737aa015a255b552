"""One layer's index: every member's path, kind and bytes in columns, so that 400,000 files fit in 40 MB.

Content is read once, while the layer streams by: package databases are kept, large files hashed and searched
for GPU code and debug information, small text files for credentials.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from buildtool.gpucode.source import GpuCodeError
from buildtool.image.debug_info import DebugCounter
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedTar
from buildtool.image.gpu_code import GpuCodeCounter
from buildtool.image.secrets import (
    SCANNED_BYTES,
    SearchScope,
    credentials_in_file,
    search_scope,
    should_search,
)
from buildtool.image.streams import MORE_UNPACKED, Fingerprint
from buildtool.image.tar import FILE, HARDLINK, SYMLINK, TarReader

HASHED_BYTES = 64 << 10  # files from this size on are hashed, to find the same content twice
# of memory for one entry with its place in the merged tree, in addition to its name (measured)
ENTRY_BYTES = 270
_DIGEST_BYTES = 200
_DIRECTORY_BYTES = 300  # of a dictionary in the merged tree with one name
_PIECE_BYTES = 64 << 10  # of a captured file that are decompressed at a time
_HUB_DOWNLOADS = b".cache/huggingface/download"  # huggingface_hub's, beside files that it brought
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
MORE_MEMORY = "allow more with --memory, for example --memory 1GiB"


@dataclass
class LayerIndex:
    """What a layer holds: a row per member, in the layer's order. Mappings are by row."""

    dirs: list[bytes] = field(default_factory=list)  # the same object for members of one directory
    names: list[bytes] = field(default_factory=list)
    sizes: "array[int]" = field(default_factory=lambda: array("q"))  # of content; 0 for all but files
    kinds: bytearray = field(default_factory=bytearray)
    links: dict[int, bytes] = field(default_factory=dict)  # targets
    digests: dict[int, bytes] = field(default_factory=dict)  # fingerprints of large files' content
    captured: dict[int, bytes] = field(default_factory=dict)  # package databases, by zlib
    gpu_code: dict[int, Mapping[str, int]] = field(default_factory=dict)  # of large files: target -> bytes
    fixed_code: dict[int, frozenset[str]] = field(default_factory=dict)  # targets whose code a prune zeroes
    alignments: dict[int, int] = field(default_factory=dict)  # of these: a prune shortens by multiples of it
    debug: dict[int, int] = field(default_factory=dict)  # bytes that `strip` would take out
    unread: dict[int, str] = field(default_factory=dict)  # why a file couldn't be inspected
    secrets: dict[int, tuple[str, ...]] = field(default_factory=dict)  # kinds of credentials in a small file
    secret_values: set[bytes] = field(default_factory=set, repr=False)  # which no report may repeat
    whiteouts: list[tuple[bytes, bytes]] = field(default_factory=list)  # of lower layers' members
    opaque: list[bytes] = field(default_factory=list)  # directories whose lower layers' members are hidden
    links_to_removed: set[int] = field(default_factory=set)  # hard links to what this layer removed before
    facts: dict[int, object] = field(default_factory=dict)  # what the caller's `Inspect` returned
    notes: tuple[str, ...] = ()  # oddities of the tar
    captured_bytes: int = 0  # before compression
    index_bytes: int = 0  # estimated memory

    @property
    def n_entries(self) -> int:
        """Members, directories included, whiteouts not."""
        return len(self.names)

    def path(self, row: int) -> bytes:
        """A member's path without a leading slash."""
        return join_path(self.dirs[row], self.names[row])

    def pieces(self, row: int) -> Iterator[bytes]:
        """A captured file's content. Raises KeyError where it wasn't captured."""
        decoder, rest = zlib.decompressobj(), self.captured[row]
        while rest:
            yield decoder.decompress(rest, _PIECE_BYTES)
            rest = decoder.unconsumed_tail


def join_path(directory: bytes, name: bytes) -> bytes:
    """A path from its directory (empty for the root) and name."""
    return directory + b"/" + name if directory else name


def split_path(path: bytes) -> tuple[bytes, bytes]:
    """Directory and name of a path, with `.`, `..` and doubled slashes resolved inside the image's root."""
    if not (path.startswith((b"/", b".")) or path.endswith(b"/") or b"//" in path or b"/." in path):
        directory, _, name = path.rpartition(b"/")
        return directory, name
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part and part != b".":
            parts.append(part)
    return (b"/".join(parts[:-1]), parts[-1]) if parts else (b"", b"")


# reads a file's content by its path and size, in place of searching it for code, debug information, secrets
Inspect = Callable[[bytes, int, Iterator[bytes]], object]
_FACT_BYTES = 700  # of memory for what it returns
_Capture = Callable[[bytes], bool]
_Directory = tuple[bytes, _Capture | None, SearchScope]  # path, which files to keep, which to search


def index_layer(
    reader: TarReader,
    *,
    place: str,
    limits: Limits = LIMITS,
    room_bytes: int | None = None,
    most_bytes: int | None = None,
    inspect: Inspect | None = None,
) -> LayerIndex:
    """Read a layer's tar to its end. `room_bytes` bounds its memory, `most_bytes` what files announce.

    With `inspect`, all files but package databases are given to it; what it returns is in `facts`.

    Raises MalformedTar, Truncated, LimitExceeded.
    """
    index = LayerIndex()
    room = limits.index_bytes if room_bytes is None else room_bytes
    known: dict[bytes, _Directory] = {}
    counted_dirs = {b""}
    add_dir, add_name = index.dirs.append, index.names.append
    add_size, add_kind = index.sizes.append, index.kinds.append
    removed: set[tuple[bytes, bytes]] = set()
    memory_bytes = announced_bytes = 0
    for path, kind, size, link in reader:
        head, _, name = path.rstrip(b"/").rpartition(b"/")
        if name in (b"..", b"."):
            head, name = split_path(path)
        directory = known.get(head)
        if directory is None:
            clean = join_path(*split_path(head))
            memory_bytes += len(head) + _DIGEST_BYTES + _memory_of_new(clean, counted_dirs)
            directory = known[head] = clean, capture_rule(clean), search_scope(clean)
        memory_bytes += ENTRY_BYTES + len(name)
        if memory_bytes > room:
            message = f"more entries than {limits.index_bytes >> 20} MiB of memory can index"
            raise LimitExceeded(message, place=place, hint=MORE_MEMORY)
        if name[:4] == _WHITEOUT:
            _note_whiteout(index, directory[0], name, place)
            removed.add((directory[0], name[4:]))
            continue
        if not name:
            continue  # the root itself
        row = len(index.names)
        add_dir(directory[0])
        add_name(name)
        add_size(size)
        add_kind(kind)
        if kind in (SYMLINK, HARDLINK):
            index.links[row] = link
            memory_bytes += _DIGEST_BYTES + len(link)
            if kind == HARDLINK and removed and split_path(link) in removed:
                index.links_to_removed.add(row)
                removed.add((directory[0], name))
        elif kind == FILE and size:
            announced_bytes += size
            if most_bytes is not None and announced_bytes > most_bytes:
                raise _too_large(index.path(row), size, most_bytes, place)
            memory_bytes += _read_content(index, reader, size, directory, limits=limits, inspect=inspect)
    reader.drain()
    index.index_bytes, index.notes = memory_bytes, tuple(reader.notes)
    return index


def _too_large(path: bytes, size: int, most_bytes: int, place: str) -> LimitExceeded:
    """Refuses a layer before it is read to its end, as for a sparse /var/log/lastlog, and names the file."""
    name = path.decode("utf-8", "backslashreplace")
    message = f"with {name} ({size:,} bytes), the layer unpacks to more than {most_bytes:,} bytes"
    return LimitExceeded(f"{message}, so its bytes stay unknown", place=place, hint=MORE_UNPACKED)


def _memory_of_new(directory: bytes, counted: set[bytes]) -> int:
    """Memory of a directory and its parents in the merged tree, in bytes, except for those in `counted`."""
    memory_bytes = 0
    while directory not in counted:
        counted.add(directory)
        memory_bytes += len(directory) + _DIRECTORY_BYTES
        directory = directory.rpartition(b"/")[0]
    return memory_bytes


# folders, and the files in them that are kept whole while streaming: what is installed, and by whom
_CAPTURED: tuple[tuple[_Capture, _Capture], ...] = (
    (lambda folder: folder == b"var/lib/dpkg", lambda name: name == b"status"),
    (lambda folder: folder == b"var/lib/dpkg/status.d", lambda _: True),
    (lambda folder: folder == b"var/lib/dpkg/info", lambda name: name.endswith(b".list")),
    (lambda folder: folder.endswith(b".dist-info"), lambda name: name in (b"RECORD", b"METADATA")),
    (lambda folder: folder.endswith(b".dist-info/sboms"), lambda name: name.endswith(b".cdx.json")),
    (lambda folder: folder.endswith(b"conda-meta"), lambda name: name.endswith(b".json")),
    (lambda folder: folder in (b"etc", b"usr/lib"), lambda name: name == b"os-release"),
    (lambda folder: _HUB_DOWNLOADS in folder, lambda name: name.endswith(b".metadata")),
)


def capture_rule(directory: bytes) -> _Capture | None:
    """Which files of a directory are kept whole while streaming: package databases. None for no file."""
    return next((rule for is_such, rule in _CAPTURED if is_such(directory)), None)


def _note_whiteout(index: LayerIndex, directory: bytes, name: bytes, place: str) -> None:
    if name == _OPAQUE:
        index.opaque.append(directory)
    elif name == _WHITEOUT or name[4:] in (b".", b".."):
        raise MalformedTar("a whiteout that names nothing", place=place)
    elif not name.startswith(b".wh..wh."):  # AUFS' own bookkeeping, not part of the image
        index.whiteouts.append((directory, name[4:]))


def _read_content(
    index: LayerIndex,
    reader: TarReader,
    size: int,
    directory: _Directory,
    *,
    limits: Limits,
    inspect: Inspect | None,
) -> int:
    """Keep the parts of the newest row's content that are needed; returns the bytes of memory used."""
    row = len(index.names) - 1
    name, (_, capture, scope) = index.names[row], directory
    if capture and capture(name) and size <= limits.captured_file_bytes:
        index.captured_bytes += size
        if index.captured_bytes <= limits.captured_bytes:
            index.captured[row] = zlib.compress(b"".join(reader.content()), 1)
            return len(index.captured[row])
        index.unread[row] = "the image's package databases are too large to keep"
        if inspect is None:
            return _DIGEST_BYTES
    if inspect is not None:
        index.facts[row] = inspect(index.path(row), size, reader.content())
        return _FACT_BYTES
    if size > SCANNED_BYTES or not should_search(name, scope):
        return _inspect_content(index, row, size, reader.content()) if size >= HASHED_BYTES else 0
    content = b"".join(reader.content())
    credentials, memory_bytes = credentials_in_file(index.dirs[row], name, content), 0
    if credentials.kinds:
        index.secrets[row] = credentials.kinds
        index.secret_values |= credentials.values
        memory_bytes = _DIGEST_BYTES + sum(_DIGEST_BYTES + len(value) for value in credentials.values)
    if size >= HASHED_BYTES:
        memory_bytes += _inspect_content(index, row, size, iter((content,)))
    return memory_bytes


def _inspect_content(index: LayerIndex, row: int, size: int, pieces: Iterator[bytes]) -> int:
    """Hash a large file's content, look for GPU code and debug information; returns the memory used."""
    fingerprint, debug_counter = Fingerprint(), DebugCounter(size)
    gpu_code: Mapping[str, int] = {}
    gpu = GpuCodeCounter(size)
    for piece in pieces:
        fingerprint.feed(piece)
        gpu.feed(piece)
        debug_counter.feed(piece)
    try:
        gpu_code = gpu.stored_bytes_by_processor()
        debug = debug_counter.debug_bytes(other_bytes=sum(gpu_code.values()))
        if debug:
            index.debug[row] = debug
    except GpuCodeError as error:
        index.unread[row] = error.message
    if gpu_code:
        index.gpu_code[row] = gpu_code
        index.alignments[row] = gpu.alignment
        if gpu.fixed:
            index.fixed_code[row] = frozenset(gpu.fixed)
    index.digests[row] = fingerprint.value()
    return _DIGEST_BYTES
