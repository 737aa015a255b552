"""An image written without an engine: the same inputs give the same bytes, and nothing is half written."""

import hashlib
import io
import json
import os
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildtool.build import pipeline, plan
from buildtool.build.layer_store import LayerStore
from buildtool.build.wheel_layer import LARGE_BYTES, UNNEEDED, install_wheels
from buildtool.build.workplace import Workplace
from buildtool.core.errors import DataError, EnvironmentMissing
from buildtool.core.model import Bootstrap, PinnedBase, Resolved, TorchBuild, TorchSource, Variant, Wheel
from buildtool.image.flatten import flattened
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.streams import Form, decompressed, peek, sniff
from buildtool.image.written import LayerFile, WrittenImage

EPOCH = 1_767_225_600
RECIPE = Bootstrap("bookworm", ("python3",))
VARIANT = Variant("tiny", "s", "3.11", (RECIPE,), (TorchSource("host-pip", TorchBuild.CPU),))
FILES = {
    "pkg/__init__.py": b"x = 1\n",
    "pkg/data/t\xe4xt.json": b"{}",
    "pkg/include/a.h": b"int a;",
    "pkg/tests/test_a.py": b"assert 0",
    "pkg/__pycache__/x.cpython-311.pyc": b"bytecode",
    "pkg/lib/native.so": b"\x7fELF" + bytes(2_000_000),
    "easy.pth": b"import pkg\n",
    "pkg-1.0.data/scripts/tool": b"#!python\nprint(1)\n",
    "pkg-1.0.data/scripts/shell": b"#!/bin/sh\necho 1\n",
    "pkg-1.0.data/data/etc/pkg.conf": b"a=1\n",
    "pkg-1.0.data/purelib/extra.py": b"y = 2\n",
    "pkg-1.0.dist-info/entry_points.txt": b"[console_scripts]\npkg = pkg:main\n",
}


def wheel_of(folder: Path, files: dict[str, bytes], name: str = "pkg", version: str = "1.0") -> Path:
    info = f"{name}-{version}.dist-info"
    content = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in [*content, f"{info}/RECORD"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in (content | {f"{info}/RECORD": record}).items():
            entry = zipfile.ZipInfo(each, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if "scripts/" in each or each.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


def rootfs_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (
            ("./etc/passwd", b"root:x:0:0::/root:/bin/sh"),
            ("./etc/group", b"root:x:0:\n"),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), EPOCH
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


Place = Callable[[Path], tuple[Workplace, plan.BuildPlan]]


def place(state: Path, files: dict[str, bytes] = FILES) -> tuple[Workplace, plan.BuildPlan]:
    """A state directory with a wheel and a root file system in its caches, and the plan of their image."""
    workplace = Workplace(state, state / "lock.json", lambda _line: None)
    made = wheel_of(state / "tmp", files)
    data = made.read_bytes()
    wheel = Wheel(made.name, hashlib.sha256(data).hexdigest(), len(data))
    cached = workplace.wheels.path(wheel)
    cached.parent.mkdir(parents=True)
    made.replace(cached)
    tar = rootfs_tar()
    rootfs = workplace.rootfs.path(RECIPE, EPOCH)
    rootfs.parent.mkdir(parents=True, exist_ok=True)
    rootfs.write_bytes(tar)
    base = PinnedBase("bootstrap", "bookworm", hashlib.sha256(tar).hexdigest())
    resolved = Resolved("tiny", "", "host-pip", TorchBuild.CPU, "3.11", base, (wheel,))
    return workplace, plan.BuildPlan((plan.ImagePlan(VARIANT, resolved, state / "context"),), EPOCH)


def written(workplace: Workplace, made: plan.BuildPlan, *, anew: bool = False) -> WrittenImage:
    return pipeline.write(workplace, made, anew=anew)["tiny"]


def members(store: LayerStore, layer: LayerFile) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    plain = b"".join(decompressed(store.content(layer), Form.ZSTD, place="x"))
    assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == layer.diff_id
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        return {info.name: (info, tar.extractfile(info).read() if info.isreg() else b"") for info in tar}  # type: ignore[union-attr]


@contextmanager
def settings(umask: int, zone: str) -> Iterator[None]:
    before = os.umask(umask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        try:
            yield
        finally:
            os.umask(before)
    time.tzset()


@pytest.mark.thorough
def test_one_manifest_in_every_place_umask_and_time_zone(tmp_path: Path) -> None:
    digests = set()
    for number, (umask, zone) in enumerate([(0o022, "UTC"), (0o077, "Asia/Tokyo"), (0, "America/Lima")]):
        with settings(umask, zone):
            workplace, made = place(tmp_path / f"place {number}")
            digests.add(written(workplace, made).digest)
            digests.add(written(workplace, made, anew=True).digest)
    assert len(digests) == 1


@pytest.mark.thorough
def test_what_is_in_the_layers_is_roots_of_one_time_and_listed_in_record(tmp_path: Path) -> None:
    workplace, made = place(tmp_path)
    image = written(workplace, made)
    base, packages, bytecode, service = image.layers
    assert members(workplace.layers, bytecode) == {}, "the root file system has no Python"
    assert base.diff_id == f"sha256:{made.images[0].resolved.base.pin}", (
        "the root file system as it was locked"
    )
    files = members(workplace.layers, packages)
    assert {(info.uid, info.gid, info.uname, info.mtime) for info, _ in files.values()} == {(0, 0, "", EPOCH)}
    assert {info.mode for info, _ in files.values() if info.isdir()} == {0o755}
    modes = {name: info.mode for name, (info, _) in files.items() if info.isreg()}
    assert modes["opt/weir/bin/pkg"] == modes["opt/weir/lib/pkg/lib/native.so"] == 0o755
    assert modes["opt/weir/lib/pkg/__init__.py"] == 0o644
    assert files["etc/passwd"][1] == (
        b"root:x:0:0::/root:/bin/sh\nweir:x:10001:10001::/tmp:/usr/sbin/nologin\n"
    )
    record = files["opt/weir/lib/pkg-1.0.dist-info/RECORD"][1].decode()
    listed = {line.split(",")[0] for line in record.splitlines()}
    there = {os.path.relpath(f"/{name}", "/opt/weir/lib") for name in modes if name.startswith("opt/")}
    assert listed == there
    assert not [name for name in modes if "__pycache__" in name or UNNEEDED.search(name)]
    assert "opt/weir/app/service/__main__.py" in members(workplace.layers, service)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "pkg-1.0.data/scripts/../../../x", "pkg-1.0.data/nowhere/x"]
)
def test_a_wheel_writes_nowhere_but_into_its_own_place(name: str, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, {name: b"x"})
    with pytest.raises(DataError, match=r"pkg-1\.0-py3-none-any\.whl can't be installed"):
        install_wheels({wheel.name: wheel}, TarMembers(LayerWriter(io.BytesIO()), EPOCH))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"x" * len(data)])
def test_a_damaged_wheel_is_named_without_a_traceback(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    wheel = wheel_of(tmp_path, FILES)
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(DataError, match=r"pkg-1\.0-py3-none-any\.whl can't be installed"):
        install_wheels({wheel.name: wheel}, TarMembers(LayerWriter(io.BytesIO()), EPOCH))


def test_two_wheels_may_have_the_same_file_but_not_different_ones_at_one_place(tmp_path: Path) -> None:
    first = wheel_of(tmp_path, {"ns/__init__.py": b"same"}, "one")
    second = wheel_of(tmp_path, {"ns/__init__.py": b"same"}, "two")
    third = wheel_of(tmp_path, {"ns/__init__.py": b"other"}, "three")
    install_wheels({p.name: p for p in (first, second)}, TarMembers(LayerWriter(io.BytesIO()), EPOCH))
    with pytest.raises(DataError, match=r"another file at /opt/weir/lib/ns/__init__\.py"):
        install_wheels({p.name: p for p in (first, third)}, TarMembers(LayerWriter(io.BytesIO()), EPOCH))


def test_how_the_bytes_come_and_how_many_cores_there_are_changes_no_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() * 40 for n in range(4000))
    digests = set()
    for cores, step in ((1, 1000), (2, 70_001), (7, len(data))):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        layer = LayerWriter(io.BytesIO())
        for at in range(0, len(data), step):
            layer.write(data[at : at + step])
        digests.add(layer.finish().digest)
    assert len(digests) == 1


@pytest.mark.thorough
def test_each_compression_holds_the_same_files_and_gives_the_same_bytes_again(tmp_path: Path) -> None:
    workplace, made = place(tmp_path, FILES | {"pkg/large.bin": bytes(LARGE_BYTES + 1)})
    images = {}
    for kind, ending in (("zstd", ".tar+zstd"), ("gzip", ".tar+gzip"), ("none", ".tar")):
        chosen = replace(workplace, compression=kind)
        images[kind] = written(chosen, made)
        assert written(chosen, made, anew=True).digest == images[kind].digest
        rows = json.loads(images[kind].manifest)["layers"]
        assert all(row["mediaType"].endswith(ending) for row in rows)
        for layer in images[kind].layers:
            head, chunks = peek(chosen.layers.content(layer))
            tar = b"".join(decompressed(chunks, sniff(head), place="it"))
            assert f"sha256:{hashlib.sha256(tar).hexdigest()}" == layer.diff_id
    assert len({tuple(layer.diff_id for layer in image.layers) for image in images.values()}) == 1
    assert len({image.digest for image in images.values()}) == 3


@pytest.mark.thorough
def test_a_change_of_the_service_makes_one_layer_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace, made = place(tmp_path)
    first = written(workplace, made)
    monkeypatch.setattr("buildtool.build.image_writer.payload_files", lambda: {"opt/weir/app/x": b"new"})
    second = written(workplace, made)
    assert second.layers[:-1] == first.layers[:-1]
    assert second.layers[-1] != first.layers[-1]
    assert second.digest != first.digest


@pytest.mark.thorough
def test_a_layer_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    workplace, made = place(tmp_path)
    image = written(workplace, made)
    blob = workplace.layers.blob(image.layers[1].digest)
    blob.write_bytes(blob.read_bytes()[:100])
    assert written(workplace, made) == image
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


def test_a_damaged_input_stops_the_build_before_a_layer_is_kept(tmp_path: Path) -> None:
    workplace, made = place(tmp_path)
    [wheel] = made.images[0].resolved.wheels
    workplace.wheels.path(wheel).write_bytes(b"damaged")
    with pytest.raises(DataError, match="is corrupt"):
        written(workplace, made)
    assert not [p for p in tmp_path.rglob(".*partial*") if p.exists()]


@pytest.mark.thorough
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace, made = place(tmp_path)

    def full(self: LayerWriter, piece: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LayerWriter, "_keep", full)
    with pytest.raises(EnvironmentMissing, match="no space left"):
        written(workplace, made)
    layout = workplace.layers.layout
    assert [p.name for p in layout.rglob("*") if p.is_file()] == []
    monkeypatch.undo()
    assert written(workplace, made).layers


@pytest.mark.thorough
def test_a_layout_of_its_own_is_whole_and_replaces_only_a_layout(tmp_path: Path) -> None:
    workplace, made = place(tmp_path / "state")
    image = written(workplace, made)
    pipeline.keep(workplace, {"tiny": image}, {"tiny": None})
    target = tmp_path / "out/layout"
    workplace.layers.copy(image, "tiny", target)
    workplace.layers.copy(image, "tiny", target)
    [row] = json.loads((target / "index.json").read_text())["manifests"]
    assert row["digest"] == image.digest
    assert row["annotations"] == {
        "org.opencontainers.image.ref.name": "tiny", "io.weir.proof": "not proved",
    }  # fmt: skip
    blobs = {path.name for path in (target / "blobs/sha256").iterdir()}
    assert blobs == {d[7:] for d in (*image.ids, *(layer.digest for layer in image.layers))}
    assert all(hashlib.sha256((target / "blobs/sha256" / b).read_bytes()).hexdigest() == b for b in blobs)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/mine").touch()
    with pytest.raises(DataError, match="no OCI layout"):
        workplace.layers.copy(image, "tiny", tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["mine"]


@pytest.mark.thorough
@pytest.mark.parametrize(("limit", "kept"), [("KEPT_LAYERS", 1), ("KEPT_BYTES", 20)])
def test_what_no_named_image_has_is_evicted_but_for_the_newest(
    limit: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"buildtool.build.layer_store.{limit}", kept)
    workplace, made = place(tmp_path)
    store = workplace.layers
    image = written(workplace, made)
    pipeline.keep(workplace, {"tiny": image}, {"tiny": None})
    loose = [
        store.bring(store.key(n), lambda w, n=n: (w.write(bytes([n])), w.finish())[1])[0] for n in (1, 2)
    ]
    os.utime(store._keys / f"{store.key(1)}.json", (1, 1))
    with store.in_use():
        assert [store.blob(layer.digest).is_file() for layer in loose] == [False, True]
        assert all(store.blob(layer.digest).is_file() for layer in image.layers)
        store.blob(loose[1].digest).touch()
        (store.layout / "blobs/sha256" / ("0" * 64)).write_text("of a killed build")
        with store.in_use():  # another build is under way: nothing is evicted
            assert (store.layout / "blobs/sha256" / ("0" * 64)).is_file()
    with store.in_use():
        assert not (store.layout / "blobs/sha256" / ("0" * 64)).exists()


@pytest.mark.thorough
def test_layers_that_an_engine_has_are_known_by_either_id_of_a_named_image(tmp_path: Path) -> None:
    workplace, made = place(tmp_path)
    image = written(workplace, made)
    assert workplace.layers.held_by({image.digest}.__contains__) == frozenset()
    pipeline.keep(workplace, {"tiny": image}, {"tiny": None})
    held = {layer.digest for layer in image.layers}
    for known in image.ids:
        assert workplace.layers.held_by({known, "sha256:other"}.__contains__) == held


@pytest.mark.thorough
@pytest.mark.parametrize("gone", [0, 1])
def test_an_image_that_another_run_removes_while_its_labels_are_read_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    workplace, made = place(tmp_path)
    store, image = workplace.layers, written(workplace, made)
    pipeline.keep(workplace, {"tiny": image}, {"tiny": None})
    assert store.labels("tiny")
    rows = store._rows()
    monkeypatch.setattr(LayerStore, "_rows", lambda _store: rows)
    store.blob((image.digest, image.config_digest)[gone]).unlink()
    assert store.labels("tiny") == {}


@pytest.mark.thorough
def test_an_image_that_somebody_removes_from_the_engine_before_it_has_its_name_is_loaded_again(
    tmp_path: Path,
) -> None:
    workplace, made = place(tmp_path)
    image = written(workplace, made)
    sent: list[bytes] = []

    class Forgetful:
        """Holds the image until it is to name it."""

        has = staticmethod({image.digest}.__contains__)

        def tag(self, ref: str, _name: object) -> str:
            raise DataError(f"the engine has no image {ref}")

        def load(self, chunks: Iterator[bytes]) -> None:
            sent.extend(chunks)

        def inspect(self, _name: str) -> dict[str, str]:
            return {"Id": image.digest}

    engine: Any = Forgetful()
    assert pipeline.load(workplace, {"tiny": image}, "t:1", engine=engine) == {"tiny": image.digest}
    assert sent


# ---- the merged tree


def tar_of(*members: tuple[str, str, bytes | str]) -> Callable[[], Iterator[bytes]]:
    out = io.BytesIO()
    kinds = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            info.type = kinds[kind]
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return lambda: iter([out.getvalue()])


def tree(*layers: Callable[[], Iterator[bytes]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for entry in flattened(layers):
        assert entry.info.name not in found, "each path once"
        content = b"".join(entry.content)
        if entry.info.islnk():
            found[entry.info.name] = ("same as", entry.info.linkname)
            assert entry.info.linkname in found, "a link comes after what it names"
        elif entry.info.issym():
            found[entry.info.name] = ("to", entry.info.linkname)
        else:
            found[entry.info.name] = "dir" if entry.info.isdir() else content
    return found


def test_a_later_layer_replaces_hides_and_reaches_through_links() -> None:
    low = tar_of(
        ("dir", "./usr", b""), ("dir", "./usr/lib", b""),
        ("sym", "./lib", "usr/lib"),
        ("file", "./usr/lib/a", b"1"),
        ("dir", "./gone", b""), ("file", "./gone/x", b"x"), ("dir", "./opq", b""),
        ("file", "./opq/old", b"o"),
        ("file", "./was-dir/x", b""),
    )  # fmt: skip
    high = tar_of(
        ("file", "lib/b", b"2"), ("file", "usr/lib/a", b"3"), ("file", ".wh.gone", b""), ("dir", "opq", b""),
        ("file", "opq/new", b"n"), ("file", "opq/.wh..wh..opq", b""), ("file", "was-dir", b"now a file"),
    )  # fmt: skip
    assert tree(low, tar_of(("file", "usr/lib/a/c", b"4")))["usr/lib/a/c"] == b"4", "a file gives way"
    assert "usr/lib/a" not in tree(low, tar_of(("file", "usr/lib/a/c", b"4")))
    assert tree(low, high) == {
        "usr": "dir", "usr/lib": "dir", "lib": ("to", "usr/lib"), "usr/lib/a": b"3", "usr/lib/b": b"2",
        "opq": "dir", "opq/new": b"n", "was-dir": b"now a file",
    }  # fmt: skip


def test_a_hard_link_keeps_its_content_when_a_later_layer_replaces_what_it_names() -> None:
    low = tar_of(("file", "a", b"old"), ("hard", "b", "a"), ("hard", "c", "./a"), ("hard", "d", "a"))
    assert tree(low) == {"a": b"old", "b": ("same as", "a"), "c": ("same as", "a"), "d": ("same as", "a")}
    assert tree(low, tar_of(("file", "a", b"new"), ("file", ".wh.c", b""))) == {
        "b": b"old", "d": ("same as", "b"), "a": b"new",
    }  # fmt: skip


def test_a_hard_link_to_a_lower_layer_or_through_another_link_keeps_its_content() -> None:
    low, link = tar_of(("dir", "d", b""), ("file", "d/f", b"1")), tar_of(("hard", "h", "d/f"))
    assert tree(low, link) == {"d": "dir", "d/f": b"1", "h": ("same as", "d/f")}
    assert tree(low, link, tar_of(("file", "d/.wh.f", b""))) == {"d": "dir", "h": b"1"}
    chain = tar_of(("file", "a", b"1"), ("hard", "h", "a"), ("hard", "i", "h"))
    assert tree(chain, tar_of(("file", ".wh.h", b""))) == {"a": b"1", "i": ("same as", "a")}


def test_no_path_leads_out_of_the_tree_or_into_a_circle() -> None:
    assert tree(tar_of(("sym", "out", "/etc"), ("file", "out/../../x", b"1"), ("file", "out/y", b"2"))) == {
        "out": ("to", "/etc"), "x": b"1", "etc/y": b"2",
    }  # fmt: skip
    with pytest.raises(DataError, match="in a circle"):
        tree(tar_of(("sym", "a", "b"), ("sym", "b", "a"), ("file", "a/x", b"")))
    with pytest.raises(DataError):
        tree(lambda: iter([b"not a tar" * 200]))
