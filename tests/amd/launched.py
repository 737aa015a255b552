"""Launches a kernel's machine code on the emulated machine: arguments as the loader lays them out."""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

import code_object
import numpy as np
from instructions import act_of
from machine import Executed, Machine, Memory

_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
_FORMATS |= {"*": "Q"}
TABLE = "table"  # the name of a tensor of addresses
load = lru_cache(64)(code_object.load)


def run(
    kernel: code_object.Kernel,
    groups: tuple[int, int],
    threads: int,
    values: Sequence[tuple[str, int | float]],
    buffers: Sequence[tuple[str, int, int]],
    shared: int = 0,
) -> Executed:
    """One launch. `values`: Triton's types, and arguments; `buffers`: names, addresses, bytes of tensors.

    Raises Fault.
    """
    area = np.zeros(1024, np.uint8)
    at = -area.ctypes.data % 64
    packet = struct.pack("<HHHHHHIII", 0, 0, threads, 1, 1, 0, threads * groups[0], groups[1], 1)
    length = kernel.descriptor.kernarg
    assert length <= 512
    own = area.ctypes.data + at
    memory = Memory([*buffers, ("the arguments", own, length), ("the packet", own + 512, len(packet))])
    packed = b"".join(_packed(values, memory))[:length]
    area[at : at + len(packed)] = np.frombuffer(packed, np.uint8)
    area[at + 512 : at + 512 + len(packet)] = np.frombuffer(packet, np.uint8)
    memory.copy_in()
    for name, address, size in buffers:
        if name == TABLE:
            memory.translate(address, size)
    machine = Machine(kernel, groups, threads, packed, memory, memory.placed(own), shared)
    executed = machine.run(act_of)
    memory.copy_out()
    return executed


def _packed(values: Sequence[tuple[str, int | float]], memory: Memory) -> Iterator[bytes]:
    """Arguments one behind the other, each at a multiple of its size."""
    at = 0
    for kind, value in values:
        of = _FORMATS[kind[0] if kind[0] == "*" else kind]
        size = struct.calcsize(of)
        yield b"\0" * (-at % size)
        yield struct.pack(of, memory.placed(int(value)) if of == "Q" and kind[0] == "*" else value)
        at += -at % size + size
