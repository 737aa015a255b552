"""What goes beside other cards' code: what no running program loads, and what no observed run loaded."""

import os
import random
from pathlib import Path

import pytest
from gpucode.cutting import CUBIN, PTX, cubin, cuda, fatbin

from buildtool.cli import main
from buildtool.gpucode.elf import PT_LOAD, read_elf
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.source import Source
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


def test_a_library_at_multiples_of_2_mib_is_cut_by_pages_once(tree: Path) -> None:
    library = cuda([fatbin((CUBIN, 90, ONE), (CUBIN, 80, TWO))], align=2 << 20)
    (tree / "lib.so").write_bytes(library)
    assert main(["prune", str(tree), "--targets", "sm_90"]) == 0
    assert (tree / "lib.so").read_bytes() == library, "less than 2 MiB would be freed"
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    cut = (tree / "lib.so").read_bytes()
    assert len(library) - len(cut) >= 8000
    loads = [each for each in read_elf(Source.of_bytes(cut)).segments if each.type == PT_LOAD]
    assert {each.align for each in loads} == {4096}
    assert keys_below(tree) == {key_of(ONE)}
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    assert (tree / "lib.so").read_bytes() == cut


def test_second_builds_of_libraries_go_where_nothing_names_them(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lib = tree / "lib"
    (lib / "x.dist-info").mkdir(parents=True)
    program = cuda([])
    gone = {"librtc.alt.so.13": b"librtc-parts.alt.so.13.0", "librtc-parts.alt.so.13.0": b"librtc.alt.so.13"}
    stay = {
        "librtc.so.13": b"librtc-parts.so.13.0",
        "librtc-parts.so.13.0": b"",
        "libnamed.so": b"",
        "libnamed.alt.so": b"libpart.alt.so",
        "libpart.so": b"",
        "libpart.alt.so": b"",
        "libpython3.so": b"",
        "libpython3.11.so": b"",
        "libalone.alt.so": b"",
        "libled.so.1": b"",
        "libled.alt.so.1": b"",
        "libcode.so": b"",
    }
    for name, text in {**gone, **stay}.items():
        (lib / name).write_bytes(program + text)
    (lib / "libcode.alt.so").write_bytes(cuda([fatbin((CUBIN, 90, ONE))]))
    (lib / "libled.so").symlink_to("libled.alt.so.1")
    odd = os.fsdecode(b"libodd\xff.alt.so1")
    (lib / odd).write_bytes(program)
    (lib / odd.replace(".alt", "")).write_bytes(program)
    (lib / "static.a").write_bytes(b"!<arch>\nrtc.alt")  # goes as well
    (lib / "load.py").write_text("CDLL('libnamed.alt.so')")
    (lib / "x.dist-info" / "RECORD").write_text("".join(f"lib/{name},,\n" for name in gone))
    before = names(lib)
    assert main(["prune", str(tree), "--targets", "sm_90"]) == 0
    assert names(lib) == before, "without --strip"
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    assert before - names(lib) == {*gone, "static.a"}
    assert main(["prune", str(tree), "--targets", "sm_90", "--strip"]) == 0
    assert "nothing to cut" in capsys.readouterr().out.splitlines()[-1]


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


@pytest.mark.parametrize("kind", ["", "generated-"])
def test_code_that_cannot_be_read_goes_unless_something_loaded_is_in_no_library(
    tree: Path, tmp_path: Path, kind: str
) -> None:
    text = b".version 8.0 .entry _Z5threev".ljust(9000, b" ")
    (tree / "jit.so").write_bytes(cuda([fatbin((CUBIN, 90, TWO)), fatbin((PTX, 75, text))]))
    keep = tmp_path / "keep"
    keep.write_text(f"/lib.so\ngpu-code:{key_of(ONE)}\n{kind}gpu-code:{'0' * 64}\n")
    assert main(["prune", str(tree), "--targets", "sm_90", "--keep", str(keep)]) == 0
    assert (text in (tree / "jit.so").read_bytes()) is (kind == "")


def test_a_keep_list_without_gpu_code_is_refused(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keep").write_text("/lib.so\n")
    before = (tree / "lib.so").read_bytes()
    assert main(["prune", str(tree), "--targets", "sm_90", "--keep", str(tmp_path / "keep")]) == 5
    assert "weir observe IMAGE --gpu-code" in capsys.readouterr().err
    assert (tree / "lib.so").read_bytes() == before
