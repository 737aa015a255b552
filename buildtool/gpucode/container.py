"""The two kinds of GPU code sections that can be cut, and the wrappers that point into them.

HIP and CUDA agree on the shape: a section of bundles, and a section of 24-byte wrappers (u32 magic,
u32 version, pointer to a bundle, pointer or zero) that the host code registers at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from buildtool.gpucode.elf import Elf, Section
from buildtool.gpucode.source import PruneRefused
from buildtool.gpucode.target import TargetId


@dataclass(frozen=True)
class Container:
    """Names and numbers of one vendor's sections."""

    section: str
    wrapper_section: str
    wrapper_magic: int
    wrapper_versions: tuple[int, ...]
    is_cuda: bool


HIP = Container(".hip_fatbin", ".hipFatBinSegment", 0x48495046, (1,), is_cuda=False)
# version 2 is what nvcc's device link adds; its second pointer is to a list of relocatable code
CUDA = Container(".nv_fatbin", ".nvFatBinSegment", 0x466243B1, (1, 2), is_cuda=True)
UNCUTTABLE = {
    ".llvm.offloading": "LLVM's OffloadBinary",
    "__nv_relfatbin": "relocatable CUDA code, which is linked again when it is loaded",
}


def find_container(
    elf: Elf, targets: Sequence[TargetId]
) -> tuple[Container, Section, tuple[TargetId, ...]] | None:
    """The section that targets of its vendor are asked for, with these; None when there is none.

    Raises PruneRefused when code of another form, or of both vendors, is there as well.
    """
    found = []
    for container in (HIP, CUDA):
        section = elf.section(container.section)
        own = tuple(target for target in targets if target.is_cuda == container.is_cuda)
        if section is not None and section.file_bytes and own:
            found.append((container, section, own))
    if not found:
        return None
    for section in elf.sections:
        if section.name in UNCUTTABLE and section.file_bytes:
            raise PruneRefused(f"{section.name} holds {UNCUTTABLE[section.name]}")
    if len(found) > 1:
        raise PruneRefused("HIP and CUDA code in one file", "name targets of one vendor")
    return found[0]
