"""Runs the PTX of a kernel without a GPU: numpy's arrays have an element for each thread of a launch.

Of the threads that can go on, those at the lowest instruction go first, so threads that took different
branches meet again where the branches do. What is not known here is refused, never skipped: an instruction,
an access outside the given memory, an address that is not a multiple of what is read there, a shuffle
without the whole warp.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from ptx_arithmetic import REDUCED, TYPES, UNSIGNED, WHOLE, function
from ptx_text import Address, Instruction, Operand, Program, Refused, parse

WARP = 32
_FAR = np.iinfo(np.int64).max
_UNWRITTEN = np.array(
    [0xA5A5A5A5A5A5A5A5], np.uint64
)  # any value will do where compilers read such a register

Lanes = np.ndarray | None  # the indices of the threads that an instruction is for; None: all of them


@dataclass(frozen=True)
class Executed:
    """Instructions that warps executed: by block, and by opcode in the whole launch.

    One that a predicate turned off counts, as on a GPU. One that a warp's threads reach at different times
    counts each time.
    """

    by_block: np.ndarray
    by_opcode: Counter[str]


@dataclass(frozen=True)
class Code:
    """A kernel that can be run: what each instruction does to threads, or None for a branch and the like."""

    program: Program
    acts: "list[Act | None]"


def load(ptx: str) -> Code:
    """The only kernel in a module's text. Raises Refused for an instruction that isn't known."""
    program = parse(ptx)
    return Code(program, [_act(instruction) for instruction in program.code])


def run(
    code: Code,
    blocks: int,
    arguments: Sequence[int | float],
    ranges: Sequence[tuple[str, int, int]],
    *,
    shared: int = 0,
    order: int = 0,
) -> Executed:
    """Run all blocks of a launch. `ranges`: names, addresses and bytes of the memory that may be touched.

    `shared`: bytes for each block. With `order` 1 the first warp of each block runs to its barrier before
    the second begins, with -1 the last one is first, with 0 they go together: a kernel that lacks a barrier
    is wrong in one of them. Raises Refused, with the instruction.
    """
    values = {}
    program = code.program
    for (name, kind), argument in zip(program.parameters.items(), arguments, strict=True):
        of = TYPES[kind]
        values[name] = np.array([argument], of) if kind == "f32" else _immediate(int(argument), of)
    room = np.full((blocks, -(-shared // 64) * 64), 0xCD, np.uint8)
    own = ("shared memory", room.ctypes.data, room.nbytes)
    threads = Threads(
        program, values, Memory([*ranges, own]), blocks, room.ctypes.data, room.shape[1], shared
    )
    with np.errstate(all="ignore"):
        return _Run(threads, code.acts, order).whole()


class Memory:
    """Ranges of addresses of this process, each with a name; nothing else may be touched."""

    def __init__(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        self.ranges = [(name, first, first + size) for name, first, size in ranges if size]
        self.first = min((first for _, first, _ in self.ranges), default=0) & -64
        last = max((last for _, _, last in self.ranges), default=0)
        size = -(-(last - self.first) // 64) * 64
        self.bytes = np.frombuffer((ctypes.c_ubyte * size).from_address(self.first), np.uint8)

    def places(self, addresses: np.ndarray, size: int, of: type) -> tuple[np.ndarray, np.ndarray]:
        """All of the memory as elements of a type, and the index of each address in it."""
        if (addresses % np.uint64(size)).any():
            raise Refused(f"an address is not a multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max())
        if not any(first <= low and high + size <= last for _, first, last in self.ranges):
            for address in addresses.tolist():
                if not any(first <= address and address + size <= last for _, first, last in self.ranges):
                    raise Refused(f"{size} bytes {self._where(address)}")
        words = self.bytes.view(of)
        return words, ((addresses - np.uint64(self.first)) // np.uint64(words.itemsize)).astype(np.int64)

    def _where(self, address: int) -> str:
        if not self.ranges:
            return "where there is no memory at all"
        name, first, last = min(self.ranges, key=lambda of: max(of[1] - address, address - of[2]))
        return f"at byte {address - first:,} of `{name}`, which has {last - first:,}"


@dataclass
class Threads:
    """All threads of a launch. A register that is the same in all of them may be an array of one element."""

    program: Program
    parameters: dict[str, np.ndarray]
    memory: Memory
    blocks: int
    shared: int  # where the blocks' shared memory begins
    stride: int  # bytes of it from one block to the next
    limit: int  # bytes of it that a block may touch
    registers: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.program.threads
        self.types = {name: np.dtype(TYPES[kind]) for name, kind in self.program.registers.items()}
        self.block = np.repeat(np.arange(self.blocks, dtype=np.uint64), size)
        self.registers["%ctaid.x"] = self.block.astype(np.uint32)
        self.registers["%tid.x"] = np.tile(np.arange(size, dtype=np.uint32), self.blocks)
        self.registers["%ntid.x"] = np.array([size], np.uint32)
        self.registers["%nctaid.x"] = np.array([self.blocks], np.uint32)
        self.registers["global_smem"] = np.zeros(1, np.uint32)

    def read(self, operand: Operand, of: type, lanes: Lanes) -> np.ndarray:
        """The operand's values as a type, of which a register may have more bits."""
        if isinstance(operand, int):
            return _immediate(operand, of)
        value = self._register(operand)
        if lanes is not None and value.size > 1:
            value = value[lanes]
        size = np.dtype(of).itemsize
        if value.itemsize > size:
            value = value.astype(UNSIGNED[size])
        if value.itemsize < size:
            raise Refused(f"{operand} has fewer bits than {np.dtype(of)}")
        return value.view(of)

    def write(self, name: Operand, value: np.ndarray, lanes: Lanes) -> None:
        """Set a register, extended by zeros or signs as the value's type says."""
        if name == "_":  # PTX's word for nowhere
            return
        old = self._register(name)
        if value.dtype.kind == "f":
            value = value.view(UNSIGNED[value.itemsize])
        value = value.astype(self.types[name])  # always a copy
        if lanes is None:
            self.registers[name] = value
            return
        if old.size == 1:
            old = self.registers[name] = np.repeat(old, len(self.block))
        old[lanes] = value

    def _register(self, name: Operand) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        if name not in self.types:
            raise Refused(f"{name} is not a register known here")
        return _UNWRITTEN.astype(self.types[name])

    def places(
        self, space: str, at: Address, size: int, of: type, lanes: Lanes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Memory as elements of a type, and the index where `size` bytes begin for each thread."""
        pointer = np.uint64 if space == "global" else np.uint32
        base = self.read(at.base, pointer, lanes) + _immediate(at.offset, pointer)
        addresses = np.broadcast_to(base, self.block.shape if lanes is None else lanes.shape)
        if space == "shared":
            addresses = addresses.astype(np.uint64)
            if (addresses + np.uint64(size) > self.limit).any():
                raise Refused(
                    f"{size} bytes at byte {addresses.max():,} of {self.limit:,} that a block shares"
                )
            block = self.block if lanes is None else self.block[lanes]
            addresses = addresses + block * np.uint64(self.stride) + np.uint64(self.shared)
        return self.memory.places(addresses, size, of)


@cache
def _immediate(value: int, of: type) -> np.ndarray:
    if of is np.bool_:
        return np.array([value != 0])
    size = np.dtype(of).itemsize
    return np.array([value & ((1 << 8 * size) - 1)], UNSIGNED[size]).view(of)


# --- What instructions do, apart from branches, barriers and returns

Act = Callable[[Threads, Lanes], None]
_CONTROL = ("bra", "bra.uni", "bar.sync", "ret")


def _act(instruction: Instruction) -> Act | None:
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


def _moving_matrices(way: str, at: Address, names: Sequence[Operand], *, transposed: bool) -> Act:
    """Matrices of 8 rows of 16 bytes: eight threads have the addresses of one's rows.

    Each thread of the warp moves two neighbours of a row, or of a column, of each matrix.
    """
    count, lane = 8 * len(names), np.arange(WARP)
    line, first = lane // 4, lane % 4 * 2
    pair = [(first + i, line) if transposed else (line, first + i) for i in range(2)]

    def act(threads: Threads, lanes: Lanes) -> None:
        _by_warp(threads, lanes, -1)
        everyone = np.arange(len(threads.block)) if lanes is None else lanes
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


# --- Which threads go on


class _Run:
    def __init__(self, threads: Threads, acts: list[Act | None], order: int) -> None:
        self.threads, self.program, self.acts = threads, threads.program, acts
        self.end = len(acts)
        count = len(threads.block)
        self.at = np.zeros(count, np.int64)  # the next instruction of each thread
        self.waits = np.zeros(count, np.bool_)
        self.before = order * (np.arange(count) % self.program.threads // WARP) * (self.end + 1)
        self.times = np.zeros(self.end, np.int64)
        self.by_block = np.zeros(threads.blocks, np.int64)

    def whole(self) -> Executed:
        while True:
            key = np.where(self.waits | (self.at == self.end), _FAR, self.at + self.before)
            least = key.min()
            if least == _FAR:
                break
            here = key == least
            first = int(self.at[here.argmax()])
            others = key[~here]
            self._straight(here, first, first + int(others.min() - least) if others.size else self.end)
            if self.waits.any():
                self._release()
        opcodes: Counter[str] = Counter()
        for instruction, times in zip(self.program.code, self.times.tolist(), strict=True):
            opcodes[instruction.opcode] += times
        return Executed(self.by_block, opcodes)

    def _straight(self, here: np.ndarray, first: int, until: int) -> None:
        """The threads that are at `first` go on to a branch, or to where others are."""
        lanes = None if here.all() else np.flatnonzero(here)
        at = first
        while at < min(until, self.end):
            instruction, act = self.program.code[at], self.acts[at]
            at += 1
            try:
                self._one(instruction, act, here, lanes, at)
            except Refused as refused:
                raise Refused(f"{self.program.name}: {instruction.text}: {refused}") from None
            if act is None:
                break
        else:
            self.at[here] = at
        warps = here.reshape(-1, WARP).any(1)
        self.times[first:at] += np.count_nonzero(warps)
        self.by_block += (at - first) * np.count_nonzero(warps.reshape(self.threads.blocks, -1), axis=1)

    def _one(
        self, instruction: Instruction, act: Act | None, here: np.ndarray, lanes: Lanes, to: int
    ) -> None:
        chosen = here
        if instruction.guard:
            name, wanted = instruction.guard
            chosen = here & (self.threads.read(name, np.bool_, None) == wanted)
        if act is None:
            self.at[here] = to
            self._control(instruction, chosen)
        elif not instruction.guard or chosen.all():
            act(self.threads, lanes)
        elif chosen.any():
            act(self.threads, np.flatnonzero(chosen))

    def _control(self, instruction: Instruction, chosen: np.ndarray) -> None:
        match instruction.opcode, instruction.operands:
            case (("bra" | "bra.uni"), (label,)):
                self.at[chosen] = self.program.labels[label]
            case "bar.sync", (0,):
                self.waits |= chosen
            case "ret", ():
                self.at[chosen] = self.end
            case _:
                raise Refused("not known here")

    def _release(self) -> None:
        """Blocks all of whose threads are at a barrier, or have returned, go on."""
        done = (self.waits | (self.at == self.end)).reshape(self.threads.blocks, -1).all(1)
        self.waits &= ~np.repeat(done, self.program.threads)
