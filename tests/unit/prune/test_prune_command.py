"""`prune` as somebody types it: what is said, and the exit code."""

import json
import os
import socket
from pathlib import Path

import pytest
from gpucode.cutting import cuda
from gpucode.maker import Spec, bundles, code, make_library, nv_fatbin

from buildtool.cli.program import main
from buildtool.core.errors import Exit
from buildtool.core.files import looks_like_file
from buildtool.prune.manifest import FILE_NAME

LIBRARY = make_library(Spec(bundles(["gfx906", "gfx803", "gfx1100"]))).data


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A library, a text, a wheel, and a tree of a library and two kernel files."""
    (tmp_path / "libmath.so.1").write_bytes(LIBRARY)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "torch.whl").write_bytes(b"PK")
    (tmp_path / "cuda.fatbin").write_bytes(nv_fatbin([(2, 80, 600), (2, 90, 700)]))
    blas = tmp_path / "tree/rocblas/library"
    blas.mkdir(parents=True)
    for name in ("gfx906.co", "gfx1100.co", "fallback.dat"):
        (blas / f"TensileLibrary_{name}").write_bytes(code(name, n_bytes=3000))
    (tmp_path / "tree/libmath.so.1").write_bytes(LIBRARY)
    (tmp_path / "tree/program").write_bytes(
        make_library(Spec(bundles(["gfx906", "gfx803"]), interpreter=True)).data
    )
    return tmp_path


def command(place: Path, name: str, *words: object) -> int:
    return main(["prune", str(place / name), *map(str, words)])


def test_a_tree_is_pruned_and_the_manifest_is_in_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(place, "tree", "--targets", "gfx906") == Exit.FINDINGS, "the program was left whole"
    said = capsys.readouterr()
    assert "1 file for other cards, 1 library cut, 1 left whole" in said.out
    assert "  gfx1100: 3.00 kB in files, " in said.out
    assert "  gfx803: 0 B in files, " in said.out
    assert "left whole: program: " in said.err
    assert (place / "tree" / FILE_NAME).exists()
    (place / "tree/program").unlink()
    assert command(place, "tree", "--targets", "gfx906") == Exit.OK
    assert "nothing to cut" in capsys.readouterr().out


def test_a_dry_run_says_would_and_changes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(place, "tree", "--targets", "gfx906", "--dry-run") == Exit.FINDINGS
    said = capsys.readouterr()
    assert "would save" in said.out
    assert "would delete rocblas/library/TensileLibrary_gfx1100.co" in said.err
    assert not (place / "tree" / FILE_NAME).exists()
    assert command(place, "libmath.so.1", "--targets", "gfx906", "--dry-run") == Exit.OK
    assert "would shrink from" in capsys.readouterr().out
    assert (place / "libmath.so.1").read_bytes() == LIBRARY


def test_an_override_alone_says_what_the_card_passes_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(place, "libmath.so.1", "--hsa-override", "9.0.6") == Exit.OK
    assert "kept gfx906; cut gfx1100, gfx803" in capsys.readouterr().out


def test_a_file_shows_what_was_kept_and_cut(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(place, "libmath.so.1", "--targets", "gfx906", "--compress-version", "3") == Exit.OK
    assert "kept gfx906; cut gfx1100, gfx803" in capsys.readouterr().out
    assert command(place, "libmath.so.1", "--targets", "gfx906") == Exit.OK
    assert "nothing to cut; it holds code for gfx906" in capsys.readouterr().out
    assert command(place, "libmath.so.1", "--targets", "gfx906", "--out", place / "same.so") == Exit.OK
    assert "same.so: a copy of it" in capsys.readouterr().out
    assert command(place, "notes.txt", "--targets", "gfx906") == Exit.OK
    assert "nothing to cut; there is no code for other cards in it" in capsys.readouterr().out


def test_code_for_other_cards_that_stays_in_a_tree_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bitsandbytes' libraries for CUDA, beside those for ROCm, were left whole without a word."""
    (tmp_path / "libhip.so").write_bytes(LIBRARY)
    (tmp_path / "libcuda_too.so").write_bytes(cuda([nv_fatbin([(2, 80, 30_000), (2, 90, 30_000)])]))
    assert main(["prune", str(tmp_path), "--targets", "gfx906"]) == Exit.OK
    said = capsys.readouterr()
    assert "untouched: libcuda_too.so: it holds code for sm_80, sm_90 as before" in said.err
    assert "0 left whole, 1 untouched with code for other cards" in said.out
    [run] = json.loads((tmp_path / FILE_NAME).read_text())["runs"]
    assert [row["path"] for row in run["untouched"]] == ["libcuda_too.so"]
    assert main(["prune", str(tmp_path), "--targets", "gfx906"]) == Exit.OK
    assert "1 untouched with code for other cards" in capsys.readouterr().out


def test_code_that_may_not_move_becomes_a_hole_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fatbin = nv_fatbin([(2, 80, 3_000_000), (2, 90, 30_000)])
    library = tmp_path / "libcufft.so"
    library.write_bytes(cuda([fatbin], section=".data.more"))
    before = library.stat()
    dry = main(["prune", str(tmp_path), "--targets", "sm_90", "--dry-run"]), capsys.readouterr()
    assert main(["prune", str(tmp_path), "--targets", "sm_90"]) == dry[0] == Exit.OK
    said = capsys.readouterr()
    assert "prune libcufft.so: 3.04 MB to 3.04 MB, of which 3.00 MB are zeros" in said.err
    assert "saved 0 B, and 3.00 MB are zeros now; " in said.out
    assert said.out.replace("saved", "would save") == dry[1].out
    after = library.stat()
    assert after.st_size == before.st_size
    assert after.st_blocks < before.st_blocks / 2
    [run] = json.loads((tmp_path / FILE_NAME).read_text())["runs"]
    assert [(row["path"], row["zeroed_bytes"]) for row in run["pruned"]] == [("libcufft.so", 3_000_000)]
    assert main(["prune", str(tmp_path), "--targets", "sm_90"]) == Exit.OK
    assert "nothing to cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["absent.so", "--targets", "gfx906"], Exit.DATA, "there is no file or directory"),
        (["libmath.so.1", "--targets", "vegetable"], Exit.USAGE, "a target looks like gfx906"),
        (["libmath.so.1", "--targets", "MI50"], Exit.USAGE, "--targets gfx906"),
        (["libmath.so.1", "--targets", "compute_90"], Exit.USAGE, "sm_90"),
        (["libmath.so.1", "--targets", ","], Exit.USAGE, "name at least one"),
        (["libmath.so.1"], Exit.USAGE, "name at least one: --targets"),
        (["libmath.so.1", "--targets", "gfx1030"], Exit.USAGE, "libmath.so.1: there is no code for gfx1030"),
        (["libmath.so.1", "--targets", "sm_90"], Exit.USAGE, "--targets gfx1100"),
        (
            ["libmath.so.1", "--targets", "gfx906", "--manifest", "x"],
            Exit.USAGE,
            "--manifest isn't for a file",
        ),
        (["libmath.so.1", "--targets", "gfx906", "--tag", "a:b"], Exit.USAGE, "--tag isn't for a file"),
        (["libmath.so.1", "--targets", "gfx906", "--hsa-override", "10"], Exit.USAGE, "10.3.0"),
        (["libmath.so.1", "--targets", "gfx906", "--hsa-override", "10.3.0"], Exit.USAGE, "gfx1030"),
        (["torch.whl", "--targets", "gfx906"], Exit.USAGE, "unpack or install it"),
        (["cuda.fatbin", "--targets", "sm_90"], Exit.BUILD, "can't be cut"),
        (["tree", "--targets", "gfx906", "--out", "x"], Exit.USAGE, "cp -a"),
        (["tree", "--targets", "gfx906", "--tag", "a:b"], Exit.USAGE, "--tag isn't for a directory"),
        (["tree", "--targets", "gfx9999"], Exit.USAGE, "no code for gfx9999"),
        (["tree/program", "--targets", "gfx906"], Exit.BUILD, "program: "),
    ],
)
def test_each_mistake_is_reported_with_its_exit_code(
    place: Path, words: list[str], exit_code: Exit, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(place, *words) == exit_code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.parametrize(("name", "text"), [("alien.json", "{}"), ("nowhere/at/all.json", None)])
def test_a_manifest_that_cannot_be_written_stops_a_prune_before_it_begins(
    place: Path, name: str, text: str | None
) -> None:
    if text is not None:
        (place / name).write_text(text)
    code = command(place, "tree", "--targets", "gfx906", "--manifest", place / name)
    assert code in (Exit.DATA, Exit.ENVIRONMENT)
    assert (place / "tree/libmath.so.1").read_bytes() == LIBRARY


@pytest.mark.parametrize("option", ["--out=x", "--manifest=x", "--compress"])
def test_an_image_takes_only_what_is_for_images(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "weir/rocm:latest", "--targets", "gfx906", option]) == Exit.USAGE
    assert "isn't for an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        ("librocblas.so.4", True),
        ("./rocm", True),
        ("x/k.hsaco", True),
        ("weir/rocm:latest", False),
        ("rocm", False),
    ],
)
def test_a_missing_file_is_distinguished_from_an_image_by_its_name(name: str, is_file: bool) -> None:
    assert looks_like_file(name) == is_file


@pytest.mark.parametrize("name", ["./weir", "./weir/cpu", "../cpu:latest"])
def test_what_is_typed_as_a_path_never_becomes_the_name_of_an_image(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prune", name, "--targets", "gfx906"]) == Exit.DATA
    assert f"there is no file or directory {name}" in capsys.readouterr().err


def test_what_is_no_file_is_not_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "link.so").symlink_to("/dev/zero")
        for name, kind in (
            ("pipe", "a named pipe"),
            ("socket", "a socket"),
            ("link.so", "a character device"),
        ):
            assert command(tmp_path, name, "--targets", "gfx906") == Exit.DATA
            said = capsys.readouterr().err
            assert f"{name} is {kind}\n" in said
            assert "only those are pruned" in said


def test_a_device_in_the_working_directory_is_not_looked_up_as_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert main(["prune", "pipe", "--targets", "gfx906"]) == Exit.DATA
    assert "pipe is a named pipe" in capsys.readouterr().err
