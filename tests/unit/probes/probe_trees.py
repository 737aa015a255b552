"""Small /sys and /proc trees, each the likeness of a kind of machine."""

import struct
from pathlib import Path

GIB = 2**30
WX4100 = "0000:03:00.0"
Tree = dict[str, str | bytes]


def lay(root: Path, files: Tree) -> Path:
    """A tree of files under a root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def card(
    name: str, pci_id: str, vram: object, gtt: object, *, driver: str = "amdgpu", **more: object
) -> Tree:
    """A card as amdgpu shows it, both by its name and by its PCI id; None leaves a file out."""
    used = vram // 4 if isinstance(vram, int) else vram
    device = {
        "uevent": f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_ID=1002:67E3\nPCI_SLOT_NAME={pci_id}",
        "mem_info_vram_total": vram,
        "mem_info_vis_vram_total": vram,
        "mem_info_vram_used": used,
        "mem_info_gtt_total": gtt,
        "mem_info_gtt_used": None if gtt is None else 2**24,
        "current_link_speed": "8.0 GT/s PCIe",
        "current_link_width": 8,
        "max_link_speed": "8.0 GT/s PCIe",
        "max_link_width": 16,
    } | more
    places = (f"sys/class/drm/{name}/device", f"sys/bus/pci/devices/{pci_id}")
    return {
        f"{place}/{file}": f"{text}\n"
        for place in places
        for file, text in device.items()
        if text is not None
    }


def node(number: int, *, banks: tuple[tuple[int, int], ...] = (), **properties: int) -> Tree:
    """A KFD node; banks are (heap type, bytes)."""
    place = f"sys/class/kfd/kfd/topology/nodes/{number}"
    files: Tree = {f"{place}/properties": "".join(f"{key} {value}\n" for key, value in properties.items())}
    for index, (heap, size) in enumerate(banks):
        files[f"{place}/mem_banks/{index}/properties"] = f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n"
    return files


def gpu_node(
    number: int, version: int, bus: int, *, vram: int = 4 * GIB, minor: int = 128, cores: int = 0
) -> Tree:
    """A GPU's KFD node at a PCI bus."""
    return node(
        number,
        banks=((1, vram),),
        cpu_cores_count=cores,
        simd_count=64,
        gfx_target_version=version,
        location_id=bus << 8,
        domain=0,
        drm_render_minor=minor,
    )


def fdinfo(client: int, pci_id: str = WX4100, **keys: str) -> str:
    """A DRM client's fdinfo; keys are written with dashes."""
    lines = [f"drm-client-id:\t{client}", f"drm-pdev:\t{pci_id}", "drm-driver:\tamdgpu"]
    return "\n".join([*lines, *(f"{key.replace('_', '-')}:\t{value}" for key, value in keys.items())]) + "\n"


def metrics(form: tuple[int, int], *, throttle: int, offset: int, size: int = 120) -> bytes:
    """A gpu_metrics table of a form, with the throttle status at an offset."""
    data = bytearray(size)
    data[:4] = struct.pack("<HBB", size, *form)
    data[offset : offset + 4] = struct.pack("<I", throttle)
    return bytes(data)


PROCESSOR = node(0, banks=((0, 16 * GIB),), cpu_cores_count=8, simd_count=0, gfx_target_version=0)
MEMINFO = "MemTotal:       16384000 kB\nMemFree:  1 kB\nMemAvailable:    8192000 kB\n"
HOST: Tree = {"proc/meminfo": MEMINFO, "proc/sys/kernel/osrelease": "6.12.1\n"}
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
