"""What a block costs in each tier, on machines with and without units, Triton and a GPU."""

from dataclasses import replace

import pytest

from probes.placement.models.description import (
    Attention,
    BlockDescription,
    ModelDescription,
    TensorDescription,
)
from probes.placement.models.operations import Operation
from probes.placement.models.reading import describe
from probes.placement.planner.costs import COPY, Option, cache_bytes
from probes.placement.planner.machine import Constants, profile
from probes.placement.planner.plan import make_plan
from probes.placement.planner.rules import Pass
from probes.placement.planner.tiers import POOL_SEGMENTS, SEGMENT, options, surroundings
from probes.placement.types import Workload

WIDTH = 8192


def linear(dtype: str = "bfloat16", **more: object) -> BlockDescription:
    return BlockDescription("0", (TensorDescription("0.weight", (WIDTH, WIDTH), dtype),), **more)  # type: ignore[arg-type]


def by_tier(
    block: BlockDescription, machine: Constants | str = "h200", *, rows: int = 1, objective: str = "exact"
) -> dict[str, Option]:
    """With 4-bit codes where a tier has both."""
    constants = profile(machine) if isinstance(machine, str) else machine
    work = Pass(rows, rows, 1, objective)  # type: ignore[arg-type]
    return {option.tier: option for option in options(block, constants, work) if not option.dense}


def test_the_prototypes_measured_times_are_predicted() -> None:
    """docs/decisions/0025-lossless-packed-layouts.md and the h200 report, us a layer; 10 % apart at most."""
    exact, fast = by_tier(linear()), by_tier(linear(), objective="fast")
    replayed = options(linear(), profile("h200"), Pass(1, 1, 1, "exact", captured=True))
    captured = next(option for option in replayed if option.tier == "packed")
    assert exact["resident"].compute_s * 1e6 == pytest.approx(34.0, rel=0.1)
    assert captured.unpack_s * 1e6 == pytest.approx(58.3, rel=0.1)
    assert fast["packed"].compute_s * 1e6 == pytest.approx(27.3, rel=0.15)
    assert exact["streamed"].copy_s * 1e3 == pytest.approx(2.43, rel=0.03)
    assert exact["streamed_packed"].copy_s * 1e3 == pytest.approx(1.84, rel=0.03)


# (outputs, inputs, rows): us of a bfloat16 product in a graph on an H100, of 108 that were timed
PRODUCTS = {
    (768, 768, 1): 3.20,
    (768, 768, 1024): 4.35,
    (768, 3072, 128): 6.96,
    (3072, 768, 1024): 9.82,
    (1600, 1600, 128): 5.71,
    (6400, 1600, 1): 9.97,
    (1600, 6400, 512): 21.53,
    (11008, 2048, 32): 18.41,
    (2048, 11008, 64): 22.23,
    (4096, 4096, 4096): 177.31,
    (8192, 8192, 1): 47.26,
    (8192, 8192, 128): 50.64,
    (8192, 8192, 1024): 175.37,
}


@pytest.mark.parametrize(("shape", "took"), PRODUCTS.items())
def test_a_product_takes_what_it_took_on_an_h100_whatever_its_size(
    shape: tuple[int, int, int], took: float
) -> None:
    """A roofline alone is 3 to 10 times too short for matrices of 1 to 10 MB."""
    outputs, inputs, rows = shape
    tensor = TensorDescription("0.weight", (outputs, inputs), "bfloat16")
    block = BlockDescription("0", (tensor,))
    found = options(block, profile("h100"), Pass(rows, rows, 1, "exact", captured=True))
    assert found[0].compute_s * 1e6 == pytest.approx(took, rel=0.21)


def test_fused_products_of_several_rows_are_slower_where_few_outputs_are_computed_at_once() -> None:
    """8 rows: 43.3 us for 8192 x 8192 on an H100, 18.7 for 4096 x 4096, and 34.5 for 6144 x 6144.

    An H200 takes 36.2 us for the last with 4 rows: its VRAM is quicker, its multiprocessors aren't.
    """
    times = (("h100", 8192, 43.3), ("h100", 6144, 34.5), ("h100", 4096, 18.7), ("h200", 6144, 36.2))
    for machine, width, took in times:
        tensor = TensorDescription("0.weight", (width, width), "bfloat16")
        block = BlockDescription("0", (tensor,))
        found = options(block, profile(machine), Pass(8, 8, 1, "fast", captured=True))
        packed = next(option for option in found if option.tier == "packed" and not option.unpack_s)
        assert packed.compute_s * 1e6 == pytest.approx(took, rel=0.15)


def touching(n_bytes: int) -> Operation:
    return Operation("kernel", "kernels", "", "float32", launches=25, read=n_bytes)


def test_activations_are_read_from_a_cache_so_a_quicker_vram_saves_little() -> None:
    """From 256 to 1,024 rows, a layer of BERT-large took 54 us longer besides products on an H200."""
    bias = TensorDescription("0.bias", (1024,), "bfloat16", "elementwise")
    for machine in ("h100", "h200"):
        few, many = (
            options(
                BlockDescription("0", (bias,), work=(touching(rows * 112 * 1024 * 2),)),
                profile(machine),
                Pass(rows, rows, 1, "exact", captured=True),
            )[0].compute_s
            for rows in (256, 1024)
        )
        assert (many - few) * 1e6 == pytest.approx(54, rel=0.1)


def test_experts_are_multiplied_by_a_kernel_that_reads_at_half_of_an_h200s_rate() -> None:
    """8 experts, 2 for each row: us of both products of a layer of 1,024, 160 and 640 rows."""
    for shape, rows, took in (
        ((8, 7168, 1024), 160, 49.8),
        ((8, 1024, 3584), 160, 25.0),
        ((8, 7168, 1024), 640, 60.2),
        ((8, 1024, 3584), 640, 42.0),
    ):
        block = BlockDescription("0", (TensorDescription("0", shape, "bfloat16", active=0.25),))
        found = options(block, profile("h200"), Pass(rows, rows, 1, "exact", captured=True))[0]
        assert found.compute_s * 1e6 == pytest.approx(took, rel=0.25)


def test_an_input_row_of_a_transposed_weight_is_as_long_as_its_first_dimension() -> None:
    stored = TensorDescription("0.weight", (6400, 1600), "bfloat16", inputs_first=True)
    usual = TensorDescription("0.weight", (1600, 6400), "bfloat16")
    one, other = (
        options(BlockDescription("0", (tensor,)), profile("h100"), Pass(128, 1, 128, "exact"))
        for tensor in (stored, usual)
    )
    assert one[0].compute_s == other[0].compute_s


@pytest.mark.parametrize(
    ("shape", "took"), [((2048, 2048), 6.5), ((11008, 2048), 27.7), ((8192, 8192), 76.1)]
)
def test_times_of_unpacking_2_bit_codes_on_an_h200(shape: tuple[int, int], took: float) -> None:
    """Microseconds of a layer's unpacking, many one behind the other: docs/decisions/0140.

    256 x 2048 take 4.1, for which 2.3 are planned: they are 64 blocks, for 132 multiprocessors.
    """
    block = BlockDescription("0", (TensorDescription("0.weight", shape, "bfloat16"),))
    found = options(block, profile("h200"), Pass(1, 1, 1, "exact", captured=True))
    dense = next(option for option in found if option.tier == "packed" and option.dense)
    assert dense.unpack_s * 1e6 == pytest.approx(took, rel=0.15)


def test_a_table_whose_rows_of_output_are_not_aligned_is_multiplied_slowly() -> None:
    """GPT-2's 50,257 words: 1.56 ms for 1,024 rows on an H100, 7 times what 50,256 would take."""
    took = []
    for words in (50_256, 50_257):
        tensor = TensorDescription("lm_head.weight", (words, 1600), "bfloat16")
        block = BlockDescription("lm_head", (tensor,))
        took.append(options(block, profile("h100"), Pass(1024, 8, 128, "exact", captured=True))[0].compute_s)
    assert took[0] * 1e3 == pytest.approx(0.25, rel=0.1)
    assert took[1] * 1e3 == pytest.approx(1.56, rel=0.1)


def test_rows_of_an_unaligned_product_fill_whole_tiles() -> None:
    """GPT-2 large: 0.34 ms for 192 rows and 0.53 for 288 on an H200, as for 256 and 384."""
    tensor = TensorDescription("lm_head.weight", (50_257, 1280), "bfloat16")
    for rows, took_ms in ((192, 0.342), (288, 0.534)):
        block = BlockDescription("lm_head", (tensor,))
        found = options(block, profile("h200"), Pass(rows, 1, rows, "exact", captured=True))[0]
        assert found.compute_s * 1e3 == pytest.approx(took_ms, rel=0.1)


def as_bfloat16(model: ModelDescription) -> ModelDescription:
    blocks = tuple(
        replace(block, tensors=tuple(replace(tensor, dtype="bfloat16") for tensor in block.tensors))
        for block in model.blocks
    )
    return replace(model, blocks=blocks)


@pytest.mark.parametrize(("batch", "took_ms"), [(1, 1.132), (8, 1.943)])
def test_a_rules_interval_holds_a_pass_whose_attention_is_computed_step_by_step(
    batch: int, took_ms: float
) -> None:
    """BERT resident and captured on an H100, with a mask, which the rule doesn't know: 0.82 and 1.28 ms."""
    made = make_plan(
        as_bfloat16(describe("bert-base")),
        profile("h100"),
        vram=2**31,
        host=None,
        workload=Workload(batch, 128),
        objective="exact",
        captured=True,
    )
    assert {block.tier for block in made.plan.blocks} == {"resident"}
    assert made.plan.time.low_s <= took_ms / 1e3 <= made.plan.time.high_s


def test_a_large_batch_is_bound_by_products() -> None:
    few, many = (by_tier(linear(), rows=rows)["resident"].compute_s for rows in (1, 4096))
    assert many > 10 * few
    assert many == pytest.approx(2 * WIDTH**2 * 4096 / profile("h200").flops["bfloat16"], rel=0.05)


def test_reading_in_place_is_worse_the_more_rows_read_again() -> None:
    """On an H200, for 1,024 rows, 16-bit matrices were read 4 to 10 times, those of 32 bits 17 to 37."""
    one, few, many = (by_tier(linear(), rows=rows)["in_place"].compute_s for rows in (1, 32, 1024))
    assert few / one == pytest.approx(1, rel=0.1)
    assert 8 <= many / one <= 10
    wide = [by_tier(linear("float32"), rows=rows)["in_place"].compute_s for rows in (1, 8, 1024)]
    assert wide[1] / wide[0] == pytest.approx(2, rel=0.1)
    assert 30 <= wide[2] / wide[0] <= 36


@pytest.mark.thorough
def test_a_block_of_many_rows_is_streamed_where_slots_fit() -> None:
    """In place, a pass through BERT took 31.9 ms; the link needs 3.7 ms to stream it."""
    plan = make_plan(
        describe("bert-base"),
        profile("h200"),
        vram=192 * 2**20,
        host=None,
        workload=Workload(8, 128),
        objective="exact",
    ).plan
    layers = [block.tier for block in plan.blocks if ".layer." in block.name]
    assert "in_place" not in layers


def test_the_cpu_multiplies_only_where_its_rounding_is_allowed() -> None:
    assert "cpu" not in by_tier(linear())
    assert "cpu" in by_tier(linear(), objective="fast")
    table = BlockDescription("t", (TensorDescription("t.weight", (1000, 64), "bfloat16", "lookup"),))
    assert "cpu" in by_tier(table)
    no_gpu = replace(profile("h200"), vram_bytes=0)
    assert set(by_tier(linear(), no_gpu)) == {"cpu"}


def test_copies_are_slower_while_the_cpu_reads_the_same_memory() -> None:
    """64 layers in 4 GiB took 0.447 of the link's limit for what doesn't fit, 34.6 ms, on an H200."""
    layers = tuple(
        BlockDescription(
            f"{i}",
            (TensorDescription(f"{i}.weight", (WIDTH, WIDTH), "bfloat16"),),
        )
        for i in range(64)
    )
    plan = make_plan(
        ModelDescription("mlp", layers, "drawn"),
        replace(profile("h200"), ranked_rate=1e9),  # 4-bit codes alone, as then
        vram=4 * 2**30,
        host=None,
        workload=Workload(),
        objective="fast",
    ).plan
    assert any(block.tier == "cpu" for block in plan.blocks)
    assert plan.time.middle_s * 1e3 == pytest.approx(34.6, rel=0.1)


def test_without_triton_nothing_is_fused_and_unpacking_is_slow() -> None:
    option = by_tier(linear(), "mi50", objective="fast")["packed"]
    assert option.unpack_s > 5 * option.compute_s


def converted(dtype: str, tier: str, *, kept: bool) -> Option:
    """A bfloat16 layer on a card without units for it."""
    block = linear().computed(dtype)
    found = options(block, profile("wx4100"), Pass(1, 1, 1, "exact"))
    return next(option for option in found if (option.tier, option.kept) == (tier, kept))


def test_float32_weights_take_twice_the_bytes_unless_each_pass_converts_them() -> None:
    own, wide = 2 * WIDTH**2, 4 * WIDTH**2
    whole, kept = (converted("float32", "resident", kept=kept) for kept in (False, True))
    assert (whole.vram_bytes, whole.scratch_bytes, whole.unpack_s) == (wide, 0, 0.0)
    assert (kept.vram_bytes, kept.scratch_bytes) == (own, wide)
    assert kept.unpack_s == pytest.approx((own + wide) / profile("wx4100").vram_rate, rel=0.01)
    streamed = converted("float32", "streamed", kept=True)
    assert (streamed.wire_bytes, streamed.pinned_bytes, streamed.slot_bytes) == (own, own, own)
    assert converted("float32", "in_place", kept=False).pinned_bytes == wide
    packed = converted("float32", "packed", kept=True)
    assert packed.vram_bytes == pytest.approx(0.75 * own, rel=0.01)
    assert packed.scratch_bytes == wide


def test_float16_weights_take_no_more_bytes_and_packed_ones_keep_their_12_bits() -> None:
    own = 2 * WIDTH**2
    resident = converted("float16", "resident", kept=False)
    assert (resident.vram_bytes, resident.scratch_bytes) == (own, 0)
    assert converted("float16", "streamed", kept=False).wire_bytes == own
    assert converted("float16", "packed", kept=True).vram_bytes == pytest.approx(0.75 * own, rel=0.01)


def test_keys_and_values_are_counted_in_the_dtype_that_is_computed() -> None:
    block = linear(attention=Attention(8, 2, 128))
    work = Pass(1, 3, 1000, "exact", generating=True)
    sizes = [cache_bytes(block.computed(dtype), work) for dtype in ("float16", "float32")]
    assert sizes[1] == 2 * sizes[0] == 2 * cache_bytes(block, work)


def test_no_kernel_converts_so_unpacking_counts_as_torch_operations() -> None:
    block = linear().computed("float16")
    card = profile("rx7900xtx")
    found = {o.tier: o for o in options(block, card, Pass(1, 1, 1, "fast"))}["packed"]
    assert found.unpack_s > (found.vram_bytes + found.scratch_bytes) / card.operations_rate


def test_experts_are_read_in_place_by_their_share_and_copied_whole() -> None:
    experts = BlockDescription("e", (TensorDescription("e.w", (8, 1024, 1024), "bfloat16", active=0.25),))
    found = by_tier(experts)
    assert found["in_place"].wire_bytes == experts.weight_bytes // 4
    assert found["streamed"].wire_bytes == experts.weight_bytes


def test_tied_tables_are_fetched_twice_and_multiplied_once() -> None:
    once, twice = by_tier(linear("float16")), by_tier(linear("float16", looked_up=True))
    assert twice["streamed"].wire_bytes == 2 * once["streamed"].wire_bytes
    assert twice["packed"].unpack_s == pytest.approx(2 * once["packed"].unpack_s)
    assert twice["resident"].compute_s == once["resident"].compute_s


def test_what_is_used_while_others_are_called_is_resident_only() -> None:
    assert set(by_tier(linear(anytime=True), objective="fast")) == {"resident"}


def test_eager_packed_blocks_cost_python_for_each_tensor() -> None:
    """24 eager fused layers took 2.5 operations each on an H200's host; captured ones cost Python nothing."""
    machine = profile("h200")
    found = by_tier(linear(), objective="fast")
    assert found["packed"].launch_s / machine.operation_s == pytest.approx(2.5, rel=0.1)
    captured = options(linear(), profile("h200"), Pass(1, 1, 1, "fast", captured=True))
    assert {option.launch_s for option in captured} == {0.0}


def test_a_captured_pass_has_neither_the_cpu_nor_the_disk_in_it() -> None:
    table = BlockDescription("t", (TensorDescription("t.weight", (1000, 64), "bfloat16", "lookup"),))
    for block in (linear(), table):
        captured = options(block, profile("h200"), Pass(1, 1, 1, "fast", captured=True))
        assert {option.tier for option in captured}.isdisjoint({"cpu", "disk"})


def test_keys_and_values_are_where_the_block_computes() -> None:
    block = linear(attention=Attention(8, 2, 128))
    work = Pass(1, 3, 1000, "fast", generating=True)
    found = {option.tier: option for option in options(block, profile("h200"), work)}
    cache = 3 * 1000 * 2 * 2 * 128 * 2
    assert found["streamed"].vram_bytes == cache
    assert found["resident"].vram_bytes == cache + 2 * WIDTH**2
    assert found["cpu"].pageable_bytes == cache + 2 * WIDTH**2
    assert found["cpu"].vram_bytes == 0


def test_narrow_whole_numbers_are_not_packed() -> None:
    assert set(by_tier(linear("int8"))) == {"resident", "in_place", "streamed", "disk"}


def test_a_table_of_words_is_no_activation() -> None:
    """BERT, 8 x 128 tokens: 128 MB were kept free for its vocabulary, so its layers didn't fit."""
    table = TensorDescription("t.weight", (30522, 768), "bfloat16", "lookup")
    found = surroundings((BlockDescription("t", (table,)),), profile("h200"), Workload(8, 128))
    assert found.activations == 8 * 128 * 2 * 768 * 2


@pytest.mark.parametrize(("rows", "more"), [(8, 0), (1024, 20 << 20)])
def test_a_recorded_pass_with_large_activations_has_room_for_a_buffer_that_no_other_stream_lends(
    rows: int, more: int
) -> None:
    table = TensorDescription("t", (50257, 1600), "bfloat16")
    blocks = (BlockDescription("t", (table,), looked_up=True),)
    eager, captured = (
        surroundings(blocks, profile("h100"), Workload(1, rows), captured=one) for one in (False, True)
    )
    assert captured.activations == eager.activations == rows * (50257 + 1600) * 2
    assert captured.loose_rounding - eager.loose_rounding == POOL_SEGMENTS * SEGMENT + more


def test_two_bit_codes_take_a_quarter_longer_to_unpack_than_four_bit_codes() -> None:
    """An H200 unpacks 8192 x 8192 weights with 4-bit codes in 60 to 61 us, with 2-bit codes in 76."""
    found = options(linear("bfloat16"), profile("h200"), Pass(1, 1, 1, "exact", captured=True))
    four, two = (next(o for o in found if o.tier == "packed" and o.dense == dense) for dense in (False, True))
    assert four.unpack_s * 1e6 == pytest.approx(60.5, rel=0.05)
    assert two.unpack_s * 1e6 == pytest.approx(76.1, rel=0.05)


def table_of(block: BlockDescription, machine: str = "h200", **more: object) -> Option | None:
    work = Pass(**{"rows": 1, "batch": 1, "context": 1, "objective": "fast", "captured": True} | more)  # type: ignore[arg-type]
    return next((option for option in options(block, profile(machine), work) if option.table), None)


def test_a_tied_table_is_multiplied_while_it_is_packed_and_needs_no_scratch_buffer() -> None:
    tied = linear(looked_up=True)
    found = table_of(tied)
    assert found is not None
    assert found.vram_bytes == pytest.approx(0.751 * tied.weight_bytes + 2**24, rel=0.01)
    assert (found.tier, found.scratch_bytes, found.unpack_s) == ("packed", 0, 0.0)
    resident = by_tier(tied)["resident"]
    assert found.compute_s < resident.compute_s  # it reads three quarters of the bytes


def test_for_many_rows_a_tied_table_is_unpacked_once_in_pieces() -> None:
    tied = linear(looked_up=True)
    found = table_of(tied, rows=32)
    assert found is not None
    layer = next(
        o for o in options(linear(), profile("h200"), Pass(32, 1, 1, "exact", captured=True)) if o.unpack_s
    )
    assert layer.unpack_s <= found.unpack_s <= 1.4 * layer.unpack_s
    assert found.scratch_bytes == 0


def test_an_exact_product_in_pieces_has_the_whole_table_in_host_memory_to_be_compared_with() -> None:
    tied = linear(looked_up=True)
    exact, fast = table_of(tied, objective="exact"), table_of(tied)
    assert exact is not None
    assert fast is not None
    assert (exact.pinned_bytes, fast.pinned_bytes) == (tied.weight_bytes, 0)
    assert exact.vram_bytes == fast.vram_bytes
    assert exact.unpack_s > 0
    assert exact.wire_bytes == 0


@pytest.mark.parametrize("objective", ["exact", "fast"])
def test_a_table_that_is_only_looked_up_may_stay_packed(objective: str) -> None:
    words = TensorDescription("t.weight", (50_000, 4096), "bfloat16", "lookup")
    found = table_of(BlockDescription("t", (words,)), objective=objective)
    assert found is not None
    assert found.vram_bytes == pytest.approx(0.751 * words.n_bytes, rel=0.01)
    assert found.compute_s < 20e-6


@pytest.mark.parametrize(
    "tensor",
    [
        TensorDescription("t.weight", (50_000, 4096), "float16", "lookup"),
        TensorDescription("t.weight", (50_000, 4096), "float32", "lookup"),
        TensorDescription("t.weight", (50_000, 384), "bfloat16", "lookup"),
        TensorDescription("t.weight", (50_000, 4097), "bfloat16", "lookup"),
    ],
)
def test_tables_whose_rows_cannot_be_unpacked_one_by_one_are_no_packed_tables(
    tensor: TensorDescription,
) -> None:
    assert table_of(BlockDescription("t", (tensor,))) is None
    assert table_of(linear()) is None


def test_a_card_without_bfloat16_units_has_no_packed_tables() -> None:
    assert table_of(linear(looked_up=True).computed("float16"), "wx4100") is None


def test_a_table_needs_no_buffer_as_large_as_a_vocabulary_so_none_is_offered() -> None:
    """GPT-2 XL at batch 1 had a scratch buffer of 161 MB for its embedding, and 20 MB were enough."""
    found = options(linear(looked_up=True), profile("h200"), Pass(128, 1, 128, "exact", captured=True))
    assert {option.scratch_bytes for option in found} == {0}


def test_biases_of_a_packed_block_in_vram_are_read_where_they_are() -> None:
    """BERT-large's layers at batch 8, an H200: 28 us to unpack one in VRAM, 46 one that is streamed."""
    width, inner = 1024, 4096
    shapes = [(width, width)] * 4 + [(inner, width), (width, inner), (inner,)] + [(width,)] * 9
    tensors = tuple(
        TensorDescription(f"0.{i}", shape, "bfloat16", "product" if len(shape) > 1 else "elementwise")
        for i, shape in enumerate(shapes)
    )
    work = Pass(1024, 8, 128, "exact", captured=True)
    found = {o.tier: o for o in options(BlockDescription("0", tensors), profile("h200"), work) if not o.dense}
    assert found["packed"].unpack_s * 1e6 == pytest.approx(28, rel=0.2)
    assert found["streamed_packed"].unpack_s * 1e6 == pytest.approx(46, rel=0.2)


def test_an_eager_pass_pays_for_what_the_link_carries_beside_it() -> None:
    """Every operation takes 7 % longer meanwhile, whether a copy or a kernel reads host memory."""
    machine = profile("h200")
    found = options(linear(), machine, Pass(1, 1, 1, "exact"))
    eager = {option.tier: option for option in found if not option.dense and option.pieces == 1}
    called = eager["packed"].launch_s + COPY * machine.operation_s
    assert eager["streamed_packed"].launch_s - called == pytest.approx(0.07 * eager["streamed_packed"].copy_s)
    read = eager["in_place"]
    assert read.launch_s - eager["resident"].launch_s == pytest.approx(0.07 * read.shared_s)
