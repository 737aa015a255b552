"""Who stays when all places are taken, and when a connection's time is up; without a socket."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from service.api.admission import ConnectionLimiter, places
from service.api.connection import Connection
from service.errors import SettingsError
from service.settings import build_settings
from test_service_settings import SOURCE
from uvicorn.server import ServerState


def test_the_connection_that_waited_longest_makes_room() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(2)
    assert [door.enter(name) for name in ("a", "b", "c")] == [None, None, "a"]
    assert len(door) == 2


def test_a_connection_whose_request_is_whole_is_never_closed_for_a_newcomer() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(2)
    for name in ("a", "b"):
        door.enter(name)
        door.serve(name)
    assert door.enter("c") == "c"
    door.wait("b")
    assert door.enter("d") == "b"


def test_an_answered_connection_waits_behind_older_ones() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(2)
    for name in ("a", "b"):
        door.enter(name)
    door.serve("a")
    door.wait("a")
    assert door.enter("c") == "b"


def test_a_flood_of_silent_connections_closes_no_caller_who_was_answered() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(4)
    for name in ("caller", "a", "b", "c"):
        door.enter(name)
        if name == "caller":
            door.serve(name)
            door.wait(name)
    assert [door.enter(name) for name in ("d", "e", "f", "g")] == ["a", "b", "c", "d"]


def test_idle_callers_keep_no_newcomer_out() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(4)
    for name in ("a", "b", "c", "d"):
        door.enter(name)
        door.serve(name)
        door.wait(name)
    assert [door.enter(name) for name in ("e", "f", "g")] == ["a", "b", "e"]


def test_a_connection_that_was_closed_takes_no_place_again() -> None:
    door: ConnectionLimiter[str] = ConnectionLimiter(1)
    door.enter("a")
    door.leave("a")
    door.serve("a")
    door.wait("a")
    assert len(door) == 0


@pytest.mark.parametrize(
    ("wanted", "open_files", "limit", "burst"),
    [(256, 1_048_576, 256, 128), (256, 256, 96, 96), (8, 256, 8, 96), (256, 10, 1, 1)],
)
def test_connections_leave_files_for_everything_else(
    wanted: int, open_files: int, limit: int, burst: int
) -> None:
    assert places(wanted, open_files, burst=128) == (limit, burst)


def test_a_profile_with_fewer_connections_than_slots_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_connections is 64, max_in_flight 64"):
        build_settings({}, {"device": "cpu", "max_connections": 64}, SOURCE)


# ---- one connection, with a clock of ours --------------------------------------------------------------


@dataclass
class Timer:
    at_s: float
    action: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Loop:
    """Holds what was put off until the test moves the clock."""

    now_s: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, action))
        return self.timers[-1]

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for timer in [each for each in self.timers if each.at_s <= self.now_s]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.action()

    def create_task(self, coroutine: Any) -> "Task":
        coroutine.close()  # the application never answers here
        return Task()


class Task:
    def add_done_callback(self, _action: object) -> None:
        pass


@dataclass
class Transport:
    written: bytes = b""
    closed: bool = False
    aborted: bool = False
    unread_by_peer: int = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unread_by_peer

    def get_extra_info(self, _name: str) -> None:
        return None

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass
class House:
    """Connections that share a door and a clock."""

    limit: int = 9
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        async def application(scope: object, receive: object, send: object) -> None:
            raise AssertionError("is never run")

        self.config = uvicorn.Config(application, ws="none", lifespan="off", log_config=None)
        self.door: ConnectionLimiter[Connection] = ConnectionLimiter(self.limit)

    def connect(self) -> tuple[Connection, Transport]:
        loop: Any = self.loop
        transport: Any = Transport()
        made = Connection(self.config, ServerState(), {}, loop, door=self.door, timeout_s=10)
        made.connection_made(transport)
        return made, transport


HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


@pytest.fixture
def house() -> House:
    return House()


def test_a_head_that_never_ends_is_answered_with_408_however_it_drips(house: House) -> None:
    connection, transport = house.connect()
    for byte in HEAD[:9]:
        connection.data_received(bytes([byte]))
        house.loop.pass_time(1)
    assert not transport.closed
    house.loop.pass_time(1)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    assert transport.closed


def test_a_silent_connection_is_closed_without_an_answer(house: House) -> None:
    _, transport = house.connect()
    house.loop.pass_time(10)
    assert (transport.written, transport.closed) == (b"", True)


def test_a_head_in_time_stops_the_clock(house: House) -> None:
    connection, transport = house.connect()
    house.loop.pass_time(9)
    connection.data_received(HEAD)
    house.loop.pass_time(99)
    assert not transport.closed


def test_an_answer_that_nobody_reads_is_given_up(house: House) -> None:
    connection, transport = house.connect()
    connection.data_received(HEAD)
    transport.unread_by_peer = 70_000
    connection.pause_writing()
    connection.data_received(b"123456789" + HEAD)  # further requests don't make up for it
    house.loop.pass_time(10)
    assert transport.aborted


def test_a_close_that_can_not_be_flushed_is_forced(house: House) -> None:
    connection, transport = house.connect()
    connection.data_received(HEAD[:9])
    house.loop.pass_time(10)
    assert transport.closed
    assert not transport.aborted
    house.loop.pass_time(10)
    assert transport.aborted


def test_the_newcomer_is_refused_when_every_place_serves_a_whole_request() -> None:
    house = House(limit=1)
    first, kept = house.connect()
    first.data_received(HEAD + b"123456789")
    _, refused = house.connect()
    assert refused.written.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused.written.lower()
    assert refused.closed
    assert not kept.closed


def test_a_body_on_its_way_makes_room_for_a_newcomer() -> None:
    house = House(limit=1)
    first, slow = house.connect()
    first.data_received(HEAD + b"1")
    _, newcomer = house.connect()
    assert slow.aborted
    assert not newcomer.closed


def test_the_protocol_is_one_that_asyncio_can_serve() -> None:
    assert issubclass(Connection, asyncio.Protocol)
