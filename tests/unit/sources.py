"""The product's sources: their modules, what these import, and nodes of their syntax trees."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

ROOT = Path(__file__).parents[2]
MODULES = sorted(p for top in ("buildtool", "probes") for p in (ROOT / top).rglob("*.py"))
# ruff refuses two statements on a line, so every import begins one
IMPORT = re.compile(r"^( *)(?:from ([\w.]+) )?import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
Node = TypeVar("Node", bound=ast.AST)


def name_of(path: Path) -> str:
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def text_of(path: Path) -> str:
    """A file's text, read once for all tests."""
    return path.read_text(encoding="utf-8")


@cache
def _by_kind(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    found = defaultdict(list)
    for node in ast.walk(ast.parse(text_of(path))):
        found[type(node)].append(node)
    return dict(found)


def nodes(path: Path, kind: type[Node], *, where: str = "") -> list[Node]:
    """The nodes of one kind of a file, which is parsed once for all tests.

    None where its text doesn't match `where`: to parse all sources takes seconds.
    """
    found = _by_kind(path) if re.search(where, text_of(path)) else {}
    return cast("list[Node]", found.get(kind, []))


@cache
def taken(path: Path, *, top_level: bool = False) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The imports of a file, wherever in it or at its top level, from its text: (module, names from it)."""
    found = []
    for indent, module, rest in IMPORT.findall(text_of(path)):
        if not (top_level and indent):
            listed = re.sub(r"#.*", "", rest).strip("() \n").split(",")
            found.append((module, tuple(name.split()[0] for name in listed if name.strip())))
    return tuple(found)


@cache
def imports(path: Path, *, top_level: bool = False) -> frozenset[str]:
    """Every module that a file imports; `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for module, names in taken(path, top_level=top_level):
        found |= {module, *(f"{module}.{name}" for name in names)} if module else set(names)
    return frozenset(found)
