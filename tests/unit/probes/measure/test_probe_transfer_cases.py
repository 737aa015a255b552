"""Which bytes each path moves between which memories, in which places, and what a whole run costs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from probe_fakes import FakeBench, FakeMemory, FakeOperation, FakeSpan

from probes.core.errors import DeviceUnusable
from probes.measure import sampling, transfer
from probes.measure.sampling import Effort
from probes.measure.transfer import SCRUB, SOURCE, Grid
from probes.measure.workbench import Pattern
from probes.records.rows import Gap, Measurement, Record
from probes.records.schema import Settings

KIB, MIB, GIB = 2**10, 2**20, 2**30
QUICK = Settings(quick=True, seed=7, vram_cap_bytes=None)
FULL = Settings(quick=False, seed=7, vram_cap_bytes=None)
DOCS = Path(__file__).parents[4] / "docs" / "probes.md"


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_SLOTS", 4)
    monkeypatch.setattr(sampling, "SAMPLE_S", 50e-6)


@dataclass
class Watched(FakeBench):
    """A bench that notes which buffers it was asked for, what was done between them, and what was filled."""

    buffers: list[tuple[str, int]] = field(default_factory=list)
    moves: set[tuple[str, str | None, str | None]] = field(default_factory=set)
    fills: list[tuple[str, int, int, Pattern]] = field(default_factory=list)

    @contextmanager
    def memory(self, kind: str, n_bytes: int) -> Iterator[FakeMemory]:
        self.buffers.append((kind, n_bytes))
        with super().memory(kind, n_bytes) as memory:
            yield memory

    def operation(self, action: str, target: FakeSpan | None, source: FakeSpan | None) -> FakeOperation:
        self.moves.add((action, source and source.memory.kind, target and target.memory.kind))
        return super().operation(action, target, source)

    def fill(self, span: FakeSpan, pattern: Pattern) -> None:
        self.fills.append((span.memory.kind, span.offset, span.n_bytes, pattern))
        super().fill(span, pattern)


# name: action, from, to, how often the documentation counts each byte, which clock leads
GPU = {
    "h2d_pageable": ("copy", "pageable", "vram", 1, "wall"),
    "h2d_pinned": ("copy", "pinned", "vram", 1, "device"),
    "d2h_pageable": ("copy", "vram", "pageable", 1, "wall"),
    "d2h_pinned": ("copy", "vram", "pinned", 1, "device"),
    "zero_copy_read": ("read", "zero_copy", "vram", 1, "device"),
    "zero_copy_write": ("kernel_copy", "vram", "zero_copy", 1, "device"),
    "h2d_then_read": ("copy_then_read", "pinned", "vram", 1, "device"),
    "vram_read": ("read", "vram", "vram", 1, "device"),
    "vram_write": ("write", None, "vram", 1, "device"),
    "vram_copy": ("copy", "vram", "vram", 2, "device"),
    "vram_reread": ("read", "vram", "vram", 1, "device"),
}
HOST = {
    "h2h_copy": ("copy", "pageable", "pageable", 2, "wall"),
    "h2h_read": ("read", "pageable", "vram", 1, "wall"),
    "h2h_write": ("write", None, "pageable", 1, "wall"),
}


def one(bench: Watched, name: str, size: int = 16 * MIB, settings: Settings = QUICK) -> Record:
    """The row of one path and size."""
    planned = transfer.planned(settings, has_gpu=bench.has_gpu)
    done = {case for case, _ in planned if case != f"{name} {size}"}
    (record,) = transfer.run(bench, settings, 32 * GIB, done=done)
    return record


@pytest.mark.parametrize("name", [*GPU, *HOST])
def test_path_moves_its_bytes_between_its_memories_and_counts_them_as_documented(name: str) -> None:
    action, source, target, weight, clock = (GPU | HOST)[name]
    bench = Watched(has_gpu=name in GPU)
    row = one(bench, name)
    assert isinstance(row, Measurement)
    assert (row.payload_bytes, row.moved_bytes, row.clock) == (16 * MIB, weight * 16 * MIB, clock)
    assert bench.moves == {(action, source, target)}
    arena = 256 * MIB
    sums = 4 * 8
    assert bench.buffers == [(target, sums if action == "read" else arena)] + [(source, arena)] * bool(source)
    # the source holds its content from end to end; of the target all places are scrubbed
    places = 1 if name == "vram_reread" else 4
    scrubbed = (target, 0, sums if action == "read" else places * 16 * MIB, SCRUB)
    assert bench.fills[: 1 + bool(source)] == [(source, 0, arena, SOURCE)] * bool(source) + [scrubbed]


def test_documentation_lists_every_path_and_how_often_its_bytes_count() -> None:
    counted = {}
    for names, times in re.findall(
        r"^\| (`\w+`.*?) \|.*\| ((?:once|twice)[\w, ]*) \|$", DOCS.read_text(), re.M
    ):
        paths, words = re.findall(r"`(\w+)`", names), times.split(", ")
        counted |= dict(zip(paths, words * len(paths), strict=False))
    every = (*transfer.GPU_PATHS, *transfer.HOST_PATHS)
    assert counted == {path.name: {1: "once", 2: "twice"}[path.weight] for path in every}


def test_sizes_go_from_4_kib_to_1_gib_by_fours_and_a_quick_run_takes_five_of_them() -> None:
    assert [(size.bit_length() - 1) for size in transfer.FULL_SIZES] == list(range(12, 31, 2))
    assert set(transfer.QUICK_SIZES) < set(transfer.FULL_SIZES)
    assert [transfer.QUICK_SIZES[at] for at in (0, -1)] == [4 * KIB, 256 * MIB]
    assert len(transfer.QUICK_SIZES) == 5


@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_is_planned_is_what_is_run(has_gpu: bool) -> None:
    planned = [case for case, _ in transfer.planned(QUICK, has_gpu=has_gpu)]
    found = [record.case for record in transfer.run(FakeBench(has_gpu=has_gpu), QUICK, 32 * GIB)]  # type: ignore[union-attr]
    assert sorted(planned) == sorted(found)
    assert len(transfer.planned(FULL, has_gpu=has_gpu)) == 2 * len(planned)


@pytest.mark.parametrize(
    ("settings", "case", "seconds"),
    [
        # at 400 GB/s in VRAM and 20 GB/s over the link, and 0.05 s around each row
        (QUICK, "vram_read 268435456", 50 * 0.00067109 + 0.06 / 4),
        (QUICK, "h2d_pinned 268435456", 0.067109 + 2 * 0.0134218),
        (QUICK, "h2d_pageable 16777216", 0.05),
        (FULL, "vram_copy 1073741824", 2 * 50 * 0.00268435),
        (FULL, "h2d_pinned 1073741824", 0.6 + 0.6 / 4),
        (FULL, "h2d_pinned 4096", 0.2 + 50 * 4096 / 20e9),
        (FULL, "h2d_pageable 4096", 0.4),
        (FULL, "d2h_pageable 1073741824", 0.6),
    ],
)
def test_a_row_s_time_is_foreseen_from_an_ordinary_machine_s_bandwidths(
    settings: Settings, case: str, seconds: float
) -> None:
    planned = dict(transfer.planned(settings, has_gpu=True))
    assert planned[case] == pytest.approx(0.05 + seconds, rel=1e-4)


def test_rows_without_a_gpu_are_foreseen_by_the_wall_s_clock_alone() -> None:
    quick, full = (dict(transfer.planned(one, has_gpu=False)) for one in (QUICK, FULL))
    assert quick["h2h_copy 268435456"] == pytest.approx(0.05 + 0.05)
    assert quick["h2h_read 16777216"] == pytest.approx(0.05 + 50 * 16 * MIB / 20e9)
    assert full["h2h_write 1073741824"] == pytest.approx(0.05 + 0.6)


@pytest.mark.parametrize(
    ("largest", "host", "vram", "arena"),
    [
        (GIB, 128 * MIB, None, 16 * MIB),
        (GIB, 256 * MIB - 1, None, 16 * MIB),
        (GIB, 256 * MIB, None, 32 * MIB),
        (GIB, 999 * GIB, 256 * MIB, 32 * MIB),
        (GIB, 256 * MIB, 999 * GIB, 32 * MIB),
        (256 * MIB, 999 * GIB, 999 * GIB, 256 * MIB),
    ],
)
def test_buffers_are_the_largest_power_of_two_in_an_eighth_of_the_scarcer_memory(
    largest: int, host: int, vram: int | None, arena: int
) -> None:
    assert transfer.arena_bytes(largest, host_available_bytes=host, vram_free_bytes=vram) == arena


def test_too_little_memory_is_reported_with_both_figures() -> None:
    with pytest.raises(DeviceUnusable, match=r"128\.00 MiB of free memory, there is 127\.") as caught:
        transfer.arena_bytes(GIB, host_available_bytes=128 * MIB - 2**14, vram_free_bytes=None)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("vram", "cap", "held"),
    [
        (16 * GIB, 128 * MIB, "16.00 MiB"),  # rows as large as the buffers are measured
        (16 * GIB, 1023 * MIB, "64.00 MiB"),
        (1023 * MIB, 16 * GIB, "64.00 MiB"),  # a cap adds nothing
        (1023 * MIB, None, "64.00 MiB"),
    ],
)
def test_rows_larger_than_the_buffers_are_gaps_that_name_their_size(
    vram: int, cap: int | None, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "GPU_PATHS", transfer.GPU_PATHS[:2])
    settings = Settings(quick=True, seed=7, vram_cap_bytes=cap)
    found = list(transfer.run(FakeBench(vram_bytes=vram), settings, 32 * GIB))
    gaps = [record for record in found if isinstance(record, Gap)]
    assert {(gap.name, gap.payload_bytes) for gap in gaps} == {
        (name, 256 * MIB) for name in ("h2d_pageable", "h2d_pinned")
    }
    assert all(held in gap.reason for gap in gaps)
    assert len(found) == 2 * 5


def test_a_cap_on_vram_holds_nothing_back_where_there_is_none() -> None:
    settings = Settings(quick=True, seed=7, vram_cap_bytes=128 * MIB)
    assert isinstance(one(Watched(has_gpu=False), "h2h_copy", 256 * MIB, settings), Measurement)


def test_effort_is_that_of_the_mode_and_spread_over_time_where_bytes_cross_the_link() -> None:
    paths = {path.name: path for path in (*transfer.GPU_PATHS, *transfer.HOST_PATHS)}

    def effort(settings: Settings, name: str, *, has_gpu: bool = True) -> Effort:
        return transfer._effort(settings, paths[name], has_gpu=has_gpu)

    assert effort(QUICK, "vram_copy") == sampling.QUICK
    assert effort(FULL, "vram_write") == sampling.FULL
    assert effort(QUICK, "h2h_copy", has_gpu=False) == sampling.QUICK_HOST
    assert effort(FULL, "h2h_copy", has_gpu=False) == sampling.FULL
    spread = {name: (effort(QUICK, name).spread_s, effort(FULL, name).spread_s) for name in GPU}
    inside = dict.fromkeys(("vram_read", "vram_reread", "vram_write", "vram_copy"), (0.0, 0.0))
    pageable = dict.fromkeys(("h2d_pageable", "d2h_pageable"), (0.05, 0.4))
    assert spread == dict.fromkeys(GPU, (0.05, 0.2)) | inside | pageable


def test_places_are_aligned_to_words_and_spread_over_the_whole_buffer() -> None:
    assert Grid(1000, 24).offsets == [0, 248, 496, 744]  # 250 bytes apart, were it not for words
    assert Grid(96, 24).offsets == [0, 24, 48, 72]
    assert Grid(95, 24).offsets == [0, 24, 48]
    assert Grid(1000, 24, rotates=False).offsets == [0]


def test_sums_of_places_are_those_of_their_words_one_by_one() -> None:
    grid, content = Grid(1000, 24), Pattern(start=5, step=3)
    words = [5 + 3 * i for i in range(125)]
    assert grid.sums(content, 3) == tuple(sum(words[at : at + 3]) for at in (0, 31, 62))
    assert len(grid.sums(content, 99)) == 4


def test_places_are_taken_together_no_more_than_there_are() -> None:
    memory = FakeMemory("vram", 1000, "vram")
    assert Grid(1000, 24).all_of(memory, 99) == FakeSpan(memory, 0, 24, 248, 4)  # type: ignore[arg-type]
    assert Grid(1000, 24).all_of(memory, 2) == FakeSpan(memory, 0, 24, 248, 2)  # type: ignore[arg-type]
    once = Grid(1000, 24, rotates=False)
    assert once.all_of(memory, 9) == FakeSpan(memory, 0, 24, 24, 1)  # type: ignore[arg-type]
    assert once.spans(memory) == [FakeSpan(memory, 0, 24)]  # type: ignore[arg-type]


def test_the_documentation_names_how_many_places_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert f"up to {transfer.MOST_SLOTS:,}" in DOCS.read_text()
    assert f"until a sample takes {sampling.SAMPLE_S * 1e6:.0f} us" in DOCS.read_text()
