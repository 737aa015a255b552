"""Traced blocks in parts: each operation is counted once, with the part whose weights it reads."""

from dataclasses import replace

import pytest

from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription
from probes.placement.models.operations import Operation, WeightUse
from probes.placement.planner.costs import BlockCosts
from probes.placement.planner.experts import by_experts
from probes.placement.planner.machine import profile
from probes.placement.planner.rules import Pass

WORK = Pass(64, 64, 0, "exact", captured=True)
LSTM = "net.lstm"
SIZES = {0: (4096, 1024), 1: (4096, 2048), 2: (4096, 2048)}


def loop() -> Operation:
    """The one operation of three layers over 20 steps."""
    weights = tuple(
        WeightUse(f"{LSTM}.weight_{way}_l{n}", rows * columns * 2)
        for n, (rows, columns) in SIZES.items()
        for way in ("ih", "hh")
    )
    return Operation(
        "recurrent", "lstm", LSTM, "bfloat16", 10**9 + 7, 1001, 2003, 123, rows=64, steps=20, weights=weights
    )


def recurrent() -> BlockDescription:
    tensors = [
        TensorDescription(f"{LSTM}.weight_{way}_l{n}", size, "bfloat16")
        for n, size in SIZES.items()
        for way in ("ih", "hh")
    ]
    tensors += [
        TensorDescription("net.scale", (1024,), "bfloat16", "elementwise"),
        TensorDescription("net.out.weight", (256, 1024), "bfloat16"),
    ]
    out = (WeightUse("net.out.weight", 256 * 1024 * 2),)
    work = (
        Operation("strided", "zeros", "net", "bfloat16", written=10),
        loop(),
        Operation("plain", "mul", "net", "bfloat16", read=20, weights=(WeightUse("net.scale", 2048),)),
        Operation("product", "linear", "net.out", "bfloat16", 2 * 64 * 256 * 1024, rows=64, weights=out),
        Operation("plain", "relu", "net.act", "bfloat16", read=30),
    )
    return BlockDescription("net", tuple(tensors), divisible=True, work=work, modules_called=4, mixed=True)


def test_a_loop_over_all_layers_is_divided_by_their_weights_and_nothing_is_lost() -> None:
    block = recurrent()
    parts = {part.name: part for part in block.divided()}
    assert list(parts) == [f"{LSTM}.l0", f"{LSTM}.l1", f"{LSTM}.l2", "net.out", "net.scale"]
    assert parts["net.scale"].anytime
    assert parts["net.scale"].work == ()
    works = {name: part.work or () for name, part in parts.items()}
    loops = [o for work in works.values() for o in work if o.kind == "recurrent"]
    for number in ("flops", "read", "written", "launches", "workspace", "weight_bytes"):
        assert sum(getattr(o, number) for o in loops) == getattr(loop(), number)
    assert [o.steps for o in loops] == [20, 20, 20]
    assert loops[1].flops == pytest.approx(0.4 * loop().flops)
    names = [[o.name for o in work] for work in works.values()]
    assert names == [["zeros", "lstm"], ["lstm"], ["lstm", "mul"], ["linear", "relu"], []]
    assert sum(part.modules_called for part in parts.values()) == 4


def test_the_parts_of_a_traced_block_take_the_time_of_the_whole() -> None:
    def seconds(block: BlockDescription) -> float:
        return BlockCosts(block, profile("h200"), WORK).gpu.from_vram()

    block = recurrent()
    assert sum(map(seconds, block.divided())) == pytest.approx(seconds(block), rel=1e-6)


def mixture() -> ModelDescription:
    """One layer: a router, and 16 experts of which each of 4 rows chooses 2."""
    name, count = "layers.0.mlp.experts", 16
    up, down = f"{name}.up", f"{name}.down"
    tensors = (
        TensorDescription("layers.0.gate.weight", (count, 256), "bfloat16"),
        TensorDescription(up, (count, 512, 256), "bfloat16", active=2 / count),
        TensorDescription(down, (count, 256, 512), "bfloat16", active=2 / count),
    )

    def product(tensor: str, outputs: int, inputs: int) -> Operation:
        n_bytes = int(6.6 * outputs * inputs * 2)
        return Operation(
            "product", "_grouped_mm", name, "bfloat16", 2 * 8 * outputs * inputs, rows=8, outputs=outputs,
            inputs=inputs, groups=6.6, weights=(WeightUse(tensor, n_bytes),),
        )  # fmt: skip

    gate = (WeightUse("layers.0.gate.weight", 8192),)
    work = (
        Operation("product", "linear", "layers.0.gate", "bfloat16", 2 * 4 * 16 * 256, rows=4, weights=gate),
        Operation("strided", "index", name, "bfloat16", weights=(WeightUse(up, 2**18),)),
        product(up, 512, 256),
        Operation("plain", "silu", f"{name}.act", "bfloat16"),
        product(down, 256, 512),
        Operation("plain", "add", "layers.0", "bfloat16"),
    )
    return ModelDescription("m", (BlockDescription("layers.0", tensors, work=work),), "drawn")


def test_the_operations_of_experts_go_with_their_block() -> None:
    rest, experts = mixture().with_experts_apart().blocks
    assert [o.name for o in rest.work or ()] == ["linear", "add"]
    # a gather isn't: the tier has its own
    assert [o.name for o in experts.work or ()] == ["_grouped_mm", "silu", "_grouped_mm"]
    assert (experts.experts, experts.chosen) == (16, 2)
    assert rest.kind != replace(rest, work=()).kind
    assert experts.kind != replace(experts, chosen=3).kind


def test_a_cache_of_experts_is_read_by_the_rows_that_a_trace_has() -> None:
    """Inputs of any shape are traced: the workload of a plan may not say how many rows choose."""
    _, experts = mixture().with_experts_apart().blocks
    option = by_experts(BlockCosts(experts, profile("h200"), replace(WORK, rows=1, batch=1)))
    by_rules = by_experts(BlockCosts(replace(experts, work=None), profile("h200"), replace(WORK, rows=4)))
    assert option.wire_bytes == by_rules.wire_bytes
    assert option.compute_s == pytest.approx(by_rules.compute_s, rel=0.3)
