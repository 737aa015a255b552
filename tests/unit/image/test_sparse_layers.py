"""A layer with a file of zeros that is much larger than the image is refused at its header, by its name."""

from pathlib import Path

import image_maker as make
import pytest

from buildtool.cli.program import main
from buildtool.core.compression import zstd

SIZE = 200 << 30


def layer_without_its_end() -> bytes:
    """A layer that announces 200 GiB of zeros and holds 64 MiB of them: who reads further finds no end."""
    head = make.header(b"var/log/lastlog", b"\x80" + SIZE.to_bytes(11, "big"))
    return zstd.compress(make.tar(make.file("small", b"x"))[:1024] + head + bytes(64 << 20))


def saved(blob: bytes) -> bytes:
    image = make.Image([make.tar(make.file("f", b"x"))], lambda _content: blob)
    return make.archive(make.docker_25(image))


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
def test_a_sparse_file_is_named_before_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, packed: bool
) -> None:
    archive = saved(layer_without_its_end())
    (tmp_path / "a.tar").write_bytes(zstd.compress(archive) if packed else archive)
    assert main(["audit", str(tmp_path / "a.tar")]) == 5
    said = capsys.readouterr().err
    assert (
        "with var/log/lastlog (214,748,364,800 bytes), the layer unpacks to more than 17,179,869,184" in said
    )
    assert "--max-unpacked" in said


@pytest.mark.thorough
def test_more_can_be_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tar").write_bytes(saved(layer_without_its_end()))
    assert main(["audit", str(tmp_path / "a.tar"), "--max-unpacked", "250 GiB"]) == 5
    assert "ends inside a member" in capsys.readouterr().err, "it was read to its end"


@pytest.mark.thorough
def test_a_large_layer_that_is_stored_as_it_is_has_no_such_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = make.Image([zstd.decompress(layer_without_its_end())], make.plain)
    (tmp_path / "a.tar").write_bytes(make.archive(make.docker_25(image)))
    assert main(["audit", str(tmp_path / "a.tar")]) == 5
    assert "ends inside a member" in capsys.readouterr().err
