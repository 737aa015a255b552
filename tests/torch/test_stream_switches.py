"""Which stream work and marks go to, with a device that only notes it: the streams' own bookkeeping."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from probes.placement.runtime import streams

OURS, CALLERS = 7, 3


class Device:
    """Two GPUs' current streams, by number."""

    def __init__(self):
        self.device, self.current, self.by_context = 0, {0: CALLERS, 1: CALLERS}, 0

    def set_stream(self, *, stream_id, device_index, device_type):
        assert device_type == 1
        self.device, self.current[device_index] = device_index, stream_id

    @contextmanager
    def context(self, stream):
        before, self.by_context = (self.device, dict(self.current)), self.by_context + 1
        self.set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1)
        try:
            yield
        finally:
            self.device, self.current = before


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(streams, "_SET_STREAM", made.set_stream)
    monkeypatch.setattr(streams, "_CURRENT_STREAM", lambda index: (made.current[index], index, 1))
    monkeypatch.setattr(streams, "_CURRENT_ADDRESS", lambda index: made.current[index])
    one = SimpleNamespace(stream_id=OURS, device_index=0, device_type=1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: one)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: _Again(lambda: made.context(stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(at=made.current[index]))
    return made


class _Again:
    """A context that can be entered again, as torch's."""

    def __init__(self, make):
        self._make = make

    def __enter__(self):
        self._inside = self._make()
        return self._inside.__enter__()

    def __exit__(self, *error):
        return self._inside.__exit__(*error)


def test_an_interruption_right_after_a_switch_leaves_the_callers_stream_current(device, monkeypatch):
    def interrupted(**stream):
        device.set_stream(**stream)
        if stream["stream_id"] == OURS:
            raise KeyboardInterrupt

    monkeypatch.setattr(streams, "_SET_STREAM", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ran_on(device, streams._OwnStream(torch.device("cuda", 0)))
    assert device.current == {0: CALLERS, 1: CALLERS}


def ran_on(device, lane):
    seen = []
    lane.run(lambda: seen.append((device.device, device.current[0])))
    return seen


@pytest.mark.parametrize("has_functions", [True, False])
@pytest.mark.parametrize("current_device", [0, 1])
def test_work_runs_on_our_stream_and_the_callers_is_current_again(
    device, monkeypatch, has_functions, current_device
):
    if not has_functions:
        monkeypatch.setattr(streams, "_SET_STREAM", None)
    device.device = current_device
    lane = streams._OwnStream(torch.device("cuda", 0))
    assert ran_on(device, lane) == [(0, OURS)]
    assert (device.device, device.current) == (current_device, {0: CALLERS, 1: CALLERS})
    assert device.by_context == (not has_functions or current_device)


def test_work_that_fails_leaves_the_callers_stream_current(device):
    lane = streams._OwnStream(torch.device("cuda", 0))
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: 1 // 0)
    assert device.current[0] == CALLERS


@pytest.mark.parametrize("has_functions", [True, False])
def test_marks_go_to_whichever_stream_is_current(device, monkeypatch, has_functions):
    if not has_functions:
        monkeypatch.setattr(streams, "_CURRENT_ADDRESS", None)
    seen = []
    mark = SimpleNamespace(
        event=SimpleNamespace(
            record=lambda stream: seen.append(stream.at), wait=lambda stream: seen.append(-stream.at)
        )
    )
    lane = streams._CallersStream(torch.device("cuda", 0))
    for stream in (3, 4, 3):
        device.current[0] = stream
        lane.record(mark)
        lane.wait(mark)
    assert seen == [3, -3, 4, -4, 3, -3]


class Waiting(SimpleNamespace):
    """A stream that notes which stream it waits for; equal by number, as torch's."""

    def __eq__(self, other):
        return self.at == other.at

    __hash__ = None

    def wait_stream(self, other):
        self.seen.append((self.at, other.at))


@pytest.mark.parametrize("has_functions", [True, False])
def test_work_that_follows_on_another_stream_waits_for_the_one_before(device, monkeypatch, has_functions):
    if not has_functions:
        monkeypatch.setattr(streams, "_CURRENT_ADDRESS", None)
    seen = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: Waiting(at=device.current[index], seen=seen)
    )
    lane = streams._CallersStream(torch.device("cuda", 0))
    for stream in (3, 3, 4, 4, 3):
        device.current[0] = stream
        lane.follow()
    assert seen == [(4, 3), (3, 4)]
    lane.forget()  # everything has been waited for
    device.current[0] = 5
    lane.follow()
    assert len(seen) == 2


class Graph:
    """Replays what `replays` does."""

    replays = staticmethod(int)

    def __init__(self, **_):
        pass

    def capture_begin(self, **_):
        pass

    def capture_end(self):
        pass

    def pool(self):
        return None

    def replay(self):
        self.replays()


@pytest.mark.parametrize("writes", [3, 4])
def test_work_whose_graph_writes_something_else_is_handed_over_kernel_by_kernel(device, monkeypatch, writes):
    assert device
    written = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(Graph, "replays", staticmethod(lambda: written.fill_(writes)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(streams, "_IS_CAPTURING", lambda: False)

    def work():
        written.fill_(3)

    made = streams.CudaStreams(torch.device("cuda", 0))
    bundled = made.bundled(work, written)
    assert (bundled is work) == (writes != 3)
    assert made.why_unbundled == ("" if writes == 3 else "a graph of it writes something else")


class Event:
    """Notes in `log` which stream waits for which."""

    log: list

    def __init__(self, **_):
        pass

    def record(self, stream):
        self.stream = stream

    def wait(self, stream):
        self.log.append((stream, self.stream))


class Lane:
    """Of one stream, which has a name."""

    def __init__(self, stream):
        self.stream = stream

    def record(self, mark):
        mark.event.record(self.stream)

    def wait(self, mark):
        mark.event.wait(self.stream)


@pytest.mark.parametrize("fails", [False, True])
def test_a_recording_ends_with_the_streams_of_our_own_joined(monkeypatch, fails):
    Event.log = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    ours = SimpleNamespace(compute=Lane("caller"), forked=(Lane("copies"), Lane("unpacking")))

    def work():
        assert Event.log == [("copies", "caller"), ("unpacking", "caller")]
        Event.log.clear()
        if fails:
            raise RuntimeError("no")
        return "outputs"

    with pytest.raises(RuntimeError, match="no") if fails else nullcontext():
        assert streams._PassGraph(ours, work, None, None).outputs == "outputs"
    assert Event.log == [("caller", "copies"), ("caller", "unpacking")]
