"""What instructions of PTX do to threads and memory, apart from branches, barriers and returns."""

from collections.abc import Callable, Sequence

import numpy as np
from ptx_arithmetic import REDUCED, TYPES, UNSIGNED, WHOLE, function
from ptx_text import Address, Instruction, Operand, Refused
from ptx_threads import WARP, Copy, Lanes, Threads

Act = Callable[[Threads, Lanes], None]
_CONTROL = ("bra", "bra.uni", "bar.sync", "ret")


def act_of(instruction: Instruction) -> Act | None:
    """What an instruction does to threads; None: it is about where they go on."""
    operands = instruction.operands
    try:
        match instruction.opcode.replace("::cta", "").split("."):
            case _ if instruction.opcode in _CONTROL:
                return None
            case ["ld", "param", kind]:
                return _parameter(operands[0], operands[1], TYPES[kind])
            case ["ld" | "st" as way, "global" | "shared" as space, *vector, kind]:
                to, at = operands if way == "ld" else operands[::-1]
                names = to if isinstance(to, tuple) else (to,)
                if vector != ([f"v{len(names)}"] if len(names) > 1 else []):
                    raise ValueError(vector)
                return _moving(way, space, at, names, TYPES[kind])
            case ["red", "global", "gpu", "relaxed", "add", "u64"]:
                return _adding(*operands)
            case ["cp", "async", "ca" | "cg", "shared", "global"]:
                return _copying(*operands)
            case ["cp", "async", "commit_group"] if not operands:
                return lambda threads, lanes: np.add.at(threads.groups, threads.everyone(lanes), 1)
            case ["cp", "async", "wait_group"]:
                return _waiting(*operands)
            case ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]:
                return _multiplying(*operands)
            case ["mov", kind] if tuple in map(type, operands):
                return _regrouping(WHOLE[kind], *operands)
            case ["shfl", "sync", mode, "b32"]:
                return _shuffling(_SHUFFLES[mode], *operands, upwards=mode == "up")
            case ["ldmatrix" | "stmatrix" as way, "sync", "aligned", "m8n8", count, *trans, "shared", "b16"]:
                names, at = operands if way == "ldmatrix" else operands[::-1]
                if len(names) != {"x1": 1, "x2": 2, "x4": 4}[count] or trans not in ([], ["trans"]):
                    raise ValueError(count)
                return _moving_matrices(way, at, names, transposed=bool(trans))
            case ["bar", "warp", "sync"]:
                return lambda threads, lanes: _by_warp(threads, lanes, *operands)
            case ["redux", "sync", operation, kind]:
                return _reducing(REDUCED[operation], WHOLE[kind], *operands)
            case _:
                return _computing(*function(instruction.opcode, operands[-1]), *operands)
    except (KeyError, ValueError, TypeError) as error:
        raise Refused(f"not known here: {instruction.text}") from error


def _computing(computed: Callable[..., np.ndarray], types: Sequence[type], to: Operand, *of: Operand) -> Act:
    sources = list(zip(of, types, strict=True))

    def act(threads: Threads, lanes: Lanes) -> None:
        threads.write(to, computed(*(threads.read(*source, lanes) for source in sources)), lanes)

    return act


def _parameter(to: Operand, at: Address, of: type) -> Act:
    if at.offset:
        raise ValueError(at)
    return lambda threads, lanes: threads.write(to, threads.parameters[at.base].view(of), lanes)


def _moving(way: str, space: str, at: Address, names: Sequence[Operand], of: type) -> Act:
    size = np.dtype(of).itemsize * len(names)

    def act(threads: Threads, lanes: Lanes) -> None:
        words, places = threads.places(space, at, size, of, lanes)
        for i, name in enumerate(names):
            if way == "ld":
                threads.write(name, words[places + i], lanes)
            else:
                words[places + i] = threads.read(name, of, lanes)

    return act


def _adding(at: Address, value: Operand) -> Act:
    """Every thread adds to its word, which others may add to as well."""

    def act(threads: Threads, lanes: Lanes) -> None:
        words, places = threads.places("global", at, 8, np.uint64, lanes)
        added = np.broadcast_to(threads.read(value, np.uint64, lanes), places.shape)
        for place, number in zip(places.tolist(), added, strict=True):  # `np.add.at` may copy all of memory
            words[place] += number

    return act


def _copying(to: Address, source: Address, size: int, given: Operand = 16) -> Act:
    """Copies `size` bytes, or writes zeros where none are given. They arrive when they are waited for."""
    if size not in (4, 8, 16):
        raise ValueError(size)

    def act(threads: Threads, lanes: Lanes) -> None:
        everyone = threads.everyone(lanes)
        bytes_given = np.broadcast_to(threads.read(given, np.uint32, lanes), everyone.shape)
        kept = bytes_given > 0
        if (bytes_given[kept] < size).any():
            raise Refused("only a part of it is given")
        _, places = threads.places("shared", to, size, np.uint32, everyone)
        sources = places.copy()
        if kept.any():
            _, sources[kept] = threads.places("global", source, size, np.uint32, everyone[kept])
        groups = threads.groups[everyone]
        threads.copies += [Copy(everyone, groups, places + i, sources + i, kept) for i in range(size // 4)]

    return act


def _waiting(most: int) -> Act:
    return lambda threads, lanes: threads.arrive(lanes, threads.groups[threads.everyone(lanes)] - most)


def _multiplying(to: Sequence[str], a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> Act:
    """16 x 16 times 16 x 8 in each warp, summed in float64 and rounded once: a GPU may cut last bits off."""
    line, first = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2

    def act(threads: Threads, lanes: Lanes) -> None:
        def pairs(name: str) -> list[np.ndarray]:
            word = _by_warp(threads, lanes, -1, threads.read(name, np.uint32, lanes))[0]
            return [(half << np.uint32(16)).view(np.float32) for half in (word, word >> np.uint32(16))]

        def floats(name: str) -> np.ndarray:
            return _by_warp(threads, lanes, -1, threads.read(name, np.float32, lanes))[0]

        warps = len(threads.everyone(lanes)) // WARP
        left, right, total = (np.zeros((warps, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
        for i in range(4):
            row, half = line + i % 2 * 8, i // 2 * 8
            left[:, row, first + half], left[:, row, first + half + 1] = pairs(a[i])
            total[:, line + i // 2 * 8, first + i % 2] = floats(c[i])
        for i in range(2):
            right[:, first + 8 * i, line], right[:, first + 8 * i + 1, line] = pairs(b[i])
        total = (total + left @ right).astype(np.float32)
        for i in range(4):
            threads.write(to[i], total[:, line + i // 2 * 8, first + i % 2].reshape(-1), lanes)

    return act


def _moving_matrices(way: str, at: Address, names: Sequence[Operand], *, transposed: bool) -> Act:
    """Matrices of 8 rows of 16 bytes: eight threads have the addresses of one's rows.

    Each thread of the warp moves two neighbours of a row, or of a column, of each matrix.
    """
    count, lane = 8 * len(names), np.arange(WARP)
    line, first = lane // 4, lane % 4 * 2
    pair = [(first + i, line) if transposed else (line, first + i) for i in range(2)]

    def act(threads: Threads, lanes: Lanes) -> None:
        _by_warp(threads, lanes, -1)
        everyone = threads.everyone(lanes)
        words, rows = threads.places("shared", at, 16, np.uint16, everyone[everyone % WARP < count])
        rows = rows.reshape(-1, len(names), 8)
        for i, name in enumerate(names):
            places = [(rows[:, i, row] + column).reshape(-1) for row, column in pair]
            if way == "ldmatrix":
                lower, upper = (words[place].astype(np.uint32) for place in places)
                threads.write(name, lower | upper << np.uint32(16), lanes)
            else:
                word = threads.read(name, np.uint32, lanes)
                words[places[0]], words[places[1]] = word.astype(np.uint16), word >> np.uint32(16)

    return act


def _regrouping(of: type, to: Operand, source: Operand) -> Act:
    """A register from its parts, or its parts from it."""
    parts = to if isinstance(to, tuple) else source
    part = UNSIGNED[np.dtype(of).itemsize // len(parts)]
    shifts = [of(8 * i * np.dtype(part).itemsize) for i in range(len(parts))]

    def act(threads: Threads, lanes: Lanes) -> None:
        if parts is to:
            whole = threads.read(source, of, lanes)
            for name, shift in zip(parts, shifts, strict=True):
                threads.write(name, (whole >> shift).astype(part), lanes)
        else:
            pieces = [threads.read(name, part, lanes).astype(of) for name in parts]
            whole = sum(piece << shift for piece, shift in zip(pieces, shifts, strict=True))
            threads.write(to, whole, lanes)

    return act


def _by_warp(threads: Threads, lanes: Lanes, mask: Operand, *values: np.ndarray) -> list[np.ndarray]:
    """A row of 32 for each warp. Raises Refused where a warp isn't whole, or isn't asked for as a whole."""
    if (threads.read(mask, np.uint32, lanes) != 0xFFFFFFFF).any():
        raise Refused("it is for a part of a warp")
    count = len(threads.block) if lanes is None else len(lanes)
    if lanes is not None and (np.bincount(lanes // WARP) % WARP).any():
        raise Refused("only a part of a warp is here")
    return [np.broadcast_to(value, (count,)).reshape(-1, WARP) for value in values]


_SHUFFLES = {
    "up": lambda lane, step, index: lane - step,
    "down": lambda lane, step, index: lane + step,
    "bfly": lambda lane, step, index: lane ^ step,
    "idx": lambda lane, step, index: index,
}


def _shuffling(
    chosen_by: Callable[..., np.ndarray],
    to: Operand,
    value: Operand,
    by: Operand,
    limits: Operand,
    mask: Operand,
    *,
    upwards: bool,
) -> Act:
    lane = np.arange(WARP)[None, :]

    def act(threads: Threads, lanes: Lanes) -> None:
        read = (threads.read(operand, np.uint32, lanes) for operand in (value, by, limits))
        values, steps, ends = _by_warp(threads, lanes, mask, *read)
        step, end, segment = (bits.astype(np.int64) & 31 for bits in (steps, ends, ends >> 8))
        limit = (lane & segment) | (end & ~segment)
        chosen = chosen_by(lane, step, (lane & segment) | (step & ~segment))
        right = chosen >= limit if upwards else chosen <= limit
        found = np.take_along_axis(values, np.where(right, chosen, lane), 1)
        threads.write(to, found.reshape(-1), lanes)

    return act


def _reducing(computed: np.ufunc, of: type, to: Operand, value: Operand, mask: Operand) -> Act:
    def act(threads: Threads, lanes: Lanes) -> None:
        (values,) = _by_warp(threads, lanes, mask, threads.read(value, of, lanes))
        threads.write(to, np.repeat(computed.reduce(values, axis=1, dtype=of), WARP), lanes)

    return act
