"""Cards and the machine, read from constructed trees and a fake NVML; a card that vanishes ends nothing."""

import shutil
from pathlib import Path

import pytest
from probe_trees import GIB, WX4100
from watch_samples import FakeNvml, amd_tree

from probes.core.unknown import Unknown
from probes.hardware.nvml import Nvml
from probes.records.watch import CARD_GAUGES, CardSample, ProcessUse
from probes.watch.readers import CommandTree, KeptFile, Rate
from probes.watch.watcher import Readers

NO_NVML = Unknown("no library here")


def test_an_amd_card_has_every_gauge_that_its_files_have(tmp_path: Path) -> None:
    (card,) = Readers(amd_tree(tmp_path), NO_NVML).sample(0.0, 0.0).cards
    assert card.look.values == {
        "busy_percent": 97,
        "memory_busy_percent": 40,
        "vram_bytes": GIB,
        "gtt_bytes": 2**24,
        "power_w": 38,
        "edge_celsius": 61,
        "hotspot_celsius": 74,
        "memory_celsius": 68,
        "core_mhz": 1201,
        "memory_mhz": 1500,
        "fan_percent": pytest.approx(40),
        "evicted_bytes": 2**19,
    }
    assert card.slowdowns == ()
    assert card.processes == (ProcessUse(77, "python3", 2**21, 2**20, 2**19),)
    assert set(card.look.values) | set(card.look.missing) == {gauge.name for gauge in CARD_GAUGES}


def gone(card: CardSample) -> bool:
    return not card.look.values and isinstance(card.slowdowns, Unknown) and len(card.look.missing) > 10


def test_an_amd_card_that_vanishes_is_unknown_and_known_again_when_it_is_back(tmp_path: Path) -> None:
    readers = Readers(amd_tree(tmp_path), NO_NVML)
    assert not gone(readers.sample(0.0, 0.0).cards[0])
    device = tmp_path / "sys/class/drm/card0/device"
    kept = shutil.move(device, tmp_path / "away")
    (lost,) = readers.sample(0.25, 0.0).cards
    assert gone(lost)
    assert lost.look.missing["power_w"] == f"{WX4100} is gone"
    shutil.move(kept, device)
    assert readers.sample(0.5, 0.0).cards[0].look.values["power_w"] == 38


def test_a_card_that_sleeps_is_not_woken(tmp_path: Path) -> None:
    root = amd_tree(tmp_path, **{"power/runtime_status": "suspended\n"})
    (card,) = Readers(root, NO_NVML).sample(0.0, 0.0).cards
    assert gone(card)
    assert "asleep" in card.look.missing["busy_percent"]


def test_a_device_that_fails_to_read_is_unknown_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gauge").write_text("7\n")
    file = KeptFile(tmp_path / "gauge")
    assert file.number() == 7

    def gone(*_: object) -> bytes:
        raise OSError(19, "No such device")

    with monkeypatch.context() as patched:
        patched.setattr("os.pread", gone)
        assert file.number() == Unknown("gauge: No such device")
    assert file.number() == 7


def test_a_kernel_that_names_no_sensor_has_one_temperature_of_the_edge(tmp_path: Path) -> None:
    root = amd_tree(tmp_path)
    for label in (root / "sys/class/drm/card0/device/hwmon").glob("*/temp*_label"):
        label.unlink()
    (card,) = Readers(root, NO_NVML).sample(0.0, 0.0).cards
    assert {name: value for name, value in card.look.values.items() if "celsius" in name} == {
        "edge_celsius": 61
    }


@pytest.mark.parametrize("said", ["--5", "9" * 4000, "-", "\u0665", "0x7"])
def test_what_is_no_number_of_a_kernel_is_unknown(said: str, tmp_path: Path) -> None:
    (tmp_path / "gauge").write_text(said)
    assert isinstance(KeptFile(tmp_path / "gauge").scaled(1.5), Unknown)


def test_without_hwmon_the_table_has_the_sensors(tmp_path: Path) -> None:
    root = amd_tree(tmp_path)
    shutil.rmtree(root / "sys/class/drm/card0/device/hwmon")
    (card,) = Readers(root, NO_NVML).sample(0.0, 0.0).cards
    assert "power_w" not in card.look.values
    assert "hwmon" in card.look.missing["power_w"]


def nvidia(fake: FakeNvml, root: Path) -> Readers:
    return Readers(root, Nvml(fake))  # type: ignore[arg-type]


def test_an_nvidia_card_has_nvmls_figures_in_the_gauges_units(tmp_path: Path) -> None:
    fake = FakeNvml()
    readers = nvidia(fake, tmp_path)
    (first,) = readers.sample(0.0, 0.0).cards
    (card,) = readers.sample(0.5, 0.0).cards
    assert first.look.values["energy_j"] == 5000
    assert card.look.values == {
        "busy_percent": 99,
        "memory_busy_percent": 12,
        "vram_bytes": GIB,
        "power_w": 250,
        "edge_celsius": 48,
        "memory_celsius": 55,
        "core_mhz": 1980,
        "memory_mhz": 1980,
        "to_card_bytes_per_s": 2**21,
        "from_card_bytes_per_s": 2**20,
        "sm_active_percent": 80,
        "sm_occupancy_percent": 30,
        "tensor_percent": 62.5,
        "dram_percent": 25,
    }
    assert card.slowdowns == ("power cap",)
    assert readers.cards[0].card.memory_bytes_per_s == 2619e6 * 2 * 5120 / 8
    (process,) = card.processes  # type: ignore[misc]
    assert (process.pid, process.vram_bytes) == (4242, GIB // 2)


def test_a_card_without_newer_counters_has_its_power_and_the_reason_for_the_rest(tmp_path: Path) -> None:
    (card,) = nvidia(FakeNvml(gpm=False, fields={}), tmp_path).sample(0.0, 0.0).cards
    assert card.look.values["power_w"] == 249
    assert "GPM begins with Hopper" in card.look.missing["tensor_percent"]
    assert card.look.missing["to_card_bytes_per_s"] == "NVML: Not Supported"


def test_an_nvidia_card_that_is_lost_is_unknown_and_ends_nothing(tmp_path: Path) -> None:
    fake = FakeNvml()
    readers = nvidia(fake, tmp_path)
    readers.sample(0.0, 0.0)
    fake.lost = True
    (card,) = readers.sample(0.25, 0.0).cards
    assert card.look.values == {}
    assert card.look.missing["power_w"] == "NVML: GPU is lost"
    assert card.slowdowns == Unknown("NVML: GPU is lost")
    fake.lost = False
    assert readers.sample(0.5, 0.0).cards[0].look.values["busy_percent"] == 99


def test_the_machine_has_rates_from_the_second_sample_on(tmp_path: Path) -> None:
    root = amd_tree(tmp_path)
    readers = Readers(root, NO_NVML)
    assert isinstance(readers.sample(0.0, 0.0).machine.get("cpu_percent"), Unknown)
    (root / "proc/stat").write_text("cpu  120 0 130 1000 0 0 0 0 0 0\n")
    (root / "proc/diskstats").write_text(
        " 8 0 sda 1 0 300 0 1 0 60 0 0 0 0\n 8 1 sda1 1 0 9 0 1 0 9 0 0 0 0\n"
    )
    machine = readers.sample(0.5, 0.0).machine
    assert 0 < machine.values["cpu_percent"] <= 100
    assert machine.values["disk_read_bytes_per_s"] == 100 * 512 / 0.5
    assert machine.values["disk_write_bytes_per_s"] == 20 * 512 / 0.5
    assert machine.values["cgroup_bytes"] == 2**20
    assert machine.values["ram_bytes"] == 8192000 * 1024


def test_a_machine_without_anything_is_unknown_throughout(tmp_path: Path) -> None:
    sample = Readers(tmp_path, NO_NVML).sample(0.0, 0.0)
    assert sample.cards == ()
    assert sample.machine.values == {}


def test_a_commands_memory_is_that_of_its_descendants_too(tmp_path: Path) -> None:
    for pid, pages, children in ((10, 100, "11 12"), (11, 20, ""), (12, 3, "13"), (13, 1, ""), (99, 7, "")):
        place = tmp_path / "proc" / str(pid)
        (place / "task" / str(pid)).mkdir(parents=True)
        (place / "task" / str(pid) / "children").write_text(children)
        (place / "statm").write_text(f"999 {pages} 5 1 0 1 0\n")
    tree = CommandTree(tmp_path, 10)
    assert tree.resident_bytes(0.0) == 124 * 4096
    (tmp_path / "proc/12/statm").unlink()
    tree._searched_s = -10.0
    assert isinstance(tree.resident_bytes(2.0), int)


def test_a_rate_needs_two_readings_of_a_counter_that_grows() -> None:
    rate = Rate()
    assert isinstance(rate.of(10, 0.0), Unknown)
    assert rate.of(30, 2.0) == 10
    assert isinstance(rate.of(5, 3.0), Unknown)
    assert isinstance(rate.of(Unknown("lost"), 4.0), Unknown)
    assert isinstance(rate.of(9, 5.0), Unknown)
    assert rate.of(10, 6.0) == 1


def test_a_slow_energy_counter_is_read_at_both_ends_and_seldom_between(tmp_path: Path) -> None:
    readers = nvidia(FakeNvml(), tmp_path)
    found = [readers.sample(at / 4, None if at == 60 else 0.0).cards[0].look for at in range(61)]
    assert [at for at, look in enumerate(found) if "energy_j" in look.values] == [0, 40, 60]


def test_a_figure_that_is_not_a_number_is_unknown(tmp_path: Path) -> None:
    fake = FakeNvml()
    fake.gpm_values |= {2: 0.0, 10: float("nan")}
    readers = nvidia(fake, tmp_path)
    readers.sample(0.0, 0.0)
    (card,) = readers.sample(0.25, 0.0).cards
    assert card.look.missing["dram_percent"] == "the driver's figure is not a number"
    assert card.look.values["sm_active_percent"] == 0


def test_the_links_counters_are_used_where_they_cannot_have_begun_again(tmp_path: Path) -> None:
    """They have 32 bits: at 16 GB/s that is a quarter of a second and a little more."""
    fake = FakeNvml(gpm=False)
    readers = nvidia(fake, tmp_path)
    readers.sample(0.0, 0.0)
    fake.fields |= {197: 10**9 + 500, 198: 2 * 10**9 + 1000}
    (card,) = readers.sample(0.25, 0.0).cards
    assert card.look.values["from_card_bytes_per_s"] == 2000
    assert card.look.values["to_card_bytes_per_s"] == 4000
    (late,) = readers.sample(1.25, 0.0).cards
    assert "32 bits" in late.look.missing["to_card_bytes_per_s"]
