"""Host memory of exact size, pinned for the GPU's copies and read in place by its kernels."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from probes.core.errors import PlacementError, Unsupported
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware import numa
from probes.hardware.torch_build import first_line
from probes.placement.packing.format import aligned

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, <linux/mman.h>, since 5.14
_PORTABLE_MAPPED: Final = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class HostArena:
    """Host memory that is handed out piece by piece, then pinned as a whole.

    `room` bounds what can be handed out; memory is taken only for what is. `why_pageable` is empty once the
    memory is pinned.
    """

    def __init__(self, room: int, node: int | Unknown) -> None:
        self.node = node
        self._regions = [_Region(room, node)]
        self.asked = 0
        self.why_pageable = "nothing was registered"

    @property
    def used(self) -> int:
        """Bytes that have been handed out, each piece aligned."""
        return sum(region.used for region in self._regions)

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with the driver, in whole pages."""
        return 0 if self.why_pageable else sum(_in_pages(region.used) for region in self._regions)

    def widen(self, n_bytes: int) -> None:
        """Have room for so many more bytes: what wasn't known when the arena was made."""
        if self._regions[-1].used + n_bytes > self._regions[-1].size:
            self._regions.append(_Region(n_bytes, self.node))

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece. Raises PlacementError when the room is used up."""
        last = self._regions[-1]
        if last.used + n_bytes > last.size:
            room = sum(region.size for region in self._regions)
            raise PlacementError(
                f"{binary_bytes(self.used + n_bytes)} of host memory are needed, "
                f"{binary_bytes(room)} were planned",
                "the model has changed since it was planned: plan again",
            )
        self.asked += n_bytes
        return last.take(n_bytes)

    def pin(self, finish: Callable[[], object]) -> None:
        """Register what has been handed out. Where the driver refuses, all of the memory stays pageable.

        `finish` waits for the device: a model may be dropped while it copies ahead.
        """
        for region in self._regions:
            if not region.used:
                continue
            self.why_pageable = region.register(finish)
            if self.why_pageable:
                self._unregister()
                return

    def _unregister(self) -> None:
        for region in self._regions:
            region.unregister()

    def release(self) -> None:
        """Unregister. The memory lasts as long as tensors that use it; calling it twice does no harm."""
        if not self.why_pageable:
            self._unregister()
            self.why_pageable = "it was released"


class _Region:
    """One mapping, from which memory is taken piece by piece."""

    def __init__(self, room: int, node: int | Unknown) -> None:
        size = _in_pages(max(room, 1))
        try:
            self._map = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise PlacementError(
                f"{binary_bytes(size)} of host memory were refused: {error}",
                "plan again with a smaller host, or end other programs",
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._node = node
        self._populated = 0
        self.size, self.used = size, 0

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece, for which there is room."""
        begin, end = self.used, self.used + n_bytes
        self._populate(end)
        self.used = min(begin + aligned(n_bytes), self.size)
        return self._bytes[begin:end]

    def _populate(self, end: int) -> None:
        """Let the kernel provide pages from the GPU's node. Where it can't, the first write provides them."""
        stop = _in_pages(end)
        if stop <= self._populated:
            return
        with _on_node(self._node), suppress(OSError):
            self._map.madvise(_POPULATE_WRITE, self._populated, stop - self._populated)
        self._populated = stop

    def register(self, finish: Callable[[], object]) -> str:
        """Register what has been taken. Why that isn't possible; empty where it is."""
        try:
            failed = torch.cuda.cudart().cudaHostRegister(
                self._bytes.data_ptr(), _in_pages(self.used), _PORTABLE_MAPPED
            )
        except (RuntimeError, AttributeError, AssertionError) as error:
            return f"the memory can't be registered: {first_line(error)}"
        self._map.finish = finish
        self._map.registered = 0 if int(failed) else self._bytes.data_ptr()
        return f"the driver refused to register the memory (error {int(failed)})" if int(failed) else ""

    def unregister(self) -> None:
        """Unregister the memory from the driver; a second call does nothing."""
        self._map.unregister()


class _Pages(mmap.mmap):
    """Pages that the driver forgets before they go back to the kernel, however late that is.

    Without `remove()` the last tensor that uses them decides. The driver would refuse to register new pages
    at the address of pages that it still knows.
    """

    registered = 0  # the address that the driver knows
    finish: Callable[[], object] = staticmethod(int)  # waits for the copies that read them

    def unregister(self) -> None:
        """Unregister the memory from the driver; a second call does nothing."""
        if self.registered:
            with suppress(RuntimeError):  # of a device that failed: nothing is copied there any more
                self.finish()
            torch.cuda.cudart().cudaHostUnregister(self.registered)
            self.registered = 0

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be about to end
            self.unregister()


def _in_pages(n_bytes: int) -> int:
    """So many bytes in whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@contextmanager
def _on_node(node: int | Unknown) -> Iterator[None]:
    """The calling thread runs on the node's processors meanwhile, where that is possible."""
    before = os.sched_getaffinity(0)
    cpus = {
        cpu for info in numa.nodes(Path("/")) if info.node == node for cpu in numa.cpus_of(info.cpus)
    } & before
    if not cpus or cpus == before:
        yield
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def node_of_gpu(device: torch.device) -> int | Unknown:
    """The NUMA node that the GPU is attached to, by sysfs."""
    if device.type != "cuda":
        return Unknown("no GPU")
    facts = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return Unknown("this torch doesn't say where on the bus the GPU is")
    pci_id = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return numa.gpu_node(Path("/"), pci_id, numa.nodes(Path("/")))


def zero_copy(pinned: torch.Tensor) -> torch.Tensor:
    """A device tensor over the same bytes in host memory, which must be contiguous.

    Raises Unsupported when the memory isn't pinned (a HIP kernel would fault on it), torch can't take the
    interface (it asks numpy for help), or made a copy.
    """
    if not pinned.is_pinned() or not pinned.is_contiguous():
        raise Unsupported("only contiguous pinned memory can be read in place by the GPU")
    try:
        # bfloat16 has no name in this interface; bytes have one, and can be seen as anything
        whole, kind = (pinned, "<i8") if pinned.dtype == torch.int64 else (pinned.view(torch.uint8), "|u1")
        array = ArrayInterface(pinned.data_ptr(), tuple(whole.shape), kind, owner=whole)
        view = torch.as_tensor(array, device="cuda").view(pinned.dtype)
    except (RuntimeError, TypeError) as error:
        reason = f"this torch can't make a zero-copy tensor: {first_line(error)}"
        raise Unsupported(reason, "if it says that numpy is missing, add numpy to the image") from error
    if view.data_ptr() != pinned.data_ptr():
        raise Unsupported("torch copied the memory instead of aliasing it: no zero-copy tensors here")
    return view


class ArrayInterface:
    """Numbers at an address that the GPU can read, as torch takes them from other libraries.

    torch holds this object, and so `owner`, as long as the tensor made from it exists.
    """

    def __init__(self, address: int, shape: tuple[int, ...], kind: str, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
