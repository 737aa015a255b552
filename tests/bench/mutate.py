"""Small faults for `make mutants`: each one changes a single expression or statement of a module. Pure.

What is changed: a comparison and its boundary, arithmetic, constants, `and`, `or` and `not`, conditions,
the value that is returned, one end of a slice, `min`, `max`, `any`, `all`, `sorted`, `abs`; statements are
deleted.
What isn't, because no behaviour depends on it or only prose does: annotations, decorators, docstrings,
`assert`, `Literal[...]`, `zip(strict=)`, `usedforsecurity=`, `flush=`, the name `utf-8`, texts with a blank
in them and texts inside `raise` or an f-string.
"""

import ast
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
TELLING = (ast.expr, ast.keyword, ast.Assign, ast.AnnAssign, ast.Return)  # a constant alone says too little
LONGEST = 120  # characters of an expression in a name
Slot = str | tuple[str, int]  # a field of a node, or an element of one
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Scope:
    """Where a node stands. `function` is the outermost function around it, empty at import time."""

    qualname: str = ""
    function: str = ""
    lines: frozenset[int] = frozenset()  # of the statement, without the statements inside it
    prose: bool = False  # inside `raise` or an f-string


@dataclass(frozen=True)
class Mutant:
    """One fault. `name` identifies it as long as the expression and its function stay as they are."""

    path: str
    name: str
    scope: Scope
    line: int
    _apply: Callable[[], None] = field(repr=False, compare=False)
    _tree: ast.Module = field(repr=False, compare=False)

    def tree(self) -> ast.Module:
        """The module with the fault in it. All of a module's mutants share the tree: use one per process."""
        self._apply()
        return ast.fix_missing_locations(self._tree)


def mutants(path: str, source: str) -> tuple[Mutant, ...]:
    """Every mutant of a module, in the order of its text."""
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    found = []
    for parent, slot, old, new, scope in list(_below(tree, Scope())):
        apply, undo = _setter(parent, slot, new), _setter(parent, slot, old)
        around = parent if isinstance(old, ast.Constant) and isinstance(parent, TELLING) else None
        before = _text(around or old)
        apply()
        name = f"{scope.qualname or '<module>'}: {before} -> {_text(around or new)}"
        undo()
        seen[name] += 1
        full = name if seen[name] == 1 else f"{name} (#{seen[name]})"
        found.append(Mutant(path, full, scope, old.lineno, apply, tree))
    return tuple(found)


def _text(node: ast.AST) -> str:
    text = "nothing" if isinstance(node, ast.Pass) else " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _setter(parent: ast.AST, slot: Slot, new: ast.AST) -> Callable[[], None]:
    if isinstance(slot, str):
        return lambda: setattr(parent, slot, new)
    name, index = slot
    return lambda: getattr(parent, name).__setitem__(index, new)


def _below(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Slot, ast.AST, ast.AST, Scope]]:
    """The changes (parent, slot, old node, new node, scope) of everything inside a node."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_idle(child, node):
                continue
            inner = _scope(child, node, name, scope)
            for new in _instead(child, node, inner):
                yield node, name if index is None else (name, index), child, new, inner
            yield from _below(child, inner)


def _is_idle(child: ast.AST, parent: ast.AST) -> bool:
    """Nothing that a caller could notice hangs on it."""
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        return True  # a docstring, or `...`
    if isinstance(child, ast.Subscript) and ast.unparse(child.value) in ("Literal", "typing.Literal"):
        return True
    if isinstance(child, ast.keyword) and child.arg == "strict":
        return isinstance(parent, ast.Call) and ast.unparse(parent.func) == "zip"
    if isinstance(child, ast.keyword) and child.arg in ("usedforsecurity", "flush"):
        return True
    if isinstance(child, ast.Constant) and child.value == "utf-8":
        return True  # Python takes `utf-8~` for the same
    return isinstance(child, (ast.Assert, ast.Import, ast.ImportFrom))


def _scope(child: ast.AST, parent: ast.AST, name: str, scope: Scope) -> Scope:
    if isinstance(parent, FUNCTIONS) and name == "body":
        qualname = f"{scope.qualname}{'.' if scope.qualname else ''}{parent.name}"
        scope = replace(scope, qualname=qualname, function=scope.function or qualname)
    elif isinstance(parent, ast.ClassDef) and name == "body":
        scope = replace(scope, qualname=f"{scope.qualname}{'.' if scope.qualname else ''}{parent.name}")
    if isinstance(child, (ast.Raise, ast.JoinedStr)):
        scope = replace(scope, prose=True)
    if isinstance(child, ast.stmt):
        inside = {n.lineno for block in _blocks(child) for n in block}
        last = min(inside, default=(child.end_lineno or child.lineno) + 1)
        scope = replace(scope, lines=frozenset(range(child.lineno, max(last, child.lineno + 1))))
    elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
        first = child.lineno if isinstance(child, ast.ExceptHandler) else child.pattern.lineno
        scope = replace(scope, lines=frozenset(range(first, max(child.body[0].lineno, first + 1))))
    return scope


def _blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, [])
        if isinstance(block, list) and block:
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _instead(node: ast.AST, parent: ast.AST, scope: Scope) -> Iterator[ast.AST]:
    """What could stand in a node's place."""
    match node:
        case ast.Compare():
            yield from _compared(node)
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            yield _with(node, op=COMPUTED[type(op)]())
        case ast.AugAssign(op=op):
            if type(op) in COMPUTED:
                yield _with(node, op=COMPUTED[type(op)]())
            yield _nothing(node)
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant():
            yield from _constants(node, parent, scope)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            kept = node.args if name != "sorted" else node.args[:1]
            keywords = node.keywords if name != "sorted" else []
            yield _with(node, func=ast.Name(SWAPPED[name], ast.Load()), args=kept, keywords=keywords)
        case ast.Call(func=ast.Name(id="abs"), args=[only]):
            yield only
        case ast.Slice(lower=lower, upper=upper):
            for end in ("lower", "upper"):
                if isinstance(getattr(node, end), (ast.Name, ast.Attribute, ast.BinOp, ast.Call)) and (
                    lower or upper
                ):
                    yield _with(node, **{end: None})
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and isinstance(value.value, (bool, type(None)))):
                yield _with(node, value=ast.Constant(None))
        case ast.Return():
            yield _nothing(node)
        case ast.Break():
            yield ast.copy_location(ast.Continue(), node)
        case ast.Continue():
            yield ast.copy_location(ast.Break(), node)
        case ast.Expr() | ast.Raise() | ast.Delete():
            yield _nothing(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _nothing(node)
    yield from _conditions(node, parent)


def _conditions(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    """A condition turned round, unless another mutant does the same; a filter of a comprehension left out."""
    if not isinstance(node, ast.expr):
        return
    if isinstance(parent, ast.comprehension) and node in parent.ifs:
        yield ast.copy_location(ast.Constant(True), node)
    if not isinstance(parent, (ast.If, ast.IfExp, ast.match_case)):
        return
    tested = parent.guard if isinstance(parent, ast.match_case) else parent.test
    ordered = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    same = isinstance(node, ast.UnaryOp) or (
        isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], ordered)
    )
    if node is tested and not same:
        yield ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    for index, op in enumerate(node.ops):
        ops = list(node.ops)
        ops[index] = COMPARED[type(op)]()
        yield _with(node, ops=ops)


def _constants(node: ast.Constant, parent: ast.AST, scope: Scope) -> Iterator[ast.AST]:
    value = node.value
    new: object
    match value:
        case bool():
            new = not value
        case int():
            new = value + 1
        case float():
            new = value * 2 if value and not math.isinf(value) else 1.0
        case bytes():
            new = value + b"~"
        case str() if not (scope.prose or set(value) & {" ", "\n"}) or (value == " " and not scope.prose):
            new = value + "~"
        case _:
            return
    if isinstance(parent, ast.FormattedValue):
        return
    yield ast.copy_location(ast.Constant(new), node)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of the node itself, but not of what is inside it."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _nothing(node: ast.AST) -> ast.AST:
    return ast.copy_location(ast.Pass(), node)
