"""`weir probe place`: its lines, and what it refuses before it does anything."""

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from probes.cli import program
from probes.cli.place import line
from probes.core.errors import Exit
from probes.core.unknown import Unknown

GIB = 2**30


@dataclass(frozen=True)
class Row:
    how: str
    wall_s: object
    same_bits: object
    peak_bytes: object


def checkpoint(folder: Path) -> Path:
    """A folder that looks like one as far as it is read before torch is imported."""
    made = folder / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "bert"}')
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return made


OURS = Row("placed", 0.004, True, 4 * GIB)


def test_our_line_has_time_and_memory():
    assert line(OURS, OURS) == "placed: 4 ms a pass (wall), 4.00 GiB of VRAM at most"


def test_a_peer_is_compared_with_ours():
    peer = Row("accelerate's device_map", 0.2, True, 3 * GIB)
    assert line(peer, OURS) == (
        "accelerate's device_map: 200 ms a pass (wall), 50.00 of ours, 3.00 GiB of VRAM at most, same bits"
    )
    assert line(Row("resident", 0.001, False, Unknown("no GPU")), OURS).endswith(", other bits")


def test_a_peer_that_cannot_be_run_says_why():
    why = Unknown("out of memory: 5 GiB were asked for")
    assert line(Row("accelerate's device_map", why, why, why), OURS) == (
        "accelerate's device_map: unknown (out of memory: 5 GiB were asked for)"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["place", "bert-base"],
        ["place", "bert-base", "--vram", "much"],
        ["place", "bert-base", "--vram", "4GiB", "--plan", "plan.json"],
        ["place", "bert-base", "--vram", "4GiB", "--batch", "0"],
        ["place", "bert-base", "--vram", "4GiB", "--compare", "magic"],
    ],
)
def test_what_makes_no_sense_is_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == Exit.USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "x", "9" * 26, "9223372036854775808"])
def test_a_seed_that_torch_does_not_take_is_a_usage_error(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["place", "mlp", "--vram", "1GiB", f"--seed={seed}"])
    assert ended.value.code == 2
    assert "is not a whole number from 0 to 2^63 - 1" in capsys.readouterr().err


def test_a_host_without_torch_is_told_so_and_gets_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "probes.measure.placement_benchmark", raising=False)
    assert program.main(["place", "mlp", "--vram", "1GiB"]) == Exit.DEVICE
    assert "torch can't be imported" in capsys.readouterr().err


def test_a_plan_file_is_for_a_checkpoint_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["place", "bert-base", "--plan", "plan.json"]) == Exit.USAGE
    assert "--plan is for a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--host", "1GiB"], ["--machine", "h200"], ["--compute", "float16"]])
def test_what_a_plan_file_says_is_not_said_twice(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path)
    assert program.main(["place", str(folder), "--plan", "plan.json", *words]) == Exit.USAGE
    assert f"leave {words[0]} out" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_plan_over_several_cards_and_one_of_a_later_schema_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = checkpoint(tmp_path), tmp_path / "plan.json"
    cards = ["plan", "bert-base", "--machine", "h200", "--vram", "1GiB", "--cards", "2", "--json", str(file)]
    assert program.main(cards) == Exit.OK
    assert program.main(["place", str(folder), "--plan", str(file)]) == Exit.USAGE
    assert "a plan over 2 cards" in capsys.readouterr().err
    file.write_text('{"schema": "weir-placement-plan/2"}')
    assert program.main(["place", str(folder), "--plan", str(file)]) == Exit.DATA
    assert "plan.json can't be used: it is not a plan of the schema" in capsys.readouterr().err
