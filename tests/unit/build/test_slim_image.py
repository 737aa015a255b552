"""Slim images: the files of a keep-list and their margin, the same bytes twice, and the way back."""

import json
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elf_maker import program
from gpucode.cutting import CUBIN, PTX, cubin, cuda, fatbin
from test_image_writer import EPOCH, FILES, members, place, written

from buildtool.build import image_writer, pipeline, slim_image
from buildtool.build.workplace import Workplace
from buildtool.cli import build
from buildtool.core.errors import ConfigError, DataError, ProofFailed
from buildtool.core.model import BuiltImage
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.source import Source
from buildtool.image.written import WrittenImage
from buildtool.keep.keep_list import KeepList
from buildtool.prune.trees import keys_in

NOISE = random.Random(1).randbytes(20_000)
TEXT = b".version 8.0 .entry _Z5threev".ljust(9000, b" ")
KEEP = KeepList(frozenset({"/opt/weir/lib/pkg/lib/program", "/opt/weir/lib/pkg/__init__.py"}))


@pytest.fixture(autouse=True)
def small_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service and the probes are 300 modules, which the margin parses."""
    monkeypatch.setattr(
        image_writer, "payload_files", lambda: {"opt/weir/app/service/__init__.py": b"import pkg\n"}
    )


def made(
    tmp_path: Path, keep: KeepList = KEEP, name: str = "tiny.keep"
) -> tuple[Workplace, Any, WrittenImage]:
    workplace, plan = place(tmp_path, {**FILES, "pkg/lib/program": program()})
    whole = written(workplace, plan)
    planned = plan.images[0]
    return workplace, whole, pipeline.write_kept(workplace, planned, whole, (Path(name), keep), epoch=EPOCH)


@pytest.mark.thorough
def test_what_is_kept_what_is_left_out_and_what_says_so(tmp_path: Path) -> None:
    workplace, whole, slim = made(tmp_path)
    below = members(workplace.layers, slim.layers[1])
    files = {name for name, (info, _) in below.items() if info.isreg()}
    assert {"opt/weir/lib/pkg/lib/program", "opt/weir/lib/pkg/__init__.py", "etc/passwd"} <= files
    assert {f"opt/weir/lib/pkg-1.0.dist-info/{name}" for name in ("RECORD", "METADATA")} <= files
    assert "opt/weir/lib/pkg/lib/native.so" not in files
    _, content = below["opt/weir/lib/pkg/lib/program"]
    assert program().startswith(content[64:4096], 64)
    assert len(content) < len(program()) - 300_000
    top = members(workplace.layers, slim.layers[-1])
    lines = top["opt/weir/left-out.txt"][1].decode().splitlines()
    assert lines[:2] == [
        "restore weir build tiny --keep tiny.keep --restore",
        "whole weir build tiny --undo",
    ]
    assert "file 2000004 /opt/weir/lib/pkg/lib/native.so" in lines
    assert any(line.startswith("symbols ") and line.endswith("/program") for line in lines)
    assert b"sitecustomize" in top["opt/weir/lib/sitecustomize.py"][1]
    labels = json.loads(slim.config)["config"]["Labels"]
    assert labels[slim_image.WHOLE] == whole.digest


@pytest.mark.thorough
def test_gpu_code_that_no_run_of_the_list_loaded_is_cut(tmp_path: Path) -> None:
    one, two = cubin("_Z3onev"), cubin("_Z3twov", n_bytes=20_000, stuff=NOISE)
    parts = [fatbin((CUBIN, 90, one)), fatbin((CUBIN, 90, two)), fatbin((PTX, 75, TEXT))]
    library = cuda(parts, align=2 << 20)
    path = "opt/weir/lib/pkg/lib/libkernels.so"
    workplace, plan = place(tmp_path, {**FILES, "pkg/lib/libkernels.so": library})
    whole = written(workplace, plan)
    planned = replace(plan.images[0], variant=replace(plan.images[0].variant, gpu_targets=("sm_90",)))
    files = KEEP.with_lines({f"/{path}"})

    def slim(keys: set[str], *generated: str) -> tuple[bytes, str]:
        made = {f"generated-gpu-code:{key}" for key in generated}
        keep = files.with_lines({*(f"gpu-code:{key}" for key in keys), *made})
        image = pipeline.write_kept(workplace, planned, whole, (Path("k"), keep), epoch=EPOCH)
        below, top = (members(workplace.layers, image.layers[number]) for number in (1, -1))
        return below[path][1], top["opt/weir/left-out.txt"][1].decode()

    assert slim(set())[0] == library, "no run looked"
    content, left_out = slim({key_of(one)})
    assert keys_in(Source.of_bytes(content)) == {key_of(one)}
    assert f"gpu-code {len(library) - len(content)} /{path}" in left_out.splitlines()
    assert TEXT not in content
    content = slim({key_of(one), "0" * 64})[0]
    assert keys_in(Source.of_bytes(content)) == {key_of(one)}
    assert TEXT in content, "it may be what a module in no library was compiled from"
    assert TEXT not in slim({key_of(one)}, "0" * 64)[0]


@pytest.mark.thorough
def test_the_same_list_gives_the_same_image_in_every_place(tmp_path: Path) -> None:
    digests = {made(tmp_path / place)[2].digest for place in ("a", "b")}
    assert len(digests) == 1
    more = made(tmp_path / "c", KEEP.with_lines({"/opt/weir/lib/extra.py"}))[2].digest
    assert more not in digests


@pytest.mark.thorough
def test_a_slim_build_leaves_the_whole_image_as_it_was(tmp_path: Path) -> None:
    workplace, whole, _ = made(tmp_path)
    _, plan = place(tmp_path / "again", {**FILES, "pkg/lib/program": program()})
    assert written(workplace, plan).digest == whole.digest
    assert written(workplace, plan, anew=True).digest == whole.digest


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lines", "said"), [({"/none"}, "names no file"), (KEEP.lines | {"no.module"}, "no module no.module")]
)
def test_a_list_of_another_image_is_refused(tmp_path: Path, lines: set[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        made(tmp_path, KeepList(frozenset(lines)))


@pytest.mark.thorough
def test_undo_asks_for_a_slim_image_and_refuses_another_whole_one(tmp_path: Path) -> None:
    workplace, whole, slim = made(tmp_path)
    options: Any = SimpleNamespace(candidates=[[SimpleNamespace(name="tiny", ref="weir/tiny:latest")]])
    workplace.layers.name({"tiny": whole}, {})
    with pytest.raises(DataError, match="not built with --keep"):
        build._wholes(options, workplace)
    workplace.layers.name({"tiny": slim}, {})
    wholes = build._wholes(options, workplace)
    assert wholes == {"tiny": whole.digest}
    for digest, fits in ((whole.digest, True), (slim.digest, False)):
        images: Any = SimpleNamespace(images=[BuiltImage("tiny", "weir/tiny:latest", digest)])
        if fits:
            build._require_wholes(images, wholes)
            continue
        with pytest.raises(ProofFailed, match="stays slim"):
            build._require_wholes(images, wholes)


def test_restored_names_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    keep = tmp_path / "tiny.keep"
    keep.write_text("/a\n")
    variant = SimpleNamespace(name="tiny", ref="weir/tiny:latest", dockerfile=None)
    options: Any = SimpleNamespace(candidates=[[variant]])

    def keeps(**given: Any) -> Any:
        usual = {"keep": str(keep), "restore": [], "workload": None, "env": [], "volume": []}
        return build._keeps(Namespace(**{**usual, **given}), options)

    assert keeps(restore=["torch.onnx", "/b"])["tiny"][1].lines == {"/a", "/b", "torch.onnx"}
    assert keep.read_text() == "/a\n", "the file is written once it was proved"
    for wrong in ({"restore": ["a/b"]}, {"keep": None, "restore": ["a"]}, {"env": ["A=1"]}):
        with pytest.raises(ConfigError):
            keeps(**wrong)
    variant.dockerfile = Path("Dockerfile")
    with pytest.raises(ConfigError, match="Dockerfile"):
        keeps()
