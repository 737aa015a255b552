"""Which experts are in VRAM, and the table that says where each one is.

All experts stay in host memory, so one that leaves VRAM is copied nowhere. The table is on the device: for
each expert the addresses of its tensors, in VRAM where the cache has them, else in host memory, which
kernels read there. So nothing waits for a router, and a recorded pass stays valid: it reads the table and
adds to the counts, both at fixed addresses.

Between passes, `update` brings the experts that were chosen most into VRAM: it copies one on the copy
stream into a place that is free, and after the copy writes two rows of the table on the compute stream, for
the one that comes and the one that leaves. The place of the latter is free once the compute stream is past
that. No pass waits for any of it: what isn't finished is looked at again before the next pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from probes.placement.packing.format import aligned
from probes.placement.runtime.streams import Event, Streams

NOWHERE: Final = -1  # in the cache
EVERY: Final = 4  # passes from one look at the counts to the next
MOST_SWAPS: Final = 8  # experts that are copied at once: each costs the host some calls
SPARE: Final = 16  # of so many places one is kept free for those that come
KEPT: Final = 0.9  # of its popularity, that an expert keeps at each look at the counts
GAIN: Final = 1.25  # times as popular must be the one that comes


@dataclass(frozen=True)
class ExpertSlice:
    """Bytes of one expert: in the host memory of its block, and in a place of the cache."""

    host: int
    n_bytes: int
    place: int


@dataclass(frozen=True, eq=False)
class Expert:
    """One expert: the slices of all its tensors. `memory` is that of its block, `seen` the same for
    kernels.
    """

    memory: torch.Tensor
    seen: torch.Tensor
    slices: tuple[ExpertSlice, ...]

    @property
    def place_bytes(self) -> int:
        """Bytes of a place that can hold it."""
        return max((aligned(piece.place + piece.n_bytes) for piece in self.slices), default=0)


@dataclass(frozen=True)
class HitRate:
    """How many experts passes have read, and how many of them were in VRAM."""

    chosen: int
    hits: int

    @property
    def share(self) -> float:
        """Hits for each expert that was read; 0 where none was."""
        return self.hits / self.chosen if self.chosen else 0.0


@dataclass(eq=False)
class _Counted:
    """The counts at one moment of the compute stream, and what was in VRAM until then."""

    counts: torch.Tensor
    called: torch.Tensor
    done: Event
    cached: torch.Tensor


@dataclass(frozen=True)
class _Coming:
    """An expert on its way to a place. `leaves`: the one that it replaces, if any."""

    expert: int
    place: int
    leaves: int


class ExpertCache:
    """The places in VRAM for experts, the table of addresses, and the counts of what passes choose.

    `room`: VRAM for all of it, on the device. Experts are known by their index.
    """

    def __init__(self, experts: Sequence[Expert], room: torch.Tensor, streams: Streams) -> None:
        self._experts, self._streams = experts, streams
        self.place_bytes = max((expert.place_bytes for expert in experts), default=0)
        self.columns = max((len(expert.slices) for expert in experts), default=0)
        number = len(experts)
        words = number * self.columns
        fixed = room[: fixed_bytes(number, self.columns)].view(torch.int64)
        self.table, self._in_host, self._in_place = (
            fixed[n * words :][:words].view(number, self.columns) for n in range(3)
        )
        self.counts = fixed[3 * words :][:number].zero_()
        rest = room[aligned(fixed.nbytes) :]
        count = min(rest.numel() // self.place_bytes, number) if self.place_bytes else 0
        self._places = [rest[n * self.place_bytes :][: self.place_bytes] for n in range(count)]
        self._place_of = [NOWHERE] * number
        self._is_cached = torch.zeros(number, dtype=torch.bool)  # the same, for what is counted
        self._spare = spare_places(count, number)
        self._free: list[tuple[int, Event | None]] = [(place, None) for place in range(count)]
        self._coming: tuple[tuple[_Coming, ...], Event] | None = None
        self._counted: list[_Counted] = []
        self._called = torch.zeros(number, dtype=torch.int64)  # counted by the host: experts of lists
        self._before = torch.zeros(number, dtype=torch.int64)
        self._popularity = torch.zeros(number, dtype=torch.float64)
        self._chosen = self._hits = self._passes = 0
        self.follows = True  # False: what is in VRAM stays, as measurements with planted routes want it
        self._changing = False  # an update is under way; found so by the next one: it was interrupted
        self._fill_addresses()
        self._begin()

    # What passes read

    @property
    def cached(self) -> int:
        """How many experts are in VRAM now."""
        return sum(place != NOWHERE for place in self._place_of)

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self._experts)

    @property
    def places(self) -> int:
        """How many experts VRAM has places for, those that are on their way included."""
        return len(self._places)

    def is_cached(self, expert: int) -> bool:
        """Whether passes find it in VRAM now."""
        return self._place_of[expert] != NOWHERE

    def bytes_of(self, expert: int, column: int) -> torch.Tensor:
        """A slice of an expert where it is now, in VRAM or in host memory."""
        piece, place = self._experts[expert].slices[column], self._place_of[expert]
        if place == NOWHERE:
            return self._experts[expert].memory[piece.host :][: piece.n_bytes]
        return self._places[place][piece.place :][: piece.n_bytes]

    def count_call(self, expert: int) -> None:
        """The host knows that a pass calls this expert."""
        self._called[expert] += 1

    # Between passes

    def update(self) -> None:
        """Go on with what is under way; now and then, look which experts should come. Waits for nothing."""
        if self._spare == 0 or not self.follows:
            return
        if self._changing:
            self._mend()
        self._changing = True
        self._streams.compute.follow()
        self._read_counts()
        if self._coming is not None:
            if self._coming[1].reached():
                self._arrived()
        else:
            self._passes += 1
            if self._passes >= EVERY:
                self._passes = 0
                self._note_counts()
                self._send_for(self._wanted())
        self._changing = False

    def hit_rate(self) -> HitRate:
        """Of all passes so far. Waits for the device."""
        if self._changing:
            self._mend()
        self._streams.compute.follow()
        self._note_counts()
        self._streams.finish()
        self._read_counts()
        return HitRate(self._chosen, self._hits)

    def settle(self) -> None:
        """Bring in what is wanted by the counts so far, until nothing more is. Waits for the device."""
        for _ in range(2 * len(self._experts)):
            self.hit_rate()
            if self._coming is None:
                self._send_for(self._wanted())
            if self._coming is None:
                return
            self._streams.finish()
            self._arrived()

    def forget(self) -> None:
        """Release all memory."""
        self._streams.finish()
        self._experts, self._places, self._free, self._spare = (), [], [], 0
        self._coming = None
        self._counted.clear()
        self.table = self._in_host = self._in_place = self.counts = torch.empty(0)

    # The counts

    def _note_counts(self) -> None:
        """Have the device's counts copied to the host, as they are at this moment of the compute stream."""
        pinned = self._streams.device.type == "cuda"
        counts = torch.empty(len(self._experts), dtype=torch.int64, pin_memory=pinned)
        done = self._streams.event()
        self._streams.compute.run(partial(counts.copy_, self.counts, non_blocking=True))
        self._streams.compute.record(done)
        self._counted.append(_Counted(counts, self._called.clone(), done, self._is_cached.clone()))

    def _read_counts(self) -> None:
        while self._counted and self._counted[0].done.reached():
            counted = self._counted.pop(0)
            now = counted.counts + counted.called
            new = now - self._before
            self._before = now
            self._chosen += int(new.sum())
            self._hits += int(new[counted.cached].sum())
            self._popularity = KEPT * self._popularity + new

    # What should be in VRAM

    def _wanted(self) -> list[_Coming]:
        """The most popular experts that aren't in VRAM, as far as they are worth it and places are free."""
        popular, cached = self._popularity, self._is_cached
        inside = int(cached.sum())
        most = min(len(self._free), MOST_SWAPS, inside, len(cached) - inside)
        if not most:
            return []
        first = torch.where(cached, -1.0, popular).topk(most).indices.tolist()
        last = torch.where(cached, popular, torch.inf).topk(most, largest=False).indices.tolist()
        wanted = []
        for (place, _), expert, leaves in zip(self._free, first, last, strict=False):
            if popular[expert] <= GAIN * popular[leaves] or popular[expert] < 1:
                break
            wanted.append(_Coming(expert, place, leaves))
        return wanted

    def _send_for(self, wanted: Sequence[_Coming]) -> None:
        """Begin to copy experts into places that are free."""
        if not wanted:
            return
        copy, free = self._streams.copy, dict(self._free)
        for coming in wanted:
            if (since := free.pop(coming.place)) is not None:
                copy.wait(since)
            self._copy(coming.expert, coming.place, copy)
        done = self._streams.event()
        copy.record(done)
        self._free = list(free.items())
        self._coming = tuple(wanted), done

    def _copy(self, expert: int, place: int, stream: Any) -> None:
        of, target = self._experts[expert], self._places[place]
        for piece in of.slices:
            to, source = target[piece.place :][: piece.n_bytes], of.memory[piece.host :][: piece.n_bytes]
            stream.run(partial(to.copy_, source, non_blocking=True))

    def _arrived(self) -> None:
        """Write the table's rows of those that have come, and of those that leave for them."""
        assert self._coming is not None
        coming, _ = self._coming
        self._note_counts()  # until now passes found what was there
        compute = self._streams.compute
        for one in coming:
            self._place_of[one.leaves], self._place_of[one.expert] = NOWHERE, one.place
            self._is_cached[one.leaves], self._is_cached[one.expert] = False, True
            self._write_row(one.expert)
            self._write_row(one.leaves)
        since = self._streams.event()
        compute.record(since)
        used = set(self._place_of)
        free = dict(self._free)
        self._free = [(n, free.get(n, since)) for n in range(len(self._places)) if n not in used]
        self._coming = None

    # The table

    def _fill_addresses(self) -> None:
        """Addresses in host memory, and offsets in a place, of all experts."""
        in_host, in_place = (
            torch.zeros(self.table.shape, dtype=torch.int64),
            torch.zeros(self.table.shape, dtype=torch.int64),
        )
        for row, expert in enumerate(self._experts):
            begin = expert.seen.data_ptr()
            for column, piece in enumerate(expert.slices):
                in_host[row, column], in_place[row, column] = begin + piece.host, piece.place
        self._in_host.copy_(in_host)
        self._in_place.copy_(in_place)
        self.table.copy_(in_host)

    def _write_row(self, expert: int) -> None:
        place = self._place_of[expert]
        if place == NOWHERE:
            work = partial(self.table[expert].copy_, self._in_host[expert])
        else:
            address = self._places[place].data_ptr()
            work = partial(torch.add, self._in_place[expert], address, out=self.table[expert])
        self._streams.compute.run(work)

    def _begin(self) -> None:
        """Fill the places, but for the spare ones, before anything is known of what is chosen: evenly."""
        number, filled = len(self._experts), len(self._places) - self._spare
        for place in range(filled):
            expert = place * number // filled
            self._copy(expert, place, self._streams.copy)
            self._place_of[expert] = place
            self._is_cached[expert] = True
        self._free = self._free[filled:]
        self._streams.finish()
        for expert, place in enumerate(self._place_of):
            if place != NOWHERE:
                self._write_row(expert)
        self._streams.finish()

    def _mend(self) -> None:
        """An update was interrupted: what was on its way is forgotten, and the table written again."""
        self._streams.finish()
        used = set(self._place_of)
        self._coming, self._free = None, [(n, None) for n in range(len(self._places)) if n not in used]
        self._counted.clear()
        for expert, place in enumerate(self._place_of):
            self._is_cached[expert] = place != NOWHERE
            self._write_row(expert)
        self._streams.finish()
        self._changing = False


def spare_places(places: int, experts: int) -> int:
    """Places that are kept free for experts on their way; none where all are there, or there is one place."""
    return 0 if places in (0, 1, experts) else min(max(1, places // SPARE), MOST_SWAPS)


def fixed_bytes(experts: int, columns: int) -> int:
    """Bytes of the table of addresses, of what it is written from, and of the counts."""
    return 8 * experts * (3 * columns + 1)
