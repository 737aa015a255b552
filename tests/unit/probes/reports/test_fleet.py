"""Which machine of a fleet is odd: named where one is, and nobody where none is."""

import random
from dataclasses import replace

import made_reports as make
import pytest

from probes.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.records.rows import Measurement
from probes.records.schema import ProbeReport
from probes.reports.fleet import Fleet, fleet_document, fleet_of
from probes.reports.html import render_page
from probes.reports.text import render_text

MACHINES_DIFFER = 0.01  # by nature: the standard deviation of a path's speed between machines


def fleet(seed: int, *, slower: float = 1.0) -> tuple[Fleet, str, str]:
    """Machines that differ by nature; one of them is slower in one path. Returns its name and the path."""
    draw = random.Random(seed)
    names = [f"node{number}" for number in range(draw.randint(3, 12))]
    victim, path = draw.choice(names), draw.choice(list(make.PATHS))
    reports = []
    for name in names:
        own = {each: draw.gauss(1, MACHINES_DIFFER) for each in make.PATHS}
        if name == victim:
            own[path] *= slower
        rows = make.transfers(make.PATHS, seed=draw.randrange(10**6))
        reports.append(make.made(make.ran("transfer", *(scaled(row, own[row.name]) for row in rows))))
    return fleet_of(reports, names), victim, path


def scaled(row: Measurement, factor: float) -> Measurement:
    device = tuple(time * factor for time in row.device_s)  # type: ignore[union-attr]
    return replace(row, device_s=device, wall_s=tuple(time * factor for time in row.wall_s))


@pytest.mark.thorough
@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(50))
def test_a_slow_machine_is_named_and_no_other(seed: int) -> None:
    seen, victim, path = fleet(seed, slower=1.25)
    assert seen.odd == (victim,)
    assert {oddity.group[1] for oddity in seen.oddities} == {path}


@pytest.mark.thorough
@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(50))
def test_nobody_is_named_where_machines_differ_by_nature(seed: int) -> None:
    assert fleet(seed)[0].odd == ()


def test_what_one_machine_alone_has_is_said_of_it() -> None:
    reports = [make.full_report(seed=n) for n in (1, 2, 3)]
    slow = make.made(make.ran("transfer", *(scaled(row, 2) for row in make.transfers(make.PATHS, seed=4))))
    odd = replace(slow, machine=make.machine(kernel="5.0-odd"))
    document = fleet_document(fleet_of([*reports, odd], ["a", "b", "c", "d"]))
    assert document.headline[0].startswith("d is odd: it alone has kernel 5.0-odd; slower by 2.0")


def test_names_of_machines_are_text_in_every_form() -> None:
    names = ["<b>x</b>", "`$(id)`", "a|b"]
    document = fleet_document(fleet_of([make.full_report(seed=n) for n in (1, 2, 3)], names))
    assert "<b>" not in render_page(document, (), raw="", name="")
    assert "a&#124;b" in render_text(document, markdown=True)


def test_two_machines_cannot_tell_and_strangers_have_nothing_in_common() -> None:
    with pytest.raises(ReportError, match="2 reports can't tell"):
        fleet_of([make.full_report(), make.full_report()], ["a", "b"])
    with pytest.raises(ReportError, match="no measured row"):
        fleet_of([make.full_report(), make.full_report(), make.broken_report()], ["a", "b", "c"])


def test_three_reports_become_markdown_and_a_page(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"n{number}").mkdir()
        report: ProbeReport = make.full_report(seed=number)
        (tmp_path / f"n{number}" / "r.json").write_text(to_json(report))
    files = [str(path) for path in sorted(tmp_path.rglob("r.json"))]
    assert main(["compare", *files, "--html", str(tmp_path / "page.html")]) == 0
    assert "No node is odd: 3 nodes" in capsys.readouterr().out
    assert "<h1>3 nodes</h1>" in (tmp_path / "page.html").read_text()
    assert main(["compare", *files[:2], "--html", str(tmp_path / "p.html"), "--force"]) == 2
