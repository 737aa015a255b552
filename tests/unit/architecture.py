"""Who imports whom, by the sources. Run as a program, it writes the diagram of docs/architecture.md."""

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MODULES = sorted(p for top in ("buildtool", "probes") for p in (ROOT / top).rglob("*.py"))
# ruff refuses two statements on a line, so every import begins one
IMPORT = re.compile(r"^( *)(?:from ([\w.]+) )?import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
BEGIN, END = "```mermaid\n", "```\n"
# the command lines stand in the programs' own folders, above everything else
COMMAND_LINES = {
    "buildtool.cli.program",
    "probes.cli.arguments",
    "probes.cli.program",
    "probes.cli.plan",
    "probes.cli.throughput",
    "probes.cli.fit",
    "probes.cli.place",
    "probes.cli.reports",
    "probes.cli.watch",
    "buildtool.__main__",
    "probes.__main__",
}

Node = TypeVar("Node", bound=ast.AST)
Graph = Mapping[str, set[str]]


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


@cache
def module_graph() -> Graph:
    """Module -> modules of ours that it imports; packages' own `__init__` are left out."""
    names = {name_of(path): path for path in MODULES if path.name != "__init__.py"}
    return {name: set(imports(path) & names.keys()) - {name} for name, path in names.items()}


def package_of(module: str) -> str:
    """The folder of a module; the command lines are a package of their own for each program."""
    return f"{module.split('.', maxsplit=1)[0]}.cli" if module in COMMAND_LINES else module.rpartition(".")[0]


@cache
def package_graph() -> Graph:
    """Package -> packages that its modules import."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in module_graph().items():
        package = package_of(module)
        found[package] |= {package_of(other) for other in others} - {package}
    return dict(found)


def longest_chain(modules: Iterable[str]) -> tuple[str, ...]:
    """The longest path of imports that stays within these modules. Raises CycleError for a circle."""
    inside = set(modules)
    graph = {name: module_graph()[name] & inside for name in inside}
    chains: dict[str, tuple[str, ...]] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        below = max((chains[other] for other in graph[name]), key=len, default=())
        chains[name] = (name, *below)
    return max(chains.values(), key=len)


def diagram() -> str:
    """The packages as a Mermaid flowchart. An import that a longer path implies isn't drawn."""
    graph = package_graph()
    above: dict[str, set[str]] = {}
    for package in graphlib.TopologicalSorter(graph).static_order():
        above[package] = set().union(*(above[other] | {other} for other in graph.get(package, ())))
    lines = ["flowchart TD"]
    for program in ("buildtool", "probes"):
        inside = sorted(package for package in graph if package.split(".")[0] == program)
        lines += [f"  subgraph {program}_program[{program}]"]
        lines += [f"    {_id(package)}[{_shown(package)}]" for package in inside] + ["  end"]
    for package, others in sorted(graph.items()):
        direct = {other for other in others if not any(other in above[third] for third in others)}
        lines += [f"  {_id(package)} --> {_id(other)}" for other in sorted(direct)]
    return "\n".join(lines) + "\n"


def _id(package: str) -> str:
    return package.replace(".", "_")


def _shown(package: str) -> str:
    return package.partition(".")[2].replace(".", "/") or "words and gates"


def drawn() -> tuple[str, str, str]:
    """The page in three parts, the diagram in the middle. Raises ValueError for a page without one."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no diagram")
    return before + begin, shown, end + after


if __name__ == "__main__":
    before, _, after = drawn()
    PAGE.write_text(before + diagram() + after)
