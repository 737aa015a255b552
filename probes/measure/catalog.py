"""The table of probes: what each is for, when it is waived, how long it may take, what it runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware import host, snapshot, sysfs
from probes.hardware.expectation import expect
from probes.measure import breakeven, scenarios, spill, transfer
from probes.measure.workbench import Workbench
from probes.records.facts import Gpu, Machine, TorchFacts
from probes.records.rounds import FULL_ROUNDS, QUICK_ROUNDS
from probes.records.rows import Reading, Record, Small
from probes.records.schema import Settings

QUICK_LIMIT_S = 120.0  # of a process of any probe, on a slow machine


@dataclass(frozen=True)
class Context:
    """A probe's input: the settings, the machine as it was at the start, the root of its files."""

    settings: Settings
    machine: Machine
    root: Path
    done: frozenset[str] = frozenset()  # cases that an earlier try has measured

    @property
    def torch(self) -> TorchFacts:
        """Torch's facts; a probe runs only where they are known."""
        assert isinstance(self.machine.torch, TorchFacts)
        return self.machine.torch

    @property
    def gpu(self) -> Gpu:
        """The GPU that is measured, torch's first."""
        return self.torch.gpus[0]

    def available_bytes(self) -> int:
        """Available host memory, read now; 0 where it isn't known."""
        available = host.available_bytes(self.root)
        return 0 if isinstance(available, Unknown) else available

    def spendable_bytes(self) -> int:
        """Host memory above the floor, read now. The floor is that of the start, so it can't sink."""
        floor = self.machine.ram_available_bytes
        least = host.LEAST_FLOOR if isinstance(floor, Unknown) else host.floor_bytes(floor)
        return host.spendable_bytes(host.available_bytes(self.root), least)


@dataclass(frozen=True)
class Probe:
    """One probe. Each of its rounds is in a fresh process; what isn't a timing is measured once.

    The time limit of a process in full mode is for a slow machine: past it, it counts as hanging.
    """

    name: str
    summary: str
    needs_gpu: bool
    limit_s: float
    quick_rounds: int
    full_rounds: int
    run: Callable[[Workbench, Context], Iterator[Record | Small]]
    alone: bool = False  # takes all of a memory, so that no other side can measure beside it


def _transfer(bench: Workbench, context: Context) -> Iterator[Record | Small]:
    yield from transfer.run(bench, context.settings, context.available_bytes(), done=context.done)
    yield from transfer.small(bench, context.settings)
    yield from transfer.classes(bench, context.settings)


def _spill(bench: Workbench, context: Context) -> Iterator[Record]:
    pci_id = snapshot.pci_id_of_first_gpu(context.torch, context.machine.cards, context.root)

    def readings(moment: str) -> tuple[Reading, ...]:
        kernel = sysfs.readings(context.root, pci_id, moment)
        driver = Reading(moment, "driver free VRAM", bench.vram_free_bytes())
        available = Reading(moment, "host available", host.available_bytes(context.root))
        return (*kernel, driver, available)

    return spill.run(
        bench,
        context.settings,
        vram_total_bytes=context.gpu.vram_total_bytes,
        expectation=expect(context.machine),
        gauges=spill.Gauges(
            host_spendable_bytes=context.spendable_bytes,
            gtt_used_bytes=lambda: sysfs.used_bytes(context.root, pci_id, "gtt"),
            readings=readings,
        ),
    )


PROBES = (
    Probe(
        "transfer",
        "bandwidth and time of copies and reads, pageable, pinned, zero-copy and in VRAM, by size",
        needs_gpu=False,
        limit_s=900,
        quick_rounds=QUICK_ROUNDS,
        full_rounds=FULL_ROUNDS,
        run=_transfer,
    ),
    Probe(
        "breakeven",
        "read a buffer k times, copied to VRAM first or in place: from which k on does the copy pay",
        needs_gpu=True,
        limit_s=900,
        quick_rounds=QUICK_ROUNDS,
        full_rounds=FULL_ROUNDS,
        run=lambda bench, on: breakeven.run(bench, on.settings, on.available_bytes(), done=on.done),
    ),
    Probe(
        "spill",
        "ask for device memory up to and past the limit; say where the bytes went",
        needs_gpu=True,
        limit_s=600,
        quick_rounds=1,
        full_rounds=1,
        run=_spill,
        alone=True,
    ),
    Probe(
        "scenarios",
        "a model larger than VRAM: resident, zero-copy weights, inputs too, streamed, packed, as planned",
        needs_gpu=True,
        limit_s=900,
        quick_rounds=1,  # placing a model takes longer than timing it
        full_rounds=FULL_ROUNDS,
        run=lambda bench, on: scenarios.run(bench, on.settings, on.spendable_bytes(), done=on.done),
    ),
)


def select(names: tuple[str, ...]) -> tuple[Probe, ...]:
    """The probes of these names in the table's order, all for none. Raises UsageError for an unknown one."""
    known = {probe.name for probe in PROBES}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no probe named {name!r}", f"choose from: {', '.join(sorted(known))}")
    return tuple(probe for probe in PROBES if not names or probe.name in names)


def waive(probe: Probe, machine: Machine) -> str | None:
    """Why the probe can't apply to this machine; None when it can."""
    if isinstance(machine.torch, Unknown):
        return machine.torch.reason
    if probe.needs_gpu and machine.torch.obstacle:
        return f"no GPU to measure: {machine.torch.obstacle}"
    return None


def limit_s(probe: Probe, settings: Settings) -> float:
    """How long the probe may take with these settings."""
    return QUICK_LIMIT_S if settings.quick else probe.limit_s
