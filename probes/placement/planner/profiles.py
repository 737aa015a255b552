"""Named machines from `profiles.toml`: makers' peaks and the share that programs reach, with sources."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from probes.errors import UsageError
from probes.placement.planner.costs.constants import PROFILE_SPREAD, Constants

FILE: Final = Path(__file__).with_name("profiles.toml")
GIB: Final = 2**30
MIB: Final = 2**20
# GB/s of a lane in one direction, 128b/130b coded: PCIe 3.0 to 5.0, by generation
LANE_GB_PER_S: Final[Mapping[int, float]] = {3: 0.985, 4: 1.969, 5: 3.938}
# AMD's targets that no profile's own begins like: the newer ones have bfloat16 units and Triton
LIKE: Final[Mapping[str, str]] = {"gfx95": "mi300x", "gfx115": "strix-halo", "gfx12": "rx7900xtx"}
NEAREST: Final = "rx6800"  # of AMD's others
GCN: Final = ("gfx8", "gfx900", "gfx906")


@cache
def table() -> Mapping[str, Any]:
    """The file as it is."""
    with FILE.open("rb") as file:
        return tomllib.load(file)


def names() -> tuple[str, ...]:
    """The machines that have a profile."""
    return tuple(table()["machines"])


def called(name: str) -> str:
    """The machine's name in the file: `RX 7900 XTX` and `AMD Radeon RX 7900 XTX` are `rx7900xtx`.

    What has no profile stays as it is.
    """
    words = _letters(name)
    for key in names():
        if _letters(key) in words and words in _letters(key) + _letters(
            str(table()["machines"][key]["title"])
        ):
            return key
    return name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def profile(name: str) -> Constants:
    """A named machine's constants. Raises UsageError for a name that has no profile."""
    if name not in table()["machines"]:
        raise UsageError(
            f"there is no profile {name!r}",
            f"give one of {', '.join(names())}, or a probe report of your machine",
        )
    return _Profile(name).constants()


def sources(name: str) -> dict[str, str]:
    """For each number of a machine's profile, where it is from and when that was read."""
    known = table()["sources"]
    entry = {**table()["reached"], **table()["common"], **table()["machines"][name]}
    return {
        key: f"{known[value['source']]['what']} ({known[value['source']]['date']})"
        for key, value in entry.items()
        if isinstance(value, dict)
    }


class _Profile:
    """One machine of the file, over what is common to all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._machine = table()["machines"][name]
        self._entry = {**table()["common"], **self._machine}

    def _value(self, key: str) -> float:
        return float(self._entry[key]["value"])

    def _reached(self, key: str) -> float:
        return float(table()["reached"][key]["value"])

    def constants(self) -> Constants:
        """All of it, in bytes and seconds."""
        target = str(self._machine["target"])
        amd, triton = target.startswith("gfx"), bool(self._machine["triton"]["value"])
        unified = "unified" in self._machine
        peak = self._value("vram_gb_per_s") * 1e9
        link = peak * self._reached("vram_read") / 2 if unified else self._link() * self._reached("link")
        flops = {
            k: v * 1e12 * self._reached("flops") for k, v in self._machine["tflops"].items() if k != "source"
        }
        vram = peak * self._reached("gcn_vram_read" if target.startswith(GCN) else "vram_read")
        fused = peak * self._reached("fused") if triton else 0.0
        matrix_units = bool(self._machine["bfloat16"]["value"])
        return Constants(
            name=str(self._machine["title"]),
            origin=f"predicted: profile {self._name}",
            vram_bytes=int(self._value("vram_gib") * GIB),
            vram_rate=vram,
            unpack_rate=peak * self._reached("unpack" if triton else "torch_unpack"),
            ranked_rate=self._at_most(peak * self._reached("unpack"), "amd_ranked" if amd else "ranked")
            if triton
            else peak * self._reached("torch_unpack"),
            activation_rate=self._at_most(vram, "activations"),
            operations_rate=peak * self._reached("torch_unpack"),
            experts_rate=self._at_most(vram, "experts"),
            fused_rate=fused,
            fused_rows_rate=self._at_most(fused, "fused_rows"),
            link_rate=link,
            link_alpha_s=self._value("copy_alpha_us") * 1e-6,
            pageable_rate=link if unified else link * self._reached("pageable"),
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
        )

    def _at_most(self, rate: float, key: str) -> float:
        """A rate of VRAM, or what the GPU's units reach where that is less."""
        return min(rate, float(self._machine["tflops"]["float32"]) * 1e12 * self._reached(key))

    def _link(self) -> float:
        link = self._machine["link"]
        return LANE_GB_PER_S[int(link["generation"])] * 1e9 * int(link["lanes"])


def matching(name: str, target: str) -> str:
    """The profile of a GPU as torch names it; of one that has none, that of a card with like units."""
    words = "".join(name.lower().split()).replace("-", "")
    for key in sorted(names(), key=len, reverse=True):
        if key.replace("-", "") in words:
            return key
    machines = table()["machines"]
    same = [key for key in names() if machines[key]["target"] == target.split(":", maxsplit=1)[0]]
    if same:
        return same[0]
    if not target.startswith("gfx"):
        return "rtx4090"
    like = next((key for begin, key in LIKE.items() if target.startswith(begin)), "")
    return like or next((key for key in names() if machines[key]["target"][:5] == target[:5]), NEAREST)
