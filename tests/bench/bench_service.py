"""The service's bars: batching against one at a time, overhead, overload, hostile callers, faults, stops.

`make bench-service`: containers of the CPU image on this machine's own network, by turns; only one computes
at a time, but for the stops. The callers run on the same CPUs as the service and take their share: what is
compared is measured by turns in one run, and judged where other programs leave the CPUs alone
(service_quiet.py). The baseline of batching is the same image with batches of
one row (`max_batch_tokens: 1`).
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import service_fuzz_rpc
from board import Board, tell
from service_fuzz import answered, fuzzed, pests
from service_life import faults, stops
from service_load import Result, Watched, at_rate, beside, closed_loop, lone, mixed, quantile, token_ids
from service_quiet import Meter, spent_by
from service_servers import EXTRAS, Bare, Server, server

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "images"))

from service.settings import Limits  # noqa: E402

ROUNDS = 3
SLOTS = Limits().max_in_flight  # as many callers fit
TURNS = 40  # of a lone caller's measurements: many short ones, so that other programs disturb all alike
PROFILES = {
    "batched": "device: cpu\n",
    "single": "device: cpu\nmax_batch_tokens: 1\nmax_wait_ms: 0\n",
    "stops": "device: cpu\nthreads: 1\n",
    "impatient": "device: cpu\nstall_s: 1\n",
}


def run_closed(here: Server, n_callers: int, seconds: float, tokens: object) -> Result:
    body = token_ids(mixed() if tokens == "mixed" else int(str(tokens)))
    return asyncio.run(closed_loop(here.port, n_callers, seconds, body))


def batching(board: Board, meter: Meter, batched: Server, single: Server, seconds: float) -> None:
    """By turns: batches against one row at a time, 32 callers, the same requests.

    Answers a second of CPU time stand beside: other programs on the machine change those less.
    """

    def turn(tokens: object, number: int) -> dict[str, tuple[float, float]]:
        """Answers a second, and a second of CPU time, of both sides."""
        both = {"single": single, "batched": batched}
        found = {}
        for name in list(both) if number % 2 else list(both)[::-1]:
            spent = both[name].metrics()["process_cpu_seconds_total"]
            result = run_closed(both[name], 32, seconds, tokens)
            spent = both[name].metrics()["process_cpu_seconds_total"] - spent
            found[name] = result.rate, len(result.ok) / spent
        return found

    for tokens, limit in ((12, 2.5), (32, 1.5), (128, 1.0), ("mixed", 1.0)):
        before = batched.metrics()
        turns = meter.turns(partial(turn, tokens), ROUNDS)
        ratios = [
            [each["batched"][at] / each["single"][at] for each in turns.best]
            for at in (0, 1)  # by time, by CPU time
        ]
        turns.bar(
            board,
            f"batching-{tokens}",
            statistics.median(ratios[0]),
            limit,
            "x",
            at_least=True,
            per_s={name: [round(each[name][0], 1) for each in turns.best] for name in ("batched", "single")},
            by_cpu_time=round(statistics.median(ratios[1]), 2),
        )
        if tokens == "mixed":
            after = batched.metrics()
            padding, real = (
                after[key] - before[key] for key in ("weir_padding_tokens_total", "weir_tokens_total")
            )
            board.bar("padding-mixed", padding / (padding + real), 0.15, "of the tokens")


@dataclass(frozen=True)
class LoneTurn:
    """What a lone caller saw in one turn, over each kind of connection, and the passes of a bare loop."""

    bare: list[float]
    seen: dict[str, Result]

    def p50(self, name: str) -> float:
        return quantile(self.seen[name].ok if name in self.seen else self.bare, 0.5)


def one_caller(board: Board, meter: Meter, batched: Server, single: Server, seconds: float) -> None:
    """p50 of a lone caller, and what the service adds to the forward pass; short blocks by turns."""
    asked = [("kept", batched, True), ("new", batched, False), ("single", single, True)]

    def turn(number: int) -> LoneTurn:
        bare = alone.passes(seconds / 16, 12)
        order = asked if number % 2 else asked[::-1]
        seen = {name: lone(here.port, seconds / 16, token_ids(12), keep=keep) for name, here, keep in order}
        return LoneTurn(bare, seen)

    with Bare() as alone:
        alone.passes(1, 12)
        pid = alone.pid()
        turns = Meter(lambda: meter.own() + spent_by([pid], and_this=False)).turns(turn, TURNS)
    best = turns.best
    shown = {
        name: round(1000 * statistics.median(each.p50(name) for each in best), 2)
        for name in ("kept", "new", "single", "bare")
    }
    ratio = statistics.median(each.p50("kept") / each.p50("single") for each in best)
    turns.bar(board, "one-caller-p50", ratio, 1.05, "x of one at a time", p50_ms=shown)
    for name in ("kept", "new"):
        added = [each for one in best for each in one.seen[name].overhead]
        own = quantile(added, 0.5)  # where others keep the machine busy, a bare loop suffers more
        over_bare = statistics.median(each.p50(name) - each.p50("bare") for each in best)
        stages = {
            stage: round(
                1000 * quantile([each for one in best for each in one.seen[name].stages[stage]], 0.5), 2
            )
            for stage in best[0].seen[name].stages
        }
        turns.bar(board, f"overhead-p50-{name}", 1000 * max(own, over_bare), 3,
                  "ms over the bare pass or its own, the larger",
                  own_ms=round(1000 * own, 2), over_bare_ms=round(1000 * over_bare, 2),
                  stages_p50_ms=stages | {"bare pass": shown["bare"]})  # fmt: skip
        p99 = 1000 * quantile(added, 0.99)
        turns.bar(board, f"overhead-p99-{name}", p99, 6, "ms of a request not computing")


def overload(board: Board, meter: Meter, here: Server, seconds: float) -> None:
    """Ten times the requests that can be answered, against as many callers as fit, none refused; by turns."""
    seen: list[tuple[Watched, Watched]] = []

    def turn(_number: int) -> tuple[Result, Result]:
        fits = closed_loop(here.port, SLOTS, seconds / (3 * ROUNDS), token_ids(12))
        full, before = asyncio.run(beside(fits, here.port))
        work = at_rate(here.port, 10 * full.rate, seconds / ROUNDS, token_ids(12), n_callers=3 * SLOTS)
        result, after = asyncio.run(beside(work, here.port))
        seen.append((before, after))
        return full, result

    spent, begun = time.process_time(), time.monotonic()
    turns = meter.turns(turn, ROUNDS)
    callers = (time.process_time() - spent) / (time.monotonic() - begun)
    full, result = ([each[at] for each in turns.best] for at in (0, 1))
    answers = sum((Counter(each.counts()) for _, each in (one for one, _ in turns.found)), Counter())
    rate = statistics.median(each.rate for each in full)
    board.figure("overload-answers", json.dumps(dict(sorted(answers.items()))), "by status",
                 per_s=round(10 * rate, 1), callers_take=f"{callers:.0%} of one CPU")  # fmt: skip
    board.bar("overload-other-statuses", len(set(answers) - {200, 429}), 0, "statuses")
    ratio = statistics.median(
        quantile(over.ok, 0.99) / quantile(fits.ok, 0.99) for fits, over in zip(full, result, strict=True)
    )
    turns.bar(board, "overload-admitted-p99", ratio, 1.5, f"x of the p99 of {SLOTS} callers, none refused",
              unloaded_s=_quantiles(full), admitted_s=_quantiles(result))  # fmt: skip
    refused = [each for one in result for each in one.seconds.get(429, [])]
    for share in (0.5, 0.99):
        turns.bar(board, f"overload-refusal-p{100 * share:.0f}", 1000 * quantile(refused, share), 50, "ms")
    health = set().union(*(after.statuses for _, after in seen))
    board.bar("overload-health", len(health - {200}), 0, "other statuses than 200")
    first, last = seen[0], seen[-1]  # batches come and go
    grown = max(last[1].resident) / max((*first[0].resident, *first[1].resident))
    seen_mb = [round(each / 1e6) for _, after in seen for each in after.resident[::5]]
    board.bar("overload-memory", grown - 1, 0.05, "more at most in the last turn than in the first",
              resident_mb=seen_mb)  # fmt: skip


def _quantiles(results: list[Result]) -> dict[str, list[float]]:
    """p50, p90 and p99 of the answers and of their batches, in seconds."""
    seen = {
        "answer": [each for one in results for each in one.ok],
        "batch": [each for one in results for each in one.stages["inference"]],
    }
    return {name: [round(quantile(each, q), 3) for q in (0.5, 0.9, 0.99)] for name, each in seen.items()}


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

    pid = here.pid()
    found, plain = asyncio.run(scenario())
    board.figure("fuzz-answers", json.dumps(dict(sorted(found.items()))), "by status")
    board.bar("fuzz-500s", found.get(500, 0), 0, f"of {n_requests} requests")
    board.bar("fuzz-unanswered", found.get(0, 0), 0, "requests")
    board.bar("fuzz-restarts", int(here.pid() != pid), 0, "restarts")
    others = [status for status in plain if status != 200]
    board.bar("fuzz-others", len(others), 0, f"of {len(plain)} others", statuses=sorted(set(others)))


def hostile_rpc(board: Board, folder: Path, n_calls: int) -> None:
    """The same over gRPC, of the image that has it; also callers who leave, and broken frames."""

    async def scenario() -> tuple[Counter[str], Counter[str], list[str]]:
        stop = asyncio.Event()
        busy = asyncio.create_task(service_fuzz_rpc.pests(here.rpc, stop, half_open=100, leaving=20))
        plain = asyncio.create_task(service_fuzz_rpc.answered(here.rpc, stop))
        await asyncio.sleep(3)
        found = await asyncio.to_thread(service_fuzz_rpc.fuzzed, here.rpc, n_calls, 2)
        await asyncio.sleep(12)  # until the service has ended half-open streams
        stop.set()
        return found, await busy, await plain

    with server(folder, "batched", checked=True, image=EXTRAS) as here:
        pid = here.pid()
        found, beside, plain = asyncio.run(scenario())
        restarts, failed = int(here.pid() != pid), here.failed()
    board.figure("fuzz-grpc-answers", json.dumps(dict(sorted(found.items()))), "by status",
                 beside=dict(sorted(beside.items())))  # fmt: skip
    internal = sum(found[name] for name in ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"))
    board.bar("fuzz-grpc-internal", internal, 0, f"of {n_calls} calls")
    board.bar("fuzz-grpc-500s", failed, 0, "that the service itself counts, of all calls")
    board.bar("fuzz-grpc-unanswered", found["unanswered"] + found["UNAVAILABLE"], 0, "calls")
    board.bar("fuzz-grpc-restarts", restarts, 0, "restarts")
    others = [status for status in plain if status != "OK"]
    board.bar("fuzz-grpc-others", len(others), 0, f"of {len(plain)} others", statuses=sorted(set(others)))


def size(board: Board) -> None:
    """The image's bytes, by its audit."""
    totals = json.loads((ROOT / "reports" / "images" / "cpu.json").read_text())["totals"]
    board.bar("cpu-image", totals["unpacked_bytes"], 700_000_000, "bytes unpacked")


def main() -> int:
    """Run the parts that are asked for; all of them by default. A part that breaks off is a missed bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help="batching, one, overload, hostile, faults, stops, grpc, size"
    )
    parser.add_argument("--seconds", type=float, default=8, help="of one measurement")
    parser.add_argument("--overload", type=float, default=60, help="seconds of overload")
    parser.add_argument("--cycles", type=int, default=100, help="stops")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # containers must not outlive it
    board = Board(whole=not args.parts and args.cycles >= 100 and args.overload >= 60)
    with TemporaryDirectory() as made:
        folder = _prepared(Path(made))
        parts: dict[str, Callable[[Server, Server], None]] = {
            "batching": lambda batched, single: batching(board, meter, batched, single, args.seconds / 2),
            "one": lambda batched, single: one_caller(board, meter, batched, single, args.seconds),
            "overload": lambda batched, _single: overload(board, meter, batched, args.overload),
            "hostile": lambda batched, _single: hostile(board, batched, 10_000),
        }
        wanted = args.parts or [*parts, "faults", "stops", "grpc", "size"]
        if parts.keys() & set(wanted):
            with server(folder, "batched", checked=True) as batched, server(folder, "single") as single:
                pids = [int(each.pid()) for each in (batched, single)]
                meter = Meter(lambda: spent_by(pids))
                meter.first(board)
                for name in wanted:
                    if name in parts:
                        _run(board, name, partial(parts[name], batched, single))
        alone = {
            "faults": lambda: faults(board, folder),
            "stops": lambda: stops(board, folder, args.cycles),
            "size": lambda: size(board),
            "grpc": lambda: hostile_rpc(board, folder, 4_000),
        }
        for name in wanted:
            if name in alone:
                _run(board, name, alone[name])
    board.waive("gpu-rows", "no GPU here: captured shapes, VRAM and GTT are only measured on one")
    return board.finish()


def _run(board: Board, name: str, part: Callable[[], None]) -> None:
    tell(name)
    try:
        part()
    except Exception as error:  # the other parts' figures must not be lost with it
        traceback.print_exc()
        board.bar(f"{name}-ended", 0, 1, f"whole: {type(error).__name__}: {error}", at_least=True)


def _prepared(folder: Path) -> Path:
    """The folder with all profiles, and a place for bytecode that the image's user may write to."""
    folder.chmod(0o755)
    (folder / "bytecode").mkdir()
    (folder / "bytecode").chmod(0o777)
    for name, text in PROFILES.items():
        (folder / f"application-{name}.yaml").write_text(text)
    return folder


if __name__ == "__main__":
    sys.exit(main())
