"""What goes beside other cards' code: what no running program loads, and what no observed run loaded."""

import random
from pathlib import Path

import pytest
from gpucode.cutting import CUBIN, cubin, cuda, fatbin

from buildtool.cli import main
from buildtool.gpucode.loaded import key_of
from buildtool.prune.trees import keys_below

NOISE = random.Random(1).randbytes(9000)
ONE, TWO = cubin("_Z3onev"), cubin("_Z3twov", n_bytes=9000, stuff=NOISE)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    library = cuda([fatbin((CUBIN, 90, ONE)), fatbin((CUBIN, 90, TWO))], symbols=True)
    (root / "lib.so").write_bytes(library)
    for name in ("static.a", "linked.a"):
        (root / name).write_bytes(b"!<arch>\n" + NOISE)
    (root / "other.a").symlink_to("linked.a")
    (root / "text.a").write_bytes(b"no archive")
    (root / "bin" / "ptxas-blackwell").write_bytes(b"\x7fELF program")
    return root


def names(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if not path.is_dir()} - {"weir-prune.json"}


def test_strip_removes_what_no_program_loads_and_says_so(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip", "--dry-run"]) == 0
    foretold = capsys.readouterr().out
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    assert capsys.readouterr().out == foretold.replace("would save", "saved")
    assert "no card: 9.0" in foretold
    assert names(tree) == {"lib.so", "linked.a", "other.a", "text.a"}
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    assert "nothing to cut" in capsys.readouterr().out


def test_assembler_for_later_cards_stays_for_them(tree: Path) -> None:
    (tree / "lib.so").write_bytes(cuda([fatbin((CUBIN, 120, ONE))]))
    assert main(["prune", str(tree), "--targets", "sm_120"]) == 0
    assert "ptxas-blackwell" in names(tree)
    assert "static.a" in names(tree), "without --strip"


def test_code_that_no_run_of_the_keep_list_loaded_goes(tree: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.write_text(f"/lib.so\ngpu-code:{key_of(ONE)}\n")
    assert keys_below(tree) == {key_of(ONE), key_of(TWO)}
    assert main(["prune", str(tree), "--targets", "sm_90", "--keep", str(keep)]) == 0
    assert keys_below(tree) == {key_of(ONE)}


def test_a_keep_list_without_gpu_code_is_refused(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keep").write_text("/lib.so\n")
    before = (tree / "lib.so").read_bytes()
    assert main(["prune", str(tree), "--targets", "sm_90", "--keep", str(tmp_path / "keep")]) == 5
    assert "weir observe IMAGE --gpu-code" in capsys.readouterr().err
    assert (tree / "lib.so").read_bytes() == before
