"""A profile's word for a device becomes torch's, or an error that says what is missing."""

import pytest
from service.errors import DeviceMissing, Exit, SettingsError
from service.inference.device import Gpu, TorchBuild, choose_device

CPU = TorchBuild("2.13.0+cpu")
CUDA = TorchBuild("2.13.0+cu130", cuda="13.0", gpus=(Gpu("H200"), Gpu("H200")))
HIP = TorchBuild(
    "2.13.0+rocm7.0", hip="7.0", gpus=(Gpu("Instinct MI210", "gfx90a"),), gfx_targets=("gfx90a", "gfx942")
)


@pytest.mark.parametrize(
    ("word", "build", "torch_name", "label"),
    [
        ("cpu", CPU, "cpu", "cpu"),
        ("cpu", HIP, "cpu", "cpu"),
        ("rocm", HIP, "cuda:0", "rocm:0"),
        ("hip:0", HIP, "cuda:0", "hip:0"),
        ("cuda", HIP, "cuda:0", "cuda:0"),
        ("cuda:1", CUDA, "cuda:1", "cuda:1"),
        (" ROCm ", HIP, "cuda:0", "rocm:0"),
    ],
)
def test_a_word_means_torchs_device(word: str, build: TorchBuild, torch_name: str, label: str) -> None:
    device = choose_device(word, build)
    assert (device.torch_name, device.label) == (torch_name, label)
    assert build.version in device.description


@pytest.mark.parametrize("word", ["", "gpu", "rocm:", "rocm:x", "cpu:0:1", "mps", "rocm:-1", "rocm:9999"])
def test_an_unknown_word_is_a_settings_error(word: str) -> None:
    with pytest.raises(SettingsError, match="not known") as caught:
        choose_device(word, HIP)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize("word", ["rocm", "hip", "cuda"])
def test_a_cpu_build_is_refused_by_name_and_never_used_instead(word: str) -> None:
    with pytest.raises(DeviceMissing, match=r"torch 2\.13\.0\+cpu \(CPU only\)") as caught:
        choose_device(word, CPU)
    assert caught.value.exit_code == Exit.ENVIRONMENT == 3
    assert "APP_PROFILE=experiment1" in caught.value.hint


def test_rocm_on_a_cuda_build_is_refused() -> None:
    with pytest.raises(DeviceMissing, match=r"ROCm \(HIP\) build of torch, .* \(CUDA 13\.0"):
        choose_device("rocm", CUDA)


def test_an_index_beyond_the_devices_says_how_many_there_are() -> None:
    with pytest.raises(DeviceMissing, match=r"'cuda:2' is not there.* 2 device") as caught:
        choose_device("cuda:2", CUDA)
    assert "0 to 1" in caught.value.hint


@pytest.mark.parametrize(
    ("nodes", "said", "hint"),
    [
        ({"/dev/kfd": "absent", "/dev/dxg": "absent"}, "/dev/kfd absent", "pass the device files"),
        ({"/dev/kfd": "denied", "/dev/dxg": "absent"}, "/dev/kfd denied", "RENDER_GID"),
    ],
)
def test_no_gpu_on_a_hip_build_says_what_of_the_device_files(
    nodes: dict[str, str], said: str, hint: str
) -> None:
    with pytest.raises(DeviceMissing, match=said) as caught:
        choose_device("rocm", TorchBuild("2.13.0", hip="7.0", nodes=nodes))
    assert hint in caught.value.hint


def test_no_gpu_on_a_cuda_build_points_to_the_cuda_service() -> None:
    with pytest.raises(DeviceMissing, match="sees no GPU") as caught:
        choose_device("cuda", TorchBuild("2.13.0", cuda="13.0"))
    assert "api-cuda" in caught.value.hint


def test_a_gpu_that_the_build_has_no_kernels_for_is_refused_before_the_first_kernel() -> None:
    old = TorchBuild("2.13.0", hip="7.0", gpus=(Gpu("WX 4100", "gfx803"),), gfx_targets=("gfx90a",))
    with pytest.raises(DeviceMissing, match=r"WX 4100 is gfx803, but .* kernels for gfx90a only"):
        choose_device("rocm", old)


def test_unknown_targets_are_not_taken_for_none() -> None:
    unknown = TorchBuild("2.13.0", hip="7.0", gpus=(Gpu("WX 4100", "gfx803"),))
    assert choose_device("rocm", unknown).torch_name == "cuda:0"
