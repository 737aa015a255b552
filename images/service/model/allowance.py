"""How much of a card torch's allocator may take: what the models that are placed there were given, together.

Beyond it the allocator refuses, as if the card were smaller. Without that, a pass that takes more than was
predicted, or a leak, takes memory from other programs, or from the system's where a driver lends that.
"""

import threading
from collections import defaultdict

import torch


class Allowances:
    """The bytes of each card that were given out. One for a process, whose allocator has one limit a card."""

    def __init__(self) -> None:
        self._given: defaultdict[str, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # a model may be found to be gone at any moment

    def give(self, place: str, n_bytes: int) -> None:
        """Let a model that is about to be placed take so many bytes more."""
        with self._lock:
            self._given[place].append(n_bytes)
            self._limit(place)

    def take_back(self, place: str, n_bytes: int) -> None:
        """Its memory has been released. Without any model, nothing is limited."""
        with self._lock:
            self._given[place].remove(n_bytes)
            self._limit(place)

    def _limit(self, place: str) -> None:
        total = torch.cuda.get_device_properties(place).total_memory
        given = sum(self._given[place]) or total
        torch.cuda.set_per_process_memory_fraction(min(given / total, 1.0), place)


ALLOWANCES = Allowances()
