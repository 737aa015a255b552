"""A stand-in for Triton's AMD driver: Triton's own launcher specializes and compiles a kernel to a code object,
and `machine` runs it on tensors in host memory. Triton must not interpret: TRITON_INTERPRET=0."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_SHARED = 64 << 10  # bytes of LDS that a workgroup may have
_MOST_THREADS = 1024
WAVES = {"gfx1100": 32, "gfx1201": 32, "gfx90a": 64, "gfx942": 64}  # lanes of a wave


class StandInDriver:
    """What Triton asks of a driver. `run` takes what a launch has: the code object, workgroups, arguments."""

    def __init__(self, target: str, run: Callable[..., None]) -> None:
        self.target = GPUTarget("hip", target, WAVES[target])
        self.run = run
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
            self.run(
                name,
                binary,
                x,
                metadata.num_warps * self.target.warp_size,
                values,
                [(name, of.data_ptr(), of.nbytes) for name, of in tensors],
                metadata.shared,
            )

        return launch


def stand_in(target: str, run: Callable[..., None]) -> StandInDriver:
    """Make Triton launch on a GPU of that target which isn't there, by `run`."""
    active = StandInDriver(target, run)
    driver.set_active(active)
    return active
