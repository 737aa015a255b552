"""A kernel of a HIP library, found as AMD's runtime (CLR) finds it, and run on tensors in host memory.

The library's constructors give the runtime a wrapper of each bundle (`__hipRegisterFatBinary`): 24 bytes of
the section `.hipFatBinSegment`, a magic number, a version, and a pointer, which the loader relocates. Where
it points, a table of code objects begins, with the bundler's names for their targets; the runtime takes the
one of the card's. Nothing here is the build tool's.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import launched
import numpy as np
from elftools.elf.elffile import ELFFile
from machine import Executed

_WRAPPER = struct.Struct("<IIQQ")
_MAGIC, _VERSION = 0x48495046, 1  # "HIPF"
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_RELATIVE = 8  # R_X86_64_RELATIVE: the address is the addend


def code_objects(path: Path, target: str) -> Iterator[bytes]:
    """The code objects for a target, of all wrappers in their order."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as octets:
        elf = ELFFile(file)
        segments = [of for of in elf.iter_segments() if of["p_type"] == "PT_LOAD"]
        wrappers = elf.get_section_by_name(".hipFatBinSegment")
        pointers = _relative(elf, wrappers["sh_addr"], wrappers["sh_size"])
        for at in range(0, wrappers["sh_size"], _WRAPPER.size):
            magic, version, _, _ = _WRAPPER.unpack_from(octets, wrappers["sh_offset"] + at)
            if (magic, version) != (_MAGIC, _VERSION):
                raise ValueError(f"{path}: no wrapper of HIP's is at {at} of its section")
            address = pointers[wrappers["sh_addr"] + at + 8]
            of = next(of for of in segments if 0 <= address - of["p_vaddr"] < of["p_filesz"])
            begin = of["p_offset"] + address - of["p_vaddr"]
            code = _of_bundle(octets, begin, target)
            if code:
                yield code


def _relative(elf: ELFFile, first: int, size: int) -> dict[int, int]:
    """Addresses of pointers in a range, and where the loader lets them point."""
    rows = np.frombuffer(elf.get_section_by_name(".rela.dyn").data(), np.uint64).reshape(-1, 3)
    inside = (rows[:, 0] >= first) & (rows[:, 0] < first + size) & (rows[:, 1] == _RELATIVE)
    return dict(rows[inside][:, (0, 2)].tolist())


def _of_bundle(octets: mmap.mmap, begin: int, target: str) -> bytes:
    """The code object of the target, else empty."""
    at = begin + len(_BUNDLE)
    if octets[begin:at] != _BUNDLE:
        raise ValueError(f"no bundle is where a wrapper points, at {begin} of the file")
    (count,) = struct.unpack_from("<Q", octets, at)
    at += 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", octets, at)
        name = octets[at + 24 : at + 24 + length].decode()
        if name.startswith("hip") and name.endswith(f"-amdgcn-amd-amdhsa--{target}"):
            return octets[begin + offset : begin + offset + size]
        at += 24 + length
    return b""


KERNELS = {
    "copy": "_ZL11copy_kernelILb0EPKfPfEviT0_lilT1_lil",
    "scal": "_ZL19rocblas_scal_kernelILi256EffPfEviT1_lT2_lil",
    "axpy": "_ZL11axpy_kernelILi256EffPKfPfEviT1_lT2_lilT3_lil",
    "gemv, transposed": "_ZL12gemvt_kernelILb0ELi256EffffEviiT2_lPKT3_lilS3_lilS0_lPT4_lil",
}
_THREADS = 256
COUNT, BATCH = 300, 3  # numbers in a vector, and vectors; the matrix is 300 x 300


def holder(path: Path, target: str, name: str) -> bytes:
    """The code object of the target that has a kernel of KERNELS."""
    symbol = f"{KERNELS[name]}.kd".encode()
    return next(code for code in code_objects(path, target) if symbol in code)


class Call:
    """One of KERNELS on vectors of float32: `y` is a copy of x, or scaled, or has x or a product added."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(5)
        self.name = name
        self.a = rng.standard_normal((COUNT, COUNT)).astype(np.float32)
        self.x, self.y = (rng.standard_normal((BATCH, 2 * COUNT)).astype(np.float32) for _ in "xy")

    def launch(self, binary: bytes, target: str) -> Executed:
        """Run the kernel of a code object, which changes `y`. Raises Fault."""
        arrays = {"a": self.a, "x": self.x, "y": self.y}
        pointers = {name: ("*", of.ctypes.data) for name, of in arrays.items()}
        to_x = [
            pointers["x"],
            ("i64", 1),
            ("i32", 2),
            ("i64", 2 * COUNT - 1),
        ]  # begin, step, of the next vector
        to_y = [pointers["y"], ("i64", 3), ("i32", 1), ("i64", 2 * COUNT)]
        factor, other = [("fp32", 0.75), ("i64", 0)], [("fp32", -0.5), ("i64", 0)]
        to_a = [pointers["a"], ("i64", 0), ("i32", COUNT), ("i64", 0)]
        sizes, given = {
            "copy": (1, [*to_x, *to_y]),
            "scal": (1, [*factor, *to_y]),
            "axpy": (1, [*factor, *to_x, *to_y]),
            "gemv, transposed": (2, [*factor, *to_a, *to_x, *other, *to_y]),
        }[self.name]
        groups = (COUNT if sizes == 2 else -(-COUNT // _THREADS), BATCH)
        of = launched.Launch(
            launched.load(binary, KERNELS[self.name], target),
            groups,
            _THREADS,
            [("i32", COUNT)] * sizes + given,
            [(name, array.ctypes.data, array.nbytes) for name, array in arrays.items()],
            results={"y"},
        )
        executed = of.run()
        of.memory.copy_out()
        return executed

    def wrong(self) -> int:
        """How many numbers of `y` aren't what they must be, within the rounding of float32's sums."""
        before = Call(self.name)
        flat = before.x.reshape(-1)
        x = np.stack([flat[1 + n * (2 * COUNT - 1) :][: 2 * COUNT : 2][:COUNT] for n in range(BATCH)])
        y = before.y.astype(np.float64)
        own, x, a = y[:, 3 : 3 + COUNT], x.astype(np.float64), before.a.astype(np.float64)
        size = np.abs(own) + np.abs(x) @ np.abs(a.T)
        own[:] = {
            "copy": x,
            "scal": own * 0.75,
            "axpy": own + x * 0.75,
            "gemv, transposed": 0.75 * x @ a.T - 0.5 * own,
        }[self.name]
        bound = np.zeros_like(y)
        bound[:, 3 : 3 + COUNT] = (
            2.0**-22 * size if "gemv" in self.name else np.spacing(np.abs(own.astype(np.float32)))
        )
        return int((np.abs(self.y - y) > (0 if self.name in ("copy",) else bound)).sum())
