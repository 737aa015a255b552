"""Twenty and more machines as trees of files: each figure is right, or unknown for a reason."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from probe_samples import HIP_TORCH
from probe_trees import GIB, HOST, NVRM, PROCESSOR, WX4100, Tree, card, fdinfo, gpu_node, lay, metrics, node

from probes.core.unknown import Unknown
from probes.hardware import snapshot, sysfs
from probes.hardware.expectation import expect
from probes.records.facts import Machine


@dataclass(frozen=True)
class Case:
    """A tree and what must be read from it; None means unknown."""

    name: str
    tree: Tree
    reading: Callable[[Machine, Path], object]
    expected: object


def memory(found: Machine, _root: Path) -> object:
    return [
        (c.name, known(c.vram_total_bytes), known(c.gtt_total_bytes), known(c.target)) for c in found.cards
    ]


def identities(found: Machine, _root: Path) -> object:
    return [(c.name, known(c.pci_id), known(c.target), known(c.apu)) for c in found.cards]


def clients(found: Machine, root: Path) -> object:
    read = {r.gauge: known(r.value_bytes) for r in sysfs.readings(root, WX4100, "now")}
    return read["fdinfo resident vram"], read["fdinfo resident gtt"], read["fdinfo evicted vram"]


def around(found: Machine, _root: Path) -> object:
    seen = found.surroundings
    assert not isinstance(seen, Unknown)
    return seen.container, known(seen.cpu_limit), known(found.cgroup_limit_bytes)


def fate(found: Machine, _root: Path) -> object:
    return found.wsl, expect(found).behaviour, found.device_files


def known(value: object) -> object:
    if isinstance(value, Unknown):
        assert value.reason
        return None
    return value


def link(_found: Machine, root: Path) -> object:
    seen = sysfs.read_link(root, WX4100)
    return None if isinstance(seen, Unknown) else (seen.generation, seen.lanes)


def many(count: int) -> Tree:
    tree: Tree = dict(PROCESSOR)
    for i in range(count):
        tree |= card(f"card{i}", f"0000:{i + 16:02x}:00.0", 192 * GIB, 128 * GIB)
        tree |= gpu_node(i + 1, 90402, i + 16, vram=192 * GIB, minor=128 + i)
    return tree


DISCRETE = PROCESSOR | card("card0", WX4100, 4 * GIB, 8 * GIB) | gpu_node(1, 80003, 3)
DXG: Tree = {"dev/dxg": "", "proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}
GROUP = "sys/fs/cgroup"
POLARIS_LINE = ("card0", 4 * GIB, 8 * GIB, "gfx803")

CASES = (
    Case("discrete Polaris", DISCRETE, memory, [POLARIS_LINE]),
    Case("its identity", DISCRETE, identities, [("card0", WX4100, "gfx803", False)]),
    Case(
        "APU with a small carve-out",
        card("card0", "0000:c4:00.0", GIB // 2, 47 * GIB)
        | gpu_node(0, 110501, 0xC4, vram=GIB // 2, cores=16),
        identities,
        [("card0", "0000:c4:00.0", "gfx1151", True)],
    ),
    Case(
        "APU beside a discrete card",
        DISCRETE
        | card("card1", "0000:c4:00.0", GIB // 2, 7 * GIB)
        | gpu_node(2, 90012, 0xC4, cores=8, minor=129),
        identities,
        [("card0", WX4100, "gfx803", False), ("card1", "0000:c4:00.0", "gfx90c", True)],
    ),
    Case(
        "eight GPUs",
        many(8),
        memory,
        [(f"card{i}", 192 * GIB, 128 * GIB, "gfx942") for i in range(8)],
    ),
    Case(
        "a partitioned card: more nodes than cards",
        PROCESSOR
        | card("card1", "0000:05:00.0", 192 * GIB, GIB, current_compute_partition="CPX")
        | gpu_node(1, 90402, 5, vram=24 * GIB)
        | gpu_node(2, 90402, 5, vram=24 * GIB, minor=129)
        | {"sys/class/drm/card2/device/uevent": "DRIVER=amdgpu_xcp_drv\n"},
        lambda found, _: (
            [known(c.partition) for c in found.cards],
            [(n.render_minor, n.local_bytes) for n in found.kfd_nodes],
            [known(c.pci_id) for c in found.cards],
        ),
        (["CPX", None], [(128, 24 * GIB), (129, 24 * GIB)], ["0000:05:00.0", None]),
    ),
    Case(
        "gaps in the cards' numbers",
        PROCESSOR | card("card1", WX4100, 4 * GIB, GIB) | card("card7", "0000:04:00.0", 8 * GIB, GIB),
        memory,
        [("card1", 4 * GIB, GIB, None), ("card7", 8 * GIB, GIB, None)],
    ),
    Case(
        "renamed: the card is not the KFD node of its number",
        PROCESSOR
        | card("card0", "0000:44:00.0", 16 * GIB, GIB)
        | card("card1", WX4100, 4 * GIB, GIB)
        | gpu_node(1, 80003, 3)
        | gpu_node(2, 110000, 0x44, minor=129),
        identities,
        [("card0", "0000:44:00.0", "gfx1100", False), ("card1", WX4100, "gfx803", False)],
    ),
    Case(
        "a screen's output and a render node are no cards",
        DISCRETE
        | {"sys/class/drm/card0-DP-1/status": "connected\n", "sys/class/drm/renderD128/dev": "226:128\n"},
        memory,
        [POLARIS_LINE],
    ),
    Case(
        "gauges that say N/A",
        PROCESSOR | card("card0", WX4100, "N/A", "N/A"),
        memory,
        [("card0", None, None, None)],
    ),
    Case(
        "another maker's card",
        card("card0", WX4100, None, None, driver="i915"),
        memory,
        [("card0", None, None, None)],
    ),
    Case(
        "topology without location",
        PROCESSOR | card("card0", WX4100, 4 * GIB, GIB) | node(1, simd_count=64, gfx_target_version=80003),
        memory,
        [("card0", 4 * GIB, GIB, None)],
    ),
    Case(
        "KFD hidden by permissions: an empty topology",
        card("card0", WX4100, 4 * GIB, GIB) | {"sys/class/kfd/kfd/topology/nodes/1/properties": ""},
        memory,
        [("card0", 4 * GIB, GIB, None)],
    ),
    Case(
        "new fdinfo: resident, not its alias too",
        {
            "proc/self/fdinfo/5": fdinfo(
                7,
                drm_resident_vram="1024 KiB",
                drm_memory_vram="1024 KiB",
                drm_resident_gtt="3 MiB",
                amd_evicted_vram="512 KiB",
            )
        },
        clients,
        (2**20, 3 * 2**20, 2**19),
    ),
    Case(
        "old fdinfo: by its own name, nothing evicted known",
        {"proc/self/fdinfo/5": fdinfo(7, drm_memory_vram="4096 KiB", drm_memory_gtt="1 KiB")},
        clients,
        (2**22, 2**10, None),
    ),
    Case(
        "one client behind three descriptors, and another's card",
        {f"proc/self/fdinfo/{i}": fdinfo(7, drm_resident_vram="1 MiB") for i in (3, 4, 5)}
        | {"proc/self/fdinfo/9": fdinfo(8, "0000:99:00.0", drm_resident_vram="7 MiB")},
        clients,
        (2**20, None, None),
    ),
    Case(
        "fdinfo in an unheard unit",
        {"proc/self/fdinfo/3": fdinfo(7, drm_resident_vram="12 pages")},
        clients,
        (None, None, None),
    ),
    Case("WSL on AMD spills", DXG, fate, (True, "spills", ("/dev/dxg",))),
    Case("native AMD refuses", DISCRETE | {"dev/kfd": ""}, fate, (False, "refuses", ("/dev/kfd",))),
    Case(
        "an APU uses GTT",
        gpu_node(0, 110501, 0xC4, cores=16) | {"dev/kfd": "", "dev/dri/renderD128": ""},
        fate,
        (False, "uses_gtt", ("/dev/kfd", "/dev/dri/renderD128")),
    ),
    Case(
        "LXC by its environment, two processors' worth of time",
        {
            "proc/1/environ": "PATH=/bin\0container=lxc\0",
            f"{GROUP}/cpu.max": "200000 100000\n",
            f"{GROUP}/memory.max": f"{4 * GIB}\n",
        },
        around,
        ("lxc", 2.0, 4 * GIB),
    ),
    Case(
        "LXC by lxcfs alone, no limit",
        {
            "proc/self/mountinfo": "1 2 0:3 / /proc/meminfo rw - fuse.lxcfs lxcfs rw\n",
            f"{GROUP}/cpu.max": "max 100000\n",
        },
        around,
        ("lxc", None, None),
    ),
    Case("Docker", {".dockerenv": "", f"{GROUP}/memory.max": "max\n"}, around, ("docker", None, None)),
    Case(
        "Podman under the older cgroup",
        {
            "run/.containerenv": "",
            f"{GROUP}/cpu/cpu.cfs_quota_us": "150000\n",
            f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n",
            f"{GROUP}/memory/memory.limit_in_bytes": f"{GIB}\n",
        },
        around,
        ("podman", 1.5, GIB),
    ),
    Case(
        "Kubernetes by its control group, no quota",
        {
            "proc/1/cgroup": "0::/kubepods/burstable/pod1/abc\n",
            f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n",
        },
        around,
        ("kubernetes", None, None),
    ),
    Case(
        "dmem: a limit on one card's VRAM",
        {
            f"{GROUP}/dmem.max": f"drm/{WX4100}/vram {2 * GIB}\ndrm/0000:44:00.0/vram max\n",
            f"{GROUP}/dmem.current": f"drm/{WX4100}/vram 4096\n",
        },
        lambda found, _: [
            (one.region, known(one.limit_bytes), known(one.used_bytes), known(one.capacity_bytes))
            for one in getattr(found.surroundings, "device_memory", ())
        ],
        [("drm/0000:03:00.0/vram", 2 * GIB, 4096, None), ("drm/0000:44:00.0/vram", None, None, None)],
    ),
    Case("a link of the third generation", DISCRETE, link, (3, 8)),
    Case(
        "a link that says Unknown",
        card("card0", WX4100, GIB, GIB, current_link_speed="Unknown"),
        link,
        None,
    ),
    Case(
        "an NVIDIA machine without DRM files",
        {"proc/driver/nvidia/version": NVRM, "dev/nvidiactl": "", "dev/nvidia0": ""},
        lambda found, _: (found.cards, found.gpu_driver, found.device_files),
        ((), "nvidia 580.159.04", ("/dev/nvidiactl", "/dev/nvidia0")),
    ),
    Case(
        "gpu_metrics 1.3: throttling",
        card("card0", WX4100, GIB, GIB)
        | {f"sys/bus/pci/devices/{WX4100}/gpu_metrics": metrics((1, 3), throttle=5, offset=68)},
        lambda _, root: sysfs.slowdowns(root, WX4100),
        ("status 0x5",),
    ),
    Case(
        "gpu_metrics of an unheard form",
        {f"sys/bus/pci/devices/{WX4100}/gpu_metrics": metrics((9, 1), throttle=5, offset=68)},
        lambda _, root: known(sysfs.slowdowns(root, WX4100)),
        None,
    ),
    Case(
        "nothing at all",
        {},
        lambda found, _: (found.cards, found.kfd_nodes, known(found.gpu_driver)),
        ((), (), None),
    ),
)


def read(case: Case, root: Path) -> object:
    lay(root, HOST | case.tree)
    return case.reading(snapshot.describe(root, HIP_TORCH), root)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_machine_is_read_right_or_unknown(case: Case, tmp_path: Path) -> None:
    assert read(case, tmp_path) == case.expected


def test_there_are_twenty_and_more_trees_all_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 20
