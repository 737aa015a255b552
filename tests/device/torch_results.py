"""What torch computes on a device, as digests: its own list of operations with its own samples, and more.

    python tests/device/torch_results.py --device cuda --out FILE [--part 0/4] [--seconds 50] [--tree DIR]

The cases are those of `libraries`, then all of torch's `op_db`, by name, each with float32 and bfloat16 (or,
where it has neither, its first dtype), its first samples, and its gradients in float32. Nothing is left out:
what raises, raises the same on both sides or differs. `elsewhere` lists the libraries that are below --tree,
and were loaded from another place.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SAMPLES, GRADIENTS = 6, 2  # of each operation and dtype
SEED = 7


def digest(value: object) -> str:
    """Of every tensor and number in a result, with shapes and dtypes."""
    total = hashlib.sha256()
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + bits(leaf))
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()[:20]


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as they lie in memory."""
    dense = tensor.detach()
    if dense.is_nested:
        return b"".join(map(bits, dense.unbind()))
    if dense.is_quantized:
        dense = dense.int_repr()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if not dense.numel():
        return b""
    flat = torch.empty(dense.numel(), dtype=dense.dtype)  # without conjugation, negation and strides
    flat.copy_(dense.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def operations(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Cases of torch's own list of operations, by name."""
    if "expecttest" not in sys.modules:  # which only torch's own tests use
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    kind = torch.device(device).type
    for op in sorted(op_db, key=lambda op: (op.name, op.variant_test_name)):
        has = op.supported_dtypes(kind)
        dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in has]
        for dtype in dtypes or sorted(has, key=str)[:1]:
            name = f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name} {str(dtype)[6:]}"
            yield name, lambda op=op, dtype=dtype: forward(op, dtype, device)
            if dtype is torch.float32 and op.supports_autograd:
                yield f"{name} gradient", lambda op=op, dtype=dtype: gradient(op, dtype, device)


def forward(op: Any, dtype: torch.dtype, device: str) -> object:
    results = []
    for _, sample in zip(range(SAMPLES), op.sample_inputs(device, dtype), strict=False):
        torch.manual_seed(SEED)
        results.append(op(sample.input, *sample.args, **sample.kwargs))
    return results


def gradient(op: Any, dtype: torch.dtype, device: str) -> object:
    results = []
    for _, sample in zip(range(GRADIENTS), op.sample_inputs(device, dtype, requires_grad=True), strict=False):
        torch.manual_seed(SEED)
        outputs = [
            each
            for each in leaves(op(sample.input, *sample.args, **sample.kwargs))
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        inputs = [
            each for each in leaves(sample.input) if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if outputs and inputs:
            seeds = [torch.ones_like(each) for each in outputs]
            results.append(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
    return results


def libraries(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE, cuSPARSELt, NCCL, NVRTC and Triton, most at three sizes."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    halves = (torch.float32, torch.float16, torch.bfloat16)
    on_cpu = torch.device(device).type == "cpu"  # a trial, where the large ones take minutes
    for n in (64,) if on_cpu else (64, 1000, 4096):
        for dtype in halves:
            yield f"matmul {n} {dtype}", lambda n=n, d=dtype: drawn(n, n, dtype=d) @ drawn(n, n, dtype=d)
            yield (
                f"bmm {n} {dtype}",
                lambda n=n, d=dtype: torch.bmm(drawn(4, 33, n, dtype=d), drawn(4, n, 65, dtype=d)),
            )
            yield (
                f"linear gelu {n} {dtype}",
                lambda n=n, d=dtype: torch._addmm_activation(
                    drawn(n, dtype=d), drawn(257, n, dtype=d), drawn(n, n, dtype=d), use_gelu=True
                ),
            )
        yield f"matmul tf32 {n}", lambda n=n: in_tf32(lambda: drawn(n, n) @ drawn(n, n))
        yield f"int8 {n}", lambda n=n: torch._int_mm(whole(drawn(n, n)), whole(drawn(n, n)))
        yield f"fp8 {n}", lambda n=n: scaled(drawn(n // 16 * 16, n // 16 * 16))
        yield (
            f"fft {n}",
            lambda n=n: [
                torch.fft.fft(drawn(8, n)),
                torch.fft.rfft2(drawn(n // 4, n)),
                torch.fft.ifft(drawn(3, n + 1).to(torch.complex64)),
            ],
        )
        yield f"fft float64 {n}", lambda n=n: torch.fft.fft(drawn(8, n).double())
        yield f"sparse {n}", lambda n=n: torch.sparse.mm(holes(drawn(n, n)).to_sparse_csr(), drawn(n, 65))
        for dtype in halves[1:]:
            yield (
                f"semi-structured {n} {dtype}",
                lambda n=n, d=dtype: two_of_four(drawn(n // 64 * 64, n // 64 * 64, dtype=d)),
            )
    for n in (16,) if on_cpu else (16, 200, 1024):
        yield f"solvers {n}", lambda n=n: solved(drawn(n, n))
        yield f"solvers float64 {n}", lambda n=n: solved(drawn(n, n).double())
        yield (
            f"batched solvers {n}",
            lambda n=n: torch.linalg.solve(drawn(5, n, n) + n * torch.eye(n, device=device), drawn(5, n, 3)),
        )
    for dtype in halves:
        for channels in (3, 64, 256):
            yield (
                f"convolution {channels} {dtype}",
                lambda c=channels, d=dtype: convolved(
                    drawn(4, c, 30, 30, dtype=d), drawn(64, c, 3, 3, dtype=d)
                ),
            )
            yield (
                f"convolution 3d {channels} {dtype}",
                lambda c=channels, d=dtype: torch.nn.functional.conv3d(
                    drawn(2, c, 9, 9, 9, dtype=d), drawn(8, c, 3, 3, 3, dtype=d)
                ),
            )
            yield (
                f"transposed {channels} {dtype}",
                lambda c=channels, d=dtype: torch.nn.functional.conv_transpose2d(
                    drawn(2, c, 9, 9, dtype=d), drawn(c, 16, 3, 3, dtype=d), stride=2
                ),
            )
        for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
            yield f"{kind.__name__} {dtype}", lambda k=kind, d=dtype: recurrent(k, drawn(9, 4, 64, dtype=d))
        for way in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            for length in (64, 333):
                yield (
                    f"attention {way} {length} {dtype}",
                    lambda w=way, n=length, d=dtype: attention(w, drawn(2, 8, n, 64, dtype=d)),
                )
    yield (
        "jiterator",
        lambda: torch.cuda.jiterator._create_jit_fn(
            "template <typename T> T f(T x, T y) { return x * x + exp(-y); }"
        )(drawn(10_000), drawn(10_000)),
    )
    yield "triton", lambda: by_triton(drawn(10_000))
    yield "nccl", lambda: reduced(drawn(10_000))
    yield (
        "random",
        lambda: torch.randn(100_000, device=device, generator=torch.Generator(device).manual_seed(SEED)),
    )
    yield (
        "sorted",
        lambda: [
            torch.sort(drawn(300_000)),
            torch.topk(drawn(100, 5000), 17),
            torch.unique(whole(drawn(90_000))),
        ],
    )


def reduced(tensor: torch.Tensor) -> object:
    torch.cuda.nccl.all_reduce([tensor])
    return tensor


def in_tf32(compute: Callable[[], object]) -> object:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return compute()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 20).clamp(-127, 127).to(torch.int8)


def scaled(tensor: torch.Tensor) -> object:
    low = tensor.to(torch.float8_e4m3fn)
    unit = torch.ones((), device=tensor.device)
    return torch._scaled_mm(low, low.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)


def holes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor > 1, tensor, 0)


def two_of_four(tensor: torch.Tensor) -> object:
    mask = torch.tensor([0, 0, 1, 1], device=tensor.device).tile(tensor.shape[0], tensor.shape[1] // 4).bool()
    return torch.sparse.to_sparse_semi_structured(tensor.masked_fill(~mask, 0)) @ tensor


def solved(square: torch.Tensor) -> object:
    n = square.shape[0]
    definite = square @ square.T + n * torch.eye(n, device=square.device, dtype=square.dtype)
    return [
        torch.linalg.cholesky(definite), torch.linalg.qr(square), torch.linalg.svdvals(square),
        torch.linalg.eigh(definite), torch.linalg.lu_factor(square), torch.linalg.solve(definite, square),
    ]  # fmt: skip


def convolved(image: torch.Tensor, weight: torch.Tensor) -> object:
    image.requires_grad_()
    weight.requires_grad_()
    out = torch.nn.functional.conv2d(image, weight, padding=1)
    return [out, torch.autograd.grad(out, (image, weight), torch.ones_like(out))]


def recurrent(kind: type[torch.nn.RNNBase], steps: torch.Tensor) -> object:
    torch.manual_seed(SEED)
    return kind(64, 48, num_layers=2).to(steps.device, steps.dtype)(steps)


def attention(way: str, tensor: torch.Tensor) -> object:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensor.requires_grad_()
    with sdpa_kernel(getattr(SDPBackend, way)):
        out = torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True)
        return [out, torch.autograd.grad(out, tensor, torch.ones_like(out))]


def by_triton(tensor: torch.Tensor) -> object:
    import triton_kernel

    return triton_kernel.squared(tensor)


def run(cases: Iterator[tuple[str, Callable[[], object]]], ends: float) -> tuple[dict[str, str], int]:
    """The digest, or the error, of each case by name; and how many there was no time for."""
    results: dict[str, str] = {}
    left = 0
    for name, compute in cases:
        if time.monotonic() > ends:
            left += 1
            continue
        torch.manual_seed(SEED)
        random.seed(SEED)
        try:
            results[name] = digest(compute())
        except Exception as error:
            results[name] = f"raises {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    return results, left


def mapped(tree: Path) -> tuple[list[str], list[str]]:
    """Of the loaded libraries that CUDA's packages have: those from the tree, and those from elsewhere."""
    paths = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line
    }
    ours = sorted(path for path in paths if Path(path).is_relative_to(tree))
    others = sorted(
        path
        for path in paths - {*ours}
        for part in ("/site-packages/", "/dist-packages/")
        if part in path and (tree / path.rpartition(part)[2]).exists()
    )
    return ours, others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--tree", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    number, parts = map(int, args.part.split("/"))
    begun = time.monotonic()
    cases = [*libraries(args.device), *operations(args.device)]
    listed = time.monotonic() - begun
    results, left = run(iter(cases[number::parts]), time.monotonic() + args.seconds)
    ours, others = mapped(args.tree) if args.tree else ([], [])
    args.out.write_text(json.dumps({
        "torch": torch.__version__, "from": str(Path(torch.__file__).parent), "results": results,
        "left": left, "loaded": ours, "elsewhere": others, "listing_s": round(listed, 1),
        "s": round(time.monotonic() - begun, 1),
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
