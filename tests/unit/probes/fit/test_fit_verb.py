"""`weir probe fit` from its command line: answers, exit codes, files, arguments that don't go together."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from probes.cli import program
from probes.core.codec import decode, load, to_json
from probes.core.errors import DeviceUnusable, ProbeError
from probes.core.output import OutputLost
from probes.core.unknown import Unknown
from probes.fit.answer import by_trials, cpu_constants
from probes.fit.limits import verdict_of
from probes.fit.report import Built, FitReport, Largest, Measured, Parts, Phase, Question, Taken, Trial
from probes.fit.search import Hint
from probes.fit.worker import (
    NOT_BEGUN,
    SearchMessage,
    SearchRequest,
    SearchStart,
    assemble,
    refuse_what_the_host_lacks,
)
from probes.reports.fit import lines
from probes.reports.kinds import FIT
from probes.reports.pictures import draw_fit

NO = Unknown("not here")
MIB = 1 << 20
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_positions": 64}
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def run(*words: str) -> int:
    """The exit code of fit, for an H200 unless the words name a machine or measure on this one."""
    here = () if {"--machine", "--measure"} & set(words) else ("--machine", "h200")
    return program.main(["fit", *words, *here])


@pytest.mark.thorough
def test_what_does_not_fit_exits_1_and_names_the_smallest_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen2.5-3b", "--task", "training", "--lora", "16", "--tokens", "1024", "--machine", "wx4100")
    assert run(*words) == 1
    shown = capsys.readouterr().out
    assert "doesn't fit" in shown
    assert "Smallest budget that works" in shown
    assert "gradient checkpointing" in shown
    assert run("qwen2.5-0.5b", "--machine", "wx4100", "--tokens", "512") == 0
    assert ": fits into" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_bars_are_as_long_as_what_they_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    run("qwen2.5-0.5b", "--machine", "wx4100", "--tokens", "512", "--task", "training")
    lines = re.findall(r"^.*? ([\d.]+) (MiB|GiB) +(#+)$", capsys.readouterr().out, re.MULTILINE)
    sizes = [float(number) * (1024 if unit == "GiB" else 1) for number, unit, _ in lines]
    assert len(sizes) >= 3
    longest = max(len(bar) for _, _, bar in lines)
    assert longest > 10
    for size, (_, _, bar) in zip(sizes, lines, strict=True):
        assert len(bar) == pytest.approx(longest * size / max(sizes), abs=1)


@pytest.mark.thorough
def test_predicted_and_measured_never_share_an_unlabelled_column(capsys: pytest.CaptureFixture[str]) -> None:
    run("qwen2.5-0.5b", "--machine", "mi50")
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "not measured" in shown


@pytest.mark.thorough
def test_the_files_are_written_and_hold_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "fit.json", tmp_path / "fit.svg"
    assert run("gpt2-xl", "--machine", "mi210", "--json", str(out), "--picture", str(picture)) == 0
    report = decode(FitReport, load(out.read_text(encoding="utf-8")), "fit")
    assert report.question.model == "gpt2-xl"
    drawing = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert drawing.tag.endswith("svg")
    assert lines(report) in capsys.readouterr().out


def test_a_hostile_name_is_quoted_in_the_picture_and_the_text() -> None:
    report = _report()
    bad = FitReport(**{**vars(report), "machine": "\x1b[2J<script>", "notes": ("<b>\x1b]0;x\x07",)})
    assert "\x1b" not in lines(bad)
    named = Question("<script>alert(1)</script>")
    assert "<script>" not in draw_fit(FitReport(**{**vars(report), "question": named}))


def _report() -> FitReport:
    from probes.fit.answer import answer
    from probes.placement.models.reading import describe
    from probes.placement.planner.machine import profile

    return answer(describe("bert-base"), Question("bert-base", tokens=128), profile("mi50"), budget=None)


@pytest.mark.parametrize(
    "words",
    [
        ("--lora", "8"),
        ("--tokens", "513"),
        ("--checkpointing",),
        ("--targets", "q_proj"),
        ("--task", "training", "--lora", "8", "--targets", ",,"),
        ("--precision", "amp-bf16"),
        ("--task", "training", "--optimizer", "adamw8bit"),
        ("--measure", "cpu"),
        ("--batch", "0"),
        ("--batch", "-3"),
        ("--batch", "1" * 40),
        ("--tokens", "nan"),
        ("--budget", "-1"),
        ("--machine", "no-such-card"),
        ("--budget", "900GiB", "--machine", "wx4100"),
        ("--optimizer", "sgd"),
        ("--optimizer", "adamw"),
        ("--accumulate", "4"),
        ("--axis", "tokens"),
        ("--limit", "60"),
        ("--cap", "process"),
        ("--measure", "gpu", "--budget", "1GiB", "--cap", "process"),
        ("--measure", "cpu", "--budget", "1GiB", "--machine", "mi50"),
        ("--json", "fit.json", "--picture", "fit.json"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(words: tuple[str, ...]) -> None:
    try:
        code = run("bert-base" if "513" in words else "qwen2.5-0.5b", *words)
    except SystemExit as stopped:  # argparse's own
        code = int(str(stopped.code))
    assert code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer", "sgd"), "add --task training"),
        (("--accumulate", "2"), "add --task training"),
        (("--limit", "60"), "--measure cpu --vram SIZE"),
        (("--measure", "cpu", "--budget", "1GiB", "--machine", "mi50"), "leave it out"),
        (("--budget", "900GiB", "--machine", "wx4100"), "give --budget 4GiB or less"),
    ],
)
def test_an_argument_that_would_be_ignored_says_what_it_needs(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("qwen2.5-0.5b", *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_what_the_context_takes_from_a_budget_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen2.5-0.5b", "--machine", "wx4100", "--tokens", "64", "--budget")
    assert run(*words, "4GiB") == 0
    assert "the card has 3.71 GiB, less than the budget" in capsys.readouterr().out
    assert run(*words, "3GiB") == 0
    assert "less than the budget" not in capsys.readouterr().out


def test_a_budget_that_the_host_cannot_spare_is_refused_before_anything_is_tried(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    4194304 kB\n")
    refuse_what_the_host_lacks(1 << 30, tmp_path)
    with pytest.raises(DeviceUnusable, match="can spare"):
        refuse_what_the_host_lacks(3 << 30, tmp_path)
    with pytest.raises(DeviceUnusable, match="isn't known"):
        refuse_what_the_host_lacks(1, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("kind", "message", "verdict"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_out_of_memory"),
        ("RuntimeError", "HIP out of memory", "gpu_out_of_memory"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
            "allocation_refused",
        ),
        ("RuntimeError", "std::bad_alloc", "allocation_refused"),
        ("MemoryError", "", "memory_error"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", "crashed"),
    ],
)
def test_kinds_of_missing_memory_are_told_apart(kind: str, message: str, verdict: str) -> None:
    assert verdict_of(kind, message) == verdict


def ask(**changed: object) -> SearchRequest:
    given = {"hint": Hint(4), "most": 100, "limit_s": 120.0, **changed}
    return SearchRequest("{}", Question("m"), "cpu", "batch", 1 << 30, **given)  # type: ignore[arg-type]


def trial(size: int, *, fits: bool) -> Trial:
    return Trial(size, "fits" if fits else "allocation_refused", 1.0, 100 * size, NO, NO)


def test_an_interrupted_search_keeps_what_it_found() -> None:
    found = assemble(
        ask(), [trial(4, fits=True), trial(8, fits=False)], None, NOT_BEGUN, seconds=3.0, why="interrupted"
    )
    assert (found.largest.fits, found.largest.fails, found.largest.exact) == (4, 8, False)
    assert found.ended == "interrupted"
    assert found.peak_bytes == 400


def test_a_finished_search_says_peak_and_trace_of_the_largest() -> None:
    tried = [trial(4, fits=True), trial(5, fits=False)]
    found = assemble(
        ask(), tried, SearchMessage(taken=Taken(weights=390), device="x"), NOT_BEGUN, seconds=3.0, why=""
    )
    assert (found.largest.fits, found.largest.exact, found.ended) == (4, True, "")
    assert isinstance(found.at_size, Taken)


def test_a_trial_out_of_time_is_neither_a_fit_nor_a_failure() -> None:
    late = Trial(9, "out_of_time", 60.0, NO, NO, NO)
    found = assemble(ask(), [trial(4, fits=True), late], None, NOT_BEGUN, seconds=120.0, why="")
    assert (found.largest.fits, found.largest.fails, found.largest.exact) == (4, None, False)
    assert "limit" in found.ended


def test_json_on_standard_output_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bert-base", "--machine", "mi50", "--tokens", "128", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "weir-fit/1"


@pytest.mark.thorough
def test_a_config_with_thousands_of_layers_does_not_keep_a_processor_busy_for_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lying = tmp_path / "config.json"
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2999, "vocab_size": 100}
    lying.write_text(json.dumps(config), encoding="utf-8")
    assert run(str(lying), "--tokens", "8") == 2
    said = capsys.readouterr().err
    assert "blocks, more than the 256" in said
    assert "n_layer" in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tried", "code"),
    [
        ((trial(8, fits=False),), 4),  # the asked size was never tried
        ((Trial(1, "crashed", 1.0, NO, NO, NO, "heads don't divide"),), 4),
        ((), 4),
        ((trial(1, fits=False),), 1),
        ((trial(8, fits=False), trial(4, fits=True)), 0),
    ],
)
def test_what_trials_left_open_is_not_answered_with_it_does_not_fit(
    tried: tuple[Trial, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(asked: SearchRequest, _heard: object) -> Measured:
        return assemble(
            asked, list(tried), None, NOT_BEGUN, seconds=3.0, why="the worker was killed by SIGKILL"
        )

    monkeypatch.setattr("probes.fit.worker.measure", measure)
    words = ("qwen2.5-0.5b", "--measure", "cpu", "--budget", "2GiB", "--batch", "2", "--tokens", "8")
    assert run(*words) == code
    said = capsys.readouterr().out
    assert all(one.said in said for one in tried)


def test_the_answer_is_readable_where_the_terminal_has_ascii_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bert-base", "--machine", "mi50", "--tokens", "128") == 0
    assert capsys.readouterr().out.isascii()


def test_an_interrupted_prediction_does_not_promise_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("probes.fit.answer.answer", interrupt)
    assert run("bert-base") == 130
    assert "report" not in capsys.readouterr().err


def test_a_kept_answer_is_shown_and_drawn_as_a_page_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "fit.json", tmp_path / "fit.html"
    hostile = tmp_path / "<script>alert(1)<"
    hostile.mkdir()
    (hostile / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    assert run(str(hostile), "--tokens", "8", "--json", str(kept)) == 0
    said = capsys.readouterr().out
    assert program.main(["show", str(kept)]) == 0
    assert capsys.readouterr().out.strip() in said
    assert program.main(["html", str(kept)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "What one change saves" in text
    assert "predicted by rules" in text
    assert "Not measured" in text
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_a_page_has_predicted_and_measured_in_columns_of_their_own() -> None:
    parts = Parts(100 * MIB, 200 * MIB, 50 * MIB, (Phase("step 2: backward", 350 * MIB),))
    tried = (replace(trial(4, fits=True), parts=parts), trial(5, fits=False))
    taken = Taken(weights=100 * MIB, optimizer=200 * MIB, activations=40 * MIB)
    began = SearchStart(Built(100 * MIB, 100 * MIB), "a cap")
    found = assemble(ask(), list(tried), SearchMessage(taken=taken), began, seconds=3.0, why="")
    report = replace(_report(), measured=found, predicted_at_largest=taken)
    page = FIT.page(report, raw="{}", name="fit.json")
    for text in (lines(report), page):
        assert "predicted by rules" in text
        assert "predicted by a trace" in text
        assert "measured" in text
        assert "350.00 MiB" in text
        assert "340.00 MiB" in text
    headers = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    assert not [name for name in headers if "predicted" in name and "measured" in name]
    ElementTree.fromstring(re.search(r"<svg.*?</svg>", page, re.DOTALL)[0])  # type: ignore[index]


def test_a_prediction_has_neither_trials_nor_samples_on_its_page() -> None:
    """Its section "Trials" said only that there was none, and "Raw samples" offered a file without one."""
    page = FIT.page(_report(), raw="{}", name="fit.json")
    assert "Not measured: " in page
    assert "<h2>Trials</h2>" not in page
    assert "amples" not in page
    assert "<h2>The report</h2>" in page


def test_a_phone_gets_a_picture_of_its_own_width() -> None:
    """On a screen 400 pixels wide, the words of the one for desks were 4 pixels high."""
    page = FIT.page(_report(), raw="{}", name="fit.json")
    sheets = re.findall(r'<div class="sheet (\w+)"[^>]*><svg[^>]*viewBox="0 0 (\d+) ', page)
    assert [(name, int(width) <= 400) for name, width in sheets] == [("desk", False), ("phone", True)]


def test_totals_stand_where_the_line_of_the_budget_does_not_pass() -> None:
    drawing = ElementTree.fromstring(draw_fit(_report()))
    svg = "{http://www.w3.org/2000/svg}"
    widest = max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in drawing.iter(f"{svg}rect"))
    passes = max(float(line.attrib["x1"]) for line in drawing.iter(f"{svg}line"))
    totals = [text for text in drawing.iter(f"{svg}text") if text.get("text-anchor") == "end"]
    assert totals
    assert all(float(text.attrib["x"]) - 8 * len(text.text or "") > max(widest, passes) for text in totals)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrong", [{"budget_bytes": -1e40}, {"predicted": []}, {"knobs": None}, {"schema": 1}]
)
def test_a_broken_answer_is_refused_by_name(
    wrong: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "fit.json"
    kept.write_text(json.dumps({**json.loads(to_json(_report())), **wrong}), encoding="utf-8")
    assert program.main(["html", str(kept)]) == 5
    assert "fit.json" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["show", "html", "prometheus"])
def test_an_answer_of_a_later_version_is_refused_as_such(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "fit.json"
    kept.write_text(to_json(replace(_report(), schema="weir-fit/2")), encoding="utf-8")
    assert program.main([verb, str(kept)]) == 5
    said = capsys.readouterr().err
    assert "its schema is 'weir-fit/2', this program reads weir-fit/1" in said
    assert "the Weir that wrote it" in said


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_machine_that_is_no_regular_file_is_refused_at_once(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "machine.json"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    assert run("bert-base", "--machine", str(place)) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert run("bert-base", "--machine", "/dev/zero") == 2


@pytest.mark.thorough
def test_a_huge_machine_is_refused_without_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "machine.json"
    with place.open("wb") as file:
        file.truncate(1 << 40)
    assert run("bert-base", "--machine", str(place)) == 5
    assert "more than" in capsys.readouterr().err


VALUES = (
    "-1", "0", "1e30", "1" + "0" * 30, "NaN", "Infinity", "null", "true", '"x"', "[]", "[1]", "{}", "1.5",
    "9" * 5000, "[" * 200 + "]" * 200,
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.sampled(10)
@pytest.mark.parametrize("value", VALUES, ids=[value[:12] for value in VALUES])
@pytest.mark.parametrize("config", ["gpt2", "qwen2"])
def test_a_hostile_config_is_refused_without_a_traceback(
    config: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = GPT2 if config == "gpt2" else QWEN2
    path = tmp_path / "config.json"
    for key in given:
        text = json.dumps({**given, key: "HERE"}).replace('"HERE"', value)
        path.write_text(text, encoding="utf-8")
        assert run(str(path), "--tokens", "8", "--task", "training") in (0, 1, 2, 5), (key, value)
    capsys.readouterr()
    for key in given:
        path.write_text(json.dumps({k: v for k, v in given.items() if k != key}), encoding="utf-8")
        assert run(str(path), "--tokens", "8") in (0, 1, 2, 5), key
    path.write_text('{"model_type": "gpt2", "n_embd": 64, "n_embd": 32}', encoding="utf-8")
    assert run(str(path)) == 5
    assert "twice" in capsys.readouterr().err


def test_an_architecture_without_rules_is_refused_with_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "model_type": "blenderbot"}), encoding="utf-8")
    assert run(str(path)) == 2
    assert "--measure cpu" in capsys.readouterr().err


def small(size: int, rise: int = 30 * MIB) -> Trial:
    step = (Phase("forward", 100 * MIB + rise * size), Phase("optimizer", 300 * MIB))
    peak = max(phase.peak_bytes for phase in step)
    return Trial(size, "fits", 1.0, peak, NO, NO, parts=Parts(50 * MIB, 100 * MIB, peak - 150 * MIB, step))


def tried(*trials: Trial, why: str = "") -> Measured:
    began = SearchStart(Built(50 * MIB, 50 * MIB), "a cap")
    return assemble(ask(), list(trials), None, began, seconds=1.0, why=why)


TWENTY = Question("m", "training", batch=20)
GIB = 1 << 30


def test_two_small_trials_say_what_a_larger_one_takes_phase_by_phase() -> None:
    found = tried(small(1), small(2), small(9), trial(31, fits=False))
    report = by_trials(TWENTY, cpu_constants(), 1000 * MIB, found)
    taken = report.predicted
    assert taken.total == 700 * MIB
    assert (taken.weights, taken.gradients, taken.optimizer) == (50 * MIB, 50 * MIB, 100 * MIB)
    assert isinstance(report.predicted_largest_batch, Largest)
    assert report.predicted_largest_batch.fits == 30
    assert isinstance(report.predicted_largest_tokens, Unknown)
    assert "two trials" in lines(report)


def test_trials_that_take_the_same_are_not_extrapolated() -> None:
    alike = (small(1, rise=0), small(2, rise=4096), small(20, rise=4096))
    report = by_trials(TWENTY, cpu_constants(), GIB, tried(*alike))
    assert isinstance(report.predicted_largest_batch, Unknown)
    assert report.predicted.total == 300 * MIB
    assert "at least 1000000000" not in lines(report)
    further = by_trials(
        TWENTY, cpu_constants(), GIB, tried(small(1, rise=0), small(2, rise=0), small(40, rise=12 * MIB))
    )
    assert isinstance(further.predicted_largest_batch, Largest), "a trial further on says how steep it is"


def test_trials_with_parts_that_few_tokens_do_not_reach_are_compared_as_a_whole() -> None:
    first = replace(small(1), parts=Parts(0, 0, 0, (Phase("all", 310 * MIB),)))
    report = by_trials(TWENTY, cpu_constants(), GIB, tried(first, small(10)))
    assert report.predicted.total == 500 * MIB


def test_the_one_size_that_fits_is_an_answer_too() -> None:
    report = by_trials(replace(TWENTY, batch=1), cpu_constants(), GIB, tried(small(1), trial(2, fits=False)))
    assert report.fits
    assert report.predicted.total == 300 * MIB
    assert "largest batch 1 (2 trials" in lines(report)


@pytest.mark.parametrize(
    ("trials", "code", "said"),
    [
        (
            (trial(1, fits=False),),
            1,
            "batch 1 doesn't fit into 1.00 GiB, measured: an allocation was",
        ),
        ((small(1), trial(2, fits=False)), 1, "batch 2 doesn't fit"),
        ((Trial(1, "crashed", 1.0, NO, NO, NO, "heads don't divide"),), 4, "heads don't divide"),
        ((Trial(1, "out_of_time", 1.0, NO, NO, NO),), 4, "out of time"),
        ((), 4, "the limit of 120 s was reached"),
    ],
)
def test_trials_without_an_answer_say_what_became_of_them(
    trials: tuple[Trial, ...], code: int, said: str
) -> None:
    with pytest.raises(ProbeError, match=said) as raised:
        by_trials(TWENTY, cpu_constants(), GIB, tried(*trials))
    assert raised.value.exit_code == code


def test_an_interrupt_before_two_trials_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "probes.fit.worker.measure",
        lambda asked, _heard: assemble(asked, [], None, NOT_BEGUN, seconds=1.0, why="interrupted"),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "model_type": "blenderbot"}), encoding="utf-8")
    assert run(str(path), "--measure", "cpu", "--budget", "1GiB") == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_lost_output_does_not_cost_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_text: str) -> None:
        raise OutputLost("No space left on device")

    monkeypatch.setattr("probes.cli.fit.echo", lose)
    kept, picture = tmp_path / "fit.json", tmp_path / "fit.svg"
    assert run("bert-base", "--tokens", "8", "--json", str(kept), "--picture", str(picture)) == 5
    assert load(kept.read_text(encoding="utf-8"))
    assert "</svg>" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_place_that_cannot_be_written_is_refused_before_any_trial(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("probes.fit.worker.measure", None)
    words = ("qwen2.5-0.5b", "--measure", "cpu", "--budget", "2GiB", option, str(tmp_path / "file" / "out"))
    assert run(*words) == 5
    assert "can't write" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert run(*words[:-1], str(tmp_path / "pipe")) == 5
    assert "nobody reads this pipe" in capsys.readouterr().err


def test_a_page_goes_into_a_new_folder_as_other_files_do(tmp_path: Path) -> None:
    kept, page = tmp_path / "fit.json", tmp_path / "new" / "folder" / "page.html"
    kept.write_text(to_json(_report()), encoding="utf-8")
    assert program.main(["html", str(kept), "--out", str(page)]) == 0
    assert "</html>" in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused_before_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "fit.json"
    kept.write_text(to_json(_report()), encoding="utf-8")
    monkeypatch.setattr("probes.reports.kinds.render_page", None)
    for place in (tmp_path, kept / "page.html"):
        assert program.main(["html", str(kept), "--out", str(place)]) == 5
        assert f"can't write {place}" in capsys.readouterr().err


def test_nobody_is_refused_tokens_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bert-base", "--budget", "4GiB") == 0
    assert "batch 1 x 512 tokens" in capsys.readouterr().out
    assert run("bert-base", "--budget", "4GiB", "--tokens", "1024") == 2
