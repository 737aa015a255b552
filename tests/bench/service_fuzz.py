"""Hostile callers for bench_service.py: broken JSON and tensors, half-open and dribbling connections."""

import asyncio
import contextlib
import json
import random
import struct

from service_load import Caller

PATHS = ("/predict", "/v2/models/finbert/infer", "/v1/embeddings")
KEYS = (
    "id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "texts", "token_ids",
    "input",
    "model", "encoding_format", "timeout_ms", "timeout", "binary_data_size", "binary_data_output",
    "dimensions",
)  # fmt: skip
LEAVES = (
    None, True, False, 0, 1, -1, 2**63, 10**400, int("9" * 4300), 1.5, 1e308, "", "a", "text", "text_pair",
    "input_ids", "attention_mask", "token_type_ids", "BYTES", "INT64", "INT32",
    "label", "finbert", "base64", "\ud800", "é" * 50, "x" * 3000,
)  # fmt: skip
GOOD = {
    "/predict": {"texts": ["a", ["b", "c"]]},
    "/v2/models/finbert/infer": {
        "inputs": [{"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [101, 7, 102]}]
    },
    "/v1/embeddings": {"model": "finbert", "input": ["a"]},
}


def value(rng: random.Random, depth: int = 0) -> object:
    """Any JSON value."""
    kind = rng.random()
    if depth > 4 or kind < 0.5:
        return rng.choice(LEAVES)
    if kind < 0.75:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def broken(rng: random.Random, document: object, depth: int = 0) -> object:
    """The same document with a part or two replaced."""
    if rng.random() < 0.15 + 0.1 * depth:
        return value(rng, depth)
    if isinstance(document, dict):
        changed = {key: broken(rng, each, depth + 1) for key, each in document.items() if rng.random() > 0.05}
        return changed | ({rng.choice(KEYS): value(rng, depth)} if rng.random() < 0.2 else {})
    if isinstance(document, list):
        return [broken(rng, each, depth + 1) for each in document] * rng.choice((1, 1, 1, 0, 2, 40))
    return document


def binary(rng: random.Random) -> tuple[bytes, str]:
    """An infer request with a binary part, and the header's value; either may be wrong."""
    texts = [b"rose", "é".encode(), b"\xff\xfe", b""][: rng.randrange(1, 5)]
    tail = b"".join(struct.pack("<I", len(text) + rng.choice((0, 0, 0, 1, 2**31))) + text for text in texts)
    if rng.random() < 0.5:
        tail = struct.pack("<3q", *(rng.choice((0, 7, 102, 2**62, -1)) for _ in range(3)))
    declared = len(tail) + rng.choice((0, 0, 0, 1, -1, 2**40))
    name, kind = rng.choice((("text", "BYTES"), ("input_ids", "INT64"), ("input_ids", "INT32")))
    shape = rng.choice(([len(texts)], [1, 3], [3], [2**40], [0], [-1], []))
    tensor = {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": declared}}
    document = broken(rng, {"inputs": [tensor], "parameters": {"binary_data_output": True}})
    head = json.dumps(document).encode()
    return head + tail, str(
        rng.choice((len(head), len(head), len(head), 0, len(head) + 1, -1, "x", "9" * 30))
    )


def request(rng: random.Random) -> bytes:
    """One whole hostile HTTP request."""
    path, extra = rng.choice(PATHS), ""
    kind = rng.random()
    if kind < 0.1:
        body = rng.randbytes(rng.randrange(200))
    elif kind < 0.4:
        path = PATHS[1]
        body, length = binary(rng)
        extra = f"Inference-Header-Content-Length: {length}\r\n"
    elif kind < 0.8:
        body = json.dumps(broken(rng, GOOD[path])).encode()
    else:
        body = json.dumps(value(rng)).encode()
        if rng.random() < 0.3 and body:
            at = rng.randrange(len(body))
            body = body[:at] + rng.randbytes(1) + body[at + 1 :]
    if rng.random() < 0.1:
        extra += rng.choice(("X-Timeout-Ms: x\r\n", "X-Timeout-Ms: 1\r\n", "traceparent: 00-x\r\n"))
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


async def fuzzed(port: int, n_requests: int, seed: int, *, n_callers: int = 8) -> dict[int, int]:
    """How many of the requests got which status; 0: a connection without an answer."""
    rng = random.Random(seed)
    left = iter(range(n_requests))
    found: dict[int, int] = {}

    async def one() -> None:
        for _ in left:
            status = await _raw(port, request(rng))
            found[status] = found.get(status, 0) + 1

    await asyncio.gather(*(one() for _ in range(n_callers)))
    return found


async def _raw(port: int, data: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), 60)
        return int(line.split(b" ")[1]) if line else 0
    except (OSError, TimeoutError):
        return 0
    finally:
        writer.close()


async def pests(port: int, *, n_half_open: int, n_dribbling: int, stop: asyncio.Event) -> None:
    """Connections that never send a whole head, and ones that send a body a byte a second, until `stop`."""

    async def half_open() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nHost:")
                await until(reader, stop)
                writer.close()
            await asyncio.sleep(1)

    async def dribbling() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
                for _ in range(99):
                    if stop.is_set() or reader.at_eof() or writer.is_closing():
                        break
                    writer.write(b"{")
                    await until(reader, stop, 1.0)
                writer.close()
            await asyncio.sleep(1)

    await asyncio.gather(
        *(half_open() for _ in range(n_half_open)), *(dribbling() for _ in range(n_dribbling))
    )


async def until(reader: asyncio.StreamReader, stop: asyncio.Event, seconds: float = 60.0) -> None:
    """Wait until the other side closes or says something, the time is over, or `stop`."""
    waits = {asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(stop.wait())}
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def answered(port: int, stop: asyncio.Event) -> list[int]:
    """The statuses that a plain caller, on a connection of its own, gets all the while."""
    caller = Caller(port)
    statuses = []
    while not stop.is_set():
        statuses.append((await caller.ask("POST", "/predict", b'{"texts": ["Profits rose."]}'))[0])
        await asyncio.sleep(0.05)
    caller.close()
    return statuses
