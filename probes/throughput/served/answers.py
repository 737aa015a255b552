"""Reads HTTP/1.1 answers from bytes as they arrive, within limits. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from probes.core.codec import Json, load
from probes.throughput.served.payload import value_bytes

MOST_HEAD_BYTES = 64 << 10
MOST_BODY_BYTES = 64 << 20
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\r\n]*)?")


class Garbled(ValueError):
    """What came isn't an answer in HTTP/1.1, or is beyond our limits."""


class AnswerReader:
    """One answer. `feed` takes bytes until `done`; the body is counted, its first `keep_bytes` are kept."""

    def __init__(self, *, keep_bytes: int = 0) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.body_bytes = 0
        self.done = False
        self.keep_alive = True
        self._keep_bytes = keep_bytes
        self._rest = bytearray()
        self._left: int | None = None  # bytes of the body, or of a chunk; None: until the connection ends
        self._chunked = False
        self._in_chunk = False
        self._in_trailer = False

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return bool(self.status or self._rest)

    def feed(self, data: bytes) -> None:
        """Take some bytes. Raises Garbled."""
        if self.done:
            raise Garbled("more bytes came than the answer has")
        self._rest += data
        while not self.done and self._step():
            pass
        if self.done and self._rest:
            raise Garbled("more bytes came than the answer has")

    def end(self) -> bool:
        """The connection has ended; whether the answer is whole."""
        if self.status and self._left is None and not self._chunked:
            self.done = True
        return self.done

    def _step(self) -> bool:
        """One step of reading; whether another may be possible with what has come."""
        if not self.status:
            return self._head()
        if self._chunked and not self._in_chunk:
            return self._chunk_line()
        return self._some_body()

    def _head(self) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if not _could_begin(bytes(self._rest[:16])):
                raise Garbled(f"not HTTP: it begins with {bytes(self._rest[:16])!r}")
            if len(self._rest) > MOST_HEAD_BYTES:
                raise Garbled(f"a head of more than {MOST_HEAD_BYTES >> 10} KiB")
            return False
        first, *lines = bytes(self._rest[:end]).split(b"\r\n")
        del self._rest[: end + 4]
        found = _STATUS.fullmatch(first)
        if not found:
            raise Garbled(f"not HTTP: it begins with {first[:40]!r}")
        status = int(found[2])
        if status < 200:  # an interim answer; the real one follows
            if status == 101:
                raise Garbled("the server switched protocols")
            return True
        self.status = status
        self.headers = dict(_header(line) for line in lines)
        said = self.headers.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in said and (found[1] == b"1" or b"keep-alive" in said)
        self._framing()
        return True

    def _framing(self) -> None:
        coding = self.headers.get(b"transfer-encoding", b"").lower()
        length = self.headers.get(b"content-length")
        if self.status in (204, 304):
            self.done = True
        elif coding:
            if coding != b"chunked":
                raise Garbled(f"transfer coding {coding[:40]!r}")
            self._chunked = True
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise Garbled(f"Content-Length {length[:40]!r}")
            self._left = int(length)
            self._check_size(self._left)
            self.done = self._left == 0
        else:
            self.keep_alive = False

    def _chunk_line(self) -> bool:
        end = self._rest.find(b"\r\n")
        if end < 0:
            if len(self._rest) > MOST_HEAD_BYTES:
                raise Garbled("an endless chunk line")
            return False
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        if self._in_trailer:
            self.done = not line
            return not self.done
        if self._left == 0 and not line:  # the end of the chunk before
            self._left = None
            return True
        found = _CHUNK.fullmatch(line)
        if not found or self._left == 0:
            raise Garbled(f"a chunk's length {line[:40]!r}")
        self._left = int(found[1], 16)
        self._check_size(self.body_bytes + self._left)
        self._in_trailer = self._left == 0
        self._in_chunk = self._left > 0
        return True

    def _some_body(self) -> bool:
        piece = self._rest if self._left is None else self._rest[: self._left]
        if not piece:
            return False
        self.body_bytes += len(piece)
        self._check_size(self.body_bytes)
        if len(self.body) < self._keep_bytes:
            self.body += piece[: self._keep_bytes - len(self.body)]
        if self._left is None:
            self._rest = bytearray()
            return False
        del self._rest[: len(piece)]
        self._left -= len(piece)
        if self._left == 0:
            self._in_chunk = False
            self.done = not self._chunked
        return True

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > MOST_BODY_BYTES:
            raise Garbled(f"an answer of more than {MOST_BODY_BYTES >> 20} MiB")


def _could_begin(seen: bytes) -> bool:
    return seen.startswith(b"HTTP/1."[: len(seen)])


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name:
        raise Garbled(f"a header line {line[:40]!r}")
    return name.strip().lower(), value.strip()


JSON_LENGTH = b"inference-header-content-length"  # of an answer's JSON, where binary tensors follow it
READ_BYTES = 4096  # longer JSON is judged by its length alone: reading numbers takes the client's time
SHORTEST = 0.5  # of the first answer's length
_OTHER_VALUES = "with other values than an output's shape says"


@dataclass(frozen=True)
class Wanted:
    """What each answer must hold. `protocol`: outputs, one of them with `rows`, if the model takes any.

    `first_bytes`: the length of the answer before anything was timed; 0 for that one itself.
    """

    protocol: bool
    rows: int | None = None
    first_bytes: int = 0

    def outcome(self, answer: AnswerReader) -> str:
        """What an answer with status 200 lacks, alike for all that lack it; empty for a good one."""
        if answer.body_bytes < SHORTEST * self.first_bytes:
            return "status 200, but much shorter than the first answer"
        length = answer.headers.get(JSON_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() else answer.body_bytes
        if not self.protocol or (self.first_bytes and json_bytes > READ_BYTES):
            return ""
        why = lacking(bytes(answer.body[:json_bytes]), answer.body_bytes - json_bytes, rows=self.rows)
        return f"status 200, but {why}" if why else ""


def lacking(document: bytes, binary_bytes: int, *, rows: int | None) -> str:
    """What an answer lacks whose JSON is `document` and is followed by that many bytes; empty for nothing."""
    try:
        found = load(document)
    except ValueError:
        return "not in JSON"
    outputs = found.get("outputs") if isinstance(found, dict) else None
    if not isinstance(outputs, list) or not outputs:
        return "without outputs"
    left, first_sizes = binary_bytes, set()
    for one in outputs:
        shape = _shape(one)
        if not isinstance(one, dict) or shape is None:
            return "with an output that has no name, datatype or shape"
        parameters = one.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if not _has_its_values(one, math.prod(shape), size):
            return _OTHER_VALUES
        left -= size if isinstance(size, int) else 0
        first_sizes |= set(shape[:1])
    if left != 0:
        return _OTHER_VALUES
    return "" if rows is None or rows in first_sizes else "with no output that has a row for each input"


def _shape(output: Json) -> list[int] | None:
    """The shape of an output that says what it is."""
    if not isinstance(output, dict) or not all(isinstance(output.get(k), str) for k in ("name", "datatype")):
        return None
    shape = output.get("shape")
    sizes = shape if isinstance(shape, list) else [None]
    whole = [size for size in sizes if type(size) is int and size >= 0]
    return whole if len(whole) == len(sizes) else None


def _has_its_values(output: Mapping[str, Json], count: int, size: Json) -> bool:
    """Whether it has as many values as its shape says: of texts in binary form the size may be any."""
    if size is None:
        return _count(output.get("data")) == count
    each = value_bytes(str(output["datatype"]))
    return isinstance(size, int) and (size == count * each if each else size >= count)


def _count(data: Json) -> int:
    """The values in a list, which may be nested as its shape is."""
    return (
        sum(_count(item) if isinstance(item, list) else 1 for item in data) if isinstance(data, list) else -1
    )
