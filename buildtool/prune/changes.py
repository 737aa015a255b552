"""What a prune did, or would do, to the files of a tree, an archive or an image. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from buildtool.gpucode.cut.library import PrunePlan


@dataclass(frozen=True)
class Deleted:
    """A name that was only for foreign targets; `freed_bytes` is 0 for all but a file's last hard link."""

    path: str
    freed_bytes: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """A file that lost code. Lengths of the file; the maps are unpacked bytes of code by target."""

    path: str
    bytes_before: int
    bytes_after: int
    kept_bytes: dict[str, int]
    removed_bytes: dict[str, int]

    @classmethod
    def by(cls, plan: PrunePlan, path: str) -> "Pruned":
        """What a plan makes of the file at `path`."""
        return cls(path, plan.bytes_before, plan.bytes_after, plan.kept_bytes, plan.removed_bytes)


Change = Deleted | Pruned


@dataclass(frozen=True)
class Refused:
    """A file that was left as it is, and why: it can't be cut, or nothing of its code is to be cut."""

    path: str
    reason: str


@dataclass
class TreeResult:
    """What a prune of a tree did, or what a dry run would do; accumulates. Paths are relative to the tree."""

    targets: tuple[str, ...]
    deleted: list[Deleted] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    untouched: list[Refused] = field(default_factory=list)  # with code for other cards all the same

    def add(self, changes: Sequence[Change]) -> None:
        """Count changes in."""
        self.deleted += [change for change in changes if isinstance(change, Deleted)]
        self.pruned += [change for change in changes if isinstance(change, Pruned)]

    def leave(self, path: str, foreign: Sequence[str]) -> str:
        """Count a file in that keeps its code for other cards; returns what to say of it."""
        self.untouched.append(Refused(path, f"it holds code for {', '.join(foreign)} as before"))
        return f"untouched: {path}: {self.untouched[-1].reason}"

    @property
    def saved_bytes(self) -> int:
        """How many bytes smaller the files are together."""
        cut = sum(item.bytes_before - item.bytes_after for item in self.pruned)
        return cut + sum(item.freed_bytes for item in self.deleted)

    @property
    def changed(self) -> bool:
        """Whether anything was done, or would be done."""
        return bool(self.deleted or self.pruned)
