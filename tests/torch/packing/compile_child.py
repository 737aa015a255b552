"""Compiles every kernel for GPUs that this machine lacks, and prints what became of each. Needs no GPU."""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from probes.placement.packing import expert_kernels, kernels
from probes.placement.packing.format import fused

BYTES, SHORTS, WORDS, WEIGHTS = "*u8", "*i16", "*i32", "*bf16"
ESCAPES = {"values": SHORTS, "positions": SHORTS, "starts": WORDS}
MATRIX = {"rest": BYTES, "codes": BYTES, **ESCAPES}
K = 8192
UNEVEN = 11_040  # half of it isn't a multiple of a tile's columns


def cases(target, ptx: bool):
    """Each kernel with its arguments' types, its constants and its warps."""
    narrow = target.backend == "hip" and target.warp_size == 32
    cut = {"WIDTH": K, "GROUP": 1}
    yield (
        kernels.unpack_b12,
        {**MATRIX, "out": WEIGHTS, "n": "i32", "rows": "i32", "scale": "fp32"},
        {**cut, "BLOCK": 2048, "PTX": ptx},
        8,
    )
    yield (
        kernels.rows_b12,
        {"ids": "*i64", "first": WORDS, **MATRIX, "out": WEIGHTS, "n": "i32", "scale": "fp32"},
        {"WIDTH": K, "BLOCK": 1024, "PTX": ptx},
        4,
    )
    planes = {f"rest{i}": BYTES for i in range(3)}
    f28 = {**planes, "codes": BYTES, **ESCAPES, "values": WORDS, "out": WORDS}
    yield kernels.unpack_f28, {**f28, "n": "i32", "rows": "i32", "base": "i32"}, {**cut, "BLOCK": 1024}, 4
    planes = dict.fromkeys(("rest", "lower", "two"), BYTES) | {"stream": SHORTS, "starts": WORDS}
    planes |= {"positions": SHORTS, "exponents": BYTES, "out": SHORTS}
    planes |= dict.fromkeys(("n", "blocks", "table", "table_low", "table_high"), "i32")
    yield kernels.unpack_planes, planes, {"BLOCK": 8192, "LOW_BITS": 3, "PTX": ptx}, 4
    product = {"x": WEIGHTS, **MATRIX, "bias": WEIGHTS, "y": WEIGHTS, "n": "i32", "scale": "fp32"}
    for rows, k in ((1, K), (16, K), (1, UNEVEN), (16, UNEVEN)):
        tile = fused(rows, (K, k), narrow=narrow)
        own = {"K": k, "BN": tile.rows, "BK": tile.columns, "BIAS": True, "PTX": ptx, "STAGES": tile.stages}
        if rows == 1:
            yield (
                kernels.one_row,
                {**product, "input_scale": "fp32"},
                {**own, "ESCAPES": 8},
                tile.warps,
            )
        else:
            own |= {"BB": 16, "ESCAPES": 1, "FACTORS": tl.bfloat16}
            yield kernels.few_rows, {**product, "batch": "i32"}, own, tile.warps
    table = {"ids": "*i64", "table": "*i64", "counts": "*i64"}
    numbers = dict.fromkeys(("experts", "stride"), "i32")
    yield (
        expert_kernels.gather,
        {**table, **numbers, "out": WORDS, "words": "i32"},
        {"COUNTED": True, "BLOCK": 2048, "EVEN": True},
        4,
    )
    yield (
        expert_kernels.unpack_expert,
        {**table, **numbers, "out": WEIGHTS, "n": "i32", "rows": "i32", "scale": "fp32"},
        {**cut, "COUNTED": True, "BLOCK": 2048, "EVEN": True, "PTX": ptx},
        8,
    )
    scales = {"input_scale": "fp32", "scale": "fp32"}
    for packed, (inner, outer) in ((False, (1024, 1024)), (True, (512, 512))):
        own = {"TOP": 8, "PACKED": packed, "EVEN": True, "PTX": ptx}
        given = {**table, **numbers, **scales, "x": WEIGHTS, "hidden": "*fp32", "inner": "i32"}
        yield expert_kernels.gate_up, given, {**own, "K": 2048, "BN": 2, "BK": inner}, 4
        given = {
            **table,
            **numbers,
            **scales,
            "hidden": "*fp32",
            "shares": "*fp32",
            "out": WEIGHTS,
            "n": "i32",
        }
        del given["counts"]
        yield expert_kernels.down, given, {**own, "K": 768, "BN": 1, "BK": outer}, 4


def compiled(kernel, types, constants, *, target, warps: int) -> dict[str, object]:
    """What the code of a kernel holds."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): even for name, of in types.items() if of[0] == "*"},
    )
    code = triton.compile(source, target=target, options={"num_warps": warps}).asm
    text = code.get("amdgcn") or code["ptx"]
    return {
        "kernel": kernel.__name__,
        "target": str(target.arch),
        "ptx": "prmt.b32" in str(code["ttir"]),
        "spills": text.count("scratch_store") + text.count("st.local"),
    }


def main() -> None:
    """A line of JSON for each kernel and target that the arguments name: gfx1100:32, sm90."""
    for wanted in sys.argv[1:]:
        if wanted.startswith("sm"):
            target, ptx = GPUTarget("cuda", int(wanted[2:]), 32), True
        else:
            arch, _, width = wanted.partition(":")
            target, ptx = GPUTarget("hip", arch, int(width)), False
        for kernel, types, constants, warps in cases(target, ptx):
            print(json.dumps(compiled(kernel, types, constants, target=target, warps=warps)), flush=True)


if __name__ == "__main__":
    main()
