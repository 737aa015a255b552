"""Judges an image against its budget. Both numbers are always reported; unknown is a verdict of its own."""

from dataclasses import dataclass
from enum import Enum

from buildtool.core.model import Budget


class Verdict(Enum):
    """`none`: no limit was set. `unknown`: a limit was set for bytes that aren't known."""

    PASS = "pass"
    FAIL = "fail"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """One limit and what was compared with it."""

    limit_bytes: int | None
    actual_bytes: int | None
    verdict: Verdict


@dataclass(frozen=True)
class BudgetResult:
    """The verdicts on unpacked and on stored bytes, and the graver of both."""

    unpacked: Judgement
    stored: Judgement

    @property
    def verdict(self) -> Verdict:
        """Fail, else unknown, else pass, else none."""
        order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS, Verdict.NONE)
        return min(self.unpacked.verdict, self.stored.verdict, key=order.index)


def judge(budget: Budget, *, unpacked_bytes: int, stored_bytes: int | None) -> BudgetResult:
    """Compare an image's bytes with its limits; a limit that is just met passes."""
    return BudgetResult(
        _judged(budget.unpacked_bytes, unpacked_bytes), _judged(budget.stored_bytes, stored_bytes)
    )


def _judged(limit: int | None, actual: int | None) -> Judgement:
    if limit is None:
        return Judgement(None, actual, Verdict.NONE)
    if actual is None:
        return Judgement(limit, None, Verdict.UNKNOWN)
    return Judgement(limit, actual, Verdict.PASS if actual <= limit else Verdict.FAIL)
