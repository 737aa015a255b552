"""A CUDA library for two cards, pruned to one: its kernels still run on that card, and on no other.

Needs nvcc and an NVIDIA GPU. The same cut as for HIP libraries, where no AMD GPU is at hand.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import prune_file

NVCC = shutil.which("nvcc") or next((p for p in ("/usr/local/cuda/bin/nvcc",) if Path(p).exists()), None)

KERNEL = r"""
#include <cuda_runtime.h>
template <int N> __global__ void NAME(float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v = i < n ? x[i] : 0.f;
#pragma unroll
  for (int k = 0; k < N; ++k) v = __sinf(v) * (k + FACTOR) + __expf(-v * v) / (1.f + k);
  if (i < n) x[i] = v;
}
extern "C" int run_NAME(float *out, int n) {
  float *d = nullptr;
  if (cudaMalloc(&d, n * sizeof(float)) != cudaSuccess) return 1000;
  cudaMemset(d, 0, n * sizeof(float));
  NAME<512><<<(n + 255) / 256, 256>>>(d, n);
  NAME<300><<<(n + 255) / 256, 256>>>(d, n);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaMemcpy(out, d, n * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(d);
  return (int)error;
}
"""
# in a process of its own: an error of CUDA sticks to the process
RUN = r"""
import ctypes, hashlib, json, sys
library = ctypes.CDLL(sys.argv[1])
told = {}
for name in ("first", "second"):
    out = (ctypes.c_float * 4096)()
    error = getattr(library, "run_" + name)(out, 4096)
    told[name] = [error, hashlib.sha256(bytes(out)).hexdigest()]
print(json.dumps(told))
"""
NO_KERNEL_IMAGE = 209  # cudaErrorNoKernelImageForDevice


def own_architecture() -> int:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    major, minor = subprocess.check_output(query, text=True).splitlines()[0].split(".")
    return int(major) * 10 + int(minor)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NVCC is None or shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvcc and an NVIDIA GPU")
    folder = tmp_path_factory.mktemp("cuda")
    sources = []
    for name, factor in (("first", "1.5f"), ("second", "0.75f")):
        source = folder / f"{name}.cu"
        source.write_text(KERNEL.replace("NAME", name).replace("FACTOR", factor))
        sources.append(str(source))
    own = own_architecture()
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in sorted({75, 80, own})]
    out = folder / "libkernels.so"
    subprocess.run(
        [NVCC, "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", *codes, "-o", str(out), *sources],
        check=True,
    )
    return out


def launched(library: Path) -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def targets_in(path: Path) -> set[str]:
    data = path.read_bytes()
    return set(scan_file(Source.of_bytes(data)))


def test_kernels_of_a_pruned_library_run_and_give_the_same_bits(library: Path) -> None:
    own = f"sm_{own_architecture()}"
    out = library.with_name("own.so")
    plan = prune_file(library, parse_targets(own), out=out)
    assert plan.bytes_after < plan.bytes_before
    assert own in targets_in(out)
    assert "sm_75" not in targets_in(out)
    after = launched(out)
    assert after == launched(library)
    assert [error for error, _ in after.values()] == [0, 0]


def test_kernels_that_were_removed_do_not_run(library: Path) -> None:
    out = library.with_name("other.so")
    prune_file(library, parse_targets("sm_75"), out=out)
    assert [error for error, _ in launched(out).values()] == [NO_KERNEL_IMAGE, NO_KERNEL_IMAGE]
