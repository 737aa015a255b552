"""A stand-in for Triton's driver: Triton's own launcher specializes and compiles a kernel, and an emulator
runs it on tensors in host memory. Triton must not interpret: TRITON_INTERPRET=0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from probes.placement.packing import launch as launching
from probes.placement.packing import proof

_MOST_THREADS = 1024

Value = tuple[str, int | float]  # Triton's type, and what is given: a pointer's address
Buffer = tuple[str, int, int]  # a tensor's name, address and bytes


@dataclass(frozen=True)
class Launch:
    """A launch that was emulated: the kernel's name, its groups of threads, and what it executed."""

    kernel: str
    groups: int
    executed: Any


class StandInDriver:
    """What Triton asks of a driver; `stand_in` makes it the active one.

    `load` gives what `run` takes for a kernel's name and binary; `run(code, groups, values, buffers,
    metadata)` runs one launch. `launches`: what was launched so far; `beside`: what kernels reach by
    addresses in a table.
    """

    def __init__(
        self,
        target: GPUTarget,
        shared: int,
        load: Callable[[str, bytes], Any],
        run: Callable[[Any, int, Sequence[Value], Sequence[Buffer], Any], Any],
    ) -> None:
        self.target, self.run = target, run
        self.launches: list[Launch] = []
        self.beside: Mapping[str, torch.Tensor] = {}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared},
            load_binary=lambda name, binary, *_: (None, load(name, binary), 0, 0, _MOST_THREADS),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int | str:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int | str) -> int:
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
            reached = [*tensors, *self.beside.items()]
            buffers = [(name, of.data_ptr(), of.nbytes) for name, of in reached]
            executed = self.run(code, x, values, buffers, metadata)
            self.launches.append(Launch(metadata.name, x, executed))

        return launch

    def outcome(self, case: proof.Case) -> proof.Outcome:
        """Run a case, whose launches are the only ones in `launches` then."""
        prepared = case.prepare(torch.device("cpu"))
        self.launches.clear()
        self.beside = prepared.beside
        return case.outcome(prepared)


def stand_in(active: StandInDriver, *, ptx: bool = False, narrow: bool = False) -> StandInDriver:
    """Make Triton launch through it, and our launcher take tensors in host memory for its GPU's.

    `ptx`: the GPU is NVIDIA's; `narrow`: its waves have 32 lanes, and it is AMD's.
    """
    driver.set_active(active)
    launching.usable = lambda device: True
    launching._has_ptx = lambda device: ptx
    launching.has_narrow_wavefronts = lambda device: narrow
    launching.start_again = lambda *_: False  # with addresses alone
    started = launching.start

    def start(kernel, grid, tensors, numbers, constants, **rest):
        if "FACTORS" in constants:  # the matrix units' type on a GPU
            constants = {**constants, "FACTORS": tl.bfloat16}
        started(kernel, grid, tensors, numbers, constants, **rest)

    launching.start = start
    return active
