"""NUMA: which nodes the host has, which one a GPU is attached to, and binding this process to it.

The nodes are read from sysfs; policies and the node of a page are system calls (<linux/mempolicy.h>).
"""

import ctypes
import os
import platform
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from probes.core.errors import DeviceUnusable
from probes.core.unknown import Unknown
from probes.hardware.sysfs import read_text
from probes.records.facts import Machine, NumaNode
from probes.records.rows import NumaPlaces

# <asm/unistd.h>: set_mempolicy, get_mempolicy
CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
MPOL_BIND = 2  # <linux/mempolicy.h>
MPOL_F_NODE, MPOL_F_ADDR = 1, 2
MASK_BITS = 1024  # nodes that a mask can name


def cpus_of(text: str) -> frozenset[int]:
    """The processors in one of the kernel's lists: `0-3,8`. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def nodes(root: Path) -> tuple[NumaNode, ...]:
    """The NUMA nodes by sysfs, in order; none where the kernel shows none."""
    known = []
    for place in (root / "sys/devices/system/node").glob("node*"):
        cpus = read_text(place / "cpulist")
        if not place.name[4:].isdecimal() or isinstance(cpus, Unknown):
            continue
        memory = read_text(place / "meminfo")
        total = re.search(r"MemTotal:\s+(\d+) kB", memory) if isinstance(memory, str) else None
        size = int(total.group(1)) * 1024 if total else Unknown("no MemTotal in the node's meminfo")
        known.append(NumaNode(int(place.name[4:]), cpus, size))
    return tuple(sorted(known, key=lambda node: node.node))


def gpu_node(root: Path, pci_id: str | Unknown, known: Collection[NumaNode]) -> int | Unknown:
    """The node that a PCI device is attached to. On a machine of one node it is that one."""
    if isinstance(pci_id, Unknown):
        return pci_id
    text = read_text(root / "sys/bus/pci/devices" / pci_id / "numa_node")
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    if len(known) == 1:
        return next(iter(known)).node
    return text if isinstance(text, Unknown) else Unknown(f"the firmware doesn't say (numa_node is {text})")


def with_nodes(machine: Machine, root: Path, pci_id: str | Unknown) -> Machine:
    """The machine with its NUMA nodes and that of the GPU at `pci_id`."""
    known = nodes(root)
    return replace(machine, numa_nodes=known, gpu_numa_node=gpu_node(root, pci_id, known))


def nodes_of_cpus(known: Collection[NumaNode], cpus: Collection[int]) -> tuple[int, ...]:
    """The nodes to which any of these processors belong. Pure."""
    return tuple(node.node for node in known if cpus_of(node.cpus) & frozenset(cpus))


def hold_to_gpu(machine: Machine) -> None:
    """Bind this process to the processors and the host memory of the GPU's node.

    Existing threads and memory stay where they are. Raises DeviceUnusable where the node isn't known, has
    no processor that this process may use, or the kernel refuses.
    """
    node = machine.gpu_numa_node
    if isinstance(node, Unknown):
        raise DeviceUnusable(f"the GPU's NUMA node is unknown: {node.reason}", "run without --numa gpu")
    cpus = next((cpus_of(known.cpus) for known in machine.numa_nodes if known.node == node), frozenset())
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        raise DeviceUnusable(
            f"this process may use no processor of the GPU's NUMA node {node}",
            "run without --numa gpu, or give the container that node's processors",
        )
    os.sched_setaffinity(0, allowed)
    mask = (ctypes.c_ulong * (MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    failed = _call(0, MPOL_BIND, ctypes.byref(mask), MASK_BITS)
    if failed:
        raise DeviceUnusable(
            f"host memory can't be held to NUMA node {node}: {failed}",
            "run without --numa gpu, or give the container the capability CAP_SYS_NICE",
        )


def node_of(address: int) -> int | Unknown:
    """The node of the page at an address of this process, which must have been touched."""
    node = ctypes.c_int(-1)
    failed = _call(
        1, ctypes.byref(node), None, 0, ctypes.c_void_p(address), ctypes.c_ulong(MPOL_F_NODE | MPOL_F_ADDR)
    )
    return Unknown(failed) if failed else node.value


def _call(which: int, *args: object) -> str:
    """The reason why the call failed; empty when it succeeded."""
    numbers = CALLS.get(platform.machine())
    if numbers is None:
        return f"the system call's number on {platform.machine()} isn't known"
    library = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    if library.syscall(ctypes.c_long(numbers[which]), *args) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def places(machine: Machine, *, pinned: int | Unknown, pageable: int | Unknown, held: bool) -> NumaPlaces:
    """The nodes on which this process measures, at this moment."""
    usable = nodes_of_cpus(machine.numa_nodes, os.sched_getaffinity(0))
    return NumaPlaces(machine.gpu_numa_node, usable, pinned, pageable, held)
