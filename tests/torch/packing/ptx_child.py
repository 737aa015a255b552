"""Runs the PTX of every kernel, launched as on a GPU, and prints a line of JSON for each case.

Started with TRITON_INTERPRET=0: Triton reads it when a kernel is defined.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import emulated_ptx
import torch
from ptx_text import Refused
from standin_driver import OnGpu, StandInDriver, stand_in
from test_kernels import odd_weights
from test_round_trip import bits, forced, gaussian
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from probes.placement.packing import codecs
from probes.placement.packing import launch as launching
from probes.placement.packing import launch as prepared
from probes.placement.packing.packed import B11, Packed
from probes.placement.packing.products import linear, rows
from probes.placement.packing.tensors import unpack

SHAPES = ((16, 512), (5, 1030), (40, 300), (70_001,), (33, 256), (2, 9000), (7, 11, 13))
LENGTHS = (2048, 2049, 9000)
OLDER = (80,)  # capabilities for which fewer cases are enough: Triton compiles for each, which takes longest
_SHARED = 227 << 10  # bytes of shared memory that a block may have
ORDERS = {0: "all warps together", 1: "the first warp first", -1: "the last warp first"}


@dataclass(frozen=True)
class Case:
    """`wrong` launches kernels for so many weights, and says what isn't right, if anything."""

    name: str
    weights: int
    wrong: Callable[[], str]
    order: int = 0  # of warps, as in `emulated_ptx.run`


def cases(capability: int) -> Iterator[Case]:
    older = capability in OLDER
    for shape in SHAPES[1::2] if older else SHAPES:
        yield of(f"b12 {shape}", odd_weights(*shape))
        tensor = odd_weights(*shape).float()
        tensor += torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 1e-4
        yield of(f"f28 {shape}", tensor)
    for n in LENGTHS[2:] if older else LENGTHS:
        yield of(f"b11 {n}", odd_weights(n), B11)
        yield of(f"h14 {n}", odd_weights(n).half())
    words = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    yield of("b12 of all patterns", words.view(torch.bfloat16))
    yield of("b11 of all patterns", words.view(torch.bfloat16), B11)
    yield of("h14 of all patterns", words.view(torch.float16))
    table = odd_weights(200, 2048)
    table[31, 100:1500] = 30000.0  # escapes side by side, which more than one thread has to put
    for order in (0,) if older else (0, 1, -1):
        suffix = f", {ORDERS[order]}"
        yield looked_up(f"rows{suffix}", table, torch.tensor([7, 0, 199, 7, 31]), order)
        yield of(f"b12{suffix}", table[30:33], order=order)
        yield of(f"f28{suffix}", table[30:33].float() * 1.0001, order=order)
    yield of("b11, escapes side by side", table[30:33], B11)
    if not older:
        tensor = odd_weights(9, 2048)
        for skipped in (1, 2):
            suffix = f", {skipped} weights into memory"
            yield of(f"b12{suffix}", tensor, skipped=skipped)
            yield of(f"f28{suffix}", tensor.float() * 1.0001, skipped=skipped)
            yield of(f"b11{suffix}", tensor, B11, skipped=skipped)
        yield part("b12, a part", forced(tensor), tensor)
        yield part("b11, a part", forced(tensor, B11), tensor)
        yield product((6, 1922), 1)
    for packed in (False, True):
        for order in (0,) if older else (0, 1, -1):
            yield experts_of(packed, order)
        yield products_of_experts(packed, 0)
    for order in (0,) if older else (0, 1, -1):
        yield product((37, 1152), 1, order)
        yield product((37, 1152), 5, order)


def of(name: str, tensor: torch.Tensor, layout=None, *, order: int = 0, skipped: int = 0) -> Case:
    """Unpacked into memory that has `skipped` weights before."""
    packed = forced(tensor, layout)
    return unpacked(name, tensor, lambda out: unpack(packed, out), order, skipped)


def part(name: str, packed: Packed, tensor: torch.Tensor) -> Case:
    """From the second unit on: its escapes begin anywhere."""
    rest = packed.part(packed.unit, packed.n_weights)
    wanted = tensor.view(-1)[packed.unit :].view(rest.shape)
    return unpacked(name, wanted, lambda out: unpack(rest, out))


def looked_up(name: str, table: torch.Tensor, ids: torch.Tensor, order: int) -> Case:
    packed = forced(table)
    return unpacked(name, table[ids], lambda out: out.copy_(rows(packed, ids, most_escapes=2048)), order)


def unpacked(
    name: str,
    tensor: torch.Tensor,
    into: Callable[[torch.Tensor], object],
    order: int = 0,
    skipped: int = 0,
) -> Case:
    """All bits must be the tensor's."""

    def wrong() -> str:
        out = torch.empty(skipped + tensor.numel(), dtype=tensor.dtype)[skipped:].view(tensor.shape)
        bits(out).copy_(~bits(tensor))  # none is right yet
        into(out)
        places = (bits(out) != bits(tensor)).nonzero().view(-1)
        if not len(places):
            return ""
        return f"{len(places):,} of {out.numel():,} weights, the first at {int(places[0]):,}"

    return Case(name, tensor.numel(), wrong, order)


def product(shape: tuple[int, int], inputs: int, order: int = 0) -> Case:
    """Must be float64's product, rounded, except for the last bits of sums in float32."""
    weights = odd_weights(*shape)
    weights[3, 7:27] = 11.0  # more escapes in one row than are handled at once
    x, bias = gaussian(inputs, shape[1], seed=4) * 50, gaussian(shape[0], seed=5)

    def wrong() -> str:
        found = linear(x.as_subclass(OnGpu), forced(weights), bias)
        wanted = x.double() @ weights.double().T + bias.double()
        size = x.double().abs() @ weights.double().abs().T
        bad = (found.double() - wanted).abs() > 2.0**-8 * wanted.abs() + 2.0**-22 * size
        return f"{int(bad.sum()):,} of {wanted.numel():,} products" if bad.any() else ""

    return Case(f"{inputs} x {shape}, {ORDERS[order]}", weights.numel(), wrong, order)


def table_of(weights: torch.Tensor, packed: bool) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Addresses of experts (count, rows, width), the memory that they are in, and their base."""
    if not packed:
        return torch.tensor([[one.data_ptr()] for one in weights]), [weights], 0
    whole = forced(weights)
    high, starts = weights.shape[1], whole.parts["starts"].tolist()
    names = ("rest0", "codes", "values", "positions", "starts")
    pieces = [
        whole.piece(n * high, (n + 1) * high, slice(starts[n * high], starts[(n + 1) * high]))
        for n in range(len(weights))
    ]
    addresses = torch.tensor([[piece.parts[name].data_ptr() for name in names] for piece in pieces])
    return addresses, list(whole.parts.values()), whole.base


BESIDE: list[torch.Tensor] = []  # memory that the kernels of the case reach by a table


def experts_of(packed: bool, order: int) -> Case:
    """Chosen experts: all bits, each counted once."""
    weights = odd_weights(4, 6, 512)
    ids = torch.tensor([2, 0, 2])

    def wrong() -> str:
        table, BESIDE[:], base = table_of(weights, packed)
        out, counts = torch.empty(3, 6, 512, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
        if packed:
            launching.unpack_experts(table, ids, out, counts, rows=6, base=base)
        else:
            launching.gather_experts(table, ids, out, counts)
        bad = int((bits(out) != bits(weights[ids].contiguous())).sum())
        return f"{bad:,} weights, counted {counts.tolist()}" if bad or counts.tolist() != [1, 0, 2, 0] else ""

    return Case(f"experts{' packed' * packed}, {ORDERS[order]}", 3 * 6 * 512, wrong, order)


def products_of_experts(packed: bool, order: int) -> Case:
    """The sum of the chosen experts' outputs: float64's, but for rounding."""
    size = 512
    gates, downs = gaussian(3, 2 * size, size, seed=1) * 0.05, gaussian(3, size, size, seed=2) * 0.05
    x, ids = gaussian(1, size, seed=3), torch.tensor([2, 0])
    shares = torch.tensor([0.75, 0.25])

    def wrong() -> str:
        (table, beside, base), (other, more, second) = table_of(gates, packed), table_of(downs, packed)
        BESIDE[:] = [*beside, *more]
        out, counts = torch.empty_like(x), torch.zeros(3, dtype=torch.int64)
        launching.multiply_experts(
            x,
            ids,
            shares,
            out,
            gate_up=table,
            down=other,
            counts=counts,
            inner=size,
            bases=(base, second) if packed else None,
        )
        wanted = torch.zeros(size, dtype=torch.float64)
        for share, n in zip(shares.double(), ids.tolist(), strict=True):
            gate, up = (gates[n].double() @ x[0].double()).chunk(2)
            wanted += share * (downs[n].double() @ (torch.nn.functional.silu(gate) * up))
        bad = (out[0].double() - wanted).abs() > 2.0**-8 * wanted.abs() + 1e-5 * wanted.abs().max()
        return f"{int(bad.sum())} of {size} outputs, counted {counts.tolist()}" if bad.any() else ""

    return Case(
        f"products of experts{' packed' * packed}, {ORDERS[order]}", 2 * 3 * size * size, wrong, order
    )


def gpu_of(capability: int, order: list[int]) -> StandInDriver:
    """Triton launches on a GPU of that compute capability that isn't there (90: an H100).

    `order`: its only number is that of `emulated_ptx.run`, for the next launch.
    """
    CUDABackend.make_cubin = lambda self, ptx, *_: ptx.encode()  # the PTX itself is what is loaded
    CUDABackend.hash = lambda self: f"emulated {self.target.arch}"  # in Triton's cache it is another code

    def run(code, blocks, values, buffers, metadata) -> emulated_ptx.Executed:
        arguments = [*(value for _, value in values), 0, 0]  # Triton's own scratch memory, which is none
        return emulated_ptx.run(code, blocks, arguments, buffers, shared=metadata.shared, order=order[0])

    target = GPUTarget("cuda", capability, emulated_ptx.WARP)
    load = lambda name, ptx: emulated_ptx.load(ptx.decode())  # noqa: E731
    return stand_in(StandInDriver(target, _SHARED, load, run))


def tried(case: Case, gpu: StandInDriver, order: list[int]) -> dict[str, object]:
    """What became of a case."""
    prepared._known.clear()  # by which it would start a kernel again with addresses alone
    gpu.launches.clear()
    BESIDE.clear()
    order[0], gpu.beside = case.order, BESIDE
    try:
        wrong = case.wrong()
    except Refused as refused:
        wrong = str(refused)
    executed = sum(int(launch.executed.by_block.sum()) for launch in gpu.launches)
    return {
        "case": case.name,
        "target": f"sm{gpu.target.arch}",
        "kernels": [launch.kernel for launch in gpu.launches],
        "wrong": wrong,
        "instructions a weight": round(32 * executed / case.weights, 1),
    }


def main() -> None:
    """For each compute capability that the arguments name: 90."""
    launching.usable = launching._has_ptx = lambda device: True
    codecs.DENSE_FROM = 0  # blocks as large as the kernel's
    for capability in map(int, sys.argv[1:]):
        order = [0]
        gpu = gpu_of(capability, order)
        for case in cases(capability):
            print(json.dumps(tried(case, gpu, order)), flush=True)


if __name__ == "__main__":
    main()
