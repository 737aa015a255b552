"""The Open Inference Protocol over gRPC, with the Service that HTTP has. The only module that imports grpc.

In this order: the messages, their translation to and from HTTP's documents, the calls, the server. It runs in
the event loop of the HTTP server. A call's bytes are read and parsed here: grpc itself would wait for them
without a limit, and report unreadable ones as its own failure.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError

from service.api.admission import ConnectionLimiter
from service.api.app import SERVER
from service.api.infer import VERSION, parameters_of, parse_infer, render_infer, render_model
from service.api.requests import Answer, InferRequest, timeout_of
from service.api.service import Service, load_model, run_inference, unload_model
from service.api.tracing import track_request
from service.errors import RETRY_AFTER_S, RequestError, ServiceError, bad_request
from service.inference.classifier import ModelInfo
from service.listen import format_address
from service.models import ModelEntry
from service.settings import Limits

SERVICE = "inference.GRPCInferenceService"
_PACKAGE = "weir.inference"
_MAX_ITEMS = 16  # inputs, outputs or parameters of one request: more than there are names for
_CONTENTS = {"INT64": "int64_contents", "INT32": "int_contents", "BYTES": "bytes_contents"}
_RETRY_TYPE = "type.googleapis.com/google.rpc.RetryInfo"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

log = logging.getLogger("service")

Context = Any  # grpc.aio.ServicerContext
Method = Callable[[Service, Any, Context, float], Awaitable[Any]]  # the float: when the message had arrived

# ---- messages -------------------------------------------------------------------------------------------

# Their classes are made from this table when the module is imported, in a pool of their own: a client in the
# same process may bring the same names. Nested messages are at the top, since their names aren't sent.
# Each message's fields are numbered from 1: a type and a name. `*`: repeated; `%`: a map with string keys.
_TABLE = {
    "InferParameter": "bool bool_param, int64 int64_param, string string_param, double double_param, "
    "uint64 uint64_param",
    "RepositoryParameter": "bool bool_param, int64 int64_param, string string_param, bytes bytes_param",
    "Contents": "bool* bool_contents, int32* int_contents, int64* int64_contents, uint32* uint_contents, "
    "uint64* uint64_contents, float* fp32_contents, double* fp64_contents, bytes* bytes_contents",
    "Tensor": "string name, string datatype, int64* shape, InferParameter% parameters, Contents contents",
    "RequestedOutput": "string name, InferParameter% parameters",
    "TensorMetadata": "string name, string datatype, int64* shape",
    "ModelIndex": "string name, string version, string state, string reason",
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string* extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, string* versions, string platform, TensorMetadata* inputs, "
    "TensorMetadata* outputs",
    "ModelInferRequest": "string model_name, string model_version, string id, InferParameter% parameters, "
    "Tensor* inputs, RequestedOutput* outputs, bytes* raw_input_contents",
    "ModelInferResponse": "string model_name, string model_version, string id, InferParameter% parameters, "
    "Tensor* outputs, bytes* raw_output_contents",
    "RepositoryIndexRequest": "string repository_name, bool ready",
    "RepositoryIndexResponse": "ModelIndex* models",
    "RepositoryModelLoadRequest": "string repository_name, string model_name, "
    "RepositoryParameter% parameters",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "string repository_name, string model_name, "
    "RepositoryParameter% parameters",
    "RepositoryModelUnloadResponse": "",
    # what a refusal carries in its trailing metadata (google.rpc.Status and its details)
    "Status": "int32 code, string message, Any* details",
    "Any": "string type_url, bytes value",
    "RetryInfo": "Duration retry_delay",
    "Duration": "int64 seconds, int32 nanos",
}
_ONE_OF = ("InferParameter", "RepositoryParameter")  # at most one of their fields is there


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="weir/inference.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _TABLE.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name="choice")
        for number, text in enumerate(filter(None, fields.split(", ")), 1):
            kind, field_name = text.split(" ")
            field = message.field.add(name=field_name, number=number)
            _set_type(field, kind.rstrip("*%"))
            field.label = field.LABEL_REPEATED if kind[-1] in "*%" else field.LABEL_OPTIONAL
            if name in _ONE_OF:
                field.oneof_index = 0
            if kind.endswith("%"):
                entry = message.nested_type.add(name=field_name.capitalize() + "Entry")
                entry.options.map_entry = True
                _set_type(entry.field.add(name="key", number=1, label=1), "string")
                _set_type(entry.field.add(name="value", number=2, label=1), kind[:-1])
                _set_type(field, f"{name}.{entry.name}")
    return file


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind[0].isupper():
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """Return a message's class."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def parsed(name: str, data: bytes) -> Any:
    """Parse a message. Raises RequestError (400)."""
    try:
        return message(name).FromString(data)
    except (DecodeError, RecursionError) as error:
        raise bad_request(f"the message is no {name}: {error}") from error


# ---- translation ----------------------------------------------------------------------------------------


def document_of(request: Any, limits: Limits) -> tuple[dict[str, Any], bytes]:
    """Translate a ModelInferRequest to HTTP's JSON document and binary part. Raises RequestError (400)."""
    for what in ("inputs", "outputs", "parameters", "raw_input_contents"):
        if len(getattr(request, what)) > _MAX_ITEMS:
            raise bad_request(f"the request has more than {_MAX_ITEMS} {what}")
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise bad_request(f"raw_input_contents has {len(raw)} elements for {len(request.inputs)} inputs")
    document: dict[str, Any] = {
        "inputs": [
            _input(tensor, raw[at] if raw else None, limits) for at, tensor in enumerate(request.inputs)
        ],
        # the answer has the form of the request
        "parameters": _parameters(request.parameters) | {"binary_data_output": bool(raw)},
    }
    if request.id:
        document["id"] = request.id
    if request.outputs:
        document["outputs"] = [{"name": output.name} for output in request.outputs]
    return document, b"".join(raw)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("choice") or "", None) for key, value in parameters.items()}


def _input(tensor: Any, raw: bytes | None, limits: Limits) -> dict[str, Any]:
    if len(tensor.shape) > 2:
        raise bad_request(f"shape of {tensor.name[:64]} must be one or two whole numbers above 0")
    translated: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
    }
    if raw is None:
        return translated | {"data": _data(tensor, limits)}
    if tensor.HasField("contents") and tensor.contents.ByteSize():
        raise bad_request(
            f"input {tensor.name[:64]} has contents and raw_input_contents; one of them is needed"
        )
    return translated | {"parameters": {"binary_data_size": len(raw)}}


def _data(tensor: Any, limits: Limits) -> list[Any]:
    field = _CONTENTS.get(tensor.datatype, "bool_contents")
    values = getattr(tensor.contents, field)
    if tensor.datatype in _CONTENTS and any(given.name != field for given, _ in tensor.contents.ListFields()):
        raise bad_request(
            f"input {tensor.name[:64]} of datatype {tensor.datatype} has its values in {field} alone"
        )
    if tensor.datatype != "BYTES":
        return list(values)
    if len(values) > limits.max_texts:
        raise bad_request(f"{tensor.name[:64]} has {len(values)} texts; at most {limits.max_texts} are taken")
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise bad_request(f"an element of {tensor.name[:64]} is no UTF-8") from error


def infer_response(info: ModelInfo, request: InferRequest, answer: Answer) -> Any:
    """Return a ModelInferResponse."""
    document, binary = render_infer(info, request, answer)
    response = message("ModelInferResponse")(
        model_name=document["model_name"], model_version=document["model_version"], id=document.get("id", "")
    )
    for key, value in document["parameters"].items():
        kind = "string" if isinstance(value, str) else "int64" if isinstance(value, int) else "double"
        setattr(response.parameters[key], f"{kind}_param", value)
    at = 0
    for output in document["outputs"]:
        tensor = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        if "data" not in output:
            n_bytes = output["parameters"]["binary_data_size"]
            response.raw_output_contents.append(binary[at : at + n_bytes])
            at += n_bytes
        elif output["datatype"] == "BYTES":
            tensor.contents.bytes_contents.extend(value.encode() for value in output["data"])
        else:
            tensor.contents.fp32_contents.extend(output["data"])
    return response


def metadata_response(info: ModelInfo) -> Any:
    """Return a ModelMetadataResponse: those of HTTP's fields that the protocol has."""
    document = render_model(info)
    names = ("name", "versions", "platform", "inputs", "outputs")
    return message("ModelMetadataResponse")(**{name: document[name] for name in names})


def index_response(index: Mapping[str, ModelEntry], *, ready_only: bool) -> Any:
    """Return a RepositoryIndexResponse."""
    return message("RepositoryIndexResponse")(
        models=[
            {"name": name, "version": VERSION, "state": entry.state, "reason": entry.reason}
            for name, entry in index.items()
            if entry.state == "READY" or not ready_only
        ]
    )


def retry_details(code: int, error: RequestError) -> bytes:
    """Return a google.rpc.Status that says after how many seconds to try again, as bytes."""
    delay = message("RetryInfo")(retry_delay={"seconds": error.retry_after_s or 0})
    detail = {"type_url": _RETRY_TYPE, "value": delay.SerializeToString()}
    status = message("Status")(code=code, message=error.message, details=[detail])
    data: bytes = status.SerializeToString()
    return data


# ---- calls ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A call whose message hasn't arrived."""

    scope: anyio.CancelScope
    is_evicted: bool = False

    def evict(self) -> None:
        """End the call for a newer one."""
        self.is_evicted = True
        self.scope.cancel()


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Maps paths to methods, and has the steps of every call."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limiter: ConnectionLimiter[_Call] = ConnectionLimiter(service.limits.max_connections)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the method's handler, or None for unknown methods: UNIMPLEMENTED."""
        package, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if package != SERVICE or name not in METHODS:
            return None
        # On the wire a call with one message is a stream of one
        return grpc.stream_unary_rpc_method_handler(partial(self._call, name))

    async def _call(self, name: str, messages: AsyncIterator[bytes], context: Context) -> bytes:
        metadata = {
            key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        service = self._service
        with track_request(f"grpc/{name}", metadata, service.metrics, service.spans) as request:
            try:
                await context.send_initial_metadata(request.headers)
                data = await self._message(messages)
                arrived_s = time.monotonic()
                response = await METHODS[name](service, parsed(f"{name}Request", data), context, arrived_s)
                response_bytes: bytes = response.SerializeToString()
                request.status = 200
                return response_bytes
            except RequestError as error:
                request.status, refusal = error.status, error
            except asyncio.CancelledError:
                request.status = 499
                raise
            except Exception as error:
                log.exception("a gRPC call failed")
                refusal = RequestError(500, f"the service failed ({type(error).__name__}); its log says more")
        return await _refuse(context, refusal)

    async def _message(self, messages: AsyncIterator[bytes]) -> bytes:
        """Return the call's message. Raises RequestError: 400 without one, 408 if slow, 503 if evicted."""
        timeout_s = self._service.limits.body_timeout_s
        with anyio.move_on_after(timeout_s) as scope:
            call = _Call(scope)
            if to_evict := self._limiter.add(call):
                to_evict.evict()
            try:
                data = await anext(messages, None)
            finally:
                self._limiter.remove(call)
            if data is None:
                raise bad_request("the call has no message")
            return data
        if call.is_evicted:
            raise RequestError(503, "all calls are in use", retry_after_s=RETRY_AFTER_S)
        raise RequestError(408, f"the message didn't arrive within {timeout_s} s")


async def _refuse(context: Context, error: RequestError) -> bytes:
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    if error.retry_after_s is not None:
        trailing = (
            ("grpc-status-details-bin", retry_details(code.value[0], error)),
            ("retry-after", str(error.retry_after_s)),
        )
    await context.abort(code, error.message, trailing)
    return b""  # not reached: it raises


async def _server_live(service: Service, _request: Any, _context: Context, _arrived_s: float) -> Any:
    return message("ServerLiveResponse")(live=service.live)


async def _server_ready(service: Service, _request: Any, _context: Context, _arrived_s: float) -> Any:
    return message("ServerReadyResponse")(ready=service.ready)


async def _model_ready(service: Service, request: Any, _context: Context, _arrived_s: float) -> Any:
    ready = service.ready and service.models.is_ready(request.name) and request.version in ("", VERSION)
    return message("ModelReadyResponse")(ready=ready)


async def _server_metadata(_service: Service, _request: Any, _context: Context, _arrived_s: float) -> Any:
    return message("ServerMetadataResponse")(**SERVER)


async def _model_metadata(service: Service, request: Any, _context: Context, _arrived_s: float) -> Any:
    _check_version(request.version)
    return metadata_response(service.models.require(request.name).info)


async def _model_infer(service: Service, request: Any, context: Context, arrived_s: float) -> Any:
    """Take a slot, translate, parse, compute and render, as `app` does over HTTP. Raises RequestError."""
    _check_version(request.model_version)
    classifier = service.require(request.model_name)
    with service.admission.slot():
        document, raw = document_of(request, service.limits)
        infer_request = parse_infer(document, service.limits, classifier.info, raw)
        timeouts_s = timeout_of(parameters_of(document), None), context.time_remaining()
        timeout_s = min((seconds for seconds in timeouts_s if seconds is not None), default=None)
        answer = await run_inference(
            service, classifier, infer_request, arrived_s=arrived_s, timeout_s=timeout_s
        )
    return infer_response(classifier.info, infer_request, answer)


async def _index(service: Service, request: Any, _context: Context, _arrived_s: float) -> Any:
    return index_response(service.models.index(), ready_only=request.ready)


async def _load(service: Service, request: Any, _context: Context, _arrived_s: float) -> Any:
    await load_model(service, request.model_name)
    return message("RepositoryModelLoadResponse")()


async def _unload(service: Service, request: Any, _context: Context, _arrived_s: float) -> Any:
    unload_model(service, request.model_name)
    return message("RepositoryModelUnloadResponse")()


METHODS: dict[str, Method] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelInfer": _model_infer,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise RequestError(404, f"there is no version {version[:64]!r}; there is {VERSION}")


# ---- the server -----------------------------------------------------------------------------------------


async def start(service: Service, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Start a server in the event loop of the service. Return it and its port (a free one for 0).

    At its limit of connections, grpc closes new ones at once; it can't close an older one for them. So a
    connection ends when it is idle, old, or doesn't answer a ping. Raises ServiceError.
    """
    limits = service.limits
    server = grpc.aio.server(
        handlers=(Calls(service),),
        options=(
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
            ("grpc.max_receive_message_length", limits.grpc_message_bytes),
            ("grpc.max_concurrent_streams", limits.grpc_streams),
            ("grpc.max_allowed_incoming_connections", limits.grpc_max_connections),
            ("grpc.max_connection_idle_ms", 1000 * limits.grpc_idle_s),
            ("grpc.max_connection_age_ms", 1000 * limits.grpc_age_s),
            ("grpc.max_connection_age_grace_ms", 1000 * limits.drain_s),
            ("grpc.keepalive_time_ms", 1000 * limits.grpc_ping_s),
            ("grpc.keepalive_timeout_ms", 1000 * limits.grpc_ping_s),
            ("grpc.http2.ping_timeout_ms", 1000 * limits.grpc_ping_s),
            ("grpc.server_handshake_timeout_ms", 1000 * limits.header_timeout_s),
        ),
    )
    try:
        bound_port = server.add_insecure_port(format_address(host, port))
    except RuntimeError as error:
        raise ServiceError(
            f"can't listen on {format_address(host, port)} for gRPC",
            "set WEIR_GRPC_LISTEN to another host:port",
        ) from error
    await server.start()
    return server, bound_port
