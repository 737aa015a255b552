"""Whether the device still works: what a fault, a canary and a standstill mean. Values in, decisions out.

A canary is a small inference with a known result. One runs after a fault, until one passes or too many have
failed, and one whenever the device has been idle for a while.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

_PAUSES_S = (0.0, 0.5, 2.0)  # before each canary after a fault; when all have failed, the device is lost

State = Literal["well", "suspect", "lost"]


@dataclass
class DeviceHealth:
    """The state of one device: well, suspect (not ready), or lost (not alive). Times are in seconds."""

    idle_s: float = 30.0  # of idleness, after which a canary runs
    stall_s: float = 60.0  # that a batch may take; twice as long, and the device is lost
    state: State = "well"
    reason: str = ""
    _failed: int = 0
    _next_s: float = inf

    def fault(self, reason: str, now_s: float) -> None:
        """A computation failed in a way that no request can cause. The state is suspect at once."""
        if self.state != "lost":
            self.state, self.reason = "suspect", reason
            self._failed, self._next_s = 0, now_s + _PAUSES_S[0]

    def canary(self, error: str | None, now_s: float) -> None:
        """A canary passed (no `error`) or failed."""
        if self.state == "lost":
            return
        if error is None:
            self.state, self.reason, self._next_s = "well", "", inf
            return
        if self.state == "well":
            self._failed = 0
        self._failed += 1
        self.reason = error
        self.state = "suspect" if self._failed < len(_PAUSES_S) else "lost"
        self._next_s = now_s + _PAUSES_S[self._failed] if self.state == "suspect" else inf

    def watch(self, busy_s: float) -> None:
        """The device has been busy with one computation for `busy_s` seconds; 0: it is idle."""
        if busy_s > 2 * self.stall_s and self.state != "lost":
            self.state, self.reason = "lost", f"one computation hasn't ended for {busy_s:.0f} s"
        elif busy_s > self.stall_s and self.state == "well":
            self.state, self.reason = "suspect", f"one computation takes more than {self.stall_s:g} s"
            self._next_s = -inf  # once it ends

    def canary_at(self, idle_since_s: float) -> float:
        """When the next canary is due, with a device that is idle since `idle_since_s`; inf: never."""
        if self.state == "well":
            return idle_since_s + self.idle_s
        return self._next_s if self.state == "suspect" else inf
