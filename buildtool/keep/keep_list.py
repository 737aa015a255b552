"""Keep-lists: which files of an image observed runs opened, as a text file beside the catalog.

A line each, sorted, each once, below comments: the same runs give the same bytes, and runs merge. `weir
observe` writes paths, and `gpu-code:` with the key of code that was loaded, `generated-gpu-code:` where a
library made it as it ran. By hand, a line may also be a directory, a pattern of `fnmatch` (whose `*` stands
for slashes, too), or the dotted name of a Python module.
"""

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from buildtool.core.errors import DataError
from buildtool.core.files import locked, reading, write_text
from probes.core import files
from probes.core.quoting import terminal

MAX_BYTES = 16 << 20  # the list of the cpu image takes 0.1 MB
HINT = "observe the image: weir observe IMAGE --keep FILE"
_HEADER = (
    "# Files that observed runs of an image opened. `weir observe --keep` adds to it, `weir build --keep` "
    "reads it.\n"
)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_WILD = re.compile(r"[*?\[]")
GPU_CODE = "gpu-code:"
GENERATED = f"generated-{GPU_CODE}"
_GPU_CODE = re.compile(r"(generated-)?gpu-code:[0-9a-f]{64}")
MOST_PATTERNS = 1000  # each is tried on all paths with its beginning


@dataclass(frozen=True)
class KeepList:
    """Paths from an image's root, with a leading slash, patterns of such paths, and names of modules.

    Each of the `restored` lines has to name something. `comments` are somebody's own.
    """

    lines: frozenset[str] = frozenset()
    restored: frozenset[str] = frozenset()
    comments: tuple[str, ...] = ()

    def with_lines(self, others: Iterable[str]) -> "KeepList":
        """The list with more lines."""
        return replace(self, lines=self.lines | frozenset(others))

    def restoring(self, others: Iterable[str]) -> "KeepList":
        """The list with more lines, which have to name something."""
        return replace(self.with_lines(others), restored=self.restored | frozenset(others))

    def text(self) -> str:
        """The file's content."""
        return _HEADER + "".join(f"{line}\n" for line in (*self.comments, *sorted(self.lines)))

    @property
    def modules(self) -> tuple[str, ...]:
        """The lines that name modules."""
        return tuple(sorted(line for line in self.lines if not line.startswith(("/", GPU_CODE, GENERATED))))

    @property
    def gpu_code(self) -> frozenset[str]:
        """The keys of GPU code that was loaded: `gpucode.loaded`. None where no run looked."""
        return self._keys(GPU_CODE)

    @property
    def generated_code(self) -> frozenset[str]:
        """The keys of GPU code that libraries made while they ran: no file needs to hold it."""
        return self._keys(GENERATED)

    def _keys(self, kind: str) -> frozenset[str]:
        return frozenset(line.removeprefix(kind) for line in self.lines if line.startswith(kind))

    def select(
        self, files_there: frozenset[str], resolve: Callable[[str], str] = lambda path: path
    ) -> tuple[frozenset[str], tuple[str, ...]]:
        """The files that paths and patterns name, without leading slashes, and the lines that name none.

        `resolve` follows the links in a path. Raises DataError for more than MOST_PATTERNS patterns, and for
        a restored line that names nothing.
        """
        absent = [line for line in self.lines if line.startswith("/") and line[1:] not in files_there]
        n_patterns = sum(_WILD.search(line) is not None for line in absent)
        if n_patterns > MOST_PATTERNS:
            raise DataError(
                f"the keep-list has {n_patterns:,} patterns; the limit is {MOST_PATTERNS:,}",
                "name directories instead",
            )
        chosen: set[str] = set()
        unused: list[str] = []
        ordered = sorted(files_there)
        for line in sorted(line[1:] for line in self.lines if line.startswith("/")):
            real = line if line in files_there else resolve(line)
            named = [real] if real in files_there else list(_named(real, ordered))
            chosen.update(named)
            if not named:
                unused.append(f"/{line}")
        if missing := next((line for line in unused if line in self.restored), None):
            raise DataError(f"the image has no {missing[:200]}", "correct what --restore names")
        return frozenset(chosen), tuple(unused)


def _named(line: str, ordered: Sequence[str]) -> Iterator[str]:
    """The paths below a directory or of a pattern: only those with its beginning are looked at."""
    wild = _WILD.search(line)
    beginning = line[: wild.start()] if wild else f"{line.rstrip('/')}/"
    is_named = re.compile(fnmatch.translate(line)).match if wild else lambda _path: True
    for at in range(bisect_left(ordered, beginning), len(ordered)):
        if not ordered[at].startswith(beginning):
            return
        if is_named(ordered[at]):
            yield ordered[at]


def is_line(text: str) -> bool:
    """Whether a text can be a line: a path or pattern that prints, a module, a key of GPU code."""
    return terminal(text) == text and (
        text.startswith("/") or _MODULE.fullmatch(text) is not None or _GPU_CODE.fullmatch(text) is not None
    )


def read_keep_list(path: Path) -> KeepList:
    """The list in a file. Raises DataError for one that can't be read, or isn't a keep-list."""
    with reading(path, HINT):
        try:
            text = files.read_text(path, most_bytes=MAX_BYTES)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no keep-list: it isn't UTF-8 text", HINT) from error
    kept, comments = set(), list[str]()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):  # as Windows ends lines
        if line.startswith("#"):
            comments += [line] if f"{line}\n" != _HEADER else []
        if not line or line.startswith("#"):
            continue
        if not is_line(line):
            shown = terminal(line[:60])
            raise DataError(
                f"{path}, line {number}: {shown} is neither a path from the root nor a module", HINT
            )
        kept.add(line)
    return KeepList(frozenset(kept), comments=tuple(comments))


def merge_into(path: Path, lines: Iterable[str]) -> tuple[KeepList, int]:
    """Add lines to a file, which needn't be there yet; the list, and how many are new. Raises DataError."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with locked(path.absolute().parent, lambda: None):  # against runs that end now
        old = read_keep_list(path) if path.exists() else KeepList()
        new = old.with_lines(lines)
        if new != old or not path.exists():
            write_text(path, new.text())
    return new, len(new.lines) - len(old.lines)
