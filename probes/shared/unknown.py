"""The value of a figure that couldn't be had."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Unknown:
    """A figure that couldn't be had, and why. Never stands for zero."""

    tag: ClassVar[str] = "unknown"
    reason: str
