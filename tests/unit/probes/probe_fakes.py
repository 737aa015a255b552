"""A simulated workbench: a GPU of given VRAM, link and driver, with its own clock and symbolic content."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from probes.core.errors import OutOfMemory, Unsupported
from probes.core.unknown import Unknown
from probes.measure.spill import Gauges
from probes.measure.stacks import Shape, StackPlan, linear_shape
from probes.measure.workbench import READS_AFTER, WRITTEN, ClassedWork, Clocked, Pattern
from probes.records.rows import Scenario, Split

GIB = 2**30
LATENCY_S = 5e-6
SMALL_S = {"layers": 1e-3, "product": 4e-6, "unpack": 3e-6}
SPEED = {"vram": 3000e9, "pinned": 55e9, "zero_copy": 51e9, "pageable": 9e9, "spilled": 3e9}


@dataclass(eq=False)
class FakeMemory:
    kind: str
    n_bytes: int
    place: str
    pieces: dict[tuple[int, int], Pattern] = field(default_factory=dict)

    def span(self, offset_bytes: int, n_bytes: int) -> "FakeSpan":
        assert 0 <= offset_bytes <= self.n_bytes - n_bytes
        assert offset_bytes % 8 == n_bytes % 8 == 0
        return FakeSpan(self, offset_bytes, n_bytes)

    def spans(self, n_bytes: int, *, stride_bytes: int, count: int) -> "FakeSpan":
        assert stride_bytes * (count - 1) + n_bytes <= self.n_bytes
        assert stride_bytes % 8 == n_bytes % 8 == 0
        return FakeSpan(self, 0, n_bytes, stride_bytes, count)


@dataclass(frozen=True)
class FakeSpan:
    """Pieces of one length, one of them by default."""

    memory: FakeMemory
    offset: int
    piece_bytes: int
    stride_bytes: int = 0
    count: int = 1

    @property
    def n_bytes(self) -> int:
        return self.piece_bytes * self.count

    @property
    def offsets(self) -> list[int]:
        return [self.offset + i * self.stride_bytes for i in range(self.count)]

    def at(self, offset: int) -> Pattern:
        pieces = self.memory.pieces
        return pieces.get((offset, self.piece_bytes)) or pieces[0, self.memory.n_bytes]

    @property
    def content(self) -> Pattern:
        assert self.count == 1
        return self.at(self.offset)


@dataclass
class FakeOperation:
    seconds: float
    effect: Callable[[], object] = lambda: None
    bench: "FakeBench | None" = None

    def __call__(self) -> object:
        if self.bench:
            self.bench.worked_s += self.seconds
        return self.effect()


@dataclass
class FakeBench:
    has_gpu: bool = True
    in_turns: bool = False
    vram_bytes: int = 16 * GIB
    spills: bool = False  # grants beyond VRAM, as WDDM does
    host_has_bytes: int = 64 * GIB
    has_zero_copy: bool = True
    corrupts: str = ""  # the action whose content arrives wrong
    lacks_small: tuple[str, ...] = ()
    loses_after: int | None = None  # operations; the later ones do nothing
    cap_bytes: int | None = None
    used_vram: int = 0
    spilled_bytes: int = 0
    host_used: int = 0
    stack_difference: float = 0.0
    worked_s: float = 0.0  # of operations that know their bench, also when they are called within another
    rested_s: float = 0.0
    needs_lead_s: float = 0.0  # for each operation, for the device not to wait for the host
    longest_lead_s: float = 0.0
    paged_out_s: float = 0.0  # by which the first read of a spilled block takes longer
    paged_in: list[FakeMemory] = field(default_factory=list)
    done: int = 0
    events: list[str] = field(default_factory=list)

    def _where(self, kind: str, n_bytes: int) -> str:
        if kind == "zero_copy" and not self.has_zero_copy:
            raise Unsupported("this torch can't make a zero-copy tensor")
        if kind != "vram":
            return kind
        if self.cap_bytes is not None and self.used_vram + n_bytes > self.cap_bytes:
            raise OutOfMemory("out of memory; the allocator's limit was set by the user")
        if self.used_vram + n_bytes <= self.vram_bytes:
            return "vram"
        if not self.spills:
            raise OutOfMemory("out of memory")
        return "spilled"

    @contextmanager
    def memory(self, kind: str, n_bytes: int) -> Iterator[FakeMemory]:
        place = self._where(kind, n_bytes)
        taken = {
            "used_vram": n_bytes if place == "vram" else 0,
            "spilled_bytes": n_bytes if place == "spilled" else 0,
        }
        taken["host_used"] = 0 if place == "vram" else n_bytes
        self._book(taken, 1)
        try:
            yield FakeMemory(kind, n_bytes, place, {(0, n_bytes): Pattern(0)})
        finally:
            self._book(taken, -1)

    def _book(self, taken: dict[str, int], sign: int) -> None:
        for name, amount in taken.items():
            setattr(self, name, getattr(self, name) + sign * amount)

    def fill(self, span: FakeSpan, pattern: Pattern) -> None:
        pieces = span.memory.pieces
        if span.offset == 0 and span.n_bytes == span.memory.n_bytes:
            pieces.clear()
        if span.count == 1:  # by far the most
            pieces[span.offset, span.piece_bytes] = pattern
            return
        for offset in span.offsets:
            pieces[offset, span.piece_bytes] = pattern

    def matches(self, span: FakeSpan, pattern: Pattern) -> bool:
        return all(span.at(offset) == pattern for offset in span.offsets)

    def words(self, span: FakeSpan) -> tuple[int, ...]:
        """Words of eight bytes that were written one by one, as sums are."""
        one = FakeSpan(span.memory, span.offset, 8, 8, span.n_bytes // 8)
        return tuple(one.at(offset).total(offset // 8, 1) for offset in one.offsets)

    def total(self, span: FakeSpan) -> int:
        content = span.content.plus(1) if self.corrupts == "read" else span.content
        return content.total(span.offset // 8, span.n_bytes // 8)

    def operation(self, action: str, target: FakeSpan | None, source: FakeSpan | None) -> FakeOperation:
        def effect() -> None:
            if action == "read" and target and source:
                self.fill(target, Pattern(self.total(source), 0))
            elif target and source:
                self.fill(target, source.content.plus(1 if action == "kernel_copy" else 0))
            elif target:
                self.fill(target, WRITTEN)
            if target and action == self.corrupts != "read":
                self.fill(target, Pattern(666))

        sides = [side for side in (None if action == "read" else target, source) if side]
        places = {side.memory.place for side in sides}
        if action.startswith("copy"):  # the copy engine doesn't care how kernels see the memory
            places = {"pinned" if place == "zero_copy" else place for place in places}
        speed = min(SPEED[place] for place in places)
        seconds = LATENCY_S + sides[0].n_bytes / speed
        if action == "copy_then_read":
            seconds += READS_AFTER * (LATENCY_S + sides[0].n_bytes / SPEED[sides[0].memory.place])
        if action == "read" and source and source.memory.place == "spilled" and self.paged_out_s:
            return FakeOperation(seconds, lambda: (self._page_in(source.memory), effect()), self)
        return FakeOperation(seconds, lambda: self._kept(effect), self)

    def _page_in(self, memory: FakeMemory) -> None:
        if memory not in self.paged_in:
            self.paged_in.append(memory)
            self.worked_s += self.paged_out_s

    def _kept(self, effect: Callable[[], object]) -> object:
        self.done += 1
        return None if self.loses_after is not None and self.done > self.loses_after else effect()

    def device_s(self, operations: Sequence[FakeOperation], *, lead_s: float) -> Clocked | None:
        self.events.append(f"device {len(operations)}")
        self.longest_lead_s = max(self.longest_lead_s, lead_s)
        ahead = lead_s >= self.needs_lead_s * len(operations)
        return Clocked(self._do(operations), ahead) if self.has_gpu else None

    def wall_s(self, operations: Sequence[FakeOperation]) -> float:
        return self._do(operations) + 1e-5

    def _do(self, operations: Sequence[FakeOperation]) -> float:
        began = self.worked_s
        for operation in operations:
            operation()
        alone = sum(getattr(o, "seconds", 0.0) for o in operations if getattr(o, "bench", None) is None)
        return self.worked_s - began + alone

    def rest(self, seconds: float) -> None:
        self.rested_s += seconds

    def queue_s(self, operation: FakeOperation) -> float:
        operation()
        return 3e-6

    def vram_free_bytes(self) -> int:
        return self.vram_bytes - self.used_vram

    def foreign_vram_bytes(self) -> int:
        return 0

    def numa_nodes(self) -> tuple[int | Unknown, int | Unknown]:
        return 0, 0

    def small_latencies_s(self) -> tuple[float, float] | None:
        return (2e-5, 3e-5) if self.has_gpu else None

    def shape(self, model: str, *, dtype: str, width: int) -> Shape:
        if model == "gpt2-xl":
            raise Unsupported("gpt2-xl needs transformers")
        if model == "mlp":
            return linear_shape(width, dtype)
        return Shape(model, dtype, 1024, 2**25, 2**26, 12, 128)

    def small(self, name: str) -> FakeOperation:
        if name in self.lacks_small:
            raise Unsupported(f"no {name}")
        return FakeOperation(SMALL_S[name])

    def class_work(self, name: str) -> ClassedWork:
        if name in self.lacks_small:
            raise Unsupported(f"no {name}")
        large = name.startswith(("large", "products"))
        operation = FakeOperation(1e-4 if large else 16 * 2e-6)
        return ClassedWork(operation, 1 if large else 16, 1, 10**9 * large, 2**22)

    def cap_vram(self, n_bytes: int) -> None:
        self.cap_bytes = n_bytes

    @contextmanager
    def stack(self, plan: StackPlan, seed: int) -> Iterator["FakeStack"]:
        yield FakeStack(plan, self.stack_difference)


@dataclass
class FakeStack:
    plan: StackPlan
    off: float
    spilled: bool = False

    def spill(self) -> None:
        self.spilled = True

    def passes(self, scenario: Scenario, rows: int) -> FakeOperation:
        assert self.spilled == (scenario != "resident")
        resident = (self.plan.weight_bytes - self.plan.spilled_bytes) / SPEED["vram"]
        link = {
            "zero_copy_weights": 51e9,
            "zero_copy_all": 45e9,
            "streamed": 55e9,
            "packed": 70e9,
            "placed": 80e9,
        }
        return FakeOperation(
            resident + self.plan.spilled_bytes / link[scenario] if self.spilled else resident * 1.3
        )

    def left_bytes(self, scenario: Scenario, rows: int) -> int:
        return 0 if scenario == "resident" else self.plan.spilled_bytes

    def input_bytes(self, rows: int) -> int:
        return rows * self.plan.shape.width * 2

    def split(self, scenario: Scenario, rows: int) -> Split:
        return Split(0.001, 0.0, 0.002)

    def difference(self, scenario: Scenario, rows: int) -> float:
        return 0.0 if scenario == "resident" else self.off


def gauges(bench: FakeBench, *, gtt: bool = True) -> Gauges:
    return Gauges(
        host_spendable_bytes=lambda: bench.host_has_bytes - bench.host_used,
        gtt_used_bytes=lambda: bench.host_used if gtt else Unknown("no GTT here"),
        readings=lambda moment: (),
    )
