"""Finds what torch is and which GPUs it can really compute on. The other gate to torch is `device`."""

import os
from pathlib import Path

import torch

from probes.machine.nvml import open_nvml
from probes.machine.prunemanifest import foreign_card
from probes.machine.sysfs import read_link
from probes.records.schema import Api, Gpu, Link, TorchFacts, Unknown

LOAD_WORDS, LOAD_COPIES = 2**20, 64  # half a GiB in all: from 10 ms to 100 ms on any link


def describe() -> TorchFacts:
    """The facts of this torch, and the GPUs that it can really compute on (one sum is tried)."""
    api, api_version = _api()
    obstacle = _obstacle(api)
    count = 0 if obstacle else torch.cuda.device_count()
    return TorchFacts(
        version=torch.__version__,
        api=api,
        api_version=api_version,
        threads=torch.get_num_threads(),
        gpus=tuple(_gpu(index) for index in range(count)),
        obstacle=obstacle,
    )


def _api() -> tuple[Api, str]:
    if torch.version.hip:
        return "hip", torch.version.hip
    if torch.version.cuda:
        return "cuda", torch.version.cuda
    return "none", ""


def _obstacle(api: Api) -> str:
    if api == "none":
        return "this torch is a CPU build"
    foreign = foreign_card(Path("/"), os.environ) if api == "hip" else ""
    if foreign:
        return foreign
    try:
        torch.cuda.init()
        total = torch.ones(8, device="cuda").sum().item()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch raises both for missing parts of a driver or build
        return f"torch can't use a GPU: {first_line(error)}"
    return "" if total == 8 else f"the GPU added eight ones to {total}"


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    target = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    bus = getattr(properties, "pci_bus_id", None)
    l2 = getattr(properties, "L2_cache_size", None)
    integrated = getattr(properties, "is_integrated", None)
    # asking for free memory opens a context on the card: only the one that is measured is worth it
    opened = index == 0
    free = torch.cuda.mem_get_info(0)[0] if opened else Unknown("only the first GPU is opened")
    pci_id = (
        Unknown("this torch doesn't report it")
        if bus is None
        else f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    )
    return Gpu(
        name=properties.name,
        target=target or f"sm_{properties.major}{properties.minor}",
        pci_id=pci_id,
        vram_total_bytes=properties.total_memory,
        vram_free_bytes=free,
        l2_bytes=l2 if l2 else Unknown("this torch doesn't report it"),
        integrated=bool(integrated) if integrated is not None else Unknown("this torch doesn't report it"),
        link_under_load=_link_under_load(pci_id) if opened else Unknown("only the first GPU is opened"),
    )


def _link_under_load(pci_id: str | Unknown) -> Link | Unknown:
    """The link while copies keep it busy: an idle one trains down to save power."""
    if isinstance(pci_id, Unknown):
        return pci_id
    nvml = Unknown("HIP has no NVML") if torch.version.hip else open_nvml()
    try:
        host = torch.empty(LOAD_WORDS, dtype=torch.int64, pin_memory=True)
        device = torch.empty_like(host, device="cuda")
        for _ in range(LOAD_COPIES):
            device.copy_(host, non_blocking=True)
        found = read_link(Path("/"), pci_id) if isinstance(nvml, Unknown) else nvml.link(pci_id)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return Unknown(first_line(error))
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
