"""Cases that prove the kernels: on a card by `weir probe prove`, and without one on emulated machine code.

Their weights come from a formula, so that they have the same bits everywhere. Each of thirteen kernels, or
pairs of kernels, has five shapes with weights of four kinds each: Gaussian ones with zeros, subnormal and
large numbers among them, none in one part and many in another; numbers that need no escape; whole rows of
escapes; for unpacking, every bit pattern, for products terms that cancel each other in pairs, so that a wrong
last bit isn't lost in rounding. What is unpacked must have the bits that were packed. A product may differ
from float64's by half of a last bit of bfloat16, and 2^-22 of the sum of its terms' sizes for the order in
which float32 adds them; the two that follow each other in an expert by 2^-21 of that.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

import torch

from probes.core.codec import load
from probes.placement.packing import launch
from probes.placement.packing.format import PACKED_PARTS
from probes.placement.packing.packed import B10, B12, F28, H13, Layout, Packed
from probes.placement.packing.products import linear, rows
from probes.placement.packing.tensors import pack, unpack

RECORDED: Final = Path(__file__).with_name("proof.json")  # digests of what emulated targets gave
KINDS: Final = ("gaussian", "no escapes", "rows of escapes", "every pattern")
OF_PRODUCTS: Final = ("gaussian", "no escapes", "rows of escapes", "cancelling")
_SHAPES: Final = ((16, 512), (5, 1030), (33, 256), (70_001,), (2, 9000))
_LENGTHS: Final = ((131_072,), (131_073,), (133_120,), (140_001,), (64, 2176))  # 2-bit codes from 2^17 on
_TABLES: Final = ((200, 2048), (64, 512), (33, 1030), (16, 8192), (70, 768))
_EVEN: Final = ((37, 512), (6, 1024), (64, 2048), (1, 4096), (100, 1536))
_UNEVEN: Final = ((37, 1152), (6, 1922), (64, 514), (1, 3000), (100, 1300))
_BATCHES: Final = (2, 5, 16, 3)
_EXPERTS: Final = ((4, 6, 512), (3, 5, 1030), (7, 32, 256), (2, 1, 4096), (5, 16, 770))  # count, rows, width
_INNER: Final = ((3, 48, 256), (4, 5, 514), (2, 64, 512), (6, 18, 130), (3, 7, 1030))  # count, inner, outer
_PACKED_INNER: Final = (
    (3, 512, 512),
    (2, 516, 514),
    (2, 576, 512),
    (3, 514, 530),
    (2, 512, 514),
)  # of whole rows
_NOT_READ: Final = -(1 << 40)  # an id so far below zero that nothing is written for it
_UNTOUCHED: Final = 0x5A5A  # in every word of a result before the kernel
_WORDS: Final = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


_Sizes = TypeVar("_Sizes", bound=tuple[int, ...])
_Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `wrong`: what differs, empty if nothing; `digest`: of the result's bits."""

    wrong: str
    digest: str


@dataclass(frozen=True)
class Prepared:
    """`begin` runs the kernel on what lies on a device, and gives its result.

    `beside`: memory that it reaches by addresses in a table, by its names; `also`: what is wrong besides the
    result after the first run, empty if nothing.
    """

    begin: Callable[[], torch.Tensor]
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    also: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Case:
    """`prepare` puts what the kernel needs on a device; `judge` compares its result with what it must be."""

    name: str
    kernel: str
    weights: int
    prepare: Callable[[torch.device], Prepared]
    judge: Callable[[torch.Tensor], str]

    def outcome(self, prepared: Prepared) -> Outcome:
        """Run the kernel once, and compare its result, wherever it is."""
        here = prepared.begin().detach().as_subclass(torch.Tensor).cpu()
        return Outcome(self.judge(here) or prepared.also(), digest(here))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a tensor, flat."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.dtype])


def digest(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits for the bits of a tensor on the CPU."""
    return hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict[str, dict[str, str]]:
    """For each case the digest of its result by emulated target; empty where none was recorded.

    Raises OSError, and ValueError for a file that isn't whole.
    """
    known = load(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    if not isinstance(known, dict) or not all(isinstance(of, dict) for of in known.values()):
        raise ValueError("not digests by case and target")
    return cast(dict[str, dict[str, str]], known)


def cases() -> Iterator[Case]:
    """All cases, the same on every machine, kernel by kernel."""
    for kernel, dtype, layout, shapes in (
        ("unpack_b12", torch.bfloat16, B12, _SHAPES),
        ("unpack_f28", torch.float32, F28, _SHAPES),
        ("unpack_planes b10", torch.bfloat16, B10, _LENGTHS),
        ("unpack_planes h13", torch.float16, H13, _LENGTHS),
    ):
        for shape, _, kind in _turns(shapes, KINDS):
            yield unpacked(kernel, shape, kind, dtype, layout)
    for shape, turn, kind in _turns(_TABLES, KINDS):
        yield _looked_up(shape, kind, turn)
    for kernel, sizes in (
        ("one_row even", _EVEN),
        ("few_rows even", _EVEN),
        ("one_row uneven", _UNEVEN),
        ("few_rows uneven", _UNEVEN),
    ):
        for shape, turn, kind in _turns(sizes, OF_PRODUCTS):
            yield product(kernel, shape, kind, 1 if kernel.startswith("one") else _BATCHES[turn])
    for kernel in ("gather", "unpack_expert"):
        for experts, turn, kind in _turns(_EXPERTS, KINDS):
            yield _experts(kernel, experts, kind, turn)
    for kernel, each in (("gate_up, down", _INNER), ("gate_up, down packed", _PACKED_INNER)):
        for inner, turn, kind in _turns(each, OF_PRODUCTS):
            yield _products_of_experts(kernel, inner, kind, turn)


def _turns(shapes: Iterable[_Sizes], kinds: Sequence[str]) -> Iterator[tuple[_Sizes, int, str]]:
    """Each shape with each kind, and the kind's number."""
    return ((shape, turn, kind) for shape in shapes for turn, kind in enumerate(kinds))


# --- weights by a formula ------------------------------------------------------------------------------


def _mixed(count: int, seed: int) -> torch.Tensor:
    """`count` numbers of 63 bits, without any order, from a multiplication that wraps and shifts."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64) * 6364136223846793005 + seed * 1442695040888963407
    for shift in (31, 27, 33):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * 7046029254386353131
    return numbers & 0x7FFFFFFFFFFFFFFF


def _gaussian(count: int, seed: int) -> torch.Tensor:
    """Sums of four uniform numbers: nearly Gaussian, with a standard deviation of 0.02; float32."""
    words = _mixed(count, seed)
    total = sum((words >> shift) & 0x7FFF for shift in (0, 15, 30, 45)) - 4 * 0x3FFF
    return total.to(torch.float32) * (0.02 / 18918)


@lru_cache(4)
def weights(shape: _Shape, kind: str, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Weights of a kind on the CPU, which nobody changes."""
    count = prod(shape)
    wide = dtype is torch.float32
    values = _gaussian(count, seed)
    if wide:
        values = values * 1.0001  # more than 16 bits
    flat = values.to(dtype)
    if kind == "every pattern":
        numbers = _mixed(count, seed) if wide else torch.arange(count) * 40503
        word = torch.int32 if wide else torch.int16
        flat = (numbers & (0xFFFFFFFF if wide else 0xFFFF)).to(word).view(dtype)
    elif kind == "no escapes":
        flat = (torch.where(values < 0, -1.0, 1.0) * (values.abs() % 0.01 + 0.011)).to(dtype)
    elif kind == "cancelling":
        flat = _in_pairs(flat.view(-1, shape[-1]), 1).view(-1)
    else:
        odd = torch.tensor([0.0, -0.0, 1e-30, 30000.0, -2e-39, 1e-5, -7.0], dtype=dtype)
        chosen = _mixed(count, seed + 2) % 256 < torch.arange(count) // 701 % 5  # 0 to 4 of 256, by turns
        chosen[-9:] = True  # more than are put at once, up to the end of memory
        places = chosen.nonzero().view(-1)
        flat[places] = odd[torch.arange(len(places)) % len(odd)]
    if kind == "rows of escapes":
        width = shape[-1] if len(shape) > 1 and shape[0] > 1 else count // 3
        flat[width // 2 : width // 2 + width] = (_gaussian(width, seed + 1) * 3e5).to(dtype)
    return flat.view(shape)


def _in_pairs(rows: torch.Tensor, sign: int) -> torch.Tensor:
    """Rows of which every second number is the one before, with a sign; a last one without another is 0."""
    paired = rows.clone()
    paired[:, 1::2] = sign * paired[:, 0 : rows.shape[1] // 2 * 2 : 2]
    if rows.shape[1] % 2:
        paired[:, -1] = 0
    return paired


# --- the ways in which kernels are used ----------------------------------------------------------------


def _untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a result of which nothing is right yet."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    bits(out).fill_(_UNTOUCHED)
    return out


def _packed(tensor: torch.Tensor, layout: Layout) -> Packed:
    packed = pack(tensor, layout=layout)
    assert packed is not None, "every tensor of these dtypes has this layout"
    return packed


def _packed_otherwise(packed: Packed, values: torch.Tensor) -> str:
    """What is other where its device packs the values, empty if nothing."""
    there = _packed(values.to(packed.device), packed.layout).parts if packed.device.type != "cpu" else {}
    other = [name for name, part in there.items() if not torch.equal(part, packed.parts[name])]
    return f"packed on the device, {' and '.join(other)} differ" if other else ""


def _same_bits(wanted: torch.Tensor, result: torch.Tensor) -> str:
    places = (bits(result) != bits(wanted)).nonzero().view(-1)
    if not len(places):
        return ""
    return f"{len(places):,} of {wanted.numel():,} weights differ, the first at {int(places[0]):,}"


def unpacked(kernel: str, shape: _Shape, kind: str, dtype: torch.dtype, layout: Layout) -> Case:
    """A case that unpacks weights, whose bits must come back. A device must pack them as a CPU does."""

    def prepare(device: torch.device) -> Prepared:
        values = weights(shape, kind, dtype)
        packed = _packed(values, layout).to(device)
        out = _untouched(shape, dtype, device)
        return Prepared(lambda: unpack(packed, out), also=lambda: _packed_otherwise(packed, values))

    name = f"{kernel}, {_text(shape)}, {kind}"
    judge = lambda result: _same_bits(weights(shape, kind, dtype), result)  # noqa: E731
    return Case(name, kernel, prod(shape), prepare, judge)


def _looked_up(shape: tuple[int, int], kind: str, turn: int) -> Case:
    height, width = shape
    last = height - 1
    ids = torch.tensor([[last], [0, last, 1, 0], list(range(0, last, 3)), [1] * 9][turn])

    def prepare(device: torch.device) -> Prepared:
        packed, places = _packed(weights(shape, kind, torch.bfloat16), B12).to(device), ids.to(device)
        return Prepared(lambda: rows(packed, places, most_escapes=width))

    name = f"rows_b12, {len(ids)} of {_text(shape)}, {kind}"
    judge = lambda result: _same_bits(weights(shape, kind, torch.bfloat16)[ids], result)  # noqa: E731
    return Case(name, "rows_b12", ids.numel() * width, prepare, judge)


def product(kernel: str, shape: tuple[int, int], kind: str, batch: int) -> Case:
    """A case that multiplies `batch` input rows by a packed matrix (outputs, inputs)."""
    n, k = shape
    x = (_gaussian(batch * k, 4) * 50).bfloat16().view(batch, k)
    x = _in_pairs(x, -1) if kind == "cancelling" else x
    bias = _gaussian(n, 5).bfloat16() if kind not in ("no escapes", "cancelling") else None

    def prepare(device: torch.device) -> Prepared:
        packed, inputs = _packed(weights(shape, kind, torch.bfloat16), B12).to(device), x.to(device)
        added = None if bias is None else bias.to(device)

        def multiplied() -> torch.Tensor:
            product = linear(inputs, packed, added)
            assert product is not None, "a kernel multiplies this shape"
            return product

        return Prepared(multiplied)

    def judge(result: torch.Tensor) -> str:
        added = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double()
        matrix = weights(shape, kind, torch.bfloat16).double().T
        wanted, size = x.double() @ matrix + added, x.double().abs() @ matrix.abs()
        close = (result.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-22 * size
        missed = int((~close).sum())
        return f"{missed:,} of {wanted.numel():,} products are off" if missed else ""

    return Case(f"{kernel}, {batch} x {_text(shape)}, {kind}", kernel, n * k, prepare, judge)


def _table(
    matrices: torch.Tensor, device: torch.device, *, packed: bool
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], int]:
    """Addresses of matrices (count, rows, width) on a device, the memory that they are in, and their base."""
    if not packed:
        there = matrices.to(device)
        return torch.tensor([[matrix.data_ptr()] for matrix in there], device=device), {"matrices": there}, 0
    count, high, _ = matrices.shape
    whole = _packed(matrices, B12).to(device)
    starts, groups = whole.parts["starts"].tolist(), high // whole.grid.group_rows
    table = []
    for n in range(count):
        escapes = slice(starts[n * groups], starts[(n + 1) * groups])
        piece = whole.piece(n * high, (n + 1) * high, escapes)
        table.append([piece.parts[name].data_ptr() for name in PACKED_PARTS])
    return torch.tensor(table, device=device), whole.parts, whole.base


def _chosen(count: int, turn: int) -> torch.Tensor:
    """Ids of experts, in turn: some twice, all, from the end, and such as there is none for."""
    last = count - 1
    return torch.tensor(
        [[last, 0, last], [*range(count)], [-1, -count, 1], [count, _NOT_READ, -count - 1, 0]][turn]
    )


def _counted(counts: torch.Tensor, ids: torch.Tensor) -> str:
    """What is wrong with how often each expert was noted as chosen."""
    count = len(counts)
    ids = torch.where(ids < 0, ids + count, ids)
    wanted = torch.bincount(ids[(ids >= 0) & (ids < count)], minlength=count)
    seen: list[int] = counts.cpu().tolist()
    return "" if seen == wanted.tolist() else f"experts were counted {seen} times, not {wanted.tolist()}"


def _experts(kernel: str, shape: tuple[int, int, int], kind: str, turn: int) -> Case:
    count, high, width = shape
    ids = _chosen(count, turn)
    whole = (len(ids), high, width)

    def prepare(device: torch.device) -> Prepared:
        tensors = weights(shape, kind, torch.bfloat16)
        table, memory, base = _table(tensors, device, packed=kernel == "unpack_expert")
        out, places = _untouched(whole, torch.bfloat16, device), ids.to(device)
        counts = torch.zeros(count, dtype=torch.int64, device=device)

        def taken() -> torch.Tensor:
            if kernel == "gather":
                launch.gather_experts(table, places, out, counts)
            else:
                launch.unpack_experts(table, places, out, counts, rows=high, base=base)
            return out

        return Prepared(taken, memory, lambda: _counted(counts, ids))

    def judge(result: torch.Tensor) -> str:
        tensors = weights(shape, kind, torch.bfloat16)
        wanted = _untouched(whole, torch.bfloat16, result.device)
        there = (ids < count) & (ids >= -count)
        wanted[there] = tensors[ids[there]]
        none = ~there & (ids != _NOT_READ)
        if not result[none].isnan().all():  # any NaN is right for these
            return "an expert that there is none for isn't NaN"
        return _same_bits(wanted[~none], result[~none])

    return Case(f"{kernel}, {len(ids)} of {_text(shape)}, {kind}", kernel, prod(whole), prepare, judge)


def _products_of_experts(kernel: str, sizes: tuple[int, int, int], kind: str, turn: int) -> Case:
    """Of one or two inputs by two experts each; the last turn's ids include one that there is none for."""
    count, inner, outer = sizes
    packed = kernel.endswith("packed")
    tokens, last = 1 if packed else 1 + turn % 2, count - 1
    ids = torch.tensor([[last, 0], [1, last, 0, 1], [0, 1], [last, count, 0, 1]][turn][: 2 * tokens])
    shares = torch.tensor([0.75, 0.25, 0.5, 0.5][: 2 * tokens])
    x = (_gaussian(tokens * outer, 4) * 50).bfloat16().view(tokens, outer)

    def matrices() -> tuple[torch.Tensor, torch.Tensor]:
        downs = weights((count, outer, inner), kind, torch.bfloat16, seed=2)
        if kind != "cancelling":
            return weights((count, 2 * inner, outer), kind, torch.bfloat16), downs
        gates = weights((count, 2, inner, outer), "no escapes", torch.bfloat16).clone()
        even = inner // 2 * 2
        gates[:, :, 1:even:2] = gates[:, :, 0:even:2]
        gates[:, 1, 1:even:2] *= -1  # so that what `down` reads cancels in pairs
        return gates.view(count, 2 * inner, outer), downs

    def prepare(device: torch.device) -> Prepared:
        gates, downs = matrices()
        gate_up, memory, base = _table(gates, device, packed=packed)
        down, more, second = _table(downs, device, packed=packed)
        out = _untouched((tokens, outer), torch.bfloat16, device)
        given = [tensor.to(device) for tensor in (x, ids, shares)]
        counts = torch.zeros(count, dtype=torch.int64, device=device)

        def multiplied() -> torch.Tensor:
            launch.multiply_experts(
                given[0],
                given[1],
                given[2],
                out,
                gate_up=gate_up,
                down=down,
                counts=counts,
                inner=inner,
                bases=(base, second) if packed else None,
            )
            return out

        beside = dict(memory) | {f"down {name}": part for name, part in more.items()}
        return Prepared(multiplied, beside, lambda: _counted(counts, ids))

    def judge(result: torch.Tensor) -> str:
        wanted = torch.zeros(tokens, outer, dtype=torch.float64)
        size = torch.zeros_like(wanted)
        gates, downs = (of.double() for of in matrices())
        for pair, expert in enumerate(ids.tolist()):
            if expert < count:
                token, share = x[pair // 2].double(), float(shares[pair])
                gate, up = (gates[expert] @ token).chunk(2)
                gate_size, up_size = (gates[expert].abs() @ token.abs()).chunk(2)
                hidden = torch.nn.functional.silu(gate)
                about = hidden.abs() * up_size + 1.1 * gate_size * up.abs()  # SiLU is at most so steep
                wanted[pair // 2] += share * (downs[expert] @ (hidden * up))
                size[pair // 2] += share * (downs[expert].abs() @ about)
        close = (result.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-21 * size
        missed = int((~close).sum())
        return f"{missed:,} of {wanted.numel():,} products are off" if missed else ""

    name = f"{kernel}, {tokens} x 2 of {_text(sizes)}, {kind}"
    return Case(name, kernel, len(ids) * 3 * inner * outer, prepare, judge)


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
