"""Memsets of a recorded pass become kernels, by the CUDA driver's functions, through ctypes.

Libraries clear a counter before some of their kernels, as cuDNN does before attention. In a graph the copy
engine does that, so the kernels on both sides wait for it, and it waits for weights on their way: 7 us in
GPT-2's resident pass, 22 to 24 us while weights are copied (H200). A kernel that writes the same takes 2 us.

Names and structures: CUDA driver API, "Graph Management".
"""

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
MEMSET: Final = 2  # CU_GRAPH_NODE_TYPE_MEMSET
WIDTHS: Final = (1, 2, 4)  # bytes of the elements that a memset writes


class DriverError(Exception):
    """The driver refused a function."""


@dataclass(frozen=True)
class Memset:
    """`count` elements of `width` bytes each, one behind the other, from `address` on become `value`."""

    address: int
    value: int
    width: int
    count: int


class _Params(Structure):
    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Nodes:
    """A graph's nodes. Raises DriverError for what the driver refuses."""

    def __init__(self, graph: int, library: Any | None = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(str(error)) from error
        self._graph = c_void_p(graph)

    def all(self) -> list[int]:
        """Every node."""
        return self._listed("cuGraphGetNodes", self._graph)

    def memset(self, node: int) -> Memset | None:
        """What the node sets; None for another kind of node, and for memsets of several rows."""
        kind = c_int(-1)
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value != MEMSET:
            return None
        found = _Params()
        self._call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(found))
        if found.height != 1 or found.element_size not in WIDTHS:
            return None
        return Memset(int(found.dst), int(found.value), int(found.element_size), int(found.width))

    def replace(self, node: int, child: int) -> None:
        """Let the graph `child` be where the node is. If that fails, the node is there as before."""
        before = self._listed("cuGraphNodeGetDependencies", c_void_p(node))
        after = self._listed("cuGraphNodeGetDependentNodes", c_void_p(node))
        made = c_void_p()
        self._call(
            "cuGraphAddChildGraphNode",
            byref(made),
            self._graph,
            (c_void_p * len(before))(*before),
            c_size_t(len(before)),
            c_void_p(child),
        )
        try:
            self._call(
                "cuGraphAddDependencies",
                self._graph,
                (c_void_p * len(after))(*[made.value] * len(after)),
                (c_void_p * len(after))(*after),
                c_size_t(len(after)),
            )
            self._call("cuGraphDestroyNode", c_void_p(node))
        except DriverError:
            self._call("cuGraphDestroyNode", made)
            raise

    def _listed(self, name: str, of: c_void_p) -> list[int]:
        count = c_size_t(0)
        self._call(name, of, None, byref(count))
        found = (c_void_p * count.value)()
        if count.value:
            self._call(name, of, found, byref(count))
        return [int(one) for one in found if one is not None]

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"the driver has no {name}")
        if code := function(*args):
            raise DriverError(f"{name} returned {code}")


def replace_memsets(nodes: Nodes, kernel: Callable[[Memset], int]) -> str:
    """Replace every memset of one row. Returns why some are left; nothing where none is.

    `kernel` makes a graph of one kernel that writes the same; the driver copies it.
    """
    made: dict[Memset, int] = {}
    try:
        for node in nodes.all():
            found = nodes.memset(node)
            if found is None:
                continue
            if found not in made:
                made[found] = kernel(found)
            nodes.replace(node, made[found])
    except (DriverError, RuntimeError) as error:
        return str(error)
    return ""
