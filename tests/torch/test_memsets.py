"""Memsets of a recorded graph become kernels, against a stand-in for the CUDA driver's functions."""

from typing import Any

import pytest

from probes.placement.runtime.streams import DriverError, GraphNodes, Memset, replace_memsets

KERNEL, MEMSET = 0, 2
CHILD = 4


class Driver:
    """A graph of numbered nodes, changed by the driver's functions as ctypes calls them."""

    def __init__(self, kinds: dict[int, int], edges: set[tuple[int, int]]) -> None:
        self.kinds, self.edges = dict(kinds), set(edges)
        self.rows, self.width, self.address = 1, 4, dict.fromkeys(kinds, 4096)
        self.refused: dict[str, int] = {}  # after so many calls

    def __getattr__(self, name: str) -> Any:
        work = object.__getattribute__(self, f"_{name}")

        def call(*args: Any) -> int:
            left = self.refused.get(name)
            if left is not None:
                if left == 0:
                    return 801
                self.refused[name] = left - 1
            work(*args)
            return 0

        return call

    @staticmethod
    def _list(found: list[int], into: Any, count: Any) -> None:
        if into is None:
            count._obj.value = len(found)
        for at, node in enumerate(found if into is not None else ()):
            into[at] = node

    def _cuGraphGetNodes(self, _graph: Any, into: Any, count: Any) -> None:
        self._list(list(self.kinds), into, count)

    def _cuGraphNodeGetDependencies(self, node: Any, into: Any, count: Any) -> None:
        self._list(sorted(a for a, b in self.edges if b == node.value), into, count)

    def _cuGraphNodeGetDependentNodes(self, node: Any, into: Any, count: Any) -> None:
        self._list(sorted(b for a, b in self.edges if a == node.value), into, count)

    def _cuGraphNodeGetType(self, node: Any, kind: Any) -> None:
        kind._obj.value = self.kinds[node.value]

    def _cuGraphMemsetNodeGetParams(self, node: Any, found: Any) -> None:
        found = found._obj
        found.dst, found.value, found.element_size = self.address[node.value], 7, self.width
        found.width, found.height = 3, self.rows

    def _cuGraphAddChildGraphNode(self, made: Any, _graph: Any, before: Any, count: Any, _child: Any) -> None:
        made._obj.value = node = max(self.kinds) + 1
        self.kinds[node] = CHILD
        self.edges |= {(before[at], node) for at in range(count.value)}

    def _cuGraphAddDependencies(self, _graph: Any, first: Any, then: Any, count: Any) -> None:
        self.edges |= {(first[at], then[at]) for at in range(count.value)}

    def _cuGraphDestroyNode(self, node: Any) -> None:
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}


def diamond() -> Driver:
    """1 and 2, then the memset 3, then 4 and 5."""
    kinds = {1: KERNEL, 2: KERNEL, 3: MEMSET, 4: KERNEL, 5: KERNEL}
    return Driver(kinds, {(1, 3), (2, 3), (3, 4), (3, 5), (1, 4)})


def test_a_memset_becomes_a_kernel_between_the_same_nodes() -> None:
    driver, asked = diamond(), list[Memset]()
    why = replace_memsets(GraphNodes(1, driver), lambda memset: asked.append(memset) or 99)
    assert why == ""
    assert driver.kinds == {1: KERNEL, 2: KERNEL, 4: KERNEL, 5: KERNEL, 6: CHILD}
    assert driver.edges == {(1, 6), (2, 6), (6, 4), (6, 5), (1, 4)}
    assert asked == [Memset(address=4096, value=7, width=4, count=3)]


def test_memsets_of_the_same_bytes_share_one_kernel() -> None:
    driver, asked = Driver(dict.fromkeys((1, 2, 3), MEMSET), {(1, 2), (2, 3)}), list[Memset]()
    driver.address[3] = 8192
    assert not replace_memsets(GraphNodes(1, driver), lambda memset: asked.append(memset) or 99)
    assert driver.kinds == dict.fromkeys((4, 5, 6), CHILD)
    assert driver.edges == {(4, 5), (5, 6)}
    assert [one.address for one in asked] == [4096, 8192]


@pytest.mark.parametrize(("rows", "width"), [(2, 4), (1, 8)])
def test_memsets_of_several_rows_or_of_other_elements_stay(rows: int, width: int) -> None:
    driver = diamond()
    driver.rows, driver.width = rows, width
    assert not replace_memsets(GraphNodes(1, driver), lambda _: 99)
    assert driver.kinds[3] == MEMSET


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        ("cuGraphGetNodes", 0),
        ("cuGraphNodeGetType", 2),
        ("cuGraphMemsetNodeGetParams", 0),
        ("cuGraphNodeGetDependencies", 1),
        ("cuGraphNodeGetDependentNodes", 0),
        ("cuGraphAddChildGraphNode", 0),
        ("cuGraphAddDependencies", 0),
    ],
)
def test_a_graph_that_the_driver_refuses_to_change_stays_as_it_is(function: str, calls: int) -> None:
    driver, same = diamond(), diamond()
    driver.refused[function] = calls
    why = replace_memsets(GraphNodes(1, driver), lambda _: 99)
    assert why == f"{function} returned 801"
    assert (driver.kinds, driver.edges) == (same.kinds, same.edges)


def test_a_kernel_that_cannot_be_recorded_leaves_the_memset() -> None:
    def no_kernel(_: Memset) -> int:
        raise RuntimeError("no fill")

    driver = diamond()
    assert replace_memsets(GraphNodes(1, driver), no_kernel) == "no fill"
    assert driver.kinds[3] == MEMSET


def test_a_driver_without_one_of_the_functions_leaves_the_memset() -> None:
    class Without(Driver):
        def __getattr__(self, name: str) -> Any:
            if name == "cuGraphAddChildGraphNode":
                raise AttributeError(name)  # as ctypes does
            return super().__getattr__(name)

    driver = Without(diamond().kinds, diamond().edges)
    assert (
        replace_memsets(GraphNodes(1, driver), lambda _: 99) == "the driver has no cuGraphAddChildGraphNode"
    )
    assert driver.kinds == diamond().kinds


def test_without_the_drivers_library_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.placement.runtime.streams.LIBRARY", "libnone-of-this-name.so.1")
    with pytest.raises(DriverError, match="libnone"):
        GraphNodes(1)
