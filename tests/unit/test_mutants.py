"""What `make mutants` draws and judges."""

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))

import bench_mutants  # noqa: E402
from bench_mutants import drawn, wording_alone  # noqa: E402
from board import Board  # noqa: E402


def test_what_is_judged_to_be_equivalent_is_still_there() -> None:
    """The list that it replaced named functions that were gone, so that nothing ran."""
    for path in tomllib.loads(bench_mutants.JUDGED.read_text(encoding="utf-8")):
        place = Path("images") / path if path.startswith("service/") else Path(path)
        assert (ROOT / place).is_file()


def test_no_part_of_the_tests_that_is_left_out_is_gone() -> None:
    for name in bench_mutants.LEFT:
        assert (ROOT / "tests" / "unit" / name).exists()
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    for name in bench_mutants.APART:
        assert any(name in text for text in texts), name


def test_every_package_is_drawn_from_but_what_needs_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_mutants, "TREE", tmp_path)
    texts = {
        "buildtool/audit/a.py": "def f():\n    import os",
        "probes/placement/b.py": "from torch import nn\ndef f(): ...",
        "probes/placement/c.py": "def f():\n    import torch.nn",
        "probes/watch/__init__.py": "from d import f",
        "probes/watch/d.py": "def f(): ...",
        "probes/watch/e.py": "def f(): ...",
        "service/f.py": "from .model import torchish\ndef f(): ...",
        "tests/unit/test_a.py": "",
        "README.md": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    watch = ["probes/watch/d.py", "probes/watch/e.py"]
    assert bench_mutants.modules("*", 0, 1) == ["buildtool/audit/a.py", *watch, "service/f.py"]
    assert bench_mutants.modules("probes/*", 0, 1) == watch
    found = tomllib.loads(bench_mutants.configuration(watch))["tool"]["mutmut"]
    assert found["only_mutate"] == watch
    assert found["also_copy"] == ["README.md"]
    for seed in (1, 2, 3):
        audit, one, service = bench_mutants.modules("*", 1, seed)
        assert (audit, service) == ("buildtool/audit/a.py", "service/f.py")
        assert one in watch


def test_a_sample_is_the_same_each_time_and_another_with_another_seed() -> None:
    names = [f"m.x_f__mutmut_{number}" for number in range(1000)]
    assert drawn(names, 1) == drawn(names[::-1], 1) != drawn(names, 2)
    assert len({name for name in drawn(names, 1)[:100] if name in names[:500]}) in range(35, 66)


@pytest.mark.parametrize(
    ("before", "after", "alone"),
    [
        ('raise Fault("no such file")', 'raise Fault("XXno such fileXX")', True),
        ("print(f'{a} of {b}')", "print(f'{A} OF {B}')", True),
        ('f("a\\"b", 1)', 'f("A\\"B", 1)', True),
        ('f("a", 1)', 'f("a", 2)', False),
        ('f("a", 1)', 'f("a", )', False),
        ("a < b", "a <= b", False),
    ],
)
def test_the_wording_of_a_text_is_not_drawn(before: str, after: str, alone: bool) -> None:
    assert wording_alone([before], [after]) is alone


def test_survivors_are_listed_and_those_that_are_equivalent_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = tmp_path / "judged.toml"
    judged.write_text('["probes/a.py"]\n"x = 1 -> x = 2" = "not read"\n')
    monkeypatch.setattr(bench_mutants, "JUDGED", judged)
    codes = {"killed": 1, "slow": 36, "alive": 0, "equivalent": 0, "unreached": 33}
    board = Board("mutants", results=tmp_path)
    changes = dict.fromkeys(codes, "a < b -> a <= b") | {"equivalent": "x = 1 -> x = 2"}
    bench_mutants.judge(board, {name: ("probes/a.py", code) for name, code in codes.items()}, changes)
    rows = {row.get("bar") or row.get("figure") or row["mutant"]: row for row in board._rows}
    assert rows["mutants that a unit test notices"]["value"] == 0.5
    assert rows["equivalent, by judgement"]["value"] == 1
    assert [rows[name]["because"] for name in ("alive", "unreached")] == [
        "all tests pass",
        "no test reaches it",
    ]
