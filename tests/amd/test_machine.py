"""The emulated machine is stricter than a card: what a kernel must not do ends with the place's name."""

import numpy as np
import pytest
from code_object import ARCHITECTURES, Descriptor, Instruction, Kernel, decode
from instructions import act_of, dpp_source
from machine import Fault, Machine, Memory
from tinygrad.renderer.amd.dsl import DPP, EXEC_HI, EXEC_LO, SDWA, s, src, ttmp, v
from tinygrad.runtime.autogen.amd.cdna import ins as cdna
from tinygrad.runtime.autogen.amd.rdna3 import ins
from tinygrad.runtime.autogen.amd.rdna3.ins import (
    ds_load_b32,
    ds_store_b32,
    global_load_b32,
    global_store_b32,
    s_barrier,
    s_endpgm,
    s_load_b64,
    s_mov_b32,
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


def ran(
    *body: object,
    threads: int = VALUES,
    lds: int = 0,
    target: str = "gfx1100",
    groups: int = 1,
    ends: bool = True,
    descriptor: Descriptor | None = None,
) -> list[int]:
    """Words of memory afterwards, which s[2:3] points to, and v[1] is each thread's byte offset."""
    architecture = ARCHITECTURES[target]
    wave, of_target = (64, cdna) if architecture == "cdna" else (32, ins)
    begin = (
        (cdna.s_load_dwordx2(s[2:3], s[0:1], offset=0, imm=1), cdna.s_waitcnt(simm16=0xC07F))
        if architecture == "cdna"
        else (s_load_b64(s[2:3], s[0:1], offset=0), LDS_IS_DONE)
    )
    code = (*begin, of_target.v_lshlrev_b32_e32(v[1], 2, v[0]), *body, *(of_target.s_endpgm(),) * ends)
    descriptor = descriptor or Descriptor(0, 0, 8, 3, 0xF0003, 0x84, 8 | (wave == 32) << 10, 0)
    return started(code, descriptor, b"", threads, lds, target, groups)


def started(
    instructions: tuple,
    descriptor: Descriptor,
    preloaded: bytes,
    threads: int,
    lds: int = 0,
    target: str = "gfx90a",
    groups: int = 1,
) -> list[int]:
    """The words afterwards, whose address is the first argument in memory."""
    architecture, code, at = ARCHITECTURES[target], [], 0
    for of in instructions:
        name, form, size, fields, decoded = decode(of.to_bytes(), architecture)
        code.append(Instruction(at, size, name, form, fields, decoded, f"kernel.py:{len(code)}"))
        at += size
    wave = 64 if architecture == "cdna" else 32
    kernel = Kernel("kernel", target, architecture, wave, descriptor, code, 0)
    words, area = np.arange(100, 100 + VALUES, dtype=np.uint32), np.zeros(1, np.uint64)
    buffers = [("words", words.ctypes.data, words.nbytes), ("arguments", area.ctypes.data, 8)]
    memory = Memory(buffers, {"words"})
    area[0] = memory.placed(words.ctypes.data)
    memory.copy_in()
    Machine(
        kernel, (groups, 1), threads, preloaded, memory, (memory.placed(area.ctypes.data), 0x1000), lds
    ).run(act_of)
    memory.copy_out()
    return words.tolist()


STORE = global_store_b32(addr=v[1], data=v[2], saddr=s[2:3])
LOAD = global_load_b32(vdst=v[2], addr=v[1], saddr=s[2:3])


def test_a_load_that_is_waited_for_and_a_store_reach_memory():
    assert ran(LOAD, LOADS_ARE_DONE, v_add_nc_u32_e32(v[2], 7, v[2]), STORE) == list(range(107, 107 + VALUES))


def test_a_load_of_any_byte_reaches_memory():
    shifted = (v_mov_b32_e32(v[3], 1), global_load_b32(vdst=v[2], addr=v[3], saddr=s[2:3]), LOADS_ARE_DONE)
    assert ran(*shifted, STORE, threads=32)[:32] == [101 << 24] * 32


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((v_mov_b32_e32(v[2], v[5]), STORE), "v2 is read before it is written"),
        ((LOAD, v_add_nc_u32_e32(v[2], 7, v[2]), STORE), "v2 is used before the load counter is waited for"),
        ((LOAD, v_mov_b32_e32(v[2], 0)), "v2 is used before"),
        ((v_add_nc_u32_e32(v[1], 4, v[1]), LOAD), r"4 bytes at byte 256 of `words`, which has 256"),
        ((v_mov_b32_e32(v[2], s[9]), STORE), "v2 is read before it is written"),
        ((s_mov_b32(s[8], s[9]),), "s9 is read before it is written"),
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
    architecture = "cdna" if control == 0x142 else "rdna3"
    source, there = dpp_source(control, 64, architecture)
    assert [int(of) if ok else None for of, ok in zip(source, there, strict=True)] == [
        *map(wanted, range(64))
    ]


TO_FIRST = v_mov_b32_e32(v[3], 0)
LOAD_TURNED = global_load_b32(vdst=v[4], addr=v[3], saddr=s[2:3])
TO_ARGUMENTS = global_store_b32(addr=v[3], data=v[2], saddr=s[0:1])
DPP8 = ins.VOP1_DPP8(ins.VOP1Op.V_MOV_B32_E32, vdst=v[2], src0=src[233], vsrc0=v[0])
SAME_PLACE = global_store_b32(addr=v[3], data=v[2], saddr=s[2:3])
LATER_WAVE = (  # only lanes of the second wave stay on
    ins.v_cmpx_lt_u32_e32(31, v[0]),
)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((TO_FIRST, v_mov_b32_e32(v[2], v[0]), SAME_PLACE), "lanes store different values at one place"),
        ((TO_FIRST, ds_store_b32(addr=v[3], data0=v[0])), "lanes store different values at one place"),
        # the first wave reads what the second writes, in one step and later
        ((TURNED, v_mov_b32_e32(v[2], v[0]), LOAD_TURNED, STORE), "a race with wave [01], which writes"),
        ((TURNED, LOAD_TURNED, *LATER_WAVE, v_mov_b32_e32(v[2], 1), STORE), "a race with wave 1"),
        # both waves read a word of LDS that the second one writes then
        (
            (PUT, LDS_IS_DONE, s_barrier(), TO_FIRST, TAKE, *LATER_WAVE, ds_store_b32(addr=v[3], data0=v[0])),
            "a race",
        ),
        # behind a barrier, which doesn't wait for what was read
        (
            (PUT, LDS_IS_DONE, s_barrier(), TURNED, TAKE, s_barrier(), PUT),
            "a race with wave [01], which reads",
        ),
        (
            (
                ins.s_load_b32(s[8], s[0:1], offset=4),
                v_mov_b32_e32(v[2], 1),
                STORE,
                ins.s_load_b32(s[9], s[2:3]),
            ),
            "wrote",
        ),
        ((v_mov_b32_e32(v[2], 1), v_mov_b32_e32(v[3], 0), TO_ARGUMENTS), "which this launch only reads"),
    ],
)
def test_what_waves_of_one_step_do_to_each_other_is_found(body, why):
    with pytest.raises(Fault, match=why):
        ran(*body, lds=256)


def test_a_barrier_that_waits_for_what_was_read_orders_a_later_write():
    body = (PUT, LDS_IS_DONE, s_barrier(), TURNED, TAKE, LDS_IS_DONE, s_barrier(), PUT, STORE)
    assert ran(*body, lds=256) == [i ^ 32 for i in range(64)]


def test_groups_that_write_one_place_race():
    with pytest.raises(Fault, match="a race with wave"):
        ran(*LATER_WAVE, v_mov_b32_e32(v[2], 1), STORE, s_nop(), LOAD, groups=2)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ((s_mov_b32(s[8], 1),), "ends here without S_ENDPGM"),
        ((ins.s_code_end(), s_endpgm()), "not known"),
        ((ins.s_cbranch_cdbgsys(0), s_endpgm()), "not known"),
        ((ins.s_nand_saveexec_b32(s[8], -1), s_endpgm()), "not known"),
        ((ins.s_and_saveexec_b64(s[8:9], -1), s_endpgm()), "not known here for waves of 32"),
        ((ins.s_setreg_imm32_b32(simm16=0x801, literal=3), s_endpgm()), "not known"),
        ((ins.v_writelane_b32(v[40], 1, 0), s_endpgm()), "v40 is not among"),
        ((LOAD, ins.v_writelane_b32(v[2], 1, 0), s_endpgm()), "v2 is used before the load counter"),
        ((s_mov_b32(ttmp[2], 1), s_endpgm()), "s110 is not among"),
        ((ins.v_mov_b32_e32(v[4], 1), DPP8, s_endpgm()), "source 233 is not known"),
        ((ins.v_add_nc_u32_e64(v[4], v[0], v[1], opsel=1), s_endpgm()), "upper half"),
        ((ins.v_cmp_eq_u32_e32(7, v[9]), s_endpgm()), "comparison of bits that were never written"),
    ],
)
def test_code_that_means_nothing_or_is_not_known_is_refused(body, why):
    with pytest.raises(Fault, match=why):
        ran(*body, ends=False)


CDNA_STORE = cdna.global_store_dword(addr=v[1], data=v[2], saddr=s[2:3])
SDWA_EXTENDED = cdna.VOP1_SDWA(
    cdna.VOP1Op.V_MOV_B32_E32, vdst=v[2], src0=SDWA, vsrc0=v[0], dst_sel=5, dst_unused=1, src0_sel=6
)
ADDRESS = (cdna.v_mov_b32_e32(v[4], s[2]), cdna.v_mov_b32_e32(v[5], s[3]))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            (cdna.global_load_dwordx2(vdst=v[7:8], addr=v[1], saddr=s[2:3]),),
            "v7 begins 2 registers, and is odd",
        ),
        (
            (
                *ADDRESS,
                cdna.v_mov_b32_e32(v[6], s[3]),
                cdna.global_load_dword(vdst=v[7], addr=v[5], saddr=EXEC_HI),
            ),
            "v5 begins",
        ),
        ((cdna.s_mov_b32(s[40], 1),), "s40 is not among"),
        ((cdna.global_load_short_d16(vdst=v[7], addr=v[1], saddr=s[2:3]),), "error correction"),
        ((cdna.s_load_dword(s[8], s[2:3], imm=0, soffset_en=0),), "offset of this form"),
        ((SDWA_EXTENDED,), "part of a destination"),
    ],
)
def test_what_cdna_does_not_do_is_refused(body, why):
    with pytest.raises(Fault, match=why):
        ran(*body, target="gfx90a")


def test_user_registers_that_the_descriptor_does_not_count_are_refused():
    with pytest.raises(Fault, match="2 words for 1 user registers"):
        ran(descriptor=Descriptor(0, 0, 8, 0, 0xF0003, 0x82, 0x408, 0))


@pytest.mark.parametrize("rsrc1", [0xC0003, 0x30003, 0xF1003, 0xF4003])
def test_other_modes_of_rounding_and_denormal_numbers_are_refused(rsrc1):
    with pytest.raises(Fault, match="is not known here"):
        ran(descriptor=Descriptor(0, 0, 8, 0, rsrc1, 0x84, 0x408, 0))


@pytest.mark.parametrize("picks", range(4))
def test_a_packed_move_picks_a_word_of_each_source(picks):
    body = (
        *(cdna.v_mov_b32_e32(v[4 + i], 11 * i) for i in range(4)),
        cdna.v_pk_mov_b32(v[8:9], v[4:5], v[6:7], opsel=picks, opsel_hi=3),
        cdna.v_lshlrev_b32_e32(v[9], 8, v[9]),
        cdna.v_or_b32_e32(v[2], v[8], v[9]),
        cdna.global_store_dword(addr=v[1], data=v[2], saddr=s[2:3]),
    )
    low, high = 11 * (picks & 1), 11 * (2 + (picks >> 1))
    assert ran(*body, target="gfx90a") == [low | high << 8] * VALUES


def test_a_wave_of_64_has_both_halves_of_its_mask():
    body = (
        cdna.v_cmp_lt_u32_e32(40, v[0]),
        cdna.v_cndmask_b32_e32(v[2], 1, v[0]),
        cdna.global_store_dword(addr=v[1], data=v[2], saddr=s[2:3]),
    )
    with pytest.raises(Fault, match="is read before"):  # VCC is written; v1 and v0 are defined
        ran(cdna.v_cndmask_b32_e32(v[2], 1, v[0]), body[2], target="gfx90a")
    assert ran(*body, target="gfx90a") == [i if i > 40 else 1 for i in range(VALUES)]


def test_lanes_that_are_off_keep_their_words_and_clear_their_bit_of_a_condition():
    body = (v_mov_b32_e32(v[2], 5), *LATER_WAVE, v_mov_b32_e32(v[2], 9), ins.s_mov_b32(EXEC_LO, -1), STORE)
    assert ran(*body) == [5] * 32 + [9] * 32
    body = (ins.v_cmpx_lt_u32_e32(7, v[0]), ins.v_cmp_lt_u32_e32(3, v[0]), ins.s_mov_b32(EXEC_LO, -1))
    assert (
        ran(*body, v_mov_b32_e32(v[3], 1), ins.v_cndmask_b32_e32(v[2], 0, v[3]), STORE) == [0] * 8 + [1] * 56
    )


def test_rows_and_banks_that_dpp_masks_keep_their_words():
    moved = ins.VOP1_DPP16(
        ins.VOP1Op.V_MOV_B32_E32,
        vdst=v[2],
        src0=DPP,
        vsrc0=v[0],
        dpp=0x141,
        row_mask=0xD,
        bank_mask=0xE,
        bc=1,
    )
    wanted = [5 if (i % 32) // 16 == 1 or i % 16 < 4 else i ^ 7 for i in range(64)]
    assert ran(v_mov_b32_e32(v[2], 5), moved, STORE) == wanted


def test_lanes_without_a_source_keep_their_words_unless_bounds_give_zero():
    for bounds, other in ((0, 5), (1, 0)):
        moved = ins.VOP1_DPP16(
            ins.VOP1Op.V_MOV_B32_E32,
            vdst=v[2],
            src0=DPP,
            vsrc0=v[0],
            dpp=0x111,
            row_mask=15,
            bank_mask=15,
            bc=bounds,
        )
        assert ran(v_mov_b32_e32(v[2], 5), moved, STORE) == [i - 1 if i % 16 else other for i in range(64)]


RAW = (
    s_mov_b32(s[8], s[2]),
    s_mov_b32(s[9], s[3]),
    s_mov_b32(s[10], 128),  # bytes of the buffer: half of it
    s_mov_b32(s[11], 0x31027000),
)


def through_a_buffer(*before, offset: int = 0) -> list[int]:
    load = ins.buffer_load_b32(vdata=v[2], vaddr=v[1], srsrc=s[8:11], soffset=s[12], offset=offset, offen=1)
    return ran(*RAW, s_mov_b32(s[12], 0), *before, load, LOADS_ARE_DONE, STORE)


def test_a_buffer_gives_zeros_beyond_its_end_and_its_offsets_wrap():
    assert through_a_buffer() == [100 + i if i < 32 else 0 for i in range(64)]
    low = v_add_nc_u32_e32(v[1], -4, v[1])  # the first lane's offset is 2^32 - 4
    back = v_add_nc_u32_e32(v[1], 4, v[1])
    load = ins.buffer_load_b32(vdata=v[2], vaddr=v[1], srsrc=s[8:11], soffset=0, offset=4, offen=1)
    assert ran(*RAW, low, load, LOADS_ARE_DONE, back, STORE) == [100 + i if i < 32 else 0 for i in range(64)]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ((s_mov_b32(s[10], 126),), "across the end of its buffer"),
        ((s_mov_b32(s[10], 512),), "bytes at byte 256 of `words`"),
        ((ins.s_or_b32(s[9], s[9], 0x40000),), "not one of raw memory"),
        ((s_mov_b32(s[11], 0x21027000),), "not one of raw memory"),
    ],
)
def test_a_buffer_with_a_stride_or_another_end_than_its_memory_is_refused(before, why):
    further = (v_add_nc_u32_e32(v[1], 4, v[1]),) if "256" in why else ()
    with pytest.raises(Fault, match=why):
        through_a_buffer(*before, *further)


@pytest.mark.parametrize("counter", ["vm", "lgkm"])
def test_a_wait_for_another_counter_or_for_too_few_is_none(counter):
    second = global_load_b32(vdst=v[5], addr=v[1], saddr=s[2:3])
    one_left, both = s_waitcnt(simm16=0x07F7), LOADS_ARE_DONE
    assert ran(LOAD, second, one_left, v_add_nc_u32_e32(v[2], 1, v[2]), both, STORE)[0] == 101
    wait = one_left if counter == "vm" else LDS_IS_DONE
    with pytest.raises(Fault, match="used before the load counter is waited for"):
        ran(LOAD, second, wait, v_add_nc_u32_e32(v[5], 1, v[5]))
    with pytest.raises(Fault, match="s8 is used before the scalar counter"):  # these end in any order
        ran(
            ins.s_load_b32(s[8], s[2:3]),
            ins.s_load_b32(s[9], s[2:3]),
            s_waitcnt(simm16=0xFC17),
            v_mov_b32_e32(v[2], s[8]),
        )


def test_two_operations_of_one_instruction_read_before_either_writes():
    swap = ins.VOPD(
        ins.VOPDOp.V_DUAL_MOV_B32, ins.VOPDOp.V_DUAL_MOV_B32, vdstx=v[2], vdsty=v[5], srcx0=v[5], srcy0=v[2]
    )
    joined = (v_lshlrev_b32_e32(v[5], 8, v[5]), ins.v_or_b32_e32(v[2], v[2], v[5]))
    assert ran(v_mov_b32_e32(v[2], 3), v_mov_b32_e32(v[5], 4), swap, *joined, STORE) == [4 | 3 << 8] * VALUES


@pytest.mark.parametrize(
    ("sel", "sext", "dst_sel", "unused", "wanted"),
    [
        (0, 0, 6, 0, 0x80),
        (0, 1, 6, 0, 0xFFFFFF80),
        (3, 0, 6, 0, 0xA1),
        (5, 1, 6, 0, 0xFFFFA1B2),
        (4, 0, 1, 0, 0x8000),  # the lowest byte of the half, put into byte 1; zeros elsewhere
        (4, 0, 1, 2, 0x11228044),  # the others are kept
        (5, 0, 5, 2, 0xA1B23344),
    ],
)
def test_a_part_of_a_word_is_taken_and_put_as_sdwa_says(sel, sext, dst_sel, unused, wanted):
    moved = cdna.VOP1_SDWA(
        cdna.VOP1Op.V_MOV_B32_E32,
        vdst=v[2],
        src0=SDWA,
        vsrc0=v[4],
        src0_sel=sel,
        src0_sext=sext,
        dst_sel=dst_sel,
        dst_unused=unused,
    )
    begin = (cdna.v_mov_b32_e32(v[4], 0xA1B2C380), cdna.v_mov_b32_e32(v[2], 0x11223344))
    assert ran(*begin, moved, CDNA_STORE, target="gfx90a") == [wanted] * VALUES


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (0, [i & ~15 | 3 for i in range(64)]),  # every selector is 3
        (1, [(i & ~15 ^ 16) | 3 for i in range(64)]),
    ],
)
def test_lanes_of_a_row_or_of_its_neighbour_are_picked(source, wanted):
    made = (ins.v_permlane16_b32, ins.v_permlanex16_b32)[source]
    words = (s_mov_b32(s[8], 0x33333333), v_mov_b32_e32(v[2], 0))
    assert ran(*words, made(v[2], v[0], s[8], s[8]), STORE) == wanted


def test_a_lane_that_is_off_gives_zero_to_others():
    shift = (ins.v_add_nc_u32_e32(v[3], 4, v[1]), ins.v_mov_b32_e32(v[2], 77))
    taken = ins.ds_bpermute_b32(vdst=v[2], addr=v[3], data0=v[0])
    off = s_mov_b32(EXEC_LO, 0x0000FFFF)  # of each wave's lanes
    body = (*shift, off, taken, LDS_IS_DONE, s_mov_b32(EXEC_LO, -1), STORE)
    assert ran(*body) == [i + 1 if i % 32 < 15 else 0 if i % 32 == 15 else 77 for i in range(64)]


def test_offsets_of_memory_and_of_two_places_in_lds():
    forth = v_add_nc_u32_e32(v[3], 8, v[1])
    back = global_load_b32(vdst=v[2], addr=v[3], saddr=s[2:3], offset=-8)
    assert ran(forth, back, LOADS_ARE_DONE, ins.v_add_nc_u32_e32(v[2], 1, v[2]), STORE)[:2] == [101, 102]
    put = ins.ds_store_2addr_stride64_b32(addr=v[1], data0=v[0], data1=v[1], offset0=0, offset1=1)
    take = ins.ds_load_2addr_b32(vdst=v[4:5], addr=v[3], offset0=0, offset1=64)
    body = (put, LDS_IS_DONE, s_barrier(), v_mov_b32_e32(v[3], v[1]), take, LDS_IS_DONE)
    total = ins.v_add_nc_u32_e32(v[2], v[4], v[5])
    assert ran(*body, total, STORE, lds=512) == [5 * i for i in range(64)]


def test_arguments_come_before_the_numbers_of_groups_as_the_descriptor_says():
    """A packet, the arguments' address, a preloaded word (the second of the arguments), the group's x."""
    descriptor = Descriptor(0, 0, 12, 3, 0xF0003, 5 << 1 | 1 << 7, 0b1010, 1 | 1 << 7)
    load = cdna.s_load_dwordx2(s[8:9], s[2:3], offset=0, imm=1)
    store = cdna.global_store_dword(addr=v[4], data=v[2], saddr=s[8:9])
    body = (
        load,
        cdna.s_waitcnt(simm16=0xC07F),
        cdna.v_lshlrev_b32_e32(v[4], 2, v[0]),
        cdna.s_lshl_b32(s[6], s[5], 8),
        cdna.s_or_b32(s[6], s[6], s[4]),
        cdna.v_mov_b32_e32(v[2], s[6]),
        store,
        cdna.s_endpgm(),
    )
    words = started(body, descriptor, b"\0" * 4 + (9).to_bytes(4, "little") + b"\0" * 4, threads=3)
    assert words[:4] == [9, 9, 9, 103]
