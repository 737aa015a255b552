"""Streams that are made in a thread of their own: order, bounds, ends, faults and interrupts."""

import threading
from collections.abc import Iterator

import pytest

from buildtool.image.streams import BATCH, ReadAhead

DEPTH = 4  # batches that wait by default


def counted(n_chunks: int, reached: dict[int, threading.Event]) -> Iterator[bytes]:
    """Chunks that say their number; an event is set when its chunk is made."""
    for n in range(1, n_chunks + 1):
        if n in reached:
            reached[n].set()
        yield b"%d" % n


@pytest.mark.parametrize("n_chunks", [0, 1, BATCH - 1, BATCH, BATCH + 1, 10 * BATCH + 1])
def test_chunks_come_once_each_and_in_order(n_chunks: int) -> None:
    with ReadAhead(counted(n_chunks, {})) as ahead:
        assert list(ahead) == [b"%d" % n for n in range(1, n_chunks + 1)]


def test_no_more_is_made_ahead_than_its_bounds_allow() -> None:
    """Four batches of four that wait and one in hand: memory stays bounded for a consumer that is slow."""
    reached = {20: threading.Event(), 21: threading.Event()}
    with ReadAhead(counted(100, reached)) as ahead:
        assert reached[20].wait(60)
        assert not reached[21].wait(0.05)
        assert next(iter(ahead)) == b"1"
        assert reached[21].wait(60)


def test_the_thread_ends_with_the_process() -> None:
    """A source that never answers again must not keep the process alive."""
    before = set(threading.enumerate())
    with ReadAhead(counted(1000, {})):
        (maker,) = set(threading.enumerate()) - before
        assert (maker.daemon, maker.name) == (True, "ahead")
    assert not maker.is_alive()


def test_what_was_made_before_a_fault_comes_first() -> None:
    def broken() -> Iterator[bytes]:
        yield from (b"%d" % n for n in range(BATCH + 1))
        raise OSError("disk")

    with ReadAhead(broken()) as ahead:
        chunks = iter(ahead)
        came = [next(chunks) for _ in range(BATCH + 1)]
        with pytest.raises(OSError, match="disk"):
            next(chunks)
    assert came == [b"%d" % n for n in range(BATCH + 1)]


def test_unpacking_ahead_stops_with_its_consumer() -> None:
    before = set(threading.enumerate())
    with ReadAhead(iter(lambda: b"endless", None)) as ahead:
        assert next(iter(ahead)) == b"endless"
    assert set(threading.enumerate()) <= before


def test_what_goes_wrong_ahead_is_heard_by_the_consumer() -> None:
    def broken() -> Iterator[bytes]:
        yield b"first"
        raise OSError("disk")

    with ReadAhead(broken()) as ahead:
        chunks = iter(ahead)
        assert next(chunks) == b"first"
        with pytest.raises(OSError, match="disk"):
            next(chunks)


def test_an_interrupt_does_not_wait_for_an_engine_that_stalls() -> None:
    answer = threading.Event()

    def stalled() -> Iterator[bytes]:
        yield from [b"first"] * BATCH**2  # enough for two stages to hand something over
        answer.wait()

    def interrupted() -> None:
        with ReadAhead(ReadAhead(stalled()).__enter__().__iter__()) as ahead:
            assert next(iter(ahead)) == b"first"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    answer.set()
