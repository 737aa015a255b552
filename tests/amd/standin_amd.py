"""A stand-in for Triton's AMD driver: Triton's own launcher specializes and compiles a kernel, and
`machine` runs its code object on tensors in host memory. Triton must not interpret: TRITON_INTERPRET=0."""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace

import code_object
import numpy as np
import torch
from instructions import act_of
from machine import Executed, Machine, Memory
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_SHARED = 64 << 10  # bytes of LDS that a workgroup may have
_MOST_THREADS = 1024
WAVES = {"gfx1100": 32, "gfx1201": 32, "gfx90a": 64, "gfx942": 64}  # lanes of a wave


_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
_load = lru_cache(64)(code_object.load)


def run(
    kernel: code_object.Kernel,
    groups: int,
    threads: int,
    values: Sequence[tuple[str, int | float]],
    buffers: Sequence[tuple[str, int, int]],
    shared: int,
) -> Executed:
    """One launch. `values`: Triton's types, and arguments; `buffers`: names, addresses, bytes of tensors."""
    area = torch.zeros(512, dtype=torch.uint8).numpy()  # aligned as tensors are
    memory = Memory([*buffers, ("the arguments", area.ctypes.data, kernel.descriptor.kernarg)])
    packed = b""
    for kind, value in [*values, ("*", 0), ("*", 0)]:  # Triton's own scratch memory, of which there is none
        of = "Q" if kind[0] == "*" else _FORMATS[kind]
        packed += b"\0" * (-len(packed) % struct.calcsize(of))
        packed += struct.pack(of, memory.placed(value) if kind[0] == "*" else value)
    area[: len(packed)] = np.frombuffer(packed, np.uint8)
    memory.copy_in()
    at = memory.placed(area.ctypes.data)
    executed = Machine(kernel, groups, threads, packed, memory, at, shared).run(act_of)
    memory.copy_out()
    return executed


class StandInDriver:
    """What Triton asks of a driver. `executed`: what each launch so far has executed.

    `changed` may change a kernel before it runs.
    """

    def __init__(self, target: str) -> None:
        self.target = GPUTarget("hip", target, WAVES[target])
        self.executed: list[Executed] = []
        self.changed: Callable[[code_object.Kernel], code_object.Kernel] = lambda kernel: kernel
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _SHARED},
            load_binary=lambda name, binary, *_: (None, (name, bytes(binary)), 0, 0, _MOST_THREADS),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        return 0

    def launcher_cls(self, source, metadata) -> Callable[..., None]:
        types = list(source.signature.items())
        assert not metadata.global_scratch_size

        def launch(x, y, z, stream, code, packed, launch_metadata, enter, leave, *arguments) -> None:
            assert (y, z) == (1, 1)
            given = [of for of in zip(types, arguments, strict=True) if of[0][1] != "constexpr"]
            tensors = [(name, of) for (name, _), of in given if isinstance(of, torch.Tensor)]
            pointers = [name for (name, kind), _ in given if kind[0] == "*"]
            assert pointers == [name for name, _ in tensors], "an address alone has no size"
            values = [
                (kind, of.data_ptr() if isinstance(of, torch.Tensor) else of) for (_, kind), of in given
            ]
            name, binary = code
            kernel = self.changed(_load(binary, name, self.target.arch))
            buffers = [(name, of.data_ptr(), of.nbytes) for name, of in tensors]
            threads = metadata.num_warps * self.target.warp_size
            self.executed.append(run(kernel, x, threads, values, buffers, metadata.shared))

        return launch


def stand_in(target: str) -> StandInDriver:
    """Make Triton launch on a GPU of that target which isn't there."""
    active = StandInDriver(target)
    driver.set_active(active)
    return active
