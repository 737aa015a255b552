"""The service's bars: batching against one at a time, overhead, overload, stops, hostile callers.

`make bench-service`: containers of the CPU image on this machine's own network, by turns; only one computes
at a time. The baseline of batching is the same image with batches of one row (`max_batch_tokens: 1`).
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory

from board import Board, tell
from service_fuzz import answered, fuzzed, pests
from service_load import Caller, Result, at_rate, beside, closed_loop, mixed, quantile, token_ids

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
ROUNDS = 3
BARE = """
import json, sys, time
from pathlib import Path
from service.model.classifier import Encoded
from service.model.inference import load
from service.settings import Limits, Settings
model = load(Settings("bare", "cpu", Path("/models"), "random", "x", 1, Limits()), "finbert", Path("/models"))
print("ready", flush=True)
for line in sys.stdin:
    seconds, n_tokens = float(line.split()[0]), int(line.split()[1])
    row = Encoded((101, *range(1000, 1000 + n_tokens - 2), 102))
    took, ends = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < ends or not took:
        model.classify([row])
        took.append(time.perf_counter() - begun)
    print(json.dumps(took), flush=True)
"""


@dataclass(frozen=True)
class Server:
    """A container of the service and its port."""

    name: str
    port: int

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics without labels, by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs if "{" not in name}

    def ready(self, within_s: float = 120) -> None:
        """Wait until it is ready. Raises RuntimeError when it isn't in time."""
        ends = time.monotonic() + within_s
        while time.monotonic() < ends:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/health/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.name} isn't ready: {docker('logs', '--tail', '5', self.name)}")


def docker(*words: str) -> str:
    """What docker prints. Raises RuntimeError when it fails."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {words[0]}: {done.stderr.strip()}")
    return done.stdout + done.stderr


@contextmanager
def server(profiles: Path, profile: str) -> Iterator[Server]:
    """A container with the profile, on the host's network: no proxy stands in between."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name = f"bench-service-{profile}-{os.getpid()}"
    docker(
        *("run", "-d", "--name", name, "--network", "host", "--read-only", "--tmpfs", "/tmp"),
        *("-v", f"{profiles}:/profiles:ro", "-e", "WEIR_PROFILES_DIR=/profiles"),
        *("-e", f"APP_PROFILE={profile}", "-e", f"WEIR_LISTEN=127.0.0.1:{port}", IMAGE),
    )
    try:
        made = Server(name, port)
        made.ready()
        yield made
    finally:
        docker("rm", "-f", name)


class Bare:
    """The forward pass alone, in a container of the same image."""

    def __enter__(self) -> "Bare":
        name = f"bench-service-bare-{os.getpid()}"
        command = ["docker", "run", "--rm", "-i", "--name", name, "--network", "none"]
        command += [IMAGE, "python3", "-c", BARE]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._line()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)

    def passes(self, seconds: float, n_tokens: int) -> list[float]:
        """How long each pass took, one after the other for so long."""
        assert self._process.stdin
        self._process.stdin.write(f"{seconds} {n_tokens}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


def run_closed(here: Server, n_callers: int, seconds: float, tokens: object, *, keep: bool = True) -> Result:
    body = token_ids(mixed() if tokens == "mixed" else int(str(tokens)))
    return asyncio.run(closed_loop(here.port, n_callers, seconds, body, keep=keep))


def batching(board: Board, batched: Server, single: Server, seconds: float) -> None:
    """By turns: batches against one row at a time, 32 callers, the same requests.

    Answers a second of CPU time stand beside: other programs on the machine change those less.
    """
    for tokens, limit in ((12, 2.5), (32, 1.5), (128, 1.0), ("mixed", 1.0)):
        before = batched.metrics()
        rates: dict[str, list[float]] = {"batched": [], "single": []}
        by_cpu: dict[str, list[float]] = {"batched": [], "single": []}
        for _ in range(ROUNDS):
            for name, here in (("single", single), ("batched", batched)):
                spent = here.metrics()["process_cpu_seconds_total"]
                found = run_closed(here, 32, seconds, tokens)
                rates[name].append(found.rate)
                by_cpu[name].append(len(found.ok) / (here.metrics()["process_cpu_seconds_total"] - spent))
        board.bar(
            f"batching-{tokens}",
            statistics.median(map(truediv, rates["batched"], rates["single"])),
            limit,
            "x",
            at_least=True,
            per_s={name: [round(rate, 1) for rate in each] for name, each in rates.items()},
            by_cpu_time=round(statistics.median(map(truediv, by_cpu["batched"], by_cpu["single"])), 2),
        )
        if tokens == "mixed":
            after = batched.metrics()
            padding, real = (
                after[key] - before[key] for key in ("weir_padding_tokens_total", "weir_tokens_total")
            )
            board.bar("padding-mixed", padding / (padding + real), 0.15, "of the tokens")


def one_caller(board: Board, batched: Server, single: Server, seconds: float) -> None:
    """p50 of a lone caller, and what the service adds to the forward pass; blocks by turns."""
    seen: dict[str, list[float]] = {"kept": [], "new": [], "single": [], "bare": []}
    added: dict[str, list[float]] = {"kept": [], "new": []}
    with Bare() as bare:
        bare.passes(1, 12)
        for _ in range(2 * ROUNDS):
            for name, here, keep in (
                ("kept", batched, True),
                ("new", batched, False),
                ("single", single, True),
            ):
                found = run_closed(here, 1, seconds / 2, 12, keep=keep)
                seen[name] += found.ok
                if name in added:
                    added[name] += found.overhead
            seen["bare"] += bare.passes(seconds / 2, 12)
    p50 = {name: quantile(each, 0.5) for name, each in seen.items()}
    shown = {name: round(1000 * each, 2) for name, each in p50.items()}
    board.bar("one-caller-p50", p50["kept"] / p50["single"], 1.05, "x of one at a time", p50_ms=shown)
    for name in ("kept", "new"):
        own = quantile(added[name], 0.5)  # where others keep the machine busy, a bare loop suffers more
        over = max(own, p50[name] - p50["bare"])
        board.bar(f"overhead-p50-{name}", 1000 * over, 3, "ms over the bare pass or its own, the larger")
        board.bar(
            f"overhead-p99-{name}", 1000 * quantile(added[name], 0.99), 6, "ms of a request not computing"
        )


def overload(board: Board, here: Server, seconds: float) -> None:
    """Ten times the requests that can be answered, against as many callers as fit, none refused."""
    full = run_closed(here, 64, seconds / 3, 12)
    before = here.metrics()["process_resident_memory_bytes"]
    work = at_rate(here.port, 10 * full.rate, seconds, token_ids(12), n_callers=192)
    result, health = asyncio.run(beside(work, here.port))
    after = here.metrics()["process_resident_memory_bytes"]
    board.figure("overload-answers", json.dumps(result.counts()), "by status", per_s=round(10 * full.rate, 1))
    board.bar("overload-other-statuses", len(set(result.seconds) - {200, 429}), 0, "statuses")
    ratio = quantile(result.ok, 0.99) / quantile(full.ok, 0.99)
    board.bar("overload-admitted-p99", ratio, 1.5, "x of the p99 of 64 callers, none refused",
              p99_s=[round(quantile(each, 0.99), 3) for each in (full.ok, result.ok)])  # fmt: skip
    board.bar("overload-refusal-p50", 1000 * quantile(result.seconds[429], 0.5), 50, "ms")
    board.bar("overload-refusal-p99", 1000 * quantile(result.seconds[429], 0.99), 50, "ms")
    board.bar("overload-health", len(health - {200}), 0, "other statuses than 200")
    board.bar("overload-memory", after / before - 1, 0.05, "of resident memory")


def stops(board: Board, here: Server, n_cycles: int) -> None:
    """SIGTERM with 64 requests inside: each must be answered; then the next start."""
    lost: list[dict[int, int]] = []
    codes = []
    for at in range(n_cycles):
        if at:
            docker("start", here.name)
            here.ready()
        statuses = asyncio.run(_stopped_inside(here, 64))
        codes.append(int(docker("wait", here.name)))
        if set(statuses) != {200}:
            lost.append({status: statuses.count(status) for status in set(statuses)})
        if at % 10 == 9:
            tell(f"{at + 1} stops")
    n_lost = sum(count for each in lost for status, count in each.items() if status != 200)
    board.bar("stops-lost", n_lost, 0, "admitted requests", cycles=n_cycles)
    board.bar("stops-exit-codes", len([code for code in codes if code]), 0, "exits other than 0")


async def _stopped_inside(here: Server, n_callers: int) -> list[int]:
    body = token_ids(12)
    asked = [
        asyncio.create_task(Caller(here.port, keep=False).ask("POST", "/predict", body(number)))
        for number in range(n_callers)
    ]
    caller = Caller(here.port)
    while not all(task.done() for task in asked):  # all inside at once, as the service itself counts them
        _, page = await caller.ask("GET", "/metrics")
        if f"weir_in_flight {n_callers}.0".encode() in page:
            break
    else:
        raise RuntimeError(f"{n_callers} requests were never inside together")
    docker("kill", "-s", "TERM", here.name)
    return [(await task)[0] for task in asked]


def hostile(board: Board, here: Server, n_requests: int) -> None:
    """Half-open and dribbling connections and fuzzed requests, while a plain caller asks on."""

    async def scenario() -> tuple[dict[int, int], list[int]]:
        stop = asyncio.Event()
        busy = asyncio.create_task(pests(here.port, n_half_open=300, n_dribbling=100, stop=stop))
        plain = asyncio.create_task(answered(here.port, stop))
        await asyncio.sleep(3)
        found = await fuzzed(here.port, n_requests, seed=1)
        stop.set()
        await busy
        return found, await plain

    pid = docker("inspect", "-f", "{{.State.Pid}}", here.name)
    found, plain = asyncio.run(scenario())
    board.figure("fuzz-answers", json.dumps(dict(sorted(found.items()))), "by status")
    board.bar("fuzz-500s", found.get(500, 0), 0, f"of {n_requests} requests")
    board.bar("fuzz-unanswered", found.get(0, 0), 0, "requests")
    board.bar(
        "fuzz-restarts", int(docker("inspect", "-f", "{{.State.Pid}}", here.name) != pid), 0, "restarts"
    )
    others = [status for status in plain if status != 200]
    board.bar("fuzz-others", len(others), 0, f"of {len(plain)} others", statuses=sorted(set(others)))


def size(board: Board) -> None:
    """The image's bytes, by its audit."""
    totals = json.loads((ROOT / "reports" / "images" / "cpu.json").read_text())["totals"]
    board.bar("cpu-image", totals["unpacked_bytes"], 700_000_000, "bytes unpacked")


def main() -> int:
    """Run the parts that are asked for; all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="batching, one, overload, hostile, stops, size")
    parser.add_argument("--seconds", type=float, default=8, help="of one measurement")
    parser.add_argument("--cycles", type=int, default=100, help="stops")
    args = parser.parse_args()
    board = Board(whole=not args.parts and args.cycles >= 100)
    with TemporaryDirectory() as folder, _servers(Path(folder)) as (batched, single):
        parts: dict[str, Callable[[], None]] = {
            "batching": lambda: batching(board, batched, single, args.seconds),
            "one": lambda: one_caller(board, batched, single, args.seconds),
            "overload": lambda: overload(board, batched, 60),
            "hostile": lambda: hostile(board, batched, 10_000),
            "stops": lambda: stops(board, batched, args.cycles),
            "size": lambda: size(board),
        }
        for name in args.parts or parts:
            tell(name)
            parts[name]()
    board.waive("gpu-rows", "no GPU here: captured shapes, VRAM and GTT are only measured on one")
    return board.finish()


@contextmanager
def _servers(profiles: Path) -> Iterator[tuple[Server, Server]]:
    profiles.chmod(0o755)
    (profiles / "application-batched.yaml").write_text("device: cpu\n")
    (profiles / "application-single.yaml").write_text("device: cpu\nmax_batch_tokens: 1\nmax_wait_ms: 0\n")
    with server(profiles, "batched") as batched, server(profiles, "single") as single:
        yield batched, single


if __name__ == "__main__":
    sys.exit(main())
