"""Which modules a Python file may import: every import statement in it, whether a run reached it or not."""

import ast
import posixpath
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_MODULE = re.compile(r"(?:\.cpython-[^/.]+|\.abi3)?\.(?:py|so)$")
_BYTECODE = re.compile(r"(?P<folder>.*/)?__pycache__/(?P<stem>[^/]+)\.cpython-\d+(?:\.opt-\d)?\.pyc")
_IMPORTERS = ("import_module", "__import__")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements


def source_of(path: str) -> str:
    """The file that bytecode was compiled from, without which Python passes it over; else empty."""
    match = _BYTECODE.fullmatch(path)
    return f"{match['folder'] or ''}{match['stem']}.py" if match else ""


@dataclass(frozen=True)
class Modules:
    """The Python modules of an image: `path_of` a dotted name, `name_of` a file's path."""

    path_of: Mapping[str, str]
    name_of: Mapping[str, str]

    @classmethod
    def below(cls, roots: Iterable[str], paths: Iterable[str]) -> "Modules":
        """The modules below the directories that Python looks into, the first of which wins a name."""
        path_of: dict[str, str] = {}
        name_of: dict[str, str] = {}
        ordered = sorted(paths)
        for root in roots:
            prefix = f"{root}/"
            for path in ordered:
                if not path.startswith(prefix) or not _MODULE.search(path):
                    continue
                name = _MODULE.sub("", path[len(prefix) :]).replace("/", ".")
                name = name.removesuffix(".__init__")
                is_name = all(part.isidentifier() for part in name.split("."))
                if is_name and path_of.setdefault(name, path) == path:
                    name_of.setdefault(path, name)
        return cls(path_of, name_of)

    def with_packages(self, name: str) -> Iterator[str]:
        """The files of a module and of the packages that it is in, which are imported before it."""
        while name:
            if name in self.path_of:
                yield self.path_of[name]
            name = name.rpartition(".")[0]

    def imported_by(self, path: str, source: bytes, *, everywhere: bool) -> Iterator[str]:
        """The files that a module's own file may import; without `everywhere`, those that it does at once."""
        name = self.name_of.get(path)
        if name is None:
            return
        package = name if posixpath.basename(path) == "__init__.py" else name.rpartition(".")[0]
        for imported in imported_names(source, package, everywhere=everywhere):
            yield from self.with_packages(imported)


def imported_names(source: bytes, package: str, *, everywhere: bool) -> frozenset[str]:
    """The dotted names in a source's import statements; none for what Python can't read either.

    `from a import b` gives both `a` and `a.b`. With `everywhere`, also those inside functions. What only type
    checkers read isn't there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    calls = any(name.encode() in source for name in _IMPORTERS)
    return frozenset(_names(tree, package, everywhere=everywhere, calls=calls))


def _names(tree: ast.AST, package: str, *, everywhere: bool, calls: bool) -> Iterator[str]:
    """With `calls`, expressions are searched as well: for calls that import what a text names."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = _base(node, package)
                if base is not None:
                    yield base
                    yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
            case ast.If(test=test) if _last(test) == "TYPE_CHECKING":
                waiting += node.orelse
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not everywhere:
                pass
            case ast.Call(func=called, args=[ast.Constant(value=str() as text), *_]) if _last(
                called
            ) in _IMPORTERS and not text.startswith("."):
                yield text
            case _ if calls:
                waiting += ast.iter_child_nodes(node)
            case _:
                for part in _BLOCKS:
                    waiting += getattr(node, part, ())


def _last(expression: ast.expr) -> str:
    """The last name of what is named: `import_module` of `importlib.import_module`."""
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _base(node: ast.ImportFrom, package: str) -> str | None:
    """The module that names are imported from; None for a relative one that leaves its package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
