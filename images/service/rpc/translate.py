"""gRPC's messages as the values that HTTP's forms have, and back. Values only."""

from collections.abc import Mapping
from typing import Any

from service.errors import RequestError, bad_request
from service.model.classifier import ModelInfo
from service.models import Entry
from service.protocols.asks import Answer, Ask
from service.protocols.infer import VERSION
from service.protocols.inferanswers import render_infer, render_model
from service.rpc.messages import message
from service.settings import Limits

_MOST = 16  # inputs, outputs or parameters of one request: more than there are names for
_CONTENTS = {"INT64": "int64_contents", "INT32": "int_contents", "BYTES": "bytes_contents"}
_RETRY_TYPE = "type.googleapis.com/google.rpc.RetryInfo"


def document_of(request: Any, limits: Limits) -> tuple[dict[str, Any], bytes]:
    """A ModelInferRequest as HTTP's JSON and binary part would be. Raises RequestError (400)."""
    for what in ("inputs", "outputs", "parameters", "raw_input_contents"):
        if len(getattr(request, what)) > _MOST:
            raise bad_request(f"the request has more than {_MOST} {what}")
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise bad_request(f"raw_input_contents has {len(raw)} elements for {len(request.inputs)} inputs")
    document: dict[str, Any] = {
        "inputs": [
            _input(tensor, raw[at] if raw else None, limits) for at, tensor in enumerate(request.inputs)
        ],
        # an answer comes in the form in which it was asked for
        "parameters": _parameters(request.parameters) | {"binary_data_output": bool(raw)},
    }
    if request.id:
        document["id"] = request.id
    if request.outputs:
        document["outputs"] = [{"name": output.name} for output in request.outputs]
    return document, b"".join(raw)


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("choice") or "", None) for key, value in given.items()}


def _input(tensor: Any, raw: bytes | None, limits: Limits) -> dict[str, Any]:
    if len(tensor.shape) > 2:
        raise bad_request(f"shape of {tensor.name[:64]} must be one or two whole numbers above 0")
    made: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
    }
    if raw is None:
        return made | {"data": _data(tensor, limits)}
    if tensor.HasField("contents") and tensor.contents.ByteSize():
        raise bad_request(
            f"input {tensor.name[:64]} has contents and raw_input_contents; one of them is needed"
        )
    return made | {"parameters": {"binary_data_size": len(raw)}}


def _data(tensor: Any, limits: Limits) -> list[Any]:
    wanted = _CONTENTS.get(tensor.datatype, "bool_contents")
    values = getattr(tensor.contents, wanted)
    if tensor.datatype in _CONTENTS and any(each.name != wanted for each, _ in tensor.contents.ListFields()):
        raise bad_request(
            f"input {tensor.name[:64]} of datatype {tensor.datatype} has its values in {wanted} alone"
        )
    if tensor.datatype != "BYTES":
        return list(values)
    if len(values) > limits.max_texts:
        raise bad_request(f"{tensor.name[:64]} has {len(values)} texts; at most {limits.max_texts} are taken")
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise bad_request(f"an element of {tensor.name[:64]} is no UTF-8") from error


def infer_response(info: ModelInfo, ask: Ask, answer: Answer) -> Any:
    """A ModelInferResponse."""
    document, tail = render_infer(info, ask, answer)
    made = message("ModelInferResponse")(
        model_name=document["model_name"], model_version=document["model_version"], id=document.get("id", "")
    )
    for key, value in document["parameters"].items():
        kind = "string" if isinstance(value, str) else "int64" if isinstance(value, int) else "double"
        setattr(made.parameters[key], f"{kind}_param", value)
    at = 0
    for output in document["outputs"]:
        tensor = made.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        if "data" not in output:
            n_bytes = output["parameters"]["binary_data_size"]
            made.raw_output_contents.append(tail[at : at + n_bytes])
            at += n_bytes
        elif output["datatype"] == "BYTES":
            tensor.contents.bytes_contents.extend(value.encode() for value in output["data"])
        else:
            tensor.contents.fp32_contents.extend(output["data"])
    return made


def metadata_response(info: ModelInfo) -> Any:
    """A ModelMetadataResponse; what it has no field for is said over HTTP."""
    said = render_model(info)
    names = ("name", "versions", "platform", "inputs", "outputs")
    return message("ModelMetadataResponse")(**{name: said[name] for name in names})


def index_response(index: Mapping[str, Entry], *, ready_only: bool) -> Any:
    """A RepositoryIndexResponse."""
    return message("RepositoryIndexResponse")(
        models=[
            {"name": name, "version": VERSION, "state": entry.state, "reason": entry.reason}
            for name, entry in index.items()
            if entry.state == "READY" or not ready_only
        ]
    )


def retry_details(code: int, error: RequestError) -> bytes:
    """A google.rpc.Status that says after how many seconds to try again."""
    delay = message("RetryInfo")(retry_delay={"seconds": error.retry_after_s or 0})
    detail = {"type_url": _RETRY_TYPE, "value": delay.SerializeToString()}
    status = message("Status")(code=code, message=error.message, details=[detail])
    data: bytes = status.SerializeToString()
    return data
