"""`weir probe place` on the CPU: a whole run, and peers that need a GPU."""

import pytest
import torch

from probes import cli
from probes.errors import Exit
from probes.placement.trial import ondevice

WORDS = ["place", "bert-base", "--vram", "4GiB", "--tokens", "4", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(ondevice, "SAMPLES", 1)
    monkeypatch.setattr(ondevice, "LEAST_S", 0.0)


def test_a_model_is_placed_timed_and_reported(capsys):
    assert cli.main(WORDS) == Exit.OK
    said = capsys.readouterr().out
    assert "cpu: 13 blocks" in said
    assert "there is no GPU here: --vram limits nothing" in said
    assert "placed: " in said
    assert " a pass (wall)" in said


@pytest.mark.parametrize("peer", ["accelerate", "resident"])
def test_a_peer_that_needs_a_gpu_is_refused_with_what_to_do(peer, capsys):
    assert cli.main([*WORDS, "--compare", peer]) == Exit.DEVICE
    assert "without --compare" in capsys.readouterr().err
