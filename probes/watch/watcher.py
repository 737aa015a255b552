"""A watch from beginning to end: samples at their times, while a command runs or until it is interrupted."""

import os
import select
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

from probes.core.errors import UsageError
from probes.core.output import OutputLost, echo, error
from probes.core.unknown import Unknown
from probes.hardware.nvml import Nvml, open_nvml
from probes.hardware.sysfs import read_cards
from probes.records.watch import (
    Allocator,
    CardWatch,
    Ended,
    ProcessUse,
    Sample,
    Saturation,
    Subject,
    WatchedCard,
    WatchReport,
)
from probes.watch import allocator_hook
from probes.watch.allocator import AllocatorTotals, with_hook
from probes.watch.command import Command, program_of
from probes.watch.gpu_readers import AmdCard, NvidiaReader
from probes.watch.metrics_server import MetricsServer
from probes.watch.readers import CardReader, CommandTree, DrmClients, MachineReader
from probes.watch.recording import Recorder, open_recorders, report_of
from probes.watch.screen import NoView, View, view_for
from probes.watch.totals import WatchTotals


@dataclass
class Deadlines:
    """The next deadline on a clock that never goes back. One that has passed meanwhile is skipped."""

    start_s: float
    interval_s: float
    next: int = 0

    @property
    def at_s(self) -> float:
        """The next deadline."""
        return self.start_s + self.next * self.interval_s

    def taken(self, now_s: float) -> None:
        """A sample was finished: the next deadline is the first one after now."""
        passed = int((now_s - self.start_s) / self.interval_s)
        self.next = max(self.next, passed) + 1


_NO_CEILING = Unknown("no measured ceiling was given: --ceilings with a throughput report of this machine")


@dataclass(frozen=True)
class CardCeilings:
    """The most that was measured on one card, per second."""

    memory_bytes: float | Unknown = _NO_CEILING  # read and written
    to_card_bytes: float | Unknown = _NO_CEILING
    from_card_bytes: float | Unknown = _NO_CEILING


def saturation(card: WatchedCard, watch: CardWatch, ceilings: CardCeilings) -> tuple[Saturation, ...]:
    """What one card achieved."""
    means = {track.gauge: track.mean for track in watch.tracks}
    return (
        Saturation(
            "memory",
            _part_of(means, "dram_percent", card.memory_bytes_per_s),
            ceilings.memory_bytes,
            "bytes/s",
            "bytes that the card's memory moved: its counter's share of the bandwidth by clock and width",
        ),
        Saturation(
            "link to card",
            _mean(means, "to_card_bytes_per_s"),
            ceilings.to_card_bytes,
            "bytes/s",
            "PCI Express traffic received by the card, with protocol",
        ),
        Saturation(
            "link from card",
            _mean(means, "from_card_bytes_per_s"),
            ceilings.from_card_bytes,
            "bytes/s",
            "PCI Express traffic sent by the card, with protocol",
        ),
        Saturation(
            "matrix units",
            _mean(means, "tensor_percent"),
            Unknown("a share of cycles has no measured ceiling"),
            "%",
            "share of cycles in which tensor pipes were busy; FLOP/s can't be seen from outside a program",
        ),
        Saturation(
            "multiprocessors",
            _mean(means, "sm_active_percent"),
            Unknown("a share of time has no measured ceiling; full use is 100 %"),
            "%",
            "share of time and multiprocessors with at least one warp, waiting ones included",
        ),
    )


def _mean(means: Mapping[str, float | Unknown], gauge: str) -> float | Unknown:
    return means.get(gauge, Unknown("not read"))


def _part_of(means: Mapping[str, float | Unknown], gauge: str, whole: float | Unknown) -> float | Unknown:
    percent = _mean(means, gauge)
    if isinstance(percent, Unknown):
        return percent
    return whole if isinstance(whole, Unknown) else percent / 100 * whole


class Readers:
    """Every reader of this machine."""

    def __init__(self, root: Path, nvml: Nvml | Unknown) -> None:
        self._root = root
        self._clients = DrmClients(root)
        self.machine = MachineReader(root, cpus=os.cpu_count() or 1)
        self.cards: tuple[CardReader, ...] = (*self._amd(), *self._nvidia(nvml))

    def _amd(self) -> list[CardReader]:
        of: Callable[[str], tuple[ProcessUse, ...] | Unknown] = self._clients.of
        return [AmdCard(self._root, card, of) for card in read_cards(self._root) if card.driver == "amdgpu"]

    def _nvidia(self, nvml: Nvml | Unknown) -> list[CardReader]:
        if isinstance(nvml, Unknown):
            return []
        return [NvidiaReader(self._root, nvml, card) for card in nvml.cards()]

    def follow(self, pid: int) -> None:
        """Watch the memory of this process and its descendants, too."""
        self.machine.command = CommandTree(self._root, pid)

    def sample(self, at_s: float, late_s: float | None) -> Sample:
        """Read every gauge once."""
        if any(reader.card.driver == "amdgpu" for reader in self.cards):
            self._clients.refresh(at_s)
        machine = self.machine.look(at_s)
        closing = late_s is None
        cards = tuple(reader.sample(at_s, closing=closing) for reader in self.cards)
        return Sample(at_s, late_s, machine, cards)


READ_BYTES = 1 << 16


@dataclass(frozen=True)
class WatchOptions:
    """What to watch, for how long, and where samples go."""

    interval_s: float
    longest_s: float | None  # None: until it is interrupted, or the command ends
    command: tuple[str, ...]
    jsonl: Path | None
    csv: Path | None
    listen: tuple[str, int] | None
    plain: bool
    torch_allocator: bool


class Watch:
    """One watch. Everything happens in this thread, except answers to Prometheus."""

    def __init__(self, options: WatchOptions, root: Path = Path("/")) -> None:
        self._options = options
        self._readers = Readers(root, open_nvml())
        self.subject = Subject(
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            host=socket.gethostname(),
            interval_s=options.interval_s,
            cards=tuple(reader.card for reader in self._readers.cards),
            command=options.command,
            begun_s=time.time(),
        )
        self._totals = WatchTotals(options.interval_s, len(self.subject.cards))
        self._allocator = AllocatorTotals()
        self._ended: Ended | None = None
        self.lacks: list[str] = []  # what files didn't take, in words; known once `run` is over

    def run(self, ceilings: Sequence[CardCeilings] = ()) -> WatchReport:
        """Watch. Raises ReportError, UsageError and CommandMissing."""
        options = self._options
        words = self._words()
        if words:
            program_of(words[0], os.environ.get("PATH"))
        with ExitStack() as stack:
            endpoint = MetricsServer(self.subject, *options.listen) if options.listen else None
            if endpoint:
                stack.callback(endpoint.close)
                (error if options.command else echo)(f"metrics: {endpoint.address}")
            # Last: what an earlier watch wrote there isn't lost over a command that isn't there
            recorders = open_recorders(self.subject, jsonl=options.jsonl, csv=options.csv)
            stack.callback(self._close, recorders)
            view: View = NoView() if options.command else view_for(self.subject, plain=options.plain)
            stack.callback(view.close)

            def keep(sample: Sample) -> None:
                self._totals.add(sample)
                for recorder in recorders:
                    recorder.add(sample)
                if endpoint:
                    endpoint.latest = sample
                view.show(sample)

            begun_s, own_s = time.monotonic(), time.process_time()
            self._loop(begun_s, keep, stack)
            return self._report((time.process_time() - own_s) / (time.monotonic() - begun_s), ceilings)

    def _close(self, recorders: Sequence[Recorder]) -> None:
        self.lacks += filter(None, [recorder.close() for recorder in recorders])

    def _loop(self, begun_s: float, keep: Callable[[Sample], None], stack: ExitStack) -> None:
        deadlines = Deadlines(begun_s, self._options.interval_s)
        hook: int | None = None
        try:
            keep(self._readers.sample(0.0, 0.0))
            deadlines.taken(time.monotonic())
            command, hook = self._start(stack)
            while not self._over(command, begun_s):
                now_s = time.monotonic()
                if now_s >= deadlines.at_s:
                    keep(self._readers.sample(now_s - begun_s, now_s - deadlines.at_s))
                    deadlines.taken(time.monotonic())
                    continue
                waiting = [end for end in (command.wake if command else None, hook) if end is not None]
                ready, _, _ = select.select(waiting, [], [], deadlines.at_s - now_s)
                if hook in ready:
                    hook = self._read_hook(hook)
        except KeyboardInterrupt:
            if self._options.command:
                raise
        except OutputLost as error:  # what was measured is worth a report all the same
            self.lacks.append(f"can't write standard output: {error}")
        if hook is not None:
            self._read_hook(hook)
        keep(self._readers.sample(time.monotonic() - begun_s, None))

    def _start(self, stack: ExitStack) -> tuple[Command | None, int | None]:
        """Start the command, and the pipe of its allocator's hook if that is reported."""
        words = self._options.command
        if not words:
            return None, None
        environment = dict(os.environ)
        if not self._options.torch_allocator:
            command = stack.enter_context(Command(words, environment))
            self._readers.follow(command.pid)
            return command, None
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        stack.callback(os.close, reading)
        try:
            environment[allocator_hook.VARIABLE] = str(writing)
            command = stack.enter_context(Command(self._words(), environment, inherit=(writing,)))
        finally:
            os.close(writing)
        self._readers.follow(command.pid)
        return command, reading

    def _words(self) -> Sequence[str]:
        """The command as it is started. Raises UsageError where the allocator's hook can't be in it."""
        words = self._options.command
        if self._options.torch_allocator and words:
            return with_hook(words, str(Path(allocator_hook.__file__)))
        return words

    def _over(self, command: Command | None, begun_s: float) -> bool:
        if command:
            self._ended = command.look()
            return self._ended is not None
        longest_s = self._options.longest_s
        return longest_s is not None and time.monotonic() - begun_s >= longest_s

    def _read_hook(self, hook: int | None) -> int | None:
        """Read what the hook has written; None once its end is closed."""
        if hook is None:
            return None
        try:
            while data := os.read(hook, READ_BYTES):
                self._allocator.add(data)
        except BlockingIOError:
            return hook
        return None

    def _report(self, own_cpu_share: float, ceilings: Sequence[CardCeilings]) -> WatchReport:
        report = report_of(self.subject, self._totals)
        each = [*ceilings, *(CardCeilings() for _ in self.subject.cards)]
        cards = tuple(
            replace(watched, saturation=saturation(card, watched, measured))
            for card, watched, measured in zip(self.subject.cards, report.cards, each, strict=False)
        )
        return replace(
            report,
            pace=self._totals.pace(own_cpu_share),
            cards=cards,
            allocator=self._allocators(),
            ended=self._ended or Unknown("no command was given"),
        )

    def _allocators(self) -> tuple[Allocator, ...] | Unknown:
        if not self._options.torch_allocator:
            return Unknown("not asked for: --torch-allocator")
        return self._allocator.found()


def require_distinct(places: Mapping[str, Path | None]) -> None:
    """Options and the files that they name. Raises UsageError for one file under two of them.

    A device such as /dev/null may have several; names that don't exist yet are compared within their folders.
    """
    known = [(option, path, _identity(path)) for option, path in places.items() if path is not None]
    for (a, path, one), (b, _, other) in combinations(known, 2):
        if one is not None and one == other:
            raise UsageError(f"{a} and {b} are one file, {path}", f"name another file: {b} FILE")


def _identity(path: Path) -> tuple[object, ...] | None:
    """What two names of one file have in common; None for a character device."""
    place = Path(os.path.realpath(path))
    try:
        found = place.stat()
    except OSError:
        return *_identity_of_folder(place.parent), place.name
    return None if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def _identity_of_folder(folder: Path) -> tuple[object, ...]:
    try:
        found = folder.stat()
    except OSError:
        return (str(folder),)
    return found.st_dev, found.st_ino
