"""What a caller chooses: how an image is audited, and how its report is rendered."""

from dataclasses import dataclass

from buildtool.audit.baseline import Comparison
from buildtool.core.model import Budget
from buildtool.gpucode.target import TargetId
from buildtool.image.documents import Platform
from buildtool.image.errors import LIMITS, Limits
from buildtool.keep.keep_list import KeepList
from probes.core.output import Paint, plain

NO_BUDGET = Budget()
LISTED_FILES = 2000  # of the largest, in a report: what an HTML page lists


@dataclass(frozen=True)
class AuditOptions:
    """`targets` are the GPUs that the image is for, `image` is which of several images in an archive.

    With `all_needed`, no remedy keeps the code of only one of them. `host_cards` are the targets of this
    host's AMD cards: remedies name one of them where the image has code for it.
    """

    budget: Budget = NO_BUDGET
    targets: tuple[str, ...] = ()
    all_needed: bool = False
    host_cards: tuple[str, ...] = ()
    image: str | None = None
    platform: Platform | None = None
    top: int = LISTED_FILES
    limits: Limits = LIMITS
    keep: KeepList | None = None  # what observed runs opened

    def __post_init__(self) -> None:
        """Raises BadTarget before any image is read."""
        for target in self.targets:
            TargetId.parse(target)


@dataclass(frozen=True)
class RenderOptions:
    """`top` is the number of rows of each list, in formats that shorten lists.

    `comparison` is with a baseline, if there is one. In a terminal's text, `paint` colours words;
    without `all_sections` it is the answer alone.
    """

    top: int = 20
    comparison: Comparison | None = None
    all_sections: bool = True
    paint: Paint = plain


DEFAULT_OPTIONS = AuditOptions()
DEFAULT_RENDER_OPTIONS = RenderOptions()
