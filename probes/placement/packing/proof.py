"""Cases that prove the kernels: on a card by `weir probe prove`, and without one on emulated machine code.

The kernels of experts have no cases yet.

Their weights come from a formula, so that they have the same bits everywhere. Each of nine kernels has five
shapes with weights of four kinds each: Gaussian ones with zeros, subnormal and large numbers among them;
numbers that need no escape; whole rows of escapes; for unpacking, every bit pattern, else nothing but zeros.
What is unpacked must have the bits that were packed. A product may differ from float64's by half of a last
bit of bfloat16, and 2^-22 of the sum of its terms' sizes for the order in which float32 adds them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from probes.placement.packing.packed import B11, B12, F28, H14, Layout, Packed
from probes.placement.packing.products import linear, rows
from probes.placement.packing.tensors import pack, unpack

RECORDED: Final = Path(__file__).with_name("proof.json")  # digests of what emulated targets gave
KINDS: Final = ("gaussian", "no escapes", "rows of escapes", "every pattern")
OF_PRODUCTS: Final = ("gaussian", "no escapes", "rows of escapes", "zeros")
_SHAPES: Final = ((16, 512), (5, 1030), (33, 256), (70_001,), (2, 9000))
_LENGTHS: Final = ((131_072,), (131_073,), (133_120,), (140_001,), (64, 2176))  # 3-bit codes from 2^17 on
_TABLES: Final = ((200, 2048), (64, 512), (33, 1030), (16, 8192), (70, 768))
_EVEN: Final = ((37, 512), (6, 1024), (64, 2048), (1, 4096), (100, 1536))
_UNEVEN: Final = ((37, 1152), (6, 1922), (64, 514), (1, 3000), (100, 1300))
_BATCHES: Final = (2, 5, 16, 3)
_WORDS: Final = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `wrong`: what differs, empty if nothing; `digest`: of the result's bits."""

    wrong: str
    digest: str


@dataclass(frozen=True)
class Case:
    """`prepare` puts what the kernel needs on a device; `judge` compares its result with what it must be."""

    name: str
    kernel: str
    weights: int
    prepare: Callable[[torch.device], Callable[[], torch.Tensor]]
    judge: Callable[[torch.Tensor], str]

    def outcome(self, device: torch.device) -> Outcome:
        """Run the kernel once."""
        return self.judged(self.prepare(device)())

    def judged(self, result: torch.Tensor) -> Outcome:
        """Compare a result, wherever it is."""
        here = result.detach().as_subclass(torch.Tensor).cpu()
        return Outcome(self.judge(here), digest(here))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a tensor, flat."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.dtype])


def digest(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits for the bits of a tensor on the CPU."""
    return hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict[str, dict[str, str]]:
    """For each case the digest of its result by emulated target; empty where none was recorded."""
    document: dict[str, dict[str, str]] = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    return document


def cases() -> Iterator[Case]:
    """All cases, the same on every machine, kernel by kernel."""
    for kernel, dtype, layout in (
        ("unpack_b12", torch.bfloat16, B12),
        ("unpack_f28", torch.float32, F28),
    ):
        for shape in _SHAPES:
            for kind in KINDS:
                yield _unpacked(kernel, weights(shape, kind, dtype), kind, layout)
    for name, dtype, layout in (("b11", torch.bfloat16, B11), ("h14", torch.float16, H14)):
        for shape in _LENGTHS:
            for kind in KINDS:
                yield _unpacked(f"unpack_ranked {name}", weights(shape, kind, dtype), kind, layout)
    for shape in _TABLES:
        for turn, kind in enumerate(KINDS):
            yield _looked_up(weights(shape, kind, torch.bfloat16), kind, turn)
    for name, shapes in (("even", _EVEN), ("uneven", _UNEVEN)):
        for kernel in ("one_row", "few_rows"):
            for shape in shapes:
                for turn, kind in enumerate(OF_PRODUCTS):
                    batch = 1 if kernel == "one_row" else _BATCHES[turn]
                    yield _product(f"{kernel} {name}", weights(shape, kind, torch.bfloat16), kind, batch)


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


def weights(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Weights of a kind on the CPU."""
    count = 1
    for size in shape:
        count *= size
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
    elif kind == "zeros":
        flat = torch.zeros(count, dtype=dtype)
    else:
        odd = torch.tensor([0.0, -0.0, 1e-30, 30000.0, -2e-39, 1e-5, -7.0], dtype=dtype)
        places = torch.arange(0, count, 977)
        flat[places] = odd[torch.arange(len(places)) % len(odd)]
    if kind == "rows of escapes":
        width = shape[-1] if len(shape) > 1 and shape[0] > 1 else count // 3
        flat[width // 2 : width // 2 + width] = (_gaussian(width, seed + 1) * 3e5).to(dtype)
    return flat.view(shape)


# --- the three ways in which kernels are used ----------------------------------------------------------


def _packed(tensor: torch.Tensor, layout: Layout) -> Packed:
    packed = pack(tensor, layout=layout)
    assert packed is not None, "every tensor of these dtypes has this layout"
    return packed


def _same_bits(wanted: torch.Tensor, result: torch.Tensor) -> str:
    places = (bits(result) != bits(wanted)).nonzero().view(-1)
    if not len(places):
        return ""
    return f"{len(places):,} of {wanted.numel():,} weights differ, the first at {int(places[0]):,}"


def _unpacked(kernel: str, tensor: torch.Tensor, kind: str, layout: Layout) -> Case:
    def prepare(device: torch.device) -> Callable[[], torch.Tensor]:
        packed = _packed(tensor, layout).to(device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        bits(out).fill_(0x5A5A)  # none is right yet

        return lambda: unpack(packed, out)

    name = f"{kernel}, {_text(tensor.shape)}, {kind}"
    return Case(name, kernel, tensor.numel(), prepare, partial(_same_bits, tensor))


def _looked_up(table: torch.Tensor, kind: str, turn: int) -> Case:
    last = len(table) - 1
    ids = torch.tensor([[last], [0, last, 1, 0], list(range(0, last, 3)), [1] * 9][turn])

    def prepare(device: torch.device) -> Callable[[], torch.Tensor]:
        packed, places = _packed(table, B12).to(device), ids.to(device)
        return lambda: rows(packed, places, most_escapes=table.shape[1])

    name = f"rows_b12, {len(ids)} of {_text(table.shape)}, {kind}"
    return Case(name, "rows_b12", ids.numel() * table.shape[1], prepare, partial(_same_bits, table[ids]))


def _product(kernel: str, matrix: torch.Tensor, kind: str, batch: int) -> Case:
    n, k = matrix.shape
    x = (_gaussian(batch * k, 4) * 50).bfloat16().view(batch, k)
    bias = _gaussian(n, 5).bfloat16() if kind != "no escapes" else None

    def prepare(device: torch.device) -> Callable[[], torch.Tensor]:
        packed, inputs = _packed(matrix, B12).to(device), x.to(device)
        added = None if bias is None else bias.to(device)

        def multiplied() -> torch.Tensor:
            product = linear(inputs, packed, added)
            assert product is not None, "a kernel multiplies this shape"
            return product

        return multiplied

    def judge(result: torch.Tensor) -> str:
        added = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double()
        wanted = x.double() @ matrix.double().T + added
        size = x.double().abs() @ matrix.double().abs().T
        close = (result.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-22 * size
        missed = int((~close).sum())
        return f"{missed:,} of {wanted.numel():,} products are off" if missed else ""

    return Case(f"{kernel}, {batch} x {_text(matrix.shape)}, {kind}", kernel, matrix.numel(), prepare, judge)


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
