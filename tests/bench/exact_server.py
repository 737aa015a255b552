"""A server whose queue is known: one request at a time, in order of arrival, each for exactly the same time.

With Poisson arrivals it is an M/D/1 queue. It computes nothing: an answer leaves when its time has come. It
speaks enough of the Open Inference Protocol for a scan, and keeps for each request how long it was inside, by
its own clock. Run as a program it prints its port, and when its standard input is closed, those times.

    python tests/bench/exact_server.py SERVICE_S [--pause-every S --pause S]
"""

import argparse
import asyncio
import json
import os
import selectors
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

MODEL = {
    "name": "exact",
    "versions": ["1"],
    "platform": "none",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
}
SERVER = {"name": "exact", "version": "1", "extensions": []}
WAKE_S = 0.0004  # before an answer is due it stays awake: a timer of a virtual machine wakes 0.2 ms late
ANSWER = b'{"model_name":"exact","outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[0.5]}]}'


class Exact:
    """The queue. `pauses`: begin and end of times in which nothing is answered, from the first request."""

    def __init__(self, service_s: float, *, pause_every_s: float = 0.0, pause_s: float = 0.0) -> None:
        self.service_s = service_s
        self.pause_every_s = pause_every_s
        self.pause_s = pause_s
        self.free_at = 0.0
        self.first: float | None = None
        self.inside_s: list[float] = []

    def leaves_at(self, now: float) -> float:
        """When a request that arrives now is answered."""
        self.first = now if self.first is None else self.first
        self.free_at = max(now, self.free_at) + self.service_s
        if self.pause_every_s:
            at = (self.free_at - self.first) % self.pause_every_s
            if at < self.pause_s and self.free_at - self.first > self.pause_every_s:
                self.free_at += self.pause_s - at
        return self.free_at


async def serve(queue: Exact, port: int = 0) -> asyncio.Server:
    """Listen on the loopback."""
    loop = asyncio.get_running_loop()

    class Line(asyncio.Protocol):
        def __init__(self) -> None:
            self.data = b""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.data += data
            while (end := self.data.find(b"\r\n\r\n")) >= 0:
                head = self.data[:end]
                length = _length(head)
                if len(self.data) < end + 4 + length:
                    return
                self.data = self.data[end + 4 + length :]
                self.asked(head)

        def asked(self, head: bytes) -> None:
            if head.startswith(b"POST"):
                now = loop.time()
                at = queue.leaves_at(now)
                loop.call_at(at - WAKE_S, self.answer, now, at)
            else:
                self.send(json.dumps(MODEL if b"/models/" in head.split(b"\r\n")[0] else SERVER).encode())

        def answer(self, came: float, at: float) -> None:
            while loop.time() < at:
                pass
            self.send(ANSWER)
            queue.inside_s.append(loop.time() - came)

        def send(self, body: bytes) -> None:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    return await loop.create_server(Line, "127.0.0.1", port)


def _length(head: bytes) -> int:
    lower = head.lower()
    return int(lower.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in lower else 0


async def _run(queue: Exact) -> None:
    server = await serve(queue)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    os.set_blocking(0, False)
    loop.add_reader(0, lambda: closed.set() if not os.read(0, 100) else None)
    await closed.wait()
    with suppress(BrokenPipeError):  # nobody wants them
        os.write(1, json.dumps(queue.inside_s).encode() + b"\n")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service_s", type=float)
    parser.add_argument("--pause-every", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args(argv)
    queue = Exact(args.service_s, pause_every_s=args.pause_every, pause_s=args.pause)
    loop = asyncio.SelectorEventLoop(
        selectors.SelectSelector()
    )  # exact timers: epoll's are whole milliseconds
    loop.run_until_complete(_run(queue))


if __name__ == "__main__":
    assert time.get_clock_info("monotonic").resolution < 1e-6
    main(sys.argv[1:])
