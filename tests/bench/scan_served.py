"""The served scan's bars: an M/D/1 server's latency, and coordinated omission. A group of `make bench-scan`.

The server is a stand-in with an exact service time (`exact_server.py`), and every client a process of its
own, as a user's would be.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean

from board import Board

from probes.core.codec import decode, encode
from probes.throughput.served import results
from probes.throughput.served.http import BusySelector, HttpClient, loop_with, resolve
from probes.throughput.served.level import Load, measure_level, poisson
from probes.throughput.served.load import wake_early_s
from probes.throughput.served.protocol import Body, request
from probes.throughput.served.results import Level, ServedSettings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVICE_S = 0.02
SECONDS = 15.0
LOADS = (0.3, 0.5, 0.8)
SETTINGS = ServedSettings(
    rows=1, slo_s=None, window_s=SECONDS / 3, windows=3, most_windows=3, tolerance=10.0, limit_s=30.0,
    most_callers=1, most_connections=512, keep_alive=True, rates_per_s=(), seed=1,
)  # fmt: skip


@contextmanager
def exact(*words: str) -> Iterator[int]:
    """The port of a stand-in server."""
    command = [sys.executable, str(HERE / "exact_server.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def measure(port: int, load: Load, settings: ServedSettings) -> Level:
    """One level against a server of the loopback, by the scan's own client."""
    endpoint = resolve("127.0.0.1", port, tls=False)
    body = Body(b'{"inputs":[]}')
    asked = request(body, path="/v2/models/exact/infer", authority=endpoint.authority, keep=True)
    watch = BusySelector()
    loop = loop_with(watch)
    try:
        return loop.run_until_complete(
            measure_level(
                load,
                lambda: HttpClient(endpoint, (asked,), watch, limit_s=settings.limit_s),
                settings,
                busy_s=lambda: watch.busy_s,
                early_s=wake_early_s,
            )
        )
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def apart(asked: tuple[int, float, int, float], *, connections: int = 512) -> Level:
    """An open-loop level by a client in a process of its own: port, rate, seed, seconds."""
    command = [sys.executable, __file__, json.dumps([*asked, connections])]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return decode(Level, json.loads(ran.stdout))


def of_these_arrivals(level: Level, seed: int, service_s: float) -> list[float]:
    """Seconds that each request of a level spends in a queue that is first come, first served."""
    assert level.rate_per_s is not None
    arrivals = list(islice(poisson(level.rate_per_s, seed=seed), 3 * len(level.due_s) + 1000))
    first, second = level.due_s[0], level.due_s[1]
    at = next(
        i for i, pair in enumerate(pairwise(arrivals))
        if abs(pair[1] - pair[0] - (second - first)) < 3e-6
    )  # fmt: skip
    free, found = 0.0, []
    for arrival in arrivals[: at + len(level.due_s)]:
        free = max(arrival, free) + service_s
        found.append(free - arrival)
    return found[at:]


def formula(load: float, service_s: float) -> float:
    """The mean time in an M/D/1 queue (Pollaczek and Khinchine)."""
    return service_s * (1 + load / (2 * (1 - load)))


def exact_queue(board: Board) -> None:
    """The latency of a queue that is known: first come, first served, of these very arrivals.

    The formula's mean is that of all arrivals there could be; a run of seconds differs from it by chance, so
    that it is shown and not judged.
    """
    found = []
    for seed, load in enumerate(LOADS):
        with exact(str(SERVICE_S)) as port:
            level = apart((port, load / SERVICE_S, seed, SECONDS))
        found.append((load, fmean(level.latency_s), fmean(of_these_arrivals(level, seed, SERVICE_S)), level))
    board.bar(
        "md1-latency", max(abs(mean / known - 1) for _, mean, known, _ in found), 0.05, "off the queue's own",
        loads=LOADS, ms=[[round(1e3 * mean, 2), round(1e3 * known, 2)] for _, mean, known, _ in found],
        requests=[len(level.latency_s) for *_, level in found],
        client_late_ms=[round(1e3 * level.client.late_median_s, 3) for *_, level in found],
        client_bound=[level.client.bound_by for *_, level in found if level.client.bound_by],
    )  # fmt: skip
    for load, mean, _, level in found:
        board.figure(
            f"md1-over-formula-{load}", mean / formula(load, SERVICE_S), "x", requests=len(level.latency_s)
        )


def omission(board: Board) -> None:
    """A server that stands still for 1 s in 6: in the corrected p99, not in a naive client's.

    Arrivals are even over the pause, so 1 % of all waits longer than 0.94 s of it.
    """
    with exact("0.001", "--pause-every", "6", "--pause", "1") as port:
        opened = apart((port, 50.0, 1, 18.0), connections=1)
    with exact("0.001", "--pause-every", "6", "--pause", "1") as port:
        how = replace(SETTINGS, window_s=6.0)
        closed = measure(port, Load("closed", 1), how)
    corrected, naive = results.latencies(opened), results.naive_latencies(opened)
    in_loop = results.latencies(closed)
    assert isinstance(corrected, tuple)
    assert isinstance(naive, tuple)
    assert isinstance(in_loop, tuple)
    board.bar(
        "omission-corrected-p99", abs(corrected[-1].value / 0.94 - 1), 0.1, "off what the pause makes it",
        p99_s=round(corrected[-1].value, 4),
    )  # fmt: skip
    board.bar(
        "omission-hidden", corrected[-1].value / max(naive[-1].value, in_loop[-1].value), 10,
        "x of a naive client's p99", at_least=True,
        naive_p99_ms=round(1e3 * naive[-1].value, 2), closed_loop_p99_ms=round(1e3 * in_loop[-1].value, 2),
    )  # fmt: skip


def _client(words: str) -> None:
    port, rate, seed, seconds, connections = json.loads(words)
    how = replace(SETTINGS, window_s=seconds / 3, seed=seed)
    level = measure(port, Load("open", connections, rate), how)
    print(json.dumps(encode(level)))


if __name__ == "__main__":
    _client(sys.argv[1])
