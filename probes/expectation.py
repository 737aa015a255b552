"""What asking for more VRAM than there is does on this system, driver and card; said before trying. Pure."""

from probes.report import Expectation, Machine, Unknown


def expect(machine: Machine) -> Expectation:
    """The documented behaviour, with its source; `unknown` where nothing written down applies."""
    api = "none" if isinstance(machine.torch, Unknown) else machine.torch.api
    if machine.wsl and api != "none":
        return _wsl(api)
    if api == "hip":
        return _amd_linux(machine)
    if api == "cuda":
        return Expectation(
            "refuses",
            "NVIDIA on Linux: the request fails with out of memory; nothing is moved to system RAM "
            "unless managed memory is asked for.",
            "CUDA driver behaviour; PyTorch issue 108858 (the same model runs on Windows, fails on Linux)",
        )
    return Expectation("unknown", "No GPU that this torch can use: nothing to over-allocate.", "torch build")


def _wsl(api: str) -> Expectation:
    if api == "cuda":
        return Expectation(
            "spills",
            "NVIDIA under WSL: Windows places the bytes; beyond VRAM they go to system RAM without an error.",
            "NVIDIA system memory fallback (driver 536.40 and later); WSL issue 11050",
        )
    return Expectation(
        "spills",
        "AMD under WSL: Windows places the bytes; HIP grants VRAM plus system memory without an error.",
        "HIP 6.4 changelog, resolved issues; ROCm issue 4903",
    )


def _amd_linux(machine: Machine) -> Expectation:
    if any(node.apu for node in machine.kfd_nodes):
        return Expectation(
            "uses_gtt",
            "AMD APU on Linux: from kernel 6.10 on, allocations are placed in GTT (system RAM) when that is "
            "larger than the VRAM carve-out. It is the same DRAM, so this is not a spill.",
            "Linux amdgpu, apu_prefer_gtt",
        )
    return Expectation(
        "refuses",
        "AMD discrete card on Linux: the kernel refuses beyond VRAM and torch raises out of memory; "
        "nothing is moved to system RAM silently.",
        "Linux amdgpu_amdkfd_gpuvm.c, reserve_mem_limit; ROCm issue 4903",
    )
