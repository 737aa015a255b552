"""What is written by hand in `operations` is what AMD's manuals say, on random and edge operands."""

import random

import numpy as np
import pytest
from operations import OPERATIONS, TYPES
from pseudocode import evaluate, text_of

VECTORS = 200
EDGES = (0, 1, 2, 31, 32, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
FLOATS = (
    0,
    0x80000000,
    1,
    0x007FFFFF,
    0x00800000,
    0x3F800000,
    0xBF800001,
    0x7F7FFFFF,
    0x7F800000,
    0xFF800000,
)
NO_TEXT = {"S_MOVK_I32": "D0.i32 = 32'I(signext(S0.i16))"}  # by the tables' older or newer words for it


def words_of(kind: str, rng: random.Random) -> int:
    bits = 64 if kind[1:] == "64" else 32
    if kind == "f32":
        edge = rng.choice(FLOATS)
        near = rng.randrange(90, 160) << 23 | rng.getrandbits(23) | rng.getrandbits(1) << 31
        return rng.choice((edge, near, near, near))
    edge = rng.choice(EDGES) | (rng.choice(EDGES) << 32 if bits == 64 and rng.getrandbits(1) else 0)
    return rng.choice((edge, rng.getrandbits(bits), rng.getrandbits(bits)))


def array(word: int, kind: str) -> np.ndarray:
    size = int(kind[1:])
    return np.array([word & (1 << size) - 1], np.dtype(f"u{size // 8}")).view(TYPES[kind])


def compared(name: str, count: int = VECTORS, seed: int = 1) -> list[str]:
    """What differs between an operation and its pseudocode, for so many operand vectors."""
    operation, text = OPERATIONS[name], text_of(name, "rdna3")
    text = NO_TEXT.get(name, text)
    assert text is not None, f"{name} has no pseudocode"
    rng = random.Random(f"{name} {seed}")
    wrong = []
    with np.errstate(all="ignore"):
        for _ in range(count):
            difference = one(name, operation, text, rng)
            if difference:
                wrong.append(difference)
    return wrong


def one(name, operation, text, rng) -> str:
    given, arguments, position = {"SCC": 0, "VCC": 0, "D0": 0}, [], 0
    for kind in operation.sources:
        if kind in ("scc", "mask"):
            bit = rng.getrandbits(1)
            given["SCC" if kind == "scc" else "VCC"] = bit
            arguments.append(np.array([bool(bit)]))
        elif kind == "old":
            word = words_of("f32" if "F32" in name else "u32", rng)
            given["D0"] = word
            if name.startswith(("S_ADDK", "S_MULK", "S_CMPK")):
                given["S0"] = word
            arguments.append(array(word, "u32"))
        elif kind in ("pk", "pk32"):
            size = 16 if kind == "pk" else 32
            words = [words_of("f32" if "F32" in name else "u32", rng) & (1 << size) - 1 for _ in range(2)]
            given[f"S{position}"] = words[0] | words[1] << size
            arguments.append([np.array([word], f"u{size // 8}") for word in words])
            position += 1
        else:
            word = words_of(kind, rng)
            if name.startswith(("S_MOVK", "S_ADDK", "S_MULK", "S_CMPK")):
                word &= 0xFFFF
                given["S0" if name.startswith("S_MOVK") else "S1"] = given["SIMM16"] = word
                arguments.append(array(word - (word >> 15 << 16) if kind == "i32" else word, kind))
                continue
            given[f"S{position}"] = word
            arguments.append(array(word, kind))
            position += 1
    if name == "V_DIV_SCALE_F32":  # the numerator or the denominator, which stays where the text gives none
        position = rng.choice((1, 2))
        given["D0"] = given["S0"] = given[f"S{position}"]
        arguments[0] = arguments[position]
    given["SIMM32"] = given.get("S2", 0)
    value = operation.compute(*arguments)
    state = evaluate(text, given)
    parts = value if len(operation.results) > 1 or operation.results[0] in ("pk", "pk32") else (value,)
    if operation.results[0] in ("pk", "pk32"):
        size = 16 if operation.results[0] == "pk" else 32
        whole = sum(int(part.view(f"u{size // 8}")[0]) << size * i for i, part in enumerate(parts))
        wanted = state["D0"]
        floats = "F32" in name
        same = whole == wanted or (
            floats and all(alike(whole >> s & 0xFFFFFFFF, wanted >> s & 0xFFFFFFFF) for s in (0, 32))
        )
        return "" if same else f"{given}: {whole:#x}, not {wanted:#x}"
    for kind, part in zip(operation.results, parts, strict=True):
        if kind == "scc":
            ours, wanted = bool(part[0]), bool(state["SCC"])
        elif kind == "mask":
            place = "D1" if "MAD" in name else "D0" if name.startswith("V_CMP") else "VCC"
            ours, wanted = bool(part[0]), bool(state[place] & 1)
        else:
            size = int(kind[1:])
            ours, wanted = int(part.view(f"u{size // 8}")[0]), state["D0"] & (1 << size) - 1
            if kind == "f32" and alike(ours, wanted):
                continue
        if ours != wanted:
            return f"{given}: {kind} {ours:#x}, not {wanted:#x}"
    return ""


def alike(a: int, b: int) -> bool:
    """The same bits, or both not a number: which of them, the manuals don't say."""
    return a == b or (a & 0x7FFFFFFF > 0x7F800000 and b & 0x7FFFFFFF > 0x7F800000)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_computes_what_its_pseudocode_says(name):
    assert compared(name) == []
