"""What AMD's arithmetic instructions compute, on numpy's arrays: one entry for each operation.

Names are RDNA 3's, without `_E32` and `_E64`; CDNA's and RDNA 4's other names for the same are in `RENAMED`.
A signature is a result's type and those of the sources. Besides types it has `scc` (the scalar condition),
 `mask` (a bit for each lane, from VCC or a scalar register) and `old` (what the destination holds).
A function returns the result, or the result and what goes into SCC or a mask.

`test_operations.py` compares each with AMD's own pseudocode.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

U16, U32, U64, I32, I64, F32 = np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32
TYPES = {
    "u16": U16,
    "i16": np.int16,
    "f16": np.float16,
    "u32": U32,
    "i32": I32,
    "f32": F32,
    "u64": U64,
    "i64": I64,
    "f64": np.float64,
}
NAN = np.uint32(0x7FC00000)  # what AMD's units give where no operand was NaN; x86 sets the sign

Result = np.ndarray | tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Operation:
    """The types of the results and of the sources, and the function."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Result]


def _shift(a: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """By the lowest bits of `by` that can be a distance in that type."""
    distance = by.astype(a.dtype) & a.dtype.type(a.itemsize * 8 - 1)
    return a << distance if left else a >> distance


def shl(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    return _shift(a, by, True)


def shr(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    return _shift(a, by, False)


def field(a: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`count` bits of 32 from `first` on, extended by their highest bit where `a` is signed."""
    value = (a.view(U32) if a.dtype.kind == "u" else a).astype(I64) >> first.astype(I64)
    spare = I64(64) - np.minimum(count, 32).astype(I64)
    raised = np.where(spare < 64, value << np.minimum(spare, 63), 0)
    if a.dtype.kind == "i":
        return (raised >> np.minimum(spare, 63)).astype(I32)
    return (raised.view(U64) >> np.minimum(spare, 63).astype(U64)).astype(U32)


def _reversed(a: np.ndarray) -> np.ndarray:
    flipped = np.zeros_like(a)
    for i in range(32):
        flipped |= ((a >> U32(i)) & U32(1)) << U32(31 - i)
    return flipped


def permuted(high: np.ndarray, low: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """V_PERM_B32: four bytes of eight, by a selector's bytes; 8 to 11 are signs, 12 zeros, others ones."""
    both = high.astype(U64) << U64(32) | low.astype(U64)
    total = np.zeros(np.broadcast_shapes(both.shape, selector.shape), U32)
    for i in range(4):
        chosen = (selector >> U32(8 * i)) & U32(0xFF)
        byte = (both >> (np.minimum(chosen, 7) * U32(8)).astype(U64)).astype(U32) & U32(0xFF)
        sign = (both >> (np.minimum(chosen - U32(8), 3) * U32(16) + U32(15)).astype(U64)).astype(U32) & U32(1)
        other = np.where(chosen >= 13, U32(0xFF), U32(0))
        value = np.where(chosen < 8, byte, np.where(chosen < 12, sign * U32(0xFF), other))
        total |= value.astype(U32) << U32(8 * i)
    return total


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once: in float64, rounded to odd where it isn't exact, then to float32."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(I64)
    even = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    return (bits + even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64).astype(F32)


def floating(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Makes NaNs that no operand brought AMD's own, and keeps the first operand's, made quiet."""

    def computed(*sources: np.ndarray) -> np.ndarray:
        result = np.asarray(compute(*sources))
        wrong = np.isnan(result)
        if wrong.any():
            words = np.broadcast_to(NAN, result.shape)
            for source in (of for of in sources[::-1] if of.dtype == F32):
                words = np.where(np.isnan(source), source.view(U32) | U32(0x400000), words)
            result = np.where(wrong, words, result.view(U32)).astype(U32).view(F32)
        return result

    return computed


def _saturated(a: np.ndarray) -> np.ndarray:
    """float32 as the nearest unsigned number towards zero; no number is 0."""
    return np.clip(np.nan_to_num(a.astype(np.float64), nan=0.0), 0, 0xFFFFFFFF).astype(U32)


def _exponent(a: np.ndarray) -> np.ndarray:
    return (a.view(U32) >> U32(23) & U32(0xFF)).astype(I32)


def _is_subnormal(a: np.ndarray) -> np.ndarray:
    return (a != 0) & (np.abs(a) < np.finfo(F32).tiny)


def _division_scaled(a: np.ndarray, below: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V_DIV_SCALE_F32: the denominator or numerator `a` raised where the quotient's steps need it."""
    distance, small = _exponent(above) - _exponent(below), _is_subnormal(above / below)
    none = (above == 0) | (below == 0)
    far = distance >= 96
    whole = np.where(
        far,
        a == below,
        _is_subnormal(below) | np.where(small, a == above, _exponent(above) <= 23),
    )
    scaled = np.where(whole, a * F32(2.0**64), a)
    return np.where(none, NAN.view(F32), scaled), ~none & (far | ~_is_subnormal(below) & small)


def _division_fixed(a: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP_F32: a quotient, or what a division of these special numbers gives."""
    sign = (below.view(U32) ^ above.view(U32)) & U32(0x80000000)

    def signed(size: np.ndarray | np.float32) -> np.ndarray:
        return (np.asarray(size, F32).view(U32) & U32(0x7FFFFFFF) | sign).view(F32)

    infinite, zero = np.isinf, lambda x: x == 0
    none = zero(below) & zero(above) | infinite(below) & infinite(above)
    cases = [
        (np.isnan(above), above),
        (np.isnan(below), below),
        (none, U32(0xFFC00000).view(F32)),
        (zero(below) | infinite(above), signed(F32(np.inf))),
        (infinite(below) | zero(above), signed(F32(0))),
        (_exponent(above) - _exponent(below) < -150, signed(F32(0))),
    ]
    return np.select([of for of, _ in cases], [value for _, value in cases], signed(a)).astype(F32)


def _carried(a: np.ndarray, b: np.ndarray, carry: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(U64) + b + np.asarray(carry, U64)
    return total.astype(U32), total > 0xFFFFFFFF


def _borrowed(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(I64) - b.astype(I64) - np.asarray(borrow, I64)
    return total.astype(U32), total < 0


def _overflowing(a: np.ndarray, b: np.ndarray, sign: int) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(I64) + sign * b.astype(I64)
    return total.astype(I32), (total > 0x7FFFFFFF) | (total < -0x80000000)


def _multiplied_added(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A product of 64 bits and a sum, and the bit above it."""
    product = a.astype(c.dtype) * b.astype(c.dtype)
    total = product + c
    if c.dtype.kind == "u":
        return total, total < product
    overflow = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) ^ overflow


def _by_halves(compute: Callable[..., np.ndarray], of: type) -> Callable[..., np.ndarray]:
    """Of packed sources: the machine gives each as its lower and upper halves."""

    def both(*halves: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return tuple(compute(*(half[i].view(of) for half in halves)) for i in (0, 1))

    return both


def _set(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return a, a != 0


COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "LT": lambda a, b: a < b,
    "EQ": lambda a, b: a == b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "LG": lambda a, b: (a < b) | (a > b),
    "NE": lambda a, b: a != b,
    "GE": lambda a, b: a >= b,
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
    "NGE": lambda a, b: ~(a >= b),
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "NGT": lambda a, b: ~(a > b),
    "NLE": lambda a, b: ~(a <= b),
    "NEQ": lambda a, b: ~(a == b),
    "NLT": lambda a, b: ~(a < b),
}


_OF_FLOATS = ("O", "U", "NGE", "NLG", "NGT", "NLE", "NEQ", "NLT")


def _ones(a: np.ndarray, count: int) -> np.ndarray:
    return a & a.dtype.type((1 << count) - 1)


# the signature, then what is computed; scalar results that set SCC are pairs
_TABLE: dict[str, tuple[str, Callable[..., Result]]] = {
    "S_MOV_B32": ("u32 u32", lambda a: a),
    "S_MOV_B64": ("u64 u64", lambda a: a),
    "S_NOT_B32": ("u32,scc u32", lambda a: _set(~a)),
    "S_NOT_B64": ("u64,scc u64", lambda a: _set(~a)),
    "S_BREV_B32": ("u32 u32", _reversed),
    "S_SEXT_I32_I16": ("i32 i32", lambda a: (a << 16) >> 16),
    "S_SEXT_I32_I8": ("i32 i32", lambda a: (a << 24) >> 24),
    "S_BITSET0_B32": ("u32 u32 old", lambda a, old: old & ~(U32(1) << (a & U32(31)))),
    "S_BITSET1_B32": ("u32 u32 old", lambda a, old: old | U32(1) << (a & U32(31))),
    "S_ADD_U32": ("u32,scc u32 u32", _carried),
    "S_SUB_U32": ("u32,scc u32 u32", _borrowed),
    "S_ADD_I32": ("i32,scc i32 i32", lambda a, b: _overflowing(a, b, 1)),
    "S_SUB_I32": ("i32,scc i32 i32", lambda a, b: _overflowing(a, b, -1)),
    "S_ADDC_U32": ("u32,scc u32 u32 scc", _carried),
    "S_SUBB_U32": ("u32,scc u32 u32 scc", _borrowed),
    "S_ADDK_I32": ("i32,scc old i32", lambda a, b: _overflowing(a.view(I32), b, 1)),
    "S_MULK_I32": ("i32 old i32", lambda a, b: a.view(I32) * b),
    "S_MOVK_I32": ("i32 i32", lambda a: a),
    "S_ADD_U64": ("u64 u64 u64", lambda a, b: a + b),
    "S_SUB_U64": ("u64 u64 u64", lambda a, b: a - b),
    "S_MUL_U64": ("u64 u64 u64", lambda a, b: a * b),
    "S_MIN_I32": ("i32,scc i32 i32", lambda a, b: (np.minimum(a, b), a < b)),
    "S_MIN_U32": ("u32,scc u32 u32", lambda a, b: (np.minimum(a, b), a < b)),
    "S_MAX_I32": ("i32,scc i32 i32", lambda a, b: (np.maximum(a, b), a >= b)),
    "S_MAX_U32": ("u32,scc u32 u32", lambda a, b: (np.maximum(a, b), a >= b)),
    "S_MUL_I32": ("i32 i32 i32", lambda a, b: a * b),
    "S_MUL_HI_U32": ("u32 u32 u32", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32)),
    "S_MUL_HI_I32": ("i32 i32 i32", lambda a, b: (a.astype(I64) * b >> 32).astype(I32)),
    "S_MUL_F32": ("f32 f32 f32", floating(lambda a, b: a * b)),
    "S_ADD_F32": ("f32 f32 f32", floating(lambda a, b: a + b)),
    "S_CSELECT_B32": ("u32 u32 u32 scc", lambda a, b, scc: np.where(scc, a, b)),
    "S_CSELECT_B64": ("u64 u64 u64 scc", lambda a, b, scc: np.where(scc, a, b)),
    "S_BFE_U32": ("u32,scc u32 u32", lambda a, b: _set(field(a, _ones(b, 5), _ones(b >> U32(16), 7)))),
    "S_BFE_I32": ("i32,scc i32 u32", lambda a, b: _set(field(a, _ones(b, 5), _ones(b >> U32(16), 7)))),
    "S_BFM_B32": ("u32 u32 u32", lambda a, b: ((U32(1) << _ones(a, 5)) - U32(1)) << _ones(b, 5)),
    "S_BITCMP0_B32": ("scc u32 u32", lambda a, b: (a >> _ones(b, 5)) & U32(1) == 0),
    "S_BITCMP1_B32": ("scc u32 u32", lambda a, b: (a >> _ones(b, 5)) & U32(1) == 1),
    "S_PACK_LL_B32_B16": ("u32 u32 u32", lambda a, b: _ones(a, 16) | b << U32(16)),
    "S_ABS_I32": ("i32,scc i32", lambda a: _set(np.abs(a))),
    "S_BCNT1_I32_B32": ("u32,scc u32", lambda a: _set(np.bitwise_count(a).astype(U32))),
    "S_BCNT1_I32_B64": ("u32,scc u64", lambda a: _set(np.bitwise_count(a).astype(U32))),
    "V_MOV_B32": ("u32 u32", lambda a: a),
    "V_MOV_B64": ("u64 u64", lambda a: a),
    "V_MOV_B16": ("u16 u16", lambda a: a),
    "V_NOT_B32": ("u32 u32", lambda a: ~a),
    "V_BFREV_B32": ("u32 u32", _reversed),
    "V_CNDMASK_B32": ("u32 u32 u32 mask", lambda a, b, mask: np.where(mask, b, a)),
    "V_CNDMASK_B16": ("u16 u16 u16 mask", lambda a, b, mask: np.where(mask, b, a)),
    "V_ADD_F32": ("f32 f32 f32", floating(lambda a, b: a + b)),
    "V_SUB_F32": ("f32 f32 f32", floating(lambda a, b: a - b)),
    "V_SUBREV_F32": ("f32 f32 f32", floating(lambda a, b: b - a)),
    "V_MUL_F32": ("f32 f32 f32", floating(lambda a, b: a * b)),
    "V_FMA_F32": ("f32 f32 f32 f32", floating(fused)),
    "V_FMAC_F32": ("f32 f32 f32 old", floating(lambda a, b, old: fused(a, b, old.view(F32)))),
    "V_MIN_I32": ("i32 i32 i32", np.minimum),
    "V_MAX_I32": ("i32 i32 i32", np.maximum),
    "V_MIN_U32": ("u32 u32 u32", np.minimum),
    "V_MAX_U32": ("u32 u32 u32", np.maximum),
    "V_MAX3_I32": ("i32 i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_AND_B32": ("u32 u32 u32", lambda a, b: a & b),
    "V_OR_B32": ("u32 u32 u32", lambda a, b: a | b),
    "V_XOR_B32": ("u32 u32 u32", lambda a, b: a ^ b),
    "V_AND_B16": ("u16 u16 u16", lambda a, b: a & b),
    "V_OR_B16": ("u16 u16 u16", lambda a, b: a | b),
    "V_ADD_U32": ("u32 u32 u32", lambda a, b: a + b),
    "V_SUB_U32": ("u32 u32 u32", lambda a, b: a - b),
    "V_SUBREV_U32": ("u32 u32 u32", lambda a, b: b - a),
    "V_ADD3_U32": ("u32 u32 u32 u32", lambda a, b, c: a + b + c),
    "V_ADD_LSHL_U32": ("u32 u32 u32 u32", lambda a, b, c: shl(a + b, c)),
    "V_LSHL_ADD_U32": ("u32 u32 u32 u32", lambda a, b, c: shl(a, b) + c),
    "V_LSHL_ADD_U64": ("u64 u64 u32 u64", lambda a, b, c: (a << _ones(b, 3).astype(U64)) + c),
    "V_LSHL_OR_B32": ("u32 u32 u32 u32", lambda a, b, c: shl(a, b) | c),
    "V_AND_OR_B32": ("u32 u32 u32 u32", lambda a, b, c: a & b | c),
    "V_OR3_B32": ("u32 u32 u32 u32", lambda a, b, c: a | b | c),
    "V_XOR3_B32": ("u32 u32 u32 u32", lambda a, b, c: a ^ b ^ c),
    "V_XAD_U32": ("u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "V_BFI_B32": ("u32 u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "V_BFE_U32": ("u32 u32 u32 u32", lambda a, b, c: field(a, _ones(b, 5), _ones(c, 5))),
    "V_BFE_I32": ("i32 i32 u32 u32", lambda a, b, c: field(a, _ones(b, 5), _ones(c, 5))),
    "V_ALIGNBIT_B32": (
        "u32 u32 u32 u32",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b) >> _ones(c, 5).astype(U64)).astype(U32),
    ),
    "V_PERM_B32": ("u32 u32 u32 u32", permuted),
    "V_MUL_LO_U32": ("u32 u32 u32", lambda a, b: a * b),
    "V_MUL_HI_U32": ("u32 u32 u32", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32)),
    "V_MUL_HI_I32": ("i32 i32 i32", lambda a, b: (a.astype(I64) * b >> 32).astype(I32)),
    "V_MUL_U32_U24": ("u32 u32 u32", lambda a, b: _ones(a, 24) * _ones(b, 24)),
    "V_MAD_U32_U24": ("u32 u32 u32 u32", lambda a, b, c: _ones(a, 24) * _ones(b, 24) + c),
    "V_MAD_U64_U32": ("u64,mask u32 u32 u64", _multiplied_added),
    "V_MAD_I64_I32": ("i64,mask i32 i32 i64", _multiplied_added),
    "V_ADD_CO_U32": ("u32,mask u32 u32", _carried),
    "V_SUB_CO_U32": ("u32,mask u32 u32", _borrowed),
    "V_SUBREV_CO_U32": ("u32,mask u32 u32", lambda a, b: _borrowed(b, a)),
    "V_ADD_CO_CI_U32": ("u32,mask u32 u32 mask", _carried),
    "V_SUB_CO_CI_U32": ("u32,mask u32 u32 mask", _borrowed),
    "V_SUBREV_CO_CI_U32": ("u32,mask u32 u32 mask", lambda a, b, mask: _borrowed(b, a, mask)),
    "V_LSHLREV_B32": ("u32 u32 u32", lambda a, b: shl(b, a)),
    "V_LSHRREV_B32": ("u32 u32 u32", lambda a, b: shr(b, a)),
    "V_ASHRREV_I32": ("i32 i32 i32", lambda a, b: shr(b, a)),
    "V_LSHLREV_B16": ("u16 u16 u16", lambda a, b: shl(b, a)),
    "V_LSHRREV_B16": ("u16 u16 u16", lambda a, b: shr(b, a)),
    "V_ASHRREV_I16": ("i16 u16 i16", lambda a, b: shr(b, a)),
    "V_LSHLREV_B64": ("u64 u32 u64", lambda a, b: shl(b, a)),
    "V_LSHRREV_B64": ("u64 u32 u64", lambda a, b: shr(b, a)),
    "V_ASHRREV_I64": ("i64 u32 i64", lambda a, b: shr(b, a)),
    "V_CVT_F32_U32": ("f32 u32", lambda a: a.astype(F32)),
    "S_CVT_F32_U32": ("f32 u32", lambda a: a.astype(F32)),
    "S_CVT_U32_F32": ("u32 f32", _saturated),
    "S_FMAC_F32": ("f32 f32 f32 old", floating(lambda a, b, old: fused(a, b, old.view(F32)))),
    "S_FMAAK_F32": ("f32 f32 f32 f32", floating(fused)),
    "V_S_RCP_F32": ("f32 f32", floating(lambda a: F32(1) / a)),
    "S_CVT_F32_I32": ("f32 i32", lambda a: a.astype(F32)),
    "V_CVT_F32_I32": ("f32 i32", lambda a: a.astype(F32)),
    "V_CVT_U32_F32": ("u32 f32", _saturated),
    "V_RCP_F32": ("f32 f32", floating(lambda a: F32(1) / a)),  # a card's may be off by a last bit, these too:
    "V_EXP_F32": ("f32 f32", floating(lambda a: np.exp2(a.astype(np.float64)).astype(F32))),
    "V_LDEXP_F32": (
        "f32 f32 i32",
        floating(lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b, -400, 400)).astype(F32)),
    ),
    "V_DIV_SCALE_F32": ("f32,mask f32 f32 f32", _division_scaled),
    "V_DIV_FMAS_F32": (
        "f32 f32 f32 f32 mask",
        lambda a, b, c, mask: floating(fused)(a, b, c) * np.where(mask, F32(2.0**32), F32(1)),
    ),
    "V_DIV_FIXUP_F32": ("f32 f32 f32 f32", _division_fixed),
    "V_CVT_U32_U16": ("u32 u16", lambda a: a.astype(U32)),
    "V_CVT_I32_I16": ("i32 i16", lambda a: a.astype(I32)),
    "V_PK_LSHLREV_B16": ("pk pk pk", _by_halves(lambda a, b: shl(b, a), U16)),
    "V_PK_LSHRREV_B16": ("pk pk pk", _by_halves(lambda a, b: shr(b, a), U16)),
    "V_PK_ADD_U16": ("pk pk pk", _by_halves(lambda a, b: a + b, U16)),
    "V_PK_MUL_F32": ("pk32 pk32 pk32", _by_halves(floating(lambda a, b: a * b), F32)),
    "V_PK_ADD_F32": ("pk32 pk32 pk32", _by_halves(floating(lambda a, b: a + b), F32)),
    "V_PK_FMA_F32": ("pk32 pk32 pk32 pk32", _by_halves(floating(fused), F32)),
    "V_PK_MOV_B32": ("pk32 pk32 pk32", lambda a, b: (a[0], b[0])),
}
for _name, _by in (("LSHL", shl), ("LSHR", shr)):
    _TABLE[f"S_{_name}_B32"] = ("u32,scc u32 u32", lambda a, b, by=_by: _set(by(a, b)))
    _TABLE[f"S_{_name}_B64"] = ("u64,scc u64 u32", lambda a, b, by=_by: _set(by(a, b)))
for _bits in (32, 64):
    _TABLE[f"S_ASHR_I{_bits}"] = (f"i{_bits},scc i{_bits} u32", lambda a, b: _set(shr(a, b)))
    for _type in ("u", "i"):
        for _name, _by in COMPARISONS.items():
            kind = f"{_type}{_bits}"
            if (
                _name in _OF_FLOATS
                or _name == "NE"
                or (_bits == 64 and (_type == "i" or _name not in ("EQ", "LG")))
            ):
                continue
            _TABLE[f"S_CMP_{_name}_{kind.upper()}"] = (f"scc {kind} {kind}", _by)
    _LOGIC = {
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
        "AND_NOT1": lambda a, b: a & ~b,
        "OR_NOT1": lambda a, b: a | ~b,
    }
    for _name, _by in _LOGIC.items():
        of = f"u{_bits}"
        _TABLE[f"S_{_name}_B{_bits}"] = (f"{of},scc {of} {of}", lambda a, b, by=_by: _set(by(a, b)))
for _name, _by in COMPARISONS.items():
    if _name != "NE":
        _TABLE[f"S_CMP_{_name}_F32"] = ("scc f32 f32", _by)
    for kind in ("f32", "u16", "i16", "u32", "i32", "u64", "i64"):
        if _name in (("NE",) if kind[0] == "f" else ("LG", *_OF_FLOATS)):
            continue
        _TABLE[f"V_CMP_{_name}_{kind.upper()}"] = (f"mask {kind} {kind}", _by)
_TABLE |= {
    f"S_CMPK_{name}_{kind.upper()}": (f"scc old {kind}", lambda a, b, by=by: by(a.view(b.dtype), b))
    for name, by in COMPARISONS.items()
    for kind in ("u32", "i32")
    if name != "NE" and name not in _OF_FLOATS
}

OPERATIONS = {
    name: Operation(tuple(results.split(",")), tuple(sources), compute)
    for name, (signature, compute) in _TABLE.items()
    for results, *sources in [signature.split()]
}

_SIZES = {"BYTE": "8", "SHORT": "16", "DWORD": "32", "DWORDX2": "64", "DWORDX3": "96", "DWORDX4": "128"}
_SIZES |= {"DWORDX8": "256", "DWORDX16": "512"}
RENAMED = {
    "V_ADDC_CO_U32": "V_ADD_CO_CI_U32",
    "V_SUBB_CO_U32": "V_SUB_CO_CI_U32",
    "V_SUBBREV_CO_U32": "V_SUBREV_CO_CI_U32",
    "V_ADD_NC_U32": "V_ADD_U32",
    "V_SUB_NC_U32": "V_SUB_U32",
    "V_SUBREV_NC_U32": "V_SUBREV_U32",
    "V_MAD_CO_U64_U32": "V_MAD_U64_U32",
    "V_MAD_CO_I64_I32": "V_MAD_I64_I32",
    "S_ADD_CO_I32": "S_ADD_I32",
    "S_SUB_CO_I32": "S_SUB_I32",
    "S_ADD_CO_U32": "S_ADD_U32",
    "S_SUB_CO_U32": "S_SUB_U32",
    "S_ADD_CO_CI_U32": "S_ADDC_U32",
    "S_ADD_NC_U64": "S_ADD_U64",
    "S_SUB_NC_U64": "S_SUB_U64",
    "S_ADDK_CO_I32": "S_ADDK_I32",
    "V_RCP_IFLAG_F32": "V_RCP_F32",
    "GLOBAL_ATOMIC_ADD": "GLOBAL_ATOMIC_ADD_U32",
    "GLOBAL_ATOMIC_ADD_X2": "GLOBAL_ATOMIC_ADD_U64",
}
for _of in (32, 64):
    RENAMED |= {f"S_ANDN2_B{_of}": f"S_AND_NOT1_B{_of}", f"S_ORN2_B{_of}": f"S_OR_NOT1_B{_of}"}
    RENAMED |= {f"S_ANDN2_SAVEEXEC_B{_of}": f"S_AND_NOT1_SAVEEXEC_B{_of}"}
for _unit in ("GLOBAL", "BUFFER", "FLAT", "SCRATCH", "S"):
    for _old, _bits in _SIZES.items():
        _kinds = (("U", "U"), ("S", "I")) if _bits in ("8", "16") else (("", "B"),)
        for _sign, _new in _kinds:
            RENAMED[f"{_unit}_LOAD_{_sign}{_old}"] = f"{_unit}_LOAD_{_new}{_bits}"
        RENAMED[f"{_unit}_STORE_{_old}"] = f"{_unit}_STORE_B{_bits}"
        for _high in ("", "_HI"):
            RENAMED[f"{_unit}_LOAD_{_old}_D16{_high}"] = f"{_unit}_LOAD_D16{_high}_B{_bits}"
            RENAMED[f"{_unit}_LOAD_U{_old}_D16{_high}"] = f"{_unit}_LOAD_D16{_high}_U{_bits}"
            RENAMED[f"{_unit}_STORE_{_old}_D16{_high}"] = f"{_unit}_STORE_D16{_high}_B{_bits}"


def common_name(name: str) -> str:
    """The name of an operation in the tables here, for an architecture's own."""
    name = name.removesuffix("_E32").removesuffix("_E64")
    if name.startswith("DS_"):
        name = (
            name.replace("READ2", "LOAD_2ADDR").replace("WRITE2", "STORE_2ADDR").replace("ST64", "_STRIDE64")
        )
        name = name.replace("DS_READ", "DS_LOAD").replace("DS_WRITE", "DS_STORE")
        name = re.sub(r"DS_(LOAD|STORE)_([UIB]\d+)_(D16(?:_HI)?)", r"DS_\1_\3_\2", name)
    return RENAMED.get(name, name)
