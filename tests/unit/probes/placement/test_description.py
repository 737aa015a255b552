"""A model's description: which block a parameter belongs to, and what its tensors cost."""

import pytest

from probes.placement.models.description import (
    Attention,
    BlockDescription,
    TensorDescription,
    block_name,
)


@pytest.mark.parametrize(
    ("parameter", "block"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3"),
        ("h.0.attn.c_attn.bias", "h.0"),
        ("0.weight", "0"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
        ("model.scale.3", "model.scale"),  # a ParameterList's entry is no module
    ],
)
def test_a_parameter_belongs_to_the_first_numbered_module_above_it(parameter: str, block: str) -> None:
    assert block_name(parameter) == block


def test_a_lookup_reads_a_row_for_each_input_row_and_never_more_than_the_table() -> None:
    table = TensorDescription("embed.weight", (100, 8), "bfloat16", use="lookup")
    assert table.products == 0
    assert [table.bytes_read(rows) for rows in (1, 5, 1000)] == [16, 80, 1600]


def test_of_experts_a_row_reads_its_share_and_many_rows_read_all() -> None:
    experts = TensorDescription("experts", (8, 64, 64), "float16", active=2 / 8)
    assert experts.products == 2 * 64 * 64
    assert experts.bytes_read(1) == experts.n_bytes // 4
    assert 0.99 < experts.bytes_read(64) / experts.n_bytes <= 1


def test_bytes_of_narrow_numbers_are_rounded_up() -> None:
    assert TensorDescription("q", (3,), "float4_e2m1fn_x2").n_bytes == 2


def test_blocks_that_differ_in_names_alone_are_of_one_kind() -> None:
    first, second = (
        BlockDescription(f"layers.{i}", (TensorDescription(f"layers.{i}.w", (4, 4), "float32"),))
        for i in range(2)
    )
    assert first.kind == second.kind
    assert first.weight_bytes == 64


def test_a_window_limits_what_the_cache_keeps() -> None:
    full, window = Attention(8, 2, 64), Attention(8, 2, 64, window=100)
    assert full.numbers_per_token == 256
    assert (full.kept(500), window.kept(500), window.kept(50)) == (500, 100, 50)
