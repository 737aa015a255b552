"""Paths as real packages have them, and the targets that they name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildtool.gpucode.target import gfx_targets_of_path

ROCBLAS = "usr/lib/x86_64-linux-gnu/rocblas/2.47.0/library"

NAMED = [
    (f"{ROCBLAS}/TensileLibrary_gfx906.co", ("gfx906",)),
    (f"{ROCBLAS}/Kernels.so-000-gfx90a-xnack+.hsaco", ("gfx90a",)),
    (f"{ROCBLAS}/Kernels.so-000-gfx1100.hsaco", ("gfx1100",)),
    (f"{ROCBLAS}/TensileLibrary_lazy_gfx1030.dat", ("gfx1030",)),
    (f"{ROCBLAS}/TensileLibrary_Type_HH_Contraction_l_Ailk_Bjlk_fallback_gfx803.hsaco", ("gfx803",)),
    ("opt/rocm/lib/hipblaslt/library/TensileLibrary_BB_BB_HA_Bias_gfx942.dat.gz", ("gfx942",)),
    ("opt/rocm/lib/hipblaslt/library/gfx950/Kernels.so-000.hsaco", ("gfx950",)),
    ("opt/rocm/lib/hipblaslt/library/extop_gfx908_gfx90a.co", ("gfx908", "gfx90a")),
    ("opt/rocm/share/miopen/db/gfx906_60.kdb", ("gfx906",)),
    ("opt/rocm/share/miopen/db/gfx906_60.kdb.bz2", ("gfx906",)),
    ("opt/rocm/share/miopen/db/gfx1030_36.db.txt", ("gfx1030",)),
    ("opt/rocm/share/miopen/db/gfx90a68.db.txt", ("gfx90a",)),
    ("opt/rocm/share/miopen/db/gfx90a6e.HIP.fdb.txt", ("gfx90a",)),
    ("opt/rocm/share/miopen/db/gfx90878.db", ("gfx908",)),
    ("opt/rocm/share/miopen/db/gfx942130.db", ("gfx942",)),
    ("opt/rocm/share/miopen/db/gfx950100.HIP.fdb.txt", ("gfx950",)),
    ("opt/rocm/share/miopen/db/gfx110060.OpenCL.ufdb.txt", ("gfx1100",)),
    ("opt/rocm/share/miopen/db/gfx1030_36.updb.txt", ("gfx1030",)),
    ("opt/rocm/lib/hipblaslt/library/TensileLibrary_lazy_gfx950.dat.zst", ("gfx950",)),
    ("opt/rocm/lib/hipsparselt/library/Kernels.so-000-gfx942.hsaco", ("gfx942",)),
    ("opt/rocm/share/miopen/db/gfx908_metadata.tn.model", ("gfx908",)),
    ("torch/lib/aotriton.images/amd-gfx90a/flash/attn_fwd/FONLY__fp16.aks2", ("gfx90a",)),
    ("torch/lib/aotriton.images/amd-gfx120x/flash/attn_fwd/a.aks2", ("gfx1200", "gfx1201")),
    ("aotriton/kernels/gfx942/attn.hsaco.zst", ("gfx942",)),
    ("aiter_meta/hsa/gfx942/fmha_v3_fwd/fwd_hd128.co", ("gfx942",)),
    ("opt/rocm/lib/rocfft_kernel_cache_gfx1100.db", ("gfx1100",)),
    ("opt/rocm/lib/llvm/lib/libomptarget-amdgpu-gfx90c.bc", ("gfx90c",)),
    ("_rocm_sdk/.kpack/blas_lib_gfx1201.kpack", ("gfx1201",)),
    ("lib/new_card_gfx1310.co", ("gfx1310",)),
]
UNNAMED_CODE = [
    f"{ROCBLAS}/TensileLibrary_Type_ZZ_Contraction_fallback.dat",
    f"{ROCBLAS}/TensileLibrary_gfx000.dat",
    f"{ROCBLAS}/Kernels.so-000-gfx11-generic.hsaco",
    f"{ROCBLAS}/Kernels.so-000-gfx9-4-generic.hsaco",
    "opt/rocm/lib/hipblaslt/library/hipblasltTransform.hsaco",
    "opt/rocm/lib/hipblaslt/library/hipblasltExtOpLibrary.dat",
    "opt/rocm/lib/rocfft/rocfft_kernel_cache.db",
    "opt/rocm/share/miopen/db/miopen.kdb",
    "torch/lib/aotriton.images/any/flash/attn_fwd/a.aks2",
    "opt/rocm/lib/hipblaslt/library/TensileLibrary_gfx12-generic.co",
]
NO_CODE = [
    "usr/lib/librocblas.so.0",
    "opt/rocm/lib/libdevice_gemm_operations_gfx942.so",
    "triton/backends/amd/lib/gfx950.py",
    "opt/rocm/include/hip/amd_gfx906.h",
    "share/rocprofiler-compute/gfx90a/0100_system.yaml",
    "opt/rocm/amdgcn/bitcode/oclc_isa_version_906.bc",
    "var/lib/stuff/gfxcard.dat",
    "data/mygfx906.dat",
    "home/gfx906-env/lib/python3/site-packages/pkg/tables.dat",
    "home/gfx906/cache/words.db",
    "models/bert.model",
    "var/cache/ldconfig/aux.dat",
    "",
    "/",
]


@pytest.mark.parametrize(("path", "targets"), NAMED)
def test_path_names_its_targets(path: str, targets: tuple[str, ...]) -> None:
    assert gfx_targets_of_path(path) == targets
    assert gfx_targets_of_path("/" + path) == targets


@pytest.mark.parametrize("path", UNNAMED_CODE)
def test_fallback_and_generic_code_names_no_target(path: str) -> None:
    assert gfx_targets_of_path(path) == ()


@pytest.mark.parametrize("path", NO_CODE)
def test_file_that_only_mentions_a_target_is_no_gpu_code(path: str) -> None:
    assert gfx_targets_of_path(path) == ()


def test_family_in_a_directory_gives_all_its_members() -> None:
    found = gfx_targets_of_path("aotriton.images/amd-gfx11xx/flash/x.aks2")
    assert found == (
        "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1154",
        "gfx1170", "gfx1171", "gfx1172",
    )  # fmt: skip
    assert gfx_targets_of_path("aotriton.images/amd-gfx120x/flash/x.aks2") == ("gfx1200", "gfx1201")
    assert gfx_targets_of_path("lib/K_gfx94x.co") == ("gfx940", "gfx941", "gfx942")


def test_file_name_wins_over_its_directory() -> None:
    assert gfx_targets_of_path("hsa/gfx942/kernel_gfx950.co") == ("gfx950",)


@pytest.mark.thorough
@given(st.text(alphabet="gfx01239ac._-/+ \x00é", max_size=60))
def test_any_text_gives_a_sorted_answer(text: str) -> None:
    found = gfx_targets_of_path(text + ".co")
    assert list(found) == sorted(set(found))
