"""What a report's sentences say, word for word where a figure or a choice stands in them."""

import math
import re
from dataclasses import replace

import pytest
from probe_samples import APU_NODE, CUDA_TORCH, done, failed, machine, report, waived

from probes.core.unknown import Unknown
from probes.measure.workbench import READS_AFTER
from probes.records.rows import Block, Measurement, Noise, Pass, Reads, Request, Stop, Way
from probes.reports import crossover, run_findings, run_headline
from probes.reports.crossover import COPY, IN_PLACE, REREAD

MIB, GIB = 2**20, 2**30
SIZES = tuple(MIB * 4**i for i in range(5))


def row(name: str, n_bytes: int, *times: float) -> Measurement:
    return Measurement(name, n_bytes, n_bytes, 1, "device", times, times)


def paths(copied: float, left: float, reread: float) -> list[Measurement]:
    """The three paths, each at a fixed time per byte, so that break-even is the same at every size."""
    return [
        row(name, n, n * per_byte)
        for n in SIZES
        for name, per_byte in (
            (COPY, copied + READS_AFTER * reread),
            (IN_PLACE, left),
            (REREAD, reread),
        )
    ]


def lines(n_bytes: int, crossing: float, *, factors: tuple[float, ...] = (1.0,)) -> list[Reads]:
    """Times that meet at `crossing` reads; `factors` are the samples, relative to the time."""
    found = []
    for k in (1, 2, 4):
        times: dict[Way, float] = {"copy_first": crossing + k, "in_place": 2.0 * k}
        for way, seconds in times.items():
            samples = tuple(seconds * factor for factor in factors)
            found.append(Reads(way, k, n_bytes, 1, samples, samples))
    return found


@pytest.mark.parametrize(
    ("copied", "reread", "sentence"),
    [
        (5e-12, 1e-12, "64.00 KiB to 256.00 MiB: copy it to VRAM first, even for one read."),
        (15e-12, 1e-12, "64.00 KiB to 256.00 MiB: copy it first from 2 reads on."),
        (25e-12, 1e-12, "64.00 KiB to 256.00 MiB: copy it first from 3 reads on."),
        (15e-12, 11e-12, "64.00 KiB to 256.00 MiB: leave it, VRAM is no faster."),
    ],
)
def test_sizes_with_one_answer_are_reported_together(copied: float, reread: float, sentence: str) -> None:
    said = run_findings.findings(report(done("transfer", *paths(copied, 11e-12, reread))))
    assert f"Host memory that the GPU reads in full: {sentence}" in said


def test_the_worst_of_the_predictions_is_reported() -> None:
    reads = [*lines(MIB, 3.0), *lines(4 * MIB, 1.6)]
    said = run_findings.findings(report(done("transfer", *paths(15e-12, 11e-12, 1e-12), *reads)))
    assert (
        "Predicted and measured break-even differ by 50% at most over 2 sizes "
        "(at 1.00 MiB: predicted 1.50, measured 3.00 reads)." in said
    )


def test_the_order_of_rows_does_not_change_a_prediction() -> None:
    found = paths(15e-12, 11e-12, 1e-12)
    one, other = crossover.adviser(found), crossover.adviser(found[::-1])
    assert isinstance(one, crossover.Adviser)
    assert isinstance(other, crossover.Adviser)
    for n_bytes in (MIB // 2, 3 * MIB, 300 * MIB):
        assert other.at(n_bytes).reads == pytest.approx(one.at(n_bytes).reads)


def test_two_counts_of_reads_make_a_line() -> None:
    found = crossover.measured([one for one in lines(MIB, 3.0) if one.reads < 4], MIB)
    assert isinstance(found, crossover.BreakEven)
    assert found.reads == pytest.approx(3.0)


def test_the_error_of_a_crossing_is_what_the_rows_errors_move_it_by() -> None:
    rows = lines(MIB, 3.0, factors=(0.999, 1.001, 0.999, 1.001))
    whole = crossover.measured(rows, MIB)
    assert isinstance(whole, crossover.BreakEven)
    moved = []
    for at, one in enumerate(rows):
        error = crossover.timed(one).error_s
        samples = tuple(seconds + error for seconds in one.device_s)  # type: ignore[union-attr]
        other = [*rows[:at], replace(one, device_s=samples, wall_s=samples), *rows[at + 1 :]]
        told = crossover.measured(other, MIB)
        assert isinstance(told, crossover.BreakEven)
        moved.append(told.reads - whole.reads)
    assert whole.error == pytest.approx(math.hypot(*moved), rel=0.02)


def test_the_link_is_compared_with_a_copy() -> None:
    rows = [row("h2d_pinned", GIB, 0.02), row("h2d_pageable", GIB, 0.08), row("zero_copy_read", GIB, 0.04)]
    said = " ".join(run_findings.findings(report(done("transfer", *rows, row("vram_read", GIB, 0.001)))))
    assert "gains a factor of 4.0" in said
    assert "at 26.8 GB/s, 50% of a copy's speed" in said


def test_inputs_stay_where_vram_is_no_faster() -> None:
    names = ("h2d_pinned", "zero_copy_read", "vram_read")
    (inputs, _, _) = run_headline.headline(
        report(done("transfer", *(row(name, GIB, 0.02) for name in names)))
    )
    assert inputs.startswith("Leave large inputs in system RAM, because VRAM is no faster here: ")
    assert "break-even" not in inputs


def test_a_disturbed_row_that_is_clearly_slower_is_slower_in_either_order() -> None:
    slow = replace(row("vram_read", 1, 1.0, 2.0, 2.0, 2.0, 2.0), noise=Noise(("foreign: another",), ()))
    fast = row("vram_read", 1, *[0.5] * 5)
    assert run_findings.is_faster(slow, fast) is False
    assert run_findings.is_faster(fast, slow) is True


def test_a_probe_without_figures_says_why() -> None:
    assert run_headline.why_missing(report(), "spill") == "the probe `spill` was not run"
    assert run_headline.why_missing(report(waived()), "spill") == "`spill` was waived: no GPU to measure"
    assert run_headline.why_missing(report(failed(4)), "spill") == "`spill` failed: it broke"
    assert run_headline.why_missing(report(done("spill")), "spill") == "`spill` holds no such rows"


def test_what_a_full_card_does_is_expected_only_where_something_is_known() -> None:
    unknown = "What happens when VRAM is full is unknown (the probe `spill` was not run)"
    assert run_headline.headline(report())[1] == f"{unknown}."
    expected = run_headline.headline(report(torch=CUDA_TORCH))[1]
    assert re.fullmatch(rf"{re.escape(unknown)}; expected here: NVIDIA on Linux: .*[^.]\.", expected)


def test_the_next_step_is_the_service_for_the_card_that_is_here() -> None:
    assert run_headline.next_step(machine(torch=CUDA_TORCH)) == ""
    run = "to measure the card that is here, run `docker compose run --rm {}`"
    assert run_headline.next_step(machine(kfd_nodes=(APU_NODE,))) == run.format("probe-rocm")
    assert run_headline.next_step(machine(kfd_nodes=(APU_NODE,), wsl=True)) == run.format("probe-wsl")
    assert run_headline.next_step(machine()).startswith("no card is visible from here; ")
    unknown = run_headline.headline(report())[2]
    assert "the probe `scenarios` was not run): no card is visible" in unknown
    known = run_headline.headline(report(torch=CUDA_TORCH))[2]
    assert known.endswith("(the probe `scenarios` was not run).")


def ways(model: str, rows: int, **took_s: float) -> list[Pass]:
    none = Unknown("no clock")
    return [
        Pass(name, rows, 32, GIB, GIB // 4, 1, "float16", none, (took,) * 9, 0.0, model=model)  # type: ignore[arg-type]
        for name, took in took_s.items()
    ]


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ("streamed", "streaming those through two VRAM buffers is fastest"),
        ("zero_copy_weights", "reading those in place with the inputs copied to VRAM is fastest"),
        ("zero_copy_all", "reading those and the inputs in place is fastest"),
    ],
)
def test_the_fastest_way_is_named_with_the_second_beside_it(best: str, told: str) -> None:
    took = {"resident": 0.1, "streamed": 0.3, "zero_copy_weights": 0.3, "zero_copy_all": 0.3, best: 0.2}
    (_, _, fastest) = run_headline.headline(report(done("scenarios", *ways("mlp", 1, **took))))
    assert fastest.startswith(f"With 25% of the weights in system RAM, {told}: 200 ms a pass")
    assert "against 300 ms" in fastest
    assert "2 times less (mlp, float16, batch 1)" in fastest


def test_passes_are_grouped_by_known_models_first_and_then_by_batch() -> None:
    found = [one for key in (("zebra", 1), ("mlp", 256), ("mlp", 1)) for one in ways(*key, streamed=1.0)]
    assert list(run_findings.by_model(found)) == [
        ("mlp", "float16", 1),
        ("mlp", "float16", 256),
        ("zebra", "float16", 1),
    ]


def test_without_a_device_clock_nothing_is_said_of_device_time() -> None:
    took = {"resident": 0.1, "streamed": 0.3, "zero_copy_weights": 0.3, "zero_copy_all": 0.3}
    said = run_findings.findings(report(done("scenarios", *ways("mlp", 1, **took))))
    assert not any("Device time" in one for one in said)
    assert any("streamed" in one or "Streaming" in one for one in said)


def test_streaming_at_its_rivals_speed_is_not_called_slower() -> None:
    took = {"resident": 0.1, "streamed": 0.3, "zero_copy_weights": 0.3, "zero_copy_all": 0.4}
    said = run_findings.findings(report(done("scenarios", *ways("mlp", 1, **took))))
    assert any("1.00 x faster" in one for one in said)


def request(
    purpose: str, *, granted: bool = False, declined: bool = False, cap: int | None = None
) -> Request:
    return Request(purpose, 10, 0, 20, cap, granted, "", declined=declined)  # type: ignore[arg-type]


def test_requests_around_the_limit_are_counted_by_their_answers() -> None:
    made = (
        [request("forced", granted=True)] * 3 + [request("forced", declined=True)] + [request("forced")] * 2
    )
    told = run_findings.forced_verdict([*made, request("block", granted=True)])
    assert str(told).startswith("of 6 requests for 0.9 to 1.5 of the limit 3 were granted, 2 refused")
    assert ", 1 not made" in str(told)


def test_the_last_refused_block_says_who_refused() -> None:
    asked = [request("block"), request("block", cap=5), request("block", granted=True), request("forced")]
    told = run_findings.verdict(asked, (), Stop("refused", GIB, ""))
    assert told.startswith("refused with out of memory by torch's cap at 1.00 GiB")


def block(read_s: float, *, control: bool = False, asked: str = "vram") -> Block:
    return Block(0, asked, control, GIB, (read_s,) * 3, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("read_s", [0.1, 1.0])  # at the link's speed, and far below it
def test_blocks_outside_vram_are_a_silent_spill(read_s: float) -> None:
    controls = [block(0.001, control=True), block(0.1, control=True, asked="zero_copy")]
    told = run_findings.verdict((), [*controls, block(0.001), block(read_s)], Stop("target", 2 * GIB, ""))
    assert told.startswith("spilled silently: of 2.00 GiB granted as device memory, 1.00 GiB reads")
    run = done("spill", *controls, block(0.001), block(read_s), Stop("target", 2 * GIB, ""))
    assert run_headline.headline(report(run))[1].startswith("When VRAM is full it spills silently: of 2 GiB")


@pytest.mark.parametrize(
    ("drop", "growth", "label"), [(8, 0, "vram"), (7, 0, "unclear"), (0, 8, "host"), (16, 8, "host")]
)
def test_counters_speak_from_half_a_block_on(drop: int, growth: int, label: str) -> None:
    one = replace(block(1.0), n_bytes=16, vram_drop_bytes=drop, gtt_growth_bytes=growth)
    assert run_findings.label_by_counters(one) == label


def test_the_fastest_way_is_reported_with_its_error_and_how_much_slower_it_is() -> None:
    took = {"resident": 0.1, "streamed": 0.2, "zero_copy_weights": 0.3, "zero_copy_all": 0.4}
    (first, *_) = run_findings.findings(report(done("scenarios", *ways("mlp", 1, **took))))
    assert first == (
        '"all in VRAM is fastest" holds here for mlp float16 batch 1 (100 ms +- 0 ns against 200 ms +- 0 ns '
        "streamed with 25% of the weights left in system RAM, 2.00 x)."
    )


@pytest.mark.parametrize(
    ("fastest", "name"),
    [
        ("zero_copy_weights", "with weights read in place"),
        ("zero_copy_all", "with weights and inputs read in place"),
    ],
)
def test_the_rival_of_all_in_vram_is_named(fastest: str, name: str) -> None:
    took = {"resident": 0.1, "streamed": 0.3, "zero_copy_weights": 0.3, "zero_copy_all": 0.3, fastest: 0.2}
    (first, *_) = run_findings.findings(report(done("scenarios", *ways("mlp", 1, **took))))
    assert f" {name} with 25% of the weights left" in first


def test_models_without_all_four_ways_are_left_out() -> None:
    took = {"resident": 0.1, "streamed": 0.2, "zero_copy_weights": 0.3, "zero_copy_all": 0.4}
    part = ways("mlp", 1, resident=0.1, streamed=0.2)
    found = report(done("scenarios", *part, *ways("gpt2-xl", 1, **took)))
    assert "gpt2-xl, float16, batch 1" in run_headline.headline(found)[2]
    assert not any("mlp" in one for one in run_findings.findings(found))
    assert "is unknown" in run_headline.headline(report(done("scenarios", *part)))[2]


def test_a_link_whose_vram_is_no_faster_never_repays_a_copy() -> None:
    rows = [row(name, GIB, 0.02) for name in ("h2d_pinned", "zero_copy_read", "vram_read")]
    (said, *_) = run_findings.findings(report(done("transfer", *rows)))
    assert said.endswith("VRAM is no faster, so copying never pays.")


def test_one_way_alone_has_no_crossing() -> None:
    for way in ("copy_first", "in_place"):
        found = crossover.measured([one for one in lines(MIB, 3.0) if one.way == way], MIB)
        assert isinstance(found, Unknown)
        assert "fewer than two counts" in found.reason


def test_crossings_are_in_the_order_of_sizes() -> None:
    reads = [one for n_bytes in reversed(SIZES) for one in lines(n_bytes, 3.0)]
    met = crossover.crossings(paths(15e-12, 11e-12, 1e-12), reads)
    assert isinstance(met, tuple)
    assert [one.n_bytes for one in met] == list(SIZES)
