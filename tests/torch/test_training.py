"""Training by ranks, as a launcher starts them: resumed runs, failures, what the time went into."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from training_ranks import ROOT, Ranks, ranks_of

from probes.training import figures
from probes.training.report import run_in, words_of

FEW = ("--batch", 4, "--epochs", 2, "--threads", 1, "--timeout", 20)


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as started:
        yield started


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ("--accumulate", 2, "--workers", 1)),
        (2, ("--strategy", "fsdp")),
        (1, ("--precision", "amp-bf16")),
    ],
)
def test_a_run_that_was_asked_for_a_checkpoint_goes_on_with_the_same_losses(ranks, tmp_path, world, words):
    # what a dataset draws from Python's and NumPy's generators comes again, but for a loader's own processes
    draws = {"draws": "--workers" not in words}
    words = (*FEW, *words)
    codes, log = ranks.run(tmp_path / "whole", *words, world=world, plant=draws)
    assert codes == [0] * world, log
    whole = [report["losses"] for report in ranks_of(tmp_path / "whole")]

    out, steps, resumed = tmp_path / "divided", len(whole[0]), []
    for step in (2, 3):  # of what each start has done
        plant = {"kind": "usr1", "rank": world - 1, "step": step, **draws}
        codes, log = ranks.run(out, *words, "--resume", world=world, plant=plant)
        assert codes == [75] * world, log
        assert {report["state"] for report in ranks_of(out)} == {"checkpointed"}
        resumed.append(len(ranks_of(out)[0]["losses"]))
    codes, log = ranks.run(out, *words, "--resume", world=world, plant=draws)
    assert codes == [0] * world, log
    assert [report["losses"] for report in ranks_of(out)] == whole
    assert 0 < resumed[0] < resumed[1] < steps
    assert {report["resumed_at"] for report in ranks_of(out)} == {resumed[1]}


FAULTS = {
    "nan": (2, 4, "the loss is nan", 1),
    "memory": (2, 3, "out of memory in compute: an allocation was refused", 1),
    "kill": (2, -9, "rank 1 left no report", 1),
    "hang": (2, 4, "no progress in compute for", 1),
    "stop": (2, 4, "rank 1 doesn't say where it is", 0),
    "wrong": (2, 4, "KeyError: 'no such column' (training_cases.py:", 1),
    "full": (2, 5, "can't write the checkpoint of step 4", 0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_names_rank_step_and_cause_ends_all_ranks_and_leaves_the_last_checkpoint(
    ranks, tmp_path, kind
):
    world, code, cause, rank = FAULTS[kind]
    plant = {"kind": kind, "rank": rank if kind == "full" else 1, "step": 4}
    words = (*FEW, "--timeout", 5 if kind in ("hang", "stop") else 60, "--checkpoint-every", 2)
    codes, log = ranks.run(tmp_path, *words, world=world, plant=plant)

    assert all(codes), log
    assert codes[0 if kind in ("hang", "full") else 1] == code or kind == "stop", (codes, log)
    run = run_in(tmp_path)
    assert run.state == "failed"
    told = figures.cause_of(run)
    assert cause in told, (told, log)
    assert "Traceback" not in log
    assert told.startswith((f"rank {rank}, step 4: ", "rank 1 left no report, in step "))
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert content["place"]["step"] == 2
    assert not list(tmp_path.glob("*.partial"))

    codes, log = ranks.run(tmp_path, *words, "--resume", world=world)
    assert codes == [0, 0], log
    assert ranks_of(tmp_path)[0]["resumed_at"] == 2


PLANTS = {
    "loader": ({}, lambda bound: bound.cause == "data"),
    "straggler": (
        {"rank": 1},
        lambda bound: (bound.cause, bound.rank, bound.of) == ("straggler", 1, "compute"),
    ),
    "link": ({}, lambda bound: bound.cause == "exchange"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", PLANTS)
def test_what_was_planted_is_named_and_the_parts_add_up(ranks, tmp_path, kind):
    more, is_named = PLANTS[kind]
    plant = {"kind": kind, "times": 3, **more}
    codes, log = ranks.run(tmp_path, *FEW, world=2, plant=plant)
    assert codes == [0, 0], log
    from probes.training.report import report_of

    (case,) = figures.cases_of(report_of((run_in(tmp_path),)))
    assert is_named(figures.bound_of(case)), figures.costs(case)
    parts = figures.parts(case)
    assert parts.total == pytest.approx(parts.wall, rel=0.02)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--batch", 64), 2, "an epoch has 96 samples, and one step of all ranks takes 128"),
        (("--precision", "tf32"), 2, "TF32 is a format of NVIDIA's GPUs"),
        (("--data", "training_cases:nothing"), 2, "training_cases:nothing can't be called"),
        (("--data", "training_cases:Model"), 2, "no dataset with a length"),
        (("--data", "training_cases:streamed"), 2, "Streamed, no dataset with a length"),
        (("--data", "training_cases:uneven"), 2, "has 96 samples on rank 0 and 95 on rank 1"),
    ],
)
def test_what_is_asked_wrongly_is_refused_by_every_rank(ranks, tmp_path, words, code, said):
    codes, log = ranks.run(tmp_path, *FEW, *words, world=2)
    assert codes == [code, code], log
    assert said in log
    assert "Traceback" not in log


def test_a_checkpoint_of_another_run_or_a_broken_one_is_refused(ranks, tmp_path):
    ranks.run(tmp_path, *FEW, "--checkpoint-every", 2)
    codes, log = ranks.run(tmp_path, *FEW, "--batch", 8, "--resume")
    assert codes == [5]
    assert "is of a run with other settings" in log
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    content = torch.load(tmp_path / "checkpoint.pt")
    content["weights"] = {f"former.{name}": value for name, value in content["weights"].items()}
    torch.save(content, tmp_path / "checkpoint.pt")
    codes, log = ranks.run(tmp_path, *FEW, "--resume")
    assert codes == [5], log
    assert "is of another model" in log
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for content in (whole[:-600], whole[:0], b"PK" + whole[:middle], flipped):
        (tmp_path / "log.txt").unlink()
        (tmp_path / "checkpoint.pt").write_bytes(content)
        codes, log = ranks.run(tmp_path, *FEW, "--resume")
        assert codes == [5], log
        assert "checkpoint.pt is broken" in log
        assert "Traceback" not in log
    (tmp_path / "checkpoint.pt").unlink()
    os.mkfifo(tmp_path / "checkpoint.pt")
    codes, log = ranks.run(tmp_path, *FEW, "--resume")
    assert codes == [5], log
    assert "checkpoint.pt is no regular file" in log


def test_what_an_earlier_start_left_is_no_report_of_this_one(ranks, tmp_path):
    half_written = tmp_path / ".weir-0123456789abcdef.partial"
    half_written.touch()
    codes, log = ranks.run(tmp_path, *FEW, "--checkpoint-every", 2, world=2)
    assert codes == [0, 0], log
    assert not half_written.exists()
    codes, _ = ranks.run(tmp_path, *FEW, world=2, plant={"kind": "kill", "rank": 1, "step": 4})
    assert codes == [4, -9]
    assert "rank 1 left no report" in figures.cause_of(run_in(tmp_path))
    (tmp_path / "rank-1.json").write_text("{}")
    codes, log = ranks.run(tmp_path, *FEW)
    assert codes == [0], log
    assert run_in(tmp_path).state == "done"


def test_a_process_that_a_users_code_forks_reports_nothing(ranks, tmp_path):
    codes, log = ranks.run(tmp_path, *FEW, plant={"kind": "forks"})
    assert codes == [0], log
    assert "error: a process that rank 0 forked: " in log
    assert "error: rank 0" not in log
    assert run_in(tmp_path).state == "done"


def test_an_error_without_a_text_is_reported_by_its_class(ranks, tmp_path):
    codes, log = ranks.run(tmp_path, *FEW, plant={"kind": "mute", "step": 4})
    assert codes == [4]
    assert log == "error: rank 0, step 4: Mute\n"
    assert figures.cause_of(run_in(tmp_path)) == "rank 0, step 4: Mute"


def test_a_users_code_that_changes_the_directory_moves_no_report(ranks, tmp_path):
    codes, log = ranks.run(
        Path(os.path.relpath(tmp_path)), *FEW, "--checkpoint-every", 2, plant={"kind": "moves"}
    )
    assert codes == [0], log
    assert run_in(tmp_path).state == "done"
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_fault_in_a_process_of_the_loader_is_said_as_it_is(ranks, tmp_path):
    codes, log = ranks.run(tmp_path, *FEW, "--workers", 1, plant={"kind": "sample"})
    assert codes == [4], log
    assert "ValueError: sample 50 is broken (training_cases.py:" in figures.cause_of(run_in(tmp_path))
    assert "Traceback" not in log


def test_a_process_of_the_loader_that_ends_in_a_step_is_reported_by_its_end(ranks, tmp_path):
    plant = {"kind": "loader_killed", "begun": str(tmp_path / "begun"), "pid": str(tmp_path / "pid")}
    codes, log = ranks.run(tmp_path, *FEW, "--workers", 1, plant=plant)
    assert codes == [4], log
    assert "a process of the loader ended by SIGKILL (in data loading" in figures.cause_of(run_in(tmp_path))
    assert "Traceback" not in log


def test_the_next_epochs_samples_are_taken_before_an_epoch_ends_and_none_after_the_last(ranks, tmp_path):
    # the first epoch's last step waits until more samples were taken than the epoch has
    plant = {"kind": "ahead", "step": 96 // 4, "taken": str(tmp_path / "taken")}
    codes, log = ranks.run(tmp_path, *FEW, "--workers", 1, plant=plant)
    assert codes == [0], log
    assert (tmp_path / "taken").stat().st_size == 2 * 96


@pytest.mark.parametrize("how", ["raises", "waits"])
def test_a_loader_whose_shared_memory_is_full_is_told_and_ends_with_its_rank(ranks, tmp_path, how):
    plant = {"kind": "shm", "how": how, "pid": str(tmp_path / "pid")}
    codes, log = ranks.run(tmp_path, *FEW, "--workers", 1, "--timeout", 5, plant=plant)
    assert codes == [4], log
    left = "/dev/shm, through which --workers hand over batches, has 3.00 KiB left: docker run --shm-size 2g"
    assert left in figures.cause_of(run_in(tmp_path))
    until = time.monotonic() + 60
    while Path("/proc", (tmp_path / "pid").read_text()).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def marked(mark):
    """Processes that have this in their environment, but for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def test_a_verb_that_is_killed_leaves_neither_torchrun_nor_ranks_nor_their_loaders(tmp_path):
    plant = json.dumps({"kind": "hang", "mark": str(tmp_path)})  # in its first step, once the loader is there
    paths = f"{ROOT}:{Path(__file__).parent}"
    environment = {**os.environ, "PYTHONPATH": paths, "WEIR_PLANT": plant, "OMP_NUM_THREADS": "1"}
    words = ["training_cases:model", "--data", "training_cases:samples", "--device", "cpu", "--batch", "4"]
    words += ["--processes", "2", "--workers", "1", "--out", str(tmp_path / "out")]
    verb = subprocess.Popen([sys.executable, "-m", "probes", "epochs", *words], env=environment)
    try:
        until = time.monotonic() + 120
        while len(marked(plant.encode())) < 6:  # the verb, torchrun, two ranks with a loader each
            assert verb.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        verb.kill()
        verb.wait()
        until = time.monotonic() + 60
        while marked(plant.encode()):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        for pid in marked(plant.encode()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_folder_that_another_run_uses_is_refused_and_left_as_it_is(ranks, tmp_path):
    with (tmp_path / ".rank-0.lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        codes, log = ranks.run(tmp_path, *FEW)
    assert codes == [2]
    assert "is used by another run, which isn't over" in log
    assert not list(tmp_path.glob("rank-*"))


def test_the_words_of_settings_are_read_as_these_settings(ranks, tmp_path):
    ranks.run(tmp_path, *FEW, "--accumulate", 3, "--checkpointing", "--seed", 7)
    settings = run_in(tmp_path).ranks[0].settings
    ranks.run(tmp_path / "again", *words_of(settings)[1:], model=settings.model, data=None)
    assert run_in(tmp_path / "again").ranks[0].settings == settings
    assert json.loads((tmp_path / "rank-0.json").read_text())["schema"] == "weir-training-rank/1"
