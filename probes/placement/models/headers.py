"""The headers of safetensors files, checked: no weight is read, and no claim is believed unchecked.

The format: 8 bytes with the header's length (unsigned, little endian), the header (JSON: a name for each
tensor with dtype, shape and two offsets into the data), the data without gaps. Source: the format's README.
"""

import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from probes.core import files
from probes.core.codec import load
from probes.core.errors import CheckpointUnreadable
from probes.core.units import decimal_bytes
from probes.placement.models.description import DTYPE_BITS

MOST_HEADER_BYTES: Final = 25_000_000  # the format allows 100 MB; a model of 100,000 tensors takes about 12
MOST_INDEX_BYTES: Final = 25_000_000
MOST_DIMENSIONS: Final = 64  # as torch
LENGTH: Final = struct.Struct("<Q")

# safetensors' name of a dtype -> torch's
DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F6_E2M3": "float6_e2m3",  # which torch doesn't have yet
        "F6_E3M2": "float6_e3m2",
        "F4": "float4_e2m1fn_x2",
        "I16": "int16",
        "U16": "uint16",
        "F16": "float16",
        "BF16": "bfloat16",
        "I32": "int32",
        "U32": "uint32",
        "F32": "float32",
        "I64": "int64",
        "U64": "uint64",
        "F64": "float64",
        "C64": "complex64",
    }
)
PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})  # by torch.save
_DOWNLOAD_AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, and where its bytes are. `dtype` is safetensors' name: BF16, F32."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the file's beginning
    n_bytes: int


@dataclass(frozen=True)
class StoredFile:
    """The checked header of one safetensors file. Tensors are in the order of their data."""

    path: Path
    state: "FileState"
    tensors: tuple[StoredTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.state.n_bytes


@dataclass(frozen=True)
class FileState:
    """Identity, size and times of a file, by which a later change is noticed.

    A program can set back the time of the last write, as a copy that keeps times does, but not that of the
    last change. A new mode, name or link counts as a change, too.
    """

    n_bytes: int
    written_ns: int
    changed_ns: int
    inode: int
    links: int

    @staticmethod
    def of(descriptor: int) -> "FileState":
        """The state of an open file now."""
        now = os.fstat(descriptor)
        return FileState(now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_nlink)

    def is_still(self, now: "FileState") -> bool:
        """Whether it is the same file with the same content, as far as its state tells.

        A file that lost a name was replaced by another, as a download does it; its own content stays.
        """
        same = (self.n_bytes, self.written_ns, self.inode) == (now.n_bytes, now.written_ns, now.inode)
        return same and (now.changed_ns == self.changed_ns or now.links < self.links)


def read_header(path: Path) -> StoredFile:
    """The header of one file, checked against itself and the file's size.

    Raises CheckpointUnreadable, naming the file and what is wrong in it.
    """
    require_regular(path)
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # don't wait for a pipe that took the file's place
        with os.fdopen(descriptor, "rb") as file:
            state = FileState.of(file.fileno())
            size = state.n_bytes
            start = file.read(LENGTH.size)
            if len(start) < LENGTH.size:
                raise _unreadable(
                    path, f"it has {len(start)} bytes, fewer than a header's length takes", _DOWNLOAD_AGAIN
                )
            length = LENGTH.unpack(start)[0]
            _check_length(path, length, size)
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), "check the path and its permissions") from error
    if len(text) < length:
        raise _unreadable(path, "it was cut while it was read", _DOWNLOAD_AGAIN)
    tensors = _tensors(path, _parsed(path, text, "its header"), LENGTH.size + length)
    _check_data(path, tensors, LENGTH.size + length, size)
    return StoredFile(path, state, tensors)


def read_checkpoint(path: Path) -> tuple[StoredFile, ...]:
    """The files of a checkpoint: a file, a folder of files, or an index that names each tensor's file.

    Of an indexed file, only the tensors that the index names are kept. Raises CheckpointUnreadable.
    """
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) == 1:
            return _read_indexed(indexes[0])
        if indexes:
            raise _unreadable(path, f"it has {len(indexes)} indexes", f"name one of them: {indexes[0]}")
        paths = sorted(path.glob("*.safetensors"))
        if not paths:
            raise _nothing_in(path)
        return _without_duplicates(tuple(map(read_header, paths)))
    return _read_indexed(path) if path.name.endswith(".json") else (read_header(path),)


def require_regular(path: Path) -> None:
    """Raise CheckpointUnreadable for anything but a regular file: opening a pipe waits for a writer."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), "check the path and its permissions") from error
    if not stat.S_ISREG(mode):
        raise _unreadable(path, "it is not a regular file", "give the file itself")


def _nothing_in(path: Path) -> CheckpointUnreadable:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        return _unreadable(
            path,
            f"its weights are pickles ({pickles[0][:80]}), which can run code when they are read",
            "convert them where you trust them: save_pretrained(folder) of transformers writes safetensors",
        )
    return _unreadable(path, "it has no file *.safetensors", "give the folder that has the model's weights")


def _unreadable(path: Path, what: str, hint: str = "") -> CheckpointUnreadable:
    return CheckpointUnreadable(f"can't read {path}: {what}", hint)


def _check_length(path: Path, length: int, size: int) -> None:
    """Check the header's stated length before reading it: a file can state any."""
    if length > size - LENGTH.size:
        raise _unreadable(
            path,
            f"its header should have {length:,} bytes, and the file has {size:,}: it is cut, or it isn't a "
            "safetensors file",
            _DOWNLOAD_AGAIN,
        )
    if length > MOST_HEADER_BYTES:
        most = decimal_bytes(MOST_HEADER_BYTES)
        raise _unreadable(path, f"its header has {decimal_bytes(length)}, more than the {most} read here")


def _parsed(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = load(text)
    except ValueError as error:
        raise _unreadable(
            path, f"{what} is not JSON that is read here: {str(error)[:120]}", _DOWNLOAD_AGAIN
        ) from error
    if not isinstance(value, dict):
        raise _unreadable(path, f"{what} is not a JSON object", _DOWNLOAD_AGAIN)
    return value


def _tensors(path: Path, header: Mapping[str, Any], data: int) -> tuple[StoredTensor, ...]:
    tensors = [_tensor(path, name, fields, data) for name, fields in header.items() if name != "__metadata__"]
    return tuple(sorted(tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes)))


def _tensor(path: Path, name: str, fields: object, data: int) -> StoredTensor:
    def wrong(what: str) -> CheckpointUnreadable:
        return _unreadable(path, f"its tensor {name[:120]!r} {what}", _DOWNLOAD_AGAIN)

    if not isinstance(fields, dict):
        raise wrong("is not described by an object")
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _unreadable(
            path,
            f"its tensor {name[:120]!r} has the dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}",
            "give a checkpoint in one of these, or only its config.json",
        )
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise wrong(f"has no valid shape: {str(shape)[:60]}")
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise wrong(f"has no valid data_offsets: {str(span)[:60]}")
    bits = math.prod(shape) * DTYPE_BITS[DTYPES[dtype]]
    if bits % 8:
        raise wrong(f"has {bits:,} bits by its shape, which aren't whole bytes")
    if bits != 8 * (span[1] - span[0]):
        stated = f"{bits // 8:,}" if bits < 2**66 else "more than 2^63"
        raise wrong(f"takes {stated} bytes by its shape and {span[1] - span[0]:,} by its offsets")
    return StoredTensor(name, dtype, tuple(shape), data + span[0], span[1] - span[0])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_data(path: Path, tensors: Sequence[StoredTensor], data: int, size: int) -> None:
    """Check that the tensors follow each other without gap or overlap up to the file's end."""
    at = data
    for tensor in tensors:
        if tensor.offset != at:
            how = "overlaps the one before it" if tensor.offset < at else "leaves a gap before it"
            raise _unreadable(path, f"its tensor {tensor.name[:120]!r} {how}", _DOWNLOAD_AGAIN)
        at += tensor.n_bytes
    if at != size:
        how = "cut" if at > size else "followed by other bytes"
        raise _unreadable(
            path, f"its header describes {at:,} bytes and it has {size:,}: it is {how}", _DOWNLOAD_AGAIN
        )


def _without_duplicates(stored_files: tuple[StoredFile, ...]) -> tuple[StoredFile, ...]:
    owners: dict[str, Path] = {}
    for stored in stored_files:
        for tensor in stored.tensors:
            if tensor.name in owners:
                raise _unreadable(
                    stored.path,
                    f"{owners[tensor.name].name} beside it has a tensor {tensor.name[:120]!r} too",
                    "name the file or the index that is meant",
                )
            owners[tensor.name] = stored.path
    return stored_files


def _read_indexed(index: Path) -> tuple[StoredFile, ...]:
    require_regular(index)
    try:
        text = files.read_text(index, most_bytes=MOST_INDEX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(index, getattr(error, "strerror", None) or "not UTF-8 text") from error
    places = _parsed(index, text.encode(), "the index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise _unreadable(index, "it has no weight_map", "give the folder or the safetensors file itself")
    names_by_file: dict[str, set[str]] = {}
    for name, place in places.items():
        if not isinstance(place, str) or not _is_beside(place):
            claim = f"it says that {name[:120]!r} is in {str(place)[:80]!r}"
            raise _unreadable(index, f"{claim}, which is not a file beside it")
        names_by_file.setdefault(place, set()).add(name)
    return tuple(
        _read_indexed_file(index, index.parent / place, names)
        for place, names in sorted(names_by_file.items())
    )


def _is_beside(name: str) -> bool:
    return name == os.path.basename(name) and name.endswith(".safetensors") and name.isprintable()  # noqa: PTH119


def _read_indexed_file(index: Path, path: Path, names: set[str]) -> StoredFile:
    stored = read_header(path)
    kept = tuple(tensor for tensor in stored.tensors if tensor.name in names)
    missing = names - {tensor.name for tensor in kept}
    if missing:
        raise _unreadable(
            path, f"{index.name} says that it has {min(missing)[:120]!r}, and it doesn't", _DOWNLOAD_AGAIN
        )
    return StoredFile(stored.path, stored.state, kept)
