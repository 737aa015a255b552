"""What `make mutants` plants: every fault compiles, differs from the original, and has a name of its own."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from mutate import Mutant, mutants

SOURCE = '''"""A module."""
LIMIT = 10

def pick(rows: list[int], least: int = 0) -> int:
    """A docstring with 7 in it."""
    assert rows, "nothing"
    if len(rows) > LIMIT and not least:
        raise ValueError(f"more than {LIMIT} rows: {rows[0] + 1}")
    rows[0] = 5
    for one, other in zip(rows, rows, strict=True):
        if one == other:
            continue
    return sorted(rows, key=abs)[-1]
'''


def planted(source: str) -> list[Mutant]:
    return list(mutants("m.py", source))


def names(source: str) -> list[str]:
    return [one.name for one in planted(source)]


def test_every_fault_compiles_and_differs_from_the_original_and_from_the_others() -> None:
    count = len(planted(SOURCE))
    texts = {ast.unparse(planted(SOURCE)[index].tree()) for index in range(count)}
    assert len(texts) == count
    assert ast.unparse(ast.parse(SOURCE)) not in texts
    for text in texts:
        compile(text, "m.py", "exec")
    assert len(set(names(SOURCE))) == count


@pytest.mark.parametrize(
    "name",
    [
        "<module>: LIMIT = 10 -> LIMIT = 11",
        "pick: len(rows) > LIMIT -> len(rows) >= LIMIT",
        "pick: len(rows) > LIMIT and (not least) -> len(rows) > LIMIT or not least",
        "pick: not least -> least",
        "pick: rows[0] = 5 -> nothing",
        "pick: continue -> break",
        "pick: sorted(rows, key=abs) -> list(rows)",
        "pick: return sorted(rows, key=abs)[-1] -> return None",
    ],
)
def test_typical_faults_are_among_them(name: str) -> None:
    assert name in names(SOURCE)


@pytest.mark.parametrize("part", ["docstring", "nothing' ->", "strict", "list[int]"])
def test_what_no_behaviour_hangs_on_is_left_alone(part: str) -> None:
    assert not [name for name in names(SOURCE) if part in name.partition(" -> ")[0] and "raise" not in name]


def test_defaults_belong_to_import_time_and_bodies_to_their_function() -> None:
    by_name = {one.name: one.scope for one in planted(SOURCE)}
    assert by_name["<module>: LIMIT = 10 -> LIMIT = 11"].function == ""
    assert by_name["pick: not least -> least"].function == "pick"
    inner = (
        "class A:\n    x = 1\n    def f(self):\n        def g():\n            return 2\n        return g\n"
    )
    scopes = {one.name: one.scope for one in planted(inner)}
    assert scopes["A.f.g: return 2 -> return 3"].function == "A.f"
    assert scopes["A: x = 1 -> x = 2"].function == ""


def test_the_list_of_equivalents_names_modules_that_are_there_and_judged() -> None:
    import bench_mutants

    listed = tomllib.loads(bench_mutants.EQUIVALENT.read_text())
    assert listed.keys() <= set(bench_mutants.MODULES)
    assert [path for path in bench_mutants.MODULES if not (bench_mutants.ROOT / path).is_file()] == []
