"""What a server says of itself and of a model: the protocol's metadata, read with suspicion. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from probes.errors import ServerUnusable
from probes.shared.codec import Json, load
from probes.throughput.served.client.payload import DATATYPES, Tensor

MOST_INPUTS = 64
MOST_DIMENSIONS = 16
MOST_CHARS = 200
BINARY = ("binary_tensor_data", "binary_data")
IDS = ("input_ids",)


@dataclass(frozen=True)
class ServerSays:
    """Of `GET /v2`; empty where the server doesn't answer that."""

    name: str = ""
    version: str = ""
    binary: bool = False


@dataclass(frozen=True)
class ModelSays:
    """Of `GET /v2/models/NAME`. `parameters`: texts and numbers that it adds, such as device and dtype."""

    name: str
    platform: str
    inputs: tuple[Tensor, ...]
    parameters: tuple[tuple[str, str], ...] = ()


def server_says(body: bytes) -> ServerSays:
    """Nothing here is needed: what can't be read is left out."""
    try:
        found = load(body)
    except ValueError:
        return ServerSays()
    if not isinstance(found, dict):
        return ServerSays()
    extensions = found.get("extensions")
    names = extensions if isinstance(extensions, list) else []
    return ServerSays(
        _text(found.get("name")), _text(found.get("version")), any(one in names for one in BINARY)
    )


def model_says(body: bytes) -> ModelSays:
    """The model's inputs. Raises ServerUnusable where they can't be read."""
    try:
        found = load(body)
    except ValueError as error:
        raise _unreadable(str(error)) from error
    if not isinstance(found, dict):
        raise _unreadable("it isn't an object")
    listed = found.get("inputs")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_INPUTS:
        raise _unreadable("it lists no inputs, or too many")
    inputs = tuple(map(_tensor, listed))
    parameters = found.get("parameters")
    return ModelSays(
        _text(found.get("name")),
        _text(found.get("platform")),
        inputs,
        _plain(parameters) if isinstance(parameters, dict) else (),
    )


def chosen(model: ModelSays, server: ServerSays, wanted: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The inputs to send: those that are wanted, else all.

    Weir's service lists texts and token ids, of which a request has one: ids, whose length is exact.
    Raises ServerUnusable naming the inputs that there are.
    """
    names = [one.name for one in model.inputs]
    if not wanted and server.name == "weir" and IDS[0] in names:
        wanted = IDS
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ServerUnusable(f"the model has no input {missing[0]!r}", f"it has {', '.join(names)}")
    return tuple(one for one in model.inputs if not wanted or one.name in wanted)


def only_model(body: bytes) -> str:
    """The one ready model of a repository's index. Raises ServerUnusable where there isn't just one."""
    try:
        found = load(body)
    except ValueError as error:
        raise _unreadable(str(error)) from error
    entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    names = [_text(one.get("name")) for one in entries if one.get("state", "READY") == "READY"]
    if len(names) != 1:
        raise ServerUnusable(
            f"the server has {len(names)} models ready{': ' if names else ''}{', '.join(names[:10])}",
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
        "give a request yourself: --payload FILE",
    )
