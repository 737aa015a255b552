"""Which bits of registers can still reach memory, a branch or a lane's being on, by a kernel's code alone.

Nothing is run here. What an instruction reads and writes is by tinygrad's tables; which bits of a source
matter for the bits of a result, by evaluating the operation with single bits changed. Where that isn't known
all bits count. A register is overwritten only where the whole of it is, in every lane that ever was on.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np
from code_object import Instruction, Kernel
from operations import OPERATIONS, TYPES, U32, Operation

ALL = 0xFFFFFFFF
SCALAR = 1000  # scalar registers' numbers begin here
VCC, EXEC, SCC = SCALAR + 106, SCALAR + 126, SCALAR + 253
_SAMPLES = 256
_BITWISE = re.compile(r"[VS]_(AND|OR|XOR|NOT|MOV|BFI|BFREV|BREV|XNOR)\w*")
_SHIFTS = re.compile(r"[VS]_(LSH|ASHR|BFE|PERM|ALIGN)\w*")
_SUMS = re.compile(r"V_(ADD|SUB|XAD|LSHL_ADD|MUL_LO|MUL_U32|MAD_U32)\w*")
_RESULTS = ("vdst", "sdst", "sdata", "vdata")
_MEMORY = re.compile(r"(GLOBAL|BUFFER|DS|S)_(LOAD|STORE|ATOMIC)\w*")
_CONTROL = (
    "S_WAIT",
    "S_NOP",
    "S_CLAUSE",
    "S_DELAY",
    "S_BARRIER",
    "S_ENDPGM",
    "S_SENDMSG",
    "S_SETPRIO",
    "S_BRANCH",
)

Place = dict[int, int]  # registers, and the bits of them


class Flow:
    """The data flow of a kernel's code."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.code = kernel.code
        self.next = [list(self._next(at)) for at in range(len(self.code))]
        self.before = defaultdict(list)
        for at, places in enumerate(self.next):
            for other in places:
                self.before[other].append(at)
        self.everywhere = self._where_all_lanes_are_on()
        self.wanted = self._bits_wanted()

    def wanted_after(self, at: int) -> Place:
        """The bits of registers that matter behind an instruction."""
        return self._joined(self.next[at], self.wanted)

    def _next(self, at: int) -> Iterator[int]:
        of = self.code[at]
        if of.name.startswith(("S_BRANCH", "S_CBRANCH")):
            target = of.at + 4 + 4 * (of.simm16 - (of.simm16 >> 15 << 16))
            yield next(i for i, other in enumerate(self.code) if other.at == target)
        if of.name not in ("S_BRANCH", "S_ENDPGM") and at + 1 < len(self.code):
            yield at + 1

    @staticmethod
    def _joined(places: list[int], wanted: list[Place]) -> Place:
        bits: Place = {}
        for place in places:
            for register, of in wanted[place].items():
                bits[register] = bits.get(register, 0) | of
        return bits

    def _where_all_lanes_are_on(self) -> list[bool]:
        """Whether EXEC is what it was at the begin, before each instruction, on every path."""
        states: list[tuple[bool, frozenset[int]] | None] = [None] * len(self.code)
        states[self.kernel.entry] = (True, frozenset())
        todo = [self.kernel.entry]
        while todo:
            at = todo.pop()
            state = self._lanes_after(self.code[at], *states[at])
            for place in self.next[at]:
                old = states[place]
                new = state if old is None else (old[0] and state[0], old[1] & state[1])
                if new != old:
                    states[place] = new
                    todo.append(place)
        return [of is not None and of[0] for of in states]

    def _lanes_after(self, of: Instruction, whole: bool, kept: frozenset[int]) -> tuple[bool, frozenset[int]]:
        """`kept`: scalar registers that hold EXEC as it was at the begin."""
        written = {register for register, _ in results(of, self.kernel)}
        keeps = kept - written
        to = of.fields.get("sdst", -1) + SCALAR
        if "SAVEEXEC" in of.name or (of.name.startswith("S_MOV_B") and of.fields["ssrc0"] == 126):
            keeps |= {to} if whole else set()
        if EXEC not in written:
            return whole, keeps
        sources = {of.fields[name] + SCALAR for name in ("ssrc0", "ssrc1") if name in of.fields}
        restores = of.name.startswith(("S_MOV_B", "S_OR_B")) and bool(sources & (kept | {SCALAR + 193}))
        return restores, keeps

    def _bits_wanted(self) -> list[Place]:
        wanted: list[Place] = [{} for _ in self.code]
        todo = list(range(len(self.code)))
        while todo:
            at = todo.pop()
            now = self._wanted_before(at, self._joined(self.next[at], wanted))
            if now != wanted[at]:
                wanted[at] = now
                todo += self.before[at]
        return wanted

    def _wanted_before(self, at: int, after: Place) -> Place:
        of = self.code[at]
        before = dict(after)
        effects = has_effects(of)
        asked = {register: after.get(register, 0) for register, _ in results(of, self.kernel)}
        scalar = of.form.startswith("S")
        for register, whole in results(of, self.kernel):
            if whole and (scalar or self.everywhere[at]):
                before.pop(register, None)
        if effects or any(asked.values()):
            for register, bits in sources(
                of, self.kernel, tuple(sorted(asked.items())) if not effects else ()
            ):
                before[register] = before.get(register, 0) | bits
        return before


def has_effects(of: Instruction) -> bool:
    """Whether an instruction does more than to write registers."""
    return (
        "STORE" in of.name or "WRITE_B" in of.name or "ATOMIC" in of.name or of.name.startswith("S_CBRANCH")
    )


def _parts(of: Instruction, kernel: Kernel) -> tuple[list[tuple[int, bool]], list[int], Place]:
    """What is written, each register with whether all of it is; what is read; and which bits of that."""
    if of.name.startswith(_CONTROL):
        return [], [], {}
    return (*_dual(of), {}) if of.form.startswith("VOPD") else _single(of, kernel)


def _dual(of: Instruction) -> tuple[list[tuple[int, bool]], list[int]]:
    written, read = [], [EXEC]
    for letter, name in zip("xy", of.name.split("+"), strict=True):
        to = of.fields["vdstx"]
        to = to - 256 if letter == "x" else of.fields["vdsty"] << 1 | to & 1 ^ 1
        written.append((to, True))
        codes = [of.fields[f"src{letter}0"]] + [of.fields[f"vsrc{letter}1"]] * ("MOV" not in name)
        read += [code - 256 if code >= 256 else code + SCALAR for code in codes if code >= 256 or code < 128]
        read += [to] * ("FMAC" in name) + [VCC] * ("CNDMASK" in name)
    return written, read


def _single(of: Instruction, kernel: Kernel) -> tuple[list[tuple[int, bool]], list[int], Place]:
    fields, wave, name = of.fields, kernel.wave, of.name
    extra = kernel.accumulators if kernel.architecture == "cdna" else 0
    memory = _MEMORY.fullmatch(name)
    if of.decoded is None:  # a matrix product that tinygrad's tables lack
        bits = {"src0": 64, "src1": 64, "src2": 32 * (16 if "32X32" in name else 4)}
        bits["vdst"] = bits["src2"]
    else:
        bits = {field: size for field, (_, size, _) in of.decoded.operands.items()}
        if "vsrc0" in fields:  # of DPP and SDWA
            bits["vsrc0"] = bits.pop("src0", 32)
    written: list[tuple[int, bool]] = []
    read: list[int] = []
    parts: Place = {}
    for field, most in bits.items():
        code, size = fields.get(field), most
        if code is None or field in ("simm16", "literal"):
            continue
        if field == "soffset" and fields.get("soffset_en", 1) == 0:
            continue
        if field == "vaddr" and memory:
            size = 32 if fields.get("offen") or "addr" in fields else 0
        elif field == "addr" and name.startswith("GLOBAL"):
            size = 64 if fields["saddr"] in (124, 127) else 32
        elif size == 64 and of.decoded is not None and "M64" in str(of.decoded.operands.get(field, "")):
            size = wave
        if field == "vdst" and name.startswith("V_READ") and code >= 256:
            code -= 256  # a scalar register
        if (field == "vsrc0" and fields.get("s0")) or (field == "vsrc1" and fields.get("s1")):
            code -= 256
        accumulates = (
            (field in ("vdata", "data", "data0", "data1", "vdst") and memory and fields.get("acc"))
            or (field in ("src2", "vdst") and fields.get("acc_cd"))
            or (field == "src0" and "MFMA" in name and fields.get("acc", 0) & 1)
            or (field == "src1" and "MFMA" in name and fields.get("acc", 0) & 2)
            or ("ACCVGPR" in name and (field == "src0") == ("READ" in name) and code >= 256)
        )
        short = size == 16 and kernel.architecture != "cdna" and not of.form.startswith("VOP3")
        if short and code >= 384:
            code -= 128
        if 128 <= code < 256:
            continue
        first = code - 256 + extra * bool(accumulates) if code >= 256 else code + SCALAR
        registers = [first + i for i in range(max(1, size // 32))] if size else []
        result = field in _RESULTS and not (field == "vdata" and "STORE" in name)
        if result:
            whole = size >= 32 and "D16" not in name and not _is_partial(fields)
            written += [(register, whole) for register in registers]
        else:
            read += registers
            parts |= dict.fromkeys(registers, _part(of, field, size, fields[field] >= 384, kernel))
        if result and ("FMAC" in name or name.startswith(("S_ADDK", "S_MULK", "S_CMPK", "S_BITSET"))):
            read += registers
    if name.startswith(("S_ADDC", "S_SUBB", "S_CSELECT", "S_CBRANCH_SCC")):
        read.append(SCC)
    if (
        name.startswith("S_CBRANCH_VCC")
        or ("CNDMASK_B32" in name and "VOP3" not in of.form)
        or "DIV_FMAS" in name
    ):
        read += [VCC, VCC + 1]
    if "CO_CI" in name and of.form.startswith("VOP2"):
        read += [VCC, VCC + 1]
    if (of.form.startswith("VOP2") and "_CO_" in name) or (of.form.startswith("VOPC") and "CMPX" not in name):
        to = fields["sdst"] + SCALAR if fields.get("sd") else VCC
        written += [(to + i, True) for i in range(wave // 32)]
    if "CMPX" in name or "EXEC_B" in name:
        written += [(EXEC, False)]
    operation = OPERATIONS.get(name)
    if "EXEC_B" in name or (operation and "scc" in operation.results):
        written.append((SCC, True))
    if not of.form.startswith("S") or "EXEC" in name:
        read.append(EXEC)
    written = [(EXEC if register == EXEC + 1 else register, whole) for register, whole in written]
    read = [EXEC if register == EXEC + 1 else register for register in read]
    return written, read, {register: bits for register, bits in parts.items() if read.count(register) == 1}


def _part(of: Instruction, field: str, size: int, upper: bool, kernel: Kernel) -> int:
    """The bits of a register that a source takes: a byte or a half where the code says so."""
    if "SDWA" in of.form and field in ("vsrc0", "vsrc1"):
        selector = of.fields[f"src{field[-1]}_sel"]
        return (
            0xFF << 8 * selector if selector < 4 else 0xFFFF << 16 * (selector - 4) if selector < 6 else ALL
        )
    if "STORE" in of.name and field in ("vdata", "data", "data0", "vsrc"):
        bits = 0xFF if of.name.endswith("B8") else 0xFFFF if of.name.endswith("B16") else ALL
        return bits << 16 if "D16_HI" in of.name else bits
    if size != 16:
        return ALL
    if of.form.startswith("VOP3") and kernel.architecture != "cdna":
        upper = bool(of.fields["opsel"] >> int(field[-1]) & 1)
    return 0xFFFF0000 if upper and kernel.architecture != "cdna" else 0xFFFF


def _is_partial(fields: dict[str, int]) -> bool:
    """Whether parts of a destination, or of its lanes, stay as they were."""
    masked = any(fields.get(name, 15) != 15 for name in ("row_mask", "bank_mask"))
    return masked or fields.get("bc") == 0 or fields.get("dst_unused") == 2


def results(of: Instruction, kernel: Kernel) -> list[tuple[int, bool]]:
    return _parts(of, kernel)[0]


def sources(of: Instruction, kernel: Kernel, asked: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """Registers that are read, and the bits that matter for those of results in `asked` (none: all)."""
    written, read, parts = _parts(of, kernel)
    known = _by_bits(of, dict(asked)[written[0][0]]) if asked and len(written) == 1 else None
    for register in read:
        yield register, (known or parts).get(register, ALL)


def _by_bits(of: Instruction, asked: int) -> Place | None:
    """Of an operation on words, one result: the bits of each source register that matter for bits of it."""
    operation = OPERATIONS.get(of.name)
    if operation is None or operation.results not in (("u32",), ("i32",)) or len(of.form.split("_")) > 2:
        return None
    if of.form.split("_")[0] not in ("VOP1", "VOP2", "VOP3") or any(
        of.fields.get(n) for n in ("clmp", "omod", "opsel")
    ):
        return None
    if "DPP" in of.form or "SDWA" in of.form or any(kind not in ("u32", "i32") for kind in operation.sources):
        return None
    codes = [of.fields.get(name, of.fields.get(f"v{name}")) for name in ("src0", "src1", "src2")]
    codes = codes[: len(operation.sources)]
    if any(240 <= code < 255 for code in codes):
        return None
    if _SUMS.match(of.name):
        masks = [(1 << asked.bit_length()) - 1] * len(codes)  # a sum's bit depends on the lower ones
    elif not _BITWISE.match(of.name) and not (_SHIFTS.match(of.name) and _is_constant(of.name, codes)):
        return None
    else:
        masks = _matter(of.name, tuple(codes), of.fields.get("literal", 0), asked)
    place: Place = {}
    for code, mask in zip(codes, masks, strict=True):
        if code >= 256 or code < 128:
            register = code - 256 if code >= 256 else code + SCALAR
            place[register] = place.get(register, 0) | mask
    return place


def _is_constant(name: str, codes: list[int]) -> bool:
    """Whether what says how far a shift goes, or which bytes are picked, is in the code."""
    first, last = (
        (0, 1) if "REV" in name else (1, 2) if "LSHL_OR" in name else (1, 3) if "BFE" in name else (2, 3)
    )
    return all(128 <= code < 256 for code in codes[first:last])


@cache
def _matter(name: str, codes: tuple[int, ...], literal: int, asked: int) -> list[int]:
    operation, rng = OPERATIONS[name], np.random.default_rng(1)
    given = [
        np.full(_SAMPLES, _constant(code, literal), U32)
        if 128 <= code < 256
        else rng.integers(0, 1 << 32, _SAMPLES, U32)
        for code in codes
    ]
    with np.errstate(all="ignore"):
        plain = _computed(operation, given)
        masks = []
        for i in range(len(codes)):
            mask = 0
            for bit in range(32):
                other = [*given]
                other[i] = given[i] ^ U32(1 << bit)
                mask |= int(((_computed(operation, other) ^ plain) & U32(asked)).any()) << bit
            masks.append(mask)
    return masks


def _computed(operation: Operation, words: list[np.ndarray]) -> np.ndarray:
    return operation.compute(*(w.view(TYPES[k]) for w, k in zip(words, operation.sources, strict=True))).view(
        U32
    )


def _constant(code: int, literal: int) -> int:
    if code == 255:
        return literal
    return code - 128 if code <= 192 else (192 - code) & ALL


# --- waits and barriers -------------------------------------------------------------------------------------

_LDS, _STORES = -1, -2  # as registers: all that is in flight there


def unwaited(flow: Flow, code: list[Instruction]) -> set[int]:
    """Places where a register is used, or a barrier reached, that an access may still be under way for.

    For each register, by kind of access, the least number of accesses of the kind that were issued behind the
    one that it waits for, on any path. Scalar loads end in any order. At a barrier accesses of LDS count, and
    on RDNA stores, if behind it something is accessed there.
    """
    kernel, cdna = flow.kernel, flow.kernel.architecture == "cdna"
    states: list[dict[tuple[int, str], int] | None] = [None] * len(code)
    states[kernel.entry] = {}
    todo, bad = [kernel.entry], set()
    while todo:
        at = todo.pop()
        of, state = code[at], dict(states[at])
        for kind, left in _left(of, kernel.architecture).items():
            done = [
                key
                for key, age in state.items()
                if key[1] == kind and age >= left and (left == 0 or kind != "scalar")
            ]
            for key in done:
                del state[key]
        kind = _kind(of)
        written, read, _ = _parts(of, kernel)
        own = [register for register, _ in written]
        used = {(r, k) for r, k in state if r in read or (r in own and not (k == kind != "scalar"))}
        if of.name in ("S_BARRIER", "S_BARRIER_SIGNAL"):
            behind = _accesses(flow, code, at, 1)
            used |= {(r, k) for r, k in state if r == _LDS and "lds" in behind}
            used |= {(r, k) for r, k in state if r == _STORES and not cdna and "store" in behind}
        if used:
            bad.add(at)
        if kind:
            aged = {kind, "load"} if kind == "store" and cdna else {kind}
            state = {key: min(64, age + (key[1] in aged)) for key, age in state.items()}
            waiting = own if kind != "store" else [_STORES]
            waiting += [_LDS] * (kind == "lds" and "PERMUTE" not in of.name)
            state |= {(register, kind): 0 for register in waiting}
        for place in flow.next[at]:
            old = states[place]
            new = dict(state)
            for key, age in (old or {}).items():
                new[key] = min(age, new.get(key, 64))
            if new != old:
                states[place] = new
                todo.append(place)
    return bad


def separates(flow: Flow, at: int) -> bool:
    """Whether a barrier has accesses of LDS on both sides, one of them writing, or stores on both sides."""
    before, behind = (_accesses(flow, flow.code, at, step) for step in (-1, 1))
    writes = ("lds write" in before and "lds" in behind) or ("lds" in before and "lds write" in behind)
    return writes or ("store" in before and "store" in behind)


def _accesses(flow: Flow, code: list[Instruction], at: int, step: int) -> set[str]:
    """Kinds of accesses from a place on to the next barrier, or back to the one before."""
    ways, seen, kinds = (flow.next if step > 0 else flow.before), set(), set()
    todo = list(ways[at])
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        of = code[place]
        if of.name in ("S_BARRIER", "S_BARRIER_SIGNAL", "S_BARRIER_WAIT"):
            continue
        kinds |= {_kind(of)} | ({"lds write"} if of.name.startswith("DS_STORE") else set())
        todo += ways[place]
    return kinds


def _kind(of: Instruction) -> str:
    if not _MEMORY.fullmatch(of.name) and "PERMUTE" not in of.name:
        return ""
    if of.name.startswith("DS_"):
        return "lds"
    return "scalar" if of.name.startswith("S_") else "load" if "LOAD" in of.name else "store"


def _left(of: Instruction, architecture: str) -> dict[str, int]:
    """How many accesses of which kinds a wait leaves; 63 or 15 is as many as there are."""
    if not of.name.startswith("S_WAIT"):
        return {}
    word, name = of.simm16, of.name
    if name == "S_WAITCNT":
        vector, shared, most = (
            (word & 15 | word >> 10 & 48, word >> 8 & 15, 15)
            if architecture == "cdna"
            else (word >> 10 & 63, word >> 4 & 63, 63)
        )
        left = {"load": vector} if vector < 63 else {}
        return left | ({"lds": shared, "scalar": shared} if shared < most else {})
    kinds = {"LOADCNT": "load", "STORECNT": "store", "VSCNT": "store", "DSCNT": "lds", "KMCNT": "scalar"}
    parts = [part for part in name.split("_") if part in kinds]
    if len(parts) == 2:
        return {kinds[parts[0]]: word >> 8 & 63, kinds[parts[1]]: word & 63}
    return {kinds[part]: word for part in parts if word < 63}
