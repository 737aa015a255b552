"""Which connections stay open at the limit, and when a connection's time is up; without a socket."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from service.api.admission import ConnectionLimiter
from service.api.connection import Connection
from service.errors import SettingsError
from service.settings import Limits, build_settings
from test_service_settings import SOURCE
from uvicorn.server import ServerState


def test_the_connection_that_waited_longest_makes_room() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(2)
    assert [limiter.add(name) for name in ("a", "b", "c")] == [None, None, "a"]
    assert len(limiter) == 2


def test_a_connection_whose_request_is_whole_is_never_closed_for_a_newcomer() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(2)
    for name in ("a", "b"):
        limiter.add(name)
        limiter.mark_serving(name)
    assert limiter.add("c") == "c"
    limiter.mark_idle("b")
    assert limiter.add("d") == "b"


def test_an_answered_connection_waits_behind_older_ones() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(2)
    for name in ("a", "b"):
        limiter.add(name)
    limiter.mark_serving("a")
    limiter.mark_idle("a")
    assert limiter.add("c") == "b"


def test_a_flood_of_silent_connections_closes_no_caller_who_was_answered() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(4)
    for name in ("caller", "a", "b", "c"):
        limiter.add(name)
        if name == "caller":
            limiter.mark_serving(name)
            limiter.mark_idle(name)
    assert [limiter.add(name) for name in ("d", "e", "f", "g")] == ["a", "b", "c", "d"]


def test_idle_callers_keep_no_newcomer_out() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(4)
    for name in ("a", "b", "c", "d"):
        limiter.add(name)
        limiter.mark_serving(name)
        limiter.mark_idle(name)
    assert [limiter.add(name) for name in ("e", "f", "g")] == ["a", "b", "e"]


def test_a_connection_that_was_closed_takes_no_place_again() -> None:
    limiter: ConnectionLimiter[str] = ConnectionLimiter(1)
    limiter.add("a")
    limiter.remove("a")
    limiter.mark_serving("a")
    limiter.mark_idle("a")
    assert len(limiter) == 0


@pytest.mark.parametrize(
    ("wanted", "open_files", "limit", "backlog"),
    [(256, 1_048_576, 256, 128), (256, 256, 96, 96), (8, 256, 8, 96), (256, 10, 1, 1)],
)
def test_connections_leave_files_for_everything_else(
    wanted: int, open_files: int, limit: int, backlog: int
) -> None:
    fitted, _ = Limits(max_in_flight=4, max_connections=wanted).within_open_files(open_files, grpc=False)
    assert (fitted.max_connections, fitted.backlog) == (limit, backlog)


def test_fewer_connections_than_slots_lower_the_slots_and_say_so() -> None:
    fitted, lowered = Limits(max_in_flight=128).within_open_files(256, grpc=False)
    assert (fitted.max_connections, fitted.max_in_flight) == (96, 95)  # health checks need one, too
    assert lowered == (
        "256 open files allow 96 connections, not the 512 of max_connections",
        "96 connections allow 95 requests at a time, not the 128 of max_in_flight",
    )


def test_grpc_takes_half_of_the_files() -> None:
    fitted, _ = Limits().within_open_files(512, grpc=True)
    assert (fitted.max_connections, fitted.grpc_max_connections) == (96, 96)
    assert Limits().within_open_files(1_048_576, grpc=True) == (Limits(), ())


def test_limits_that_others_make_unreachable_are_named() -> None:
    assert Limits().contradictions() == ()
    (large_text,) = Limits(max_body_bytes=1024).contradictions()
    assert "max_body_bytes is 1024: a text of max_text_chars (20000) gets 413" in large_text
    (short_timeout,) = Limits(header_timeout_s=3).contradictions()
    assert "header_timeout_s is 3: idle connections are closed after that" in short_timeout
    (large_batch,) = Limits(max_batch_tokens=16384).contradictions()
    assert "max_queue_tokens is 8192: batches don't reach max_batch_tokens (16384)" in large_batch


def test_a_profile_with_fewer_connections_than_slots_is_refused() -> None:
    slots = Limits().max_in_flight
    with pytest.raises(SettingsError, match=f"max_connections is {slots}, max_in_flight {slots}"):
        build_settings({}, {"device": "cpu", "max_connections": slots}, SOURCE)


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
class Connections:
    """Connections that share a limiter and a clock."""

    limit: int = 9
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        async def application(scope: object, receive: object, send: object) -> None:
            raise AssertionError("is never run")

        self.config = uvicorn.Config(application, ws="none", lifespan="off", log_config=None)
        self.limiter: ConnectionLimiter[Connection] = ConnectionLimiter(self.limit)

    def connect(self) -> tuple[Connection, Transport]:
        loop: Any = self.loop
        transport: Any = Transport()
        made = Connection(self.config, ServerState(), {}, loop, limiter=self.limiter, limits=Limits())
        made.connection_made(transport)
        return made, transport


HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


@pytest.fixture
def connections() -> Connections:
    return Connections()


def test_a_head_that_never_ends_is_answered_with_408_however_it_drips(connections: Connections) -> None:
    connection, transport = connections.connect()
    for byte in HEAD[:9]:
        connection.data_received(bytes([byte]))
        connections.loop.pass_time(1)
    assert not transport.closed
    connections.loop.pass_time(1)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    assert transport.closed


def test_a_silent_connection_is_closed_without_an_answer(connections: Connections) -> None:
    _, transport = connections.connect()
    connections.loop.pass_time(10)
    assert (transport.written, transport.closed) == (b"", True)


def test_a_head_in_time_stops_the_clock(connections: Connections) -> None:
    connection, transport = connections.connect()
    connections.loop.pass_time(9)
    connection.data_received(HEAD)
    connections.loop.pass_time(99)
    assert not transport.closed


def test_an_answer_that_nobody_reads_is_given_up(connections: Connections) -> None:
    connection, transport = connections.connect()
    connection.data_received(HEAD)
    transport.unread_by_peer = 70_000
    connection.pause_writing()
    connection.data_received(b"123456789" + HEAD)  # further requests don't make up for it
    connections.loop.pass_time(10)
    assert transport.aborted


def test_a_close_that_can_not_be_flushed_is_forced(connections: Connections) -> None:
    connection, transport = connections.connect()
    connection.data_received(HEAD[:9])
    connections.loop.pass_time(10)
    assert transport.closed
    assert not transport.aborted
    connections.loop.pass_time(10)
    assert transport.aborted


def test_the_newcomer_is_refused_when_every_place_serves_a_whole_request() -> None:
    connections = Connections(limit=1)
    first, kept = connections.connect()
    first.data_received(HEAD + b"123456789")
    _, refused = connections.connect()
    assert refused.written.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused.written.lower()
    assert refused.closed
    assert not kept.closed


def test_a_body_on_its_way_makes_room_for_a_newcomer() -> None:
    connections = Connections(limit=1)
    first, slow = connections.connect()
    first.data_received(HEAD + b"1")
    _, newcomer = connections.connect()
    assert slow.aborted
    assert not newcomer.closed


def test_the_protocol_is_one_that_asyncio_can_serve() -> None:
    assert issubclass(Connection, asyncio.Protocol)
