"""The threads of a launch as numpy's arrays: their registers, and the memory that they may touch."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from ptx_arithmetic import TYPES, UNSIGNED
from ptx_text import Address, Operand, Program, Refused

WARP = 32
_UNWRITTEN = np.array(
    [0xA5A5A5A5A5A5A5A5], np.uint64
)  # any value will do where compilers read such a register

Lanes = np.ndarray | None  # the indices of the threads that an instruction is for; None: all of them


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
class Copy:
    """One from global to shared memory that isn't waited for yet: words of these threads, and their groups.

    Where `kept` is false, the word becomes zero.
    """

    lanes: np.ndarray
    group: np.ndarray
    to: np.ndarray
    source: np.ndarray
    kept: np.ndarray


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
    copies: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.program.threads
        self.types = {name: np.dtype(TYPES[kind]) for name, kind in self.program.registers.items()}
        self.block = np.repeat(np.arange(self.blocks, dtype=np.uint64), size)
        self.groups = np.zeros(len(self.block), np.int64)  # of copies, which each thread has ended
        self.registers["%ctaid.x"] = self.block.astype(np.uint32)
        self.registers["%tid.x"] = np.tile(np.arange(size, dtype=np.uint32), self.blocks)
        self.registers["%ntid.x"] = np.array([size], np.uint32)
        self.registers["%nctaid.x"] = np.array([self.blocks], np.uint32)
        self.registers["global_smem"] = np.zeros(1, np.uint32)

    def read(self, operand: Operand, of: type, lanes: Lanes) -> np.ndarray:
        """The operand's values as a type, of which a register may have more bits."""
        if isinstance(operand, int):
            return immediate(operand, of)
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

    def everyone(self, lanes: Lanes) -> np.ndarray:
        """The indices of the threads, also where they are all."""
        return np.arange(len(self.block)) if lanes is None else lanes

    def arrive(self, lanes: Lanes, groups: np.ndarray) -> None:
        """Make the threads' copies of their first so many groups: as late as a GPU may."""
        mine = np.full(len(self.block), -1)
        mine[self.everyone(lanes)] = groups
        words = self.memory.bytes.view(np.uint32)
        left = []
        for copy in self.copies:
            now = copy.group < mine[copy.lanes]
            words[copy.to[now]] = np.where(copy.kept[now], words[copy.source[now]], np.uint32(0))
            if not now.all():
                every = (copy.lanes, copy.group, copy.to, copy.source, copy.kept)
                left.append(Copy(*(values[~now] for values in every)))
        self.copies = left

    def places(
        self, space: str, at: Address, size: int, of: type, lanes: Lanes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Memory as elements of a type, and the index where `size` bytes begin for each thread."""
        pointer = np.uint64 if space == "global" else np.uint32
        base = self.read(at.base, pointer, lanes) + immediate(at.offset, pointer)
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
def immediate(value: int, of: type) -> np.ndarray:
    if of is np.bool_:
        return np.array([value != 0])
    size = np.dtype(of).itemsize
    return np.array([value & ((1 << 8 * size) - 1)], UNSIGNED[size]).view(of)
