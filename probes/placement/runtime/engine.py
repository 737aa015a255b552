"""Blocks that compute on the host: what goes in comes to the host, what comes out goes back."""

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any, Final, TypeVar

import torch
from torch import is_grad_enabled, nn

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import MOST_ROWS
from probes.placement.runtime.buffers import DeviceBuffer, StoredBlock, StoredEntry, raw_view
from probes.placement.runtime.offloaded import (
    CpuBlock,
    MovingBlock,
    OffloadedParameter,
    PackedOperations,
    PackedParameter,
    ParameterSwap,
    Piece,
    WeightAccess,
    prepare_block,
)
from probes.placement.runtime.packed_tables import PackedTable
from probes.placement.runtime.streams import Event, Stopwatches, Stream, Streams
from probes.placement.runtime.weight_sources import WeightSource

# the innermost transform under way, or None; each call of a block asks
active_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack


Made = TypeVar("Made")


def _nothing() -> None:
    """There is nothing to put in order."""


class Turns:
    """A lock that a thread takes in its outermost call and in none within it, so nothing is counted.

    Who takes it asks `mine()` first, and ends the turn only where it wasn't its own already. So what an
    interruption at any moment leaves is known: `give_back` is right whether or not the turn has begun.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self.mine: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # as conditions ask
        self.wait: Callable[[], object] = lock.acquire
        self.end: Callable[[], None] = lock.release
        self._acquire = lock.acquire

    def begin(self) -> bool:
        """Take the turn unless another thread has it."""
        return self._acquire(blocking=False)

    def give_back(self, mine: bool) -> None:
        """End the turn, if it is this thread's and was not before."""
        if not mine and self.mine():
            self.end()

    def taken(self, work: Callable[[], Made], failed: Callable[[], None] = _nothing) -> Made:
        """What `work` returns in a turn of this thread, which is waited for.

        `failed` is called before the turn ends where `work` failed, or was interrupted.
        """
        mine = self.mine()
        try:
            if not mine:
                self.wait()
            made = work()
            if not mine:
                self.end()
        except BaseException:
            try:
                if not mine and self.mine():
                    failed()
            finally:
                self.give_back(mine)
            raise
        return made


class CallOrder:
    """The order of definition until calls show another.

    A successor that has just changed isn't believed until it has come twice: blocks that are called in a new
    order in each pass, such as experts, would otherwise be fetched for nothing.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next: dict[tuple[int, int], int] = {}
        self._doubted: set[tuple[int, int]] = set()
        self.before, self.last = -1, count - 1  # as if a pass had just ended
        self.surprises = 0  # calls that came in another order than expected

    def after(self, pair: tuple[int, int]) -> int | None:
        """The block after two that came one after the other; None when that isn't known."""
        if pair in self._doubted:
            return None
        return self._next.get(pair, (pair[1] + 1) % self._count)

    def learn(self, one: int) -> bool:
        """A block is called. Whether it was the expected one."""
        pair = (self.before, self.last)
        known = self._next.get(pair)
        if known == one and not self._doubted:  # as in the pass before
            self.before, self.last = self.last, one
            return True
        expected = known if known is not None else (self.last + 1) % self._count
        if known is not None and known != one:
            self._doubted.add(pair)
        else:
            self._doubted.discard(pair)
        self._next[pair] = one
        self.before, self.last = self.last, one
        self.surprises += expected != one
        return expected == one


LookaheadState = tuple[tuple[int, int], int, int, frozenset[int]]


class Lookahead:
    """How far ahead of the calls one pool has got. `due` was fetched ahead and isn't used yet.

    That are blocks, or pieces of blocks, of which `begun` were fetched of the next block. `stuck`: nothing
    can be begun before one of `due` is used, or a call ends; asking again would only cost the host.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self.at = (order.before, order.last)  # the last two blocks that it came to
        self.lead = 0  # calls
        self.begun = 0
        self.due: set[int] = set()
        self.stuck = False

    def follow(self, *, expected: bool) -> None:
        """A block has been called: the walk is never behind it, and begins there after a surprise."""
        self.lead -= 1
        if not expected:
            self.due.clear()
        if not expected or self.lead < 0:
            self.at, self.lead, self.begun = (self._order.before, self._order.last), 0, 0
            self.stuck = False

    def used(self, one: int) -> None:
        """It is no longer needed."""
        self.due.discard(one)
        self.stuck = False

    def state(self) -> "LookaheadState":
        """Where it is, to `resume` there later."""
        return self.at, self.lead, self.begun, frozenset(self.due)

    def resume(self, state: "LookaheadState") -> None:
        """Be where it was."""
        self.at, self.lead, self.begun = state[:3]
        self.due, self.stuck = set(state[3]), False

    def step(self, one: int) -> None:
        """Go on to the next block."""
        self.at = (self.at[1], one)
        self.lead += 1
        self.begun = 0


_IS_TRACED: Final[Callable[[], object]] = getattr(torch._C, "_get_tracing_state", torch.jit.is_tracing)


_MODES: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", int)


class Engine:
    """The moving blocks of one placed model."""

    def __init__(
        self, streams: Streams, *, ahead: int, fast: bool, work: PackedOperations, turns: Turns
    ) -> None:
        self.streams = streams
        self.moving: list[MovingBlock] = []
        self.cpu_blocks: list[CpuBlock] = []
        self._pieces = 0  # of all blocks
        self.order = CallOrder(1)
        self.turns = turns
        self.changing = False  # a step is under way; found so by the next one: it was interrupted
        self.epoch = 0  # of what the buffers hold
        self._ahead = ahead
        self._fast = fast
        self._fused = False
        self._work = work
        self._copies, self._unpacks = Lookahead(self.order), Lookahead(self.order)
        self._staging: set[int] = set()  # by identity
        self._copies_begun = 0  # ahead of calls
        self._decode_buffers: set[int] = set()  # by identity
        self._unpacks_ahead = False  # on the unpack stream, beside the compute stream
        self.watches: Stopwatches | None = None  # while a pass is measured
        self.recording = False  # a pass is being recorded as a graph

    def add(
        self,
        stored: StoredBlock,
        weight_source: WeightSource,
        staging: Sequence[DeviceBuffer],
        decode_buffer: DeviceBuffer | None,
        *,
        whole: torch.Tensor | None = None,
    ) -> MovingBlock:
        """Take a block over. Its parameters become offloaded ones until it is called.

        `staging buffers`: of its pieces, none if it is in VRAM. `whole`: a table's weights, as the device reads them in
        host memory.
        """
        one = MovingBlock(len(self.moving), stored, weight_source, decode_buffer)
        one.trainable = any(item.entry.trains for item in stored.items)
        offloaded = {id(item.entry): self._lazy(one, item, whole) for item in stored.items}
        prepare_block(one, staging, self._pieces, self._work, fast=self._fast, offloaded=offloaded)
        self.moving.append(one)
        self._pieces += len(one.pieces)
        self._staging.update(map(id, staging))
        if decode_buffer is not None:
            self._decode_buffers.add(id(decode_buffer))
            self._unpacks_ahead = len(self._decode_buffers) > 1
        return one

    def add_cpu_block(self, block: Block) -> CpuBlock:
        """Take over a block that computes on the CPU and has its weights there."""
        one = CpuBlock(block, any(entry.trains for entry in block.entries))
        self.cpu_blocks.append(one)
        offloaded = {}
        for entry in block.entries:
            owner, name = entry.owners[0]
            values = partial(_copied, owner._parameters[name])
            offloaded[id(entry)] = OffloadedParameter.of(self._away(one, entry, values))
        one.drain(offloaded)
        return one

    def _lazy(self, one: MovingBlock, item: StoredEntry, whole: torch.Tensor | None) -> OffloadedParameter:
        access = self._away(one, item.entry, partial(self._value, one, item))
        if not one.stored.table:
            return OffloadedParameter.of(access)
        table = self._table(one, item, whole)
        return PackedParameter.of(replace(access, product=table.product, lookup=table.lookup))

    def _away(
        self, one: MovingBlock | CpuBlock, entry: Entry, values: Callable[[torch.device], torch.Tensor]
    ) -> WeightAccess:
        """`values`: those of the entry on a device."""

        def wants(gradients: bool) -> None:
            one.wanted[id(entry)] = gradients
            one.trainable |= gradients

        return WeightAccess(
            entry.name,
            outline=raw_view(entry, torch.empty(entry.n_bytes, dtype=torch.uint8, device="meta")),
            device=self.streams.device,
            fetch=partial(values, self.streams.device),
            home=partial(values, torch.device("cpu")),
            wants=wants,
            attributes=vars(entry.parameter),
        )

    def _table(self, one: MovingBlock, item: StoredEntry, whole: torch.Tensor | None) -> PackedTable:
        flat = one.weight_source.whole()
        room = flat[one.stored.n_bytes - one.stored.room :][: one.stored.room]
        return PackedTable(
            item.packed(flat),
            room,
            unpack=self._work.unpack,
            fused=self._work.linear,
            fast=self._fast,
            whole=whole,
        )

    def begin(self) -> None:
        """All blocks are there: fetch ahead for a first pass."""
        if self.moving:
            self.order = CallOrder(len(self.moving))
            self._restart()
            self.streams.finish()  # what has been written to VRAM is there for every stream
            self._advance()

    def _restart(self) -> None:
        self._copies, self._unpacks = Lookahead(self.order), Lookahead(self.order)

    # A block's call

    def enter(self, one: MovingBlock, args: tuple[Any, ...], kwargs: dict[str, Any], *, mine: bool) -> None:
        """Before a call. Raises PlacementError for training, and while another thread runs the model.

        `mine`: the turn is this thread's already.
        """
        if _IS_TRACED() or (_MODES() and _is_traced_by_modes()):
            raise PlacementError(
                "a placed model can't be traced: the trace would keep addresses at which weights come and go",
                "trace it before it is placed, or call remove() of the handle",
            )
        if is_grad_enabled():
            refuse_training(one.name, one.stored.block.modules, args, kwargs, trainable=one.trainable)
        if not mine and not self.turns.begin():
            raise _no_turn_error(one.name)
        if self.changing:
            self._mend()
        self.changing = True
        if not one.depth:
            self._bring(one, args, kwargs)
        one.depth += 1
        self.changing = False

    def leave(self, one: MovingBlock) -> None:
        """After a call."""
        if self.changing:
            self._mend()
        self.changing = True
        one.depth -= 1
        if not one.depth:
            assert one.inside is not None
            one.inside.clear()
            if one.through or self._unpacks_ahead:
                self._release(one)
            one.apart = False
            self._advance()
        self.changing = False

    def abandon(self, one: MovingBlock, depth: int, *, mine: bool) -> None:
        """After a call that failed, or was interrupted anywhere: `depth` calls of the block are under way.

        `mine`: the turn was this thread's before. What an interrupted step did to the buffers is put in order
        before the next one.
        """
        if not self.turns.mine():
            return  # another thread runs the model, or the call has ended
        try:
            if one.depth > depth and not self.changing:
                self.leave(one)
        finally:
            if self.changing:
                one.depth = depth
                if not depth:
                    one.put_away()
            self.turns.give_back(mine)

    def enter_cpu_block(self, one: CpuBlock, *, mine: bool) -> None:
        """Before a call of a block that computes on the CPU. Raises PlacementError as `enter` does."""
        if is_grad_enabled():
            refuse_training(one.block.name, one.block.modules, (), {}, trainable=one.trainable)
        if not mine and not self.turns.begin():
            raise _no_turn_error(one.block.name)
        if not one.depth:
            one.exchange.bring()
        one.depth += 1

    def leave_cpu_block(self, one: CpuBlock) -> None:
        """After such a call."""
        one.depth -= 1
        if not one.depth:
            one.exchange.clear()

    def abandon_cpu_block(self, one: CpuBlock, depth: int, *, mine: bool) -> None:
        """After such a call that failed, as `abandon`."""
        if not self.turns.mine():
            return
        try:
            one.depth = depth
            if not depth:
                one.exchange.clear()
        finally:
            self.turns.give_back(mine)

    def abandon_all(self) -> None:
        """No call is under way any more, even if one couldn't be abandoned."""
        for home in self.cpu_blocks:
            home.depth = 0
            home.exchange.clear()
        for one in self.moving:
            if one.depth:
                self.changing, one.depth = True, 0
                one.put_away()

    def _mend(self) -> None:
        """Forget what an interrupted step noted: buffers hold what calls under way read, or nothing."""
        self.streams.finish()
        for one in self.moving:
            one.weight_source.recover()
        for buffer in self.buffers:
            buffer.forget()
            if buffer.holds is not None and not buffer.holds.depth:
                buffer.holds = None
        self._restart()
        self.epoch += 1
        self.changing = False

    def _release(self, one: MovingBlock) -> None:
        """Its call ends: what it read may be overwritten once the compute stream gets here."""
        self._copies.stuck = False
        used = None if one.apart else one.used()
        if used is not None and (self._unpacks_ahead or used is not one.decode_buffer):
            used.computed = used.events[1]
            self.streams.compute.record(used.computed)

    def _bring(self, one: MovingBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.epoch += 1
        if self._decode_buffers:
            self.streams.compute.follow()
        expected = self.order.learn(one.index)
        if self._staging:
            self._copies.follow(expected=expected)
        if self._unpacks_ahead:
            self._unpacks.follow(expected=expected)
        if self._fast:
            self._fused = rows_of(args, kwargs) <= MOST_ROWS
        one.fused = self._fused and one.products is not None
        if self._in_use_by_another(one):
            one.apart = True
            one.inside = self._apart(one)
            one.inside.bring()
            return
        used = one.used()
        self._fetch(one, used)
        for piece, _ in one.through:
            self._copies.used(piece.index)
        if self._unpacks_ahead:
            self._unpacks.used(one.index)
        elif one.through and one.through[0][1].holds is not one.pieces[0]:
            self._copy_ahead()  # it has been unpacked from its staging buffers
        if used is not None and used.filled is not None:
            if self.watches is None:
                self.streams.compute.wait(used.filled)
            else:
                self.watches.wait(self.streams.compute, used.filled)
        one.inside = one.products if one.fused and one.products is not None else one.unpacked
        if self._work.reads is not None:
            self._work.reads(one.name, _memory_read_by(one, one.inside))
        one.inside.bring()

    def _in_use_by_another(self, one: MovingBlock) -> bool:
        decode_buffer = None if one.fused else one.decode_buffer
        if decode_buffer is not None and _is_in_use(decode_buffer, one, ()):
            return True
        return (
            any(_is_in_use(staging_buffer, piece, ()) for piece, staging_buffer in one.through)
            if one.through
            else False
        )

    # The steps before it

    def _fetch(self, one: MovingBlock, used: DeviceBuffer | None) -> None:
        """Hand over the steps that are still needed to bring a block into the buffer that it is read from."""
        if used is not None and used is one.decode_buffer:
            if used.holds is not one:
                self._unpack(one, used)
        elif used is not None and used.holds is not one.pieces[0]:
            self._copy(one.pieces[0], used)

    def _copy(self, one: Piece, staging_buffer: DeviceBuffer) -> None:
        if staging_buffer.holds is not None:
            self._copies.used(staging_buffer.holds.index)
        stream = self.streams.copy
        if staging_buffer.computed is not None:
            stream.wait(staging_buffer.computed)
        if staging_buffer.unpacked is not None:
            stream.wait(staging_buffer.unpacked)
        staging_buffer.holds = None  # it holds neither block if what follows fails
        assert one.target is not None
        if self.watches is None:
            one.weight_source.send(one.target, stream)
        else:
            self.watches.copy(partial(one.weight_source.send, one.target, stream), one.target.numel(), stream)
        staging_buffer.filled = staging_buffer.events[0]
        stream.record(staging_buffer.filled)
        if self.recording and len(self._staging) == 1:
            self.streams.end_stream()
        staging_buffer.holds = one

    def _unpack(self, one: MovingBlock, decode_buffer: DeviceBuffer) -> None:
        if decode_buffer.holds is not None:
            self._unpacks.due.discard(decode_buffer.holds.index)
        stream = self.streams.unpack if self._unpacks_ahead else self.streams.compute
        if decode_buffer.computed is not None:
            stream.wait(decode_buffer.computed)
        decode_buffer.holds = None
        for piece in one.pieces:
            self._unpack_piece(piece, stream)
        decode_buffer.forget()
        if self._unpacks_ahead:
            decode_buffer.filled = decode_buffer.events[0]
            stream.record(decode_buffer.filled)
        decode_buffer.holds = one

    def _unpack_piece(self, one: Piece, stream: Stream) -> None:
        """Unpack it from its staging buffer, which is free for the next one then."""
        staging_buffer = one.staging_buffer
        if staging_buffer is not None and staging_buffer.holds is not one:
            self._copy(one, staging_buffer)
        if staging_buffer is not None and staging_buffer.filled is not None:
            stream.wait(staging_buffer.filled)
        if one.unpackings == 1 and one.written is not None:
            one.unpack = self.streams.bundled(one.unpack, one.written)
        one.unpackings += 1
        if self.watches is None:
            stream.run(one.unpack)
        else:
            self.watches.unpack(one.unpack, stream)
        if staging_buffer is not None:
            staging_buffer.holds, staging_buffer.unpacked = None, staging_buffer.events[2]
            stream.record(staging_buffer.unpacked)
            self._copies.used(one.index)

    def advance(self) -> None:
        """Begin what comes next before a block computes on the CPU, unless another thread runs the model."""
        if not self.moving or active_transform() is not None:
            return
        mine = self.turns.mine()
        try:
            if mine or self.turns.begin():
                if self.changing:
                    self._mend()
                self.changing = True
                self._advance()
                self.changing = False
                if not mine:
                    self.turns.end()
        except BaseException:
            self.turns.give_back(mine)
            raise

    def _advance(self) -> None:
        """Begin what comes next, as far as buffers are free."""
        if self._unpacks_ahead:
            self._unpack_ahead()
        if self._staging and not self._copies.stuck and self._copy_ahead() and self._unpacks_ahead:
            self._unpack_ahead()

    def _next(self, walk: Lookahead) -> int | None:
        """The block to begin next; None when enough is begun, or it isn't known."""
        if len(walk.due) >= self._ahead:
            walk.stuck = True
            return None
        return self.order.after(walk.at) if walk.lead < len(self.moving) else None

    def _copy_ahead(self) -> bool:
        """Whether a copy was begun."""
        walk, before = self._copies, self._copies_begun
        for _ in self.moving:
            index = self._next(walk)
            if index is None:
                break
            through = self.moving[index].through
            if through and not all(starmap(self._begun, through[walk.begun :])):
                break
            walk.step(index)
        return self._copies_begun > before

    def _begun(self, one: Piece, staging_buffer: DeviceBuffer) -> bool:
        """Whether a piece is on its way to its staging buffer."""
        walk = self._copies
        one.weight_source.announce()
        if one.index in walk.due or one.depth or _is_in_use(staging_buffer, one, walk.due):
            walk.stuck = True
            return False
        if staging_buffer.holds is not one:
            if not one.weight_source.ready():
                return False
            self._copy(one, staging_buffer)
            self._copies_begun += 1
        walk.due.add(one.index)
        walk.begun += 1
        return True

    def _unpack_ahead(self) -> None:
        walk = self._unpacks
        for _ in self.moving:
            index = self._next(walk)
            if index is None:
                return
            one = self.moving[index]
            decode_buffer = one.decode_buffer
            if decode_buffer is not None and not (self._fused and one.products is not None):
                if index in walk.due or one.depth or _is_in_use(decode_buffer, one, walk.due):
                    return
                if decode_buffer.holds is not one:
                    if any(staging_buffer.holds is not piece for piece, staging_buffer in one.through):
                        return
                    self._unpack(one, decode_buffer)
                walk.due.add(index)
            walk.step(index)

    # Reads outside calls

    def _apart(self, one: MovingBlock) -> ParameterSwap:
        """A block's parameters with values in memory of their own, on the device."""
        source = one.weight_source.whole().to(self.streams.device)
        made = {
            id(item.entry): item.entry.like(self._read(item, item.bytes(source))) for item in one.stored.items
        }
        places = one.unpacked.places
        return ParameterSwap(places, [made[id(place.entry)] for place in places])

    def _value(self, one: MovingBlock, item: StoredEntry, device: torch.device) -> torch.Tensor:
        """One tensor in memory of its own.

        No turn is waited for: nothing writes what is read, and the thread whose turn it is may wait for
        this one.
        """
        return self._read(item, item.bytes(one.weight_source.whole()).to(device))

    def _read(self, item: StoredEntry, source: torch.Tensor) -> torch.Tensor:
        """A tensor from its bytes, in memory of its own."""
        flat = torch.empty(item.entry.n_bytes, dtype=torch.uint8, device=source.device)
        item.write(source, flat.view(item.entry.dtype), self._work.unpack)
        return raw_view(item.entry, flat)

    def taken_back(self, one: MovingBlock) -> Iterator[tuple[Entry, torch.Tensor]]:
        """A packed block's values, which last until the next one's: unpacked where calls unpack them.

        VRAM may be full, so nothing is allocated there. Nothing for a block without a decode buffer.
        """
        if one.decode_buffer is None or all(item.entry.converts for item in one.stored.items):
            return  # converting back may lose bits: the host unpacks them
        one.fused = False
        self._fetch(one, one.used())
        self.streams.finish()
        for place in (place for place in one.unpacked.places if not place.entry.converts):
            yield place.entry, place.present.data

    def clear(self) -> None:
        """Forget all blocks and buffers, which refer to each other: their memory is free at once."""
        for buffer in self.buffers:
            buffer.holds = None
            buffer.forget()
        for one in self.moving:
            one.forget()
        self.moving.clear()
        self.cpu_blocks.clear()
        self.streams.forget()

    # What a recorded pass needs

    @property
    def buffers(self) -> list[DeviceBuffer]:
        """Every staging buffer and decode buffer."""
        found = [
            buffer
            for one in self.moving
            for buffer in (*one.staging, one.decode_buffer)
            if buffer is not None
        ]
        return list(dict.fromkeys(found))

    def join(self) -> None:
        """Let the compute stream wait for all that has been begun with the buffers."""
        for buffer in self.buffers:
            for event in (buffer.filled, buffer.unpacked, buffer.computed):
                if event is not None:
                    self.streams.compute.wait(event)

    def drain(self) -> None:
        """Wait until every stream is done; no event has to be waited for afterwards."""
        if self.changing:
            self._mend()
        self.streams.finish()
        for buffer in self.buffers:
            buffer.forget()

    def state(self) -> "EngineState":
        """What the buffers hold, and how far the streams are ahead."""
        order = (self.order.before, self.order.last)
        holds = tuple(buffer.holds for buffer in self.buffers)
        return EngineState(holds, order, self._copies.state(), self._unpacks.state())

    def resume(self, state: "EngineState", done: Event | None) -> None:
        """The buffers hold what they held then, once `done` is reached."""
        for buffer, held in zip(self.buffers, state.holds, strict=True):
            buffer.holds = held
            buffer.filled = buffer.computed = buffer.unpacked = done
        self.order.before, self.order.last = state.order
        self._copies.resume(state.copies)
        self._unpacks.resume(state.unpacks)
        self.epoch += 1

    def reach(self, state: "EngineState") -> None:
        """Bring the buffers to hold what they held then, and let the compute stream wait for all of them."""
        if self.changing:
            self._mend()
        if self._decode_buffers:
            self.streams.compute.follow()
        self.order.before, self.order.last = state.order
        wanted = [(held, buffer) for buffer, held in zip(self.buffers, state.holds, strict=True)]
        for held, buffer in wanted:
            if isinstance(held, MovingBlock) and buffer.holds is not held:
                self._unpack(held, buffer)
        for held, buffer in wanted:
            if isinstance(held, Piece) and buffer.holds is not held:
                self._copy(held, buffer)
        self._copies.resume(state.copies)
        self._unpacks.resume(state.unpacks)
        for buffer, before in zip(self.buffers, state.holds, strict=True):
            buffer.holds = before
        self.join()


@dataclass(frozen=True)
class EngineState:
    """What the buffers hold at the beginning or end of a pass."""

    holds: tuple[MovingBlock | Piece | None, ...]
    order: tuple[int, int]
    copies: LookaheadState
    unpacks: LookaheadState


def _copied(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    return parameter.detach().to(device)


def _is_traced_by_modes() -> bool:
    """Whether operations are noted by make_fx, or done on tensors without values."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def rows_of(args: Iterable[Any], kwargs: dict[str, Any]) -> int:
    """The rows of the first input that is a floating-point tensor; 0 where there is none."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            if one.is_nested:  # it has no shape: at most as many rows as numbers
                return int(one.numel())
            return int(one.numel() // max(one.shape[-1], 1)) if one.dim() else 1
    return 0


def refuse_training(
    name: str, modules: Iterable[nn.Module], args: Iterable[Any], kwargs: dict[str, Any], *, trainable: bool
) -> None:
    """Raise PlacementError where gradients are wanted: of an input, or of weights in training mode."""
    wanted = any(isinstance(one, torch.Tensor) and one.requires_grad for one in (*args, *kwargs.values()))
    if wanted or (trainable and any(module.training for module in modules)):
        raise training_error(name)


def _no_turn_error(name: str) -> PlacementError:
    return PlacementError(
        f"{name} was called while another thread runs this placed model",
        "call the model as a whole, for which threads wait, or place a model for each thread",
    )


def training_error(name: str) -> PlacementError:
    return PlacementError(
        f"{name or 'the model'} was called with gradients enabled: a placed model can't be trained",
        "call it under torch.inference_mode(), or eval() it; to train it, call remove() of the handle",
    )


def _memory_read_by(one: MovingBlock, inside: ParameterSwap) -> list[torch.Tensor]:
    """The memory of buffers that a call is about to read."""
    values = [place.present for place in inside.places]
    read = [value.data for value in values if not isinstance(value, OffloadedParameter)]
    if one.fused and (target := one.pieces[0].target) is not None:
        read.append(target)
    return read


def _is_in_use(buffer: DeviceBuffer, one: MovingBlock | Piece, due: Container[int]) -> bool:
    """Whether the buffer holds another block that is in use, or fetched ahead and not used yet."""
    held = buffer.holds
    return held is not None and held is not one and (held.depth > 0 or held.index in due)
