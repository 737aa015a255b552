"""A run in turns: two reports that belong together, whole after each pair, of which no side is foreign."""

from dataclasses import replace
from pathlib import Path

import pytest
from probe_samples import CPU_TORCH, machine

from probes.cli import program
from probes.core.errors import Exit
from probes.core.unknown import Unknown
from probes.measure import in_turns, session, supervisor, this_machine
from probes.measure.in_turns import Side
from probes.records.rows import Measurement
from probes.records.schema import Done, Failed, read_report

PYTHON = "/bin/sh"  # any program that is there: nothing starts it here


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Replaces the processes; returns what was asked of them: probe, first side, cases to leave out."""
    asked: list[tuple[str, int, int]] = []

    def both(sides: tuple[Side, Side], *, first: int, limit_s: float) -> object:
        asked.append((sides[0].job.probe, first, len(sides[0].job.done)))
        assert sides[0].job.settings == sides[1].job.settings, "other seeds give other orders"
        wild = 1.0 + 0.2 * (len(asked) % 2)
        found = []
        for number in in_turns.SIDES:
            records = [
                Measurement(name, 4096, 4096, 1, "wall", Unknown("none"), (at,) * 20)
                for name, at in (("steady", 1.0), ("wild", wild if number else 1.0))
                if f"{name} 4096" not in sides[number].job.done
            ]
            found.append(supervisor.JobResult(Done(), tuple(records), 1.0))
        return tuple(found)

    monkeypatch.setattr(in_turns, "run_both", both)
    monkeypatch.setattr(session, "workers_ahead", lambda *_: 0)
    monkeypatch.setattr(this_machine, "describe", lambda *_: replace(machine(), torch=CPU_TORCH))
    return asked


def test_both_reports_belong_together_and_after_two_pairs_only_rows_that_scatter_get_more(
    sides: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["run", "transfer", "--out", str(tmp_path), "--against", PYTHON]) == Exit.OK
    assert sides == [("transfer", n % 2, 0 if n < 2 else 1) for n in range(6)]
    a, b = (read_report(path) for path in sorted(tmp_path.glob("*.json")))
    assert a.pair == b.pair != ""
    assert [len(run.records) for run in a.runs] == [2, 2, 1, 1, 1, 1]
    assert "compare" in capsys.readouterr().out.splitlines()[-1]


def test_a_python_that_is_not_there_is_a_message_before_anything_begins(
    sides: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["run", "--out", str(tmp_path), "--against", str(tmp_path / "python")]) == Exit.USAGE
    assert "there is no Python to run" in capsys.readouterr().err
    assert not sides
    assert not list(tmp_path.iterdir())


def test_a_side_that_breaks_leaves_both_reports_with_what_was_measured(
    sides: list[tuple[str, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = in_turns.run_both
    broken = Failed("the worker was killed by SIGSEGV", "", int(Exit.BROKEN), wedged=False)

    def breaks(two: tuple[Side, Side], *, first: int, limit_s: float) -> object:
        a, b = good(two, first=first, limit_s=limit_s)
        return a, replace(b, outcome=broken) if len(sides) == 2 else b

    monkeypatch.setattr(in_turns, "run_both", breaks)
    assert program.main(["run", "transfer", "--out", str(tmp_path), "--against", PYTHON]) == Exit.BROKEN
    assert len(sides) == 2
    assert all(len(read_report(path).runs) == 2 for path in tmp_path.glob("*.json"))


def test_an_interrupt_in_a_pair_keeps_the_pairs_before_it(
    sides: list[tuple[str, int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = in_turns.run_both

    def interrupted(two: tuple[Side, Side], *, first: int, limit_s: float) -> object:
        if len(sides) == 2:
            raise KeyboardInterrupt
        return good(two, first=first, limit_s=limit_s)

    monkeypatch.setattr(in_turns, "run_both", interrupted)
    assert program.main(["run", "transfer", "--out", str(tmp_path), "--against", PYTHON]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == (
        f"interrupted; the two reports in {tmp_path} hold the pairs that were measured\n"
    )
    assert [len(read_report(path).runs) for path in tmp_path.glob("*.json")] == [2, 2]
