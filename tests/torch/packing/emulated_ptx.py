"""Runs the PTX of a kernel without a GPU: numpy's arrays have an element for each thread of a launch.

Of the threads that can go on, those at the lowest instruction go first, so threads that took different
branches meet again where the branches do. What is not known here is refused, never skipped: an instruction,
an access outside the given memory, an address that is not a multiple of what is read there, a shuffle
without the whole warp.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from ptx_acts import Act, act_of
from ptx_arithmetic import TYPES
from ptx_text import Instruction, Program, Refused, parse
from ptx_threads import WARP, Lanes, Memory, Threads, immediate

_FAR = np.iinfo(np.int64).max


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
    acts: list[Act | None]


@cache
def load(ptx: str) -> Code:
    """The only kernel in a module's text. Raises Refused for an instruction that isn't known."""
    program = parse(ptx)
    return Code(program, [act_of(instruction) for instruction in program.code])


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
        values[name] = np.array([argument], of) if kind == "f32" else immediate(int(argument), of)
    room = np.full((blocks, -(-shared // 64) * 64), 0xCD, np.uint8)
    own = ("shared memory", room.ctypes.data, room.nbytes)
    threads = Threads(
        program, values, Memory([*ranges, own]), blocks, room.ctypes.data, room.shape[1], shared
    )
    with np.errstate(all="ignore"):
        return _Run(threads, code.acts, order).whole()


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
