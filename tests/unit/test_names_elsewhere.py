"""What runs only with a GPU, torch, Docker or time still names what is there, found without importing it.

Continuous integration never collects those tests, so a module that is renamed would break them unseen.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import nodes, text_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("device", "torch", "docker", "bench")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("*.py"))
TOPS = {"probes": ROOT, "buildtool": ROOT, "service": ROOT / "images"}


@cache
def source_of(module: str, near: Path) -> Path | None:
    """The file of a module of ours, or of one beside the file that imports it; None for a library's."""
    top, *_ = parts = module.split(".")
    folders = [TOPS[top]] if top in TOPS else [near, *(ROOT / "tests" / folder for folder in FOLDERS)]
    for folder in folders:
        place = folder.joinpath(*parts)
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if place.is_dir() and top in TOPS:
            return place / "__init__.py"
    return None


@cache
def has(source: Path, name: str) -> bool:
    """Whether a module binds a name: most begin a line, and to parse takes a hundred times as long."""
    begun = rf"^(?:(?:async )?def |class ){name}\b|^{name}\b *[:=]"
    return bool(source.exists() and re.search(begun, text_of(source), re.MULTILINE)) or name in names_in(
        source
    )


@cache
def names_in(source: Path) -> frozenset[str]:
    """What a module binds at its top level, and the modules of a package."""
    found: set[str] = set()
    if source.name == "__init__.py":
        found |= {path.stem for path in source.parent.iterdir()}
    waiting = list(ast.parse(text_of(source)).body) if source.exists() else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.expr)]
        waiting += getattr(node, "handlers", [])
    return frozenset(found)


def missing(path: Path) -> Iterator[str]:
    """Modules and names of ours that a file asks for and that aren't there."""
    modules: dict[str, str] = {}  # local name -> module
    for node in nodes(path, ast.ImportFrom):
        source = source_of(node.module or "", path.parent)
        if source is None:
            if (node.module or "").split(".")[0] in TOPS:
                yield f"line {node.lineno}: {node.module}"
            continue
        for alias in node.names:
            if not has(source, alias.name):
                yield f"line {node.lineno}: {node.module}.{alias.name}"
            elif source_of(f"{node.module}.{alias.name}", path.parent):
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for direct in nodes(path, ast.Import):
        for alias in direct.names:
            source = source_of(alias.name, path.parent)
            if source is None and alias.name.split(".")[0] in TOPS:
                yield f"line {direct.lineno}: {alias.name}"
            if source is not None and (alias.asname or "." not in alias.name):
                modules[alias.asname or alias.name] = alias.name
    bound = {node.id for node in nodes(path, ast.Name) if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes(path, ast.arg)}
    for use in nodes(path, ast.Attribute):
        if isinstance(use.value, ast.Name) and use.value.id in modules.keys() - bound:
            source = source_of(modules[use.value.id], path.parent)
            if source and not use.attr.startswith("__") and not has(source, use.attr):
                yield f"line {use.lineno}: {modules[use.value.id]}.{use.attr}"


@pytest.mark.thorough
def test_files_that_are_not_collected_here_name_only_what_is_there() -> None:
    found = {str(path.relative_to(ROOT)): list(missing(path)) for path in FILES}
    assert {path: gone for path, gone in found.items() if gone} == {}


def test_names_that_are_gone_are_found(tmp_path: Path) -> None:
    far = tmp_path / "far.py"
    far.write_text(
        textwrap.dedent("""
        from probes.reports import crossover, gone
        from probes.gone import one
        from probes.records.schema import ProbeReport, Gone
        import buildtool.gone
        import probes.core.units as units
        def test(units_of):
            from probes.reports.crossover import nothing
            return crossover.nothing, units.parse_bytes, units.nothing
        """)
    )
    assert sorted(missing(far)) == [
        "line 2: probes.reports.gone",
        "line 3: probes.gone",
        "line 4: probes.records.schema.Gone",
        "line 5: buildtool.gone",
        "line 8: probes.reports.crossover.nothing",
        "line 9: probes.core.units.nothing",
        "line 9: probes.reports.crossover.nothing",
    ]
