"""What the served half of a scan holds."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ServedScan:
    """The served half of a scan."""

    tag: ClassVar[str] = "served"
    target: str  # the server's address
