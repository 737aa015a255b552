"""A watch from beginning to end: samples at their times, beside a command or until it is interrupted."""

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from probes.machine.nvml import open_nvml
from probes.records.samples import Sample, Subject
from probes.records.watched import Allocator, Ended, WatchReport
from probes.shared.output import OutputLost, complain, tell
from probes.shared.unknown import Unknown
from probes.watch import allocatorhook
from probes.watch.allocator import AllocatorTally, hooked
from probes.watch.deadlines import Deadlines
from probes.watch.readers.allreaders import Readers
from probes.watch.recorder import Recorder, open_recorders
from probes.watch.saturated import Tops, saturation
from probes.watch.savedwatch import report_of
from probes.watch.showing.metricsserver import Endpoint
from probes.watch.showing.screen import Silent, View, view_for
from probes.watch.tallies.tally import Tally
from probes.watch.watchedcommand import Command, program_of

READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Asked:
    """What a watch was asked for."""

    interval_s: float
    longest_s: float | None  # None: until it is interrupted, or the command ends
    command: tuple[str, ...]
    jsonl: Path | None
    csv: Path | None
    listen: tuple[str, int] | None
    plain: bool
    torch_allocator: bool


class Watching:
    """One watch. Everything happens in this thread, except answers to Prometheus."""

    def __init__(self, asked: Asked, root: Path = Path("/")) -> None:
        self._asked = asked
        self._readers = Readers(root, open_nvml())
        self.subject = Subject(
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            host=socket.gethostname(),
            interval_s=asked.interval_s,
            cards=tuple(reader.card for reader in self._readers.cards),
            command=asked.command,
        )
        self._tally = Tally(asked.interval_s, len(self.subject.cards))
        self._allocator = AllocatorTally()
        self._ended: Ended | None = None
        self.lacks: list[str] = []  # what files didn't take, in words; known once `run` is over

    def run(self, tops: Sequence[Tops] = ()) -> WatchReport:
        """Watch. Raises ReportError, UsageError and CommandMissing."""
        asked = self._asked
        words = self._words()
        if words:
            program_of(words[0], os.environ.get("PATH"))
        with ExitStack() as stack:
            endpoint = Endpoint(self.subject, *asked.listen) if asked.listen else None
            if endpoint:
                stack.callback(endpoint.close)
                (complain if asked.command else tell)(f"metrics: {endpoint.address}")
            # Last: what an earlier watch wrote there isn't lost over a command that isn't there
            recorders = open_recorders(self.subject, jsonl=asked.jsonl, csv=asked.csv)
            stack.callback(self._close, recorders)
            view: View = Silent() if asked.command else view_for(self.subject, plain=asked.plain)
            stack.callback(view.close)

            def keep(sample: Sample) -> None:
                self._tally.add(sample)
                for recorder in recorders:
                    recorder.add(sample)
                if endpoint:
                    endpoint.latest = sample
                view.show(sample)

            begun_s, own_s = time.monotonic(), time.process_time()
            self._loop(begun_s, keep, stack)
            return self._report((time.process_time() - own_s) / (time.monotonic() - begun_s), tops)

    def _close(self, recorders: Sequence[Recorder]) -> None:
        self.lacks += filter(None, [recorder.close() for recorder in recorders])

    def _loop(self, begun_s: float, keep: Callable[[Sample], None], stack: ExitStack) -> None:
        deadlines = Deadlines(begun_s, self._asked.interval_s)
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
                    hook = self._hear(hook)
        except KeyboardInterrupt:
            if self._asked.command:
                raise
        except OutputLost as error:  # what was measured is worth a report all the same
            self.lacks.append(f"can't write standard output: {error}")
        if hook is not None:
            self._hear(hook)
        keep(self._readers.sample(time.monotonic() - begun_s, None))

    def _start(self, stack: ExitStack) -> tuple[Command | None, int | None]:
        """Start the command and the pipe of its allocator's hook, where they are wanted."""
        words = self._asked.command
        if not words:
            return None, None
        environment = dict(os.environ)
        if not self._asked.torch_allocator:
            command = stack.enter_context(Command(words, environment))
            self._readers.follow(command.pid)
            return command, None
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        stack.callback(os.close, reading)
        try:
            environment[allocatorhook.VARIABLE] = str(writing)
            command = stack.enter_context(Command(self._words(), environment, inherit=(writing,)))
        finally:
            os.close(writing)
        self._readers.follow(command.pid)
        return command, reading

    def _words(self) -> Sequence[str]:
        """The command as it is started. Raises UsageError where the allocator's hook can't be in it."""
        words = self._asked.command
        if self._asked.torch_allocator and words:
            return hooked(words, str(Path(allocatorhook.__file__)))
        return words

    def _over(self, command: Command | None, begun_s: float) -> bool:
        if command:
            self._ended = command.look()
            return self._ended is not None
        longest_s = self._asked.longest_s
        return longest_s is not None and time.monotonic() - begun_s >= longest_s

    def _hear(self, hook: int | None) -> int | None:
        """Read what the hook has written; None once its end is closed."""
        if hook is None:
            return None
        try:
            while data := os.read(hook, READ_BYTES):
                self._allocator.add(data)
        except BlockingIOError:
            return hook
        return None

    def _report(self, own_cpu_share: float, tops: Sequence[Tops]) -> WatchReport:
        report = report_of(self.subject, self._tally)
        given = [*tops, *(Tops() for _ in self.subject.cards)]
        cards = tuple(
            replace(watched, saturation=saturation(card, watched, top))
            for card, watched, top in zip(self.subject.cards, report.cards, given, strict=False)
        )
        return replace(
            report,
            pace=self._tally.pace(own_cpu_share),
            cards=cards,
            allocator=self._allocators(),
            ended=self._ended or Unknown("no command was given"),
        )

    def _allocators(self) -> tuple[Allocator, ...] | Unknown:
        if not self._asked.torch_allocator:
            return Unknown("not asked for: --torch-allocator")
        return self._allocator.found()
