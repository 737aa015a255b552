"""Answers and descriptions of the Open Inference Protocol (v2). Values only."""

import json
from typing import Any

from service.model.classifier import ModelInfo
from service.protocols import binary
from service.protocols.asks import Answer, Ask, label_of, provenance, timing
from service.protocols.infer import IDS, MASK, PAIR, TEXT, TYPES, VERSION


def render_infer(info: ModelInfo, ask: Ask, answer: Answer) -> tuple[dict[str, Any], bytes]:
    """The protocol's answer and its binary part; what it has no field for goes into `parameters`."""
    count = len(answer.rows)
    made: dict[str, tuple[list[int], str, list[Any]]] = {
        "label": ([count], "BYTES", [label_of(info, row) for row in answer.vectors]),
        "probabilities": ([count, len(info.labels)], "FP32", [p for row in answer.vectors for p in row]),
    }
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name in ask.outputs:
        shape, datatype, values = made[name]
        output: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        if name in ask.binary:
            piece = binary.encode(values, datatype)
            output["parameters"] = {"binary_data_size": len(piece)}
            tail += piece
        else:
            output["data"] = values
        outputs.append(output)
    rendered: dict[str, Any] = {
        "model_name": info.name,
        "model_version": VERSION,
        "outputs": outputs,
        "parameters": {
            **provenance(info),
            "truncated_rows": sum(row.truncated for row in answer.rows),
            **{f"{step}_s": seconds for step, seconds in timing(answer).items()},
        },
    }
    return (rendered if ask.request_id is None else {"id": ask.request_id} | rendered), tail


def joined(document: dict[str, Any], tail: bytes) -> tuple[bytes, dict[str, str]]:
    """An answer's body and headers, with the binary part behind the JSON."""
    head = json.dumps(document, separators=(",", ":")).encode()
    if not tail:
        return head, {"Content-Type": "application/json"}
    return head + tail, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }


def render_model(info: ModelInfo) -> dict[str, Any]:
    """The answer to `GET /v2/models/M`; -1 in a shape is any size, as the protocol has it."""
    return {
        "name": info.name,
        "versions": [VERSION],
        "platform": "pytorch",
        "inputs": [
            {"name": TEXT, "datatype": "BYTES", "shape": [-1]},
            {"name": PAIR, "datatype": "BYTES", "shape": [-1]},
            *({"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in (IDS, MASK, TYPES)),
        ],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(info.labels)]},
        ],
        "parameters": {
            **provenance(info),
            "weights_source": info.weights_source,
            "device_description": info.device_description,
            "dtype": info.dtype,
            "largest_difference_from_float32": info.accuracy,
            "labels": list(info.labels),
            "parameter_count": info.parameters,
            "max_tokens": info.max_tokens,
        },
    }
