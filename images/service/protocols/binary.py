"""The Open Inference Protocol's binary tensors: bytes behind the JSON, in the tensors' order. Values only.

Numbers are little-endian; an element of BYTES is a length of 4 bytes and as many bytes.
"""

import struct
from collections.abc import Sequence
from typing import Any

from service.errors import bad_request

HEADER = "inference-header-content-length"
_NUMBERS = {"INT64": "q", "INT32": "i"}


def split(body: bytes, declared: str | None) -> tuple[bytes, bytes]:
    """The JSON and the binary part; `declared` is the header's value, if any. Raises RequestError (400)."""
    if declared is None:
        return body, b""
    if not (declared.isascii() and declared.isdigit() and len(declared) < 12) or int(declared) > len(body):
        raise bad_request(f"Inference-Header-Content-Length must be a number from 0 to {len(body)}")
    return body[: int(declared)], body[int(declared) :]


def decode(data: bytes, datatype: str, count: int, name: str) -> list[Any]:
    """`count` elements of a tensor, no byte more or less. Raises RequestError (400)."""
    if datatype == "BYTES":
        return _decode_texts(data, count, name)
    kind = _NUMBERS[datatype]
    if len(data) != count * struct.calcsize(f"<{kind}"):
        raise bad_request(f"the binary data of {name} has {len(data)} bytes; its shape needs another number")
    return list(struct.unpack(f"<{count}{kind}", data))


def _decode_texts(data: bytes, count: int, name: str) -> list[str]:
    found: list[str] = []
    at = 0
    while len(found) < count and at + 4 <= len(data):
        (n_bytes,) = struct.unpack_from("<I", data, at)
        piece = data[at + 4 : at + 4 + n_bytes]
        at += 4 + n_bytes
        try:
            found.append(piece.decode())
        except UnicodeDecodeError as error:
            raise bad_request(f"element {len(found)} of {name} is no UTF-8") from error
    if len(found) != count or at != len(data):
        raise bad_request(f"the binary data of {name} doesn't hold {count} elements with their lengths")
    return found


def encode(values: Sequence[Any], datatype: str) -> bytes:
    """A tensor's bytes: BYTES or FP32."""
    if datatype == "BYTES":
        pieces = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)
    return struct.pack(f"<{len(values)}f", *values)
