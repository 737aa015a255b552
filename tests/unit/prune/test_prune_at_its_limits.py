"""Limits of a prune: the last link that is followed, the last byte of a record, what can't be changed."""

import errno
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpucode.cutting import pruned
from gpucode.maker import Spec, bundles, code, make_library, nv_fatbin, raw_bundle
from test_archive import LIBRARY, STUBBORN, Part, make

from buildtool.core.errors import EnvironmentMissing
from buildtool.gpucode import bundle, verify
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.forward import read_forward
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import GpuCodeError, Source, TargetMissing
from buildtool.gpucode.target import TargetId, parse_targets
from buildtool.gpucode.verify import verify_prune
from buildtool.prune import trees
from buildtool.prune.archives import archive_targets, prune_tar
from buildtool.prune.manifest import image_manifest, runs_in
from buildtool.prune.trees import Links, prune_tree

GFX906 = parse_targets("gfx906")


def test_targets_of_a_file_that_is_refused_count_as_there(tmp_path: Path) -> None:
    """Else an image whose only code can't be cut would seem to have none for the card."""
    made = make(tmp_path / "in.tar", [Part("program", STUBBORN)])
    result = prune_tar(made, tmp_path / "out.tar", GFX906)
    assert [item.path for item in result.refused] == ["program"]
    assert archive_targets(made, folder=tmp_path) == {TargetId("gfx906"), TargetId("gfx803")}


def test_a_foreign_link_does_not_keep_the_foreign_file_that_it_leads_to(tmp_path: Path) -> None:
    parts = [
        Part("a_gfx803.co", b"foreign"),
        Part("b_gfx803.co", kind=tarfile.SYMTYPE, to="a_gfx803.co"),
        Part("c_gfx906.co", b"ours"),
    ]
    result = prune_tar(make(tmp_path / "in.tar", parts), tmp_path / "out.tar", GFX906)
    assert sorted(item.path for item in result.deleted) == ["a_gfx803.co", "b_gfx803.co"]


@pytest.mark.parametrize("blocks", range(16, 20))
def test_an_archive_ends_at_the_first_record_that_holds_its_end_marker(tmp_path: Path, blocks: int) -> None:
    whole = make(tmp_path / "in.tar", [Part("x", b"x" * (512 * (blocks - 1)), mtime=0)])
    prune_tar(whole, tmp_path / "out.tar", GFX906)
    records = 1 if blocks <= 18 else 2  # a record has 20 blocks, and the end marker takes two
    assert (tmp_path / "out.tar").stat().st_size == records * tarfile.RECORDSIZE


def test_a_fault_names_its_place_where_it_has_one() -> None:
    assert (str(GpuCodeError("odd")), GpuCodeError("odd").place) == ("odd", None)
    fault = GpuCodeError("odd", "look", place=0)
    assert (fault.message, fault.hint, fault.place) == ("odd (at byte 0x0)", "look", 0)


def test_entries_without_content_are_no_code() -> None:
    raw = raw_bundle({"gfx906": code("gfx906"), "gfx803": b""})
    found = scan_file(Source.of_bytes(raw))
    assert found == {"gfx906": 9000}


@pytest.mark.parametrize("method", bundle.Method)
def test_the_head_of_a_compressed_bundle_is_all_that_is_unpacked(
    method: bundle.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(20_000)
    packed = bundle.pack([data], len(data), version=3, method=method)
    monkeypatch.setattr(bundle, "CHUNK_BYTES", 500)
    read = 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal read
        read += length
        return packed[offset : offset + length]

    for head_bytes, most in ((1200, len(packed) / 2), (30_000, len(packed) + 100)):
        monkeypatch.setattr(bundle, "HEAD_BYTES", head_bytes)
        read = 0
        source = Source(len(packed), read_at)
        header = read_forward(bundle.read_header(0, len(packed)), source)
        head, stored_bytes = read_forward(bundle.read_head(header, 0, len(packed)), source)
        assert (head, stored_bytes) == (data[:head_bytes], len(packed))
        assert read < most


def test_a_result_is_compared_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(Spec(bundles(["gfx906", "gfx1100"]), symbols=True)).data
    good = pruned(library, "gfx906")
    monkeypatch.setattr(verify, "CHUNK_BYTES", 7)
    assert verify_prune(Source.of_bytes(library), Source.of_bytes(good), GFX906) == 6


def test_relocatable_code_has_to_serve_every_card_that_is_asked_for() -> None:
    """It can't be cut; so with one card missing, that card is the reason, not the form of the code."""
    library = make_library(
        Spec([nv_fatbin([(2, 80, 600)])], section="__nv_relfatbin", wrapper_section=".other")
    ).data
    assert not plan_prune(Source.of_bytes(library), parse_targets("sm_80")).changed
    with pytest.raises(TargetMissing, match="sm_90"):
        plan_prune(Source.of_bytes(library), parse_targets("sm_80,sm_90"))


@pytest.mark.parametrize(("count", "leads"), [(39, "end"), (40, "end"), (41, None)])
def test_as_many_links_are_followed_as_the_kernel_follows(count: int, leads: str | None) -> None:
    links = Links({f"l{index}": f"l{index + 1}" if index + 1 < count else "end" for index in range(count)})
    assert links.destination("l0") == leads
    assert links.place("l0") == "l0"


def test_a_tree_is_walked_in_the_order_of_its_names(tmp_path: Path) -> None:
    names = ["K_gfx803.co", "a/K_gfx803.co", "a/b/K_gfx803.co", "b/K_gfx803.co", "b/z_gfx803.co"]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"foreign")
    (tmp_path / "K_gfx906.co").write_bytes(b"ours")
    assert [item.path for item in prune_tree(tmp_path, GFX906).deleted] == names


@pytest.mark.parametrize(("ours", "given"), [(True, []), (False, [(17, 42)])])
def test_a_pruned_file_belongs_to_whom_it_belonged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool, given: list[tuple[int, int]]
) -> None:
    path = tmp_path / "liba.so"
    path.write_bytes(LIBRARY)
    real = path.stat()
    owner = (os.geteuid(), os.getegid()) if ours else (17, 42)
    status = SimpleNamespace(
        st_uid=owner[0], st_gid=owner[1], st_mode=real.st_mode, st_atime_ns=1, st_mtime_ns=2
    )
    seen: list[tuple[int, int]] = []

    with path.open("rb") as original, (tmp_path / "copy").open("wb") as copy:
        monkeypatch.setattr(os, "fstat", lambda _descriptor: status)
        monkeypatch.setattr(os, "fchown", lambda _copy, *owner: seen.append(owner))
        trees._copy_status(original.fileno(), copy.fileno())
        monkeypatch.undo()
    assert seen == given
    assert (tmp_path / "copy").stat().st_mtime_ns == 2


def failing(number: int) -> Callable[..., None]:
    def fail(*_args: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_that_can_not_be_deleted_stops_the_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "K_gfx803.co").write_bytes(b"foreign")
    (tmp_path / "K_gfx906.co").write_bytes(b"ours")
    monkeypatch.setattr(Path, "unlink", failing(errno.EBUSY))
    with pytest.raises(EnvironmentMissing, match=r"K_gfx803\.co can't be deleted: Device or resource busy"):
        prune_tree(tmp_path, GFX906)


def test_a_link_that_can_not_be_read_stops_the_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("x")
    monkeypatch.setattr(Path, "readlink", failing(errno.EIO))
    with pytest.raises(EnvironmentMissing, match="link can't be read: Input/output error"):
        prune_tree(tmp_path, GFX906)


def test_a_library_that_can_not_be_opened_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "liba.so").write_bytes(LIBRARY)
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    result = prune_tree(tmp_path, GFX906)
    assert not result.changed
    assert result.refused == []


def test_the_name_of_a_file_says_what_is_in_it_before_its_content_does(tmp_path: Path) -> None:
    (tmp_path / "K_gfx906.co").write_bytes(raw_bundle({"gfx803": code("gfx803")}))
    assert prune_tree(tmp_path, GFX906, dry_run=True).deleted == []
    with pytest.raises(TargetMissing):
        prune_tree(tmp_path, parse_targets("gfx803"), dry_run=True)


def test_the_manifest_of_an_image_is_read_back_as_it_was_written() -> None:
    text = image_manifest(parse_targets("gfx906,gfx90a:xnack-"), [{"b": 1}, {"a": None}])
    assert json.loads(text) == {
        "schema_version": 1,
        "targets": ["gfx906", "gfx90a:xnack-"],
        "runs": [{"b": 1}, {"a": None}],
    }
    assert text.startswith('{\n "runs": [\n  {\n   "b": 1\n')
    assert text.endswith("}\n")
    assert runs_in(text.encode()) == [{"b": 1}, {"a": None}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "no runs"),
        ('{"schema_version": 1}', "no runs"),
        ('{"schema_version": 1, "runs": {}}', "no runs"),
        ('{"schema_version": 2, "runs": []}', "schema version 2"),
        ('{"runs": []}', "schema version None"),
        ('{"schema_version": 1, "runs": [NaN]}', "JSON"),
    ],
)
def test_what_is_no_manifest_is_named_as_what_it_is(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        runs_in(text.encode())
