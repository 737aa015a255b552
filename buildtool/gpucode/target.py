"""GPU targets: processors, their features, and which code object serves which card.

Tables for AMD from LLVM's AMDGPU back end (ELF.h `EF_AMDGPU_MACH_*`, AMDGPUUsage "Generic processors").
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from buildtool.gpucode.source import BadTarget, TargetMissing

# generic ISA -> the processors that can run its code
GENERIC_ISAS: Mapping[str, tuple[str, ...]] = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx1010", "gfx1011", "gfx1012", "gfx1013"),
    "gfx10-3-generic": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "gfx11-generic": (
        "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1154",
    ),
    "gfx11-7-generic": ("gfx1170", "gfx1171", "gfx1172"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
    "gfx12-5-generic": ("gfx1250", "gfx1251"),
    "gfx13-generic": ("gfx1310",),
}  # fmt: skip

# low byte of e_flags of an AMDGPU ELF -> processor
MACH: Mapping[int, str] = {
    0x20: "gfx600", 0x21: "gfx601", 0x22: "gfx700", 0x23: "gfx701", 0x24: "gfx702", 0x25: "gfx703",
    0x26: "gfx704", 0x28: "gfx801", 0x29: "gfx802", 0x2A: "gfx803", 0x2B: "gfx810", 0x2C: "gfx900",
    0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909", 0x32: "gfx90c",
    0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031", 0x38: "gfx1032",
    0x39: "gfx1033", 0x3A: "gfx602", 0x3B: "gfx705", 0x3C: "gfx805", 0x3D: "gfx1035", 0x3E: "gfx1034",
    0x3F: "gfx90a", 0x40: "gfx940", 0x41: "gfx1100", 0x42: "gfx1013", 0x43: "gfx1150", 0x44: "gfx1103",
    0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200", 0x49: "gfx1250", 0x4A: "gfx1151",
    0x4B: "gfx941", 0x4C: "gfx942", 0x4E: "gfx1201", 0x4F: "gfx950", 0x50: "gfx1310",
    0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic", 0x54: "gfx11-generic",
    0x55: "gfx1152", 0x57: "gfx1154", 0x58: "gfx1153", 0x59: "gfx12-generic", 0x5A: "gfx1251",
    0x5B: "gfx12-5-generic", 0x5C: "gfx1172", 0x5D: "gfx1170", 0x5E: "gfx1171", 0x5F: "gfx9-4-generic",
    0x62: "gfx11-7-generic", 0x63: "gfx13-generic",
}  # fmt: skip

PROCESSORS = frozenset(MACH.values()) - GENERIC_ISAS.keys()

SPIRV = "spirv"  # portable code, compiled for the card that is present: it serves every target

_PROCESSOR = re.compile(
    r"(sm|compute|lto)_[0-9]{2,3}|gfx[0-9]{1,3}[0-9a-f](-strict)?|gfx[0-9]+(-[0-9]+)?-generic"
)
_FEATURE = re.compile(r"(sramecc|xnack)([+-])")


@dataclass(frozen=True, order=True)
class TargetId:
    """A processor and the features that its code was compiled for, e.g. `gfx90a:sramecc+:xnack-`.

    A feature that isn't named may be on or off on the card.
    """

    processor: str
    features: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "TargetId":
        """Parse `gfx90a:sramecc+:xnack-`. Raises BadTarget."""
        processor, *features = text.split(":")
        if processor != SPIRV and not _PROCESSOR.fullmatch(processor):
            raise BadTarget(
                f"`{text}` is not a GPU target", "a target looks like gfx906, gfx1100, gfx90a:xnack- or sm_90"
            )
        parsed: dict[str, bool] = {}
        for feature in features:
            match = _FEATURE.fullmatch(feature)
            if not match or match[1] in parsed:
                raise BadTarget(
                    f"`{text}`: `{feature}` is not a feature of a GPU target",
                    "features are xnack+, xnack-, sramecc+, sramecc-, each at most once",
                )
            parsed[match[1]] = match[2] == "+"
        return cls(processor, tuple(sorted(parsed.items())))

    def __str__(self) -> str:
        return ":".join((self.processor, *(f"{name}{'+' if on else '-'}" for name, on in self.features)))

    @property
    def is_cuda(self) -> bool:
        """True for NVIDIA's `sm_80` (machine code), `compute_80` (PTX) and `lto_80` (LTO-IR)."""
        return self.processor.startswith(("sm_", "compute_", "lto_"))

    @property
    def is_ptx(self) -> bool:
        """True for PTX, which the driver compiles for a card without machine code of its own."""
        return self.processor.startswith("compute_")

    @property
    def is_machine_code(self) -> bool:
        """True for NVIDIA's machine code, false for what is compiled or linked when it is loaded."""
        return self.processor.startswith("sm_")

    def serves(self, wanted: "TargetId") -> bool:
        """Whether a card of target `wanted` can run this code.

        The same processor, a generic ISA that it belongs to, or SPIR-V; a feature that both name
        must agree. Code for a generic ISA that this table doesn't know is taken to serve.
        """
        if self.is_cuda or wanted.is_cuda:
            return self.is_cuda and wanted.is_cuda and self._serves_cuda(wanted)
        if self.processor == SPIRV:
            return True
        if self.processor != wanted.processor and not self._is_family_of(wanted.processor):
            return False
        other = dict(wanted.features)
        return all(other.get(name, on) == on for name, on in self.features)

    def _serves_cuda(self, wanted: "TargetId") -> bool:
        """CUDA's promise: machine code runs on the same major version from its minor on, PTX on all later.

        LTO-IR is linked into machine code of a later version, too.
        """
        kind, _, version = self.processor.partition("_")
        own, other = int(version), int(wanted.processor.partition("_")[2])
        return own <= other and (kind != "sm" or own // 10 == other // 10)

    def _is_family_of(self, processor: str) -> bool:
        if self.processor.endswith("-generic"):
            return processor in GENERIC_ISAS.get(self.processor, (processor,))
        return False


def parse_targets(text: str) -> tuple[TargetId, ...]:
    """A comma or semicolon separated list of cards, sorted, each once. Raises BadTarget, also for none."""
    names = [name.strip() for name in re.split(r"[,;]", text) if name.strip()]
    if not names:
        raise BadTarget("no GPU target was given", "name at least one: --targets gfx906")
    for name in names:
        kind, _, version = name.partition("_")
        if kind in ("compute", "lto"):
            what = "PTX" if kind == "compute" else "LTO-IR"
            raise BadTarget(
                f"`{name}` is {what}, not a card", f"name the card that is to run it: sm_{version}"
            )
    return tuple(sorted({TargetId.parse(name) for name in names}))


def target_of_override(version: str) -> TargetId:
    """The target that `HSA_OVERRIDE_GFX_VERSION=10.3.0` makes a card report. Raises BadTarget."""
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])\.([0-9]{1,2})", version)
    if not match or int(match[3]) > 15:
        raise BadTarget(
            f"`{version}` is not an HSA_OVERRIDE_GFX_VERSION", "it has three numbers: 10.3.0 means gfx1030"
        )
    return TargetId.parse(f"gfx{int(match[1])}{match[2]}{int(match[3]):x}")


def serves_any(code: TargetId, wanted: Iterable[TargetId]) -> bool:
    """Whether one of the cards can run this code."""
    return any(code.serves(target) for target in wanted)


def known_targets(names: Iterable[str]) -> set[TargetId]:
    """Targets by the names that a file's tables give them; invalid and unknown ones are left out."""
    targets = set()
    for name in names:
        with suppress(BadTarget):
            targets.add(TargetId.parse(name))
    return targets


def served_targets(
    present: Iterable[TargetId], targets: Sequence[TargetId], *, strict: bool
) -> tuple[TargetId, ...]:
    """The targets that some code in `present` serves.

    Raises TargetMissing when there are none of them or, with `strict`, not all.
    """
    codes = sorted(set(present))
    missing = [target for target in targets if not any(code.serves(target) for code in codes)]
    if missing and (strict or len(missing) == len(targets)):
        if not codes:
            raise TargetMissing("there is no GPU code at all")
        raise TargetMissing(
            f"there is no code for {', '.join(map(str, missing))}, but code for {', '.join(map(str, codes))}",
            f"name cards that it is for: --targets {_card_of(codes[0])}",
        )
    return tuple(target for target in targets if target not in missing)


def _card_of(code: TargetId) -> str:
    """The card to name for a piece of code."""
    kind, _, version = code.processor.partition("_")
    return f"sm_{version}" if kind in ("compute", "lto") else str(code)


# endings that hold code or tuning data of one target when a target is named in the path
_PER_TARGET = re.compile(
    r"\.(co|hsaco|dat|db|kdb|fdb|pdb|udb|ufdb|updb|model|aks2?|bc|kpack|fatbin)(\.txt)?(\.(gz|zst|bz2|xz|lzma))?$"
)
# endings and names that hold GPU code even when no target is named
_ALWAYS_CODE = re.compile(
    r"\.(co|hsaco|kdb|aks2|kpack|cubin|fatbin)(\.(gz|zst|bz2|xz|lzma))?$|^rocfft_kernel_cache.*\.db$"
    r"|^Tensile(Lite)?Library.*\.(dat|yaml)(\.gz)?$|^hipblasltExtOpLibrary\.dat$"
)
# Triton's assembler for cards from Blackwell on: `get_ptxas` in triton/backends/nvidia/compiler.py
CUDA_PROGRAMS: Mapping[str, TargetId] = {"ptxas-blackwell": TargetId("compute_100")}
# a token that starts at a word's start; generic ISAs serve families and are no single target
_TOKEN = re.compile(r"(?<![0-9A-Za-z])gfx([0-9][0-9a-fx]{1,9})(?![0-9A-Za-z])(?!(-[0-9]+)?-generic)")
_DIRECTORY = re.compile(r"(amd-)?gfx[0-9a-fx]+")
_MIOPEN_DB = re.compile(r"^gfx[0-9a-f_]+\..*(db|model)")
_EXACT = re.compile(r"[0-9]{2,3}[0-9a-f]")


def gfx_targets_of_path(path: str) -> tuple[str, ...]:
    """Processors that a file of GPU code or tuning data is for, by its path; sorted, without features.

    The file's own name decides, else, for what is GPU code by its ending, the nearest directory
    called after a target. A family (aotriton's `gfx11xx`) gives every processor of it. Empty for all
    other files: fallbacks, generic ISAs, and files such as scripts and headers that mention a target.
    """
    *directories, name = path.rstrip("/").split("/")
    if not _PER_TARGET.search(name):
        return ()
    processors = _targets_in(name, miopen=bool(_MIOPEN_DB.match(name)))
    if not processors and _ALWAYS_CODE.search(name):
        directory_names = (
            directory for directory in reversed(directories) if _DIRECTORY.fullmatch(directory)
        )
        processors = next(
            (targets for name in directory_names if (targets := _targets_in(name, miopen=False))), ()
        )
    return processors


def _targets_in(name: str, *, miopen: bool) -> tuple[str, ...]:
    processors: set[str] = set()
    for match in _TOKEN.finditer(name):
        token = match[1]
        if "x" in token:
            processors |= _family(token)
        elif miopen and f"gfx{token}" not in PROCESSORS:
            processors |= _without_compute_units(f"gfx{token}")
        elif _EXACT.fullmatch(token) and set(token) != {"0"}:  # gfx000 is Tensile's name for any target
            processors.add(f"gfx{token}")
    return tuple(sorted(processors))


@lru_cache(maxsize=1 << 12)
def _family(token: str) -> frozenset[str]:
    """The processors that a token such as `11xx` covers."""
    return frozenset(
        processor
        for processor in PROCESSORS
        if len(processor) == len(token) + 3
        and all(wanted in ("x", digit) for wanted, digit in zip(token, processor[3:], strict=True))
    )


def _without_compute_units(token: str) -> set[str]:
    """MIOpen writes above 64 compute units in hexadecimal, glued on: gfx90a68 is gfx90a with 0x68 units."""
    cut = {token[:-digits] for digits in (2, 3)} & PROCESSORS
    return cut or {token}
