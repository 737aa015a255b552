"""A device whose clock is simulated: exact times, with a knee, noise and limits where a test wants them."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.throughput.direct.results import Work


@dataclass
class FakeDevice:
    """Takes the same time for every batch up to its knee, and time in proportion after it."""

    knee: float = 64.0
    pass_s: float = 0.01  # of a batch up to the knee
    noise: float = 0.0  # relative standard deviation of a trial
    correlated: float = 0.0
    room: int = 2**30  # the largest batch that fits
    seed: int = 0
    watts: float | None = None
    now_s: float = 0.0
    draws: int = 0
    trials: list[int] = field(default_factory=list)  # batches, in order

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._away = 0.0

    def true_s(self, batch: int) -> float:
        """What a pass takes without noise."""
        return self.pass_s * max(1.0, batch / self.knee)

    @contextmanager
    def at(self, batch: int) -> Iterator["FakeBatch"]:
        """As `Runner` says."""
        if batch > self.room:
            raise OutOfMemory(f"{batch} inputs were refused")
        yield FakeBatch(self, batch)

    def clock(self) -> float:
        """The simulated time; asking takes a microsecond."""
        self.now_s += 1e-6
        return self.now_s

    def joules(self) -> float | Unknown:
        """Energy at constant power."""
        return Unknown("no gauge") if self.watts is None else self.watts * self.now_s

    def busy_percent(self) -> float | Unknown:
        """As a driver would say of a device that always runs a kernel."""
        return Unknown("no gauge") if self.watts is None else 100.0

    def next_s(self, batch: int) -> float:
        """A trial's time, with noise."""
        r = self.correlated
        self._away = r * self._away + math.sqrt(1 - r * r) * self._random.gauss(0, 1)
        took = self.true_s(batch) * max(1 + self.noise * self._away, 0.1)
        self.now_s += took
        return took


@dataclass
class FakeBatch:
    """As `Prepared` says."""

    device: FakeDevice
    batch: int

    def fresh(self) -> None:
        """Counted."""
        self.device.draws += 1

    def trial_s(self) -> float:
        """Simulated."""
        self.device.trials.append(self.batch)
        return self.device.next_s(self.batch)

    def pass_s(self) -> float | Unknown:
        """Exact."""
        return self.device.true_s(self.batch)

    def work(self) -> Work | Unknown:
        """Not counted."""
        return Unknown("a fake")

    def peak_bytes(self) -> int | Unknown:
        """A kilobyte an input."""
        return 1000 * self.batch

    def doubt(self) -> str:
        """Nothing."""
        return ""
