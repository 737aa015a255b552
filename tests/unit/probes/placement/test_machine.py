"""Constants of machines: every number of a profile has a source with a date; a report's own figures lead."""

from dataclasses import replace
from pathlib import Path

import pytest

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.placement.models.description import BlockDescription
from probes.placement.models.operations import Operation, OperationKind
from probes.placement.planner.api import resolve_machine
from probes.placement.planner.costs import OF_TORCH, BlockCosts
from probes.placement.planner.machine import (
    GIB,
    SMALL_WORK_S,
    Constants,
    from_report,
    nearest_profile,
    profile,
    profile_names,
    table,
    without_gpu,
)
from probes.placement.planner.rules import Pass
from probes.records.facts import TorchFacts
from probes.records.rows import ClassWork, Small
from probes.records.schema import read_report

ROOT = Path(__file__).parents[4]
NAMES = {
    "wx4100",
    "mi50",
    "mi100",
    "mi210",
    "mi300x",
    "w7900",
    "rx6800",
    "rx7900xtx",
    "strix-halo",
    "h100",
    "h200",
    "rtx4090",
}


def test_every_machine_has_a_profile() -> None:
    assert set(profile_names()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_number_of_a_profile_has_a_source_and_a_date(name: str) -> None:
    known = table()["sources"]
    assert all(one["what"] and str(one["date"]).startswith("2026-") for one in known.values())
    entries = {**table()["machines"][name], **table()["common"], **table()["reached"]}
    assert {"vram_gib", "vram_gb_per_s", "tflops", "vram_read", "operation_us"} <= set(entries)
    counted = [
        kind for kernel in table()["counted"].values() for kind in kernel.values() if isinstance(kind, dict)
    ]
    values = [value for key, value in entries.items() if key not in ("title", "target")]
    assert all(value["source"] in known for value in (*values, *counted))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_profile_is_labelled_predicted_and_reaches_no_more_than_its_peak(name: str) -> None:
    made = profile(name)
    peak = table()["machines"][name]["vram_gb_per_s"]["value"] * 1e9
    assert made.origin == f"predicted: profile {name}"
    assert 0 < made.unpack_rate < made.vram_rate < peak
    assert made.link_rate < made.vram_rate
    assert made.triton == (made.fused_rate > 0)


def test_cards_without_units_or_triton_say_so() -> None:
    assert [n for n in profile_names() if not profile(n).bfloat16] == ["wx4100", "mi50", "rx6800"]
    assert [n for n in profile_names() if not profile(n).triton] == ["wx4100", "mi50", "rx6800"]


def test_amd_profiles_say_that_nothing_was_measured() -> None:
    for name in profile_names():
        amd = table()["machines"][name]["target"].startswith("gfx")
        assert bool(profile(name).notes) == amd


def test_plans_for_amd_are_bound_by_the_instructions_of_products_of_few_rows() -> None:
    card = profile("rx7900xtx")
    counts = table()["counted"]["few_rows even"]["gfx1100"]["instructions"]
    weights_s = 61.4e12 / 256 * 64 / counts  # a compute unit's peak is 256 operations a clock, on 64 lanes
    assert card.fused_rows_rate == pytest.approx(1.5 * weights_s, rel=0.01)
    assert card.fused_rows_rate < card.fused_rate < card.vram_rate


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match="wx4100"):
        profile("abacus")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("WX 4100", "wx4100"),
        ("RX 7900 XTX", "rx7900xtx"),
        ("AMD Radeon RX 6800", "rx6800"),
        ("Strix Halo", "strix-halo"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("mi300x", "mi300x"),
    ],
)
def test_a_machine_may_be_named_as_its_maker_does(said: str, name: str) -> None:
    assert resolve_machine(said) == profile(name)


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        ("RX", "names several cards"),
        ("6800", "names several cards: Radeon RX 6800"),
        ("RX 7900", "names several cards: Radeon RX 7900 XTX"),
        ("gfx1030", "names several cards: Radeon RX 6800"),
        ("h2001", "did you mean H200 SXM"),
        ("h200.json.bak", "name a card"),
        ("W6800", r"Radeon Pro W6800 \(gfx1030\) has no profile"),
    ],
)
def test_a_name_that_is_not_one_cards_is_asked_back(said: str, answered: str) -> None:
    with pytest.raises(UsageError, match=answered):
        resolve_machine(said)


def test_a_card_without_a_profile_names_that_of_its_family_and_a_report_but_no_other_target() -> None:
    with pytest.raises(UsageError) as refused:
        resolve_machine("RX 7900 XT")
    assert "--machine rx7900xtx" in refused.value.hint
    assert "REPORT.json" in refused.value.hint
    assert "gfx" not in refused.value.hint
    with pytest.raises(UsageError) as refused:  # no profile of its family
        resolve_machine("B200")
    assert "nearest" not in refused.value.hint


def test_the_memory_in_a_cards_name_is_the_machines() -> None:
    assert resolve_machine("MI50 16GB").vram_bytes == 16 * GIB
    assert resolve_machine("MI50 32GB") == profile("mi50")
    assert resolve_machine("H200 141GB") == profile("h200")


@pytest.mark.parametrize("said", ["mi50", "Radeon Instinct MI50"])
def test_a_size_that_nobody_said_is_said_to_be_assumed(said: str) -> None:
    made = resolve_machine(said)
    assert made.vram_bytes == 32 * GIB
    assert "--machine 'MI50 16GB'" in made.notes[-1]


@pytest.mark.parametrize(
    ("name", "target", "found"),
    [
        ("NVIDIA H200", "sm_90", "h200"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "rx7900xtx"),
        ("Radeon Pro WX 4100", "gfx803", "wx4100"),
        ("AMD Instinct MI300X OAM", "gfx942:sramecc+:xnack-", "mi300x"),
        ("AMD Radeon Pro W6800", "gfx1030", "rx6800"),
        ("Radeon RX 580", "gfx803", "wx4100"),
        ("AMD Radeon RX 9070", "gfx1201", "rx7900xtx"),
        ("AMD Radeon Graphics", "gfx1150", "strix-halo"),
        ("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", "mi300x"),
        ("AMD Radeon RX 5700", "gfx1010", "rx6800"),
        ("AMD Radeon Vega 64", "gfx900", "mi50"),
        ("NVIDIA A100", "sm_80", "rtx4090"),
        ("NVIDIA H200 NVL", "sm_90", "h200"),
        ("AMD Radeon RX 7900 XT", "gfx1100", "rx7900xtx"),
    ],
)
def test_a_card_is_planned_for_by_the_nearest_profile(name: str, target: str, found: str) -> None:
    assert nearest_profile(name, target) == found


def test_a_machine_without_gpu_multiplies_by_its_share_of_the_profiles_cores() -> None:
    few, many, base = without_gpu(2), without_gpu(32), profile("h200")
    assert few.vram_bytes == 0
    assert few.cpu_rate == pytest.approx(base.cpu_rate / 8)
    assert few.cpu_flops == pytest.approx(base.cpu_flops / 8)
    assert many.cpu_rate == base.cpu_rate
    assert many.cpu_flops == pytest.approx(2 * base.cpu_flops)


@pytest.mark.thorough
def test_a_reports_own_figures_lead() -> None:
    report = read_report(ROOT / "docs" / "results" / "h200-full.json")
    made = from_report(report, name="h200-full.json")
    assert made.origin == "measured: h200-full.json"
    assert made.link_rate / 1e9 == pytest.approx(55.5, abs=0.3)
    assert made.vram_rate / 1e12 == pytest.approx(4.40, abs=0.05)
    assert made.zero_copy_rate / 1e9 == pytest.approx(51.4, abs=0.3)
    assert made.flops["bfloat16"] / 1e12 == pytest.approx(640, rel=0.05)
    assert made.spread < profile("h200").spread
    assert made.link_alpha_s * 1e6 == pytest.approx(3.1, abs=0.1)
    assert "context" in made.notes[-1]
    assert "Python's time for an operation, small kernels" in made.notes[-1]


@pytest.mark.thorough
def test_launches_cost_what_small_work_took_in_the_reports_processes() -> None:
    report = read_report(ROOT / "docs" / "results" / "h200-full.json")
    first, *others = report.runs
    known = profile("h200")

    def took(factor: float, layers_s: float) -> tuple[Small, ...]:
        there = {name: (factor * seconds,) for name, seconds in SMALL_WORK_S.items()}
        return (
            Small("layers", there["layers"], (layers_s, 9.0, layers_s)),
            Small("product", there["product"], (1.0,)),
            Small("unpack", Unknown("no clock"), (1.0,)),
        )

    runs = (replace(first, small=took(1.5, 88e-5)), replace(first, small=took(2.5, 88e-5)), *others)
    made = from_report(replace(report, runs=runs), name="small.json")
    assert made.operation_s * 1e6 == pytest.approx(10)
    assert made.kernel_s == pytest.approx(2 * known.kernel_s)
    assert made.product_s == pytest.approx(2 * known.product_s)
    assert made.unpack_item_s == known.unpack_item_s
    assert "small kernels" not in made.notes[-1]


def test_a_report_without_a_gpu_plans_for_the_cpu() -> None:
    report = read_report(ROOT / "docs" / "results" / "h200-full.json")
    torch = report.machine.torch
    assert isinstance(torch, TorchFacts)
    bare = replace(report, machine=replace(report.machine, torch=replace(torch, gpus=())))
    made = from_report(bare, name="cpu.json")
    assert not made.has_gpu
    assert "all blocks go to the CPU" in made.notes[0]


@pytest.mark.thorough
def test_classes_of_operation_cost_what_the_report_has_measured_and_others_what_the_profile_says() -> None:
    report = read_report(ROOT / "docs" / "results" / "h200-full.json")
    first, *others = report.runs

    def took(name: ClassWork, seconds: float, count: int = 1, **work: int) -> Small:
        return Small(name, (seconds,), (3 * seconds,), count, **work)

    small = (
        took("norm", 16 * 5e-6, 16),
        took("large norm", 45e-6, moved_bytes=80_000_000),
        took("attention", 16 * 6e-6, 16, launches=2),
        took("large attention", 106e-6, flops=10**10),
        took("scan", 16 * 5e-6, 16),  # without a large one: not counted by
        took("products float16", 1e-4, flops=7 * 10**10),
    )
    made = from_report(replace(report, runs=(replace(first, small=small), *others)), name="r.json")
    assert made.origin == "measured: r.json"
    assert made.classes.keys() == {"norm", "attention"}
    assert made.classes["norm"].kernel_s == pytest.approx(5e-6)
    assert made.classes["norm"].host_s == pytest.approx(15e-6)
    assert made.classes["norm"].rate == pytest.approx(2e12)
    assert made.classes["attention"].kernel_s == pytest.approx(3e-6)
    assert made.classes["attention"].rate == pytest.approx(1e14)
    assert made.flops["float16"] == pytest.approx(7e14)
    assert "classes of operation" not in made.notes[-1]
    assert "times of classes of operation" in from_report(report, name="r.json").notes[-1]

    def seconds(kind: OperationKind, machine: Constants, **work: int) -> tuple[float, float]:
        block = BlockDescription("0", (), work=(Operation(kind, kind, "0", "float16", **work),))
        costs = BlockCosts(block, machine, Pass(1, 1, 1, "exact"))
        return costs.gpu.without_weights, costs.python.resident

    norm_s, host_s = seconds("norm", made, read=10**6, written=10**6)
    assert norm_s == pytest.approx(5e-6 + 1e-6)
    assert host_s == pytest.approx(OF_TORCH * 15e-6)
    attention_s, _ = seconds("attention", made, flops=10**10, launches=2)
    assert attention_s == pytest.approx(6e-6 + 1e-4)
    unmeasured = replace(made, classes={})
    assert seconds("scan", made, read=10**6) == seconds("scan", unmeasured, read=10**6)
    assert seconds("norm", made, read=10**6) != seconds("norm", unmeasured, read=10**6)
