"""What a slim image keeps beside the files that runs opened: what they need in runs that nobody observed.

Whole packages' metadata and licences, settings, locales, what the C library loads by itself, the modules that
kept ones import (in branches that no run took, too), the libraries that kept ones link to, and links.
"""

import fnmatch
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from buildtool.core.errors import DataError
from buildtool.image.tar import normal_path
from buildtool.keep.imports import Modules, source_of

# kept wherever they are
_ALWAYS = (
    "etc/*",
    "*.dist-info/*",
    "*.egg-info",
    "*.egg-info/*",
    "var/lib/dpkg/*",
    "usr/share/common-licenses/*",
    "usr/share/doc/*/copyright",
    "usr/lib/locale/*",
    "usr/share/zoneinfo/*",
    "usr/share/ca-certificates/*",
    "usr/local/share/ca-certificates/*",
    "usr/lib/python3*/encodings/*",  # Python loads codecs by their names
    "usr/local/lib/python3*/encodings/*",
    "*/libnss_*.so*",  # which the C library loads for names of users and hosts
    "*/libgcc_s.so*",  # and for threads that end
    "*/ld-linux*.so*",
    "usr/bin/sh",  # for `docker exec`, and what `os.system` starts
    "usr/bin/dash",
    "bin/sh",
    "opt/weir/app/*",  # the service and the probes
)
_LITERAL = re.compile(r"""["']([^"'\n]{3,200})["']""")  # a text of Python, as far as a file's name goes


class Reason(Enum):
    """Why a file is kept."""

    OBSERVED = "opened by an observed run, or named in the keep-list"
    ALWAYS = "metadata, licences, settings, locales"
    IMPORTED = "imported or named by kept modules, perhaps"
    LINKED = "libraries that kept files link to"
    STRUCTURE = "links to what is kept, device files"


@dataclass(frozen=True)
class Node:
    """A path of an image's merged tree. `needed` are the names of libraries that a file links to."""

    kind: str  # "file", "directory", "link", "hard link" or "other"
    n_bytes: int = 0
    target: str = ""  # of a link; a hard link's is a path from the root
    source: bytes = field(default=b"", repr=False)  # of a Python module
    needed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tree:
    """An image's merged tree by path, without leading slashes, and where its Python looks for modules."""

    nodes: Mapping[str, Node]
    python_path: tuple[str, ...] = ()

    @cached_property
    def files(self) -> frozenset[str]:
        """The paths of what has content."""
        return frozenset(path for path, node in self.nodes.items() if node.kind in ("file", "hard link"))

    def resolve(self, path: str) -> str:
        """A path with the symbolic links in it followed, as far as they lead; it needn't be there."""
        done, rest, followed = "", path.split("/"), 0
        while rest and followed < 40:  # as Linux: path_resolution(7)
            part = rest.pop(0)
            here = f"{done}/{part}" if done else part
            node = self.nodes.get(here)
            if node is not None and node.kind == "link":
                followed += 1
                target = normal_path(posixpath.join("/", done, node.target))
                done, rest = "", [*(each for each in target.split("/") if each), *rest]
            else:
                done = here
        return posixpath.join(done, *rest)


def python_path(environment: Iterable[str], paths: Iterable[str]) -> tuple[str, ...]:
    """Where an image's Python looks for modules: PYTHONPATH, then the directories of the distributions."""
    named = next((text[11:] for text in environment if text.startswith("PYTHONPATH=")), "")
    roots = [normal_path(part) for part in named.split(":") if part]
    usual = re.compile(r"(?:.*/)?lib/python3[^/]*(?:/(?:lib-dynload|site-packages|dist-packages))?(?=/)")
    found = {match.group(0) for path in paths if (match := usual.match(path))}
    # the longest match of a path alone would hide the directories above it
    found |= {re.sub(r"/(?:lib-dynload|site-packages|dist-packages)$", "", root) for root in found}
    return (*roots, *sorted(found - set(roots)))


def kept_paths(tree: Tree, observed: Collection[str], names: Iterable[str] = ()) -> dict[str, Reason]:
    """What of a tree stays, and why. `observed` are files, by their paths without a leading slash.

    `names` are modules that count as observed. Raises DataError for one that the tree doesn't have.
    """
    kept: dict[str, Reason] = {}
    modules = Modules.below(tree.python_path, tree.files)
    _keep(kept, (tree.resolve(path) for path in observed), Reason.OBSERVED, tree)
    for name in names:
        if name not in modules.path_of:
            raise DataError(
                f"the image has no module {name}", "correct --restore, or take its line out of the keep-list"
            )
        _keep(kept, modules.with_packages(name), Reason.OBSERVED, tree)
    always = re.compile("|".join(fnmatch.translate(pattern) for pattern in _ALWAYS))
    paths = {path for path in tree.files if always.match(path)}
    _keep(kept, (tree.resolve(path) for path in paths), Reason.ALWAYS, tree)
    _keep_modules(kept, tree, modules)
    _keep_named(kept, tree, modules)
    _keep_libraries(kept, tree)
    _keep_structure(kept, tree)
    return kept


def _keep(kept: dict[str, Reason], paths: Iterable[str], reason: Reason, tree: Tree) -> None:
    for path in paths:
        node = tree.nodes.get(path)
        if node is not None:
            kept.setdefault(path, reason)
            if node.kind == "hard link":  # whose content is its target's
                _keep(kept, [node.target], reason, tree)


def _keep_modules(kept: dict[str, Reason], tree: Tree, modules: Modules) -> None:
    """Keep what the kept modules import, bytecode beside its source and the source of bytecode."""
    for path in [*kept]:  # without its source, bytecode isn't looked for
        if source := source_of(path):
            _keep(kept, [source], kept[path], tree)
    waiting = [path for path in kept if path.endswith(".py")]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        everywhere = kept[path] is Reason.OBSERVED
        for other in modules.imported_by(path, tree.nodes[path].source, everywhere=everywhere):
            if other not in seen:
                seen.add(other)
                _keep(kept, [other], Reason.IMPORTED, tree)
                if other.endswith(".py"):
                    waiting.append(other)
    by_source: dict[str, list[str]] = {}
    for path in tree.files:
        if source := source_of(path):
            by_source.setdefault(source, []).append(path)
    for source in [path for path in kept if path in by_source]:
        _keep(kept, by_source[source], kept[source], tree)


def _keep_named(kept: dict[str, Reason], tree: Tree, modules: Modules) -> None:
    """Keep programs and data of a package that its kept modules name in a text.

    A program may only ask whether a file is there, which no way of watching sees: torch does so with its
    torch_shm_manager.
    """
    tops = {path: _top(path, tree.python_path) for path in tree.files}
    named: dict[tuple[str, str], list[str]] = {}
    for path, top in tops.items():
        if top and path not in modules.name_of and not source_of(path):
            named.setdefault((top, posixpath.basename(path)), []).append(path)
    for path in [each for each in kept if each.endswith(".py")]:
        texts = set(_LITERAL.findall(tree.nodes[path].source.decode("utf-8", "replace")))
        for text in texts:
            _keep(kept, named.get((tops[path], posixpath.basename(text)), ()), Reason.IMPORTED, tree)


def _top(path: str, roots: Iterable[str]) -> str:
    """The directory of the package that a file belongs to, below one of the roots; empty for none."""
    for root in roots:
        if path.startswith(f"{root}/") and "/" in (rest := path[len(root) + 1 :]):
            return f"{root}/{rest.partition('/')[0]}"
    return ""


def _keep_libraries(kept: dict[str, Reason], tree: Tree) -> None:
    """Keep what kept files link to, by name, wherever an image has it."""
    by_name: dict[str, list[str]] = {}
    for path, node in tree.nodes.items():
        if node.kind in ("file", "hard link", "link"):
            by_name.setdefault(posixpath.basename(path), []).append(path)
    waiting = [*kept]
    while waiting:
        for name in tree.nodes[waiting.pop()].needed:
            for path in by_name.get(name, ()):
                real = tree.resolve(path)
                if real in tree.nodes and real not in kept:
                    _keep(kept, [real], Reason.LINKED, tree)
                    waiting.append(real)


def _keep_structure(kept: dict[str, Reason], tree: Tree) -> None:
    """Keep links that lead to what is kept, directories of what is kept, and those that are empty anyway."""
    _keep(kept, (path for path, node in tree.nodes.items() if node.kind == "other"), Reason.STRUCTURE, tree)
    full = {each for path, node in tree.nodes.items() if node.kind != "directory" for each in _above(path)}
    empty = {path for path, node in tree.nodes.items() if node.kind == "directory" and path not in full}
    needed = empty | {each for path in kept for each in _above(path)}
    links = {path: tree.resolve(path) for path, node in tree.nodes.items() if node.kind == "link"}
    more = True
    while more:  # a link may be all that is in a directory, to which another link leads
        leading = [path for path, to in links.items() if to in kept or to in needed or to not in tree.nodes]
        more = any(path not in kept for path in leading)
        _keep(kept, leading, Reason.STRUCTURE, tree)
        needed |= {each for path in leading for each in _above(path)}
    _keep(kept, needed, Reason.STRUCTURE, tree)


def _above(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path
