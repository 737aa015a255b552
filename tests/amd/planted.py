"""Plants faults in machine code, one at a time, and says which of them the checks find.

    TRITON_INTERPRET=0 planted.py TARGET COUNT [SEED]

The rule is docs/decisions/0131-what-counts-as-a-planted-fault.md, written before the first run. The launches
are those of the cases of SHAPES: for each shape of a kernel four kinds of weights, which run the same machine
code. A change is drawn by a seeded generator from the instructions that a launch executes: first its kind, in
turn, then the machine code, then the place, then the change. A kind that the code has no place for passes to
the next. None is drawn twice.

Whether a drawn change is a fault is decided by `can_differ` before the cases are run: it looks at the one
instruction and at the code's data flow, and runs no case. Changes that are none are listed by themselves.

A fault is found if one of the launches with that machine code ends with a Fault, or leaves other bytes.
"""

import copy
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import launched
import numpy as np
from amd_child import settle
from code_object import Instruction, Kernel
from data_flow import ALL, EXEC, SCALAR, SCC, Flow, separates, unwaited
from instructions import act_of
from machine import Executed, Fault, Machine

from probes.placement.packing import proof

SEED = 1312  # the second draw
KINDS = ("register", "selector", "offset", "missing wait", "missing barrier", "wrong exec")
SHAPES = {  # by the kernel's name in `proof`
    "unpack_b12": "5 x 1030",
    "unpack_f28": "5 x 1030",
    "unpack_planes b10": "131073",
    "unpack_planes h13": "140001",
    "rows_b12": "33 x 1030",
    "one_row even": "37 x 512",
    "few_rows even": "37 x 512",
    "one_row uneven": "37 x 1152",
    "few_rows uneven": "37 x 1152",
    "gather": "3 x 5 x 1030",
    "unpack_expert": "3 x 5 x 1030",
    "gate_up, down": "3 x 7 x 1030",
    "gate_up, down packed": "2 x 516 x 514",
}
STEPS = 24  # of a launch in which a changed instruction is compared with what it was
_DATA = (
    "rest",
    "rest0",
    "rest1",
    "rest2",
    "low",
    "codes",
    "values",
    "exponents",
    "x",
    "bias",
    "hidden",
    "matrices",
)
_ANY_BITS = ("rest", "rest0", "rest1", "rest2", "codes")
_READ = ("src0", "src1", "src2", "vsrc0", "vsrc1", "srcx0", "srcy0", "vsrcx1", "vsrcy1", "addr", "vaddr")
_STORED = ("data0", "data", "vdata", "vsrc")
_SELECTORS = ("opsel", "opsel_hi", "dpp", "src0_sel", "src1_sel", "row_mask", "bank_mask")
_NOP = {"form": "SOPP", "name": "S_NOP"}


def changes(of: Instruction, kind: str, rng: random.Random) -> Iterator[Instruction]:
    """What an instruction may become, by a fault of a kind."""
    fields = of.fields
    if kind == "register":
        stores = "STORE" in of.name or "WRITE" in of.name or "ATOMIC" in of.name
        for name in _READ + _STORED * stores:
            if fields.get(name, 0) >= 256 and not (name == "vaddr" and not fields.get("offen", 1)):
                yield with_field(of, name, 256 + abs(fields[name] - 256 + rng.choice((-1, 1, 2))))
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
                steps = (4, 8) if of.name.startswith("S_LOAD") else (1, 2, 4)  # whose lowest bits say nothing
                yield with_field(of, name, fields[name] + rng.choice(steps))
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
        turned = {"LT": "GE", "GT": "LE", "EQ": "NE", "NE": "EQ", "LE": "GT", "GE": "LT"}
        yield replace(of, name=re.sub(r"_(LT|GT|EQ|NE|LE|GE)_", lambda m: f"_{turned[m[1]]}_", of.name))
    elif fields.get("sdst") == 126 and of.form.startswith("SOP"):
        yield with_field(of, "sdst", 106)  # EXEC is not restored


def with_field(of: Instruction, name: str, value: int) -> Instruction:
    return replace(of, fields={**of.fields, name: value})


class Code:
    """A kernel's machine code, and the launches of cases that run it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.names: list[str] = []
        self.launches: list[_Known] = []

    @cached_property
    def executed(self) -> list[int]:
        """The places of the instructions that any of the launches executes."""
        return sorted(set().union(*(of.executed.by_place for of in self.launches)))

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.kernel)

    def can_differ(self, place: int, changed: Instruction) -> str:
        """Why a change can make a difference to what the kernel does; empty if nothing says so."""
        of = self.kernel.code[place]
        if of.name.startswith("S_WAIT"):
            code = [*self.kernel.code[:place], changed, *self.kernel.code[place + 1 :]]
            more = unwaited(self.flow, code) - unwaited(self.flow, self.kernel.code)
            return "what is under way is used" if more else ""
        if of.name.startswith("S_BARRIER"):
            several = self.launches[0].launch.threads > self.kernel.wave
            return "accesses on both sides" if several and separates(self.flow, place) else ""
        wanted, rng = self.flow.wanted_after(place), np.random.default_rng(1)
        for known in self.launches:
            known.launch.memory.bytes[:] = _filled(known, rng)
            known.launch.memory.forget()
            step = _Step(self.kernel, place, changed, wanted)
            try:
                known.launch.run(step.kernel)
            except _Seen as seen:
                if str(seen):
                    return str(seen)
        return ""


class _Seen(Exception):
    """A difference that one instruction makes; empty if it was compared often enough without one."""


class _Step:
    """Compares what a changed instruction does to a machine with what it did, in each of the first STEPS."""

    def __init__(self, kernel: Kernel, place: int, changed: Instruction, wanted: dict[int, int]) -> None:
        self.was, self.place, self.changed, self.wanted = kernel.code[place], place, changed, wanted
        self.kernel = replace(kernel, acts={**kernel.acts, place: self.act})
        self.left = STEPS

    def act(self, machine: Machine) -> None:
        if not self.left:
            raise _Seen
        self.left -= 1
        kept = {id(of): of for of in (machine.kernel, machine.executed)} | {id(machine.reads): []}
        other = copy.deepcopy(machine, kept)
        try:
            act_of(self.changed, machine.kernel)(other)
        except Fault as fault:
            raise _Seen(str(fault)) from None
        act_of(self.was, machine.kernel)(machine)
        for register, bits in self.differing(machine, other):
            if bits & self.wanted.get(register, 0):
                raise _Seen(f"register {register} differs, and is used")
        for name in ("lds", "pc"):
            if (getattr(machine, name) != getattr(other, name)).any():
                raise _Seen(f"{name} differs")
        if not np.array_equal(machine.memory.bytes, other.memory.bytes):
            raise _Seen("memory differs")

    @staticmethod
    def differing(a: Machine, b: Machine) -> Iterator[tuple[int, int]]:
        """Registers, as `data_flow` numbers them, and the bits that differ in any lane of any wave."""
        lanes = np.bitwise_or.reduce((a.V ^ b.V) | (a.undefined ^ b.undefined), axis=(1, 2))
        yield from enumerate(lanes.tolist())
        scalars = np.bitwise_or.reduce(
            (a.S ^ b.S) | np.where(a.known_s ^ b.known_s, ALL, 0).astype(np.uint32), axis=1
        )
        yield from ((SCALAR + i, bits) for i, bits in enumerate(scalars.tolist()))
        yield EXEC, ALL * bool((a.E != b.E).any())
        yield SCC, ALL * bool((a.scc != b.scc).any())


class _Known:
    """A launch, what memory holds before, and what after."""

    def __init__(self, launch: launched.Launch, before: np.ndarray) -> None:
        self.launch, self.before = launch, before
        self.executed = self.run(launch.kernel)
        self.after = launch.memory.bytes.copy()

    def run(self, kernel: Kernel, most_steps: int = 10_000_000) -> Executed:
        memory = self.launch.memory
        memory.bytes[:] = self.before
        memory.forget()
        return self.launch.run(kernel, most_steps)

    def difference(self, kernel: Kernel) -> str:
        """What shows that a kernel isn't the one that was launched; empty if nothing does."""
        try:
            self.run(kernel, 10 * self.executed.steps)
        except Fault as fault:
            return str(fault).split(": ")[-1]
        return "" if np.array_equal(self.launch.memory.bytes, self.after) else "other bytes"


def _filled(known: _Known, rng: np.random.Generator) -> np.ndarray:
    octets, memory = known.before.copy(), known.launch.memory
    for names, first, last in zip(memory.names, memory.first, memory.last, strict=True):
        name = names.split("/")[0].split()[-1]
        if name in _DATA:
            octets[first:last] = rng.integers(0, 256, last - first, np.uint8)
            if name not in _ANY_BITS:
                octets[first + 1 : last : 2] &= 0xBF  # numbers below 2 in 16 bits, or in 32
    return octets


def codes(target: str) -> list[Code]:
    """The machine code of SHAPES, each with its launches."""
    by_kernel: dict[int, Code] = {}
    begun: list[tuple[launched.Launch, np.ndarray]] = []
    gpu = settle(target, lambda launch: begun.append((launch, launch.memory.bytes.copy())))
    for case in proof.cases():
        if f"{SHAPES[case.kernel]}, " in case.name:
            begun.clear()
            outcome = gpu.outcome(case)
            assert not outcome.wrong, f"{case.name}: {outcome.wrong}"
            for launch, before in begun:
                code = by_kernel.setdefault(id(launch.kernel), Code(launch.kernel))
                code.names.append(case.name)
                code.launches.append(_Known(launch, before))
    return list(by_kernel.values())


def planted(target: str, count: int, seed: int) -> Iterator[dict]:
    """So many faults, and what became of each; and the changes drawn that are none."""
    every, rng, drawn = codes(target), random.Random(f"{target} {seed}"), set()
    done = turn = 0
    while done < count:
        kind, start = KINDS[turn % len(KINDS)], rng.randrange(len(every))
        turn += 1
        for code in (*every[start:], *every[:start]):
            places = [
                at for at in code.executed if any(changes(code.kernel.code[at], kind, random.Random(0)))
            ]
            if not places:
                continue
            place = rng.choice(places)
            was = code.kernel.code[place]
            changed = rng.choice(list(changes(was, kind, rng)))
            key = code.names[0], place, changed.name, tuple(changed.fields.items())
            if key not in drawn:
                drawn.add(key)
                kernel = code.kernel.changed(place, changed)
                why = code.can_differ(place, changed)
                done += bool(why)
                found = next(filter(None, (of.difference(kernel) for of in code.launches)), "")
                yield {
                    "target": target,
                    "code": f"{code.kernel.name} of {code.names[0]}",
                    "kind": kind,
                    "fault": _text(was, changed),
                    "is fault": bool(why),
                    "why": why.split(": ")[-1],
                    "found": found,
                }
            break


def _text(was: Instruction, changed: Instruction) -> str:
    differing = {k: (v, changed.fields[k]) for k, v in was.fields.items() if changed.fields.get(k) != v}
    return f"{was.text} at {was.at:#x} ({was.source}): {differing or changed.name}"


def main() -> None:
    for row in planted(sys.argv[1], int(sys.argv[2]), int((sys.argv[3:4] or [SEED])[0])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
