"""NUMA nodes, read from trees made by hand after the kernel's documentation, and the report about them."""

from dataclasses import replace
from pathlib import Path

import pytest
from probe_samples import SETTINGS, done, machine, report

from probes.core.errors import DeviceUnusable
from probes.core.unknown import Unknown
from probes.hardware import numa
from probes.hardware.snapshot import machine_lines
from probes.records.facts import NumaNode
from probes.records.rows import NumaPlaces
from probes.records.schema import Settings
from probes.reports.kinds import RUN

PCI_ID = "0000:03:00.0"


def tree(root: Path, nodes: dict[int, str], gpu: str | None) -> Path:
    for node, cpus in nodes.items():
        place = root / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
        (place / "meminfo").write_text(f"Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n")
    if gpu is not None:
        device = root / "sys/bus/pci/devices" / PCI_ID
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu}\n")
    return root


def test_nodes_are_read_in_order_with_their_memory(tmp_path: Path) -> None:
    found = numa.nodes(tree(tmp_path, {1: "4-7", 0: "0-3,8", 10: ""}, None))
    assert found == (
        NumaNode(0, "0-3,8", 2**20),
        NumaNode(1, "4-7", 2**20),
        NumaNode(10, "", 2**20),
    )
    assert numa.nodes_of_cpus(found, {3, 4}) == (0, 1)
    assert numa.nodes_of_cpus(found, {8}) == (0,)
    assert numa.nodes(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("nodes", "said", "node"),
    [
        ({0: "0-3", 1: "4-7"}, "1", 1),
        ({0: "0-3"}, "-1", 0),  # one node only: the firmware need not say
        ({0: "0-3", 1: "4-7"}, "-1", "the firmware doesn't say"),
        ({0: "0-3", 1: "4-7"}, None, "no numa_node here"),
    ],
)
def test_the_gpus_node_is_what_the_kernel_says_or_unknown(
    tmp_path: Path, nodes: dict[int, str], said: str | None, node: int | str
) -> None:
    root = tree(tmp_path, nodes, said)
    found = numa.with_nodes(machine(), root, PCI_ID).gpu_numa_node
    assert found == node or (isinstance(found, Unknown) and str(node) in found.reason)


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("0", {0}), ("0-2,5,7-8", {0, 1, 2, 5, 7, 8})])
def test_lists_of_processors_are_read(text: str, cpus: set[int]) -> None:
    assert numa.cpus_of(text) == cpus


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_numa_node": Unknown("the firmware doesn't say (numa_node is -1)")}, "firmware doesn't say"),
        ({"gpu_numa_node": 1, "numa_nodes": (NumaNode(1, "9000-9001", 1),)}, "may use no processor"),
        ({"gpu_numa_node": 3, "numa_nodes": ()}, "may use no processor"),
    ],
)
def test_a_node_that_cannot_be_held_to_is_refused_before_anything_is_measured(
    changes: dict[str, object], why: str
) -> None:
    with pytest.raises(DeviceUnusable, match=why) as refused:
        numa.hold_to_gpu(replace(machine(), **changes))  # type: ignore[arg-type]
    assert "without --numa gpu" in refused.value.hint


def test_where_each_process_measured_is_in_the_report_and_reported() -> None:
    places = NumaPlaces(1, (0, 1), 1, Unknown("Operation not permitted"), held=False)
    text = RUN.text(report(done("transfer", places)))
    assert "NUMA nodes: GPU 1, processors 0, 1, pinned buffers 1, pageable buffers unknown (Operation" in text
    held = RUN.text(report(done("transfer", replace(places, processors=(1,), held=True))))
    assert "processors 1, pinned buffers 1" in held
    assert "held to the node of the GPU" in held
    here = machine(numa_nodes=(NumaNode(0, "0-3", 2**30),), gpu_numa_node=0)
    assert "NUMA nodes 0: CPUs 0-3, 1.00 GiB; GPU at 0" in machine_lines(here)


def test_how_a_run_was_held_is_a_setting_of_its_report() -> None:
    assert SETTINGS.numa == "as_found"
    assert Settings(True, 1, None, numa="gpu").numa == "gpu"
