"""Whose card it is and what it does beyond its VRAM, machine by machine, up to the limits of each rule."""

from dataclasses import replace

import pytest
from probe_samples import APU_NODE, CPU_TORCH, CUDA_TORCH, HIP_TORCH, machine

from probes.core.unknown import Unknown
from probes.hardware.expectation import expect, maker_of
from probes.records.facts import Card, KfdNode, Link, NvidiaCard

GIB = 2**30
AMD = Card("card0", "amdgpu", "0000:03:00.0", 4 * GIB, 0, 3 * GIB, 0, Unknown("idle"), 8, apu=False)
NODE = KfdNode(1, "gfx906", 128, apu=False)
NVML = NvidiaCard("Some GPU", "0000:04:00.0", "sm_90", GIB, 0, GIB, Unknown(""), Unknown(""), Unknown(""))
ROCM_WITHOUT_GPU = replace(HIP_TORCH, gpus=(), obstacle="no card")
CUDA_WITHOUT_GPU = replace(CUDA_TORCH, gpus=(), obstacle="no card")


@pytest.mark.parametrize(
    ("changes", "maker"),
    [
        ({"torch": HIP_TORCH}, "amd"),
        ({"torch": CUDA_TORCH}, "nvidia"),
        # the GPU that torch uses, whatever else is in the machine
        ({"torch": CUDA_TORCH, "cards": (AMD,), "kfd_nodes": (NODE,)}, "nvidia"),
        ({"torch": HIP_TORCH, "nvidia": (NVML,)}, "amd"),
        # else the card that the kernel or NVML shows
        ({"cards": (AMD,)}, "amd"),
        ({"kfd_nodes": (NODE,)}, "amd"),
        ({"cards": (replace(AMD, driver="nvidia"),)}, "nvidia"),
        ({"nvidia": (NVML,)}, "nvidia"),
        ({"torch": Unknown("not installed"), "nvidia": (NVML,)}, "nvidia"),
        ({"torch": Unknown("not installed"), "cards": (AMD,)}, "amd"),
        ({"torch": CUDA_WITHOUT_GPU, "cards": (AMD,)}, "amd"),
        ({"torch": ROCM_WITHOUT_GPU, "nvidia": (NVML,)}, "nvidia"),
        ({"cards": (replace(AMD, driver="i915"),)}, "unseen"),
        ({}, "unseen"),
        # what a torch without a GPU was built for counts under WSL alone, where no card is to be seen
        ({"torch": ROCM_WITHOUT_GPU}, "unseen"),
        ({"torch": CUDA_WITHOUT_GPU}, "unseen"),
        ({"torch": ROCM_WITHOUT_GPU, "wsl": True}, "amd"),
        ({"torch": CUDA_WITHOUT_GPU, "wsl": True}, "nvidia"),
        ({"torch": CPU_TORCH, "wsl": True}, "unseen"),
        ({"torch": Unknown("not installed"), "wsl": True}, "unseen"),
    ],
)
def test_card_is_the_one_that_torch_uses_or_else_the_one_that_is_seen(
    changes: dict[str, object], maker: str
) -> None:
    assert maker_of(machine(**changes)) == maker


@pytest.mark.parametrize(
    ("changes", "subject", "source"),
    [
        ({"torch": CUDA_TORCH}, "NVIDIA on Linux", "PyTorch issue 108858"),
        ({"torch": HIP_TORCH}, "AMD discrete card on Linux", "reserve_mem_limit; ROCm issue 4903"),
        ({"torch": HIP_TORCH, "kfd_nodes": (APU_NODE,)}, "AMD APU on Linux", "apu_prefer_gtt"),
        ({"torch": CUDA_TORCH, "wsl": True}, "NVIDIA under WSL", "WSL issue 11050"),
        ({"torch": HIP_TORCH, "wsl": True}, "AMD under WSL", "ROCm issue 4903"),
        ({"wsl": True, "device_files": ("/dev/dxg",)}, "Under WSL", "HIP 6.4 changelog"),
        ({"wsl": True, "cards": (AMD,)}, "AMD under WSL", "ROCm issue 4903"),
        # without WSL's device file and without a card there is nothing to expect
        ({"wsl": True, "device_files": ("/dev/null",)}, "unknown", "no card, no driver"),
        ({"device_files": ("/dev/dxg",)}, "unknown", "no card, no driver"),
    ],
)
def test_expectation_is_that_of_the_system_and_the_card_and_names_who_says_so(
    changes: dict[str, object], subject: str, source: str
) -> None:
    found = expect(machine(**changes))
    assert found.sentence.startswith(subject)
    assert source in found.source


def apu(**changes: object) -> dict[str, object]:
    return {
        "torch": HIP_TORCH,
        "cards": (replace(AMD, **{"apu": True, "gtt_total_bytes": 5 * GIB} | changes),),
    }


@pytest.mark.parametrize(
    ("kernel", "behaviour"),
    [
        ("5.19.0-50-generic", "refuses"),
        ("6.9.12", "refuses"),
        ("6.10.0", "uses_gtt"),
        ("6.10-rc1", "uses_gtt"),
        ("7.0.1", "uses_gtt"),
        ("custom", "uses_gtt"),
        ("v6.9", "uses_gtt"),  # a version that can't be read is taken for a recent one
    ],
)
def test_apu_uses_gtt_from_kernel_6_10_on(kernel: str, behaviour: str) -> None:
    found = expect(machine(kernel=kernel, **apu()))
    assert found.behaviour == behaviour
    assert ("this kernel is older than 6.10" in found.sentence) is (behaviour == "refuses")


@pytest.mark.parametrize(
    ("changes", "behaviour"),
    [
        ({"gtt_total_bytes": 4 * GIB + 1}, "uses_gtt"),
        ({"gtt_total_bytes": 4 * GIB}, "refuses"),
        ({"gtt_total_bytes": Unknown("hidden")}, "uses_gtt"),
        ({"vram_total_bytes": Unknown("hidden")}, "uses_gtt"),
    ],
)
def test_apu_is_held_to_a_carve_out_that_is_no_smaller_than_gtt(
    changes: dict[str, object], behaviour: str
) -> None:
    found = expect(machine(**apu(**changes)))
    assert found.behaviour == behaviour
    assert ("GTT is no larger than it" in found.sentence) is (behaviour == "refuses")


def test_a_discrete_card_beside_an_apu_says_nothing_of_the_apu_s_carve_out() -> None:
    found = expect(machine(torch=HIP_TORCH, kfd_nodes=(NODE, APU_NODE), cards=(AMD,)))
    assert found.behaviour == "uses_gtt"
    assert expect(machine(torch=HIP_TORCH, kfd_nodes=(NODE,), cards=(AMD,))).behaviour == "refuses"


@pytest.mark.parametrize(
    ("behaviour", "granted", "agrees"),
    [
        ("refuses", False, True),
        ("refuses", True, False),
        ("spills", True, True),
        ("spills", False, False),
        ("uses_gtt", True, True),
        ("unknown", True, None),
        ("unknown", False, None),
    ],
)
def test_answer_agrees_with_an_expectation_or_there_is_none(
    behaviour: str, granted: bool, agrees: bool | None
) -> None:
    one = replace(expect(machine(torch=CUDA_TORCH)), behaviour=behaviour)
    assert one.agrees(granted=granted) is agrees


@pytest.mark.parametrize(
    ("generation", "lanes", "gb_per_s"),
    [
        (1, 16, 4.0),
        (1, 1, 0.25),
        (2, 16, 8.0),
        (3, 16, 15.754),
        (3, 8, 7.877),
        (4, 16, 31.508),
        (5, 16, 63.015),
    ],
)
def test_bandwidth_of_a_link_is_that_of_the_pcie_standard_after_the_line_code(
    generation: int, lanes: int, gb_per_s: float
) -> None:
    assert Link(generation, lanes).raw_gb_per_s == pytest.approx(gb_per_s, rel=1e-4)
