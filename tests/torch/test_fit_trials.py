"""Trials for real: forks that answer, die or hang, and a search under a cap on the CPU."""

import faulthandler
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from probes.core.errors import DeviceUnusable
from probes.core.unknown import Unknown
from probes.fit import step
from probes.fit import trial as trial_module
from probes.fit.limits import V2, Group, parent
from probes.fit.report import Cap, Question, Taken, Trial
from probes.fit.search import Hint
from probes.fit.worker import (
    ForkAnswer,
    Searcher,
    SearchMessage,
    SearchRequest,
    _without_answer,
    measure,
    run_in_fork,
)

MIB = 2**20
PATIENCE_S = 120.0
TINY = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "vocab_size": 4000,
    "tie_word_embeddings": True,
}


def end_by(number: int) -> ForkAnswer:
    faulthandler.disable()  # pytest's would print where that was
    os.kill(os.getpid(), number)
    return ForkAnswer()


def hang() -> ForkAnswer:
    time.sleep(600)
    return ForkAnswer()


def test_a_fork_answers_and_its_parent_is_unchanged() -> None:
    ended = run_in_fork(lambda: ForkAnswer(name=str(os.getpid())), PATIENCE_S)
    assert ended.answer is not None
    assert ended.answer.name != str(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_fork_that_is_killed_is_known_by_its_signal(number: signal.Signals) -> None:
    ended = run_in_fork(lambda: end_by(number), PATIENCE_S)
    assert (ended.answer, ended.code) == (None, -number)


def test_a_fork_that_hangs_is_ended_when_its_time_is_up() -> None:
    ended = run_in_fork(hang, 0.2)
    assert (ended.answer, ended.code) == (None, None)


def test_a_fork_that_exits_without_an_answer_was_ended_by_no_signal() -> None:
    ended = run_in_fork(lambda: os._exit(7), PATIENCE_S)
    assert (ended.answer, ended.code) == (None, 7)
    assert _without_answer(ended, 1, 0.1, by_cgroup=False).said == "ended by exit code 7"


class TorchsError(RuntimeError):
    def __str__(self) -> str:
        return f"can't allocate memory{' ' * MIB}with where that was in C++"


def test_a_process_that_used_up_its_limit_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_up(*_: object) -> None:
        held: list[bytearray] = []
        with suppress(MemoryError):
            while True:
                held.append(bytearray(MIB // 2))
        raise TorchsError(held)

    monkeypatch.setattr(step, "prepare", use_up)

    def work() -> ForkAnswer:
        return ForkAnswer(trial=trial_module.run(TINY, Question("m"), "cpu", budget=8 * MIB, size=1))

    ended = run_in_fork(work, PATIENCE_S)
    assert ended.answer is not None, ended
    assert ended.answer.trial is not None
    assert ended.answer.trial.verdict == "allocation_refused"


def test_a_group_that_cannot_be_joined_is_no_crash_of_the_model(tmp_path: Path) -> None:
    closed = Group(tmp_path / "group", V2)

    def work() -> ForkAnswer:
        return ForkAnswer(
            trial=trial_module.run(TINY, Question("m"), "cpu", budget=MIB, size=1, group=closed)
        )

    ended = run_in_fork(work, PATIENCE_S)
    assert ended.answer is not None, ended
    assert ended.answer.refused is not None
    assert "can't join the memory cgroup" in ended.answer.refused.reason
    assert "--cap process" in ended.answer.refused.hint


def test_a_refusal_in_a_fork_is_an_answer() -> None:
    def refuse() -> ForkAnswer:
        raise DeviceUnusable("no GPU", "use another")

    ended = run_in_fork(refuse, PATIENCE_S)
    assert ended.answer is not None
    assert ended.answer.refused is not None
    assert ended.answer.refused.exit_code == 3


def fail_by(error: BaseException) -> ForkAnswer:
    raise error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (KeyError("weights"), "crashed"),
        (ImportError("libhip.so.7: no such file"), "crashed"),
        (MemoryError("no room"), "memory_error"),
        (RuntimeError("CUDA out of memory"), "gpu_out_of_memory"),
    ],
)
def test_an_error_that_no_trial_expects_is_its_cause_and_no_good_end(
    error: Exception, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended as exit code 0, and nobody learned why."""
    said = f"{type(error).__name__}: {error}"
    ended = run_in_fork(lambda: fail_by(error), PATIENCE_S)
    assert ended.answer is not None
    assert ended.answer.failed == said

    told: list[SearchMessage] = []
    request = SearchRequest(
        json.dumps(TINY), Question("m"), "cpu", "batch", MIB, Hint(1), 1, PATIENCE_S, "process"
    )
    searcher = Searcher(request, told.append)
    for name in ("run", "traced", "warm"):
        monkeypatch.setattr(trial_module, name, lambda *_, **__: fail_by(error))
    trial = searcher._tried(1, PATIENCE_S, None, lambda: 0)
    assert (trial.verdict, trial.said) == (verdict, said)
    built, _ = searcher._built()
    searcher._trace(1)
    assert said in str(built)
    assert said in str(told[0].taken)


def test_an_answer_that_cannot_be_sent_and_an_interruption_are_no_good_ends() -> None:
    ended = run_in_fork(lambda: ForkAnswer(name=object()), PATIENCE_S)  # type: ignore[arg-type]
    assert ended.answer is not None
    assert "object" in ended.answer.failed
    assert run_in_fork(lambda: fail_by(KeyboardInterrupt()), PATIENCE_S).code == 1


@pytest.mark.parametrize(
    ("cap", "verdicts"),
    [("process", {"fits", "allocation_refused"}), ("cgroup", {"fits", "killed_for_memory"})],
)
def test_a_search_on_the_cpu_finds_an_edge_and_trials_on_both_sides_of_it_agree_within_a_step(
    cap: Cap, verdicts: set[str]
) -> None:
    """A step is 10 MiB: what a kernel counts for a process differs by far less, however busy it is."""
    if cap == "cgroup" and isinstance(why := parent(), Unknown):
        pytest.skip(why.reason)
    asked = Question("m", "training", tokens=256, precision="fp32", optimizer="sgd")
    seen: list[Trial] = []
    ask = SearchRequest(
        json.dumps(TINY), asked, "cpu", "batch", 100 * MIB, Hint(8), most=1000, limit_s=900.0, cap=cap
    )
    found = measure(ask, seen.append, root=Path("/"))
    assert found.largest.ended
    assert found.largest.fits > 1
    assert {trial.verdict for trial in seen} == verdicts
    assert not any("threads" in note for note in found.notes), "forks of threads may wait for ever"
    assert isinstance(found.at_size, Taken)
    assert not isinstance(found.peak_bytes, Unknown)
    assert found.peak_bytes < 100 * MIB
    assert found.peak_bytes / found.largest.fits > 10 * MIB
    assert found.largest.fits <= found.largest.top <= found.largest.fits + 1
    sizes = [trial.size for trial in seen]
    assert sizes.count(found.largest.top) >= 3


def test_the_budget_of_a_trial_is_not_spent_on_importing_the_models_code() -> None:
    asked = Question("m", tokens=64, precision="fp32")
    ask = SearchRequest(json.dumps(TINY), asked, "cpu", "batch", 100 * MIB, Hint(64), most=64, limit_s=900.0)
    found = measure(ask, lambda _: None, root=Path("/"))
    assert found.largest.fits == 64
    assert isinstance(found.at_size, Taken)
    assert isinstance(found.peak_bytes, int)
    # What C libraries set up in a first pass is counted: some MiB. transformers' modules are tens of MiB.
    assert found.peak_bytes - found.at_size.allocated < 16 * MIB


def test_a_cpu_whose_name_is_hidden_is_the_cpu(tmp_path):
    assert trial_module.device_name("cpu", tmp_path) == "the CPU"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name\t: an \xff old one\n")
    assert trial_module.device_name("cpu", tmp_path) == "the CPU (an \N{REPLACEMENT CHARACTER} old one)"
