"""Launches a kernel's machine code on the emulated machine: arguments as the loader lays them out."""

import struct
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

import code_object
import numpy as np
from instructions import act_of
from machine import MOST_STEPS, Executed, Machine, Memory

_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
_FORMATS |= {"*": "Q"}
TABLE = "table"  # the name of a tensor of addresses
load = lru_cache(64)(code_object.load)


class Launch:
    """One launch. `values`: types as Triton names them, and arguments; `buffers`: names, addresses, bytes.

    `results`: names of those that may be written, all where none are given.
    """

    def __init__(
        self,
        kernel: code_object.Kernel,
        groups: tuple[int, int],
        threads: int,
        values: Sequence[tuple[str, int | float]],
        buffers: Sequence[tuple[str, int, int]],
        shared: int = 0,
        results: Collection[str] | None = None,
    ) -> None:
        self.kernel, self.groups, self.threads, self.shared = kernel, groups, threads, shared
        length = kernel.descriptor.kernarg
        packet = struct.pack("<HHHHHHIII", 0, 0, threads, 1, 1, 0, threads * groups[0], groups[1], 1)
        self._areas = [np.zeros(size + 64, np.uint8) for size in (length, len(packet))]
        self._own = [area.ctypes.data + -area.ctypes.data % 64 for area in self._areas]
        names = ("the arguments", "the packet of the launch")
        own = zip(names, self._own, (length, len(packet)), strict=True)
        given = [name for name, _, _ in buffers]
        self.memory = memory = Memory([*buffers, *own], set(given if results is None else results))
        self._packed = b"".join(_packed(values, memory))[:length]
        for area, data in zip(self._areas, (self._packed, packet), strict=True):
            begin = -area.ctypes.data % 64
            area[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        memory.copy_in()
        for name, address, size in buffers:
            if name == TABLE:
                memory.translate(address, size)

    def run(self, kernel: code_object.Kernel | None = None, most_steps: int = MOST_STEPS) -> Executed:
        """Run it once, or another kernel in its place, which changes `memory`. Raises Fault."""
        arguments, packet = map(self.memory.placed, self._own)
        machine = Machine(
            kernel or self.kernel,
            self.groups,
            self.threads,
            self._packed,
            self.memory,
            (arguments, packet),
            self.shared,
        )
        return machine.run(act_of, most_steps)


def _packed(values: Sequence[tuple[str, int | float]], memory: Memory) -> Iterator[bytes]:
    """Arguments one behind the other, each at a multiple of its size."""
    at = 0
    for kind, value in values:
        of = _FORMATS[kind[0] if kind[0] == "*" else kind]
        size = struct.calcsize(of)
        yield b"\0" * (-at % size)
        yield struct.pack(of, memory.placed(int(value)) if of == "Q" and kind[0] == "*" else value)
        at += -at % size + size
