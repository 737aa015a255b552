"""Hostile gRPC calls for bench_service.py: broken bytes, wrong types and shapes, lengths that don't fit."""

import random
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from service.rpc.messages import SERVICE, message

NAMES = ("text", "text_pair", "input_ids", "attention_mask", "token_type_ids", "", "é", "x" * 3000)
KINDS = ("BYTES", "INT64", "INT32", "FP32", "BOOL", "", "INT64 ")
METHODS = (*["ModelInfer"] * 6, "ServerLive", "ModelReady", "ModelMetadata", "RepositoryIndex")
PARAMETERS = (
    ("int64_param", 1),
    ("int64_param", 10**7),
    ("int64_param", -5),
    ("string_param", "soon"),
    ("bool_param", True),
    ("double_param", float("nan")),
    ("double_param", 1e300),
    ("uint64_param", 2**64 - 1),
)
SHAPES: tuple[list[int], ...] = (
    [1, 3],
    [3],
    [1],
    [2, 3],
    [2**40],
    [2**62, 2**62],
    [0],
    [-1],
    [],
    [1, 1, 3],
    [1] * 500,
)
NUMBERS = (0, 7, 101, 102, -1, 2**31 - 1, 10**6)


def tensor(rng: random.Random, request: Any) -> None:
    """One input; half of them as they should be."""
    name, kind, shape = rng.choice(NAMES), rng.choice(KINDS), rng.choice(SHAPES)
    if rng.random() < 0.5:
        name, kind, shape = rng.choice((("text", "BYTES", [1]), ("input_ids", "INT64", [1, 3])))
    made = request.inputs.add(name=name, datatype=kind, shape=shape)
    if rng.random() < 0.5:
        texts = [
            rng.choice((b"rose", "é".encode(), b"\xff\xfe", b"")) for _ in range(rng.choice((1, 1, 1, 2, 40)))
        ]
        data = b"".join(
            struct.pack("<I", len(text) + rng.choice((0, 0, 0, 1, 2**31))) + text for text in texts
        )
        if kind != "BYTES":
            data = struct.pack("<3q", *(rng.choice(NUMBERS) for _ in range(3)))
        request.raw_input_contents.append(data[: rng.choice((None, None, None, -1, 3))])
    if not request.raw_input_contents or rng.random() < 0.1:
        field = rng.choice(("int64_contents", "int_contents", "fp32_contents", "bytes_contents"))
        if rng.random() < 0.7:
            field = {"BYTES": "bytes_contents", "INT32": "int_contents"}.get(kind, "int64_contents")
        values = {
            "bytes_contents": [b"a", b"\xff", b""],
            "fp32_contents": [1.5, float("nan"), 0.0],
        }.get(field, [rng.choice(NUMBERS) for _ in range(3)])
        getattr(made.contents, field).extend(values[: rng.choice((1, 3, 3, 3))])


def request(rng: random.Random) -> bytes:
    """The bytes of one call's message."""
    made = message("ModelInferRequest")(
        model_name=rng.choice(("finbert", "finbert", "finbert", "", "x", "é" * 99))
    )
    for _ in range(rng.choice((1, 1, 1, 2, 3, 0, 40))):
        tensor(rng, made)
    if rng.random() < 0.2:
        made.outputs.add(name=rng.choice(("label", "probabilities", "x", "")))
    if rng.random() < 0.2:
        key = rng.choice(("timeout", "timeout_ms", "x", ""))
        setattr(made.parameters[key], *rng.choice(PARAMETERS))
    data: bytes = made.SerializeToString()
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.3 and data:  # a few bytes changed, or the end cut off
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    if kind < 0.32:
        return data * rng.randrange(2, 200)
    return data


def fuzzed(port: int, count: int, seed: int, *, at_once: int = 8) -> Counter[str]:
    """How often each status came. Raises where a call isn't answered within 30 s."""
    rng = random.Random(seed)
    calls = [(rng.choice(METHODS), request(rng)) for _ in range(count)]
    found: Counter[str] = Counter()
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel, ThreadPoolExecutor(at_once) as pool:

        def one(call: tuple[str, bytes]) -> str:
            try:
                channel.unary_unary(f"/{SERVICE}/{call[0]}")(call[1], timeout=30)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        found.update(pool.map(one, calls))
    return found
