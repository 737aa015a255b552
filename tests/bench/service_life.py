"""What bench_service.py does to a service's life: stops with requests inside, and devices that fail."""

import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from board import Board, tell
from service_load import Caller, token_ids
from service_servers import BREAKS, Server, docker, server

LANES = 2  # services that are stopped and started at the same time, each with one thread of torch
INSIDE = 64
LONG = 128  # tokens of the first request inside: the others arrive while it is computed


def stops(board: Board, folder: Path, n_cycles: int) -> None:
    """SIGTERM with 64 requests inside: each must be answered; then the next start."""
    with ThreadPoolExecutor(LANES) as lanes:
        found = [
            each
            for lane in lanes.map(lambda lane: _lane(folder, lane, -(-n_cycles // LANES)), range(LANES))
            for each in lane
        ]
    lost = [status for each in found for status in each.statuses if status != 200]
    took = {
        "start": round(statistics.median(each.started_s for each in found), 2),
        "stop": round(statistics.median(each.stopped_s for each in found), 2),
    }
    board.bar("stops-lost", len(lost), 0, "admitted requests", cycles=len(found), inside=INSIDE,
              statuses=sorted(set(lost)), p50_s=took)  # fmt: skip
    board.bar("stops-exit-codes", len([each for each in found if each.code]), 0, "exits other than 0")


@dataclass(frozen=True)
class Stop:
    """One cycle: what those inside were answered, the exit code, and how long start and the rest took."""

    statuses: list[int]
    code: int
    started_s: float
    stopped_s: float


def _lane(folder: Path, lane: int, n_cycles: int) -> list[Stop]:
    """The cycles of one container."""
    found = []
    begun = time.monotonic()
    with server(folder, "stops", lane=lane) as here:
        for at in range(n_cycles):
            if at:
                begun = time.monotonic()
                docker("start", here.name)
                here.ready()
            ready = time.monotonic()
            statuses = asyncio.run(_stopped_inside(here))
            code = int(docker("wait", here.name))
            found.append(Stop(statuses, code, ready - begun, time.monotonic() - ready))
            if at % 10 == 9:
                tell(f"{at + 1} stops in lane {lane}")
    return found


async def _stopped_inside(here: Server) -> list[int]:
    """A long request, 63 short ones while it is computed, SIGTERM once all are inside: their statuses.

    Raises RuntimeError when they never were inside together, five times.
    """
    for _ in range(5):
        asked = [
            asyncio.create_task(
                Caller(here.port, keep=False).ask("POST", "/predict", token_ids(tokens)(number))
            )
            for number, tokens in enumerate((LONG, *[12] * (INSIDE - 1)))
        ]
        if await _inside(Caller(here.port), INSIDE, asked):
            await asyncio.to_thread(docker, "kill", "-s", "TERM", here.name)
            return [(await task)[0] for task in asked]
    raise RuntimeError(f"{INSIDE} requests were never inside together")


async def _inside(caller: Caller, n_requests: int, asked: list[asyncio.Task[tuple[int, bytes]]]) -> bool:
    """Whether so many were inside at once, as the service itself counts them, before all were answered."""
    while f"weir_in_flight {n_requests}.0".encode() not in (await caller.ask("GET", "/metrics"))[1]:
        if all(task.done() for task in asked):
            return False
    return True


# ---- devices that fail -------------------------------------------------------------------------------


def faults(board: Board, folder: Path) -> None:
    """A device that fails for a moment, one that goes on failing, and one that hangs, under 8 callers.

    A hang is noticed after `stall_s`, which is 60 s unless the profile says otherwise; here it is 1 s.
    """
    with TemporaryDirectory() as made:
        planted = Path(made)
        planted.chmod(0o755)
        mounts = [f"{planted}:/faults:ro"]
        with server(folder, "batched", lane=1, mounts=mounts, program=BREAKS) as here:
            _brief(board, here, planted / "broken")
            _lasting(board, here, planted / "broken")
        with server(folder, "impatient", mounts=mounts, program=BREAKS) as here:
            _lasting(board, here, planted / "hangs")


def _brief(board: Board, here: Server, fault: Path) -> None:
    async def scenario() -> None:
        asking = _Asking(here.port)
        await asyncio.sleep(1)
        planted = time.perf_counter()
        fault.touch()
        unready = await _until(here, lambda status: status != 200) - planted
        fault.unlink()
        again = await _until(here, lambda status: status == 200)
        await asyncio.sleep(2)
        answers = await asking.ended()
        after = [each.status for each in answers if each.asked > again and each.status]
        board.bar("fault-brief-unready", unready, 2, "s", ready_again_s=round(again - planted, 2))
        board.bar("fault-brief-recovers", after.count(200) / max(1, len(after)), 1,
                  f"of {len(after)} answers once it is ready again are 200", at_least=True)  # fmt: skip
        _nothing_hangs(board, "brief", answers)

    asyncio.run(scenario())


def _lasting(board: Board, here: Server, fault: Path) -> None:
    async def scenario() -> tuple[float, int, float, "list[Answer]"]:
        asking = _Asking(here.port)
        await asyncio.sleep(1)
        planted = time.perf_counter()
        fault.touch()
        unready = await _until(here, lambda status: status != 200) - planted
        code = int(await asyncio.to_thread(docker, "wait", here.name))
        ended = time.perf_counter() - planted
        return unready, code, ended, await asking.ended()

    try:
        unready, code, ended, answers = asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        fault.unlink()
    name = f"fault-{fault.name}"
    board.bar(f"{name}-unready", unready, 2, "s")
    board.bar(f"{name}-exit", int(code != 3), 0, "exits without a lost device's code", code=code,
              after_s=round(ended, 1))  # fmt: skip
    _nothing_hangs(board, fault.name, answers)


def _nothing_hangs(board: Board, name: str, answers: "list[Answer]") -> None:
    counts = Counter(each.status for each in answers)  # 0: no answer, as after the end of the process
    slowest = max(each.took_s for each in answers)
    board.bar(f"fault-{name}-slowest-answer", slowest, 10, "s", answers=json.dumps(counts))


async def _until(here: Server, wanted: Callable[[int], bool]) -> float:
    """When readiness had a status that is wanted, asked for 50 times a second; 30 s at most."""
    ends = time.perf_counter() + 30
    caller = Caller(here.port, keep=False)
    while time.perf_counter() < ends:
        if wanted((await caller.ask("GET", "/v2/health/ready"))[0]):
            return time.perf_counter()
        await asyncio.sleep(0.02)
    return ends


@dataclass(frozen=True)
class Answer:
    """When it was asked for, its status (0: none), and how long it took."""

    asked: float
    status: int
    took_s: float


class _Asking:
    """Eight callers who ask on: what each answer was and how long it took, in order."""

    def __init__(self, port: int) -> None:
        self._answers: list[Answer] = []
        self._tasks = [asyncio.create_task(self._one(port)) for _ in range(8)]

    async def _one(self, port: int) -> None:
        caller = Caller(port)
        body = token_ids(12)
        while True:
            status, asked = 0, time.perf_counter()
            try:
                status, _ = await caller.ask("POST", "/predict", body(0))
            finally:  # who still waits at the end counts with the time until then
                self._answers.append(Answer(asked, status, time.perf_counter() - asked))
            await asyncio.sleep(0 if status == 200 else 0.05)

    async def ended(self) -> list[Answer]:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return list(self._answers)
