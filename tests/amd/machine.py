"""Runs a kernel's machine code as an AMD GPU does, stricter than a card, on numpy's arrays.

An array has an element for each lane of each wave. Waves that are at one instruction execute it together;
of those that can go on, the ones at the lowest instruction go first. These end the run with a Fault, which
names the instruction and its source line: an instruction or a mode that isn't known here, an access
outside the memory given, a register or a word of LDS that is read before it was written, a register used
before the wait counter says that it was loaded, two waves that touch a byte, one of them writing, without a
barrier between that waits for it, lanes that store different values at one place, a store into arguments or
into what a launch only reads, a pair of registers that isn't aligned, and an end without S_ENDPGM.

Not modelled: time, caches, the hazards within a pipeline that need S_NOP or S_DELAY_ALU, traps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from code_object import Instruction, Kernel
from operations import TYPES, U16, U32, U64

_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2_PI = {"16": 0x3118, "32": 0x3E22F983, "64": 0x3FC45F306DC9C882}
VCC, EXEC, SCC, LITERAL = 106, 126, 253, 255
_BASE = 0x7F00_0000_0000  # where the emulated memory begins
MOST_STEPS = 10_000_000  # until a launch counts as not ending
_ATOMIC = -2  # as who wrote a byte
_GAP = 4096  # bytes between buffers

Act = Callable[["Machine"], None]
Read = Callable[["Machine"], np.ndarray]


class Fault(Exception):
    """Something that a kernel must not do, or that isn't known here."""


@dataclass
class Executed:
    """What was executed: instructions of waves by name, transactions of memory, by reading and writing."""

    instructions: Counter[str] = field(default_factory=Counter)
    transactions: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # instructions of waves that went together
    by_place: Counter[int] = field(default_factory=Counter)  # the instruction's number in the kernel


class Memory:
    """The GPU's memory: copies of buffers, with gaps between them. Overlapping buffers stay together."""

    def __init__(self, buffers: Sequence[tuple[str, int, int]], results: set[str] | None = None) -> None:
        """`buffers`: names, addresses and bytes; `results`: which of them may be written (None: all)."""
        spans: list[list] = []  # of the process: first, last, names, which of the buffers came first
        for turn, (name, address, size) in sorted(enumerate(buffers), key=lambda of: of[1][1]):
            if not size:
                continue
            if spans and address < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], address + size)
                spans[-1][2] += f"/{name}"
                spans[-1][3] = min(spans[-1][3], turn)
            else:
                spans.append([address, address + size, name, turn])
        place = _GAP
        self.first, self.last, self.own, self.names = [], [], [], []
        for first, last, name, _ in sorted(spans, key=lambda of: of[3]):  # the same places in each run
            place += (first - place) % 64  # aligned as the process's
            self.first.append(place)
            self.last.append(place + last - first)
            self.own.append(first)
            self.names.append(name)
            place += -(-(last - first) // 256) * 256 + _GAP
        self.bytes = np.zeros(-(-place // 256) * 256, np.uint8)
        self.shadow = Shadow(len(self.bytes))
        self.begins = np.array(self.first or [0], np.int64)
        self.ends = np.array(self.last or [0], np.int64)
        known = [results is None or not results.isdisjoint(name.split("/")) for name in self.names or [""]]
        self.written = np.array(known)

    def forget(self) -> None:
        """That anything was read or written."""
        self.shadow = Shadow(len(self.bytes))

    def placed(self, address: int) -> int:
        """Where the emulated kernel finds what is at an address of this process. 0 where nothing is."""
        for first, last, own in zip(self.first, self.last, self.own, strict=True):
            if own <= address < own + last - first:
                return _BASE + first + address - own
        return 0

    def copy_in(self) -> None:
        """Take the process's bytes."""
        for first, last, own in zip(self.first, self.last, self.own, strict=True):
            self.bytes[first:last] = _process_bytes(own, last - first)

    def copy_out(self) -> None:
        """Give back what was written."""
        for first, last, own in zip(self.first, self.last, self.own, strict=True):
            written = self.shadow.writer[first:last] != -1
            _process_bytes(own, last - first)[written] = self.bytes[first:last][written]

    def translate(self, address: int, size: int) -> None:
        """Of a tensor of this process's addresses: to those that the kernel finds there."""
        place = self.placed(address) - _BASE
        words = self.bytes[place : place + size].view(np.int64)
        words[:] = [self.placed(word) for word in words.tolist()]

    def places(self, addresses: np.ndarray, size: int, *, writes: bool = False) -> np.ndarray:
        """Places in `bytes`. Raises Fault for an access outside the buffers, or outside those for results.

        They need not be aligned: Linux sets AMD's GPUs so, and LLVM joins narrow loads where it is.
        """
        places = (addresses - np.uint64(_BASE)).view(np.int64)
        nearest = np.searchsorted(self.begins, places, "right") - 1
        bad = (nearest < 0) | (places + size > self.ends[np.maximum(nearest, 0)])
        if bad.any():
            place = int(places[bad][0])
            name, first, last = min(
                zip(self.names, self.first, self.last, strict=True),
                key=lambda of: max(of[1] - place, place - of[2]),
                default=("nothing", 0, 0),
            )
            where = f"byte {place - first:,} of `{name}`, which has {last - first:,}"
            raise Fault(f"{size} bytes at {where}")
        if writes and not self.written[nearest].all():
            name = self.names[int(nearest[~self.written[nearest]][0])]
            raise Fault(f"a store into `{name}`, which this launch only reads")
        return places


def _process_bytes(address: int, size: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)


class Shadow:
    """For each byte, which wave wrote it last and when: by the wave's count, and by barriers passed.

    `readers`: the waves of a workgroup whose reads are kept by byte, each with the wave's count then.
    """

    def __init__(self, size: int, readers: int = 0) -> None:
        self.first, self.last = size, 0  # what was written is between
        self.writer = np.full(size, -1, np.int32)
        self.written = np.zeros(size, np.int64)
        self.epoch = np.zeros(size, np.int32)
        self.reads = np.zeros((readers, size), np.int64)


@dataclass
class _Read:
    """A load of memory, kept to the end: which wave read which bytes, and barriers passed by then."""

    instruction: int
    places: np.ndarray
    waves: np.ndarray
    size: int
    epoch: np.ndarray


@dataclass
class _Wait:
    """A register that something outstanding will write: the counter, and its value by wave."""

    counter: str
    due: np.ndarray


class Machine:
    """All waves of one launch. `addresses`: where the arguments are, and the packet of the launch, if any."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        threads: int,
        kernarg: bytes,
        memory: Memory,
        addresses: tuple[int, int],
        lds: int = 0,
    ) -> None:
        groups = grid[0] * grid[1]
        self.kernel, self.memory, self.grid, self.groups = kernel, memory, grid, groups
        self.cdna = kernel.architecture == "cdna"
        self.scalars = kernel.sgprs
        lanes = kernel.wave
        self.lanes = lanes
        self.per_group = -(-threads // lanes)
        waves = self.waves = groups * self.per_group
        self.group_of = np.repeat(np.arange(groups), self.per_group)
        self.V = np.zeros((kernel.vgprs, waves, lanes), U32)
        self.undefined = np.full((kernel.vgprs, waves, lanes), 0xFFFFFFFF, U32)  # bits never written
        self.S = np.zeros((128, waves), U32)
        self.known_s = np.zeros((128, waves), np.bool_)
        self.E = np.zeros((waves, lanes), np.bool_)
        self.scc = np.zeros(waves, np.bool_)
        self.known_scc = np.zeros(waves, np.bool_)
        self.clean: set[int] = set()  # vector registers written in every lane
        self.filling: int | None = None  # within arithmetic: with what undefined bits are filled
        self.loading = ""  # the counter of a load in progress: such loads arrive in order
        self.filled = False  # whether there were some
        self.pending: dict[int, list[_Wait]] = {}  # by register; scalar ones from 1000 on
        self.counters = ("load", "store", "lds", "scalar")
        self.issued = {name: np.zeros(waves, np.int64) for name in self.counters}
        self.done = {name: np.zeros(waves, np.int64) for name in self.counters}
        self.at_barrier = {name: np.zeros(waves, np.int64) for name in ("store", "lds")}
        self.released = {name: np.zeros(waves, np.int64) for name in ("store", "lds")}
        self.epoch = np.zeros(waves, np.int32)  # barriers at which a wave has arrived
        self.reads: list[_Read] = []  # of memory
        self.pc = np.full(waves, kernel.entry, np.int64)
        self.waiting = np.zeros(waves, np.bool_)
        self.lds_bytes = max(lds, kernel.descriptor.lds)
        room = -(-max(self.lds_bytes, 4) // 64) * 64
        self.lds_stride = room
        self.lds = np.zeros(groups * room, np.uint8)
        self.lds_known = np.zeros(groups * room, np.bool_)
        self.lds_shadow = Shadow(groups * room, self.per_group)
        self.executed = Executed()
        self._start(kernarg, *addresses, threads)
        self._select(np.ones(waves, np.bool_))

    # --- the beginning -------------------------------------------------------------------------------------

    def _start(self, kernarg: bytes, address: int, packet: int, threads: int) -> None:
        of, n = self.kernel.descriptor, 0
        if self.kernel.descriptor.rsrc1 >> 12 & 0xF:
            raise Fault("a rounding mode other than to the nearest is not known here")
        if of.rsrc1 >> 16 & 0xF != 0xF:
            raise Fault("flushing denormal numbers is not known here")

        def put(words: Sequence[int]) -> None:
            nonlocal n
            for word in words:
                self.S[n] = word
                self.known_s[n] = True
                n += 1

        for bit, count, place in ((0, 4, 0), (1, 2, packet), (2, 2, 0), (3, 2, address)):
            if of.properties >> bit & 1 and place:
                put([place & 0xFFFFFFFF, place >> 32])
            elif of.properties >> bit & 1:
                n += count  # the private segment's descriptor, or a queue: unknown here
        for bit, count in ((4, 2), (5, 2), (6, 1)):
            if of.properties >> bit & 1:
                n += count
        words, skipped = of.preloaded_words
        given = np.frombuffer(kernarg[skipped * 4 : (skipped + words) * 4], U32)
        put(given.tolist())
        if n > of.rsrc2 >> 1 & 0x1F:
            raise Fault(f"{n} words for {of.rsrc2 >> 1 & 0x1F} user registers")
        n = of.rsrc2 >> 1 & 0x1F
        numbers = {7: self.group_of % self.grid[0], 8: self.group_of // self.grid[0], 9: 0}  # x, y, z
        if self.kernel.architecture == "rdna4":  # in trap registers: x in ttmp9, y and z in ttmp7
            self.S[117], self.known_s[117] = numbers[7], True
            self.S[115], self.known_s[115] = numbers[8], True
            wave = np.arange(self.waves, dtype=U32) % U32(self.per_group)
            self.S[116], self.known_s[116] = wave << U32(25), True
        else:
            for bit, number in numbers.items():
                if of.rsrc2 >> bit & 1:
                    self.S[n], self.known_s[n] = number, True
                    n += 1
        thread = np.tile(
            np.arange(self.per_group * self.lanes, dtype=U32).reshape(self.per_group, self.lanes),
            (self.groups, 1),
        )
        self.V[0], self.undefined[0] = thread, 0
        self.clean.add(0)
        self.E[:] = thread < threads

    def _select(self, chosen: np.ndarray) -> None:
        """The waves that execute the next instructions."""
        self.whole = bool(chosen.all())
        self.sel = slice(None) if self.whole else np.flatnonzero(chosen)
        self.index = np.flatnonzero(chosen)
        self._mask()

    def _mask(self) -> None:
        self.ex = self.E[self.sel]
        self.all_lanes = bool(self.ex.all())

    # --- registers -----------------------------------------------------------------------------------------

    def awaited(self, register: int) -> None:
        """Raises Fault where something outstanding still writes a register, before what `loading` loads."""
        for wait in self.pending.get(register, ()):
            if (
                wait.counter != self.loading
                and (wait.due[self.sel] > self.done[wait.counter][self.sel]).any()
            ):
                raise Fault(
                    f"{_register_name(register)} is used before the {wait.counter} counter is waited for"
                )

    def usable(self, register: int) -> None:
        """Raises Fault for a vector register that is not there, or that a load will still write."""
        if not 0 <= register < len(self.V):
            raise Fault(f"v{register} is not among the {len(self.V)} that a wave has")
        if self.pending and register in self.pending:
            self.awaited(register)

    def vector(self, register: int, bits: int = 0xFFFFFFFF, every: bool = False) -> np.ndarray:
        """Words of a register (waves, lanes). `bits`: which are used; `every`: of lanes that are off, too.

        Raises Fault where one was never written; within arithmetic, it is filled (see `defined`).
        """
        self.usable(register)
        words = self.V[register][self.sel]
        if register not in self.clean:
            undefined = self.undefined[register][self.sel] & U32(bits)
            if not every:
                undefined = np.where(self.ex, undefined, U32(0))
            if undefined.any():
                if self.filling is None:
                    raise Fault(f"{_register_name(register)} is read before it is written")
                self.filled = True
                words = words ^ (undefined & _FILLINGS[self.filling])
        return words

    def defined(self, compute: Callable[["Machine"], object]) -> tuple[object, list | None]:
        """Results of arithmetic, and which of their bits depend on bits that were never written, if any.

        Compilers let such bits go through arithmetic where they don't matter in the end. So what they are
        filled with is varied: result bits that vary are undefined.
        """
        self.filling, self.filled = 0, False
        try:
            value = compute(self)
            if not self.filled:
                return value, None
            varying = None
            for self.filling in range(1, len(_FILLINGS)):
                other = compute(self)
                parts = zip(_words_of(value), _words_of(other), strict=True)
                differing = [np.bitwise_xor(*np.broadcast_arrays(a, b)) for a, b in parts]
                varying = (
                    differing if varying is None else [a | b for a, b in zip(varying, differing, strict=True)]
                )
            return value, varying
        finally:
            self.filling = None

    def write_vector(
        self,
        register: int,
        value: np.ndarray,
        lanes: np.ndarray | None = None,
        *,
        bits: int = 0xFFFFFFFF,
        undefined: np.ndarray | None = None,
    ) -> None:
        """Set the words of lanes that are on, or of `lanes` (waves, lanes) of them.

        `bits`: which of them are written, the others are the old ones; `undefined`: bits that aren't known.
        """
        self.usable(register)
        on = True if self.all_lanes and lanes is None else self.ex if lanes is None else self.ex & lanes
        _put(self.V[register], self.sel, self.whole, value, on)
        if undefined is None and register in self.clean:
            return
        if undefined is None and bits == 0xFFFFFFFF:
            if on is True and self.whole:
                self.clean.add(register)
            undefined = U32(0)
        elif bits != 0xFFFFFFFF:
            old = self.undefined[register][self.sel] & U32(~bits & 0xFFFFFFFF)
            undefined = old if undefined is None else old | undefined & U32(bits)
        if not (undefined.ndim == 0 and undefined == 0):
            self.clean.discard(register)
        _put(self.undefined[register], self.sel, self.whole, undefined, on)

    def scalar(self, register: int) -> np.ndarray:
        """A scalar register's words by wave; unknown ones as in `vector`."""
        if register in (EXEC, EXEC + 1):
            return self._exec_words()[:, register - EXEC].copy()
        if register == SCC:
            return self._scc().astype(U32)
        if register == (124 if not self.cdna else -1):
            return np.zeros(len(self.index), U32)
        if register > 127:
            raise Fault(f"scalar source {register} is not known here")
        if self.pending and register + 1000 in self.pending:
            self.awaited(register + 1000)
        words, known = self.S[register][self.sel], self.known_s[register][self.sel]
        if not known.all():
            if self.filling is None:
                raise Fault(f"s{register} is read before it is written")
            self.filled = True
            words = np.where(known, words, words ^ _FILLINGS[self.filling])
        return words

    def scalar_pair(self, register: int) -> np.ndarray:
        """64 bits by wave. Raises Fault for a pair that begins with an odd register."""
        if register & 1:
            raise Fault(f"s{register} and the next are no pair")
        low, high = self.scalar(register), self.scalar(register + 1)
        return low.astype(U64) | high.astype(U64) << U64(32)

    def pair(self, register: int) -> np.ndarray:
        """64 bits of two vector registers, which CDNA 2 and 3 want to begin with an even one."""
        aligned(register, 2, self.kernel)
        return self.vector(register).astype(U64) | self.vector(register + 1).astype(U64) << U64(32)

    def write_scalar(self, register: int, value: np.ndarray) -> None:
        if self.scalars <= register < 106 or 108 <= register < 124 or register > 127:
            raise Fault(f"s{register} is not among those that a wave may write")
        if self.pending and register + 1000 in self.pending:
            self.awaited(register + 1000)
        if register in (EXEC, EXEC + 1):
            words = self._exec_words()
            words[:, register - EXEC] = value
            self._set_exec(words)
        elif register != (124 if not self.cdna else -1):
            self.S[register][self.sel] = value
            self.known_s[register][self.sel] = True

    def _exec_words(self) -> np.ndarray:
        words = _packed(self.ex)
        return words if self.lanes == 64 else np.concatenate([words, np.zeros_like(words)], 1)

    def _set_exec(self, words: np.ndarray) -> None:
        self.E[self.sel] = _unpacked(words, self.lanes)
        self._mask()

    def mask(self, register: int) -> np.ndarray:
        """The bits of scalar registers for each lane."""
        if register == EXEC:
            return self.ex
        if self.lanes == 64:
            return _unpacked(np.ascontiguousarray(self.scalar_pair(register)[:, None]), 64)
        return _unpacked(self.scalar(register)[:, None], 32)

    def write_mask(self, register: int, bits: np.ndarray) -> None:
        """Set the bits of lanes that are on; those of others become 0."""
        words = _packed(np.broadcast_to(bits, self.ex.shape) & self.ex)
        if register == EXEC:
            self._set_exec(words)
            return
        for i in range(self.lanes // 32):
            self.write_scalar(register + i, words[:, i])

    def _scc(self) -> np.ndarray:
        if not self.known_scc[self.sel].all():
            raise Fault("SCC is read before it is written")
        return self.scc[self.sel]

    # --- waits and barriers --------------------------------------------------------------------------------

    def issue(self, counter: str, registers: Sequence[int]) -> None:
        """An access that is counted, and the registers that it writes when it is done."""
        self.issued[counter][self.sel] += 1
        for register in registers:
            due = np.zeros(self.waves, np.int64)
            due[self.sel] = self.issued[counter][self.sel]
            waits = self.pending.setdefault(register, [])
            for wait in waits:
                if wait.counter == counter:
                    np.maximum(wait.due, due, out=wait.due)
                    break
            else:
                waits.append(_Wait(counter, due))

    def issue_store(self) -> None:
        self.issue("store", [])
        if self.cdna:  # one counter for both
            self.issued["load"][self.sel] += 1

    def wait(self, counter: str, left: int) -> None:
        """All but the last `left` accesses are done. Scalar loads end in any order: only 0 says anything."""
        if counter == "scalar" and left:
            return
        done = self.done[counter]
        done[self.sel] = np.maximum(done[self.sel], self.issued[counter][self.sel] - left)
        for register, waits in list(self.pending.items()):
            open_ones = [of for of in waits if (of.due > self.done[of.counter]).any()]
            if open_ones:
                self.pending[register] = open_ones
            else:
                del self.pending[register]

    def arrive(self) -> None:
        """What waves have done when they come to a barrier is what others see behind it.

        The waves of a workgroup share the memory pipeline of one compute unit on CDNA, so a store is seen
        after those that were issued before; on RDNA they may be on two, and a store must be waited for.
        """
        counts = self.issued if self.cdna else self.done
        self.at_barrier["store"][self.sel] = counts["store"][self.sel]
        self.at_barrier["lds"][self.sel] = self.done["lds"][self.sel]
        self.epoch[self.sel] += 1

    def _release(self) -> None:
        ended = self.pc >= len(self.kernel.code)
        ready = (self.waiting | ended).reshape(self.groups, -1).all(1)
        ready &= self.waiting.reshape(self.groups, -1).any(1)
        if ready.any():
            waves = np.repeat(ready, self.per_group) & self.waiting
            self.waiting &= ~waves
            for name, of in self.at_barrier.items():
                self.released[name][waves] = of[waves]

    def touch(
        self,
        shadow: Shadow,
        kind: str,
        places: np.ndarray,
        waves: np.ndarray,
        size: int,
        *,
        writes: bool,
        atomic: bool = False,
    ) -> None:
        """Raises Fault if another wave's access to these bytes isn't ordered before this one."""
        if not places.size:
            return
        first, last = int(places.min()), int(places.max()) + size
        lds = kind == "lds"
        if writes:
            shadow.first, shadow.last = min(shadow.first, first), max(shadow.last, last)
        elif not lds:
            self.reads.append(_Read(self.next - 1, places, waves, size, self.epoch[waves]))
            if last <= shadow.first or shadow.last <= first:
                return  # nothing was written there
        at, whose = places[:, None] + np.arange(size), waves[:, None]
        writer = shadow.writer[at]
        if not atomic and (writer == _ATOMIC).any():
            raise Fault("a race with an atomic operation on the same bytes")
        foreign = (writer >= 0) & (writer != whose)
        if foreign.any():
            who, when = writer[foreign], shadow.written[at][foreign]
            own = np.broadcast_to(whose, at.shape)[foreign]
            late = (self.group_of[who] != self.group_of[own]) | (self.released[kind][who] < when)
            if late.any():
                raise Fault(_RACE.format(int(who[late][0]), "wrote", _SPACES[kind]))
        if writes:
            shadow.writer[at] = _ATOMIC if atomic else whose
            shadow.written[at] = self.issued[kind][waves][:, None] + 1
            shadow.epoch[at] = self.epoch[waves][:, None]
            for slot in range(len(shadow.reads)):
                reader = self.group_of[waves] * self.per_group + slot
                late = (reader != waves)[:, None] & (
                    shadow.reads[slot][at] > self.released[kind][reader][:, None]
                )
                if late.any():
                    whom = int(np.broadcast_to(reader[:, None], at.shape)[late][0])
                    raise Fault(_RACE.format(whom, "reads", _SPACES[kind]))
        elif lds:
            shadow.reads[waves[:, None] % self.per_group, at] = self.issued[kind][waves][:, None] + 1

    def _judge_reads(self) -> None:
        """Raises Fault for a load of bytes that another wave wrote later without a barrier between."""
        memory, shadow = self.memory, self.memory.shadow
        written = [
            (first, last)
            for first, last in zip(memory.first, memory.last, strict=True)
            if (shadow.writer[first:last] != -1).any()
        ]
        for read in self.reads:
            low, high = int(read.places.min()), int(read.places.max()) + read.size
            if not any(low < last and first < high for first, last in written):
                continue
            at = read.places[:, None] + np.arange(read.size)
            writer = shadow.writer[at]
            foreign = (writer != -1) & (writer != read.waves[:, None])
            same_group = self.group_of[writer] == self.group_of[read.waves][:, None]
            ordered = same_group & (writer >= 0) & (shadow.epoch[at] != read.epoch[:, None])
            if (foreign & ~ordered).any():
                whom = int(writer[foreign & ~ordered][0])
                what = (
                    _RACE.format(whom, "writes", _SPACES["store"])
                    if whom >= 0
                    else "a race with an atomic operation"
                )
                raise Fault(self._where(self.kernel.code[read.instruction], what))

    # --- execution -----------------------------------------------------------------------------------------

    def run(self, act_of: Callable[[Instruction, Kernel], Act], most_steps: int = MOST_STEPS) -> Executed:
        """Until every wave has ended. `act_of` is that of `instructions`. Raises Fault."""
        code = self.kernel.code
        acts, end = self.kernel.acts, len(code)
        far = np.iinfo(np.int64).max
        times = np.zeros(end, np.int64)
        with np.errstate(all="ignore"):
            while True:
                key = np.where(self.waiting | (self.pc >= end), far, self.pc)
                at = int(key.min())
                if at == far:
                    if (self.waiting & (self.pc < end)).any():
                        raise Fault("waves wait at a barrier that others of their workgroup never reach")
                    break
                if self.executed.steps > most_steps:
                    raise Fault(self._where(code[at], "the kernel does not end"))
                here = key == at
                others = key[~here]
                until = int(others.min()) if others.size and others.min() != far else end
                self._select(here)
                self.branched = False
                while at < until and not self.branched:
                    instruction = code[at]
                    if at not in acts:
                        acts[at] = self._made(act_of, instruction)
                    times[at] += len(self.index)
                    self.executed.steps += 1
                    self.next = at + 1
                    try:
                        acts[at](self)
                    except Fault as fault:
                        raise Fault(self._where(instruction, str(fault))) from None
                    at = self.next if not self.branched else at + 1
                if not self.branched:
                    if at == end:
                        raise Fault(self._where(code[at - 1], "the code ends here without S_ENDPGM"))
                    self.pc[self.sel] = at
                if self.waiting.any():
                    self._release()
        self._judge_reads()
        for place, count in enumerate(times.tolist()):
            if count:
                self.executed.instructions[code[place].name] += count
                self.executed.by_place[place] += count
        return self.executed

    def _made(self, act_of: Callable[[Instruction, Kernel], Act], instruction: Instruction) -> Act:
        try:
            return act_of(instruction, self.kernel)
        except Fault as fault:
            raise Fault(self._where(instruction, str(fault))) from None

    def _where(self, instruction: Instruction, what: str) -> str:
        source = f" ({instruction.source})" if instruction.source else ""
        return f"{self.kernel.name}+{instruction.at:#x}{source}: {instruction.text}: {what}"


# undefined bits stay as they are, all change, or some change
_FILLINGS = np.array([0, 0xFFFFFFFF, 0x5A3C96E1, 0xC96A0F55], U32)


def _words_of(value: object) -> list[np.ndarray]:
    """Results as unsigned numbers, or whether a bit is set."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part if part.dtype == np.bool_ else part.view(np.dtype(f"u{part.itemsize}")) for part in parts]


def _put(
    rows: np.ndarray, sel: slice | np.ndarray, whole: bool, value: np.ndarray, on: np.ndarray | bool
) -> None:
    if on is True:
        rows[sel] = value
    elif whole:
        np.copyto(rows, value, where=on)
    else:
        words = rows[sel]
        np.copyto(words, value, where=on)
        rows[sel] = words


_SPACES = {"store": "bytes", "lds": "word of LDS"}
_RACE = "a race with wave {}, which {} the same {} without a barrier that waits for it"


def _register_name(register: int) -> str:
    return f"s{register - 1000}" if register >= 1000 else f"v{register}"


def aligned(register: int, count: int, kernel: Kernel) -> None:
    """Raises Fault for several vector registers that begin with an odd one where that must not be."""
    if kernel.architecture == "cdna" and count > 1 and register & 1:
        raise Fault(f"v{register} begins {count} registers, and is odd")


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=1, bitorder="little").view(U32)


def _unpacked(words: np.ndarray, lanes: int) -> np.ndarray:
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little", count=lanes).astype(np.bool_)


# --- operands ----------------------------------------------------------------------------------------------


def constant(code: int, kind: str, literal: int) -> int | None:
    """The word or two of an inline constant or a literal for a source of that kind; None for a register."""
    bits = kind[-2:] if kind[-2:] in ("16", "32", "64") else "32"
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & (0xFFFFFFFFFFFFFFFF if bits == "64" else 0xFFFFFFFF)
    if code == 248:
        return _INVERSE_2_PI[bits]
    if code in _FLOATS:
        of = {"16": np.float16, "32": np.float32, "64": np.float64}[bits]
        return int(np.array([_FLOATS[code]], of).view({"16": U16, "32": U32, "64": U64}[bits])[0])
    if code == LITERAL:
        if kind == "f64":
            return literal << 32
        return literal | 0xFFFFFFFF00000000 if kind == "i64" and literal >> 31 else literal
    return None


def scalar_source(code: int, kind: str, literal: int) -> Read:
    """Reads a scalar operand by wave, as a type."""
    of = TYPES[kind]
    value = constant(code, kind, literal)
    if value is not None:
        words = np.array([value], U64 if kind[1:] == "64" else U32)
        if kind[1:] == "16":
            words = words.astype(U16)
        fixed = words.view(of)
        return lambda m: fixed
    if kind[1:] == "64":
        return lambda m: (m.scalar_pair(code) if code != SCC else m.scalar(code).astype(U64)).view(of)
    return lambda m: m.scalar(code).view(of)


@dataclass(frozen=True)
class Modifiers:
    """What a source is changed by before the operation."""

    high: bool = False  # of 16-bit sources
    negative: bool = False
    absolute: bool = False
    lanes: Callable[[Machine, np.ndarray], np.ndarray] | None = None  # of other lanes
    part: Callable[[np.ndarray], np.ndarray] | None = None  # of SDWA


def vector_source(code: int, kind: str, literal: int, how: Modifiers = Modifiers()) -> Read:
    """Reads an operand of a vector instruction: (waves, lanes), or broadcast to that."""
    of = TYPES[kind]
    narrow, wide = kind[1:] == "16", kind[1:] == "64"
    value = constant(code, kind, literal)
    bits = 0xFFFFFFFF if not narrow else 0xFFFF0000 if how.high else 0xFFFF
    if value is not None:
        words = np.array([[value]], U64 if wide else U32)
        read = lambda m: words  # noqa: E731
    elif code >= 256:
        register = code - 256

        def read(m: Machine) -> np.ndarray:
            every = how.lanes is not None
            if wide:
                return m.pair(register)
            if every:
                return how.lanes(m, register)
            return m.vector(register, bits)

    elif wide:
        read = lambda m: m.scalar_pair(code)[:, None]  # noqa: E731
    else:
        read = lambda m: m.scalar(code)[:, None]  # noqa: E731

    def typed(m: Machine) -> np.ndarray:
        words = read(m)
        if how.part is not None:
            words = how.part(words)
        if narrow:
            words = (words >> U32(16) if how.high else words).astype(U16)
        return words.view(of)

    if not (how.negative or how.absolute):
        return typed
    if kind[0] != "f":
        raise Fault("a sign modifier of an integer is not known here")

    def signed(m: Machine) -> np.ndarray:
        values = typed(m)
        values = np.abs(values) if how.absolute else values
        return -values if how.negative else values

    return signed
