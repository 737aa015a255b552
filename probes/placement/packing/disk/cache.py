"""Packed tensors on disk, by content: what was packed once is read, not packed again.

An entry is named after the SHA-256 of the tensor's bytes, dtype and shape. A small file next to it notes
which range of which file (by inode, size and times, as git's index does) had which content: so a second load
finds the entry without reading the unpacked bytes. Both hold a digest that covers their own name, so one that
was damaged or copied over another is noticed and made again. Entries are written whole or not at all, and
several processes may use one folder.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

from probes.placement.packing.disk.content import Content, Origin, content_key, origin_key
from probes.placement.packing.disk.entryfile import Entry, opened, written
from probes.placement.packing.forms import PackedForm
from probes.placement.packing.packed import Packed, Put, form, scattered
from probes.placement.packing.staging import Buffers
from probes.placement.packing.tensors import Values
from probes.shared.files import replacing, sweep_partials, write_text

_MOST_BYTES: Final = 64 << 30
_ENTRY, _ORIGIN = ".packed", ".origin"
_NOTE_BYTES: Final = 64 + 1 + 64  # a key and a digest


def usual_folder(env: Mapping[str, str]) -> Path:
    """$WEIR_STATE/packed, else $XDG_CACHE_HOME/weir/packed, else ~/.cache/weir/packed."""
    if named := env.get("WEIR_STATE"):
        return Path(named) / "packed"
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path(env.get("HOME", "/")) / ".cache") / "weir" / "packed"


@dataclass(frozen=True)
class Kept:
    """A packed tensor of which only the outline is in memory."""

    outline: Packed
    content: Content
    cache: "Cache | None" = None
    key: str = ""

    @staticmethod
    def nowhere(content: Content, values: Values | None = None) -> "Kept | None":
        """One that is packed again when it is written; None where packing saves nothing."""
        found = content.pack(None, values)
        return Kept(found, content) if found else None

    def write(self, parts: Iterable[tuple[Packed, torch.Tensor]]) -> bool:
        """Bring parts of the outline to their buffers; False where the content isn't what it was.

        The bytes come from the cache, where a damaged entry is made again first.
        """
        put, of = scattered(parts), form(self.outline)
        if self.cache and self.cache.read(self.key, of, put):
            return True
        if self.cache and self.cache.restore(self.key, self.content) and self.cache.read(self.key, of, put):
            return True
        again = self.content.pack(put)
        return again is not None and form(again) == of


Looked = TypeVar("Looked")


class Cache:
    """A folder of packed tensors that together take at most `most_bytes`; those unused the longest go first.

    Nothing here raises for a folder that can't be read or written, or for a full disk: then the tensor is
    packed again.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = _MOST_BYTES, buffers: Buffers | None = None
    ) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._buffers = buffers or Buffers()
        self._swept = False  # of what killed processes left
        self._left = -1  # bytes that may be stored until the folder is looked through again

    def packed(self, content: Content, *, origin: Origin | None = None) -> Kept | None:
        """The tensor packed; None where that saves nothing.

        The content isn't read where the origin is known already.
        """
        before = origin_key(origin, content.dense) if origin else None
        key = self._noted(before) if before else None
        found = self._outline(key) if key else None
        if key is None or found is None:
            values = content.values()
            key = content_key(values, dense=content.dense, buffers=self._buffers)
            found = self._outline(key) or self._store(key, content, values)
            if found is None:
                return Kept.nowhere(content, values)
            if origin and before and before == origin_key(origin, content.dense):  # not changed meanwhile
                self._note(before, key)
        return Kept(found[0], content, self, key) if found[0] else None

    def read(self, key: str, of: PackedForm, put: Put) -> bool:
        """Give the bytes of an entry of that form to `put`. False where there is no such entry.

        A damaged entry is noticed at its end, when `put` has got wrong bytes, and removed.
        """

        def whole(entry: Entry) -> bool:
            return entry.header.form == of and entry.digest(self._buffers, put) == entry.header.digest

        return bool(self._look(key, whole))

    def restore(self, key: str, content: Content) -> bool:
        """Store an entry again; False where the content has another key now."""
        values = content.values()
        found = content_key(values, dense=content.dense, buffers=self._buffers)
        return found == key and self._store(key, content, values) is not None

    def _noted(self, origin: str) -> str | None:
        try:
            with opened(self.folder / (origin + _ORIGIN)) as file:
                said = file.read(_NOTE_BYTES + 1).decode("ascii", "replace")
        except OSError:
            return None
        key = said.partition(" ")[0]
        return key if said == _note_of(origin, key) else None

    def _note(self, origin: str, key: str) -> None:
        with suppress(OSError):
            write_text(self.folder / (origin + _ORIGIN), _note_of(origin, key), durable=False)

    def _outline(self, key: str) -> tuple[Packed | None] | None:
        """What is stored for a content, by its header; None if nothing is."""
        found = self._look(key, lambda entry: (entry.outline(),))
        if found:
            with suppress(OSError):
                os.utime(self._path(key))
        return found or None

    def _look(self, key: str, look: Callable[[Entry], Looked]) -> Looked | None:
        """What `look` finds in an entry; None if there is none. A damaged one is removed."""
        path = self._path(key)
        try:
            with opened(path) as file:
                if found := look(Entry.of(file, key)):
                    return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError):  # ValueError: Misfit, JSON, dtypes, lengths
            pass
        with suppress(OSError):
            path.unlink()
        return None

    def _store(self, key: str, content: Content, values: Values) -> tuple[Packed | None] | None:
        """Pack into an entry; None if it can't be written."""
        path = self._path(key)
        with suppress(OSError):
            if not self._swept:
                sweep_partials(self.folder)
                self._swept = True
            with replacing(path, durable=False) as partial_path:
                descriptor = os.open(partial_path, os.O_RDWR)
                try:
                    made = written(
                        descriptor, key, content, values, most_bytes=self.most_bytes, buffers=self._buffers
                    )
                finally:
                    os.close(descriptor)
            self._left -= path.stat().st_size
            if self._left < 0:
                self._make_room(path)
            return (made,)
        return None

    def _path(self, key: str) -> Path:
        return self.folder / (key + _ENTRY)

    def _make_room(self, newest: Path) -> None:
        """Remove what was unused the longest, until the rest fits.

        To look through a folder of many for each entry would take longer than to store them. So that is done
        again after an eighth of what is left has been stored.
        """
        found = []
        with os.scandir(self.folder) as files:
            for file in files:
                if file.name.endswith((_ENTRY, _ORIGIN)):
                    with suppress(FileNotFoundError):  # another process makes room as well
                        status = file.stat()
                        found.append(
                            (file.name == newest.name, status.st_mtime_ns, status.st_size, file.path)
                        )
        found.sort(reverse=True)
        room = self.most_bytes
        for _, _, size, path in found:
            room -= size
            if room < 0:
                Path(path).unlink(missing_ok=True)
        self._left = max(room, 0) // 8


def _note_of(origin: str, key: str) -> str:
    """What is noted under the name of an origin: the key of its content, and a digest of both."""
    return f"{key} {hashlib.sha256(f'{origin} {key}'.encode()).hexdigest()}"
