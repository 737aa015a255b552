"""Which ways a scan takes: devices, backends, precisions, inputs, as asked or as is usual here. Pure."""

from collections.abc import Sequence
from itertools import product
from typing import get_args

from probes.records.facts import TorchFacts
from probes.records.schema import Machine
from probes.throughput.ceilings.ceiling import Device
from probes.throughput.direct.scanned import Backend, Inputs, Mode, Way

BACKENDS: tuple[Backend, ...] = get_args(Backend)
MODES: tuple[Mode, ...] = get_args(Mode)
INPUTS: tuple[Inputs, ...] = get_args(Inputs)
DEVICES: tuple[Device, ...] = get_args(Device)
# Without --precision: what a device is quick in. Half precision on a CPU mostly isn't.
USUAL: dict[Device, tuple[Mode, ...]] = {"gpu": MODES, "cpu": ("fp32", "bf16")}
MOST_BATCH = 2**16


def powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a batch size."""
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


def devices(machine: Machine, asked: Sequence[str]) -> tuple[Device, ...]:
    """The devices that were asked for; without a wish the CPU, and the GPU that torch can use."""
    if asked:
        return tuple(device for device in DEVICES if device in asked)
    facts = machine.torch
    return ("gpu", "cpu") if isinstance(facts, TorchFacts) and facts.gpus else ("cpu",)


def ways(
    on: Sequence[Device],
    *,
    backends: Sequence[str] = (),
    precisions: Sequence[str] = (),
    inputs: Sequence[str] = (),
) -> tuple[Way, ...]:
    """Every combination that means something, each once. An empty wish is what is usual.

    The CPU reads its inputs where they are, so that they count as resident.
    """
    found = []
    for device, backend in product(on, [one for one in BACKENDS if one in (backends or BACKENDS)]):
        for mode in [one for one in MODES if one in (precisions or USUAL[device])]:
            places: Sequence[Inputs] = ("resident",)
            if device == "gpu":
                places = [one for one in INPUTS if one in (inputs or ("copied",))]
            found += [Way(device, backend, mode, place) for place in places]
    return tuple(found)
