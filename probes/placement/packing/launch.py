"""Starts kernels, where a device has Triton. Everything here is safe in a CUDA graph after a first call."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, Protocol

import torch

from probes.placement.packing.format import PACKED_PARTS, Grid

_ALIGNED: Final = 16  # bytes: what Triton compiles another kernel for
_known: dict[Hashable, tuple[Callable[..., object], tuple[Any, ...]]] = {}


class Kernel(Protocol):
    """A kernel as Triton gives it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What starts it, and returns what was compiled for the arguments."""


def start_again(key: Hashable, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> bool:
    """Start the kernel that `start` has started with this key; False where that isn't known, or not right."""
    known = _known.get(key)
    if known is None:
        return False
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not _aligned(addresses):
        return False
    begin, constants = known
    begin(*addresses, *numbers, *constants)
    return True


def start(
    kernel: Kernel,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    *,
    options: Mapping[str, int],
    key: Hashable,
) -> None:
    """Start `kernel[grid]`, compiled if need be, and remember it under `key`.

    Arguments are in the order of its parameters: tensors, numbers, constants. `options` are Triton's own.
    With the same key, all but the tensors' addresses and the floating-point numbers must be the same.
    """
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    # The interpreter gives no compiled kernel. Triton before 3.3 wants no constants when one is started, and
    # doesn't list them in its signature.
    types = list(getattr(getattr(compiled, "src", None), "signature", {}).values())
    if types.count("constexpr") == len(constants) and _aligned([tensor.data_ptr() for tensor in tensors]):
        _known[key] = compiled[(*grid, 1, 1)[:3]], tuple(constants.values())


def _aligned(addresses: Sequence[int]) -> bool:
    together = 0
    for address in addresses:
        together |= address
    return not together % _ALIGNED


_AMD: Final = re.compile(
    r"gfx(908|90a|94.|95.|1[12]..)\b"
)  # the AMD GPUs that Triton 3.9 compiles our kernels for
_INPUT_EXPONENT: Final = 60  # see `multiplying`
_WEIGHT_EXPONENT: Final = 64
_BLOCK: Final = 8192
_WARPS: Final = 4  # that unpack a block of 2-bit codes

Parts = Mapping[str, torch.Tensor]


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels run on a device: Triton is installed, and it compiles for that GPU."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        supported = bool(_AMD.match(getattr(properties, "gcnArchName", "")))
    else:
        supported = properties.major >= 8
    if not supported:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def unpack_window(
    parts: Parts, out: torch.Tensor, *, rows: int, width: int, group_rows: int, base: int
) -> None:
    """Unpack 4-bit codes into contiguous `out`: bfloat16 (`b12`) or float32 (`f28`)."""
    from probes.placement.packing.kernels import unpack_b12, unpack_f28

    block = min(2048, max(32, 1 << (width // 2 - 1).bit_length()))
    grid = (-(-rows // group_rows),)
    escapes = (parts["values"], parts["positions"], parts["starts"])
    with _on(out.device):
        if out.dtype is torch.float32:
            planes = (parts["rest0"], parts["rest1"], parts["rest2"], parts["codes"])
            words = out.view(torch.int32)
            block = min(block, 1024)
            unpack_f28[grid](
                *planes, *escapes, words, out.numel(), rows, base, WIDTH=width, GROUP=group_rows, BLOCK=block
            )
            return
        unpack_b12[grid](
            parts["rest0"],
            parts["codes"],
            *escapes,
            out,
            out.numel(),
            rows,
            2.0**base,
            WIDTH=width,
            GROUP=group_rows,
            BLOCK=block,
            PTX=_has_ptx(out.device),
            num_warps=8 if block >= 2048 else 4,
        )


def unpack_rows(parts: Parts, ids: torch.Tensor, out: torch.Tensor, *, base: int) -> None:
    """Unpack the rows `ids` (flat) of a `b12` matrix into `out`, contiguous, of shape (ids, width).

    An id that there is no row for ends in torch's own device-side assertion.
    """
    from probes.placement.packing.kernels import rows_b12

    width = out.shape[1]
    first = parts["starts"][:-1].index_select(0, ids)  # which refuses ids out of range
    block = min(1024, 1 << (width // 2 - 1).bit_length())
    planes = (parts["rest0"], parts["codes"], parts["values"], parts["positions"], parts["starts"])
    with _on(out.device):
        rows_b12[(ids.numel(),)](
            ids,
            first,
            *planes,
            out,
            out.numel(),
            2.0**base,
            WIDTH=width,
            BLOCK=block,
            PTX=_has_ptx(out.device),
        )


def unpack_planes(parts: Parts, out: torch.Tensor, *, table: tuple[int, ...], low_bits: int) -> bool:
    """Unpack 2-bit codes, and 3-bit ones of their escapes, into contiguous `out` of 16-bit floats.

    False where blocks are too small, or memory doesn't begin at a 32-bit word.
    """
    from probes.placement.packing.kernels import unpack_planes as kernel

    blocks = parts["starts"].numel() // 2 - 1
    in_words = (parts["rest"], parts.get("low", out), parts["two"], out)
    if parts["rest"].numel() != blocks * _BLOCK or any(one.data_ptr() % 4 for one in in_words):
        return False
    codes = ((0, *table[:3]), table[3:7], table[7:])
    words = [int.from_bytes(bytes(four), "little", signed=True) for four in codes]
    names = ("rest", "low", "two", "stream", "starts", "positions", "exponents")
    known = [name in parts and parts[name].numel() > 0 for name in names]
    tensors = [parts[name if is_there else "rest"] for name, is_there in zip(names, known, strict=True)]
    tensors.append(out.view(torch.int16))  # none is a null pointer
    numbers = (out.numel(), blocks, *words)
    key = ("planes", out.device, low_bits, *known, *numbers)
    with _on(out.device):
        if not start_again(key, tensors, numbers):
            constants = {"BLOCK": _BLOCK, "LOW_BITS": low_bits, "PTX": _has_ptx(out.device)}
            start(kernel, (blocks,), tensors, numbers, constants, options={"num_warps": _WARPS}, key=key)
    return True


def multiply(
    x: torch.Tensor,
    parts: Parts,
    y: torch.Tensor,
    *,
    base: int,
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
    warps: int,
    stages: int,
) -> None:
    """y = x W^T + bias: `x` (..., k) and `y` (..., n) are contiguous bfloat16.

    Each program multiplies `rows` of W, in pieces of 2 x `columns`. One input row has a kernel of its own.
    """
    k, n = x.shape[-1], y.shape[-1]
    batch = x.numel() // k
    tensors = [x, *(parts[name] for name in PACKED_PARTS), y if bias is None else bias, y]
    numbers: tuple[int | float, ...] = (n, 2.0 ** (base - _WEIGHT_EXPONENT), batch)
    if batch == 1:
        numbers = (n, 2.0**_INPUT_EXPONENT, 2.0 ** (base - _INPUT_EXPONENT))
    key = (x.device, batch, n, k, rows, columns, warps, stages, bias is None)
    with _on(x.device):
        if start_again(key, tensors, numbers):
            return
        kernel, constants = _product(x, batch, rows=rows, columns=columns)
        constants |= {"BIAS": bias is not None, "PTX": _has_ptx(x.device), "STAGES": stages}
        grid, options = (-(-n // rows),), {"num_warps": warps}
        start(kernel, grid, tensors, numbers, constants, options=options, key=key)


def _product(x: torch.Tensor, batch: int, *, rows: int, columns: int) -> tuple[Kernel, dict[str, Any]]:
    """The kernel for so many input rows, and its first constants, in the order of its parameters."""
    import triton.language as tl

    from probes.placement.packing.kernels import few_rows, one_row

    sizes = {"K": x.shape[-1], "BN": rows, "BK": columns}
    if batch == 1:
        return one_row, {**sizes, "ESCAPES": 8}
    # the interpreter multiplies the words of bfloat16 as if they were integers
    return few_rows, {**sizes, "BB": 16, "FACTORS": tl.bfloat16 if x.is_cuda else tl.float32, "ESCAPES": 1}


_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))  # by bytes
_GATHERED: Final = 2048  # words that a program copies


def gather_experts(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, counts: torch.Tensor | None
) -> None:
    """Copy the weights of the experts `ids` (flat int64) to `out`, contiguous, of shape (ids, ...).

    `table` (experts, columns) has their addresses in its first column. `counts` (experts) is added to.
    Negative ids count from the end. For an id without an expert NaN is written, and nothing far below zero.
    """
    from probes.placement.packing.expert_kernels import gather

    each = out.nbytes // ids.numel()
    size, word = next(kind for kind in _WORDS if not each % kind[0])
    words = each // size
    with _on(out.device):
        gather[(ids.numel() * -(-words // _GATHERED),)](
            ids,
            table,
            ids if counts is None else counts,
            out.view(-1).view(torch.uint8).view(word),
            words,
            table.shape[0],
            table.stride(0),
            COUNTED=counts is not None,
            BLOCK=_GATHERED,
            EVEN=not each % _ALIGNED,
        )


def unpack_experts(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    rows: int,
    base: int,
) -> None:
    """Unpack the `b12` weights of the experts `ids` to `out`, bfloat16; the rest is as for `gather_experts`.

    The table's first five columns have the addresses of `rest0`, `codes`, `values`, `positions` and
    `starts` of `rows` rows of each expert.
    """
    from probes.placement.packing.expert_kernels import unpack_expert

    each = out.numel() // ids.numel()
    width = each // rows
    group_rows = Grid(rows, width, each).group_rows
    block = min(2048, max(32, 1 << (width // 2 - 1).bit_length()))
    with _on(out.device):
        unpack_expert[(ids.numel() * -(-rows // group_rows),)](
            ids,
            table,
            ids if counts is None else counts,
            out,
            each,
            rows,
            table.shape[0],
            table.stride(0),
            2.0**base,
            COUNTED=counts is not None,
            WIDTH=width,
            GROUP=group_rows,
            BLOCK=block,
            EVEN=not each % (2 * _ALIGNED),
            PTX=_has_ptx(out.device),
            num_warps=8 if block >= 2048 else 4,
        )


GATE_ROWS: Final = 2  # of both matrices, that a program multiplies: 2 x 1,024 columns were best on an H200
DOWN_ROWS: Final = 1
_COLUMNS: Final = 1024


def multiply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    counts: torch.Tensor,
    inner: int,
    bases: tuple[int, int] | None,
) -> None:
    """out (tokens, n) = sum over each token's experts of share * D (SiLU(G x) * U x), x (tokens, n).

    `ids` and `shares` (tokens, chosen) are flat and contiguous. `gate_up` and `down` are tables of addresses
    (experts, columns) of matrices (2 x inner, n) and (n, inner), packed ones where `bases` has their bases.
    An id of `experts` or more adds nothing, as in transformers' own products; one below zero gives NaN.
    """
    from probes.placement.packing import expert_kernels

    tokens, n = x.shape
    top = ids.numel() // max(tokens, 1)
    hidden = torch.empty((ids.numel(), inner), dtype=torch.float32, device=x.device)
    packed = bases is not None
    scaled = tuple(2.0 ** (base - _INPUT_EXPONENT) for base in bases or (0, 0))
    even = not n * inner * (1 if packed else x.dtype.itemsize) % (2 * _ALIGNED)
    common = {"TOP": top, "PACKED": packed, "EVEN": even, "PTX": _has_ptx(x.device)}

    def columns(k: int) -> int:
        return min(_COLUMNS // (1 + packed), max(32, 1 << ((k // 2 if packed else k) - 1).bit_length()))

    with _on(x.device):
        expert_kernels.gate_up[(ids.numel() * -(-inner // GATE_ROWS),)](
            x,
            ids,
            gate_up,
            counts,
            hidden,
            inner,
            gate_up.shape[0],
            gate_up.stride(0),
            2.0**_INPUT_EXPONENT,
            scaled[0],
            K=n,
            BN=GATE_ROWS,
            BK=columns(n),
            **common,
        )
        expert_kernels.down[(tokens * -(-n // DOWN_ROWS),)](
            hidden,
            ids,
            down,
            shares,
            out,
            n,
            down.shape[0],
            down.stride(0),
            2.0**_INPUT_EXPONENT,
            scaled[1],
            K=inner,
            BN=DOWN_ROWS,
            BK=columns(inner),
            **common,
        )


def has_narrow_wavefronts(device: torch.device) -> bool:
    """Whether it is an AMD GPU whose wavefronts have 32 threads (RDNA) instead of 64."""
    return (
        device.type == "cuda"
        and torch.version.hip is not None
        and torch.cuda.get_device_properties(device).warp_size == 32
    )


def _has_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    current: AbstractContextManager[object] = torch.cuda.device(device)
    return current
