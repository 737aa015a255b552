"""`weir probe place` on the CPU: a whole run, and peers that need a GPU."""

import os

import pytest
import torch

from probes.cli import program
from probes.core.errors import Exit
from probes.measure import placement_benchmark
from probes.placement.planner.machine import without_gpu

WORDS = ["place", "bert-base", "--vram", "4GiB", "--tokens", "4", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(placement_benchmark, "SAMPLES", 1)
    monkeypatch.setattr(placement_benchmark, "LEAST_S", 0.0)


def test_a_model_is_placed_timed_and_reported(capsys):
    assert program.main(WORDS) == Exit.OK
    said = capsys.readouterr().out
    assert "cpu: 13 blocks" in said
    assert "there is no GPU here: --vram limits nothing" in said
    assert "placed: " in said
    assert " a pass (wall)" in said
    assert "a pass takes " in said  # the report's own line, which told readers to "call measure()"
    assert "measure()" not in said


def test_without_a_gpu_a_pass_is_predicted_for_the_processors_that_are_here(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 5})
    assert placement_benchmark._nearest() == without_gpu(3)


@pytest.mark.parametrize("peer", ["accelerate", "resident"])
def test_a_peer_that_needs_a_gpu_is_refused_with_what_to_do(peer, capsys):
    assert program.main([*WORDS, "--compare", peer]) == Exit.DEVICE
    assert "without --compare" in capsys.readouterr().err


class Clock:
    """Stands in for the module `time`: a pass takes as long as it says."""

    def __init__(self, seconds):
        self.now, self.seconds, self.passes = 0.0, seconds, 0

    def perf_counter(self):
        return self.now

    def one(self):
        self.now += self.seconds
        self.passes += 1


@pytest.mark.parametrize(
    ("seconds", "most_passes"), [(100.0, 1), (40.0, 1), (14.0, 3), (7.0, 5), (3.0, 6), (0.001, 1002)]
)
def test_a_long_pass_is_timed_a_few_times_instead_of_for_minutes(seconds, most_passes, monkeypatch, capsys):
    """qwen2.5-3b on 2 cores takes 15 to 40 s a pass: eight of them, and the verb said nothing meanwhile."""
    clock = Clock(seconds)
    monkeypatch.setattr(placement_benchmark, "time", clock)
    monkeypatch.setattr(placement_benchmark, "SAMPLES", 5)
    monkeypatch.setattr(placement_benchmark, "LEAST_S", 0.2)
    assert placement_benchmark.wall_s(clock.one) == pytest.approx(seconds)
    assert 1 <= clock.passes <= most_passes
    waits = clock.passes - 1 if seconds > placement_benchmark.LONG_S else 0
    assert ("more are timed, about" in capsys.readouterr().err) == (
        waits * seconds >= placement_benchmark.NOTABLE_S
    )


def test_what_takes_long_on_the_cpu_is_announced_with_an_estimate(capsys, monkeypatch):
    monkeypatch.setattr(placement_benchmark, "NOTABLE_S", 0.0)
    monkeypatch.setattr(placement_benchmark, "WIDTH", 256)
    assert program.main(["place", "mlp", "--vram", "4GiB", "--dtype", "float32"]) == Exit.OK
    said = capsys.readouterr().err
    for what in (
        "drawing 10.00 MiB of random weights on the CPU: about ",
        "placing 10.00 MiB of weights: about ",
        "a pass on the CPU, the first of at least 2: about ",
    ):
        assert what in said


def test_random_weights_that_host_memory_has_no_room_for_are_refused_before_they_are_drawn(
    monkeypatch, capsys
):
    """The kernel ended the process: the plan of a name had no limit of host memory."""
    monkeypatch.setattr(placement_benchmark, "available_bytes", lambda _path: 300 << 20)
    monkeypatch.setattr(placement_benchmark, "build", lambda *_: pytest.fail("drawn"))
    assert program.main(WORDS) == Exit.DEVICE
    assert "bert-base has 415.39 MiB of weights, which are drawn in host memory" in capsys.readouterr().err
