"""The emulator of PTX computes what the PTX manual says, and refuses what is wrong or isn't known to it."""

import random
from fractions import Fraction

import emulated_ptx
import numpy as np
import pytest
import torch
from ptx_text import Refused

KERNEL = """
.version 9.4
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd0, [kernel_param_0];
	mov.u32 	%r0, %tid.x;               // the thread
	mov.u32 	%r1, %ctaid.x;
	mad.lo.s32 	%r1, %r1, {threads}, %r0;
	mad.wide.u32 	%rd1, %r1, 16, %rd0;   // four words for each thread
	ld.global.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %rd1 + 0 ];
	{body}
	ret;
}}
"""
STORE = "st.global.b32 [ %rd1 + 0 ], { %r5 };"
RANDOM = random.Random(5)


def ran(body: str, words=None, *, threads=32, blocks=1, order=0, shared=0):
    """The first of each thread's words afterwards, which are zeros or given, and what was executed."""
    memory = np.zeros((threads * blocks, 4), np.uint32)
    if words is not None:
        memory[: len(words), : len(words[0])] = words
    raw = np.zeros(memory.nbytes + 16, np.uint8)  # from a multiple of 16 on
    aligned = raw[-raw.ctypes.data % 16 :][: memory.nbytes].view(np.uint32).reshape(memory.shape)
    aligned[:] = memory
    code = emulated_ptx.load(KERNEL.format(threads=threads, body=body))
    ranges = [("words", aligned.ctypes.data, aligned.nbytes)]
    executed = emulated_ptx.run(code, blocks, [aligned.ctypes.data, 7], ranges, shared=shared, order=order)
    return aligned[:, 0].tolist(), executed


def computed(instruction: str, *sources: list[int]) -> list[int]:
    """An instruction's results in %r5 for words in %r1, %r2 and %r3, of which the last may be few."""
    count = -(-len(sources[0]) // 32) * 32
    words = [[*of, *[0] * (count - len(of))] for of in sources]
    found, _ = ran(f"{instruction} {STORE}", list(zip(*words, strict=True)), threads=count)
    return found[: len(sources[0])]


def words(count: int) -> list[int]:
    odd = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80008000]
    return odd + [RANDOM.getrandbits(32) for _ in range(count - len(odd))]


def signed(word: int, bits: int = 32) -> int:
    return (word & ((1 << bits) - 1)) - ((word >> (bits - 1) & 1) << bits)


def test_a_byte_permute_takes_bytes_and_their_signs():
    a, b, selectors = words(200), words(200)[::-1], [RANDOM.getrandbits(16) for _ in range(200)]
    wanted = []
    for low, high, selector in zip(a, b, selectors, strict=True):
        of = (low | high << 32).to_bytes(8, "little")
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        chosen = [of[n & 7] >> 7 and 255 if n & 8 else of[n & 7] for n in nibbles]
        wanted.append(int.from_bytes(bytes(chosen), "little"))
    assert computed("prmt.b32 %r5, %r1, %r2, %r3;", a, b, selectors) == wanted


@pytest.mark.parametrize("table", [0xEA, 0x80, 0x96, 0x01, 0xFE, 0x1B])
def test_three_words_are_combined_by_a_table(table):
    a, b, c = words(64), words(64)[::-1], words(64)
    wanted = [
        sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i for i in range(32))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert computed(f"lop3.b32 %r5, %r1, %r2, %r3, {table};", a, b, c) == wanted


def test_shifts_by_more_than_a_word_leave_nothing_except_signs():
    a, by = words(64), [0, 1, 31, 32, 33, 255, 1 << 31, 4] * 8
    pairs = list(zip(a, by, strict=True))
    assert computed("shl.b32 %r5, %r1, %r2;", a, by) == [x << min(n, 32) & 0xFFFFFFFF for x, n in pairs]
    assert computed("shr.u32 %r5, %r1, %r2;", a, by) == [x >> min(n, 32) for x, n in pairs]
    wanted = [signed(x) >> min(n, 32) & 0xFFFFFFFF for x, n in pairs]
    assert computed("shr.s32 %r5, %r1, %r2;", a, by) == wanted


def test_fields_of_bits_are_extended_by_their_sign():
    a, first, count = words(96), [0, 4, 28, 31, 40, 7] * 16, [5, 0, 8, 1, 3, 32, 4] * 14
    triples = list(zip(a, first, count, strict=False))
    wanted = [x >> p & ((1 << n) - 1) for x, p, n in triples]
    assert computed("bfe.u32 %r5, %r1, %r2, %r3;", a, first, count[:96]) == wanted
    wanted = [signed(signed(x) >> p, n) & 0xFFFFFFFF if n else 0 for x, p, n in triples]
    assert computed("bfe.s32 %r5, %r1, %r2, %r3;", a, first, count[:96]) == wanted


def test_products_and_comparisons_have_the_signs_of_their_types():
    a, b = words(64), words(64)[::-1]
    pairs = list(zip(a, b, strict=True))
    wide = "mul.wide.{} %rd2, %r1, %r2; shr.u64 %rd2, %rd2, 32; cvt.u32.u64 %r5, %rd2;"
    assert computed(wide.format("u32"), a, b) == [x * y >> 32 for x, y in pairs]
    wanted = [signed(x) * signed(y) >> 32 & 0xFFFFFFFF for x, y in pairs]
    assert computed(wide.format("s32"), a, b) == wanted
    compared = "setp.lt.{} %p1, %r1, %r2; selp.b32 %r5, 7, -7, %p1;"
    assert computed(compared.format("u32"), a, b) == [7 if x < y else 0xFFFFFFF9 for x, y in pairs]
    wanted = [7 if signed(x) < signed(y) else 0xFFFFFFF9 for x, y in pairs]
    assert computed(compared.format("s32"), a, b) == wanted
    narrow = "cvt.u16.u32 %rs1, %r1; cvt.s32.s16 %r5, %rs1;"
    assert computed(narrow, a, b) == [signed(x, 16) & 0xFFFFFFFF for x in a]
    added = "add.s16x2 %r5, %r1, %r2;"
    wanted = [(x + y) & 0xFFFF | (x & 0xFFFF0000) + (y & 0xFFFF0000) & 0xFFFF0000 for x, y in pairs]
    assert computed(added, a, b) == wanted


def rounded(value: Fraction, mantissa: int) -> float:
    """To the nearest even number with so many bits of mantissa, by the definition."""
    exponent = -126
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - mantissa)
    found = round(value / unit) * unit  # half to even
    return float(found) if abs(found) < Fraction(2) ** 128 else float("inf") * (1 if found > 0 else -1)


def floats(patterns: list[int]) -> list[float]:
    return np.array(patterns, np.uint32).view(np.float32).astype(float).tolist()


def test_a_product_and_a_sum_are_rounded_once():
    exponents = [*range(40, 215, 7), 1, 0, 90, 127, 127, 127]
    a, b, c = ([e << 23 | RANDOM.getrandbits(23) for e in exponents * 12] for _ in range(3))
    c = [x & ~(RANDOM.getrandbits(23) & 0x7FFFF0) ^ RANDOM.getrandbits(1) << 31 for x in c]
    a = [
        *a,
        0x3F800001,
        0x3F800001,
        0x00000001,
    ]  # sums half of a last bit away from a float, and a little more
    b = [*b, 0x3F800001, 0x3F800001, 0x3F000000]
    c = [*c, 0x33000001, 0xB3000001, 0x00000001]
    triples = list(zip(*map(floats, (a, b, c)), strict=True))
    wanted = [rounded(Fraction(x) * Fraction(y) + Fraction(z), 23) for x, y, z in triples]
    assert floats(computed("fma.rn.f32 %r5, %r1, %r2, %r3;", a, b, c)) == wanted

    halves = [[x & 0xFFFF0000 for x in of] for of in (a, b, c)]
    triples = list(zip(*map(floats, halves), strict=True))
    wanted = [rounded(Fraction(x) * Fraction(y) + Fraction(z), 7) for x, y, z in triples]
    pairs = [[x | 0x3F80 for x in of] for of in halves]  # 1 * 1 + 1 in the lower halves
    found = computed("fma.rn.bf16x2 %r5, %r1, %r2, %r3;", *pairs)
    assert floats([x & 0xFFFF0000 for x in found]) == wanted
    assert {x & 0xFFFF for x in found} == {0x4000}


def test_floats_are_rounded_to_bfloat16_as_torch_does():
    a = [x for x in words(4000) if x >> 23 & 255 != 255] + [0x7F7FFFFF, 0x7F800000, 0x00018000, 0x3F808000]
    wanted = (
        torch.tensor(a, dtype=torch.int64).to(torch.int32).view(torch.float32).bfloat16().view(torch.int16)
    )
    narrowed = "cvt.rn.bf16.f32 %rs1, %r1; cvt.u32.u16 %r5, %rs1;"
    assert computed(narrowed, a, a) == (wanted.to(torch.int32) & 0xFFFF).tolist()
    assert computed(narrowed, [0x7F800001, 0xFFC12345], [0, 0]) == [0x7FFF, 0x7FFF]
    assert computed("add.f32 %r5, %r1, %r2;", [0x7F800000], [0xFF800000]) == [0x7FFFFFFF]


@pytest.mark.parametrize(
    ("instruction", "source"),
    [
        ("up.b32 %r5, %r1, 3, 0, -1", lambda i: i - 3 if i >= 3 else i),
        ("down.b32 %r5, %r1, 3, 31, -1", lambda i: i + 3 if i < 29 else i),
        ("bfly.b32 %r5, %r1, 5, 31, -1", lambda i: i ^ 5),
        ("idx.b32 %r5, %r1, %r2, 31, 0xffffffff", lambda i: (7 * i) % 32),
        ("up.b32 %r5, %r1, 1, 0x1800, -1", lambda i: i - 1 if i % 8 else i),
        ("down.b32 %r5, %r1, 1, 0x181F, -1", lambda i: i + 1 if i % 8 < 7 else i),
        ("idx.b32 %r5, %r1, 2, 0x181F, -1", lambda i: i // 8 * 8 + 2),
    ],
)
def test_threads_of_a_warp_take_values_of_each_other(instruction, source):
    of = [[100 + i, 7 * i] for i in range(64)]
    found, _ = ran(f"shfl.sync.{instruction}; {STORE}", of, threads=64)
    assert found == [100 + i // 32 * 32 + source(i % 32) for i in range(64)]


def test_a_warp_has_one_sum_and_one_largest_value():
    of = [[signed(3 * i - 40) & 0xFFFFFFFF] for i in range(64)]
    found, _ = ran(f"redux.sync.add.s32 %r5, %r1, -1; {STORE}", of, threads=64)
    assert found == [
        sum(3 * i - 40 for i in range(first, first + 32)) & 0xFFFFFFFF for first in (0, 32) for _ in range(32)
    ]
    found, _ = ran(f"redux.sync.max.s32 %r5, %r1, -1; {STORE}", of, threads=64)
    assert found == [53] * 32 + [149] * 32


LOOP = """
	mov.b32 %r5, 0;
	setp.eq.b32 %p1, %r0, 0;
	@%p1 bra $L__end;
$L__again:
	add.s32 %r5, %r5, 10;
	add.s32 %r0, %r0, -1;
	setp.gt.s32 %p1, %r0, 0;
	@%p1 bra $L__again;
$L__end:
	redux.sync.add.s32 %r6, %r5, -1;
	add.s32 %r5, %r5, %r6;
"""


def test_threads_that_took_different_branches_meet_again():
    found, executed = ran(LOOP + STORE, blocks=2)
    assert found == [10 * i + 10 * sum(range(32)) for _ in range(2) for i in range(32)]
    assert executed.by_block.tolist() == [6 + 3 + 31 * 4 + 4] * 2
    assert executed.by_opcode["redux.sync.add.s32"] == 2


EXCHANGE = """
	mov.b32 %r5, global_smem;
	shl.b32 %r6, %r0, 2;
	add.s32 %r5, %r5, %r6;
	st.shared.b32 [ %r5 + 0 ], { %r0 };
	%s
	xor.b32 %r5, %r5, 252;
	ld.shared.b32 %r5, [%r5];
"""


@pytest.mark.parametrize("order", [0, 1, -1])
def test_a_barrier_is_waited_at_in_every_order_of_warps(order):
    body = EXCHANGE.replace("%s", "bar.sync 0;") + STORE
    found, _ = ran(body, threads=64, blocks=3, order=order, shared=256)
    assert found == list(range(64))[::-1] * 3


def test_a_barrier_that_is_missing_shows_in_another_order_of_warps():
    body = EXCHANGE.replace("%s", "") + STORE
    right = list(range(64))[::-1]
    assert ran(body, threads=64, shared=256)[0] == right
    assert ran(body, threads=64, shared=256, order=1)[0] != right
    assert ran(body, threads=64, shared=256, order=-1)[0] != right


def test_threads_that_have_returned_are_not_waited_for():
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 ret; mov.b32 %r5, 9; bar.sync 0; " + STORE
    assert ran(body, threads=64)[0] == [0] * 32 + [9] * 32


FILL = """
	shl.b32 %r6, %r0, 4;
	st.shared.v4.b32 [ %r6 + 0 ], { %r1, %r2, %r3, %r4 };
	bar.warp.sync -1;
	ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {%r1, %r2, %r3, %r5}, [%r6];
"""


@pytest.mark.parametrize("way", ["", ".trans"])
def test_matrices_are_spread_over_a_warp_and_come_back(way):
    halves = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # four matrices
    of = halves.view(np.uint32).reshape(32, 4).tolist()
    last = halves[3].T.copy() if way else halves[3]
    assert (
        ran(FILL.replace("%s", way) + STORE, of, shared=512)[0] == last.view(np.uint32).reshape(-1).tolist()
    )
    back = "stmatrix.sync.aligned.m8n8.x4%s.shared.b16 [%r6], {%r1, %r2, %r3, %r5};"
    cleared = "mov.b32 %r4, 0; st.shared.v4.b32 [ %r6 + 0 ], { %r4, %r4, %r4, %r4 };"
    body = FILL + cleared + back + "ld.shared.b32 %r5, [%r6];" + STORE
    assert ran(body.replace("%s", way), of, shared=512)[0] == [first for first, *_ in of]


COPIED = """
	shl.b32 %r6, %r0, 2;
	st.shared.b32 [ %r6 + 0 ], { %r1 };
	st.shared.b32 [ %r6 + 128 ], { %r1 };
	setp.lt.u32 %p1, %r0, 5;
	selp.b32 %r4, 0, 4, %p1;
	cp.async.ca.shared.global [ %r6 + 0 ], [ %rd1 + 4 ], 0x4, %r4;
	cp.async.commit_group;
	cp.async.ca.shared.global [ %r6 + 128 ], [ %rd1 + 8 ], 0x4;
	cp.async.commit_group;
	cp.async.wait_group %s;
	ld.shared.b32 %r5, [%r6];
	ld.shared.b32 %r6, [%r6+128];
	shl.b32 %r6, %r6, 16;
	or.b32 %r5, %r5, %r6;
"""


def test_copies_to_shared_memory_arrive_when_their_group_is_waited_for():
    of = [[1, 100 + i, 200 + i] for i in range(32)]
    first = [0 if i < 5 else 100 + i for i in range(32)]  # zeros where nothing is given
    for left, wanted in (
        (2, [1 | 1 << 16] * 32),
        (1, [one | 1 << 16 for one in first]),
        (0, [one | 200 + i << 16 for i, one in enumerate(first)]),
    ):
        assert ran(COPIED.replace("%s", str(left)) + STORE, of, shared=256)[0] == wanted


PRODUCT = """
	mov.b32 %r6, 0x40400000;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
		%s, {%r1, %r2, %r3, %r4}, {%r1, %r3}, {%r6, %r6, %r6, %r6};
"""


def test_a_warp_multiplies_matrices():
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(8)).bfloat16()
    b = a[:8].T  # its columns are spread over the warp as rows of the first matrix are
    of = [
        [
            int(a[t // 4 + down, t % 4 * 2 + right :][:2].clone().view(torch.int32))
            for right in (0, 8)
            for down in (0, 8)
        ]
        for t in range(32)
    ]
    wanted = (a.double() @ b.double() + 3).float()
    for i, to in enumerate(("{%r5, _, _, _}", "{_, %r5, _, _}", "{_, _, %r5, _}", "{_, _, _, %r5}")):
        found, _ = ran(PRODUCT.replace("%s", to) + STORE, np.array(of, np.int64) & 0xFFFFFFFF)
        assert floats(found) == [float(wanted[t // 4 + i // 2 * 8, t % 4 * 2 + i % 2]) for t in range(32)]


def test_names_of_inline_text_are_its_own():
    inline = "{ .reg .b32 t; shl.b32 t, %r0, 1; add.s32 %r5, t, 1; }"
    wider = "{ .reg .b64 t; mov.b64 t, 5; cvt.u32.u64 %r6, t; }"
    assert ran(f"{inline} {wider} add.s32 %r5, %r5, %r6; {STORE}")[0] == [2 * i + 6 for i in range(32)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("vadd4.u32.u32.u32 %r5, %r1, %r2, %r3;", r"not known here: vadd4\.u32"),
        ("add.sat.s32 %r5, %r1, %r2;", "not known here: add.sat"),
        ("ld.global.v2.b32 { %r1 }, [ %rd1 + 0 ];", "not known here: ld.global.v2"),
        ("bar.sync 1;", "kernel: bar.sync 1: not known here"),
        ("ld.global.b32 { %r5 }, [ %rd1 + 16 ];", "4 bytes at byte 512 of `words`, which has 512"),
        ("st.global.b32 [ %rd1 + -4 ], { %r1 };", "4 bytes at byte -4 of `words`"),
        ("ld.global.b32 { %r5 }, [ %rd1 + 2 ];", "not a multiple of 4"),
        ("ld.global.v2.b32 { %r5, %r6 }, [ %rd1 + 4 ];", "not a multiple of 8"),
        ("st.shared.b32 [ %r0 + 0 ], { %r1 };", "not a multiple of 4"),
        ("st.shared.b32 [ global_smem + 64 ], { %r1 };", "4 bytes at byte 64 of 64 that a block shares"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 shfl.sync.idx.b32 %r5, %r1, 0, 31, -1;", "only a part of a warp"),
        ("redux.sync.add.s32 %r5, %r1, 255;", "for a part of a warp"),
        ("add.s64 %rd2, %r1, 1;", "%r1 has fewer bits than uint64|int64"),
        ("mov.b32 %r5, %laneid;", "%laneid is not a register known here"),
    ],
)
def test_what_is_wrong_or_unknown_is_refused(body, why):
    with pytest.raises(Refused, match=why):
        ran(body, shared=64)
