"""The value of a figure that couldn't be determined."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Unknown:
    """A figure that couldn't be determined, and why. Never a substitute for zero."""

    tag: ClassVar[str] = "unknown"
    reason: str

    def __str__(self) -> str:
        return f"unknown ({self.reason})"
