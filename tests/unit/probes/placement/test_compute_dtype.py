"""What bfloat16 weights become on a card without units for them, and whether float16 holds their numbers."""

import json
import struct
from pathlib import Path

import pytest

from probes.cli.program import main
from probes.core.errors import CheckpointUnreadable, Exit, PlacementError, UsageError
from probes.placement.models import ranges
from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription
from probes.placement.models.ranges import Ranges, ranges_of, stored_ranges
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.machine import profile

MODEL = ModelDescription(
    "m", (BlockDescription("0", (TensorDescription("0.weight", (4, 4), "bfloat16"),)),), "drawn"
)
CARD = profile("wx4100")


def words(*numbers: float) -> bytes:
    """As bfloat16, cut."""
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


def every(exponent: int) -> bytes:
    """All bfloat16 numbers of a biased exponent."""
    found = (sign << 15 | exponent << 7 | low for sign in (0, 1) for low in range(128))
    return b"".join(struct.pack("<H", word) for word in found)


def test_every_exponent_is_told_apart() -> None:
    for exponent in range(2, 255):
        found = ranges_of(every(exponent), "w")
        value = 2.0 ** (exponent - 127)
        assert bool(found.beyond) == (value >= 65536)
        assert found.rounded == (256 if 2**-25 <= value < 2**-17 else 0)
        assert found.vanished == (256 if value < 2**-25 else 0)
    assert not ranges_of(every(255), "w").beyond  # infinities and what isn't a number stay that
    assert ranges_of(words(0.0, -0.0), "w") == Ranges(numbers=2)


@pytest.mark.thorough
def test_what_python_packs_as_float16_agrees() -> None:
    for exponent in (101, 102, 109, 110, 130, 142, 143, 150):
        for begin in range(0, 512, 2):
            word = every(exponent)[begin : begin + 2]
            value = struct.unpack("<f", b"\0\0" + word)[0]
            found = ranges_of(word, "w")
            try:
                back = struct.unpack("<e", struct.pack("<e", value))[0]
            except OverflowError:
                assert found.beyond
                continue
            assert not found.beyond
            if not found.rounded and not found.vanished:
                assert back == value
            if found.vanished:
                assert back == 0.0


def stored(path: Path, *tensors: tuple[str, str, bytes]) -> Path:
    header, at = {}, 0
    for name, dtype, data in tensors:
        width = {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": [len(data) // width], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))
    return path


def test_the_first_tensor_that_is_beyond_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PIECE_BYTES", 6)
    path = stored(
        tmp_path / "m.safetensors",
        ("a", "BF16", words(1.0, 1e-6, 1e-9, 0.0, 60_000.0)),
        ("b", "F32", struct.pack("<f", 1e30)),  # it stays float32
        ("c", "BF16", words(*[1.0] * 9, -70_000.0)),
    )
    assert stored_ranges(path) == Ranges(15, 1, 1, "c")


def test_a_file_that_gets_shorter_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "m.safetensors", ("a", "BF16", words(*[1.0] * 64)))
    whole = ranges.read_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-8])
    monkeypatch.setattr(ranges, "read_checkpoint", lambda _: whole)
    with pytest.raises(CheckpointUnreadable, match="cut while it was read"):
        stored_ranges(path)


def test_auto_is_what_the_objective_allows() -> None:
    assert with_compute_dtype(MODEL, CARD, objective="exact").becomes == "float32"
    assert with_compute_dtype(MODEL, CARD, objective="fast").becomes == "float16"
    assert (
        with_compute_dtype(MODEL, CARD, objective="fast", ranges=Ranges(16, beyond="0.weight")).becomes
        == "float32"
    )
    assert with_compute_dtype(MODEL, profile("h200"), objective="exact") == MODEL


def test_what_is_ready_stays_so() -> None:
    made = with_compute_dtype(MODEL, CARD, objective="exact", compute="float16")
    assert with_compute_dtype(made, CARD, objective="exact", compute="float32") == made


def test_float16_is_refused_where_a_number_is_too_large() -> None:
    with pytest.raises(PlacementError, match=r"0\.weight has a number beyond 65504") as refused:
        with_compute_dtype(
            MODEL, CARD, objective="exact", compute="float16", ranges=Ranges(16, beyond="0.weight")
        )
    assert refused.value.hint == "--compute float32"


@pytest.mark.parametrize(
    ("machine", "why"), [("h200", "has bfloat16 units"), ("w7900", "has bfloat16 units")]
)
def test_nothing_is_converted_where_nothing_has_to_be(machine: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        with_compute_dtype(MODEL, profile(machine), objective="exact", compute="float32")
    half = ModelDescription(
        "m", (BlockDescription("0", (TensorDescription("w", (4, 4), "float16"),)),), "drawn"
    )
    with pytest.raises(UsageError, match="no bfloat16 weights to convert"):
        with_compute_dtype(half, CARD, objective="exact", compute="float32")


def test_the_verb_reads_a_checkpoint_before_it_says_float16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path / "m.safetensors", ("0.weight", "BF16", words(*[1.0] * 63, 70_000.0)))
    asked = ["plan", str(path), "--machine", "wx4100", "--vram", "1GiB"]
    assert main([*asked, "--objective", "fast"]) == Exit.OK
    said = capsys.readouterr().out
    assert "0.weight has a number beyond 65504" in said
    assert "resident, as float32" in said
    assert main([*asked, "--compute", "float16"]) == Exit.DEVICE
    assert "--compute float32" in capsys.readouterr().err
