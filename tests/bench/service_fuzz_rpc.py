"""Hostile gRPC callers for bench_service.py: broken messages, calls that hang or leave, broken frames."""

import asyncio
import contextlib
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.append(str(Path(__file__).parents[2] / "images"))

from service.api.grpc_endpoint import SERVICE, message
from service_fuzz import until

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
INFER = f"/{SERVICE}/ModelInfer"
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1))
OWN = ("grpc.use_local_subchannel_pool", 1)  # a connection that no other channel uses
WAIT_S = 30.0
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


def good() -> bytes:
    """The bytes of a call that is answered."""
    made = message("ModelInferRequest")(model_name="finbert")
    tensor = made.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    tensor.contents.int64_contents.extend([101, 7, 102])
    data: bytes = made.SerializeToString()
    return data


def fuzzed(port: int, count: int, seed: int, *, at_once: int = 8) -> Counter[str]:
    """How often each status came; "unanswered" for none within 30 s."""
    rng = random.Random(seed)
    calls = [(rng.choice(METHODS), request(rng)) for _ in range(count)]
    found: Counter[str] = Counter()
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel,
        ThreadPoolExecutor(at_once) as pool,
    ):

        def one(call: tuple[str, bytes]) -> str:
            begun = time.monotonic()
            try:
                channel.unary_unary(f"/{SERVICE}/{call[0]}")(call[1], timeout=WAIT_S)
            except grpc.RpcError as error:
                return "unanswered" if time.monotonic() - begun >= WAIT_S else str(error.code().name)
            return "OK"

        found.update(pool.map(one, calls))
    return found


# ---- who doesn't wait for an answer --------------------------------------------------------------------


async def pests(port: int, stop: asyncio.Event, *, half_open: int, leaving: int) -> Counter[str]:
    """Until `stop`: streams without a message, callers who leave, messages too large, broken frames.

    How many of each there were.
    """
    found: Counter[str] = Counter()
    rng = random.Random(3)

    async def nothing() -> AsyncIterator[bytes]:
        await stop.wait()
        return
        yield b""

    async def silent(channel: grpc.aio.Channel) -> None:
        found["half-open"] += 1
        await channel.stream_unary(INFER)(nothing())

    async def leaves(channel: grpc.aio.Channel) -> None:
        found["cancelled"] += 1
        call = channel.unary_unary(INFER)(good())
        await asyncio.sleep(rng.choice((0, 0.001, 0.01, 0.05)))
        call.cancel()
        await call

    async def large(channel: grpc.aio.Channel) -> None:
        found["too large"] += 1
        await channel.unary_unary(INFER)(bytes(rng.choice((2 << 20, 5 << 20, 32 << 20))))

    async def frames(_channel: grpc.aio.Channel) -> None:
        found["broken frames"] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frame_bytes(rng))
        await until(reader, stop, 1)
        writer.close()

    async def again(one: Any) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", (*OPTIONS, OWN)) as channel:
            while not stop.is_set():
                with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, OSError):
                    await one(channel)
                await asyncio.sleep(0.1)

    each = [silent] * half_open + [leaves] * leaving + [large] * 2 + [frames] * leaving
    await asyncio.gather(*map(again, each))
    return found


def frame_bytes(rng: random.Random) -> bytes:
    """What begins as HTTP/2 and goes wrong: lengths that lie, headers without an end, resets, noise."""
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))]
    for _ in range(rng.randrange(1, 60)):
        payload = rng.randbytes(rng.randrange(64))
        length = len(payload) + rng.choice((0, 0, 0, 1, 2**14, 2**23))
        kind, flags, stream = (
            rng.choice((0, 1, 2, 3, 4, 6, 7, 8, 9, 99)),
            rng.choice((0, 1, 4, 5)),
            rng.randrange(9),
        )
        frames.append(length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload)
    return b"".join(frames[rng.choice((0, 0, 0, 1)) :])


async def answered(port: int, stop: asyncio.Event) -> list[str]:
    """The statuses that a plain caller, on a connection of its own, gets all the while."""
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", (*OPTIONS, OWN)) as channel:
        while not stop.is_set():
            try:
                await channel.unary_unary(INFER)(good(), timeout=WAIT_S)
                found.append("OK")
            except grpc.RpcError as error:
                found.append(str(error.code().name))
            await asyncio.sleep(0.05)
    return found
