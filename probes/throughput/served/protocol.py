"""The Open Inference Protocol over HTTP: URLs of models, requests, checks of responses. Pure.

A request's body is one JSON document, followed by the tensors' bytes where the server takes binary tensors
(the protocol's `binary_tensor_data` extension): numbers in JSON cost the client more than the server.
"""

import json
import math
import random
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import quote, urlsplit

from probes.core.codec import Json, load
from probes.core.errors import ServerUnusable, UsageError

_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer)?/?")
_WRITE = "write it as http://127.0.0.1:8000, or http://127.0.0.1:8000/v2/models/NAME/infer"


@dataclass(frozen=True)
class Target:
    """A server, and of it a model of the Open Inference Protocol, or any path that takes a POST.

    `model` is empty where the URL and the command line name none; `path` is then the URL's own.
    """

    host: str
    port: int
    tls: bool
    path: str
    model: str
    prefix: str = ""  # of the path, before /v2

    @property
    def url(self) -> str:
        """Without anything secret: a user name in it isn't taken in the first place."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def parse_url(text: str, *, model: str = "") -> Target:
    """The target of a URL. Raises UsageError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {text[:200]!r}: {error}", _WRITE) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {text[:200]!r} is not an http or https URL", _WRITE)
    if port == 0:
        raise UsageError("--url has port 0, on which nothing listens", _WRITE)
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--url takes no user name, query or fragment", _WRITE)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"--url {text[:200]!r} holds characters that no URL has", _WRITE)
    tls = parts.scheme == "https"
    prefix, found = _model_in(parts.path)
    if found and model and found["model"] != quote(model, safe=""):
        raise UsageError(
            f"--url names the model {found['model']!r}, --served-model {model!r}", "give one of the two"
        )
    path = parts.path.rstrip("/")
    if found or model:
        path = found[0].rstrip("/").removesuffix("/infer") if found else f"/v2/models/{quote(model, safe='')}"
        path = f"{prefix if found else path_prefix(parts.path)}{path}/infer"
        name = found["model"] if found else quote(model, safe="")
        return Target(parts.hostname, port or _usual(tls), tls, path, name, prefix)
    return Target(parts.hostname, port or _usual(tls), tls, path, "", path_prefix(parts.path))


def path_prefix(path: str) -> str:
    """What stands before /v2 in a server's paths."""
    return path.rstrip("/").removesuffix("/v2")


def _model_in(path: str) -> tuple[str, re.Match[str] | None]:
    at = path.find("/v2/models/")
    return (path[:at], _MODEL.fullmatch(path[at:])) if at >= 0 else ("", None)


def _usual(tls: bool) -> int:
    return 443 if tls else 80


SAMPLES = 32  # different bodies, sent by turns
MOST_VALUES = 4_000_000  # of all bodies together: about a second to draw
TEXT_WORDS = 10  # of each text; a word counts as a value
MOST_IDS = 1000  # random whole numbers stay below: ids of tokens of any vocabulary
_ARRAYS = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
DATATYPES = (*_ARRAYS, "BOOL", "FP16", "BF16", "BYTES")
_WORDS = (
    "profits",
    "rose",
    "fell",
    "sharply",
    "in",
    "the",
    "third",
    "quarter",
    "as",
    "demand",
    "grew",
    "slowly",
)
# inputs whose content a model checks, under the names that Hugging Face gives them
_ALL_ONES, _ALL_ZEROS = "attention_mask", "token_type_ids"


@dataclass(frozen=True)
class Tensor:
    """One input; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    """One request's body. `json_bytes` is the length of its JSON part where binary tensors follow."""

    data: bytes
    json_bytes: int | None = None


def with_sizes(
    inputs: Sequence[Tensor], *, rows: int, dim: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """The inputs with whole shapes: `rows` where the first dimension is open, `dim` for the other open ones.

    Raises UsageError for a shape that doesn't fit, and for several rows of a model whose size is fixed.
    """
    for name in shapes.keys() - {tensor.name for tensor in inputs}:
        known = ", ".join(tensor.name for tensor in inputs)
        raise UsageError(f"--tensor names {name!r}, which isn't sent", f"the inputs are {known}")
    if rows > 1 and not any(tensor.shape[:1] == (-1,) for tensor in inputs):
        raise UsageError(
            "the model takes one input at a time: no first dimension is open", "leave --rows out"
        )
    return tuple(_sized(tensor, rows, dim, shapes.get(tensor.name)) for tensor in inputs)


def _sized(tensor: Tensor, rows: int, dim: int, given: tuple[int, ...] | None) -> Tensor:
    open_first = tensor.shape[:1] == (-1,)
    inner = tensor.shape[1:] if open_first else tensor.shape
    if given is not None:
        fits = len(given) == len(inner) and all(a in (-1, b) for a, b in zip(inner, given, strict=True))
        if not fits:
            raise UsageError(
                f"--tensor {tensor.name}:{','.join(map(str, given))} doesn't fit the model's {list(inner)}",
                "give its dimensions without the batch",
            )
        inner = given
    whole = tuple(dim if size == -1 else size for size in inner)
    return replace(tensor, shape=((rows,) if open_first else ()) + whole)


def bodies(inputs: Sequence[Tensor], *, seed: int, binary: bool) -> tuple[Body, ...]:
    """Bodies with fresh random values: standard normal, or ids below 1,000, or texts.

    Raises UsageError where one of them would be too large.
    """
    values = sum(
        math.prod(tensor.shape) * (TEXT_WORDS if tensor.datatype == "BYTES" else 1) for tensor in inputs
    )
    if values > MOST_VALUES:
        raise UsageError(
            f"one request would have {values:,} values", "choose smaller --rows, --dim or --tensor"
        )
    count = max(1, min(SAMPLES, MOST_VALUES // max(values, 1)))
    rng = random.Random(seed)
    return tuple(_body(inputs, rng, binary=binary) for _ in range(count))


def _body(inputs: Sequence[Tensor], rng: random.Random, *, binary: bool) -> Body:
    entries, tail = [], []
    for tensor in inputs:
        values = _values(tensor, rng)
        entry: dict[str, object] = {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
        }
        if binary:
            piece = _packed(tensor.datatype, values)
            entry["parameters"] = {"binary_data_size": len(piece)}
            tail.append(piece)
        else:
            entry["data"] = values
        entries.append(entry)
    document: dict[str, object] = {"inputs": entries}
    if binary:
        document["parameters"] = {"binary_data_output": True}
    head = json.dumps(document, separators=(",", ":")).encode()
    return Body(head + b"".join(tail), len(head) if binary else None)


def _values(tensor: Tensor, rng: random.Random) -> list[float] | list[int] | list[bool] | list[str]:
    count = math.prod(tensor.shape)
    if tensor.name in (_ALL_ONES, _ALL_ZEROS):
        return [int(tensor.name == _ALL_ONES)] * count
    if tensor.datatype == "BYTES":
        return [" ".join(rng.choices(_WORDS, k=TEXT_WORDS)) for _ in range(count)]
    if tensor.datatype == "BOOL":
        return [rng.random() < 0.5 for _ in range(count)]
    if tensor.datatype in ("FP16", "BF16", "FP32", "FP64"):
        return [rng.gauss(0.0, 1.0) for _ in range(count)]
    most = 128 if tensor.datatype == "INT8" else 256 if tensor.datatype == "UINT8" else MOST_IDS
    return [rng.randrange(1, most) for _ in range(count)]


def _packed(datatype: str, values: Sequence[object]) -> bytes:
    """As the extension has it: little-endian; texts each behind their length."""
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BOOL":
        return bytes(bool(value) for value in values)
    if datatype == "FP16":
        return struct.pack(f"<{len(values)}e", *values)
    if datatype == "BF16":  # the upper half of a float
        whole = struct.pack(f"<{len(values)}f", *values)
        return b"".join(whole[at + 2 : at + 4] for at in range(0, len(whole), 4))
    return struct.pack(f"<{len(values)}{_ARRAYS[datatype]}", *values)


def value_bytes(datatype: str) -> int | None:
    """The size of one value in binary form; None for texts, and for a datatype that isn't known."""
    known = {
        "BOOL": 1,
        "FP16": 2,
        "BF16": 2,
        **{name: struct.calcsize(f"<{c}") for name, c in _ARRAYS.items()},
    }
    return known.get(datatype)


def request(body: Body, *, path: str, authority: str, keep: bool) -> bytes:
    """The whole HTTP request."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {authority}",
        f"Content-Length: {len(body.data)}",
        f"Content-Type: {'application/json' if body.json_bytes is None else 'application/octet-stream'}",
    ]
    if body.json_bytes is not None:
        lines.append(f"Inference-Header-Content-Length: {body.json_bytes}")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body.data


def get(path: str, *, authority: str) -> bytes:
    """Return the bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()


MOST_INPUTS = 64
MOST_DIMENSIONS = 16
MOST_CHARS = 200
BINARY = ("binary_tensor_data", "binary_data")
IDS = ("input_ids",)


@dataclass(frozen=True)
class ServerMetadata:
    """Of `GET /v2`; empty where the server doesn't answer that."""

    name: str = ""
    version: str = ""
    binary: bool = False


@dataclass(frozen=True)
class ModelMetadata:
    """Of `GET /v2/models/NAME`. `parameters`: texts and numbers that it adds, such as device and dtype."""

    name: str
    platform: str
    inputs: tuple[Tensor, ...]
    parameters: tuple[tuple[str, str], ...] = ()


def server_metadata(body: bytes) -> ServerMetadata:
    """Nothing here is needed: what can't be read is left out."""
    try:
        value = load(body)
    except ValueError:
        return ServerMetadata()
    if not isinstance(value, dict):
        return ServerMetadata()
    extensions = value.get("extensions")
    names = extensions if isinstance(extensions, list) else []
    return ServerMetadata(
        _text(value.get("name")), _text(value.get("version")), any(extension in names for extension in BINARY)
    )


def model_metadata(body: bytes) -> ModelMetadata:
    """The model's inputs. Raises ServerUnusable where they can't be read."""
    try:
        value = load(body)
    except ValueError as error:
        raise _unreadable(str(error)) from error
    if not isinstance(value, dict):
        raise _unreadable("it isn't an object")
    listed = value.get("inputs")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_INPUTS:
        raise _unreadable("it lists no inputs, or too many")
    inputs = tuple(map(_tensor, listed))
    parameters = value.get("parameters")
    return ModelMetadata(
        _text(value.get("name")),
        _text(value.get("platform")),
        inputs,
        _plain(parameters) if isinstance(parameters, dict) else (),
    )


def choose_inputs(
    model: ModelMetadata, server: ServerMetadata, wanted: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The inputs to send: those that are wanted, else all.

    Weir's service lists texts and token ids, of which a request has one: ids, whose length is exact.
    Raises ServerUnusable naming the inputs that there are.
    """
    names = [tensor.name for tensor in model.inputs]
    if not wanted and server.name == "weir" and IDS[0] in names:
        wanted = IDS
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ServerUnusable(f"the model has no input {missing[0]!r}", f"it has {', '.join(names)}")
    return tuple(tensor for tensor in model.inputs if not wanted or tensor.name in wanted)


def only_model(body: bytes) -> str:
    """The one ready model of a repository's index. Raises ServerUnusable where there isn't just one."""
    try:
        value = load(body)
    except ValueError as error:
        raise _unreadable(str(error)) from error
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    names = [_text(entry.get("name")) for entry in entries if entry.get("state", "READY") == "READY"]
    if not names:
        raise ServerUnusable("the server has no model ready that the Open Inference Protocol names", OTHER)
    if len(names) > 1:
        raise ServerUnusable(
            f"the server has {len(names)} models ready: {', '.join(names[:10])}",
            "name one: --served-model NAME",
        )
    return names[0]


def _tensor(value: Json) -> Tensor:
    if not isinstance(value, dict):
        raise _unreadable("an input isn't an object")
    name, datatype, shape = value.get("name"), value.get("datatype"), value.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= MOST_CHARS:
        raise _unreadable("an input has no name")
    if datatype not in DATATYPES or not isinstance(datatype, str):
        raise _unreadable(f"input {name!r} has the unknown datatype {str(datatype)[:40]!r}")
    sizes = shape if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS else None
    if sizes is None or not all(type(size) is int and (size == -1 or size > 0) for size in sizes):
        raise _unreadable(f"input {name!r} has no shape that can be filled")
    return Tensor(name, datatype, tuple(size for size in sizes if isinstance(size, int)))


def _plain(parameters: Mapping[str, Json]) -> tuple[tuple[str, str], ...]:
    kept = [(key, value) for key, value in parameters.items() if isinstance(value, str | int | float)]
    return tuple((key[:MOST_CHARS], _text(str(value))) for key, value in kept[:MOST_INPUTS])


def _text(value: Json) -> str:
    return value[:MOST_CHARS] if isinstance(value, str) else ""


def _unreadable(why: str) -> ServerUnusable:
    return ServerUnusable(
        f"the server's description of the model can't be used: {why}",
        OTHER,
    )


OTHER = "a service of another protocol needs a request: --url http://HOST:PORT/PATH --payload FILE"
JSON_LENGTH = b"inference-header-content-length"  # of an answer's JSON, where binary tensors follow it
READ_BYTES = 4096  # longer JSON is judged by its length alone: reading numbers takes the client's time
SHORTEST = 0.5  # of the first answer's length
_OTHER_VALUES = "with other values than an output's shape says"


class Response(Protocol):
    """What a check reads of a response."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """By their names in lower case."""

    @property
    def body(self) -> bytes | bytearray:
        """The first bytes of the body, as many as were kept."""

    @property
    def body_bytes(self) -> int:
        """The length of the whole body."""


@dataclass(frozen=True)
class ResponseCheck:
    """What each answer must hold. `protocol`: outputs, one of them with `rows`, if the model takes any.

    `first_bytes`: the length of the answer before anything was timed; 0 for that one itself.
    """

    protocol: bool
    rows: int | None = None
    first_bytes: int = 0

    def outcome(self, response: Response) -> str:
        """What an answer with status 200 lacks, alike for all that lack it; empty for a good one."""
        if response.body_bytes < SHORTEST * self.first_bytes:
            return "status 200, but much shorter than the first answer"
        length = response.headers.get(JSON_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() else response.body_bytes
        if not self.protocol or (self.first_bytes and json_bytes > READ_BYTES):
            return ""
        why = missing_from(
            bytes(response.body[:json_bytes]), response.body_bytes - json_bytes, rows=self.rows
        )
        return f"status 200, but {why}" if why else ""


def missing_from(document: bytes, binary_bytes: int, *, rows: int | None) -> str:
    """What an answer lacks whose JSON is `document` and is followed by that many bytes; empty for nothing."""
    try:
        value = load(document)
    except ValueError:
        return "not in JSON"
    outputs = value.get("outputs") if isinstance(value, dict) else None
    if not isinstance(outputs, list) or not outputs:
        return "without outputs"
    left, first_sizes = binary_bytes, set()
    for output in outputs:
        shape = _shape(output)
        if not isinstance(output, dict) or shape is None:
            return "with an output that has no name, datatype or shape"
        parameters = output.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if not _has_its_values(output, math.prod(shape), size):
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
