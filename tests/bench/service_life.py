"""What bench_service.py does to a service's life: stops with requests inside, and devices that fail."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from board import Board, tell
from service_load import Caller, token_ids
from service_servers import BREAKS, Server, docker, server

LANES = 2  # services that are stopped and started at the same time, each with one thread of torch
INSIDE = 64
LONG = 256  # tokens of the first request inside: the others arrive while it is computed


def stops(board: Board, folder: Path, n_cycles: int) -> None:
    """SIGTERM with 64 requests inside: each must be answered; then the next start."""
    with ThreadPoolExecutor(LANES) as lanes:
        found = [
            each
            for lane in lanes.map(lambda lane: _lane(folder, lane, -(-n_cycles // LANES)), range(LANES))
            for each in lane
        ]
    lost = sum(status != 200 for statuses, _ in found for status in statuses)
    kinds = sorted({status for statuses, _ in found for status in statuses} - {200})
    board.bar("stops-lost", lost, 0, "admitted requests", cycles=len(found), inside=INSIDE, statuses=kinds)
    board.bar("stops-exit-codes", len([code for _, code in found if code]), 0, "exits other than 0")


def _lane(folder: Path, lane: int, n_cycles: int) -> list[tuple[list[int], int]]:
    """The statuses of the requests inside, and the exit code, of each cycle of one container."""
    found = []
    with server(folder, "stops", lane=lane) as here:
        for at in range(n_cycles):
            if at:
                docker("start", here.name)
                here.ready()
            statuses = asyncio.run(_stopped_inside(here))
            found.append((statuses, int(docker("wait", here.name))))
            if at % 10 == 9:
                tell(f"{at + 1} stops in lane {lane}")
    return found


async def _stopped_inside(here: Server) -> list[int]:
    """A long request, 63 short ones while it is computed, SIGTERM once all are inside: their statuses."""
    asked = [asyncio.create_task(Caller(here.port, keep=False).ask("POST", "/predict", token_ids(LONG)(0)))]
    caller = Caller(here.port)
    await _inside(caller, 1, asked)
    body = token_ids(12)
    asked += [
        asyncio.create_task(Caller(here.port, keep=False).ask("POST", "/predict", body(number)))
        for number in range(INSIDE - 1)
    ]
    await _inside(caller, INSIDE, asked)
    await asyncio.to_thread(docker, "kill", "-s", "TERM", here.name)
    return [(await task)[0] for task in asked]


async def _inside(caller: Caller, n_requests: int, asked: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    """Wait until so many are inside at once, as the service itself counts them. Raises RuntimeError."""
    while f"weir_in_flight {n_requests}.0".encode() not in (await caller.ask("GET", "/metrics"))[1]:
        if all(task.done() for task in asked):
            raise RuntimeError(f"{n_requests} requests were never inside together")


# ---- devices that fail -------------------------------------------------------------------------------


def faults(board: Board, folder: Path) -> None:
    """A device that fails for a moment, one that goes on failing, and one that hangs, under 8 callers."""
    with TemporaryDirectory() as made:
        planted = Path(made)
        planted.chmod(0o755)
        with server(folder, "faulty", mounts=[f"{planted}:/faults:ro"], program=BREAKS) as here:
            _brief(board, here, planted / "broken")
            for kind in ("broken", "hangs"):
                _lasting(board, here, planted / kind)
                docker("start", here.name)
                here.ready()


def _brief(board: Board, here: Server, fault: Path) -> None:
    async def scenario() -> tuple[float, float, list[tuple[int, float]]]:
        asking = _Asking(here.port)
        await asyncio.sleep(1)
        planted = time.perf_counter()
        fault.touch()
        unready = await _until(here, lambda status: status != 200) - planted
        fault.unlink()
        again = await _until(here, lambda status: status == 200) - planted
        await asyncio.sleep(1)
        return unready, again, await asking.ended()

    unready, again, answers = asyncio.run(scenario())
    board.bar("fault-brief-unready", unready, 2, "s", ready_again_s=round(again, 2))
    after = answers[-16:-8]  # the last eight may have been cut off by the end
    board.bar("fault-brief-recovers", sum(status == 200 for status, _ in after) / len(after), 1,
              "of the last answers are 200", at_least=True)  # fmt: skip
    _nothing_hangs(board, "brief", answers, limit_s=10)


def _lasting(board: Board, here: Server, fault: Path) -> None:
    async def scenario() -> tuple[float, int, float, list[tuple[int, float]]]:
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
    _nothing_hangs(board, fault.name, answers, limit_s=10)


def _nothing_hangs(board: Board, name: str, answers: list[tuple[int, float]], *, limit_s: float) -> None:
    counts = {status: sum(each == status for each, _ in answers) for status in {each for each, _ in answers}}
    slowest = max(seconds for _, seconds in answers)
    board.bar(f"fault-{name}-slowest-answer", slowest, limit_s, "s", answers=json.dumps(counts))


async def _until(here: Server, wanted: Callable[[int], bool]) -> float:
    """When readiness had a status that is wanted, asked for 50 times a second; 30 s at most."""
    ends = time.perf_counter() + 30
    caller = Caller(here.port, keep=False)
    while time.perf_counter() < ends:
        if wanted((await caller.ask("GET", "/v2/health/ready"))[0]):
            return time.perf_counter()
        await asyncio.sleep(0.02)
    return ends


class _Asking:
    """Eight callers who ask on: what each answer was and how long it took, in order."""

    def __init__(self, port: int) -> None:
        self._answers: list[tuple[int, float]] = []
        self._tasks = [asyncio.create_task(self._one(port)) for _ in range(8)]

    async def _one(self, port: int) -> None:
        caller = Caller(port)
        body = token_ids(12)
        while True:
            status, asked = 0, time.perf_counter()
            try:
                status, _ = await caller.ask("POST", "/predict", body(0))
            finally:  # who still waits at the end counts with the time until then
                self._answers.append((status, time.perf_counter() - asked))
            await asyncio.sleep(0 if status == 200 else 0.05)

    async def ended(self) -> list[tuple[int, float]]:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return list(self._answers)
