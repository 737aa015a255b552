"""Predicts what a request for more VRAM than exists does on this system, driver and card. Pure."""

import re
from typing import Literal

from probes.core.unknown import Unknown
from probes.records.facts import Card, Machine, TorchFacts
from probes.records.rows import Expectation

Maker = Literal["amd", "nvidia", "unseen"]
APU_KERNEL = (6, 10)  # from this version on, amdgpu may place an APU's allocations in GTT


def expect(machine: Machine) -> Expectation:
    """The documented behaviour, with its source; `unknown` where no documentation applies.

    It also covers a card that this torch can't use.
    """
    maker = maker_of(machine)
    if machine.wsl and (maker != "unseen" or "/dev/dxg" in machine.device_files):
        return _wsl(maker)
    if maker == "amd":
        return _amd_apu(machine) if _is_apu(machine) else _amd_card()
    if maker == "nvidia":
        return Expectation(
            "refuses",
            "NVIDIA on Linux: the request fails with out of memory; nothing is moved to system RAM "
            "unless managed memory is asked for.",
            "CUDA driver behaviour; PyTorch issue 108858 (the same model runs on Windows, fails on Linux)",
        )
    return Expectation("unknown", "unknown, because no GPU is seen here.", "no card, no driver")


def maker_of(machine: Machine) -> Maker:
    """Whose GPU it is: the one that torch uses, else one that the kernel or NVML shows."""
    api = machine.torch.api if isinstance(machine.torch, TorchFacts) and not machine.torch.obstacle else ""
    drivers = {card.driver for card in machine.cards}
    if api == "hip" or (api != "cuda" and ("amdgpu" in drivers or machine.kfd_nodes)):
        return "amd"
    if api == "cuda" or machine.nvidia or "nvidia" in drivers:
        return "nvidia"
    built_for: dict[str, Maker] = {"hip": "amd", "cuda": "nvidia"}
    built = machine.torch.api if isinstance(machine.torch, TorchFacts) else ""
    return built_for.get(built, "unseen") if machine.wsl else "unseen"


def _wsl(maker: Maker) -> Expectation:
    if maker == "nvidia":
        return Expectation(
            "spills",
            "NVIDIA under WSL: Windows places the bytes; beyond VRAM they go to system RAM without an error.",
            "NVIDIA system memory fallback (driver 536.40 and later); WSL issue 11050",
            "The driver's policy switch (546.01 and later) isn't honoured under WSL.",
        )
    if maker == "amd":
        return Expectation(
            "spills",
            "AMD under WSL: Windows places the bytes; HIP grants VRAM plus system memory without an error.",
            "HIP 6.4 changelog, resolved issues; ROCm issue 4903",
            "Windows may also page out what is idle in VRAM (TheRock issue 7221: the next touch took 39 "
            "times as long). Windows calls half of the system RAM shared GPU memory: a limit, not memory.",
        )
    return Expectation(
        "spills",
        "Under WSL Windows places the GPU's bytes; beyond VRAM they go to system RAM without an error.",
        "HIP 6.4 changelog; NVIDIA system memory fallback (driver 536.40 and later)",
    )


def _is_apu(machine: Machine) -> bool:
    return any(node.apu for node in machine.kfd_nodes) or any(card.apu is True for card in machine.cards)


def _amd_card() -> Expectation:
    return Expectation(
        "refuses",
        "AMD discrete card on Linux: the kernel refuses beyond VRAM and torch raises out of memory; "
        "nothing is moved to system RAM silently.",
        "Linux amdgpu_amdkfd_gpuvm.c, reserve_mem_limit; ROCm issue 4903",
        "When graphics programs need VRAM, the kernel can move all of this process's to GTT (system RAM) and "
        "back; its queues stand still meanwhile (evicted_ms; kfd_process.c). Pinned host memory counts as "
        "GTT too, for which the driver sets a limit of its own: mem_info_gtt_total, 3/8 to 1/2 of the RAM.",
    )


def _amd_apu(machine: Machine) -> Expectation:
    """By `apu_prefer_gtt`: an APU whose GTT is larger than its carve-out, from kernel 6.10 on."""
    kernel, carve_out = _kernel(machine), _small_gtt(machine)
    source = "Linux amdgpu, apu_prefer_gtt (kernel 6.10)"
    if (kernel is not None and kernel < APU_KERNEL) or carve_out:
        why = "GTT is no larger than it" if carve_out else "this kernel is older than 6.10"
        return Expectation(
            "refuses",
            f"AMD APU on Linux: allocations are held to the VRAM carve-out, because {why}; beyond it torch "
            "raises out of memory.",
            source,
        )
    return Expectation(
        "uses_gtt",
        "AMD APU on Linux: from kernel 6.10 on, allocations are placed in GTT (system RAM) when that is "
        "larger than the VRAM carve-out; it is the same DRAM, so this is not a spill.",
        source,
    )


def _kernel(machine: Machine) -> tuple[int, int] | None:
    match = None if isinstance(machine.kernel, Unknown) else re.match(r"(\d+)\.(\d+)", machine.kernel)
    return (int(match[1]), int(match[2])) if match else None


def _small_gtt(machine: Machine) -> bool:
    def small(card: Card) -> bool:
        vram, gtt = card.vram_total_bytes, card.gtt_total_bytes
        return isinstance(vram, int) and isinstance(gtt, int) and gtt <= vram

    return any(small(card) for card in machine.cards if card.apu is True)
