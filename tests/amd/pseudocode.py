"""Evaluates the pseudocode of AMD's manuals, as tinygrad's tables have it, for one lane: in whole numbers.

The text is turned into Python's by a few replacements. A value keeps its bits, and is seen through a type:
`S0.u32`, `S1[4 : 0].u32`. Only arithmetic is known here: what reads or writes one lane, SCC, VCC and EXEC.
"""

import re
import struct
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
from code_object import ARCHITECTURES
from operations import common_name
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE as CDNA
from tinygrad.runtime.autogen.amd.rdna3.str_pcode import PCODE as RDNA3
from tinygrad.runtime.autogen.amd.rdna4.str_pcode import PCODE as RDNA4

_TEXTS = {"cdna": CDNA, "rdna3": RDNA3, "rdna4": RDNA4}
assert set(_TEXTS) == set(ARCHITECTURES.values())


class Bits(int):
    """Bits that can be seen as a type, or cut."""

    def __getattr__(self, kind: str):
        return seen(int(self), kind)

    def __getitem__(self, key):
        if not isinstance(key, slice):
            return Bits(int(self) >> int(key) & 1)
        high, low = int(key.start), int(key.stop)
        if high < low:  # in reverse order
            return Bits(sum((int(self) >> i & 1) << low - i for i in range(high, low + 1)))
        return Bits(int(self) >> low & (1 << high - low + 1) - 1)


def seen(word: int, kind: str):
    """A word as a type's number."""
    size = int(kind[1:])
    word &= (1 << size) - 1
    if kind[0] == "f":
        return {16: np.float16, 32: np.float32, 64: np.float64}[size](_unpacked(word, size))
    if kind[0] == "i" and word >> size - 1:
        return Bits(word - (1 << size))
    return Bits(word)


def _unpacked(word: int, size: int) -> float:
    return struct.unpack({16: "<e", 32: "<f", 64: "<d"}[size], word.to_bytes(size // 8, "little"))[0]


def _word(value: object, kind: str) -> int:
    size = int(kind[1:])
    if kind[0] == "f":
        of = {16: np.float16, 32: np.float32, 64: np.float64}[size]
        return int(of(value).view({16: np.uint16, 32: np.uint32, 64: np.uint64}[size]))
    return int(value) & (1 << size) - 1


def _cast(size: int, kind: str, value: object):
    if kind == "F":
        return np.float64(value) if size == 64 else np.float32(value)
    return seen(int(value), f"{'i' if kind == 'I' else 'u'}{size}")


def _joined(*parts: tuple[object, int]) -> Bits:
    total = 0
    for value, size in parts:
        total = total << size | int(value) & (1 << size) - 1
    return Bits(total)


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """By the definition: exactly, and rounded once."""
    if not all(map(np.isfinite, (a, b, c))):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not exact:
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    size = abs(exact)
    power = max(-126, size.numerator.bit_length() - size.denominator.bit_length() - 1)
    while size >= Fraction(2) ** (power + 1):
        power += 1
    unit = Fraction(2) ** (power - 23)
    rounded = round(size / unit) * unit
    value = np.float32(float(rounded)) if rounded < Fraction(2) ** 128 else np.float32(np.inf)
    return -value if exact < 0 else np.float32(value) if exact > 0 else value


def _sign_from_bit(value: int, bits: int) -> int:
    bits = int(bits)
    return 0 if bits == 0 else int(value) | -1 << bits if int(value) >> bits - 1 & 1 else int(value)


class Special(float):
    """INF and NAN, which the text gives a type; also DENORM, which nothing equals where it is float64's."""

    f32 = f64 = property(np.float64)


class _Two(float):
    """A base whose power goes on where a number of 64 bits would end."""

    def __pow__(self, by: int) -> np.float64:
        return np.ldexp(np.float64(1), max(-1000, min(1000, int(by))))


_FUNCTIONS = {
    "seen": seen,
    "cast": _cast,
    "joined": _joined,
    "fma": _fma,
    "isNAN": lambda value: bool(np.isnan(value)),
    "signext": lambda value: value,
    "signext_from_bit": _sign_from_bit,
    "i32_to_f32": np.float32,
    "u32_to_f32": np.float32,
    "f32_to_u32": lambda value: (
        0 if np.isnan(value) else max(0, min(0xFFFFFFFF, int(np.clip(value, -1, 2.0**33))))
    ),
    "isSUBNORMAL": lambda value: bool(value != 0 and abs(np.float32(value)) < np.finfo(np.float32).tiny),
    "exponent": lambda value: int(np.float32(value).view(np.uint32)) >> 23 & 0xFF,
    "sign": lambda value: bool(np.signbit(value)),
    "ldexp": lambda value, by: np.ldexp(np.float64(value), by),
    "pow": lambda base, by: np.float64(base) ** np.float64(by),
    "cvtToQuietNAN": lambda value: value,
    "INF": Special(float("inf")),
    "DENORM": Special(float("nan")),
    "TWO": _Two(2),
    "UNDERFLOW_F32": 0.0,  # which number it is, the text doesn't say
    "OVERFLOW_F32": np.inf,
    "NAN": Special(float("nan")),
    "v_max_i32": max,
    "v_min_i32": min,
}


@cache
def text_of(name: str, architecture: str) -> str | None:
    """The pseudocode of an operation by its name in `operations`; None where there is none."""
    for table in (architecture, *_TEXTS):
        for op, text in _TEXTS[table].items():
            if common_name(op.name) == name:
                return text
    return None


_TYPE = r"(?:\.[a-z]\d+)"


def _expression(text: str) -> str:
    text = re.sub(r"(\d+)'([UIFB])\(", r"cast(\1, '\2', ", text)
    text = re.sub(r"\b\d+'(0x[0-9a-fA-F]+|\d+)[UI]?\b", r"\1", text)
    text = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)(?:ULL|LL|U|F)\b", r"\1", text)
    text = re.sub(r"^([^()]+) == DENORM\.f32$", r"isSUBNORMAL(\1)", text).replace("2.0 **", "TWO **")
    text = text.replace("32'F(0xffc00000)", "NAN.f32")
    text = text.replace("<>", "!=").replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    text = re.sub(
        r"\{ ([^{},]+)\.([ui])(\d+), ([^{},]+)\.([ui])(\d+) \}", r"joined((\1.u\3, \3), (\4.u\6, \6))", text
    )
    text = re.sub(r"\{ 0, (\S+) \}", r"\1", text)  # zeros above
    chosen = re.fullmatch(r"(.+?) \? (.+) : (.+)", text)
    if chosen:
        return f"(({chosen[2]}) if ({chosen[1]}) else ({chosen[3]}))"
    return text


def evaluate(text: str, given: dict[str, int]) -> dict[str, int]:
    """The variables after the statements; S0, S1, S2, D0, SCC, VCC, EXEC as words. Raises ValueError."""
    state = {"D0": 0, "D1": 0, "laneId": 0, "OPSEL": 0} | given
    if "BYTE_PERMUTE" in text:
        return state | {"D0": _bytes_permuted(state)}
    lines = [line.strip() for line in re.split(r"[;\n]", re.sub(r"//.*", "", text))]
    _run([line for line in lines if line and not line.startswith("declare")], state)
    return state


def _run(lines: list[str], state: dict[str, int]) -> None:
    """Statements; `if` and `for` end with lines of their own."""
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("for "):
            name, first, last = re.fullmatch(r"for (\w+) in (\d+) : (\d+) do", line).groups()
            end = lines.index("endfor", at)
            for number in range(int(first), int(last) + 1):
                state[name] = number
                _run(lines[at + 1 : end], state)
            at = end
        elif line.startswith("if "):
            depth, begins, end = 0, [], at
            while True:
                depth += lines[end].startswith("if ")
                if depth == 1 and lines[end].split()[0] in ("if", "elsif", "else", "endif"):
                    begins.append(end)
                depth -= lines[end] == "endif"
                if not depth:
                    break
                end += 1
            for begin, stop in pairwise(begins):
                condition = lines[begin].removesuffix("then").split(" ", 1)
                if condition[0] == "else" or _value(condition[1].strip(), state):
                    _run(lines[begin + 1 : stop], state)
                    break
            at = end
        else:
            _statement(line, state)
        at += 1


def _value(text: str, state: dict[str, int]):
    return eval(_expression(text), {**_FUNCTIONS, **{name: Bits(value) for name, value in state.items()}})


def _statement(text: str, state: dict[str, int]) -> None:
    added = re.fullmatch(r"(\w+) \+= (.+)", text)
    if added:
        text = f"{added[1]} = {added[1]} + ({_expression(added[2])})"
    *lefts, right = text.split(" = ")
    value = _value(right, state)
    for left in lefts:
        pair = re.fullmatch(r"\{ (\w+)\.\w+, (\w+)\.[ui](\d+) \}", left)
        if pair:
            size = int(pair[3])
            state[pair[1]] = int(value) >> size & 1
            state[pair[2]] = int(value) & (1 << size) - 1
        else:
            _assign(state, left, value)


def _assign(state: dict[str, int], left: str, value: object) -> None:
    name, kind, place, second = re.fullmatch(rf"(\w+)({_TYPE}?)((?:\[.+\])?)({_TYPE}?)", left).groups()
    kind = (second or kind)[1:]
    if not place:
        state[name] = _word(value, kind) if kind else int(value)
        return
    names = {of: Bits(word) for of, word in state.items()}
    bounds = (
        [int(eval(_expression(of), {}, names)) for of in re.split(r" : ", place[1:-1])]
        if place.count("[") == 1
        else [int(eval(_expression(place[1:-1]), {}, names))]
    )
    high, low = (bounds * 2)[:2]
    if high < low:  # all bits in reverse order: the value was reversed when it was read
        state[name] = int(value)
        return
    ones = (1 << high - low + 1) - 1
    word = _word(value, kind) if isinstance(value, np.floating) else int(value)
    state[name] = state.get(name, 0) & ~(ones << low) | (word & ones) << low


def _bytes_permuted(state: dict[str, int]) -> int:
    """V_PERM_B32, whose text defines a function: written from it by hand, byte by byte."""
    data = ((state["S0"] << 32) | state["S1"]).to_bytes(8, "little")
    total = 0
    for i in range(4):
        sel = state["S2"] >> 8 * i & 0xFF
        if sel >= 13:
            byte = 0xFF
        elif sel == 12:
            byte = 0
        elif sel >= 8:
            byte = 0xFF * (data[2 * (sel - 8) + 1] >> 7)
        else:
            byte = data[sel]
        total |= byte << 8 * i
    return total
