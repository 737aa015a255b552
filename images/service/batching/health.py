"""Whether the device still works, judged by faults, canaries and stalls. Values in, decisions out.

A canary is a small inference with a known result. One runs whenever the device has been idle for a while.
After a fault, canaries run until one passes or too many have failed.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from service.settings import Limits

_PAUSES_S = (0.0, 0.5, 2.0)  # before each canary after a fault; when all have failed, the device is lost

State = Literal["well", "suspect", "lost"]


@dataclass
class DeviceHealth:
    """The state of one device: well, suspect (the service isn't ready), or lost (it isn't alive).

    `canary_s` and `stall_s` are those of `Limits`. Times are readings of one clock, in seconds.
    """

    canary_s: float = Limits.canary_s
    stall_s: float = Limits.stall_s
    state: State = "well"
    reason: str = ""
    _failed: int = 0
    _next_s: float = inf

    def fault(self, reason: str, now_s: float) -> None:
        """Note a failed computation that no request can have caused. The device is suspect at once."""
        if self.state != "lost":
            self.state, self.reason = "suspect", reason
            self._failed, self._next_s = 0, now_s + _PAUSES_S[0]

    def canary(self, error: str | None, now_s: float) -> None:
        """Note that a canary passed (`error` is None) or failed."""
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
        """Judge how long the running computation has taken, in seconds; 0: none is running."""
        if busy_s > 2 * self.stall_s and self.state != "lost":
            self.state, self.reason = "lost", f"one computation hasn't ended for {busy_s:.0f} s"
        elif busy_s > self.stall_s and self.state == "well":
            self.state, self.reason = "suspect", f"one computation takes more than {self.stall_s:g} s"
            self._next_s = -inf  # once it ends

    def canary_at(self, idle_since_s: float) -> float:
        """Return when the next canary is due on a device that is idle since `idle_since_s`; inf: never."""
        if self.state == "well":
            return idle_since_s + self.canary_s
        return self._next_s if self.state == "suspect" else inf
