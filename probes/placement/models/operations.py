"""What a pass does, operation by operation, as a trace saw it: kinds, shapes, bytes, launches. Pure.

`probes/placement/trace.py` records operations; `planner/costs.py` says what they take on a machine.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal

# product        a matrix product, of a weight or of activations
# convolution    of any number of dimensions, transposed ones too
# attention      torch's scaled_dot_product_attention, or its like
# recurrent      a loop over time in one call: LSTM, GRU, RNN
# lookup         rows of a table
# norm           a normalisation over rows or channels, softmax
# reduction      a sum, mean or maximum along some dimension
# scan           a cumulative sum, a sort, a search for the largest
# plain          elementwise on contiguous numbers of one shape
# strided        elementwise on strided or broadcast numbers, copies, concatenations
# kernel         any of these, where only their number is known
# view           no kernel at all: the host's time only
OperationKind = Literal[
    "product",
    "convolution",
    "attention",
    "recurrent",
    "lookup",
    "norm",
    "reduction",
    "scan",
    "plain",
    "strided",
    "kernel",
    "view",
]


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A parameter that an operation reads, by name, and the bytes of it that it needs."""

    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a pass. Bytes read and written are of activations; weights are beside them."""

    kind: OperationKind
    name: str  # torch's: linear, conv2d
    at: str  # the qualified name of the module that called it, the innermost one
    dtype: str  # of what it computes
    flops: int = 0  # multiplications and additions
    read: int = 0  # bytes
    written: int = 0  # bytes
    launches: int = 1  # kernels
    rows: int = 0  # of a product's first factor, for each of its `groups`; positions of a convolution
    outputs: int = 0  # numbers of each row of the result
    inputs: int = 0  # numbers that one number of the result is summed from
    groups: float = 1  # independent products in one call; of experts, how many are expected to be chosen
    steps: int = 1  # of a loop over time, each of which reads the weights again
    weights: tuple[WeightUse, ...] = ()
    workspace: int = 0  # bytes that it takes while it runs, besides its result
    scores: int = 0  # bytes of attention's scores, which a fused kernel never keeps
    device_s: float | None = None  # measured alone on the device, its weights in VRAM; None: wasn't
    host_s: float | None = None  # measured, to launch it

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that it needs."""
        return sum(use.n_bytes for use in self.weights)

    def computed(self, dtype: str) -> "Operation":
        """The operation where bfloat16 is converted to `dtype` for computing."""
        if self.dtype != "bfloat16":
            return self
        times = 2 if dtype == "float32" else 1
        return replace(
            self,
            dtype=dtype,
            read=times * self.read,
            written=times * self.written,
            workspace=times * self.workspace,
            device_s=None,
            host_s=None,
            weights=tuple(WeightUse(use.name, times * use.n_bytes) for use in self.weights),
        )

    def split(self, held: Mapping[str, tuple[WeightUse, ...]]) -> "dict[str, Operation]":
        """A share for each part, by the bytes of its weights, which `held` has. They add up to this one.

        Each part's weights are read again at every step of a loop, so all shares have all steps.
        """
        whole = sum(use.n_bytes for uses in held.values() for use in uses)
        shares, before = {}, 0
        for part, uses in held.items():
            after = before + sum(use.n_bytes for use in uses)
            counts = {name: getattr(self, name) for name in _DIVIDED}
            own = {name: n * after // whole - n * before // whole for name, n in counts.items()}
            share = (after - before) / whole
            times = {name: s and s * share for name in _TIMES for s in [getattr(self, name)]}
            shares[part] = replace(self, weights=uses, **own, **times)
            before = after
        return shares

    @property
    def cost_key(self) -> tuple[object, ...]:
        """Equal for operations that cost the same."""
        sizes = (self.flops, self.read, self.written, self.launches, self.rows, self.outputs, self.inputs)
        rest = (self.groups, self.steps, self.scores, self.workspace, tuple(u.n_bytes for u in self.weights))
        return (self.kind, self.name, self.dtype, self.device_s, self.host_s, *sizes, *rest)


_TIMES: Final = ("device_s", "host_s")
_DIVIDED: Final = ("flops", "read", "written", "launches", "workspace", "scores")


def parted(
    operations: Iterable[Operation], holders: Mapping[str, str], parts: Container[str]
) -> dict[str, list[Operation]]:
    """The operations of each part of a block, in the order of the parts' first ones.

    An operation belongs to the part whose weights it reads. One that reads those of several, as that of all
    layers of an LSTM does, is divided. Others belong to the part that their module is in, else to the part
    before. `holders`: the part of each weight, by the weight's name; `parts`: the names of parts.
    """
    shares: dict[str, list[Operation]] = {}
    first: list[Operation] = []  # before any part's
    last = ""
    for operation in operations:
        held: dict[str, tuple[WeightUse, ...]] = {}
        others = []
        for use in operation.weights:
            part = holders.get(use.name, "")
            if part in parts:
                held[part] = (*held.get(part, ()), use)
            else:
                others.append(use)
        if len(held) > 1 and operation.weight_bytes:
            main = next(iter(held))
            held[main] = (*held[main], *others)
            split = operation.split(held)
        else:
            at = next(iter(held), operation.at)
            while at and at not in parts:
                at = at.rpartition(".")[0]
            split = {at or last: operation}
        for part, share in split.items():
            if part:
                shares.setdefault(part, []).append(share)
                last = part
            else:
                first.append(share)
    if first and shares:
        main = next(iter(shares))
        shares[main] = [*first, *shares[main]]
    return shares


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Bytes of activations at a pass's peak, as torch's allocator on a GPU takes them."""

    alive: int  # asked for, each rounded up to 512
    reserved: int  # in segments of the allocator, those that are whole and free given back


@dataclass(frozen=True)
class Trace:
    """One pass: its operations in call order, how often each module was called, and its bytes."""

    operations: tuple[Operation, ...]
    calls: Mapping[str, int]  # by qualified name, in the order of first calls
    peak: PeakBytes  # where a kernel attends without keeping scores
    peak_with_scores: PeakBytes  # where none does
    kept: Mapping[str, int]  # bytes that were there before it, such as a cache, by the module that uses them
    how: str = "fake tensors"  # or: a real pass
    measured: str = ""  # the device on which its operations were measured
    host_s: float | None = None  # of the host to launch the whole, as measured there; None: not measured

    @cached_property
    def flops(self) -> int:
        """Of the whole pass."""
        return sum(operation.flops for operation in self.operations)

    @cached_property
    def count(self) -> int:
        """Operations that launch something."""
        return sum(operation.kind != "view" for operation in self.operations)


# Operations of Python around a pass of transformers: masks, decorators, outputs with names. 13 families took
# 12 to 43 more than torch's own operations there, by docs/results/eager-h200.json.
AROUND: Final = 25

GATHERS: Final = ("gather", "index", "index_select")  # of chosen rows or matrices
EXPERTS: Final = ("_grouped_mm", "experts")  # products of rows with the matrices of those that they chose

# Host time of an operation in eager passes, in operations of a plain layer (docs/decisions/0058): what torch
# takes for each kind, one H200's host (docs/results/eager-h200.json, "singles").
HOST_UNITS: Final[Mapping[OperationKind, float]] = MappingProxyType(
    {
        "product": 0.9,
        "convolution": 0.9,
        "attention": 1.1,
        "recurrent": 2.0,
        "lookup": 0.64,
        "norm": 0.8,
        "reduction": 0.52,
        "scan": 0.6,
        "plain": 0.44,
        "strided": 0.5,
        "kernel": 0.5,
        "view": 0.08,
    }
)
EXPERT_UNITS: Final = 6.0  # of a product of experts: two mixtures of experts, the same host
STEP_UNITS: Final = 0.15  # of each kernel of a loop over time, which the library launches itself: assumed


def host_units(operation: Operation) -> float:
    """Host time that torch takes to launch an operation, in operations of a plain layer."""
    if operation.name in EXPERTS:
        return EXPERT_UNITS
    more = STEP_UNITS * operation.launches if operation.kind == "recurrent" else 0.0
    return HOST_UNITS[operation.kind] + more
