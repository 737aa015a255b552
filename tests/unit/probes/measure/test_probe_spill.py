from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_fakes import FakeBench, gauges
from probe_samples import APU_NODE, CPU_TORCH, CUDA_TORCH, HIP_TORCH, SETTINGS, done, machine, report

from probes.core.errors import ContentMismatch
from probes.core.unknown import Unknown
from probes.hardware.expectation import expect
from probes.measure import spill
from probes.records.facts import Card
from probes.records.rows import Block, Expectation, Gap, Record, Request, Stop
from probes.records.schema import Settings
from probes.reports import run_findings as residency
from probes.reports.run_findings import findings, pick

MIB, GIB = 2**20, 2**30
EXPECTED = Expectation("refuses", "It refuses.", "a test")
FULL = Settings(quick=False, seed=1, vram_cap_bytes=None)


def run(bench: FakeBench, settings: Settings = SETTINGS, *, gtt: bool = True) -> list[Record]:
    return list(
        spill.run(
            bench,
            settings,
            vram_total_bytes=bench.vram_bytes,
            expectation=EXPECTED,
            gauges=gauges(bench, gtt=gtt),
        )
    )


def verdict(records: list[Record]) -> str:
    return residency.verdict(pick(records, Request), pick(records, Block), pick(records, Stop)[-1])


def labels(records: list[Record]) -> list[str]:
    return [p.by_timing for p in residency.label_blocks(pick(records, Block)) if not p.block.control]


def test_the_expectation_is_reported_before_anything_is_asked() -> None:
    assert run(FakeBench())[0] == EXPECTED


def test_a_big_card_is_capped_in_quick_mode_and_the_cap_is_named() -> None:
    records = run(FakeBench(vram_bytes=140 * GIB))
    assert pick(records, Stop)[-1].cause == "refused"
    assert pick(records, Stop)[-1].held_bytes <= 4 * GIB
    assert "refused with out of memory by torch's cap" in verdict(records)
    assert set(labels(records)) == {"vram"}


def test_a_card_that_refuses_is_said_to_refuse() -> None:
    records = run(FakeBench(vram_bytes=4 * GIB), FULL)
    assert "refused with out of memory by the driver" in verdict(records)
    assert not [r for r in pick(records, Request) if r.purpose == "block"][-1].granted


def test_a_driver_that_spills_is_caught_with_the_bytes() -> None:
    records = run(FakeBench(vram_bytes=4 * GIB, spills=True), FULL)
    assert pick(records, Stop)[-1].cause == "target"
    spilled = [
        p
        for p in residency.label_blocks(pick(records, Block))
        if p.by_timing != "vram" and not p.block.control
    ]
    assert {p.by_timing for p in spilled} == {"paged"}  # read at 3 GB/s where the link does 51
    assert {p.by_counters for p in spilled} == {"host"}
    assert "spilled silently" in verdict(records)


def test_the_driver_is_asked_for_more_than_it_has_whatever_the_cap() -> None:
    refuses = run(FakeBench(vram_bytes=140 * GIB))
    spills = run(FakeBench(vram_bytes=140 * GIB, spills=True))
    assert "it does not spill" in str(residency.driver_verdict(pick(refuses, Request)))
    assert "it would spill" in str(residency.driver_verdict(pick(spills, Request)))


def test_the_host_memory_floor_ends_the_asking() -> None:
    bench = FakeBench(vram_bytes=4 * GIB, spills=True, host_has_bytes=1700 * MIB)
    records = run(bench, FULL)
    assert pick(records, Stop)[-1].cause == "floor"


def test_with_little_host_memory_the_driver_is_not_asked_too_much() -> None:
    records = run(FakeBench(vram_bytes=4 * GIB, host_has_bytes=300 * MIB), FULL)
    assert [gap.name for gap in pick(records, Gap)] == ["zero_copy control"]
    assert not [request for request in pick(records, Request) if request.purpose == "oversize"]
    assert isinstance(residency.driver_verdict(pick(records, Request)), Unknown)


def test_changed_content_stops_the_probe() -> None:
    with pytest.raises(ContentMismatch, match="does not hold what was written"):
        run(FakeBench(corrupts="read"))


def test_everything_is_given_back() -> None:
    bench = FakeBench(vram_bytes=4 * GIB, spills=True)
    run(bench, FULL)
    assert (bench.used_vram, bench.spilled_bytes, bench.host_used) == (0, 0, 0)


def test_controls_are_labelled_as_they_were_placed() -> None:
    controls = [p for p in residency.label_blocks(pick(run(FakeBench()), Block)) if p.block.control]
    assert len(controls) == 2 * spill.CONTROLS
    assert all(p.by_timing == ("vram" if p.block.asked == "vram" else "host") for p in controls)
    assert not any(p.disagree for p in controls)


def test_the_first_read_after_all_were_allocated_is_timed_and_kept_apart() -> None:
    """What a driver had paged out comes back in it; later reads don't show that."""
    paged = run(FakeBench(vram_bytes=4 * GIB, spills=True, paged_out_s=0.5), FULL)
    blocks = [p.block for p in residency.label_blocks(pick(paged, Block)) if p.by_timing == "paged"]
    assert blocks
    for one in blocks:
        assert isinstance(one.first_read_s, float)
        assert one.first_read_s > 0.5 > max(one.read_s)
    told = residency.first_read_verdict(pick(paged, Block))
    assert f"the first read of {len(blocks)} of " in str(told)
    assert "paged in from elsewhere" in "\n".join(findings(report(done("spill", *paged))))
    calm = residency.first_read_verdict(pick(run(FakeBench()), Block))
    assert "1.00 x as long as later ones: nothing was paged in" in str(calm)


def test_a_report_without_first_reads_says_nothing_of_them() -> None:
    assert isinstance(residency.first_read_verdict([block(0, 1.0)]), Unknown)


def block(index: int, seconds: float, *, asked: str = "vram", control: bool = False) -> Block:
    return Block(index, asked, control, GIB, (seconds,), Unknown("not read"), Unknown("not read"))  # type: ignore[arg-type]


def test_memories_of_one_speed_are_not_distinguished_by_timing() -> None:
    apu = [block(0, 0.02, control=True), block(1, 0.025, asked="zero_copy", control=True), block(2, 0.02)]
    assert [p.by_timing for p in residency.label_blocks(apu)] == ["unclear"] * 3
    assert "can't show where" in residency.verdict((), apu, Stop("target", GIB, "enough"))


def test_without_controls_nothing_is_labelled() -> None:
    assert residency.label_blocks([block(0, 0.02)])[0].by_timing == "unclear"
    assert isinstance(residency.controls([]), Unknown)


@pytest.mark.parametrize(
    ("drop", "growth", "label"),
    [
        (GIB, 0, "vram"),
        (0, GIB, "host"),
        (GIB, GIB, "host"),
        (100, 0, "unclear"),
        (Unknown("no"), Unknown("no"), "unclear"),
        (GIB, Unknown("NVIDIA has no GTT"), "vram"),
    ],
)
def test_counters_say_where_a_block_went(drop: int | Unknown, growth: int | Unknown, label: str) -> None:
    assert (
        residency.label_by_counters(replace(block(0, 1.0), vram_drop_bytes=drop, gtt_growth_bytes=growth))
        == label
    )


def test_signals_that_differ_are_pointed_at() -> None:
    blocks = [
        block(0, 0.0003, control=True),
        block(1, 0.02, asked="zero_copy", control=True),
        replace(block(2, 0.02), vram_drop_bytes=GIB),
    ]
    assert [p.disagree for p in residency.label_blocks(blocks)] == [False, False, True]


@given(
    st.integers(GIB, 200 * GIB),
    st.none() | st.integers(256 * MIB, 64 * GIB),
    st.booleans(),
)
def test_the_plan_goes_past_the_limit_in_blocks_of_whole_pages(
    total: int, cap: int | None, quick: bool
) -> None:
    chosen = spill.plan(Settings(quick, 1, cap), vram_total_bytes=total, vram_free_bytes=total)
    assert chosen.block_bytes % spill.ALIGNMENT == 0
    assert spill.BLOCK_RANGE[0] <= chosen.block_bytes <= spill.BLOCK_RANGE[1]
    assert chosen.limit_bytes <= total
    assert chosen.target_bytes > chosen.limit_bytes
    assert not (quick and total > spill.BIG_CARD) or chosen.cap_bytes is not None


CARD = Card("card0", "amdgpu", "0000:03:00.0", 4 * GIB, 0, 3 * GIB, 0, Unknown("idle"), 8, apu=False)


@pytest.mark.parametrize(
    ("changes", "behaviour"),
    [
        ({"torch": CUDA_TORCH}, "refuses"),
        ({"torch": HIP_TORCH}, "refuses"),
        ({"torch": HIP_TORCH, "kfd_nodes": (APU_NODE,)}, "uses_gtt"),
        ({"torch": HIP_TORCH, "kfd_nodes": (APU_NODE,), "kernel": "6.9.3"}, "refuses"),
        ({"torch": HIP_TORCH, "kfd_nodes": (APU_NODE,), "kernel": Unknown("hidden")}, "uses_gtt"),
        ({"torch": HIP_TORCH, "cards": (replace(CARD, apu=True),)}, "refuses"),
        ({"torch": HIP_TORCH, "cards": (replace(CARD, apu=True, gtt_total_bytes=12 * GIB),)}, "uses_gtt"),
        ({"torch": CPU_TORCH, "cards": (CARD,)}, "refuses"),
        ({"torch": CPU_TORCH, "cards": (replace(CARD, driver="nvidia"),)}, "refuses"),
        ({"torch": CPU_TORCH, "wsl": True, "device_files": ("/dev/dxg",)}, "spills"),
        ({"torch": HIP_TORCH, "wsl": True}, "spills"),
        ({"torch": CUDA_TORCH, "wsl": True}, "spills"),
        ({"torch": CPU_TORCH}, "unknown"),
        ({"torch": CPU_TORCH, "wsl": True}, "unknown"),
        ({"torch": Unknown("torch is not installed")}, "unknown"),
    ],
)
def test_what_is_to_be_expected_follows_from_the_machine(changes: dict[str, object], behaviour: str) -> None:
    found = expect(machine(**changes))
    assert found.behaviour == behaviour
    assert found.sentence
    assert found.source


def test_an_amd_card_is_expected_to_refuse_and_pinned_memory_to_have_a_limit() -> None:
    """Also where torch can't use the card: what would happen is known beforehand."""
    found = expect(machine(torch=CPU_TORCH, cards=(CARD,)))
    assert "the kernel refuses beyond VRAM" in found.sentence
    assert "reserve_mem_limit" in found.source
    assert "GTT" in found.note


def test_without_zero_copy_controls_nothing_is_labelled_by_timing_and_that_is_reported() -> None:
    records = run(FakeBench(vram_bytes=4 * GIB, has_zero_copy=False), FULL)
    assert [gap.name for gap in pick(records, Gap)] == ["zero_copy control"]
    assert set(labels(records)) == {"unclear"}
    assert "refused with out of memory by the driver" in verdict(records)


def force(bench: FakeBench, count: int, *, cap: int | None = None) -> list[Request]:
    limits = spill.Limits(cap or bench.vram_bytes, GIB, cap)
    spendable = gauges(bench).host_spendable_bytes
    return list(spill.ask_around_limits(bench, limits, count=count, seed=3, host_spendable_bytes=spendable))


def test_each_request_around_the_limit_ends_in_a_record_and_is_given_back() -> None:
    bench = FakeBench(vram_bytes=4 * GIB)
    found = force(bench, 200)
    assert len(found) == 200
    assert {r.kind for r in found} == set(spill.KINDS)
    assert all(r.granted == (r.asked_bytes <= 4 * GIB) for r in found if r.kind == "vram")
    assert all(r.message for r in found if not r.granted)
    assert (bench.used_vram, bench.spilled_bytes, bench.host_used) == (0, 0, 0)


@pytest.mark.parametrize("spills", [True, False])
def test_requests_that_could_break_the_floor_are_not_made(spills: bool) -> None:
    """Whatever the driver and torch's rounding to powers of two do, it fits above the floor."""
    bench = FakeBench(vram_bytes=4 * GIB, spills=spills, host_has_bytes=GIB)
    found = force(bench, 60)
    assert any(r.declined for r in found)
    for r in found:
        if not r.declined and r.kind == "pinned":
            assert 1 << (r.asked_bytes - 1).bit_length() <= GIB
        if not r.declined and r.kind == "pageable":
            assert r.asked_bytes <= GIB


def test_forced_requests_are_counted_in_a_sentence() -> None:
    told = residency.forced_verdict(run_requests())
    assert "of 6 requests" in str(told)
    assert isinstance(residency.forced_verdict([]), Unknown)


def run_requests() -> list[Request]:
    return pick(run(FakeBench()), Request)
