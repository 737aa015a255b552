import builtins
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import strict_readers as read
from probe_fakes import FakeBench, gauges
from probe_samples import CPU_TORCH, CUDA_TORCH, SETTINGS, done, failed, machine, report, waived

import probes
from probes import __main__
from probes.cli import program
from probes.core.errors import DeviceBusy, Exit, UsageError
from probes.core.units import parse_bytes
from probes.core.unknown import Unknown
from probes.measure import (
    catalog,
    probe_worker,
    scenarios,
    session,
    spill,
    supervisor,
    this_machine,
    transfer,
)
from probes.measure.journal import gpu_lock
from probes.measure.probe_worker import DESCRIBE, Job
from probes.records.facts import TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Expectation, Gap, Measurement, Small, Stop
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun, Waived, read_report, write_report
from probes.reports.kinds import RUN
from probes.reports.run import record_line
from probes.reports.run_tables import page_tables

GIB = 2**30


@pytest.fixture(scope="module")
def full() -> ProbeReport:
    """A report of all probes on the simulated GPU."""
    kept, transfer.MOST_SLOTS = transfer.MOST_SLOTS, 8
    bench = FakeBench(vram_bytes=140 * GIB)
    expected = Expectation("refuses", "It refuses.", "a test")
    spilled = spill.run(
        bench, SETTINGS, vram_total_bytes=bench.vram_bytes, expectation=expected, gauges=gauges(bench)
    )
    runs = (
        done("transfer", *transfer.run(bench, SETTINGS, 32 * GIB)),
        done("spill", *spilled),
        done("scenarios", *scenarios.run(FakeBench(vram_bytes=140 * GIB), SETTINGS, 32 * GIB)),
    )
    transfer.MOST_SLOTS = kept
    return report(*runs, torch=CUDA_TORCH)


def without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *rest: object) -> object:
        if name == "tabulate":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", fake)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("markdown", [True, False])
def test_a_report_reads_well_with_and_without_tabulate(
    full: ProbeReport, monkeypatch: pytest.MonkeyPatch, plain: bool, markdown: bool
) -> None:
    if plain:
        without_tabulate(monkeypatch)
    text = RUN.text(full, markdown=markdown)
    for part in (
        "The answer",
        "What follows",
        "largest residual",
        "h2d_pinned",
        "256 MiB",
        "zero_copy_all",
        "by timing",
        "Some GPU",
    ):
        assert part in text
    assert ("## transfer" in text) == markdown
    assert text.index("The answer") < text.index("h2d_pinned   ")


def test_in_markdown_nothing_that_follows_a_table_becomes_a_row_of_it(full: ProbeReport) -> None:
    lines = RUN.text(full, markdown=True).splitlines()
    after = [below for row, below in itertools.pairwise(lines) if row.startswith("|") and below[:1] != "|"]
    assert after
    assert set(after) == {""}


def test_markdown_tables_have_as_many_cells_in_every_line(full: ProbeReport) -> None:
    tables: dict[int, set[int]] = {}
    lines = RUN.text(full, markdown=True).splitlines()
    number = 0
    for before, line in zip(["", *lines], lines, strict=False):
        number += line.startswith("|") and not before.startswith("|")
        if line.startswith("|"):
            tables.setdefault(number, set()).add(line.count("|"))
    assert len(tables) == 4
    assert all(len(widths) == 1 for widths in tables.values())


def test_every_record_has_its_line_or_none_on_purpose(full: ProbeReport) -> None:
    lines = [record_line(record) for run in full.runs for record in run.records]
    assert any("expected: It refuses." in line for line in lines)
    assert any("asked the driver" in line for line in lines)
    assert any("stopped at" in line for line in lines)
    assert any("GB/s" in line for line in lines)
    assert any("batch 256" in line for line in lines)


def test_list_names_every_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["list"]) == Exit.OK
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == ["transfer", "breakeven", "spill", "scenarios"]


def test_an_unknown_probe_is_reported_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["run", "transfr"]) == Exit.USAGE
    assert "choose from: breakeven, scenarios, spill, transfer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["run", "--vram", "4 apples"], ["run", "--qui"], ["show"]])
def test_wrong_words_are_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(words)
    assert raised.value.code == Exit.USAGE
    assert "usage: python3 -m probes" in capsys.readouterr().err


def test_a_report_that_is_none_is_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text("{}")
    assert program.main(["show", str(tmp_path / "r.json")]) == Exit.DATA
    assert "not a probe report" in capsys.readouterr().err


def test_show_prints_a_file(tmp_path: Path, full: ProbeReport, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(full, tmp_path / "r.json")
    assert program.main(["show", str(tmp_path / "r.json")]) == Exit.OK
    assert "vram_read" in capsys.readouterr().out


EVIL = "\x1b]0;owned\x07\x1b[2J\u202e| [a](http://evil.example) <b> @team"


@pytest.fixture
def hostile(full: ProbeReport, tmp_path: Path) -> Path:
    """A report whose texts are all written by an attacker; its file."""
    broken = ProbeRun(EVIL, Failed(EVIL, EVIL, 5, wedged=False), 1.0, (Gap(EVIL, 5, EVIL),))
    named = machine(
        host=EVIL, kernel=EVIL, gpu_driver=Unknown(EVIL), torch=TorchFacts(EVIL, "none", "", 2, (), EVIL)
    )
    found = replace(full, machine=named, tool_version=EVIL, runs=(*full.runs, broken))
    write_report(found, tmp_path / "r.json")
    return tmp_path / "r.json"


def test_a_hostile_report_is_shown_without_escape_sequences(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--markdown"]):
        assert program.main(["show", str(hostile), *words]) == Exit.OK
        told = capsys.readouterr().out
        assert all(char.isprintable() or char == "\n" for char in told)
        assert "\\x1b]0;owned" in told.replace("\\\\", "\\").replace("\\]", "]")


def test_a_hostile_report_holds_no_link_or_tag_as_markdown(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(["show", str(hostile), "--markdown"])
    for _, tags, attributes in read.markdown_renderings(capsys.readouterr().out):
        assert not {"a", "b", "img", "script"} & set(tags)
        assert not [pair for pair in attributes if pair[0] != "align"]


Play = Callable[[Job], supervisor.JobResult]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], list[str]]:
    """Replace worker processes by a function; returns the list of jobs that were run."""

    def install(play: Play) -> list[str]:
        seen: list[str] = []

        def run(
            job: Job, *, limit_s: float, on_record: object, worker: object = None, command: object = None
        ) -> supervisor.JobResult:
            seen.append(job.probe)
            assert limit_s > 0
            return play(job)

        monkeypatch.setattr(probe_worker, "run_job", run)
        monkeypatch.setattr(session, "workers_ahead", lambda *_: 0)
        return seen

    return install


def ended(*records: object, outcome: object = None) -> supervisor.JobResult:
    return supervisor.JobResult(outcome or Done(), records, 0.5)  # type: ignore[arg-type]


def with_torch(facts: TorchFacts, then: supervisor.JobResult) -> Play:
    return lambda job: ended(facts) if job.probe == DESCRIBE else then


def only_report(folder: Path) -> ProbeReport:
    (path,) = folder.glob("*.json")
    return read_report(path)


def test_without_a_gpu_what_needs_one_is_waived_and_not_started(
    tmp_path: Path, workers: Callable[[Play], list[str]]
) -> None:
    seen = workers(with_torch(CPU_TORCH, ended()))
    assert program.main(["run", "--quick", "--out", str(tmp_path)]) == Exit.OK
    assert seen == [DESCRIBE, "transfer", "transfer"]
    outcomes = [run.outcome for run in merged(only_report(tmp_path)).runs]
    assert outcomes == [Done(), *[Waived("no GPU to measure: this torch is a CPU build")] * 3]


def test_each_process_leaves_its_small_work_in_the_report_beside_its_records(
    tmp_path: Path, workers: Callable[[Play], list[str]]
) -> None:
    small = Small("layers", (272e-6, 273e-6), (1.4e-3, 1.5e-3))
    workers(with_torch(CPU_TORCH, ended(small)))
    assert program.main(["run", "--quick", "--out", str(tmp_path)]) == Exit.OK
    (transfer, *_) = merged(only_report(tmp_path)).runs
    assert transfer.small == (small, small)
    assert transfer.records == ()
    (table,) = page_tables(transfer)
    assert table.rows == (("layers", "1", "272 µs", "1.45 ms"),) * 2


def test_require_gpu_is_unmet_without_one(tmp_path: Path, workers: Callable[[Play], list[str]]) -> None:
    workers(with_torch(CPU_TORCH, ended()))
    assert program.main(["run", "--require", "gpu", "--out", str(tmp_path)]) == Exit.REQUIRED
    assert [run.processes for run in merged(only_report(tmp_path)).runs] == [3, 1, 1, 1]


def test_without_torch_a_run_is_an_error_and_writes_no_empty_report(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Failed("torch can't be imported: No module named 'torch'", "", int(Exit.DEVICE), wedged=False)
    seen = workers(lambda job: ended(outcome=missing))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.DEVICE
    assert seen == [DESCRIBE]
    said = capsys.readouterr()
    assert said.err == (
        "error: nothing can be measured: torch can't be imported: No module named 'torch'\n"
        "  run the probes in an image that holds torch, or install it: pip install torch\n"
    )
    assert "The answer" not in said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("container", [True, False])
def test_the_page_of_a_report_in_a_container_is_not_named_by_a_path_that_the_host_lacks(
    container: bool,
    tmp_path: Path,
    workers: Callable[[Play], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    describe = this_machine.describe
    monkeypatch.setattr(this_machine, "describe", lambda *_: replace(describe(), container=container))
    workers(with_torch(CPU_TORCH, ended()))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "weir probe html" in line]
    (path,) = tmp_path.glob("*.json")
    given = path.name if container else str(path)
    assert line.endswith(f": weir probe html {given}")
    assert (f"in the folder that is {tmp_path} here" in line) == container


@pytest.mark.parametrize(("longest", "processes"), [("0", 2), ("1000", 6)])
def test_rows_that_scatter_are_measured_by_further_processes_while_there_is_time(
    longest: str, processes: int, tmp_path: Path, workers: Callable[[Play], list[str]]
) -> None:
    asked: list[tuple[str, ...]] = []

    def play(job: Job) -> supervisor.JobResult:
        if job.probe == DESCRIBE:
            return ended(CPU_TORCH)
        asked.append(job.done)
        at = {"steady": 1.0, "wild": 1.0 + 0.2 * (len(asked) % 2)}
        rows = [
            Measurement(name, 4096, 4096, 1, "wall", Unknown("none"), (seconds,) * 20)
            for name, seconds in at.items()
            if f"{name} 4096" not in job.done
        ]
        return ended(*rows)

    workers(play)
    words = ["run", "transfer", "--quick", "--longest", longest, "--out", str(tmp_path)]
    assert program.main(words) == Exit.OK
    assert asked == [()] * 2 + [("steady 4096",)] * (processes - 2)
    (run,) = merged(only_report(tmp_path)).runs
    assert [len(row.times_s) for row in run.records] == [2, processes]


def test_a_broken_probe_does_not_stop_the_others(
    tmp_path: Path, workers: Callable[[Play], list[str]]
) -> None:
    broken = Failed("the worker was killed by SIGSEGV", "", int(Exit.BROKEN), wedged=False)
    seen = workers(with_torch(CUDA_TORCH, ended(outcome=broken)))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.BROKEN
    assert seen == [DESCRIBE, "transfer", "breakeven", "spill", "scenarios"]


def test_after_a_wedge_nothing_more_is_started(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    wedged = Failed("wedged: SIGKILL did not end process 7", "", int(Exit.BROKEN), wedged=True)
    seen = workers(with_torch(CUDA_TORCH, ended(outcome=wedged)))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.BROKEN
    assert seen == [DESCRIBE, "transfer"]
    assert only_report(tmp_path).runs[0].outcome == wedged
    assert "wedged" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured_and_names_it(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def play(job: Job) -> supervisor.JobResult:
        if job.probe == "spill":
            return ended(Stop("floor", 0, "a test"), outcome=Failed("interrupted", "", 130, wedged=False))
        return ended(CUDA_TORCH) if job.probe == DESCRIBE else ended()

    workers(play)
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.INTERRUPTED
    (path,) = tmp_path.glob("*.json")
    assert f"run --resume {path}" in capsys.readouterr().err
    runs = only_report(tmp_path).runs
    assert [run.probe for run in runs] == ["transfer", "breakeven", "spill"]
    assert len(runs[2].records) == 1


def test_an_interrupt_before_anything_is_measured_promises_no_report(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    workers(lambda _job: ended(outcome=Failed("interrupted", "", 130, wedged=False)))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.INTERRUPTED
    said = capsys.readouterr().err
    assert said.startswith("interrupted")
    assert "resume" not in said


def test_an_interrupt_while_the_command_line_is_imported_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "probes.cli.program":
                raise KeyboardInterrupt

    for name in ("probes.cli", "probes.cli.program"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(probes, "cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert __main__.main(["list"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "interrupted; nothing was begun\n"


def test_an_unwritable_folder_shows_before_anything_is_measured(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = workers(with_torch(CPU_TORCH, ended()))
    (tmp_path / "file").write_text("")
    assert program.main(["run", "--out", str(tmp_path / "file")]) == Exit.DATA
    assert seen == [DESCRIBE]
    assert "--out DIR" in capsys.readouterr().err


def test_two_runs_do_not_share_a_gpu(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = workers(with_torch(CUDA_TORCH, ended()))
    with gpu_lock(tmp_path, "0000:03:00.0"):
        assert program.main(["run", "--out", str(tmp_path)]) == Exit.DEVICE
    assert seen == [DESCRIBE]
    assert "another run is measuring GPU 0000:03:00.0" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))
    assert program.main(["run", "--out", str(tmp_path)]) == Exit.OK


def test_different_gpus_do_not_wait_for_each_other(tmp_path: Path) -> None:
    one, other = "0000:03:00.0", "0000:04:00.0"
    with gpu_lock(tmp_path, one), gpu_lock(tmp_path, other), pytest.raises(DeviceBusy):
        gpu_lock(tmp_path, other).__enter__()


def test_reports_of_one_second_do_not_overwrite_each_other(
    tmp_path: Path, workers: Callable[[Play], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(with_torch(CPU_TORCH, ended()))
    monkeypatch.setattr(session, "file_name", lambda _: "same.json")
    for _ in range(3):
        program.main(["run", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same-2.json", "same-3.json", "same.json"]


@pytest.mark.parametrize(
    ("found", "require", "code"),
    [
        (report(done("transfer"), waived()), False, Exit.OK),
        (report(waived()), True, Exit.REQUIRED),
        (report(done("transfer"), torch=CUDA_TORCH), True, Exit.OK),
        (report(failed(4)), True, Exit.BROKEN),
        (report(failed(3)), False, Exit.DEVICE),
        (report(failed(3), failed(4)), False, Exit.BROKEN),
        (report(torch=Unknown("no torch")), False, Exit.DEVICE),
        (
            report(
                torch=replace(CUDA_TORCH, gpus=(), obstacle="no driver"), device_files=("/dev/nvidiactl",)
            ),
            False,
            Exit.DEVICE,
        ),
        (report(torch=replace(CUDA_TORCH, gpus=(), obstacle="no driver")), False, Exit.OK),
    ],
)
def test_exit_codes_say_what_happened(found: ProbeReport, require: bool, code: Exit) -> None:
    assert session.exit_code(found, require_gpu=require) == code


def test_the_variant_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIR_VARIANT", raising=False)
    assert session.file_name(report(host="a b/c")) == "20260208T120000Z-a-b-c.json"
    monkeypatch.setenv("WEIR_VARIANT", "cpu")
    assert session.file_name(report()) == "20260208T120000Z-cpu.json"


def test_probes_are_selected_in_the_tables_order() -> None:
    assert [p.name for p in catalog.select(("spill", "transfer"))] == ["transfer", "spill"]
    assert catalog.select(()) == catalog.PROBES
    with pytest.raises(UsageError):
        catalog.select(("spill", "nonsense"))


def test_a_probe_that_needs_a_gpu_is_waived_only_without_one() -> None:
    (spill_probe,) = catalog.select(("spill",))
    assert catalog.waive(spill_probe, machine(torch=CUDA_TORCH)) is None
    assert catalog.waive(spill_probe, machine()) == "no GPU to measure: this torch is a CPU build"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4GiB", 4 * GIB),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * GIB // 2),
        ("4GB", 4 * 10**9),
        ("100kB", 10**5),
        ("1KiB", 1024),
        ("7B", 7),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 G", "-1GiB", "4GiBs", "1e9", "nan", "9" * 400 + "GiB", "\u0664GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("words", [["run", "--qui"], ["machine", "--js"], ["show", "r.json", "--mark"]])
def test_an_option_that_is_cut_short_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main(words)
    assert refused.value.code == Exit.USAGE
    assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_an_option_that_is_mistyped_is_refused_by_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["run", "--quickk"])
    printed = capsys.readouterr().err
    assert "did you mean --quick?" in printed
    assert "run --help" in printed


@pytest.mark.parametrize(
    "words", [["--model", "mlp"], ["--dtype", "float32"], ["--out", "elsewhere"], ["--seed", "0"], ["spill"]]
)
def test_no_setting_is_silently_dropped_when_a_run_is_resumed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["run", "--resume", "r.json", *words]) == Exit.USAGE
    assert "--resume uses the run's own settings" in capsys.readouterr().err


def test_a_folder_whose_name_no_file_system_takes_is_no_traceback(
    tmp_path: Path, workers: Callable[[Play], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    workers(with_torch(CPU_TORCH, ended()))
    assert program.main(["run", "transfer", "--out", str(tmp_path / ("a" * 300))]) == Exit.DATA
    assert "File name too long\n  check the path" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "9223372036854775808", "9" * 400, "1e3", "0x7", "\u0664"])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_measured(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main(["run", f"--seed={seed}"])
    assert refused.value.code == Exit.USAGE
    assert "is not a whole number from 0 to 2^63 - 1" in capsys.readouterr().err
