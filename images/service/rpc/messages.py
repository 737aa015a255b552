"""The protocol's messages as classes, made from a table when this is imported. Needs protobuf.

They have a pool of their own: a client in the same process may bring the same names. Names of messages within
messages aren't part of what is sent, so all are at the top.
"""

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError

from service.errors import bad_request

SERVICE = "inference.GRPCInferenceService"
# Fields by number, from 1 on: a type and a name; `*`: repeated; `%`: by a string as key
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
_PACKAGE = "weir.inference"


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
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def parsed(name: str, data: bytes) -> Any:
    """A message of that class. Raises RequestError (400) for bytes that are none."""
    try:
        return message(name).FromString(data)
    except (DecodeError, RecursionError) as error:
        raise bad_request(f"the message is no {name}: {error}") from error
