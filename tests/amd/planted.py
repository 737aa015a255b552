"""Plants faults in machine code, one at a time, and says which of them the emulator finds.

    TRITON_INTERPRET=0 planted.py TARGET COUNT

The rule, written before the first run: a fault is drawn by a seeded generator from the instructions that a
case executes: first its kind, in turn, then the case, then the place, then the change. A kind that a kernel
has no place for passes to the next case. A fault is found if the run ends with a Fault, or the result has
other bits. None is drawn again.

Added after the first run, which found 166 of 210: for each that wasn't found, whether it changed a register,
a mask or a byte of memory in any execution. One that never did, such as a mask's bit over zeros, is no fault
on that data; such ones are counted by themselves.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from amd_child import settle
from code_object import Instruction, Kernel
from machine import Fault, Machine
from triton.runtime import driver

from probes.placement.packing import proof

KINDS = ("register", "selector", "offset", "missing wait", "missing barrier", "wrong exec")
CASES = (
    "unpack_b12, 5 x 1030, gaussian",
    "unpack_f28, 33 x 256, every pattern",
    "rows_b12, 1 of 200 x 2048, gaussian",
    "one_row even, 1 x 37 x 512, gaussian",
    "few_rows even, 5 x 37 x 512, no escapes",
    "unpack_ranked h14, 131072, gaussian",
)
_SOURCES = (
    "src0",
    "src1",
    "src2",
    "vsrc0",
    "vsrc1",
    "srcx0",
    "srcy0",
    "vsrcx1",
    "vsrcy1",
    "data0",
    "data",
    "vdata",
    "vsrc",
    "addr",
    "vaddr",
)
_SELECTORS = ("opsel", "opsel_hi", "dpp", "src0_sel", "src1_sel", "row_mask", "bank_mask")
_NOP = {"form": "SOPP", "name": "S_NOP"}


def changes(of: Instruction, kind: str, rng: random.Random) -> Iterator[Instruction]:
    """What an instruction may become, by a fault of a kind."""
    fields = of.fields
    if kind == "register":
        for name in _SOURCES:
            if fields.get(name, 0) >= 256 and not (name == "vaddr" and not fields.get("offen", 1)):
                yield with_field(of, name, 256 + max(0, fields[name] - 256 + rng.choice((-1, 1, 2))))
    elif kind == "selector":
        for name in _SELECTORS:
            if (
                name in fields
                and (of.form.startswith("VOP3P") or "opsel" not in name)
                and "WMMA" not in of.name
            ):
                yield with_field(of, name, fields[name] ^ 1)
        if of.name == "V_PERM_B32" and 128 <= fields["src2"] < 248:
            yield with_field(of, "src2", fields["src2"] ^ 1)
        if of.name in ("S_MOV_B32", "V_MOV_B32", "V_AND_B32", "V_PERM_B32") and "literal" in fields:
            yield with_field(of, "literal", fields["literal"] ^ 1 << rng.randrange(32))
    elif kind == "offset":
        for name in ("offset", "offset0", "ioffset"):
            accesses = of.name.startswith(("BUFFER_LOAD", "BUFFER_STORE", "DS_", "GLOBAL_", "S_LOAD"))
            if name in fields and accesses and "BPERMUTE" not in of.name:
                yield with_field(of, name, fields[name] + rng.choice((1, 2, 4)))
    elif kind == "missing wait":
        if of.name.startswith("S_WAIT") and not of.name.startswith(("S_WAIT_ALU", "S_WAITCNT_DEPCTR")):
            yield replace(of, **_NOP)
    elif kind == "missing barrier":
        if of.name in ("S_BARRIER", "S_BARRIER_WAIT"):
            yield replace(of, **_NOP)
    elif of.name.endswith(("SAVEEXEC_B32", "SAVEEXEC_B64")):
        yield with_field(of, "ssrc0", 126)  # all that were on stay on
        yield with_field(of, "ssrc0", 128)  # none does
    elif of.name.startswith("V_CMPX_"):
        yield replace(of, name=of.name.replace("_LT_", "_GE_").replace("_GT_", "_LE_"))
    elif fields.get("sdst") == 126 and of.form.startswith("SOP"):
        yield with_field(of, "sdst", 106)  # EXEC is not restored


def with_field(of: Instruction, name: str, value: int) -> Instruction:
    return replace(of, fields={**of.fields, name: value})


def plant(
    kernel: Kernel, executed: dict[int, int], kind: str, rng: random.Random
) -> tuple[int, Instruction] | None:
    """One fault in a kernel: the place and the changed instruction; None where there is no place for it."""
    places = [place for place in sorted(executed) if any(changes(kernel.code[place], kind, random.Random(0)))]
    if not places:
        return None
    place = rng.choice(places)
    return place, rng.choice(list(changes(kernel.code[place], kind, rng)))


def planted(target: str, count: int, seed: int = 1) -> Iterator[dict]:
    """So many faults, and what became of each."""
    executed, gpu = settle(target), driver.active
    cases = {case.name: case for case in proof.cases() if case.name in CASES}
    assert len(cases) == len(CASES)
    seen: list[Kernel] = []

    def kept(kernel: Kernel) -> Kernel:
        seen.append(kernel)
        return kernel

    usual = {}
    Machine.most_steps = 10_000_000
    for name in CASES:
        executed.clear()
        gpu.changed = kept
        outcome = cases[name].outcome(torch.device("cpu"))
        assert not outcome.wrong, f"{name}: {outcome.wrong}"
        usual[name] = (seen[-1], executed[-1], outcome.digest)
    rng = random.Random(f"{target} {seed}")
    done = turn = 0
    while done < count:
        kind, start = KINDS[turn % len(KINDS)], rng.randrange(len(CASES))
        turn += 1
        for i in range(len(CASES)):
            name = CASES[(start + i) % len(CASES)]
            kernel, run, digest = usual[name]
            fault = plant(kernel, run.by_place, kind, rng)
            if fault is not None:
                done += 1
                Machine.most_steps = 10 * run.steps
                yield {"target": target, "case": name, "kind": kind} | tried(cases[name], gpu, fault, digest)
                break


def tried(case: proof.Case, gpu, fault: tuple[int, Instruction], digest: str) -> dict:
    place, changed = fault
    was: list[Instruction] = []

    def with_fault(kernel: Kernel) -> Kernel:
        was.append(kernel.code[place])
        return replace(kernel, code=[*kernel.code[:place], changed, *kernel.code[place + 1 :]])

    gpu.changed = with_fault
    how = ""
    try:
        outcome = case.outcome(torch.device("cpu"))
        if outcome.digest != digest:
            how = "other bits"
    except Fault as raised:
        how = str(raised).split(": ")[-1]
    state = "" if how else _effect(case, gpu, place, with_fault)
    differing = {k: (v, changed.fields[k]) for k, v in was[0].fields.items() if changed.fields.get(k) != v}
    at = f"{was[0].name} at {was[0].at:#x} ({was[0].source}): {differing or changed.name}"
    return {"fault": at, "found": how, "effect": state}


def _effect(case: proof.Case, gpu, place: int, with_fault) -> str:
    """Whether a fault that wasn't found changed anything right after its instruction."""
    seen = []
    for changed in (lambda kernel: kernel, with_fault):
        gpu.changed, Machine.watched, Machine.states = changed, place, []
        case.outcome(torch.device("cpu"))
        seen.append(Machine.states)
    Machine.watched = None
    return "none" if seen[0] == seen[1] else "some, without consequence for the result"


def main() -> None:
    for row in planted(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
