"""What PTX instructions compute, by numpy: exactly, and with PTX's bits for a NaN that is computed."""

from collections.abc import Callable, Sequence

import numpy as np
from ptx_text import Operand

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes
WHOLE = {f"{kind}{8 * size}": of for size, of in UNSIGNED.items() for kind in "bu"}
WHOLE |= {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
TYPES = {**WHOLE, "f32": np.float32, "pred": np.bool_}
_WIDE = {np.uint16: np.uint32, np.int16: np.int32, np.uint32: np.uint64, np.int32: np.int64}

Function = Callable[..., np.ndarray]
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ORDERED = {"min": np.minimum, "max": np.maximum}
_ADDED = {"add": np.add, "sub": np.subtract}
REDUCED = {**_BITWISE, **_ORDERED, "add": np.add}
_COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
_COMPARED |= {"gt": np.greater, "ge": np.greater_equal}


def function(opcode: str, last: Operand) -> tuple[Function, Sequence[type]]:
    """What computes an instruction's result, of its type, and the types of its sources.

    `last` is the last operand, which may be a table. bfloat16 is uint16. KeyError for what isn't known.
    """
    match opcode.split("."):
        case ["mov", kind]:
            return lambda a: a, [TYPES[kind]]
        case ["add" | "sub" as name, "f32"]:
            return _floating(_ADDED[name]), [np.float32] * 2
        case ["mul", "f32"]:
            return _floating(np.multiply), [np.float32] * 2
        case ["add" | "min" | "max" as name, "s16x2" | "u16x2" as kind]:
            return _by_halves(REDUCED[name], TYPES[kind[:3]]), [np.uint32] * 2
        case ["add" | "sub" as name, kind]:
            return _ADDED[name], [WHOLE[kind]] * 2
        case ["min" | "max" as name, kind]:
            return _ORDERED[name], [WHOLE[kind]] * 2
        case ["and" | "or" | "xor" as name, "pred" | "b16" | "b32" | "b64" as kind]:
            return _BITWISE[name], [TYPES[kind]] * 2
        case ["not", "pred" | "b16" | "b32" | "b64" as kind]:
            return np.invert, [TYPES[kind]]
        case ["neg", kind]:
            return np.negative, [WHOLE[kind]]
        case ["mul", "lo", kind]:
            return np.multiply, [WHOLE[kind]] * 2
        case ["mad", "lo", kind]:
            return lambda a, b, c: a * b + c, [WHOLE[kind]] * 3
        case ["mul", "wide", kind]:
            of, wide = WHOLE[kind], _WIDE[WHOLE[kind]]
            return lambda a, b: a.astype(wide) * b, [of, of]
        case ["mad", "wide", kind]:
            of, wide = WHOLE[kind], _WIDE[WHOLE[kind]]
            return lambda a, b, c: a.astype(wide) * b + c, [of, of, wide]
        case ["shl" | "shr" as name, kind]:
            return (_shifted_left if name == "shl" else _shifted_right), [WHOLE[kind], np.uint32]
        case ["bfe", "u32" | "s32" as kind]:
            return _field, [WHOLE[kind], np.uint32, np.uint32]
        case ["setp", comparison, kind]:
            return _COMPARED[comparison], [WHOLE[kind]] * 2
        case ["selp", kind]:
            return lambda a, b, p: np.where(p, a, b), [TYPES[kind], TYPES[kind], np.bool_]
        case ["prmt", "b32"]:
            return _permuted, [np.uint32] * 3
        case ["lop3", "b32"]:
            return lambda a, b, c, _: _logic(a, b, c, last), [np.uint32] * 4
        case ["cvt", "f32", "bf16"]:
            return _from_bfloat16, [np.uint16]
        case ["cvt", "rn", "bf16", "f32"]:
            return _to_bfloat16, [np.float32]
        case ["cvt", "rn", "bf16x2", "f32"]:
            return lambda a, b: _pair(_to_bfloat16(b), _to_bfloat16(a)), [np.float32] * 2
        case ["cvt", to, kind]:
            whole = WHOLE[to]
            return lambda a: a.astype(whole), [WHOLE[kind]]
        case ["div", "s32"]:  # towards zero
            return lambda a, b: np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b), [np.int32] * 2
        case ["div", "full", "f32"]:  # a GPU may miss the last bits
            return _floating(lambda a, b: a / b), [np.float32] * 2
        case ["ex2", "approx", "f32"]:  # likewise
            return _floating(np.exp2), [np.float32]
        case ["fma", "rn", "f32"]:
            return _floating(lambda *of: _fused(*of).astype(np.float32)), [np.float32] * 3
        case ["fma", "rn", "bf16x2"]:
            fused = _by_halves(lambda *of: _to_bfloat16(_fused(*map(_from_bfloat16, of))), np.uint16)
            return fused, [np.uint32] * 3
    raise KeyError(opcode)


def _shifted_left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = a.itemsize * 8
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shifted_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = a.itemsize * 8
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, a.dtype.type(0))


def _field(a: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`count` bits from `first` on, extended by the field's sign where `a` has one."""
    wide = a.astype(np.int64) >> np.minimum(first & 255, 63).astype(np.int64)
    spare = 64 - np.minimum(count & 255, 32).astype(np.int64)
    raised = np.where(spare < 64, wide << np.minimum(spare, 63), 0)
    of = np.int64 if a.dtype.kind == "i" else np.uint64
    return (raised.view(of) >> np.minimum(spare, 63).astype(of)).astype(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes of eight; a nibble of 8 and more takes only the byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros(1, np.uint32)
    for i in range(4):
        chosen = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (chosen & np.uint32(7)))).astype(np.uint8)
        byte = np.where(chosen & np.uint32(8), (byte >> 7) * np.uint8(255), byte)
        found = found | byte.astype(np.uint32) << np.uint32(8 * i)
    return found


def _logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    found = np.zeros(1, np.uint32)
    for i in (i for i in range(8) if table >> i & 1):
        found = found | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _floating(computed: Function) -> Function:
    """The bits of float32 results."""

    def bits(*values: np.ndarray) -> np.ndarray:
        found = computed(*values)
        return np.where(np.isnan(found), np.uint32(0x7FFFFFFF), found.view(np.uint32))

    return bits


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(value: np.ndarray) -> np.ndarray:
    """The bits of floating-point numbers rounded once, to the nearest even."""
    value = value.astype(np.float64)
    step = np.maximum(np.frexp(value)[1], -125) - 8  # the exponent of a last bit
    rounded = np.ldexp(np.rint(np.ldexp(value, -step)), step).astype(np.float32)
    bits = (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), bits)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64, rounded to odd where it isn't exact: rounding it again is as rounding once."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    even = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    return (bits + even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64)


def _by_halves(computed: Function, of: type) -> Function:
    """The same for both 16-bit halves of words."""

    def both(*words: np.ndarray) -> np.ndarray:
        lower, upper = (
            computed(*((word >> np.uint32(shift)).astype(np.uint16).view(of) for word in words))
            for shift in (0, 16)
        )
        return _pair(lower.view(np.uint16), upper.view(np.uint16))

    return both


def _pair(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    return lower.astype(np.uint32) | upper.astype(np.uint32) << np.uint32(16)
