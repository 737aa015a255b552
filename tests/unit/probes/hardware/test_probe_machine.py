"""Readers of /sys and /proc against small trees, each the likeness of a kind of machine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_samples import CPU_TORCH, CUDA_TORCH, GPU, HIP_TORCH
from probe_trees import GIB, HOST, NVRM, PROCESSOR, WX4100, Tree, card, lay, node

from probes.core.unknown import Unknown
from probes.hardware import host, snapshot, sysfs
from probes.records.facts import TorchFacts
from probes.records.rows import Reading

POLARIS = node(1, cpu_cores_count=0, simd_count=64, gfx_target_version=80003, drm_render_minor=128)


def test_a_discrete_card_is_read_whole(tmp_path: Path) -> None:
    root = lay(tmp_path, {**HOST, **card("card0", WX4100, 4 * GIB, 8 * GIB), **PROCESSOR, **POLARIS})
    (found,) = sysfs.read_cards(root)
    assert (found.driver, found.pci_id) == ("amdgpu", WX4100)
    assert (found.vram_total_bytes, found.vram_used_bytes) == (4 * GIB, GIB)
    assert (found.gtt_total_bytes, found.gtt_used_bytes) == (8 * GIB, 2**24)
    assert (found.link_speed, found.link_width) == ("8.0 GT/s PCIe", 8)
    (gpu,) = sysfs.read_kfd_nodes(root)
    assert (gpu.node, gpu.target, gpu.render_minor, gpu.apu) == (1, "gfx803", 128, False)


def test_an_apu_is_known_by_its_processor_cores(tmp_path: Path) -> None:
    apu = node(0, cpu_cores_count=16, simd_count=80, gfx_target_version=110501, drm_render_minor=128)
    (gpu,) = sysfs.read_kfd_nodes(lay(tmp_path, apu))
    assert (gpu.target, gpu.apu) == ("gfx1151", True)


def test_eight_cards_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files: Tree = {}
    for i in (10, 2, 0, 1):
        files |= card(f"card{i}", f"0000:{i:02x}:00.0", GIB, GIB)
    files["sys/class/drm/card0-DP-1/status"] = "connected\n"
    files["sys/class/drm/renderD128/dev"] = "226:128\n"
    assert [c.name for c in sysfs.read_cards(lay(tmp_path, files))] == [
        "card0",
        "card1",
        "card2",
        "card10",
    ]


def test_another_drivers_card_has_unknown_memory_with_a_reason(tmp_path: Path) -> None:
    place = "sys/class/drm/card0/device"
    (found,) = sysfs.read_cards(lay(tmp_path, {f"{place}/uevent": "DRIVER=nvidia\n"}))
    assert found.driver == "nvidia"
    assert found.vram_total_bytes == Unknown("no mem_info_vram_total here")
    assert found.pci_id == Unknown("not a PCI device")


@pytest.mark.parametrize("text", ["N/A\n", "", "-1", "12 kB", "0x10"])
def test_a_gauge_that_says_no_number_is_unknown(tmp_path: Path, text: str) -> None:
    lay(tmp_path, {"gauge": text})
    assert isinstance(sysfs.read_int(tmp_path / "gauge"), Unknown)


def test_a_machine_with_nothing_gives_reasons_everywhere(tmp_path: Path) -> None:
    found = snapshot.describe(tmp_path, Unknown("torch is not installed"))
    assert (found.cards, found.kfd_nodes, found.device_files) == ((), (), ())
    assert not found.wsl
    assert isinstance(found.ram_available_bytes, Unknown)
    assert isinstance(found.gpu_driver, Unknown)
    assert host.spendable_bytes(found.ram_available_bytes, 0) == 0


def test_wsl_is_known_by_its_device_and_by_its_kernel(tmp_path: Path) -> None:
    lay(tmp_path / "a", {"dev/dxg": ""})
    lay(tmp_path / "b", {"proc/sys/kernel/osrelease": "5.15.167.4-Microsoft-standard-WSL2\n"})
    assert snapshot.describe(tmp_path / "a", CPU_TORCH).wsl
    assert snapshot.describe(tmp_path / "b", CPU_TORCH).wsl
    assert not snapshot.describe(lay(tmp_path / "c", HOST), CPU_TORCH).wsl


def test_device_files_are_listed_as_the_container_sees_them(tmp_path: Path) -> None:
    lay(tmp_path, {"dev/kfd": "", "dev/dri/renderD129": "", "dev/dri/renderD128": "", "dev/null": ""})
    assert host.device_files(tmp_path) == ("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129")


def test_available_memory_is_the_kernels_without_a_limit(tmp_path: Path) -> None:
    lay(tmp_path, {**HOST, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert host.available_bytes(tmp_path) == 8192000 * 1024
    assert host.cgroup_limit_bytes(tmp_path) == Unknown("no limit is set")


def test_a_nearer_container_limit_counts_and_page_cache_is_given_back(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    limited = {
        **HOST,
        f"{group}.max": f"{2 * GIB}\n",
        f"{group}.current": f"{GIB}\n",
        f"{group}.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file 3\n",
    }
    assert host.available_bytes(lay(tmp_path, limited)) == 2 * GIB - GIB // 2


@pytest.mark.parametrize(("text", "limit"), [("1073741824\n", GIB), ("9223372036854771712\n", None)])
def test_the_older_cgroup_is_read_too(tmp_path: Path, text: str, limit: int | None) -> None:
    lay(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": text})
    found = host.cgroup_limit_bytes(tmp_path)
    assert found == limit if limit else isinstance(found, Unknown)


def test_a_limit_of_the_older_cgroup_counts_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/memory"
    limited = {
        **HOST,
        f"{group}.limit_in_bytes": f"{2 * GIB}\n",
        f"{group}.usage_in_bytes": f"{GIB}\n",
        f"{group}.stat": f"cache 1\ninactive_file 5\ntotal_inactive_file {GIB // 2}\n",
    }
    assert host.available_bytes(lay(tmp_path, limited)) == 2 * GIB - GIB // 2


def test_drivers_are_named_with_their_version(tmp_path: Path) -> None:
    assert (
        snapshot.gpu_driver(lay(tmp_path / "n", {"proc/driver/nvidia/version": NVRM})) == "nvidia 580.159.04"
    )
    assert (
        snapshot.gpu_driver(lay(tmp_path / "a", {"sys/module/amdgpu/version": "6.10.5\n"})) == "amdgpu 6.10.5"
    )
    in_tree = lay(tmp_path / "b", {"sys/module/amdgpu/refcnt": "1\n"})
    assert snapshot.gpu_driver(in_tree) == "amdgpu of the running kernel"


@pytest.mark.thorough
@given(st.integers(0, 2**45))
def test_the_floor_is_two_gib_or_a_tenth(available: int) -> None:
    floor = host.floor_bytes(available)
    assert floor >= 2 * GIB
    assert floor >= available // 10
    assert 0 <= host.spendable_bytes(available, floor) <= available


@pytest.mark.parametrize(
    ("version", "target"),
    [(80003, "gfx803"), (90010, "gfx90a"), (90006, "gfx906"), (110501, "gfx1151"), (0, "unknown")],
)
def test_gfx_targets_are_written_as_llvm_does(version: int, target: str) -> None:
    assert sysfs.gfx_target(version) == target


NEW_FDINFO = """pos:\t0
drm-driver:\tamdgpu
drm-client-id:\t7
drm-pdev:\t0000:03:00.0
drm-total-vram:\t2048 KiB
drm-resident-vram:\t1024 KiB
drm-memory-vram:\t1024 KiB
drm-resident-gtt:\t3 MiB
drm-resident-cpu:\t0
amd-evicted-vram:\t512 KiB
"""
OLD_FDINFO = """drm-driver: amdgpu
drm-pdev: 0000:03:00.0
drm-client-id: 9
drm-memory-vram: 4096 KiB
drm-memory-gtt: 1 KiB
"""


def test_newer_fdinfo_counts_resident_once_and_not_its_old_name_too() -> None:
    client = sysfs.parse_fdinfo(NEW_FDINFO)
    assert client is not None
    assert dict(client.resident_bytes) == {"vram": 2**20, "gtt": 3 * 2**20, "cpu": 0}
    assert client.evicted_vram_bytes == 2**19


def test_older_fdinfo_is_read_by_its_own_name() -> None:
    client = sysfs.parse_fdinfo(OLD_FDINFO)
    assert client is not None
    assert dict(client.resident_bytes) == {"vram": 2**22, "gtt": 2**10}
    assert isinstance(client.evicted_vram_bytes, Unknown)


@pytest.mark.parametrize(
    "text", ["", "pos: 0\nflags: 02\n", "drm-client-id: 1\n", "drm-pdev: 0000:03:00.0\n"]
)
def test_other_files_are_no_clients(text: str) -> None:
    assert sysfs.parse_fdinfo(text) is None


def test_a_figure_in_an_unheard_unit_is_left_out() -> None:
    client = sysfs.parse_fdinfo(OLD_FDINFO.replace("4096 KiB", "4096 pages"))
    assert client is not None
    assert "vram" not in dict(client.resident_bytes)


def test_duplicated_descriptors_count_once(tmp_path: Path) -> None:
    fds = {f"proc/self/fdinfo/{fd}": NEW_FDINFO for fd in (3, 4, 5)}
    root = lay(tmp_path, {**fds, "proc/self/fdinfo/6": OLD_FDINFO, **card("card0", WX4100, 4 * GIB, GIB)})
    found = {r.gauge: r.value_bytes for r in sysfs.readings(root, WX4100, "now")}
    assert found["fdinfo resident vram"] == 2**20 + 2**22
    assert found["fdinfo evicted vram"] == 2**19
    assert found["sysfs mem_info_gtt_used"] == 2**24


def test_another_cards_clients_are_not_ours(tmp_path: Path) -> None:
    root = lay(tmp_path, {"proc/self/fdinfo/3": NEW_FDINFO})
    found = sysfs.readings(root, "0000:44:00.0", "now")
    assert all(isinstance(reading.value_bytes, Unknown) for reading in found)


def test_a_card_without_an_id_has_readings_with_the_reason(tmp_path: Path) -> None:
    found = sysfs.readings(tmp_path, Unknown("two cards"), "now")
    assert found[0] == Reading("now", "sysfs mem_info_vram_used", Unknown("two cards"))


def test_torchs_word_names_the_card_first(tmp_path: Path) -> None:
    assert snapshot.pci_id_of_first_gpu(CUDA_TORCH, (), tmp_path) == GPU.pci_id


def test_a_lone_card_of_the_right_maker_is_torchs(tmp_path: Path) -> None:
    silent = [TorchFacts(f.version, f.api, f.api_version, 1, (), "") for f in (CUDA_TORCH, HIP_TORCH)]
    root = lay(
        tmp_path, {"proc/driver/nvidia/gpus/0000:0b:00.0/information": "", **card("card0", WX4100, 1, 1)}
    )
    cards = sysfs.read_cards(root)
    assert snapshot.pci_id_of_first_gpu(silent[0], cards, root) == "0000:0b:00.0"
    assert snapshot.pci_id_of_first_gpu(silent[1], cards, root) == WX4100
    assert isinstance(snapshot.pci_id_of_first_gpu(silent[1], cards * 2, root), Unknown)


def test_a_link_whose_width_is_unknown_says_why_and_shows_no_code(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "current_link_speed").write_text("16.0 GT/s PCIe")
    found = sysfs.read_link(tmp_path, "0000:03:00.0")
    assert str(found) == "unknown (no current_link_width here)"
