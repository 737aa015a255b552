"""The emulated machine is stricter than a card: what a kernel must not do ends with the place's name."""

import numpy as np
import pytest
from code_object import Descriptor, Instruction, Kernel, decode
from instructions import act_of, dpp_source
from machine import Fault, Machine, Memory
from tinygrad.renderer.amd.dsl import s, v
from tinygrad.runtime.autogen.amd.rdna3 import ins
from tinygrad.runtime.autogen.amd.rdna3.ins import (
    ds_load_b32,
    ds_store_b32,
    global_load_b32,
    global_store_b32,
    s_barrier,
    s_endpgm,
    s_load_b64,
    s_nop,
    s_waitcnt,
    v_add_nc_u32_e32,
    v_lshlrev_b32_e32,
    v_mov_b32_e32,
    v_xor_b32_e32,
)

LDS_IS_DONE = s_waitcnt(simm16=0xFC07)  # lgkmcnt(0), and the others at their most
LOADS_ARE_DONE = s_waitcnt(simm16=0x03F7)
VALUES = 64


def ran(*body: object, threads: int = VALUES, lds: int = 0, values: int = VALUES) -> list[int]:
    """Words of memory afterwards, which s[2:3] points to, and v[1] is each thread's byte offset."""
    begin = (s_load_b64(s[2:3], s[0:1], offset=0), LDS_IS_DONE, v_lshlrev_b32_e32(v[1], 2, v[0]))
    code, at = [], 0
    for of in (*begin, *body, s_endpgm()):
        data = of.to_bytes()
        name, form, size, fields, decoded = decode(data, "rdna3")
        code.append(Instruction(at, size, name, form, fields, decoded, f"kernel.py:{len(code)}"))
        at += size
    descriptor = Descriptor(0, 0, 8, 0, 0xF0003, 0x84, 0x408, 0)
    kernel = Kernel("kernel", "gfx1100", "rdna3", 32, descriptor, code, 0)
    words, area = np.arange(100, 100 + values, dtype=np.uint32), np.zeros(1, np.uint64)
    memory = Memory([("words", words.ctypes.data, words.nbytes), ("arguments", area.ctypes.data, 8)])
    area[0] = memory.placed(words.ctypes.data)
    memory.copy_in()
    Machine(kernel, (1, 1), threads, b"", memory, (memory.placed(area.ctypes.data), 0), lds).run(act_of)
    memory.copy_out()
    return words.tolist()


STORE = global_store_b32(addr=v[1], data=v[2], saddr=s[2:3])
LOAD = global_load_b32(vdst=v[2], addr=v[1], saddr=s[2:3])


def test_a_load_that_is_waited_for_and_a_store_reach_memory():
    assert ran(LOAD, LOADS_ARE_DONE, v_add_nc_u32_e32(v[2], 7, v[2]), STORE) == list(range(107, 107 + VALUES))


def test_a_load_of_any_byte_reaches_memory():
    shifted = (v_mov_b32_e32(v[3], 1), global_load_b32(vdst=v[2], addr=v[3], saddr=s[2:3]), LOADS_ARE_DONE)
    assert ran(*shifted, STORE) == [101 << 24] * VALUES


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((v_mov_b32_e32(v[2], v[5]), STORE), "v2 is read before it is written"),
        ((LOAD, v_add_nc_u32_e32(v[2], 7, v[2]), STORE), "v2 is used before the load counter is waited for"),
        ((LOAD, v_mov_b32_e32(v[2], 0)), "v2 is used before"),
        ((v_add_nc_u32_e32(v[1], 4, v[1]), LOAD), r"4 bytes at byte 256 of `words`, which has 256"),
        ((v_mov_b32_e32(v[2], s[9]), STORE), "s9 is read before it is written"),
        ((v_mov_b32_e32(v[40], 1),), "v40 is not among the 32"),
    ],
)
def test_what_a_card_lets_pass_is_an_error_with_its_line(body, why):
    with pytest.raises(Fault, match=why) as raised:
        ran(*body)
    assert "kernel.py:" in str(raised.value)


TURNED = v_xor_b32_e32(v[3], 0x80, v[1])  # the place of a thread of the other wave
PUT = ds_store_b32(addr=v[1], data0=v[0])
TAKE = ds_load_b32(vdst=v[2], addr=v[3])


def test_a_barrier_that_waits_orders_two_waves():
    body = (PUT, LDS_IS_DONE, s_barrier(), TURNED, TAKE, LDS_IS_DONE, STORE)
    assert ran(*body, lds=256) == [i ^ 32 for i in range(64)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((PUT, LDS_IS_DONE, s_nop(), TURNED, TAKE), "a race with wave"),
        ((PUT, s_barrier(), TURNED, TAKE), "a race with wave"),
        ((v_mov_b32_e32(v[3], 0), TAKE), "a word of LDS is read before it is written"),
        ((v_add_nc_u32_e32(v[3], 4, v[1]), PUT, LDS_IS_DONE, s_barrier(), TAKE), "byte 256 of 256 of LDS"),
        ((PUT, LDS_IS_DONE, s_barrier(), TURNED, TAKE, ds_store_b32(addr=v[1], data0=v[0])), "a race"),
        (
            (
                TURNED,
                v_mov_b32_e32(v[2], 1),
                STORE,
                s_barrier(),
                global_load_b32(vdst=v[2], addr=v[3], saddr=s[2:3]),
            ),
            "a race",
        ),
    ],
)
def test_waves_that_race_are_found(body, why):
    with pytest.raises(Fault, match=why):
        ran(*body, lds=256)


COUNT_ONE = (
    v_mov_b32_e32(v[3], 0),
    v_mov_b32_e32(v[2], 1),
    ins.global_atomic_add_u32(addr=v[3], data=v[2], saddr=s[2:3]),
)


def test_additions_in_memory_by_all_lanes_of_two_waves_add_up():
    assert ran(*COUNT_ONE)[:2] == [100 + VALUES, 101]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((*COUNT_ONE, LOAD), "a race with an atomic operation"),
        ((*COUNT_ONE, STORE), "a race with an atomic operation"),
        (
            (v_mov_b32_e32(v[3], 2), v_mov_b32_e32(v[2], 1), COUNT_ONE[-1]),
            "an atomic operation at an address that is no multiple of 4",
        ),
        (
            (
                v_mov_b32_e32(v[3], 0),
                v_mov_b32_e32(v[2], 1),
                ins.global_atomic_add_u32(vdst=v[4], addr=v[3], data=v[2], saddr=s[2:3], glc=1),
            ),
            "returns the old value is not known",
        ),
    ],
)
def test_what_races_with_an_addition_in_memory_or_is_not_known_of_it_is_an_error(body, why):
    with pytest.raises(Fault, match=why):
        ran(*body)


def test_a_lane_counts_the_set_bits_of_those_before_it():
    before = ins.v_mbcnt_lo_u32_b32(v[2], -1, 7)
    assert ran(before, STORE) == [7 + i % 32 for i in range(VALUES)]


def test_what_is_undefined_may_pass_through_arithmetic_and_no_further():
    half = ins.v_mov_b16_e32(v[2], 5)  # the upper half stays as it was
    shifted = v_lshlrev_b32_e32(v[2], 16, v[2])
    assert ran(half, shifted, STORE) == [5 << 16] * VALUES
    with pytest.raises(Fault, match="v2 is read before"):
        ran(half, STORE)


@pytest.mark.parametrize(
    ("control", "wanted"),
    [
        (0x1B, lambda i: i & ~3 | 3 - (i & 3)),  # quad_perm:[3,2,1,0]
        (0x111, lambda i: i - 1 if i % 16 else None),  # row_shr:1
        (0x103, lambda i: i + 3 if i % 16 < 13 else None),  # row_shl:3
        (0x121, lambda i: i & ~15 | (i - 1) % 16),  # row_ror:1
        (0x140, lambda i: i ^ 15),
        (0x141, lambda i: i ^ 7),
        (0x142, lambda i: (i & ~15) - 1 if i > 15 else None),  # row_bcast:15
        (0x155, lambda i: i & ~15 | 5),  # row_share:5
        (0x168, lambda i: i ^ 8),  # row_xmask:8
    ],
)
def test_lanes_take_values_of_others_as_dpp_says(control, wanted):
    source, there = dpp_source(control, 64)
    assert [int(of) if ok else None for of, ok in zip(source, there, strict=True)] == [
        *map(wanted, range(64))
    ]
