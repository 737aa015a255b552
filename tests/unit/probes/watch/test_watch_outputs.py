"""The files of a watch: pipes, full devices, one file for two purposes, places that can't be written."""

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from watch_samples import SUBJECT, sample

from probes.cli.program import main
from probes.core.errors import ReportError, UsageError
from probes.core.output import OutputLost
from probes.records.files import reserving
from probes.records.watch import Energy, Sample
from probes.watch import recording
from probes.watch.recording import Recorder, named_watch, open_recorders
from probes.watch.watcher import Readers, require_distinct


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def reading(pipe: Path) -> int:
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("option", ["--jsonl", "--csv", "--report"])
def test_a_pipe_without_a_reader_is_refused_and_not_waited_for(
    option: str, pipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--for", "0.05", option, str(pipe)]) == 5
    assert f"can't write {pipe}: nobody reads this pipe" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_pipes_reader_gets_the_samples_and_the_report(pipe: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "second")
    ends = [reading(pipe), reading(tmp_path / "second")]
    asked = ["--jsonl", str(pipe), "--report", str(tmp_path / "second")]
    assert main(["watch", "--for", "0.05", "--interval", "0.02", "--plain", *asked]) == 0
    samples, report = (os.read(end, 1 << 20).decode() for end in ends)
    for end in ends:
        os.close(end)
    assert recording.subject_of(samples.splitlines()[0])
    assert '"kind": "watch"' in report


def recorder(path: Path) -> Recorder:
    (found,) = open_recorders(SUBJECT, jsonl=path, csv=None)
    return found


def test_a_slow_reader_costs_samples_and_not_the_watch(
    pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = reading(pipe)
    made = recorder(pipe)
    heard = b""
    n = 0
    while not capsys.readouterr().err:  # the pipe fills
        made.add(sample(n / 4, power_w=100.0))
        n += 1
    made.add(sample(n / 4, power_w=100.0))
    heard += os.read(end, 1 << 20)
    for at in range(n + 1, n + 4):
        made.add(sample(at / 4, power_w=100.0))
    said = made.close()
    heard += os.read(end, 1 << 20)
    os.close(end)
    assert said == f"{pipe} lacks 2 of {n + 4:,} samples: its reader doesn't keep up"
    (tmp_path / "heard").write_bytes(heard)
    report, _ = named_watch(tmp_path / "heard")
    assert report.pace.samples == n + 2
    assert "doesn't take" not in capsys.readouterr().err  # it was said once


def test_a_line_after_a_lost_one_repeats_the_reasons_that_were_lost_with_it(
    pipe: Path, tmp_path: Path
) -> None:
    from probes.core.unknown import Unknown

    end = reading(pipe)
    made = recorder(pipe)
    heard = os.read(end, 1 << 20)
    os.close(end)
    made.add(sample(0.0, uses=Unknown("hidden")))  # nobody reads
    end = reading(pipe)
    made.add(sample(0.25, uses=Unknown("hidden")))
    heard += os.read(end, 1 << 20)
    os.close(end)
    assert made.close().endswith("lacks 1 of 2 samples: its reader has gone")
    (found,) = recording.samples_of(heard.decode().splitlines()[1:])
    assert found.cards[0].processes == Unknown("hidden")


def test_a_full_device_is_refused_before_anything_begins() -> None:
    with pytest.raises(ReportError, match="can't write /dev/full: No space left on device"):
        recorder(Path("/dev/full"))


@pytest.mark.thorough
def test_a_report_that_a_full_device_does_not_take_is_an_error_after_the_figures_were_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["watch", "--for", "0.05", "--interval", "0.02", "--plain", "--report", "/dev/full"]) == 5
    told = capsys.readouterr()
    assert "duration" in told.out
    assert "can't write /dev/full: No space left on device" in told.err


@pytest.mark.parametrize("kind", ["same", "dots", "symbolic", "hard", "free name", "slashes"])
def test_one_file_for_two_purposes_is_refused(kind: str, tmp_path: Path) -> None:
    one = tmp_path / "a.jsonl"
    other = {"dots": tmp_path / "x" / ".." / "a.jsonl", "slashes": Path(f"/{tmp_path}/a.jsonl")}.get(
        kind, tmp_path / "b.csv"
    )
    (tmp_path / "x").mkdir()
    if kind in ("same", "free name"):
        other = one
    if kind not in ("free name", "slashes", "dots"):
        one.write_text("")
    if kind == "symbolic":
        other.symlink_to(one)
    if kind == "hard":
        other.hardlink_to(one)
    with pytest.raises(UsageError, match="--jsonl and --csv are one file"):
        require_distinct({"--report": tmp_path / "r", "--jsonl": one, "--csv": other})


def test_the_ceilings_are_not_overwritten_with_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scan.json"
    file.write_text("{}")
    assert main(["watch", "--for", "0.05", "--ceilings", str(file), "--report", str(file)]) == 2
    assert "--ceilings and --report are one file" in capsys.readouterr().err
    assert file.read_text() == "{}"


def test_distinct_files_and_one_null_device_for_all_are_fine(tmp_path: Path) -> None:
    require_distinct({"--jsonl": tmp_path / "a", "--csv": tmp_path / "b", "--report": None})
    require_distinct({"--jsonl": Path("/dev/null"), "--csv": Path("/dev/null")})
    require_distinct({"--jsonl": tmp_path / "no" / "a", "--csv": tmp_path / "other" / "a"})


@pytest.mark.parametrize("place", ["file/report.json", ".", "loop"])
def test_a_report_that_cannot_be_written_is_noticed_before_the_watch_begins(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ReportError, match="can't write"), reserving(tmp_path / place, ""):
        pytest.fail("the watch began")


def test_checking_a_reports_place_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        with reserving(tmp_path / name, "") as place:
            assert place == tmp_path / name
            assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_samples_follow_a_link_as_reports_do(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("run7.jsonl")
    made = recorder(tmp_path / "latest")
    made.add(sample(0.0))
    assert made.close() == ""
    assert named_watch(tmp_path / "run7.jsonl")[0].pace.samples == 1


def written(path: Path) -> str:
    with closing(recorder(path)) as made:
        for at in range(3):
            made.add(sample(at / 4, power_w=100.0))
    return path.read_text()


@pytest.mark.parametrize("verb", ["show", pytest.param("html", marks=pytest.mark.thorough)])
def test_samples_and_reports_are_read_from_a_pipe_too(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(tmp_path / "a.jsonl")
    end, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    page = ["--out", str(tmp_path / "a.html")] if verb == "html" else []
    assert main([verb, f"/dev/fd/{end}", *page]) == 0
    os.close(end)
    assert verb == "html" or "3 samples" in capsys.readouterr().out


def test_a_broken_report_from_a_pipe_has_the_name_that_the_user_gave(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end, writing = os.pipe()
    os.write(writing, b"{")
    os.close(writing)
    assert main(["show", f"/dev/fd/{end}"]) == 5
    assert f"error: /dev/fd/{end} is not a probe report" in capsys.readouterr().err
    assert main(["html", f"/dev/fd/{end}"]) == 5
    os.close(end)


def test_a_stream_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("probes.reports.kinds.MOST_BYTES", 10_000)
    assert main(["show", "/dev/zero"]) == 5
    assert "can't read /dev/zero: more than 10,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--", "no-such-program"],
        ["--", "/dev/null"],
        ["--torch-allocator", "--", "python3", "-m"],
        ["--csv", "/dev/full/x", "--", "true"],
        ["--listen", "no.such.host.invalid:1", "--", "true"],
    ],
)
def test_what_an_earlier_watch_wrote_is_not_lost_over_one_that_cannot_begin(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("an hour of samples")
    (tmp_path / "r.json").write_text("their report")
    asked = ["--jsonl", str(tmp_path / "a.jsonl"), "--report", str(tmp_path / "r.json")]
    assert main(["watch", *asked, *words]) != 0
    assert (tmp_path / "a.jsonl").read_text() == "an hour of samples"
    assert (tmp_path / "r.json").read_text() == "their report"


def test_a_watch_goes_on_with_the_samples_of_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    earlier = written(file)
    file.write_text(f'{earlier}{{"at_s":0.75,"la')  # it was killed as it wrote
    assert written(file).startswith(earlier)
    written(file)
    assert capsys.readouterr().err.count(f"note: {file} has samples of an earlier watch;") == 2
    report, _ = named_watch(file)
    assert (report.pace.samples, report.pace.skipped) == (9, 0)
    assert report.duration_s == 1.5  # that of each, without the time between them
    assert report.subject == SUBJECT
    assert main(["show", str(file)]) == 0
    assert "9 samples" in capsys.readouterr().out


def test_time_that_nobody_watched_has_no_energy_whatever_the_cards_counter_says(tmp_path: Path) -> None:
    for joules in (0.0, 1e6):
        with closing(recorder(tmp_path / "a.jsonl")) as made:
            for at in range(3):
                made.add(sample(at / 4, power_w=100.0, energy_j=joules + 25 * at))
    energy = named_watch(tmp_path / "a.jsonl")[0].cards[0].energy
    assert isinstance(energy, Energy)
    assert (energy.joules, energy.covers_s) == (100.0, 1.0)


def test_rows_follow_those_with_the_same_columns(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    for _ in range(2):
        (made,) = open_recorders(SUBJECT, jsonl=None, csv=table)
        made.add(sample(0.0))
        assert made.close() == ""
    head, *rows = table.read_text().splitlines()
    assert head.startswith("at_s,")
    assert [row.partition(",")[0] for row in rows] == ["0.0", "0.0"]


@pytest.mark.parametrize("option", ["--jsonl", "--csv"])
def test_a_file_of_something_else_is_refused_before_the_command_starts_and_left_as_it_is(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("at_s,something\n")
    assert main(["watch", option, str(file), "--", "touch", str(tmp_path / "made")]) == 5
    assert "than this watch writes, and is left as it is\n  name another file" in capsys.readouterr().err
    assert file.read_text() == "at_s,something\n"
    assert not (tmp_path / "made").exists()


def test_a_head_for_which_there_is_no_room_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, write = written(tmp_path / "a.jsonl"), os.write

    def half(descriptor: int, data: bytes) -> int:
        if not data.startswith(b'{"form"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:20])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(ReportError, match="No space left"):
        recorder(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == earlier


def test_watches_of_other_cards_in_one_file_make_no_report(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl")
    with closing(open_recorders(replace(SUBJECT, host="n2"), jsonl=tmp_path / "a.jsonl", csv=None)[0]):
        pass
    with pytest.raises(ReportError, match=f"watches of {SUBJECT.host} and of n2 or of other cards"):
        named_watch(tmp_path / "a.jsonl")


def test_two_watches_do_not_write_into_one_file(tmp_path: Path) -> None:
    first = recorder(tmp_path / "a.jsonl")
    first.add(sample(0.25, power_w=100.0))
    kept = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(ReportError, match="another watch writes"):
        recorder(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == kept
    first.close()
    recorder(tmp_path / "a.jsonl").close()


def test_standard_output_on_a_log_is_gone_on_with_and_not_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("r+b", buffering=0) as given:
        given.seek(0, os.SEEK_END)
        made = recorder(Path(f"/proc/self/fd/{given.fileno()}"))
        made.add(sample(0.25, power_w=100.0))
        given.write(b"after\n")  # by the command, at the same place
        made.close()
    first, head, _, last = log.read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert recording.subject_of(head)


def test_a_time_beyond_a_day_is_refused_with_both_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--for", "172800"])
    assert "'172800' is not a number of seconds from 0.02 to 86400" in capsys.readouterr().err


class FullDisk:
    """Takes two samples, as an output on a disk that fills."""

    def __init__(self) -> None:
        self._n_shown = 0

    def show(self, _sample: object) -> None:
        self._n_shown += 1
        if self._n_shown == 3:
            raise OutputLost("No space left on device")

    def close(self) -> None:
        pass


def test_a_watch_whose_output_is_lost_keeps_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("probes.watch.watcher.view_for", lambda *_, **__: FullDisk())
    kept = tmp_path / "kept.json"
    assert main(["watch", "--for", "60", "--interval", "0.02", "--report", str(kept)]) == 5
    assert named_watch(kept)[0].pace.samples == 4
    assert "can't write standard output: No space left" in capsys.readouterr().err


def test_ctrl_c_in_the_first_sample_ends_a_watch_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = Readers.sample, []

    def interrupted(self: Readers, *when: Any) -> Sample:
        if not begun:
            begun.append(when)
            raise KeyboardInterrupt
        return real(self, *when)

    monkeypatch.setattr(Readers, "sample", interrupted)
    assert main(["watch", "--plain", "--report", str(tmp_path / "report.json")]) == 0
    assert named_watch(tmp_path / "report.json")[0].pace.samples == 1


@pytest.mark.thorough
def test_a_watch_writes_its_report_before_it_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_text: str) -> None:
        raise OutputLost("No space left on device")

    monkeypatch.setattr("probes.cli.watch.echo", lose)
    kept = tmp_path / "kept.json"
    assert main(["watch", "--for", "0.05", "--interval", "0.02", "--plain", "--report", str(kept)]) == 5
    assert named_watch(kept)[0].pace.samples
