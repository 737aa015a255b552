"""Reads what this machine has: kernel, memory and its limits, cards. Readers take the tree's root."""

import os
import re
import socket
from pathlib import Path

from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware import host
from probes.hardware.host import available_bytes, cgroup_limit_bytes, meminfo_bytes
from probes.hardware.sysfs import PCI_ID, is_there, read_cards, read_kfd_nodes, read_text
from probes.records.facts import Card, Gpu, KfdNode, Link, Machine, NvidiaCard, Surroundings, TorchFacts


def describe(root: Path, torch: TorchFacts | Unknown, nvidia: tuple[NvidiaCard, ...] = ()) -> Machine:
    """The snapshot of this machine; the facts from torch and NVML are passed in."""
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    around = host.surroundings(root)
    files = tuple(file.path for file in around.files)
    limit = cgroup_limit_bytes(root)
    return Machine(
        host=socket.gethostname(),
        kernel=kernel,
        wsl="/dev/dxg" in files or (isinstance(kernel, str) and "microsoft" in kernel.lower()),
        container=around.container != host.NOT_SEEN,
        cpus=len(os.sched_getaffinity(0)),
        ram_total_bytes=meminfo_bytes(root, "MemTotal"),
        ram_available_bytes=available_bytes(root),
        cgroup_limit_bytes=limit,
        gpu_driver=gpu_driver(root),
        device_files=files,
        cards=read_cards(root),
        kfd_nodes=read_kfd_nodes(root),
        torch=torch,
        nvidia=nvidia,
        surroundings=around,
    )


def gpu_driver(root: Path) -> str | Unknown:
    """The kernel driver's version. amdgpu in the kernel's own tree has none: then the kernel's release."""
    nvidia = read_text(root / "proc/driver/nvidia/version")
    if isinstance(nvidia, str):
        number = re.search(r"\b\d+\.\d+(\.\d+)?\b", nvidia)
        return f"nvidia {number.group()}" if number else Unknown("no number in /proc/driver/nvidia/version")
    if is_there(root / "sys/module/amdgpu"):
        version = read_text(root / "sys/module/amdgpu/version")
        return f"amdgpu {version}" if isinstance(version, str) else "amdgpu of the running kernel"
    return Unknown("neither nvidia nor amdgpu is loaded, or their files are hidden here")


def pci_id_of_first_gpu(torch: TorchFacts, cards: tuple[Card, ...], root: Path) -> str | Unknown:
    """The PCI id of torch's first GPU: by torch, else the only candidate in the files."""
    if torch.gpus and isinstance(torch.gpus[0].pci_id, str):
        return torch.gpus[0].pci_id
    nvidia = [path.name for path in (root / "proc/driver/nvidia/gpus").glob("*") if PCI_ID.match(path.name)]
    amd = [card.pci_id for card in cards if card.driver == "amdgpu" and isinstance(card.pci_id, str)]
    candidates = amd if torch.api == "hip" else nvidia
    return (
        candidates[0]
        if len(candidates) == 1
        else Unknown(f"{len(candidates)} cards could be torch's first GPU")
    )


def machine_lines(machine: Machine) -> list[str]:
    """The machine's facts, one line each."""
    place = "WSL" if machine.wsl else "container" if machine.container else "no container seen"
    lines = [
        f"host {machine.host}, kernel {machine.kernel}, {machine.cpus} CPUs, {place}",
        f"RAM {bytes_or_why(machine.ram_total_bytes)}, "
        f"{bytes_or_why(machine.ram_available_bytes)} available, "
        f"container limit: {limit_text(machine.cgroup_limit_bytes)}",
        f"GPU driver: {machine.gpu_driver}; device files: {' '.join(machine.device_files) or 'none'}",
        _torch_line(machine.torch),
    ]
    if isinstance(machine.torch, TorchFacts):
        lines += [_gpu_line(gpu) for gpu in machine.torch.gpus]
    lines += [_nvidia_line(card) for card in machine.nvidia]
    lines += [_card_line(card) for card in machine.cards]
    lines += [_node_line(node) for node in machine.kfd_nodes]
    if machine.numa_nodes:
        lines.append(_numa_line(machine))
    if isinstance(machine.surroundings, Surroundings):
        lines += _surroundings_lines(machine.surroundings)
    return lines


def limit_text(limit_bytes: int | Unknown) -> str:
    """A limit that isn't set is known to be absent."""
    return limit_bytes.reason if isinstance(limit_bytes, Unknown) else binary_bytes(limit_bytes)


def _nvidia_line(card: NvidiaCard) -> str:
    mig = ", divided (MIG)" if card.mig is True else ""
    return (
        f"NVML {card.name} ({card.target}, {card.pci_id}): "
        f"VRAM {bytes_or_why(card.vram_total_bytes)}, "
        f"{bytes_or_why(card.vram_used_bytes)} used, BAR1 {bytes_or_why(card.bar1_bytes)}, "
        f"link {link_text(card.link)} of {link_text(card.max_link)}{mig}"
    )


def _card_line(card: Card) -> str:
    kind = {True: "APU, ", False: "discrete, "}.get(card.apu, "") if isinstance(card.apu, bool) else ""
    return (
        f"{card.name} ({card.driver}, {card.pci_id}): {kind}{card.target}, "
        f"VRAM {bytes_or_why(card.vram_total_bytes)}, GTT {bytes_or_why(card.gtt_total_bytes)}, "
        f"link {card.link_speed} x{card.link_width if isinstance(card.link_width, int) else '?'}"
    )


def _node_line(node: KfdNode) -> str:
    return (
        f"KFD node {node.node} ({node.target}, {node.pci_id}): "
        f"{'APU' if node.apu else 'discrete'}, own memory {bytes_or_why(node.local_bytes)}"
    )


def _numa_line(machine: Machine) -> str:
    nodes = "; ".join(
        f"{node.node}: CPUs {node.cpus or 'none'}, {bytes_or_why(node.memory_bytes)}"
        for node in machine.numa_nodes
    )
    return f"NUMA nodes {nodes}; GPU at {machine.gpu_numa_node}"


def _surroundings_lines(around: Surroundings) -> list[str]:
    cpus = "no limit" if isinstance(around.cpu_limit, Unknown) else f"{around.cpu_limit:g}"
    lines = [
        f"container: {around.container}, CPU limit {cpus}, user {around.user}, "
        f"groups {' '.join(map(str, around.groups)) or 'none'}"
    ]
    for file in around.files:
        if not file.usable:
            group = f": join its group, --group-add {file.group}" if isinstance(file.group, int) else ""
            lines.append(f"{file.path} (mode {file.mode}) can't be used by user {around.user}{group}")
    lines += [
        f"device memory {memory.region}: limit {bytes_or_why(memory.limit_bytes)}, "
        f"{bytes_or_why(memory.used_bytes)} used of {bytes_or_why(memory.capacity_bytes)}"
        for memory in around.device_memory
    ]
    return lines


def link_text(link: Link | Unknown) -> str:
    """`Gen5 x16`, or why not."""
    return str(link) if isinstance(link, Unknown) else f"Gen{link.generation} x{link.lanes}"


def _torch_line(facts: TorchFacts | Unknown) -> str:
    if isinstance(facts, Unknown):
        return f"torch: {facts.reason}"
    build = "CPU build" if facts.api == "none" else f"{facts.api.upper()} {facts.api_version}"
    return f"torch {facts.version} ({build}), {facts.threads} threads" + (
        f"; {facts.obstacle}" if facts.obstacle else ""
    )


def _gpu_line(gpu: Gpu) -> str:
    return (
        f"GPU {gpu.name} ({gpu.target}, {gpu.pci_id}): VRAM {bytes_or_why(gpu.vram_total_bytes)}, "
        f"{bytes_or_why(gpu.vram_free_bytes)} free, L2 {bytes_or_why(gpu.l2_bytes)}, "
        f"link under load {link_text(gpu.link_under_load)}"
    )


def bytes_or_why(value: int | Unknown) -> str:
    """A quantity, or the reason why it is unknown."""
    return str(value) if isinstance(value, Unknown) else binary_bytes(value)
