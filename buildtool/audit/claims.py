"""Which bytes a remedy would remove: findings claim bytes, and bytes that several claim are counted once.

A finding is known by its id. Bytes are GPU code of no use where no wanted card can run it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from buildtool.audit.kinds import Kind
from buildtool.gpucode.source import BadTarget
from buildtool.gpucode.target import SPIRV, TargetId, serves_any

CUDA = "cuda-in-cpu-image"
FOREIGN_FILES = "foreign-gfx"
FOREIGN_CODE = "foreign-gfx-in-libraries"
CARD_CHOICE = "gpu-code-by-card"
OVERWRITTEN = "overwritten"
DELETED = "deleted"
DUPLICATES = "duplicates"
BUILD_ONLY = "build-only"
STRIPPABLE = "debug-info-in-libraries"
OF_KIND = {
    Kind.CACHE: "caches",
    Kind.HEADER: "headers-and-static",
    Kind.STATIC_LIBRARY: "headers-and-static",
    Kind.BUILD_FILE: "headers-and-static",
    Kind.TEST: "tests",
    Kind.DEBUG: "debug-info",
    Kind.DOC: "docs-and-locale",
    Kind.LOCALE: "docs-and-locale",
    Kind.BYTECODE: "bytecode",
}
_MOVED_HEADERS = 2048  # a table of 36 program headers, which is more than libraries have
Claims = Mapping[tuple[str, ...], int]  # ids of findings -> bytes that exactly these would remove


class ClaimCounter:
    """Counts bytes by the findings that would remove them."""

    def __init__(self, wanted: list[TargetId]) -> None:
        self._wanted = wanted
        self._foreign: dict[str, bool] = {}
        self.claims: Counter[tuple[str, ...]] = Counter()

    def add(self, n_bytes: int, causes: list[str]) -> None:
        """A file, or a part of one, with the ids of the findings that would remove it."""
        if causes and n_bytes:
            self.claims[tuple(causes)] += n_bytes

    def cut_from(self, code: Mapping[str, int], *, alignment: int) -> frozenset[str]:
        """The targets whose code a prune cuts out of a library that holds `code`.

        It leaves a library whole that has nothing for the wanted cards, and one that would get smaller by
        less than its segments' `alignment`: moved program headers take some of the room that is freed.
        """
        foreign = frozenset(target for target in code if self.is_foreign(target))
        has_wanted = any(target == SPIRV or target.startswith("gfx") for target in code.keys() - foreign)
        least = alignment + _MOVED_HEADERS if alignment else 0
        return foreign if has_wanted and sum(code[target] for target in foreign) >= least else frozenset()

    def is_foreign(self, key: str) -> bool:
        """`is_foreign` for the wanted targets, each key judged once."""
        if key not in self._foreign:
            self._foreign[key] = is_foreign(key, self._wanted)
        return self._foreign[key]


def saved_bytes(claims: Claims, ids: Collection[str]) -> int:
    """Bytes that the remedies of these findings save together, each counted once."""
    return sum(n_bytes for causes, n_bytes in claims.items() if not set(causes).isdisjoint(ids))


class LibraryCode(NamedTuple):
    """The GPU code inside one library, by target, and the alignment of the library's segments."""

    code: Mapping[str, int]
    alignment: int


def saved_by_card(files: Mapping[str, int], libraries: Sequence[LibraryCode], card: str) -> int:
    """Bytes that a prune to `card` alone takes out of files, by their targets, and of libraries."""
    counter = ClaimCounter([TargetId.parse(card)])
    deleted = sum(n_bytes for key, n_bytes in files.items() if counter.is_foreign(key))
    cut = (
        sum(row.code[target] for target in counter.cut_from(row.code, alignment=row.alignment))
        for row in libraries
    )
    return deleted + sum(cut)


def targets_if_valid(names: Iterable[str]) -> list[TargetId]:
    """The targets by name; an empty list where a name isn't a target: an image's label is free text."""
    try:
        return [TargetId.parse(name) for name in names]
    except BadTarget:
        return []


def is_foreign(key: str, wanted: list[TargetId]) -> bool:
    """Whether code for these processors is of no use to any wanted target; False for what isn't AMD's."""
    names = key.split("+")
    return (
        bool(wanted)
        and all(name.startswith("gfx") for name in names)
        and not any(serves_any(_parsed(name), wanted) for name in names)
    )


@lru_cache(maxsize=1 << 15)
def _parsed(name: str) -> TargetId:
    """Parsed once: code is judged for each of many cards."""
    return TargetId.parse(name)
