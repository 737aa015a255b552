"""What each decoded instruction does to a machine: operands by format, memory, lanes, matrices, control."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from code_object import Instruction, Kernel
from machine import (
    EXEC,
    LITERAL,
    VCC,
    Act,
    Fault,
    Machine,
    Modifiers,
    Read,
    aligned,
    scalar_source,
    vector_source,
)
from operations import OPERATIONS, TYPES, U16, U32, U64, Operation, common_name

_NOTHING_TO_DO = re.compile(
    r"S_(NOP|CLAUSE|DELAY_ALU|SENDMSG|WAIT_ALU|SETPRIO|SLEEP|ICACHE_INV|INST_PREFETCH"
    r"|SET_INST_PREFETCH_DISTANCE|WAITCNT_DEPCTR|DCACHE_INV)|BUFFER_(GL0_INV|GL1_INV|INV|WBL2|WBINVL1)"
    r"|GLOBAL_(INV|WB|WBINV)"
)
_SEGMENT = 64  # bytes of a transaction with memory, as counted here
_RAW = {"cdna": 0x27000, "rdna3": 0x31027000, "rdna4": 0x31027000}  # flags of a buffer descriptor
_OFF = {"cdna": 127, "rdna3": 124, "rdna4": 124}  # as the scalar address of a global access: none


def act_of(instruction: Instruction, kernel: Kernel) -> Act:
    """What an instruction does to a machine. Raises Fault for one that isn't known."""
    name, form = instruction.name, instruction.form.split("_")[0]
    if _NOTHING_TO_DO.fullmatch(name):
        return lambda m: None
    for pattern, made in _NAMED:
        if re.fullmatch(pattern, name):
            return made(instruction, kernel)
    if form == "VOPD":
        return _dual(instruction, kernel)
    if name not in OPERATIONS:
        raise Fault("this instruction is not known here")
    made = _scalar if form.startswith("SOP") else _vector
    return made(instruction, kernel, OPERATIONS[name])


# --- scalar ------------------------------------------------------------------------------------------------


def _signed(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)


def _scalar(of: Instruction, kernel: Kernel, operation: Operation) -> Act:
    fields = of.fields
    codes = [fields[name] for name in ("ssrc0", "ssrc1") if name in fields]
    reads: list[Callable[[Machine], np.ndarray]] = []
    for kind in operation.sources:
        if kind == "scc":
            reads.append(lambda m: m._scc())
        elif kind == "old":
            reads.append(lambda m: m.scalar(fields["sdst"]))
        elif "simm16" in fields:
            value = _signed(fields["simm16"], 16) if kind == "i32" else fields["simm16"]
            fixed = np.array([value], TYPES[kind])
            reads.append(lambda m, fixed=fixed: fixed)
        else:
            reads.append(scalar_source(codes.pop(0) if codes else LITERAL, kind, fields.get("literal", 0)))
    results = operation.results

    def act(m: Machine) -> None:
        value = operation.compute(*(read(m) for read in reads))
        for kind, part in zip(results, value if len(results) > 1 else (value,), strict=True):
            if kind == "scc":
                m.scc[m.sel] = part
                m.known_scc[m.sel] = True
            elif kind[1:] == "64":
                words = part.view(U64)
                m.write_scalar(fields["sdst"], words.astype(U32))
                m.write_scalar(fields["sdst"] + 1, (words >> U64(32)).astype(U32))
            else:
                m.write_scalar(fields["sdst"], part.view(U32))

    return act


def _scalar_by_vector_unit(of: Instruction, kernel: Kernel) -> Act:
    """RDNA 4's, of scalar registers by the vector unit's functions."""
    modified = any(of.fields.get(name) for name in ("neg", "abs", "omod", "clmp", "opsel"))
    if of.name not in OPERATIONS or modified:
        raise Fault("this instruction, or a modifier of it, is not known here")
    fields = {"sdst": of.vdst, "ssrc0": of.src0, "literal": of.fields.get("literal", 0)}
    return _scalar(replace(of, fields=fields), kernel, OPERATIONS[of.name])


def _save_exec(of: Instruction, kernel: Kernel) -> Act:
    operation, which = re.fullmatch(r"S_(\w+)_(SAVE|WR)EXEC_B\d+", of.name).groups()
    known, words = OPERATIONS.get(f"S_{operation}_B32"), kernel.wave // 32
    if known is None or not of.name.endswith(str(kernel.wave)):
        raise Fault(f"this instruction is not known here for waves of {kernel.wave}")
    compute = known.compute

    def act(m: Machine) -> None:
        source = [scalar_word(m, of.ssrc0, i) for i in range(words)]
        old = [m.scalar(EXEC + i) for i in range(words)]
        new = [compute(given, was)[0] for given, was in zip(source, old, strict=True)]
        for i in range(words):
            m.write_scalar(of.sdst + i, old[i] if which == "SAVE" else new[i])
        m._set_exec(np.stack(np.broadcast_arrays(*new), 1).astype(U32))
        m.scc[m.sel] = m.ex.any(1)
        m.known_scc[m.sel] = True

    def scalar_word(m: Machine, code: int, i: int) -> np.ndarray:
        if code > 127:
            value = scalar_source(code, "i64", of.fields.get("literal", 0))(m).view(U64)
            return np.broadcast_to((value >> U64(32 * i)).astype(U32), len(m.index))
        return m.scalar(code + i)

    return act


def _branch(of: Instruction, kernel: Kernel) -> Act:
    target = of.at + 4 + 4 * _signed(of.simm16, 16)
    place = next((i for i, other in enumerate(kernel.code) if other.at == target), None)
    if place is None:
        raise Fault("a branch to where no instruction begins")
    kind = of.name.removeprefix("S_").removeprefix("CBRANCH_")

    def act(m: Machine) -> None:
        if kind == "BRANCH":
            taken = np.ones(len(m.index), np.bool_)
        elif kind.startswith("SCC"):
            taken = m._scc() == (kind[-1] == "1")
        else:
            bits = m.ex if kind.startswith("EXEC") else m.mask(VCC)
            taken = bits.any(1) == kind.endswith("NZ")
        m.pc[m.sel] = np.where(taken, place, m.next)
        m.branched = True

    return act


def _end(of: Instruction, kernel: Kernel) -> Act:
    def act(m: Machine) -> None:
        m.pc[m.sel] = len(kernel.code)
        m.branched = True

    return act


def _barrier(of: Instruction, kernel: Kernel) -> Act:
    if of.name != "S_BARRIER" and of.fields.get("ssrc0", of.fields.get("simm16")) not in (193, 0xFFFF):
        raise Fault("a barrier other than the workgroup's is not known here")

    def act(m: Machine) -> None:
        if of.name != "S_BARRIER_WAIT":
            m.arrive()
        if of.name != "S_BARRIER_SIGNAL":
            m.waiting[m.sel] = True
            m.pc[m.sel] = m.next
            m.branched = True

    return act


def _waits(of: Instruction, kernel: Kernel) -> Act:
    word = of.simm16
    if of.fields.get("sdst", 124) != 124:
        raise Fault("a wait by a register is not known here")
    lgkm = ("lds", "scalar")
    match of.name.removeprefix("S_WAIT").removeprefix("_"), kernel.architecture:
        case "CNT", "cdna":
            counts = [(("load",), word & 15 | word >> 10 & 0x30), (lgkm, word >> 8 & 15)]
            most = (63, 15)
        case "CNT", "rdna3":
            counts, most = [(("load",), word >> 10 & 63), (lgkm, word >> 4 & 63)], (63, 63)
        case (("CNT_VSCNT" | "STORECNT"), _):
            counts, most = [(("store",), word)], (63,)
        case (("CNT_VMCNT" | "LOADCNT"), _):
            counts, most = [(("load",), word)], (63,)
        case "CNT_LGKMCNT", _:
            counts, most = [(lgkm, word)], (63,)
        case "DSCNT", _:
            counts, most = [(("lds",), word)], (63,)
        case "KMCNT", _:
            counts, most = [(("scalar",), word)], (31,)
        case ("LOADCNT_DSCNT" | "STORECNT_DSCNT") as both, _:
            counts = [((both[:-6].removesuffix("CNT").lower(),), word >> 8 & 63), (("lds",), word & 63)]
            most = (63, 63)
        case _:
            raise Fault("this wait is not known here")

    def act(m: Machine) -> None:
        for (names, left), limit in zip(counts, most, strict=True):
            if left < limit:
                for name in names:
                    m.wait(name, left)

    return act


# --- vector ------------------------------------------------------------------------------------------------


def _vector(of: Instruction, kernel: Kernel, operation: Operation) -> Act:
    compute, store = _parts(of, kernel, operation)
    equality = operation.results == ("mask",) and re.search(r"_CMP_(EQ|NE|NEQ|LG|NLG)_", of.name)

    def act(m: Machine) -> None:
        value, undefined = m.defined(compute)
        if equality and m.filled:  # few fillings equal anything
            raise Fault("a comparison of bits that were never written")
        store(m, value, undefined)

    return act


def _parts(
    of: Instruction, kernel: Kernel, operation: Operation
) -> tuple[Callable[[Machine], object], Callable[[Machine, object], None]]:
    """What computes the results, and what stores them: two of VOPD compute first and store then."""
    fields, form = of.fields, of.form
    codes = [fields.get(f"v{name}", fields.get(name)) for name in ("src0", "src1", "src2")]
    if "vsrc0" in fields and fields.get("s0"):
        codes[0] -= 256
    if "vsrc1" in fields and fields.get("s1"):
        codes[1] -= 256
    literal = fields.get("literal", 0)
    if fields.get("clmp") and of.name in _SATURATED:
        operation = Operation(operation.results, operation.sources, _SATURATED[of.name])
    elif fields.get("omod") or fields.get("clmp"):
        raise Fault("output modifiers are not known here")
    packed = form.startswith("VOP3P")
    if packed and "dpp" in fields:
        raise Fault("this exchange of lanes is not known here")
    short = kernel.architecture != "cdna" and not form.startswith("VOP3")  # a register's halves by its number
    lanes = _dpp(fields, kernel) if "dpp" in fields else None
    reads: list[Read] = []
    position = 0
    for kind in operation.sources:
        if kind == "old":
            reads.append(lambda m: m.vector(fields["vdst"] - 256))
            continue
        if kind == "mask":
            code = codes[2] if position == 2 and codes[2] is not None and "VOP3" in form else VCC
            reads.append(lambda m, code=code: m.mask(code))
            continue
        code, high = codes[position], bool(fields.get("opsel", 0) >> position & 1)
        if high and kind[1:] != "16" and not packed:
            raise Fault("the upper half of a source of more than 16 bits is not known here")
        if kind in ("pk", "pk32"):
            reads.append(_halves(code, kind, literal, fields, position))
            position += 1
            continue
        if short and kind[1:] == "16" and code >= 384:
            code, high = code - 128, True
        part = None
        if "src0_sel" in fields and position < 2:
            part = _selected(fields[f"src{position}_sel"], bool(fields.get(f"src{position}_sext")))
        how = Modifiers(
            high=high and kind[1:] == "16",
            negative=_bit(fields, "neg", position),
            absolute=_bit(fields, "abs", position),
            lanes=lanes[0] if lanes and position == 0 else None,
            part=part,
        )
        reads.append(vector_source(code, kind, literal, how))
        position += 1
    if packed and (fields.get("neg") or fields.get("neg_hi")):
        raise Fault("sign modifiers of packed sources are not known here")
    return (
        lambda m: operation.compute(*(read(m) for read in reads)),
        _stored(of, kernel, operation, lanes[1] if lanes else None, short),
    )


_SATURATED = {  # with the modifier `clamp`
    "V_ADD_U32": lambda a, b: np.minimum(a.astype(U64) + b, U64(0xFFFFFFFF)).astype(U32),
    "V_SUB_U32": lambda a, b: np.where(a > b, a - b, U32(0)),
    "V_SUBREV_U32": lambda a, b: np.where(b > a, b - a, U32(0)),
}


def _bit(fields: dict[str, int], name: str, position: int) -> bool:
    if f"src{position}_{name}" in fields:  # of DPP and SDWA
        return bool(fields[f"src{position}_{name}"])
    return bool(fields.get(name, 0) >> position & 1)


def _halves(code: int, kind: str, literal: int, fields: dict[str, int], position: int) -> Read:
    """Of a packed source: what the lower and the upper result are made of."""
    upper = fields.get("opsel_hi", 3) | fields.get("opsel_hi2", 1) << 2
    picks = (fields.get("opsel", 0) >> position & 1, upper >> position & 1)
    if kind == "pk":
        read = vector_source(code, "u32", literal)
        return lambda m: [(word >> U32(16 * pick)).astype(U16) for word in (read(m),) for pick in picks]
    if code < 128 or code >= 256:
        words = [vector_source(code + pick, "u32", literal) for pick in picks]
    else:
        words = [vector_source(code, "u32", literal)] * 2
    return lambda m: [np.ascontiguousarray(word(m)) for word in words]


def _selected(selector: int, signed: bool) -> Callable[[np.ndarray], np.ndarray]:
    """A byte or a half of words, for SDWA."""
    bits, shift = (
        (8, 8 * selector) if selector < 4 else (16, 16 * (selector - 4)) if selector < 6 else (32, 0)
    )
    if selector > 6:
        raise Fault("a selector that means nothing")
    spare = U32(32 - bits)

    def part(words: np.ndarray) -> np.ndarray:
        raised = words << (spare - U32(shift))
        return (raised.view(np.int32) >> np.int32(spare)).view(U32) if signed else raised >> spare

    return part


def _stored(
    of: Instruction, kernel: Kernel, operation: Operation, enabled: object, short: bool
) -> Callable[[Machine, object], None]:
    fields, form = of.fields, of.form
    results = operation.results
    to = fields.get("vdst", 0) - 256
    bits_to = fields.get("sdst", VCC) if "sdst" in fields else VCC
    if form.startswith("VOP3_SDST"):
        bits_to = fields["vdst"]
    if form.endswith("SDWA_SDST") and not fields.get("sd"):
        bits_to = VCC
    high = bool(fields.get("opsel", 0) >> 3 & 1)
    if high and (kernel.architecture == "cdna" or results[0][1:] != "16"):
        raise Fault("the upper half of this destination is not known here")
    if short and results[0][1:] == "16" and to >= 128:
        to, high = to - 128, True
    zeroes = kernel.architecture == "cdna"  # the upper half, where only 16 bits are computed

    def store(m: Machine, value: object, undefined: list | None = None) -> None:
        lanes = enabled(m) if enabled is not None else None
        parts = value if len(results) > 1 or results[0] in ("pk", "pk32") else (value,)
        unknown = undefined or [None] * len(parts)
        if results[0] in ("pk", "pk32"):
            shift = 16 if results[0] == "pk" else 32
            kinds = (f"u{2 * shift}",)
            of = U32 if shift == 16 else U64
            parts, unknown = ([_joined(pair, of, shift)] for pair in (parts, unknown))
        else:
            kinds = results
        for kind, part, bits in zip(kinds, parts, unknown, strict=True):
            if kind == "mask":
                if lanes is not None and not (lanes | ~m.ex).all():
                    raise Fault("a condition of lanes that have no source is not known here")
                if bits is not None and (bits & m.ex).any():
                    raise Fault("a condition depends on bits that were never written")
                m.write_mask(bits_to, part)
            elif kind[1:] == "64":
                for i in range(2):
                    word, gone = (
                        None if of is None else (of.view(U64) >> U64(32 * i)).astype(U32)
                        for of in (part, bits)
                    )
                    m.write_vector(to + i, word, lanes, undefined=gone)
            elif kind[1:] == "16":
                half = part.view(U16).astype(U32)
                gone = None if bits is None else bits.astype(U32)
                if zeroes:
                    m.write_vector(to, half, lanes, undefined=gone)
                else:
                    write_half(m, to, half, high, lanes, gone)
            else:
                m.write_vector(to, part.view(U32), lanes, undefined=bits)

    if "dst_sel" in fields and fields["dst_sel"] != 6:
        return _stored_part(fields, to)
    return store


def _joined(pair: Sequence[np.ndarray | None], of: type, shift: int) -> np.ndarray | None:
    if pair[0] is None:
        return None
    low, high = (part.view(np.dtype(f"u{shift // 8}")).astype(of) for part in pair)
    return low | high << of(shift)


def write_half(
    m: Machine,
    to: int,
    half: np.ndarray,
    high: bool,
    lanes: np.ndarray | None = None,
    undefined: np.ndarray | None = None,
) -> None:
    """Set the lower or upper half of a vector register."""
    m.usable(to)
    old = m.V[to][m.sel]
    word = old & U32(0xFFFF) | half << U32(16) if high else old & U32(0xFFFF0000) | half
    if undefined is not None and high:
        undefined = undefined << U32(16)
    m.write_vector(to, word, lanes, bits=0xFFFF0000 if high else 0xFFFF, undefined=undefined)


def _stored_part(fields: dict[str, int], to: int) -> Callable[[Machine, object], None]:
    selector, unused = fields["dst_sel"], fields["dst_unused"]
    if selector > 6 or unused not in (0, 2):
        raise Fault("this part of a destination is not known here")
    bits, shift = (8, 8 * selector) if selector < 4 else (16, 16 * (selector - 4))
    ones = (1 << bits) - 1

    def store(m: Machine, value: np.ndarray, undefined: list | None = None) -> None:
        if undefined is not None and undefined[0].any():
            raise Fault("a part of a register from bits that were never written is not known here")
        words = value.astype(U32) if value.itemsize < 4 else value.view(U32)
        part = (words & U32(ones)) << U32(shift)
        if unused:
            part = part | m.vector(to) & U32(~(ones << shift) & 0xFFFFFFFF)
        m.write_vector(to, part)

    return store


def _dual(of: Instruction, kernel: Kernel) -> Act:
    fields = of.fields
    parts = []
    for letter, name in zip("xy", of.name.split("+"), strict=True):
        single = common_name(name.replace("_DUAL_", "_"))
        if single not in OPERATIONS:
            raise Fault(f"{single} is not known here")
        to = fields["vdstx"]
        if letter == "y":
            to = 256 + (fields["vdsty"] << 1 | to & 1 ^ 1)
        own = {"vdst": to, "src0": fields[f"src{letter}0"], "src1": fields[f"vsrc{letter}1"]}
        own["literal"] = fields.get("literal", 0)
        half = Instruction(of.at, of.size, single, "VOP2", own)
        parts.append(_parts(half, kernel, OPERATIONS[single]))

    def act(m: Machine) -> None:
        values = [m.defined(compute) for compute, _ in parts]
        for (_, store), (value, undefined) in zip(parts, [(of.copy(), no) for of, no in values], strict=True):
            store(m, value, undefined)  # a copy: what is moved is the register itself

    return act


def _compare_exec(of: Instruction, kernel: Kernel) -> Act:
    operation = OPERATIONS[of.name.replace("CMPX", "CMP")]
    compute, store = _parts(of, kernel, operation)

    def act(m: Machine) -> None:
        bits = compute(m)
        if kernel.architecture == "cdna":
            store(m, bits)
        m.write_mask(EXEC, bits)

    return act


# --- other lanes -------------------------------------------------------------------------------------------


def dpp_source(control: int, lanes: int, architecture: str) -> tuple[np.ndarray, np.ndarray]:
    """For each lane, which lane's value a DPP control gives it, and whether there is one.

    Broadcasts to the next rows are CDNA's alone, exclusive ors of a lane's number RDNA's.
    """
    cdna = architecture == "cdna"
    lane = np.arange(lanes)
    row, i = lane & ~15, lane & 15
    n = control & 15
    if control < 0x100:
        source = lane & ~3 | (control >> 2 * (lane & 3) & 3)
    elif 0x101 <= control <= 0x10F:
        source = np.where(i + n < 16, lane + n, -1)
    elif 0x111 <= control <= 0x11F:
        source = np.where(i >= n, lane - n, -1)
    elif 0x121 <= control <= 0x12F:
        source = row | (i - n & 15)
    elif control == 0x140:
        source = row | 15 - i
    elif control == 0x141:
        source = lane & ~7 | 7 - (lane & 7)
    elif control == 0x142 and cdna:
        source = np.where(row > 0, row - 1, -1)
    elif control == 0x143 and cdna:
        source = np.where(lane >= 32, 31, -1)
    elif 0x150 <= control <= 0x15F:
        source = row | n
    elif 0x160 <= control <= 0x16F and not cdna:
        source = row | i ^ n
    else:
        raise Fault(f"the DPP control {control:#x} is not known here")
    return np.maximum(source, 0), source >= 0


def _dpp(fields: dict[str, int], kernel: Kernel) -> tuple[Callable, Callable]:
    """Reads a register from other lanes, and says which lanes have a result."""
    lanes = kernel.wave
    source, there = dpp_source(fields["dpp"], lanes, kernel.architecture)
    lane = np.arange(lanes)
    rows = (fields["row_mask"] >> (lane >> 4) & 1).astype(np.bool_)
    banks = (fields["bank_mask"] >> (lane >> 2 & 3) & 1).astype(np.bool_)
    fetches, zeroes = bool(fields.get("fi")), bool(fields["bc"])

    def valid(m: Machine) -> np.ndarray:
        return there & (np.True_ if fetches else m.ex[:, source])

    def read(m: Machine, register: int) -> np.ndarray:
        words = m.vector(register, every=fetches)[:, source]
        return np.where(valid(m), words, U32(0))

    def enabled(m: Machine) -> np.ndarray:
        return (rows & banks) & (np.True_ if zeroes else valid(m))

    return read, enabled


def _permlane(of: Instruction, kernel: Kernel) -> Act:
    lane = np.arange(kernel.wave)
    row = lane & ~15 ^ (16 if "X16" in of.name else 0)
    fetches, zeroes = of.opsel & 1, of.opsel & 2
    selectors = [scalar_source(code, "u32", of.fields.get("literal", 0)) for code in (of.src1, of.src2)]

    def act(m: Machine) -> None:
        low, high = (read(m).astype(U64) for read in selectors)
        chosen = ((low | high << U64(32))[:, None] >> (4 * (lane & 15)).astype(U64)).astype(np.int64) & 15
        source = np.broadcast_to(row | chosen, m.ex.shape)
        words = np.take_along_axis(m.vector(of.src0 - 256, every=bool(fetches)), source, 1)
        if not fetches:
            on = np.take_along_axis(m.ex, source, 1)
            m.write_vector(of.vdst - 256, np.where(on, words, U32(0)), None if zeroes else on)
        else:
            m.write_vector(of.vdst - 256, words)

    return act


def _read_lane(of: Instruction, kernel: Kernel) -> Act:
    first = of.name.startswith("V_READFIRSTLANE")
    register = of.src0 - 256
    to = of.vdst if of.form.endswith("SDST") or of.vdst < 256 else of.vdst - 256
    lane = None if first else scalar_source(of.src1, "u32", of.fields.get("literal", 0))

    def act(m: Machine) -> None:
        if register < 0:
            m.write_scalar(to, m.scalar(of.src0))
            return
        if first:
            chosen = np.where(m.ex.any(1), m.ex.argmax(1), 0)
        else:
            chosen = np.broadcast_to(lane(m), len(m.index)).astype(np.int64) & (kernel.wave - 1)
        m.usable(register)
        if register not in m.clean and m.undefined[register][m.index, chosen].any():
            raise Fault(f"v{register} is read before it is written")
        m.write_scalar(to, m.V[register][m.index, chosen])

    return act


def _write_lane(of: Instruction, kernel: Kernel) -> Act:
    reads = [scalar_source(code, "u32", of.fields.get("literal", 0)) for code in (of.src0, of.src1)]

    def act(m: Machine) -> None:
        value, lane = (np.broadcast_to(read(m), len(m.index)) for read in reads)
        register, chosen = of.vdst - 256, lane.astype(np.int64) & (kernel.wave - 1)
        m.usable(register)
        m.V[register][m.index, chosen] = value
        m.undefined[register][m.index, chosen] = 0

    return act


def _lanes_before(of: Instruction, kernel: Kernel) -> Act:
    """V_MBCNT: a number, and how many of the bits of 32 lanes are set that come before each lane."""
    lane = np.arange(kernel.wave)
    before = np.clip(lane - (32 if "_HI_" in of.name else 0), 0, 32).astype(U64)
    ones = ((U64(1) << before) - U64(1)).astype(U32)
    literal = of.fields.get("literal", 0)
    bits, start = (
        vector_source(code, "u32", literal)
        for code in (of.src0, of.fields.get("src1", of.fields.get("vsrc1")))
    )

    def act(m: Machine) -> None:
        counted = np.bitwise_count(bits(m) & ones).astype(U32) + start(m)
        m.write_vector(of.vdst - 256, np.broadcast_to(counted, m.ex.shape))

    return act


def _bpermute(of: Instruction, kernel: Kernel) -> Act:
    if "BPERMUTE" not in of.name or (kernel.architecture, kernel.wave) == ("rdna3", 64):
        raise Fault("this exchange is not known here")  # RDNA 3 exchanges among 32 lanes
    offset = of.offset0 | of.offset1 << 8

    def act(m: Machine) -> None:
        words, to = m.vector(of.data0 - 256), of.vdst - 256
        lane = (m.vector(of.addr - 256) + U32(offset) >> U32(2)).astype(np.int64) & (kernel.wave - 1)
        on = np.take_along_axis(m.ex, lane, 1)
        m.write_vector(to, np.where(on, np.take_along_axis(words, lane, 1), U32(0)))
        m.issue("lds", [to])

    return act


# --- memory ------------------------------------------------------------------------------------------------

_ACCESS = re.compile(r"\w+?_(LOAD|STORE)_(D16_)?(HI_)?([UIB])(8|16|32|64|96|128)")


def _gathered(octets: np.ndarray, places: np.ndarray, size: int) -> list[np.ndarray]:
    """The words at some places of memory; a byte or a half as a word of its own."""
    if (places & (min(size, 4) - 1)).any():
        each = [octets[places + i].astype(U32) << U32(8 * (i % 4)) for i in range(size)]
        return [np.bitwise_or.reduce(each[i : i + 4]) for i in range(0, size, 4)]
    if size >= 4:
        words, at = octets.view(U32), places >> 2
        return [words[at + i] for i in range(size // 4)]
    if size == 2:
        return [octets.view(U16)[places >> 1].astype(U32)]
    return [octets[places].astype(U32)]


def _scatter(octets: np.ndarray, places: np.ndarray, size: int, words: Sequence[np.ndarray]) -> None:
    """Raises Fault where lanes store different values at one place."""
    if (places & (min(size, 4) - 1)).any():
        for i in range(size):
            octets[places + i] = (words[i // 4] >> U32(8 * (i % 4))).astype(np.uint8)
    elif size >= 4:
        at = places >> 2
        for i, word in enumerate(words):
            octets.view(U32)[at + i] = word
    elif size == 2:
        octets.view(U16)[places >> 1] = words[0].astype(U16)
    else:
        octets[places] = words[0].astype(np.uint8)
    stored, ones = _gathered(octets, places, size), U32(0xFFFFFFFF >> max(0, 32 - 8 * size))
    if any(((a ^ b) & ones).any() for a, b in zip(stored, words, strict=True)):
        raise Fault("lanes store different values at one place")


class _Access:
    """A load or store of one size by lanes, whatever memory it is of."""

    def __init__(self, of: Instruction, kernel: Kernel) -> None:
        parsed = _ACCESS.fullmatch(of.name)
        if parsed is None:
            raise Fault("this access is not known here")
        kind, narrow, high, sign, bits = parsed.groups()
        self.loads, self.narrow, self.high = kind == "LOAD", bool(narrow), bool(high)
        self.sign, self.size = sign, int(bits) // 8
        fields = of.fields
        names = ("vdata", "vdst", "data0") if self.loads else ("vdata", "data0", "vsrc", "data")
        register = next(fields[name] for name in names if name in fields)
        self.register = register - 256 + (kernel.accumulators if fields.get("acc") else 0)
        self.words = max(1, self.size // 4)
        aligned(self.register, self.words, kernel)
        if kernel.architecture == "cdna" and self.narrow and self.loads:
            raise Fault("memory with error correction doesn't keep the other half: this is not known here")

    def registers(self, first: int | None = None) -> list[int]:
        first = self.register if first is None else first
        return [first + i for i in range(self.words)]

    def load(
        self,
        m: Machine,
        octets: np.ndarray,
        places: np.ndarray,
        on: np.ndarray,
        counter: str,
        first: int | None = None,
    ) -> None:
        """Into the registers of lanes that are on; zeros for those without a place."""
        m.loading = counter
        signed = _selected(0 if self.size == 1 else 4, True) if self.sign == "I" else None
        for register, words in zip(self.registers(first), _gathered(octets, places, self.size), strict=True):
            full = np.zeros(m.ex.shape, U32)
            full[on] = words if signed is None else signed(words)
            if self.narrow:
                write_half(m, register, full & U32(0xFFFF), self.high)
            else:
                m.write_vector(register, full)
        m.loading = ""

    def data(self, m: Machine, on: np.ndarray, first: int | None = None) -> list[np.ndarray]:
        """What lanes store."""
        need = 0xFFFFFFFF >> max(0, 32 - 8 * self.size) << (16 if self.high else 0)
        words = [m.vector(register, need)[on] for register in self.registers(first)]
        return [word >> U32(16) for word in words] if self.high else words


def _through_memory(of: Instruction, kernel: Kernel, addressed: Callable[[Machine, int], tuple]) -> Act:
    """A load or store of the GPU's memory. `addressed` gives addresses, and which lanes have one."""
    access = _Access(of, kernel)

    def act(m: Machine) -> None:
        addresses, on = addressed(m, access.size)
        places = m.memory.places(addresses[on], access.size, writes=not access.loads)
        waves = np.broadcast_to(m.index[:, None], m.ex.shape)[on]
        m.touch(m.memory.shadow, "store", places, waves, access.size, writes=not access.loads)
        if places.size:
            segments = (
                np.stack([waves, places // _SEGMENT]),
                np.stack([waves, (places + access.size - 1) // _SEGMENT]),
            )
            keys = np.concatenate([pair[0].astype(np.int64) << 40 | pair[1] for pair in segments])
            m.executed.transactions["loads" if access.loads else "stores"] += len(np.unique(keys))
        if access.loads:
            access.load(m, m.memory.bytes, places, on, "load")
            m.issue("load", access.registers())
        else:
            _scatter(m.memory.bytes, places, access.size, access.data(m, on))
            m.issue_store()

    return act


def _global(of: Instruction, kernel: Kernel) -> Act:
    if of.name.startswith(("SCRATCH", "FLAT")):
        raise Fault("this memory is not known here")
    return _through_memory(of, kernel, _global_addresses(of, kernel))


def _atomic(of: Instruction, kernel: Kernel) -> Act:
    """An addition in memory that gives nothing back: in any order, the same sum."""
    fields = of.fields
    if fields.get("glc") or fields.get("sc0") or fields.get("th", 0) & 1:
        raise Fault("an atomic operation that returns the old value is not known here")
    word = U64 if of.name.endswith("64") else U32
    size = np.dtype(word).itemsize
    addressed, register = _global_addresses(of, kernel), fields.get("data", fields.get("vsrc")) - 256

    def act(m: Machine) -> None:
        addresses, on = addressed(m)
        places = m.memory.places(addresses[on], size, writes=True)
        if (places % size).any():
            raise Fault(f"an atomic operation at an address that is no multiple of {size}")
        waves = np.broadcast_to(m.index[:, None], m.ex.shape)[on]
        m.touch(m.memory.shadow, "store", places, waves, size, writes=True, atomic=True)
        value = (m.pair(register) if word is U64 else m.vector(register))[on]
        np.add.at(m.memory.bytes.view(word), places // size, value)
        m.executed.transactions["atomics"] += len(places)
        m.issue_store()

    return act


def _global_addresses(of: Instruction, kernel: Kernel) -> Callable[[Machine], tuple[np.ndarray, np.ndarray]]:
    fields = of.fields
    bits = 24 if "ioffset" in fields else 13
    offset = U64(_signed(fields.get("ioffset", fields.get("offset", 0)), bits) & 0xFFFFFFFFFFFFFFFF)
    address = fields.get("vaddr", fields.get("addr")) - 256
    base = fields["saddr"]

    def addressed(m: Machine, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
        if base == _OFF[kernel.architecture]:
            full = m.pair(address)
        else:
            full = m.scalar_pair(base)[:, None] + m.vector(address)
        return full + offset, m.ex

    return addressed


def _buffer(of: Instruction, kernel: Kernel) -> Act:
    fields = of.fields
    first = fields.get("srsrc", fields.get("rsrc"))
    if fields.get("idxen") or fields.get("lds") or fields.get("tfe"):
        raise Fault("this kind of buffer access is not known here")
    offset = U32((_signed(fields["ioffset"], 24) if "ioffset" in fields else fields["offset"]) & 0xFFFFFFFF)
    more = scalar_source(fields["soffset"], "u32", 0)
    register = fields["vaddr"] - 256

    def addressed(m: Machine, size: int) -> tuple[np.ndarray, np.ndarray]:
        words = [m.scalar(first + i) for i in range(4)]
        if (words[1] >> U32(16)).any() or (words[3] != _RAW[kernel.architecture]).any():
            raise Fault("a buffer's descriptor is not one of raw memory, as Triton makes it")
        base = words[0].astype(U64) | (words[1] & U32(0xFFFF)).astype(U64) << U64(32)
        # this sum wraps at 32 bits before gfx1250, which LLVM relies on
        places = (m.vector(register) if fields["offen"] else np.zeros((1, 1), U32)) + offset
        places = places.astype(np.int64) + more(m).astype(np.int64)[:, None]
        places = np.broadcast_to(places, m.ex.shape)
        records = words[2].astype(np.int64)[:, None]
        inside = (places >= 0) & (places + size <= records)
        if (m.ex & ~inside & (places < records)).any():
            raise Fault("an access across the end of its buffer is not known here")
        return base[:, None] + places.astype(U64), m.ex & inside

    return _through_memory(of, kernel, addressed)


def _scalar_load(of: Instruction, kernel: Kernel) -> Act:
    fields = of.fields
    parsed = re.fullmatch(r"S_LOAD_([UIB])(\d+)", of.name)
    if parsed is None:
        raise Fault("this scalar load is not known here")
    size, words = int(parsed[2]) // 8, max(1, int(parsed[2]) // 32)
    bits = 24 if "ioffset" in fields else 21
    fixed = _signed(fields.get("ioffset", fields.get("offset", 0)), bits)
    if kernel.architecture == "cdna" and not fields["imm"]:
        if not fields["soffset_en"]:
            raise Fault("an offset of this form is not known here")
        fixed = 0
    register = fields["soffset"]
    with_register = register != 124 if kernel.architecture != "cdna" else bool(fields["soffset_en"])

    def act(m: Machine) -> None:
        address = m.scalar_pair(fields["sbase"]) + U64(fixed & 0xFFFFFFFFFFFFFFFF)
        if with_register:
            address = address + m.scalar(register)
        places = m.memory.places(address & ~U64(3) if size >= 4 else address, size)
        m.touch(m.memory.shadow, "store", places, m.index, size, writes=False)
        if (m.memory.shadow.writer[places[:, None] + np.arange(size)] != -1).any():
            raise Fault("bytes that this launch wrote: the cache of scalar loads doesn't see that")
        m.executed.transactions["scalar loads"] += len(places)
        to = fields["sdata"]
        for i, word in enumerate(_gathered(m.memory.bytes, places, size)):
            extended = _selected(0 if size == 1 else 4, True)(word) if parsed[1] == "I" else word
            m.write_scalar(to + i, extended)
        m.issue("scalar", [1000 + to + i for i in range(words)])

    return act


def _shared(of: Instruction, kernel: Kernel) -> Act:
    """LDS: one access, or two at offsets in units of their size, or of 64 of them."""
    if of.fields.get("gds"):
        raise Fault("global data share is not known here")
    name, unit, count = of.name, 0, 1
    for text, factor in (("_2ADDR_STRIDE64", 64), ("_2ADDR", 1)):
        if text in name:
            name, unit, count = name.replace(text, ""), factor, 2
            break
    access = _Access(Instruction(of.at, of.size, name, of.form, of.fields), kernel)
    extra = kernel.accumulators if of.fields.get("acc") else 0
    if count == 2:
        offsets = [offset * unit * access.size for offset in (of.offset0, of.offset1)]
    else:
        offsets = [of.offset0 | of.offset1 << 8]
    firsts = [access.register, access.register + access.words]
    if not access.loads:
        firsts[1] = of.data1 - 256 + extra
    aligned(
        firsts[-1] if not access.loads else firsts[0], access.words * (count if access.loads else 1), kernel
    )

    def act(m: Machine) -> None:
        on = m.ex
        waves = np.broadcast_to(m.index[:, None], on.shape)[on]
        base = m.vector(of.addr - 256)[on].astype(np.int64)
        data = [] if access.loads else [access.data(m, on, firsts[i]) for i in range(count)]
        registers = []
        for i, offset in enumerate(offsets):
            at = base + offset
            if (at + access.size > m.lds_bytes).any():
                raise Fault(f"{access.size} bytes at byte {int(at.max()):,} of {m.lds_bytes:,} of LDS")
            if (at & (min(access.size, 4) - 1)).any():
                raise Fault(f"an address is not a multiple of {min(access.size, 4)}")
            places = at + m.group_of[waves] * m.lds_stride
            m.touch(m.lds_shadow, "lds", places, waves, access.size, writes=not access.loads)
            if access.loads:
                for byte in range(access.size):
                    if not m.lds_known[places + byte].all():
                        raise Fault("a word of LDS is read before it is written")
                access.load(m, m.lds, places, on, "lds", firsts[i])
                registers += access.registers(firsts[i])
            else:
                for byte in range(access.size):
                    m.lds_known[places + byte] = True
                _scatter(m.lds, places, access.size, data[i])
        m.issue("lds", registers)

    return act


# --- matrices ----------------------------------------------------------------------------------------------


def _bfloats(m: Machine, register: int, count: int, flush: bool) -> np.ndarray:
    """`count` bfloat16 of each lane: (waves, lanes, count), as float64."""
    words = np.stack([m.vector(register + i) for i in range(count // 2)], -1)
    pairs = np.stack([words << U32(16), words & U32(0xFFFF0000)], -1)
    values = pairs.reshape(*words.shape[:2], count).astype(U32).view(np.float32)
    if flush:
        values = np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)
    return values.astype(np.float64)


def _matrix(of: Instruction, kernel: Kernel) -> Act:
    """D = A B + C of bfloat16 by a whole wave. Sums are float64's, rounded once: a GPU's last bits differ."""
    mfma = of.name.startswith("V_MFMA")
    size, _, depth = map(int, re.search(r"(\d+)X(\d+)X(\d+)", of.name).groups())
    lanes = kernel.wave
    lane = np.arange(lanes)
    groups = lanes // size
    if of.fields.get("neg") or of.fields.get("neg_hi") or of.fields.get("cbsz") or of.fields.get("blgp"):
        raise Fault("modifiers of a matrix product are not known here")
    each = depth // groups if mfma or kernel.architecture == "rdna4" else depth
    results = size * size // lanes
    number = np.arange(results)[:, None]
    if mfma:  # rows four by four
        row = number // 4 * 4 * groups + 4 * (lane // size) + number % 4
    elif kernel.architecture == "rdna3":
        row = 2 * number + lane // 16
    else:
        row = number + 8 * (lane // 16)
    column = np.broadcast_to(lane % size, row.shape)
    acc, acc_cd = of.fields.get("acc", 0), of.fields.get("acc_cd", 0)
    flush = kernel.target == "gfx90a"
    a_at = of.src0 - 256 + (kernel.accumulators if acc & 1 else 0)
    b_at = of.src1 - 256 + (kernel.accumulators if acc & 2 else 0)
    extra = kernel.accumulators if acc_cd else 0
    sums = None
    if of.src2 < 256:
        sums = vector_source(of.src2, "f32", 0)

    def factors(m: Machine, register: int) -> np.ndarray:
        """(waves, rows or columns, depth)"""
        values = _bfloats(m, register, each, flush)
        if each == depth:  # both halves of a wave hold the same
            both = values.reshape(len(values), groups, size, depth)
            if (both[:, 0].view(U64) != both[:, 1].view(U64)).any():
                raise Fault("the halves of a wave hold different factors")
            return both[:, 0]
        return (
            values.reshape(len(values), groups, size, each)
            .transpose(0, 2, 1, 3)
            .reshape(len(values), size, depth)
        )

    def act(m: Machine) -> None:
        if not m.all_lanes:
            raise Fault("a matrix product of which lanes are off is not known here")
        product = factors(m, a_at) @ factors(m, b_at).transpose(0, 2, 1)
        given = product[:, row, column]  # (waves, results, lanes)
        for i in range(results):
            old = m.vector(of.src2 - 256 + extra + i).view(np.float32) if sums is None else sums(m)
            total = (given[:, i] + old).astype(np.float32)
            if flush:
                total = np.where(np.abs(total) < np.finfo(np.float32).tiny, np.float32(0), total)
            given[:, i] = total
        for i in range(results):
            m.write_vector(of.vdst - 256 + extra + i, given[:, i].astype(np.float32).view(U32))

    return act


def _accumulator(of: Instruction, kernel: Kernel) -> Act:
    reads = "READ" in of.name
    source = vector_source(of.src0 + (kernel.accumulators if reads and of.src0 >= 256 else 0), "u32", 0)
    to = of.vdst - 256 + (0 if reads else kernel.accumulators)
    return lambda m: m.write_vector(to, source(m))


_NAMED: list[tuple[str, Callable[[Instruction, Kernel], Act]]] = [
    (r"S_(BRANCH|CBRANCH_(SCC[01]|(VCC|EXEC)N?Z))", _branch),
    (r"S_ENDPGM", _end),
    (r"S_BARRIER(_SIGNAL|_WAIT)?", _barrier),
    (r"S_WAIT\w*", _waits),
    (r"V_S_\w+", _scalar_by_vector_unit),
    (r"S_\w+_(SAVE|WR)EXEC_B\d+", _save_exec),
    (r"S_(BUFFER_)?LOAD_\w+", _scalar_load),
    (r"V_CMPX_\w+", _compare_exec),
    (r"V_READ(FIRST)?LANE_B32", _read_lane),
    (r"V_WRITELANE_B32", _write_lane),
    (r"V_PERMLANEX?16_B32", _permlane),
    (r"V_(WMMA|MFMA)_F32_\d+X\d+X\d+_BF16", _matrix),
    (r"V_ACCVGPR_\w+", _accumulator),
    (r"V_MBCNT_(LO|HI)_U32_B32", _lanes_before),
    (r"DS_B?PERMUTE_B32", _bpermute),
    (r"DS_\w+", _shared),
    (r"GLOBAL_ATOMIC_ADD_U(32|64)", _atomic),
    (r"BUFFER_\w+", _buffer),
    (r"(GLOBAL|FLAT|SCRATCH)_\w+", _global),
]
