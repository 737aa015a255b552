"""Packed weights on a GPU: the same bits, products compared with float64, and times against the library.

    PYTHONPATH=. OUT=DIR python tests/device/packing_on_gpu.py [--only planes]

Needs torch, Triton and 12 GB of VRAM. Times are device time: the median of replays of a CUDA graph that has a
different weight for each layer, so that none is in a cache. Writes OUT/bench-device-packing.json.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from board import Board, tell

from probes.placement.packing import codecs, launch
from probes.placement.packing.packed import B10, B12, H13, Packed, form
from probes.placement.packing.products import linear, rows
from probes.placement.packing.tensors import pack, unpack

SIZE, LAYERS = 8192, 40
DTYPES = ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False))
SHAPES = ((2048, 2048), (256, 2048), (11008, 2048), (2048, 11008), (151_936, 2048), (5120, 5120), (768, 3072))
SECONDS = 75  # after which no further shape is timed


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * 0.02).to(dtype)


def microseconds(run: Callable[[], object], layers: int, replays: int = 11) -> float:
    """Device time of a layer."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)[replays // 2] / layers * 1e3


def set_ptx(on: bool) -> None:
    launch._has_ptx = lambda device: on


def bits(board: Board) -> None:
    """Kernels, with and without PTX, against what was packed; the CPU must make the same parts."""
    other = differing = 0
    for shape in ((4096, 2048), (300_001,), (400, 514), (1000, 11008)):
        for dtype, dense in DTYPES:
            tensor = gaussian(*shape, dtype=dtype)
            if dtype is torch.float32:
                tensor += torch.randn_like(tensor) * 1e-5
            tensor.view(-1)[::977] = 1e-30
            tensor.view(-1)[5::977] = -0.0
            packed, on_host = pack(tensor, dense=dense), pack(tensor.cpu(), dense=dense)
            differing += sum(
                not torch.equal(packed.parts[name].cpu(), part) for name, part in on_host.parts.items()
            )
            for ptx in (True, False):
                set_ptx(ptx)
                other += int((words(unpack(packed)) != words(tensor)).sum())
    patterns = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda").to(torch.int16)
    for layout in (B12, B10, H13):
        tensor = torch.cat((gaussian(1 << 20, dtype=layout.dtype), patterns.view(layout.dtype)))
        for ptx in (True, False):
            set_ptx(ptx)
            other += int((words(unpack(pack(tensor, dense=layout is B10))) != words(tensor)).sum())
    board.bar("kernels: weights with other bits", other, 0, "weights")
    board.bar("packing on GPU and CPU: parts that differ", differing, 0, "parts")


def tables(board: Board) -> None:
    """Rows that are looked up in a packed table, and a piece of it, with and without PTX."""
    table = gaussian(50_257, 1600)
    table.view(-1)[::4099] = 30000.0
    table[7] = float("nan")
    packed = pack(table)
    ids = torch.randint(0, len(table), (8, 128), device="cuda")
    ids[0, 0] = 7
    starts = packed.parts["starts"]
    most = int((starts[1:] - starts[:-1]).max())
    piece = packed.piece(4096, 8192, slice(*starts[[4096, 8192]].tolist()))
    other = 0
    for ptx in (True, False):
        set_ptx(ptx)
        other += int((words(rows(packed, ids, most_escapes=most)) != words(table[ids])).sum())
        other += int((words(unpack(piece)) != words(table[4096:8192])).sum())
    board.bar("packed tables: looked up or unpacked weights with other bits", other, 0, "weights")


def products(board: Board) -> None:
    """Fused products against float64, and the library's error beside them."""
    worst = {"ptx": 0.0, "plain": 0.0, "library": 0.0}
    for n, k in ((37, 1154), (1000, 11008), (2048, 2048)):
        weights = gaussian(n, k)
        weights[3, 7:60], weights[7, ::50], weights[9, ::3] = 2.0, 1e-20, 0.0
        packed, bias = pack(weights), gaussian(n) * 50
        for batch in (1, 2, 5, 16):
            x = gaussian(batch, k) * 50
            wanted = x.double() @ weights.double().T + bias.double()
            found = {"library": torch.nn.functional.linear(x, weights, bias)}
            for name in ("ptx", "plain"):
                set_ptx(name == "ptx")
                found[name] = linear(x, packed, bias)
            for name, y in found.items():
                error = float((y.double() - wanted).norm() / wanted.norm())
                worst[name] = max(worst[name], error)
    for name in ("ptx", "plain"):
        board.bar(
            f"fused product, {name}: error against float64, over the library's",
            worst[name] / worst["library"],
            1.05,
            "x",
        )


def large(board: Board) -> list[Packed]:
    """Layers of 8192 x 8192."""
    weights = [gaussian(SIZE, SIZE) for _ in range(LAYERS)]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    packed = [pack(each) for each in weights]
    torch.cuda.synchronize()
    rate = LAYERS * weights[0].nbytes / (time.perf_counter() - begun) / 1e9
    board.bar("packing on the GPU", rate, 1.5, "GB/s", at_least=True)
    x, bias = gaussian(16, SIZE) * 50, gaussian(SIZE)
    for batch in (1, 2, 16):
        rows = x[:batch]
        library = microseconds(
            lambda rows=rows: [torch.nn.functional.linear(rows, w, bias) for w in weights], LAYERS
        )
        fused = microseconds(lambda rows=rows: [linear(rows, p, bias) for p in packed], LAYERS)
        more = {"library_us": round(library, 2), "fused_us": round(fused, 2)}
        if batch == 1:
            board.bar("fused, batch 1, over the library's", fused / library, 1.1, "x", **more)
            board.bar("moonshot: fused, batch 1, over the library's", fused / library, 0.95, "x", **more)
        else:
            board.figure(f"fused, batch {batch}, over the library's", fused / library, "x", **more)
    out = torch.empty_like(weights[0])
    weights.clear()

    def exact() -> None:
        for each in packed:
            torch.nn.functional.linear(x[:1], unpack(each, out), bias)

    board.figure("unpack and multiply, batch 1", microseconds(exact, LAYERS), "us")
    return packed


def unpacking(board: Board, packed: list[Packed]) -> None:
    """Each layout into a scratch buffer."""
    out = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    board.figure("unpack b12", microseconds(lambda: [unpack(p, out) for p in packed], LAYERS), "us")
    packed.clear()
    for dtype, dense in DTYPES[1:]:
        several = []
        for _ in range(4):
            tensor = gaussian(SIZE, SIZE, dtype=dtype)
            several.append(pack(tensor, dense=dense))
        out = torch.empty(SIZE, SIZE, device="cuda", dtype=dtype)
        time_ = microseconds(lambda several=several, out=out: [unpack(p, out) for p in several], 4)
        board.figure(f"unpack {several[0].layout.name}", time_, "us")


def on_host(board: Board) -> None:
    """Packing and unpacking by the CPU."""
    tensor = gaussian(SIZE, SIZE).cpu()
    cores = len(os.sched_getaffinity(0))
    packed_rate = unpacked_rate = 0.0
    for _ in range(4):
        begun = time.perf_counter()
        packed = pack(tensor)
        between = time.perf_counter()
        unpack(packed)
        packed_rate = max(packed_rate, tensor.nbytes / (between - begun) / 1e9)
        unpacked_rate = max(unpacked_rate, tensor.nbytes / (time.perf_counter() - between) / 1e9)
    board.bar("packing on the CPU", packed_rate, 1.5, "GB/s", at_least=True, cores=cores)
    board.figure("unpacking on the CPU", unpacked_rate, "GB/s", cores=cores)


def shapes(board: Board, begun: float) -> None:
    """Layers of real models."""
    for n, k in SHAPES:
        if time.monotonic() - begun > SECONDS:
            tell(f"no time left for {n} x {k}")
            continue
        count = max(2, min(LAYERS, (1 << 29) // (n * k)))
        weights = [gaussian(n, k) for _ in range(count)]
        packed = [pack(each) for each in weights]
        for batch in (1, 16):
            x = gaussian(batch, k) * 50
            library = microseconds(
                lambda x=x, weights=weights: [torch.nn.functional.linear(x, w) for w in weights], count
            )
            fused = microseconds(lambda x=x, packed=packed: [linear(x, p) for p in packed], count)
            more = {"library_us": round(library, 2), "fused_us": round(fused, 2)}
            board.figure(f"{n} x {k}, batch {batch}: fused over the library's", fused / library, "x", **more)


def planes(board: Board) -> None:
    """Two planes of codes, in 10.9 bits a weight, beside 12-bit codes."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda").to(torch.int16)
    tensors = (torch.cat((gaussian(1 << 20), patterns.view(torch.bfloat16))), gaussian(3001, 1001))
    other = differing = 0
    for tensor in tensors:
        packed, on_host = pack(tensor, layout=B10), pack(tensor.cpu(), layout=B10)
        differing += sum(not torch.equal(packed.parts[n].cpu(), part) for n, part in on_host.parts.items())
        for ptx in (True, False):
            set_ptx(ptx)
            other += int((words(unpack(packed)) != words(tensor)).sum())
    set_ptx(torch.version.hip is None)
    board.bar("planes: weights with other bits", other, 0, "weights")
    board.bar("planes: parts that differ when packed on GPU and CPU", differing, 0, "parts")
    for n, k, layers in ((SIZE, SIZE, 8), (11008, 2048, 24), (2048, 2048, 64), (256, 2048, 128)):
        us, bits = planes_unpacked(n, k, layers)
        ratio = us["b10"] / us["b12"]
        name, more = f"planes, {n} x {k}: time to unpack over that of 12-bit codes", {"us": us, "bits": bits}
        if n == SIZE:
            board.bar("planes: bits of a Gaussian weight", bits["b10"], 10.9, "bits")
            board.bar(name, ratio, 1.3, "x", **more)
        else:
            board.figure(name, ratio, "x", **more)


def planes_unpacked(n: int, k: int, layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds and bits of each layout, by name; two planes also in other blocks and by other warps."""
    packed: dict[str, list[Packed]] = {}
    settings = {"b12": (0, 0), "b10": (launch._BLOCK, launch._WARPS)}
    others = ((2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 2), (8192, 8))
    settings |= {f"b10, {block} by {warps} warps": (block, warps) for block, warps in others}
    generator_state = torch.cuda.get_rng_state()
    for name, (block, _) in settings.items():
        torch.cuda.set_rng_state(generator_state)
        codecs._BLOCK = block or codecs._BLOCK
        layout = B10 if block else B12
        packed[name] = [pack(gaussian(n, k), layout=layout) for _ in range(layers)]
    out = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    took: dict[str, list[float]] = {}
    for _ in range(3):
        for name, several in packed.items():
            launch._BLOCK, launch._WARPS = settings[name] if settings[name][0] else settings["b10"]
            time_ = microseconds(lambda several=several: [unpack(each, out) for each in several], layers)
            took.setdefault(name, []).append(time_)
    codecs._BLOCK = settings["b10"][0]
    launch._BLOCK, launch._WARPS = settings["b10"]
    us = {name: round(sorted(times)[1], 2) for name, times in took.items()}
    return us, {name: round(8 * form(several[0]).n_bytes / (n * k), 3) for name, several in packed.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["planes"], help="the layout of two planes alone")
    only = parser.parse_args().only
    begun = time.monotonic()
    torch.manual_seed(0)
    board = Board(
        "device-packing",
        command="tests/device/packing_on_gpu.py",
        results=Path(os.environ.get("OUT", ".")),
    )
    board.line(
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    )
    if only:
        planes(board)
        return board.finish()
    bits(board)
    planes(board)
    tables(board)
    products(board)
    set_ptx(torch.version.hip is None)
    unpacking(board, large(board))
    on_host(board)
    shapes(board, begun)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
