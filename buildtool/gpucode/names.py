"""Recognises GPU code by its path alone: the naming rules of AMD's libraries.

rocBLAS, Tensile, hipBLASLt, hipSPARSELt (`library/*gfx*.{co,hsaco,dat}`), MIOpen (`db/gfx906_60.kdb`,
`gfx90a68.db.txt`, `gfx*.model`), aotriton (`amd-gfx90a/**`, `kernels/gfx*/`), rocFFT's kernel cache,
AITER (`hsa/gfx942/*.co`), OpenMP's device libraries and kpack archives.
"""

import re
from functools import lru_cache

from buildtool.gpucode.target import PROCESSORS

# endings that hold code or tuning data of one target when a target is named in the path
_PER_TARGET = re.compile(
    r"\.(co|hsaco|dat|db|kdb|fdb|pdb|udb|ufdb|updb|model|aks2?|bc|kpack|fatbin)(\.txt)?(\.(gz|zst|bz2|xz|lzma))?$"
)
# endings and names that hold GPU code even when no target is named
_ALWAYS_CODE = re.compile(
    r"\.(co|hsaco|kdb|aks2|kpack|cubin|fatbin)(\.(gz|zst|bz2|xz|lzma))?$|^rocfft_kernel_cache.*\.db$"
    r"|^Tensile(Lite)?Library.*\.(dat|yaml)(\.gz)?$|^hipblasltExtOpLibrary\.dat$"
)
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
    found = _targets_in(name, miopen=bool(_MIOPEN_DB.match(name)))
    if not found and _ALWAYS_CODE.search(name):
        named = (directory for directory in reversed(directories) if _DIRECTORY.fullmatch(directory))
        found = next((targets for name in named if (targets := _targets_in(name, miopen=False))), ())
    return found


def _targets_in(name: str, *, miopen: bool) -> tuple[str, ...]:
    found: set[str] = set()
    for match in _TOKEN.finditer(name):
        token = match[1]
        if "x" in token:
            found |= _family(token)
        elif miopen and f"gfx{token}" not in PROCESSORS:
            found |= _without_compute_units(f"gfx{token}")
        elif _EXACT.fullmatch(token) and set(token) != {"0"}:  # gfx000 is Tensile's name for any target
            found.add(f"gfx{token}")
    return tuple(sorted(found))


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
