"""One pass as the simulation found it: what each block does on which lane, and when. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Lane: TypeAlias = Literal["disk", "copy", "unpack", "compute", "cpu"]
# A span whose times count from the beginning of the first pass
Raw: TypeAlias = tuple[int, Lane, float, float]


@dataclass(frozen=True)
class Span:
    """A block on a lane, seconds from the beginning of the pass. Copies for it may begin before."""

    block: int
    lane: Lane
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One pass in a row of passes."""

    seconds: float
    begun_s: float
    raw: tuple[Raw, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What each block does on which lane."""
        begun = self.begun_s
        return tuple(Span(block, lane, begin - begun, end - begun) for block, lane, begin, end in self.raw)
