"""What the planner knows of a machine: the constants of its GPU, link and host.

They come from `profiles.toml` (makers' peaks, and the share that programs reach, each with its source), or
from a probe report of the machine itself (`from_report`); what a report lacks is the nearest profile's.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, get_args

from probes.core.errors import UsageError
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware.cards import (
    Card,
    CardUnknown,
    NamedCard,
    all_cards,
    find_card,
    named_card,
    sizes_text,
)
from probes.placement.models.operations import OperationKind
from probes.records.facts import Gpu, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import SMALL_LAYERS, Measurement, Pass, Small, SmallWork
from probes.records.schema import ProbeReport
from probes.records.stats import summarize

PROFILE_SPREAD = 0.40  # relative half-width of the 90 % interval around a time predicted from data sheets
REPORT_SPREAD = 0.15  # likewise around one predicted from this machine's own measurements
ASSUMED_HOST: Final = 64 << 30  # bytes of host memory, where neither the caller nor a report says how much


@dataclass(frozen=True)
class ClassTimes:
    """What operations of one class take on a machine, as its report has measured them."""

    kernel_s: float  # of the device, for each kernel beyond its bytes
    host_s: float  # of the host, for each operation that torch launches
    rate: float  # bytes/s; of attention and convolutions operations/s in 16 bits


@dataclass(frozen=True)
class Constants:
    """One machine: a GPU, its link and its host. In bytes, bytes/s, seconds and operations/s."""

    name: str
    origin: str  # "measured: report.json", "predicted: profile wx4100"
    vram_bytes: int
    vram_rate: float  # kernels reading VRAM
    unpack_rate: float  # packed bytes read plus unpacked bytes written, with 4-bit codes
    ranked_rate: float  # likewise with 2-bit codes, whose escapes are counted
    activation_rate: float  # kernels besides products reading and writing activations, mostly in a cache
    operations_rate: float  # unpacking by torch operations, where no kernel writes the wanted dtype
    fused_rate: float  # packed bytes read by a product straight from them; 0: there is no such product
    experts_rate: float  # experts' products reading their weights, one kernel for all of them
    fused_rows_rate: float  # likewise for several rows and few outputs, which are bound by the decoding
    link_rate: float  # copies of pinned memory to VRAM
    link_alpha_s: float  # and what each copy takes beyond its bytes
    zero_copy_rate: float  # kernels reading pinned host memory
    flops: Mapping[str, float]  # multiplications and additions, by dtype: float16, bfloat16, float32
    cpu_rate: float  # products on the CPU reading weights at batch 1
    cpu_flops: float
    disk_rate: float
    operation_s: float  # of the host, for each operation that torch launches
    kernel_s: float  # of the device, for each kernel besides products, beyond its bytes
    product_s: float  # likewise for each product
    product_step_s: float  # of a product of few rows, for each number of an input row: one multiplier's turn
    unpack_item_s: float  # of the device, for each tensor that is unpacked, beyond its bytes
    context_bytes: int  # of VRAM, by the driver
    workspace_bytes: int  # of VRAM, by the libraries that multiply
    bfloat16: bool  # has units for it
    triton: bool
    unified: bool = False  # VRAM and host memory are one
    pinned_share: float = 1.0  # of the host's memory that may be pinned
    host_bytes: int | None = None  # of memory, if known
    spread: float = PROFILE_SPREAD
    notes: tuple[str, ...] = ()
    target: str = ""  # of its GPU: gfx906, sm_90; empty without one
    classes: Mapping[OperationKind, ClassTimes] = field(default_factory=dict)  # those that were measured

    @property
    def has_gpu(self) -> bool:
        """Whether the machine has a GPU; without one, every block goes to the CPU."""
        return self.vram_bytes > 0

    @property
    def converts(self) -> bool:
        """Whether bfloat16 weights have to be converted, because the GPU has no units for them."""
        return self.has_gpu and not self.bfloat16

    def fuses_attention(self, *, halves: bool, grouped: bool) -> bool:
        """Whether torch has a kernel that attends without keeping the scores.

        `halves`: in 16 bits; `grouped`: with fewer heads of keys than of queries. Such kernels need units for
        halves; of grouped heads also halves.
        """
        return self.triton and self.bfloat16 and (halves or not grouped)

    def rate_of_products(self, dtype: str) -> float:
        """Operations/s in a dtype; a dtype without an entry runs at float32's rate."""
        return self.flops.get(dtype, self.flops["float32"])


def with_host(machine: Constants, host: int | None) -> tuple[Constants, int | None]:
    """The machine and the host's budget; where neither is known, ASSUMED_HOST, and a note that says so."""
    if host is not None or machine.host_bytes is not None:
        return machine, host
    note = f"{binary_bytes(ASSUMED_HOST)} of host memory are assumed: --host says how much there is"
    return replace(machine, notes=(*machine.notes, note)), ASSUMED_HOST


FILE: Final = Path(__file__).with_name("profiles.toml")
GIB: Final = 2**30
MIB: Final = 2**20
# GB/s of a lane in one direction, 128b/130b coded: PCIe 3.0 to 5.0, by generation
LANE_GB_PER_S: Final[Mapping[int, float]] = {3: 0.985, 4: 1.969, 5: 3.938}
# The profile for an AMD target that no profile's own begins like: these have bfloat16 units and Triton
NEAREST_BY_TARGET: Final[Mapping[str, str]] = {
    "gfx95": "mi300x",
    "gfx115": "strix-halo",
    "gfx12": "rx7900xtx",
}
NEAREST_AMD: Final = "rx6800"  # for any other AMD target
MACHINES_HINT: Final = (
    "name a card ('WX 4100', 'MI50 16GB', h200), or give the file of a probe report, which `run` writes"
)
GCN: Final = ("gfx8", "gfx900", "gfx906")  # targets of the architecture before CDNA and RDNA


@cache
def table() -> Mapping[str, Any]:
    """The content of profiles.toml."""
    with FILE.open("rb") as file:
        return tomllib.load(file)


def profile_names() -> tuple[str, ...]:
    """Names of the machines that have a profile."""
    return tuple(table()["machines"])


def profile(name: str) -> Constants:
    """A named machine's constants. Raises UsageError for a name that has no profile."""
    if name not in table()["machines"]:
        raise UsageError(
            f"there is no profile {name!r}",
            f"give one of {', '.join(profile_names())}, or a probe report of your machine",
        )
    return _Profile(name).constants()


class _Profile:
    """One machine's entry of the file, merged over what is common to all machines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._machine = table()["machines"][name]
        self._entry = {**table()["common"], **self._machine}

    def _value(self, key: str) -> float:
        return float(self._entry[key]["value"])

    def _reached(self, key: str) -> float:
        return float(table()["reached"][key]["value"])

    def constants(self) -> Constants:
        """The profile's constants, in bytes and seconds."""
        target = str(self._machine["target"])
        amd, triton = target.startswith("gfx"), bool(self._machine["triton"]["value"])
        unified = "unified" in self._machine
        peak = self._value("vram_gb_per_s") * 1e9
        link = peak * self._reached("vram_read") / 2 if unified else self._link() * self._reached("link")
        flops = {
            k: v * 1e12 * self._reached("flops") for k, v in self._machine["tflops"].items() if k != "source"
        }
        vram = peak * self._reached("gcn_vram_read" if target.startswith(GCN) else "vram_read")
        unpack = peak * self._reached("unpack" if triton else "torch_unpack")
        fused = peak * self._reached("fused") if triton else 0.0
        matrix_units = bool(self._machine["bfloat16"]["value"])
        return Constants(
            name=str(self._machine["title"]),
            origin=f"predicted: profile {self._name}",
            vram_bytes=int(self._value("vram_gib") * GIB),
            vram_rate=vram,
            unpack_rate=self._kernels_rate(unpack, "unpack_b12"),
            ranked_rate=self._kernels_rate(unpack, "unpack_planes b10", nvidia="ranked"),
            activation_rate=self._at_most(vram, "activations"),
            operations_rate=peak * self._reached("torch_unpack"),
            experts_rate=self._at_most(vram, "experts"),
            fused_rate=self._kernels_rate(fused, "one_row even"),
            fused_rows_rate=self._kernels_rate(fused, "few_rows even", nvidia="fused_rows"),
            link_rate=link,
            link_alpha_s=self._value("copy_alpha_us") * 1e-6,
            zero_copy_rate=peak * self._reached("vram_read")
            if unified
            else link * self._reached("zero_copy"),
            flops=flops,
            cpu_rate=self._value("cpu_gb_per_s") * 1e9,
            cpu_flops=self._value("cpu_tflops") * 1e12,
            disk_rate=self._value("disk_gb_per_s") * 1e9,
            operation_s=self._value("operation_us") * 1e-6,
            kernel_s=self._value("kernel_us") * 1e-6,
            product_s=self._value("product_us") * 1e-6,
            product_step_s=self._value("product_step_ns") * 1e-9,
            unpack_item_s=self._value("unpack_item_us") * 1e-6,
            context_bytes=int(self._value("amd_context_mib" if amd else "nvidia_context_mib") * MIB),
            workspace_bytes=int(
                self._value("workspace_mib" if matrix_units else "small_workspace_mib") * MIB
            ),
            bfloat16=matrix_units,
            triton=triton,
            unified=unified,
            pinned_share=self._value("pinned_share") if amd else 1.0,
            spread=PROFILE_SPREAD,
            notes=("nothing here was measured on an AMD card",) if amd else (),
            target=target,
        )

    def _at_most(self, rate: float, key: str) -> float:
        """A rate of VRAM, limited to what the GPU's arithmetic units reach on NVIDIA's."""
        return min(rate, self._operations_s * self._reached(key))

    def _kernels_rate(self, rate: float, kernel: str, *, nvidia: str = "") -> float:
        """A rate of VRAM of a kernel of ours, limited by its instructions and its transactions.

        AMD's are counted on an emulated ISA, and how many of them a card begins in a second is assumed; what
        NVIDIA's reach was measured, where `nvidia` names it. Where Triton makes no kernels torch unpacks.
        """
        if not str(self._machine["target"]).startswith("gfx"):
            return self._at_most(rate, nvidia) if nvidia else rate
        if not self._machine["triton"]["value"]:
            return rate
        of = table()["counted"][kernel]
        counts = of[_counted_target(str(self._machine["target"]))]
        weights_s: float = self._operations_s * min(
            self._reached("instructions") / counts["instructions"],
            self._reached("transactions") / counts["transactions"],
        )
        return min(rate, weights_s * float(of["bytes"]))

    @property
    def _operations_s(self) -> float:
        return float(self._machine["tflops"]["float32"]) * 1e12

    def _link(self) -> float:
        link = self._machine["link"]
        return LANE_GB_PER_S[int(link["generation"])] * 1e9 * int(link["lanes"])


def _counted_target(target: str) -> str:
    """The target whose kernels were counted for an AMD GPU: that of the nearest architecture."""
    likes = {"gfx12": "gfx1201", "gfx1": "gfx1100", "gfx94": "gfx942", "gfx95": "gfx942"}
    return next((like for prefix, like in likes.items() if target.startswith(prefix)), "gfx90a")


def nearest_profile(name: str, target: str) -> str:
    """The profile for a GPU, by torch's name and target of it; else that of a card with similar units."""
    card = _card_of(name)
    if card and isinstance(card.profile, str):
        return card.profile
    machines = table()["machines"]
    same = [key for key in profile_names() if machines[key]["target"] == target.split(":", maxsplit=1)[0]]
    if same:
        return _nearest_in_size(same, card)
    if not target.startswith("gfx"):
        return "rtx4090"
    like = next((key for prefix, key in NEAREST_BY_TARGET.items() if target.startswith(prefix)), "")
    return like or next(
        (key for key in profile_names() if machines[key]["target"][:5] == target[:5]), NEAREST_AMD
    )


def _card_of(name: str) -> Card | None:
    try:
        return find_card(name)
    except UsageError:
        return None


def _nearest_in_size(names: Sequence[str], card: Card | None) -> str:
    """Of profiles of one target, that with most nearly the card's VRAM; the first where that isn't known."""
    if card is None or not card.memory_variants:
        return names[0]
    size = max(card.memory_variants)
    return min(names, key=lambda name: abs(profile(name).vram_bytes - size))


# ---- a machine by the name of its card -----------------------------------------------------------------


def machine_named(text: str) -> Constants:
    """The constants of the machine whose card a text names, with the VRAM that it says.

    Raises UsageError for a text that means no card or several, and for a card without a profile.
    """
    named = _card_with_profile(text)
    return _of_card(named.card, named.memory_bytes, named.notes)


def machine_of_card(card: Card, vram_bytes: int | None) -> Constants:
    """The constants of a machine with this card and so much VRAM by its driver. Raises UsageError."""
    return _of_card(card, vram_bytes and card.variant(vram_bytes), ())


def _card_with_profile(text: str) -> NamedCard:
    if text in profile_names():
        return NamedCard(next(card for card in all_cards() if card.profile == text))
    try:
        return named_card(text)
    except CardUnknown as unknown:
        raise CardUnknown(unknown.message, f"{_guess(unknown)}{MACHINES_HINT}") from unknown


def _guess(unknown: CardUnknown) -> str:
    """What the error suggests, without what only other commands take."""
    guess, found, _ = unknown.hint.partition("? Otherwise ")
    return f"{guess}? Otherwise " if found else ""


def _of_card(card: Card, memory_bytes: int | None, notes: tuple[str, ...]) -> Constants:
    if isinstance(card.profile, Unknown):
        raise UsageError(f"{card.name} ({card.target}) has no profile to plan with", _instead(card))
    made = profile(card.profile)
    usual = card.variant(made.vram_bytes)
    if memory_bytes is not None and memory_bytes != usual:
        made = replace(made, vram_bytes=memory_bytes)
    if memory_bytes is None and usual is not None and len(card.memory_variants) > 1:
        short = card.name.split()[-1]
        others = [f"--machine '{short} {size // GIB}GB'" for size in card.memory_variants if size != usual]
        assumed = f"{usual // GIB} GiB of VRAM are assumed: {card.name} has {sizes_text(card)}"
        notes = (*notes, f"{assumed}; for the other, {' or '.join(others)}")
    return replace(made, notes=(*made.notes, *notes))


def _instead(card: Card) -> str:
    """What to give for a card without a profile: a report, or a profile of its family if there is one."""
    report = "give the report of `run` on that card: --machine REPORT.json"
    family = re.match(r"gfx\d+(?=\w\w$)|sm_\d+(?=\d$)", card.target)
    near = nearest_profile(card.name, card.target)
    target = str(table()["machines"][near]["target"])
    if family is None or not re.fullmatch(rf"{family[0]}(?:\w\w|\d)", target):
        return report
    return f"{report}; the nearest profile is --machine {near} of another card, {profile(near).name}"


# Seconds that small work took on the H100 on which the profiles' constants of small kernels were measured.
SMALL_WORK_S: Final[Mapping[SmallWork, float]] = {"layers": 286e-6, "product": 4.05e-6, "unpack": 2.83e-6}
PLAIN_OPERATIONS: Final = 11  # of a plain layer: the unit in which planner/rules.py counts operations
SHORT_COPY: Final = 64 << 10  # bytes: a copy whose time is mostly its latency
LARGE: Final = 64 << 20  # bytes: in smaller copies the latency is a notable part of the time
CPU_SHARE: Final = 0.5  # of the rate of reading memory, which products on the CPU reach
CORES: Final = 16  # of the machine whose CPU the profiles describe


def from_report(report: ProbeReport, *, name: str) -> Constants:
    """The constants of the machine on which a report was measured. `name`: the report's, for people."""
    report = merged(report)
    records = [record for run in report.runs for record in run.records]
    rows = [record for record in records if isinstance(record, Measurement)]
    passes = [record for record in records if isinstance(record, Pass)]
    small = [sample for run in report.runs for sample in run.small]
    gpu = _gpu(report)
    nearest = nearest_profile(gpu.name, gpu.target) if gpu else "h200"
    base = profile(nearest)
    ram = report.machine.ram_total_bytes
    read = _rate(rows, "h2h_read")
    machine = replace(
        base,
        name=gpu.name if gpu else "CPU",
        origin=f"measured: {name}",
        host_bytes=ram if isinstance(ram, int) else None,
        cpu_rate=read * CPU_SHARE if read else base.cpu_rate * min(report.machine.cpus / CORES, 1.0),
        cpu_flops=base.cpu_flops * report.machine.cpus / CORES,
        spread=REPORT_SPREAD,
    )
    work = {sample.name: sample for sample in small}
    if gpu is None:
        if (seconds := _class_s(small, "products float32")) is not None:
            machine = replace(machine, cpu_flops=work["products float32"].flops / seconds)
        note = "the report has no GPU: all blocks go to the CPU"
        return replace(machine, vram_bytes=0, notes=(note,), target="")
    machine = _with_launches(machine, rows, small)
    missing = [] if "layers" in work else ["Python's time for an operation", "small kernels"]
    machine = replace(machine, classes=_classes(small))
    missing += [] if machine.classes else ["times of classes of operation"]
    return _with_measurements(machine, gpu, rows, passes, small, profile=nearest, missing=missing)


def without_gpu(cpus: int) -> Constants:
    """A machine with `cpus` processors and no GPU: the profiles' CPU, scaled by its number of cores."""
    base, share = profile("h200"), cpus / CORES
    rate = base.cpu_rate * min(share, 1.0)
    return replace(base, name="CPU", vram_bytes=0, cpu_rate=rate, cpu_flops=base.cpu_flops * share, target="")


def _gpu(report: ProbeReport) -> Gpu | None:
    torch = report.machine.torch
    return torch.gpus[0] if isinstance(torch, TorchFacts) and torch.gpus else None


def _with_measurements(
    machine: Constants,
    gpu: Gpu,
    rows: Sequence[Measurement],
    passes: Sequence[Pass],
    small: Sequence[Small],
    *,
    profile: str,
    missing: list[str],
) -> Constants:
    def rate(name: str, fallback: float) -> float:
        measured = _rate(rows, name)
        if measured is None:
            missing.append(name)
        return measured or fallback

    vram = rate("vram_read", machine.vram_rate)
    scale = vram / machine.vram_rate
    flops = _flops(passes, small)
    measured = replace(
        machine,
        vram_bytes=gpu.vram_total_bytes,
        vram_rate=vram,
        unpack_rate=machine.unpack_rate * scale,
        ranked_rate=min(machine.ranked_rate, machine.unpack_rate * scale),
        operations_rate=machine.operations_rate * scale,
        activation_rate=min(machine.activation_rate, vram),
        experts_rate=min(machine.experts_rate, vram),
        fused_rate=machine.fused_rate * scale,
        fused_rows_rate=min(machine.fused_rows_rate, machine.fused_rate * scale),
        link_rate=rate("h2d_pinned", machine.link_rate),
        zero_copy_rate=rate("zero_copy_read", machine.zero_copy_rate),
        flops={key: flops.get(key, value) for key, value in machine.flops.items()},
        unified=gpu.integrated is True,
        target=gpu.target.partition(":")[0],
    )
    missing += [] if flops else ["products at batch 256"]
    always = ["context", "workspace", "unpacking", *missing]
    note = f"from the profile {profile}: {', '.join(always)}"
    return replace(measured, notes=(*machine.notes, note))


def _rate(rows: Sequence[Measurement], name: str) -> float | None:
    """Bytes/s that the largest buffers reach on a path; None where no large one was measured."""
    large = [row for row in rows if row.name == name and row.payload_bytes >= LARGE]
    if not large:
        return None
    row = max(large, key=lambda row: row.payload_bytes)
    return row.moved_bytes / summarize(row.times_s).median


def _flops(passes: Sequence[Pass], small: Sequence[Small]) -> Mapping[str, float]:
    """Operations/s by dtype: the best of products of many rows and of batches through linear layers."""
    rates: dict[str, float] = {}
    for sample in small:
        size, _, dtype = sample.name.partition(" ")
        if size == "products" and (seconds := _class_s(small, sample.name)) is not None:
            rates[dtype] = sample.flops / seconds
    for row in passes:
        if row.model == "mlp" and row.scenario == "resident" and row.rows >= 64:
            numbers = row.weight_bytes / (4 if row.dtype == "float32" else 2)
            rate = 2 * numbers * row.rows / summarize(row.times_s).median
            rates[row.dtype] = max(rates.get(row.dtype, 0.0), rate)
    if (
        "float16" in rates
    ):  # units for both run at one rate; a GPU without bfloat16 units doesn't read this key
        rates.setdefault("bfloat16", rates["float16"])
    return rates


def _with_launches(machine: Constants, rows: Sequence[Measurement], small: Sequence[Small]) -> Constants:
    """The machine with the report's times of launches; the device's scale with those of small work."""
    walls = _medians(small, lambda sample: sample.wall_s)
    devices = _medians(small, lambda sample: sample.device_s)
    times = {name: devices.get(name, reference) / reference for name, reference in SMALL_WORK_S.items()}
    layers = SMALL_LAYERS * PLAIN_OPERATIONS
    return replace(
        machine,
        operation_s=walls["layers"] / layers if "layers" in walls else machine.operation_s,
        kernel_s=machine.kernel_s * times["layers"],
        product_s=machine.product_s * times["product"],
        unpack_item_s=machine.unpack_item_s * times["unpack"],
        link_alpha_s=_copy_latency_s(rows) or machine.link_alpha_s,
    )


def _classes(small: Sequence[Small]) -> Mapping[OperationKind, ClassTimes]:
    """The times of each class of operation that was measured in a small and in a large size on the device."""
    walls = _medians(small, lambda sample: sample.wall_s)
    work: dict[str, Small] = {sample.name: sample for sample in small}
    classes = {}
    for kind in get_args(OperationKind):
        each, large = _class_s(small, kind), _class_s(small, f"large {kind}")
        if each is None or large is None:
            continue
        amount = work[f"large {kind}"].flops or work[f"large {kind}"].moved_bytes
        classes[kind] = ClassTimes(
            kernel_s=each / work[kind].launches,
            host_s=walls[kind] / work[kind].count,
            rate=amount / (large - each if large > 2 * each else large),
        )
    return classes


def _class_s(small: Sequence[Small], name: str) -> float | None:
    """Seconds of one operation in such work, by the device's clock, else the host's; None: not measured."""
    devices = _medians(small, lambda sample: sample.device_s)
    walls = _medians(small, lambda sample: sample.wall_s)
    count = next((sample.count for sample in small if sample.name == name), 1)
    seconds = devices.get(name, walls.get(name))
    return None if seconds is None else seconds / count


def _medians(
    small: Sequence[Small], times_of: Callable[[Small], Sequence[float] | Unknown]
) -> Mapping[str, float]:
    """The median over processes of each one's median time, by the kind of work."""
    by_work: dict[str, list[float]] = {}
    for process in small:
        times = times_of(process)
        if not isinstance(times, Unknown):
            by_work.setdefault(process.name, []).append(median(times))
    return {name: median(medians) for name, medians in by_work.items()}


def _copy_latency_s(rows: Sequence[Measurement]) -> float | None:
    """What a short copy takes beyond the time of its bytes."""
    rate = _rate(rows, "h2d_pinned")
    short = [row for row in rows if row.name == "h2d_pinned" and row.payload_bytes == SHORT_COPY]
    took = [summarize(row.times_s).median - row.moved_bytes / rate for row in short if rate]
    return took[0] if took and took[0] > 0 else None
