"""One finding of an audit, and what the checks that produce findings share."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from buildtool.audit.count.counts import Tally
from buildtool.audit.count.spot import Spot

SHOWN_PATHS = 20
SHOWN_SECRETS = 500
WORTH_BYTES = 1 << 20  # a smaller finding isn't listed, except where the image is wrong


class Severity(Enum):
    """`error`: the image isn't what it claims to be. `warning`: waste. `info`: useful to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One cause of unneeded bytes. `bytes` are unpacked bytes; 0 where it isn't about size."""

    id: str
    severity: Severity
    title: str
    bytes: int
    paths: tuple[str, ...]
    remedy: str
    predicted_unpacked_bytes: int | None = None  # of the image after this remedy alone; None: not about size


@dataclass(frozen=True)
class Prediction:
    """The image after the remedies of all errors and warnings: bytes that several would remove count once."""

    unpacked_bytes: int
    saved_bytes: int


_NO_PATHS = ("secrets", "build-only", "huge-layer")  # name places in words, packages, layers


def shown_paths(finding: Finding) -> list[str]:
    """A finding's places for people, paths with the slash that they begin with inside the image."""
    if finding.id in _NO_PATHS:
        return list(finding.paths)
    return [" = ".join(f"/{part}" for part in path.split(" = ")) for path in finding.paths]


def merged_places(tallies: Iterable[Tally]) -> list[Spot]:
    """The places of several tallies, those with most bytes first."""
    total = sum((tally.places for tally in tallies), Tally().places)
    return [place for place, _ in total.most_common()]
