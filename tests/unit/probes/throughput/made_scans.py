"""Throughput reports made by hand: a device with known ceilings and a model with known work."""

from probes.core.unknown import Unknown
from probes.records.facts import Machine
from probes.throughput.ceilings import Ceiling, Ceilings, DeviceCeilings, FlopCeiling
from probes.throughput.direct.results import BatchRow, DirectScan, ModelFacts, Series, Way, Work
from probes.throughput.report import KIND, VERSION, ScanSettings, ThroughputReport

NONE = Unknown("made without it")
WAY = Way("cpu", "pytorch", "fp32", "resident")


def ceiling(rate: float) -> Ceiling:
    return Ceiling("made", rate, (1.0, 1.01, 0.99), "wall")


def ceilings() -> Ceilings:
    cpu = DeviceCeilings(
        device="cpu",
        name="a made CPU",
        flop=(FlopCeiling("fp32", ceiling(1e11)), FlopCeiling("tf32", NONE)),
        memory=ceiling(1e10),
        to_device=NONE,
        from_device=NONE,
        launches=ceiling(1e6),
    )
    return Ceilings((cpu,))


def row(batch: int, seconds: float, *, trials: int = 5, flop: float = 1e9) -> BatchRow:
    """A row whose trials take this long, give or take a thousandth."""
    work = Work(flop * batch, 1e7 * batch, 1e6 * batch, 4000 * batch, 20)
    walls = tuple(seconds * (1 + 0.001 * (turn % 3 - 1)) for turn in range(trials))
    return BatchRow(batch, walls, NONE, work, NONE, NONE, 0, NONE)


def series(*rows: BatchRow, way: Way = WAY) -> Series:
    return Series(way, rows, "finished")


def direct() -> DirectScan:
    rows = [row(batch, 0.01 * max(batch, 4)) for batch in (1, 2, 4, 8, 16, 32)]
    return DirectScan(ModelFacts("made", ("20 x 50",), 1000, 4000), (series(*rows),))


def machine() -> Machine:
    return Machine(
        host="made",
        kernel="6.0",
        wsl=False,
        container=False,
        cpus=2,
        ram_total_bytes=8 << 30,
        ram_available_bytes=4 << 30,
        cgroup_limit_bytes=NONE,
        gpu_driver=NONE,
        device_files=(),
        cards=(),
        kfd_nodes=(),
        torch=NONE,
    )


def report() -> ThroughputReport:
    return ThroughputReport(
        kind=KIND,
        schema_version=VERSION,
        tool_version="0.1.0",
        started="2026-11-21T23:00:00Z",
        settings=ScanSettings("made", (), 5, ("resident",), ("pytorch",), ("fp32",), ("cpu",), 0, 2),
        machine=machine(),
        ceilings=ceilings(),
        direct=direct(),
    )
