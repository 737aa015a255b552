"""Runs the moving blocks of a placed model: has each block's weights where its call reads them, in time.

The engine executes the schedule that `planner/simulation.py` models. A block that moves has three steps:
*copy* (from its weight source to a staging buffer), *unpack* (from there, or from packed bytes in VRAM, to a
decode buffer) and *compute* (the module's own forward). The last two are on the compute stream, in the order
of calls: nearly as much is lost as gained by unpacking beside computing (decisions 70 and 141). Copies have a
stream of their own, and events order the two.
The n-th block of a pool always uses buffer n modulo the pool's size. After each call the next blocks are
begun, in the order of the passes before and as far as buffers are free; a block that comes unexpectedly is
fetched at once. The simulation predicts when each step begins and ends under these rules, and the engine
follows the same rules without a clock: what may begin is begun. They are:

- A copy into a staging buffer waits until the block before in that buffer has been unpacked, or computed.
- A packed block may be larger than a staging buffer. It then goes through several, piece by piece.
- Unpacking waits for its copy; a computation for its block's last step.
- A pass that is replayed as a graph ends with the copying of the next pass's first blocks.

Parameters are at fixed addresses, since a block always uses the same buffers: so a pass can be captured
(`capture.py`).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from sys import maxsize
from typing import Any, Final

import torch
from torch import is_grad_enabled, nn

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import MOST_ROWS
from probes.placement.runtime.buffers import DeviceBuffer, Occupant, StoredBlock, StoredEntry, room_for
from probes.placement.runtime.call_order import CallOrder, Lookahead, LookaheadState, Turns
from probes.placement.runtime.kept_weights import count_references, require_let_go
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
from probes.placement.runtime.streams import Event, Stopwatches, Streams
from probes.placement.runtime.weight_sources import WeightSource

# The innermost functorch transform under way, or None. Each call of a block asks.
active_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack
_IS_TRACED: Final[Callable[[], object]] = getattr(torch._C, "_get_tracing_state", torch.jit.is_tracing)
_MODES: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", int)


class Engine:
    """The moving blocks of one placed model."""

    def __init__(
        self,
        streams: Streams,
        *,
        ahead: int,
        fast: bool,
        work: PackedOperations,
        turns: Turns,
        wanted: Callable[[Entry, bool], None],
    ) -> None:
        self.streams = streams
        self._wanted = wanted  # notes whether gradients of a parameter are wanted, which counts afterwards
        self.moving: list[MovingBlock] = []
        self.cpu_blocks: list[CpuBlock] = []
        self._pieces = 0  # of all blocks
        self.order = CallOrder(1)
        self.turns = turns
        self.changing = False  # a step is under way; found so by the next one: it was interrupted
        self.epoch = 0  # of what the buffers hold
        self._ahead = ahead
        self._fast = fast
        self.work = work
        self._copies = Lookahead(self.order)
        self._staging: set[int] = set()  # by identity
        self._unpacks = False  # whether any block has a decode buffer
        self.watches: Stopwatches | None = None  # while a pass is measured
        self.recording = False  # a pass is being recorded as a graph

    @contextmanager
    def watched(self) -> Iterator[Stopwatches]:
        """Time the steps of each stream meanwhile."""
        self.watches = Stopwatches(self.streams)
        try:
            yield self.watches
        finally:
            self.watches = None

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

        `staging` has a buffer for each of its pieces, and is empty for a block in VRAM. `whole`: a table's
        weights, as the device reads them in host memory.
        """
        block = MovingBlock(len(self.moving), stored, weight_source, decode_buffer)
        block.trainable = any(item.entry.trains for item in stored.items)
        offloaded = {id(item.entry): self._offloaded(block, item, whole) for item in stored.items}
        prepare_block(block, staging, self._pieces, self.work, fast=self._fast, offloaded=offloaded)
        self.moving.append(block)
        self._pieces += len(block.pieces)
        self._staging.update(map(id, staging))
        self._unpacks |= decode_buffer is not None
        return block

    def add_cpu_block(self, block: Block) -> CpuBlock:
        """Take over a block that computes on the CPU and has its weights there."""
        cpu_block = CpuBlock(block, any(entry.trains for entry in block.entries))
        self.cpu_blocks.append(cpu_block)
        offloaded = {}
        for entry in block.entries:
            owner, name = entry.owners[0]
            values = partial(_copied, owner._parameters[name])
            offloaded[id(entry)] = OffloadedParameter.of(self._access(cpu_block, entry, values))
        cpu_block.install(offloaded)
        return cpu_block

    def _offloaded(
        self, block: MovingBlock, item: StoredEntry, whole: torch.Tensor | None
    ) -> OffloadedParameter:
        access = self._access(block, item.entry, partial(self._value, block, item))
        if not block.stored.table:
            return OffloadedParameter.of(access)
        table = self._table(block, item, whole)
        return PackedParameter.of(replace(access, product=table.product, lookup=table.lookup))

    def _access(
        self, block: MovingBlock | CpuBlock, entry: Entry, values: Callable[[torch.device], torch.Tensor]
    ) -> WeightAccess:
        """How an offloaded parameter gets its values; `values` returns them on a device."""

        def wants(gradients: bool) -> None:
            self._wanted(entry, gradients)
            block.trainable |= gradients

        return WeightAccess(
            entry.name,
            outline=room_for(entry, "meta"),
            device=self.streams.device,
            fetch=partial(values, self.streams.device),
            fetch_to_host=partial(values, torch.device("cpu")),
            wants=wants,
            attributes=vars(entry.parameter),
        )

    def _table(self, block: MovingBlock, item: StoredEntry, whole: torch.Tensor | None) -> PackedTable:
        flat = block.weight_source.whole()
        room = flat[block.stored.n_bytes - block.stored.room :][: block.stored.room]
        return PackedTable(
            item.packed(flat),
            room,
            unpack=self.work.unpack,
            fused=self.work.linear,
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
        self._copies = Lookahead(self.order)

    # A block's call

    def enter(
        self, block: MovingBlock, args: tuple[Any, ...], kwargs: dict[str, Any], *, had_turn: bool
    ) -> None:
        """Before a call. Raises PlacementError for training, and while another thread runs the model.

        `had_turn`: the turn is this thread's already.
        """
        if _IS_TRACED() or (_MODES() and _is_traced_by_modes()):
            raise PlacementError(
                "a placed model can't be traced: the trace would keep addresses at which weights come and go",
                "trace it before it is placed, or call remove() of the handle",
            )
        if is_grad_enabled():
            refuse_training(block.name, block.stored.block.modules, args, kwargs, trainable=block.trainable)
        if not had_turn and not self.turns.begin():
            raise _no_turn_error(block.name)
        if self.changing:
            self._mend()
        self.changing = True
        if not block.depth:
            self._bring(block, args, kwargs)
        block.depth += 1
        self.changing = False

    def leave(self, block: MovingBlock) -> None:
        """Record that a call of the block has ended."""
        if self.changing:
            self._mend()
        self.changing = True
        block.depth -= 1
        if not block.depth:
            assert block.inside is not None
            block.inside.clear()
            if not block.apart and (block.checks or block.uses() > block.references[0]):
                require_let_go(block)
            if block.through:
                self._release(block)
            block.apart = False
            self._advance()
        self.changing = False

    def abandon(self, block: MovingBlock, depth: int, *, had_turn: bool) -> None:
        """After a call that failed, or was interrupted anywhere: `depth` calls of the block are under way.

        `had_turn`: the turn was this thread's before. What an interrupted step did to the buffers is put in
        order before the next one.
        """
        if not self.turns.mine():
            return  # another thread runs the model, or the call has ended
        try:
            if block.depth > depth and not self.changing:
                block.references = maxsize, maxsize  # the error's frames have some
                self.leave(block)
        finally:
            if self.changing:
                block.depth = depth
                if not depth:
                    block.put_away()
            self.turns.give_back(had_turn)

    def enter_cpu_block(self, block: CpuBlock, *, had_turn: bool) -> None:
        """Before a call of a block that computes on the CPU. Raises PlacementError as `enter` does."""
        if is_grad_enabled():
            refuse_training(block.block.name, block.block.modules, (), {}, trainable=block.trainable)
        if not had_turn and not self.turns.begin():
            raise _no_turn_error(block.block.name)
        if not block.depth:
            block.swap.bring()
        block.depth += 1

    def leave_cpu_block(self, block: CpuBlock) -> None:
        """After a call of a block that computes on the CPU."""
        block.depth -= 1
        if not block.depth:
            block.swap.clear()

    def abandon_cpu_block(self, block: CpuBlock, depth: int, *, had_turn: bool) -> None:
        """After a call of a block on the CPU that failed: `depth` calls of it are still under way."""
        if not self.turns.mine():
            return
        try:
            block.depth = depth
            if not depth:
                block.swap.clear()
        finally:
            self.turns.give_back(had_turn)

    def abandon_all(self) -> None:
        """After a pass that failed: none of its calls is under way, even if one couldn't be abandoned."""
        for cpu_block in self.cpu_blocks:
            cpu_block.depth = 0
            cpu_block.swap.clear()
        for block in self.moving:
            if block.depth:
                self.changing, block.depth = True, 0
                block.put_away()

    def _mend(self) -> None:
        """Forget what an interrupted step noted: buffers hold what calls under way read, or nothing."""
        self.streams.finish()
        for block in self.moving:
            block.weight_source.recover()
        for buffer in self.buffers:
            buffer.forget()
            if buffer.holds is not None and not buffer.holds.depth:
                buffer.holds = None
        self._restart()
        self.epoch += 1
        self.changing = False

    def _release(self, block: MovingBlock) -> None:
        """At the end of its call: what it read may be overwritten once the compute stream gets here."""
        self._copies.stuck = False
        used = None if block.apart else block.used()
        if used is not None and used is not block.decode_buffer:
            used.computed = used.events[1]
            self.streams.compute.record(used.computed)

    def _bring(self, block: MovingBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.epoch += 1
        if self._unpacks:
            self.streams.compute.follow()
        expected = self.order.learn(block.index)
        if self._staging:
            self._copies.follow(expected=expected)
        block.fused = self._fast and block.products is not None and rows_of(args, kwargs) <= MOST_ROWS
        if self._in_use_by_another(block):
            block.apart = True
            block.inside = self._apart(block)
            block.inside.bring()
            return
        used = block.used()
        self._fetch(block, used)
        for piece, _ in block.through:
            self._copies.used(piece.index)
        if block.through and block.through[0][1].holds is not block.pieces[0]:
            self._copy_ahead()  # it has been unpacked from its staging buffers
        if used is not None and used.filled is not None:
            if self.watches is None:
                self.streams.compute.wait(used.filled)
            else:
                self.watches.wait(self.streams.compute, used.filled, block.name)
        block.inside = block.products if block.fused and block.products is not None else block.unpacked
        if self.work.reads is not None:
            self.work.reads(block.name, _memory_read_by(block, block.inside))
        block.references = block.uses(), count_references(block) if block.checks else 0
        block.inside.bring()

    def _in_use_by_another(self, block: MovingBlock) -> bool:
        decode_buffer = None if block.fused else block.decode_buffer
        if decode_buffer is not None and _is_in_use(decode_buffer, block, ()):
            return True
        return bool(block.through) and any(_is_in_use(buffer, piece, ()) for piece, buffer in block.through)

    # The steps before a block's call

    def _fetch(self, block: MovingBlock, used: DeviceBuffer | None) -> None:
        """Hand over the steps that are still needed to bring a block into the buffer that it is read from."""
        if used is not None and used is block.decode_buffer:
            if used.holds is not block:
                self._unpack(block, used)
        elif used is not None and used.holds is not block.pieces[0]:
            self._copy(block.pieces[0], used)

    def _copy(self, piece: Piece, staging_buffer: DeviceBuffer) -> None:
        if staging_buffer.holds is not None:
            self._copies.used(staging_buffer.holds.index)
        stream = self.streams.copy
        if staging_buffer.computed is not None:
            stream.wait(staging_buffer.computed)
        if staging_buffer.unpacked is not None:
            stream.wait(staging_buffer.unpacked)
        staging_buffer.holds = None  # it holds neither block if what follows fails
        assert piece.target is not None
        if self.watches is None:
            piece.weight_source.send(piece.target, stream)
        else:
            self.watches.copy(
                partial(piece.weight_source.send, piece.target, stream),
                piece.target.numel(),
                stream,
                piece.owner.name,
            )
        staging_buffer.filled = staging_buffer.events[0]
        stream.record(staging_buffer.filled)
        if self.recording and len(self._staging) == 1:
            self.streams.end_stream()
        staging_buffer.holds = piece

    def _unpack(self, block: MovingBlock, decode_buffer: DeviceBuffer) -> None:
        if decode_buffer.computed is not None:  # by a replay, perhaps on another of the caller's streams
            self.streams.compute.wait(decode_buffer.computed)
        decode_buffer.holds = None
        for piece in block.pieces:
            self._unpack_piece(piece)
        decode_buffer.forget()
        decode_buffer.holds = block

    def _unpack_piece(self, piece: Piece) -> None:
        """Unpack a piece, from its staging buffer if it has one, which is then free for the next piece."""
        stream, staging_buffer = self.streams.compute, piece.staging_buffer
        if staging_buffer is not None and staging_buffer.holds is not piece:
            self._copy(piece, staging_buffer)
        if staging_buffer is not None and staging_buffer.filled is not None:
            stream.wait(staging_buffer.filled)
        if piece.unpackings == 1 and piece.written is not None:
            piece.unpack = self.streams.bundled(piece.unpack, piece.written)
        piece.unpackings += 1
        if self.watches is None:
            stream.run(piece.unpack)
        else:
            self.watches.unpack(piece.unpack, stream, piece.owner.name)
        if staging_buffer is not None:
            staging_buffer.holds, staging_buffer.unpacked = None, staging_buffer.events[2]
            stream.record(staging_buffer.unpacked)
            self._copies.used(piece.index)

    def advance(self) -> None:
        """Begin what comes next before a block computes on the CPU, unless another thread runs the model."""
        if not self.moving or active_transform() is not None:
            return
        had_turn = self.turns.mine()
        try:
            if had_turn or self.turns.begin():
                if self.changing:
                    self._mend()
                self.changing = True
                self._advance()
                self.changing = False
                if not had_turn:
                    self.turns.end()
        except BaseException:
            self.turns.give_back(had_turn)
            raise

    def _advance(self) -> None:
        """Begin what comes next, as far as buffers are free."""
        if self._staging and not self._copies.stuck:
            self._copy_ahead()

    def _copy_ahead(self) -> None:
        """Begin copies of the next blocks while staging buffers are free."""
        walk = self._copies
        for _ in self.moving:
            if len(walk.due) >= self._ahead:
                walk.stuck = True
                return
            index = self.order.after(walk.at) if walk.lead < len(self.moving) else None
            if index is None:
                return
            through = self.moving[index].through
            if through and not all(starmap(self._begun, through[walk.begun :])):
                return
            walk.step(index)

    def _begun(self, piece: Piece, staging_buffer: DeviceBuffer) -> bool:
        """Begin to copy a piece to its staging buffer if that is free. Returns whether it is on its way."""
        walk = self._copies
        piece.weight_source.announce()
        if piece.index in walk.due or piece.depth or _is_in_use(staging_buffer, piece, walk.due):
            walk.stuck = True
            return False
        if staging_buffer.holds is not piece:
            if not piece.weight_source.ready():
                return False
            self._copy(piece, staging_buffer)
        walk.due.add(piece.index)
        walk.begun += 1
        return True

    # Reads outside calls, and giving the model back

    def _apart(self, block: MovingBlock) -> ParameterSwap:
        """A block's parameters with values in memory of their own, on the device."""
        source = block.weight_source.whole().to(self.streams.device)
        parameters = {
            id(item.entry): item.entry.like(item.unpacked(item.bytes(source), self.work.unpack))
            for item in block.stored.items
        }
        places = block.unpacked.places
        return ParameterSwap(places, [parameters[id(place.entry)] for place in places])

    def _value(self, block: MovingBlock, item: StoredEntry, device: torch.device) -> torch.Tensor:
        """One tensor's values on a device, in memory of their own.

        No turn is waited for: nothing writes what is read, and the thread whose turn it is may wait for
        this one.
        """
        return item.unpacked(item.bytes(block.weight_source.whole()).to(device), self.work.unpack)

    def taken_back(self, block: MovingBlock) -> Iterator[tuple[Entry, torch.Tensor]]:
        """A packed block's values, which last until the next one's: unpacked where calls unpack them.

        VRAM may be full, so nothing is allocated there. Nothing for a block without a decode buffer.
        """
        if block.decode_buffer is None or all(item.entry.converts for item in block.stored.items):
            return  # converting back may lose bits: the host unpacks them
        block.fused = False
        self._fetch(block, block.used())
        self.streams.finish()
        for place in (place for place in block.unpacked.places if not place.entry.converts):
            yield place.entry, place.present.data

    def clear(self) -> None:
        """Forget all blocks and buffers, which refer to each other: their memory is free at once."""
        for buffer in self.buffers:
            buffer.holds = None
            buffer.forget()
        for block in self.moving:
            block.forget()
        self.moving.clear()
        self.cpu_blocks.clear()
        self.streams.forget()

    # What a recorded pass needs

    @property
    def buffers(self) -> list[DeviceBuffer]:
        """Every staging buffer and decode buffer."""
        buffers = [
            buffer
            for block in self.moving
            for buffer in (*block.staging, block.decode_buffer)
            if buffer is not None
        ]
        return list(dict.fromkeys(buffers))

    def join(self) -> None:
        """Let the compute stream wait for all that has been begun with the buffers."""
        for buffer in self.buffers:
            for event in (buffer.filled, buffer.unpacked, buffer.computed):
                if event is not None:
                    self.streams.compute.wait(event)

    def drain(self) -> None:
        """Wait until every stream is done. No event has to be waited for afterwards."""
        if self.changing:
            self._mend()
        self.streams.finish()
        for buffer in self.buffers:
            buffer.forget()

    def state(self) -> "EngineState":
        """What the buffers hold now, and how far copies are ahead."""
        order = (self.order.before, self.order.last)
        holds = tuple(buffer.holds for buffer in self.buffers)
        return EngineState(holds, order, self._copies.state())

    def resume(self, state: "EngineState", done: Event | None) -> None:
        """The buffers hold what they held then, once `done` is reached."""
        for buffer, held in zip(self.buffers, state.holds, strict=True):
            buffer.holds = held
            buffer.filled = buffer.computed = buffer.unpacked = done
        self.order.before, self.order.last = state.order
        self._copies.resume(state.copies)
        self.epoch += 1

    def reach(self, state: "EngineState") -> None:
        """Bring the buffers to hold what they held then, and let the compute stream wait for all of them."""
        if self.changing:
            self._mend()
        if self._unpacks:
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
        for buffer, before in zip(self.buffers, state.holds, strict=True):
            buffer.holds = before
        self.join()


@dataclass(frozen=True)
class EngineState:
    """What the buffers hold at the beginning or end of a recorded pass."""

    holds: tuple[Occupant | None, ...]
    order: tuple[int, int]
    copies: LookaheadState


def _copied(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    return parameter.detach().to(device)


def _is_traced_by_modes() -> bool:
    """Whether operations are noted by make_fx, or done on tensors without values."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def rows_of(args: Iterable[Any], kwargs: dict[str, Any]) -> int:
    """The rows of the first input that is a floating-point tensor; 0 where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.is_nested:  # it has no shape: at most as many rows as numbers
                return int(value.numel())
            return int(value.numel() // max(value.shape[-1], 1)) if value.dim() else 1
    return 0


def refuse_training(
    name: str, modules: Iterable[nn.Module], args: Iterable[Any], kwargs: dict[str, Any], *, trainable: bool
) -> None:
    """Raise PlacementError where gradients are wanted: of an input, or of weights in training mode."""
    wanted = any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
    )
    if wanted or (trainable and any(module.training for module in modules)):
        raise training_error(name)


def _no_turn_error(name: str) -> PlacementError:
    return PlacementError(
        f"{name} was called while another thread runs this placed model",
        "call the model as a whole, for which threads wait, or place a model for each thread",
    )


def training_error(name: str) -> PlacementError:
    """The error for a call that would need gradients. `name` is the block's; empty for the whole model."""
    return PlacementError(
        f"{name or 'the model'} was called with gradients enabled: a placed model can't be trained",
        "call it under torch.inference_mode(), or eval() it; to train it, call remove() of the handle",
    )


def _memory_read_by(block: MovingBlock, inside: ParameterSwap) -> list[torch.Tensor]:
    """The memory of buffers that a call is about to read."""
    values = [place.present for place in inside.places]
    read = [value.data for value in values if not isinstance(value, OffloadedParameter)]
    if block.fused and (target := block.pieces[0].target) is not None:
        read.append(target)
    return read


def _is_in_use(buffer: DeviceBuffer, block: MovingBlock | Piece, due: Container[int]) -> bool:
    """Whether the buffer holds another block that is in use, or fetched ahead and not used yet."""
    held = buffer.holds
    return held is not None and held is not block and (held.depth > 0 or held.index in due)
