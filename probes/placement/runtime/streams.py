"""Streams of device work, ordered by events: one computes, one copies, one unpacks.

`CudaStreams` are CUDA's (or HIP's) own, with graphs. Plain `Streams` do everything at once, for machines
without a GPU. Tests have streams that put work off for as long as events allow, to find an order that isn't
enforced.
"""

import ctypes
import time
from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch

from probes.core.errors import PlacementError
from probes.hardware.torch_build import first_line
from probes.placement.runtime.host_memory import ArrayInterface

Work = Callable[[], object]

# What any streams can do, and how it is done without a GPU: in the calling thread, as soon as it comes


class Event:
    """A point in a stream, recorded again and again. A wait for it means its latest recording."""

    at = 0.0  # seconds of the host's clock, where there is no GPU

    def reached(self) -> bool:
        """Whether all work before it is done."""
        return True

    def block(self) -> None:
        """Make the calling thread wait until it is reached."""


class Stream:
    """Work in order. Events are of the same `Streams`."""

    def run(self, work: Work) -> None:
        """Append work."""
        work()

    def record(self, event: Any) -> None:
        """Let the event be reached when all work so far is done."""
        event.at = time.perf_counter()

    def wait(self, event: Any) -> None:
        """Do nothing that follows before the event is reached."""

    def follow(self) -> None:
        """Do nothing that follows before all is done that this stream was given, on whichever stream."""


class Graph(Protocol):
    """Work of all streams, recorded once."""

    outputs: Any  # the same tensors after each replay

    def replay(self) -> None:
        """Append all of it to the compute stream."""


class Streams:
    """The three streams of a device, here of the CPU. `compute` is where the model's own operations go."""

    records = False  # whether there are graphs
    passes_recorded = 0  # so far
    compute: Stream
    copy: Stream
    unpack: Stream

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.compute = self.copy = self.unpack = Stream()

    def event(self) -> Event:
        """An event that nothing has recorded yet."""
        return Event()

    def use(self, memory: torch.Tensor) -> None:
        """Tell the allocator that all streams use the memory: none of it is reused before they are done."""

    def refused_allocations(self) -> int:
        """How often memory was refused so far, also where a library that asked for it did without."""
        return 0

    def finish(self) -> None:
        """Wait until every stream is done."""

    def record(self, work: Callable[[], Any], *, beside: Any | None) -> Graph:  # noqa: ARG002
        """Record what `work` hands to the streams, which are idle; none of it is done.

        Graphs recorded `beside` another share its memory; they are never replayed at the same time.
        Raises PlacementError where there are none.
        """
        raise PlacementError("there are no graphs without a GPU")

    def bundled(self, work: Work, written: torch.Tensor) -> Work:  # noqa: ARG002
        """Work that was done once, in a form that costs the host less to hand over if possible. May wait.

        `written`: the bytes that it writes.
        """
        return work

    def end_stream(self) -> None:
        """Let what waits for the copy that was just recorded get a stream of the graph's own.

        To be called where there is a single staging buffer.
        """

    def forget(self) -> None:
        """Release bundled work, and what it reads and writes."""

    def stopwatch(self) -> Any:
        """An event that knows when it was reached."""
        return Event()

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two of `stopwatch`, both reached."""
        return float(end.at - begin.at)


def streams_of(device: torch.device | str | None) -> Streams:
    """The streams of a device, of the current GPU by default, of the CPU where there is none."""
    try:
        named = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise PlacementError(
            f"{device!r} isn't a device: {first_line(error)}", "name cuda, cuda:1 or cpu"
        ) from None
    if named.type == "cpu":
        return Streams()
    if named.type != "cuda":
        raise PlacementError(f"models can be placed on cuda (AMD's GPUs too) and cpu, not on {named}")
    if (named.index or 0) >= torch.cuda.device_count():
        raise PlacementError(
            f"there is no {named}: torch sees {torch.cuda.device_count()} GPUs", "name another, or cpu"
        )
    return CudaStreams(
        torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)
    )


class Stopwatches:
    """Begin and end of every step of one pass, by stream and block."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._taken: dict[str, list[tuple[Any, Any, str]]] = {"copy": [], "unpack": [], "wait": []}
        self.copied_bytes = 0

    def _around(self, what: str, stream: Stream, work: Callable[[], object], block: str) -> None:
        begin, end = self._streams.stopwatch(), self._streams.stopwatch()
        stream.record(begin)
        work()
        stream.record(end)
        self._taken[what].append((begin, end, block))

    def copy(self, send: Callable[[], object], n_bytes: int, stream: Stream, block: str) -> None:
        """Time a copy of so many bytes, which `send` appends to the stream, for a block of this name."""
        self.copied_bytes += n_bytes
        self._around("copy", stream, send, block)

    def unpack(self, work: Callable[[], object], stream: Stream, block: str) -> None:
        """Append an unpacking to the stream."""
        self._around("unpack", stream, lambda: stream.run(work), block)

    def wait(self, stream: Stream, event: Event, block: str) -> None:
        """Make the stream wait for an event."""
        self._around("wait", stream, lambda: stream.wait(event), block)

    def seconds(self, what: str) -> float:
        """The sum of these steps, all of them done."""
        return sum(self.by_block(what).values())

    def by_block(self, what: str) -> dict[str, float]:
        """Likewise of each block."""
        sums: dict[str, float] = {}
        for begin, end, block in self._taken[what]:
            sums[block] = sums.get(block, 0.0) + self._streams.seconds(begin, end)
        return sums


# With a GPU

# torch's allocator takes this much for small tensors of a stream that has none yet. The first graph
# brings two: the seed and the offset of its random numbers, whether it draws any or not.
SMALL_SEGMENT: Final = 2 << 20

# what torch's own stream context and `current_stream` call, without what they do around it; None: not there
_CURRENT_ADDRESS: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_CURRENT_STREAM: Final[Any] = getattr(torch._C, "_cuda_getCurrentStream", None)
_SET_STREAM: Final[Any] = getattr(torch._C, "_cuda_setStream", None)
_IS_CAPTURING: Final[Callable[[], bool]] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


class _CudaEvent(Event):
    """A CUDA (or HIP) event."""

    def __init__(self, *, timed: bool = False) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)

    def reached(self) -> bool:
        return bool(self.event.query())

    def block(self) -> None:
        self.event.synchronize()


class _OwnStream(Stream):
    """A CUDA (or HIP) stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device.index
        self._context = torch.cuda.stream(self.stream)
        stream = self.stream
        self._ours = {
            "stream_id": stream.stream_id,
            "device_index": stream.device_index,
            "device_type": stream.device_type,
        }

    def run(self, work: Work) -> None:
        """With torch's context, or by what that calls, which takes a quarter of its Python."""
        if not (_CURRENT_STREAM and _SET_STREAM) or torch.cuda.current_device() != self._device:
            with self._context:
                work()
            return
        stream, device, kind = _CURRENT_STREAM(self._device)
        try:  # an interruption may come before any of this; in `finally`, before that
            _SET_STREAM(**self._ours)
            work()
            _SET_STREAM(stream_id=stream, device_index=device, device_type=kind)
        except BaseException:
            _SET_STREAM(stream_id=stream, device_index=device, device_type=kind)
            raise

    def record(self, event: _CudaEvent) -> None:
        event.event.record(self.stream)

    def wait(self, event: _CudaEvent) -> None:
        self.stream.wait_event(event.event)

    def follow(self) -> None:
        """Do nothing: work on one stream already runs in order."""


class _CallersStream(Stream):
    """Whichever stream of the device is current when work comes: the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._streams: dict[int, torch.cuda.Stream] = {}  # by address
        self._before: torch.cuda.Stream | None = None  # on which `follow` was called last

    def run(self, work: Work) -> None:
        work()

    def record(self, event: _CudaEvent) -> None:
        event.event.record(self._now())

    def wait(self, event: _CudaEvent) -> None:
        event.event.wait(self._now())

    def follow(self) -> None:
        now = self._now()
        if self._before is now:
            return
        if self._before is not None and self._before != now:
            now.wait_stream(self._before)
        self._before = now

    def forget(self) -> None:
        """Everything has been waited for: no stream has to be followed."""
        self._before = None

    def _now(self) -> torch.cuda.Stream:
        """Torch makes an object at each question, which costs more than the event."""
        if _CURRENT_ADDRESS is None:
            return torch.cuda.current_stream(self._device)
        address = _CURRENT_ADDRESS(self._device)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self._device)
        return stream


class CudaStreams(Streams):
    """Two streams of our own beside the caller's."""

    records = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._caller = _CallersStream(device)
        self.compute = self._caller
        self.forked = _OwnStream(device), _OwnStream(device)
        self.copy = self.forked[0]
        self.unpack = self.forked[1]
        self._recording = torch.cuda.Stream(device)
        self._bundles: list[_UnpackGraph] = []  # of which the first has the pool of all
        self.why_unbundled = ""  # why unpacking is handed over kernel by kernel, if it is
        self.why_memsets = ""  # why graphs have memsets, if they do

    def event(self) -> Event:
        """An event."""
        return _CudaEvent()

    def use(self, memory: torch.Tensor) -> None:
        """The allocator knows the stream that asked for it, and from now on ours."""
        for stream in self.forked:
            memory.record_stream(stream.stream)

    def refused_allocations(self) -> int:
        """As torch's allocator has counted them."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0))

    def finish(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.device)
        self._caller.forget()

    def record(self, work: Callable[[], Any], *, beside: Any | None) -> Graph:
        """A CUDA graph: the streams of our own are forked from the caller's, and joined at its end."""
        return _PassGraph(self, work, beside, self._recording)

    def bundled(self, work: Work, written: torch.Tensor) -> Work:
        """As a graph of its own, unless that fails, takes memory, or writes anything else."""
        if self.why_unbundled or _IS_CAPTURING():
            return work
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.synchronize(self.device)  # the unpack stream tries it, whichever stream the work is of
        try:
            graph = _UnpackGraph(work, self.unpack, self._bundles[0] if self._bundles else None)
            grown = torch.cuda.memory_reserved(self.device) - before
            if grown > (0 if self._bundles else SMALL_SEGMENT):
                self.why_unbundled = f"a graph of it takes {grown:,} bytes"
            elif not graph.agrees(written):
                self.why_unbundled = "a graph of it writes something else"
        except RuntimeError as error:
            self.why_unbundled = first_line(error)
        if self.why_unbundled:
            return work
        self._bundles.append(graph)
        return graph

    def end_stream(self) -> None:
        """Append an empty kernel to the copy, which inherits its stream.

        With one staging buffer, nothing but the block waits for its copy. It would inherit the stream, all
        kernels after it too, and the next copy would begin one more: with three of them waiting, an H200
        copied at 44 to 49 GB/s instead of 55. With two staging buffers the next copy inherits it, and the
        kernel would hold that up: streaming reached 0.963 of the line rate, and 0.994 before.
        """
        if torch.version.hip is None:
            self.copy.run(partial(torch.cuda._sleep, 0))

    def forget(self) -> None:
        """Release the graphs."""
        self._bundles.clear()

    def stopwatch(self) -> _CudaEvent:
        """An event with a time."""
        return _CudaEvent(timed=True)

    def seconds(self, begin: _CudaEvent, end: _CudaEvent) -> float:
        """By the device's clock."""
        return float(begin.event.elapsed_time(end.event)) / 1e3


class _UnpackGraph:
    """Work of one stream as a graph: one launch instead of one for each kernel, which costs the host less."""

    def __init__(self, work: Work, stream: Stream, beside: "_UnpackGraph | None") -> None:
        self._work, self._stream = work, stream
        self._graph = torch.cuda.CUDAGraph()
        stream.run(partial(self._capture, beside))

    def agrees(self, written: torch.Tensor) -> bool:
        """Whether a replay writes what the work writes, by the sum of all words. Waits for the device."""
        words = written.view(torch.int64)
        sums: list[int] = []

        def compare() -> None:
            for way in (self._work, self._graph.replay):
                words.zero_()
                way()
                sums.append(int(words.sum()))

        self._stream.run(compare)
        return sums[0] == sums[1]

    def _capture(self, beside: "_UnpackGraph | None") -> None:
        pool = {"pool": beside._graph.pool()} if beside else {}
        self._graph.capture_begin(**pool, capture_error_mode="thread_local")
        try:
            self._work()
        finally:
            self._graph.capture_end()

    def __call__(self) -> None:
        """Do it; within a larger capture kernel by kernel."""
        if _IS_CAPTURING():
            self._work()
        else:
            self._graph.replay()


class _PassGraph:
    """A CUDA (or HIP) graph, in a pool of memory that it may share with others."""

    def __init__(
        self,
        streams: CudaStreams,
        work: Callable[[], Any],
        beside: "_PassGraph | None",
        stream: torch.cuda.Stream,
    ) -> None:
        editable = torch.version.hip is None and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
        self._graph = torch.cuda.CUDAGraph(**({"keep_graph": True} if editable else {}))
        pool = beside._graph.pool() if beside else None
        # each stream has a workspace for products, of 32 MiB on an H100: that of eager calls isn't needed now
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            fork = _CudaEvent()
            streams.compute.record(fork)
            for forked in streams.forked:
                forked.wait(fork)
            try:
                self.outputs = work()
            finally:  # else the error would be that of a capture that has unjoined streams
                for forked in streams.forked:
                    joined = _CudaEvent()
                    joined.event.record(forked.stream)
                    streams.compute.wait(joined)
        if editable:
            streams.why_memsets = self._without_memsets(stream)
            self._graph.instantiate()

    def _without_memsets(self, stream: torch.cuda.Stream) -> str:
        graphs: list[torch.cuda.CUDAGraph] = []  # which are alive until they have been copied

        def kernel(memset: Memset) -> int:
            graphs.append(_fill_graph(memset, stream))
            return int(graphs[-1].raw_cuda_graph())

        try:
            return replace_memsets(GraphNodes(self._graph.raw_cuda_graph()), kernel)
        except DriverError as error:
            return str(error)

    def replay(self) -> None:
        self._graph.replay()


# Memsets in graphs, which are replaced by kernels

LIBRARY: Final = "libcuda.so.1"
MEMSET: Final = 2  # CU_GRAPH_NODE_TYPE_MEMSET
WIDTHS: Final = (1, 2, 4)  # bytes of the elements that a memset writes


class DriverError(Exception):
    """The driver refused a function."""


@dataclass(frozen=True)
class Memset:
    """`count` elements of `width` bytes each, one behind the other, from `address` on become `value`."""

    address: int
    value: int
    width: int
    count: int


class _MemsetParams(Structure):
    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class GraphNodes:
    """A graph's nodes. Raises DriverError for what the driver refuses."""

    def __init__(self, graph: int, library: Any | None = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(str(error)) from error
        self._graph = c_void_p(graph)

    def all(self) -> list[int]:
        """Return every node of the graph."""
        return self._listed("cuGraphGetNodes", self._graph)

    def memset(self, node: int) -> Memset | None:
        """What the node sets; None for another kind of node, and for memsets of several rows."""
        kind = c_int(-1)
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value != MEMSET:
            return None
        parameters = _MemsetParams()
        self._call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(parameters))
        if parameters.height != 1 or parameters.element_size not in WIDTHS:
            return None
        return Memset(
            int(parameters.dst), int(parameters.value), int(parameters.element_size), int(parameters.width)
        )

    def replace(self, node: int, child: int) -> None:
        """Let the graph `child` be where the node is. If that fails, the node is there as before."""
        before = self._listed("cuGraphNodeGetDependencies", c_void_p(node))
        after = self._listed("cuGraphNodeGetDependentNodes", c_void_p(node))
        added = c_void_p()
        self._call(
            "cuGraphAddChildGraphNode",
            byref(added),
            self._graph,
            (c_void_p * len(before))(*before),
            c_size_t(len(before)),
            c_void_p(child),
        )
        try:
            self._call(
                "cuGraphAddDependencies",
                self._graph,
                (c_void_p * len(after))(*[added.value] * len(after)),
                (c_void_p * len(after))(*after),
                c_size_t(len(after)),
            )
            self._call("cuGraphDestroyNode", c_void_p(node))
        except DriverError:
            self._call("cuGraphDestroyNode", added)
            raise

    def _listed(self, name: str, of: c_void_p) -> list[int]:
        count = c_size_t(0)
        self._call(name, of, None, byref(count))
        nodes = (c_void_p * count.value)()
        if count.value:
            self._call(name, of, nodes, byref(count))
        return [int(node) for node in nodes if node is not None]

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"the driver has no {name}")
        if code := function(*args):
            raise DriverError(f"{name} returned {code}")


def replace_memsets(nodes: GraphNodes, kernel: Callable[[Memset], int]) -> str:
    """Replace every memset of one row. Returns why some are left; nothing where none is.

    `kernel` makes a graph of one kernel that writes the same; the driver copies it.
    """
    graphs: dict[Memset, int] = {}
    try:
        for node in nodes.all():
            memset = nodes.memset(node)
            if memset is None:
                continue
            if memset not in graphs:
                graphs[memset] = kernel(memset)
            nodes.replace(node, graphs[memset])
    except (DriverError, RuntimeError) as error:
        return str(error)
    return ""


def _fill_graph(memset: Memset, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of one kernel that writes what a memset does."""
    bits = 8 * memset.width
    kind, value = f"<i{memset.width}", memset.value % (1 << bits)
    signed = value - (1 << bits) if value >> (bits - 1) else value
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        array = ArrayInterface(memset.address, (memset.count,), kind)
        target = torch.as_tensor(array, device=stream.device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            target.fill_(signed)
        finally:
            graph.capture_end()
    return graph
