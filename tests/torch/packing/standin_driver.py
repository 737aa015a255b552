"""A stand-in for Triton's CUDA driver: Triton's own launcher specializes and compiles a kernel to PTX, and
`emulated_ptx` runs it on tensors in host memory. Triton must not interpret: TRITON_INTERPRET=0."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import emulated_ptx
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

_SHARED = 227 << 10  # bytes of shared memory that a block may have
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Launch:
    """A launch that was emulated: the kernel's name, and what it executed."""

    kernel: str
    blocks: int
    executed: emulated_ptx.Executed


class StandInDriver:
    """What Triton asks of a driver. `launches`: what was launched so far; `order` is `emulated_ptx.run`'s."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, emulated_ptx.WARP)
        self.launches: list[Launch] = []
        self.order = 0
        self.beside: list[torch.Tensor] = []  # what kernels reach by addresses that they read in a table
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _SHARED},
            load_binary=lambda name, ptx, *_: (None, emulated_ptx.load(ptx.decode()), 0, 0, _MOST_THREADS),
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
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
            values = [of.data_ptr() if isinstance(of, torch.Tensor) else of for _, of in given]
            executed = emulated_ptx.run(
                code,
                x,
                [*values, 0, 0],  # Triton's own scratch memory, of which there is none
                [
                    *((name, of.data_ptr(), of.nbytes) for name, of in tensors),
                    *(("by a table", of.data_ptr(), of.nbytes) for of in self.beside),
                ],
                shared=metadata.shared,
                order=self.order,
            )
            self.launches.append(Launch(code.program.name, x, executed))

        return launch


def stand_in(capability: int) -> StandInDriver:
    """Make Triton launch on a GPU of that compute capability that isn't there (90: an H100)."""
    CUDABackend.make_cubin = lambda self, ptx, *_: ptx.encode()  # the PTX itself is what is loaded
    CUDABackend.hash = lambda self: f"emulated {self.target.arch}"  # in Triton's cache it is another code
    found = StandInDriver(capability)
    driver.set_active(found)
    return found
