"""The target named in an AMDGPU ELF file's header (LLVM's AMDGPUUsage, "ELF header e_flags")."""

from buildtool.gpucode.target import MACH, TargetId

_ABI_V3 = 1  # e_ident[EI_ABIVERSION] of code object version 3; 4 and later number on from there


def target_of_flags(flags: int, abi_version: int) -> TargetId | None:
    """From `e_flags` and the ABI version; None for a processor this table doesn't know.

    A feature that may be on or off isn't named. Code object version 2 doesn't name any here.
    """
    processor = MACH.get(flags & 0xFF)
    if processor is None:
        return None
    features: dict[str, bool] = {}
    if abi_version == _ABI_V3:
        features = {name: True for name, bit in (("xnack", 0x100), ("sramecc", 0x200)) if flags & bit}
    elif abi_version > _ABI_V3:
        for name, shift in (("xnack", 8), ("sramecc", 10)):
            setting = flags >> shift & 3  # 0 unsupported, 1 any, 2 off, 3 on
            if setting >= 2:
                features[name] = setting == 3
    return TargetId(processor, tuple(sorted(features.items())))
