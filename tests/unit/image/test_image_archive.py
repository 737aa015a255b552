"""Every dialect of image archive gives the same image; what can't be trusted is refused with its place."""

import random
from collections.abc import Callable
from pathlib import Path

import image_maker as make
import pytest
from image_maker import Image, Members, file, folder, tar

from buildtool.core.errors import ToolError
from buildtool.image.archive import StreamArchive, open_archive
from buildtool.image.documents import Platform
from buildtool.image.errors import (
    ImageError,
    LimitExceeded,
    Limits,
    MalformedDocument,
    MalformedStream,
    MalformedTar,
    Mismatch,
    MissingContent,
    NoSuchImage,
    Truncated,
)
from buildtool.image.reader import ImageContents, read_image

AMD64 = Platform("linux", "amd64")
LAYERS = [
    tar(folder("etc"), file("etc/one", b"1" * 900)),
    tar(file("two", bytes(70_000))),
    tar(file("etc/.wh.one")),
]
PACKERS = [make.plain, make.gzipped, make.gzip_members, make.zstandard, make.zstd_frames]
WRITERS = [make.oci_layout, make.docker_25, make.containerd_nested]
Open = Callable[[Members, Path], ImageContents]


def read(content: bytes, **options: object) -> ImageContents:
    archive = StreamArchive(make.chunks(content), label="test")
    return read_image(archive, label="test", **{"platform": AMD64, **options})  # type: ignore[arg-type]


def as_stream(members: Members, tmp_path: Path) -> ImageContents:
    return read(make.archive(members))


def as_shuffled_stream(members: Members, tmp_path: Path) -> ImageContents:
    order = random.Random(7).sample(sorted(members), len(members))
    return read(make.archive(members, order))


def as_file(members: Members, tmp_path: Path) -> ImageContents:
    path = tmp_path / "image.tar"
    path.write_bytes(make.archive(members))
    return read_image(open_archive(path), label="test", platform=AMD64)


def as_gzipped_file(members: Members, tmp_path: Path) -> ImageContents:
    path = tmp_path / "image.tar.gz"
    path.write_bytes(make.gzipped(make.archive(members)))
    return read_image(open_archive(path), label="test", platform=AMD64)


def as_directory(members: Members, tmp_path: Path) -> ImageContents:
    root = make.layout_directory(members, tmp_path / "layout")
    return read_image(open_archive(root), label="test", platform=AMD64)


SOURCES = [as_stream, as_shuffled_stream, as_file, as_gzipped_file, as_directory]


def file_list(contents: ImageContents) -> list[list[tuple[bytes, int]]]:
    return [
        [(layer.index.path(row), layer.index.sizes[row]) for row in range(layer.index.n_entries)]
        for layer in contents.layers
        if layer.index
    ]


EXPECTED = [[(b"etc", 0), (b"etc/one", 900)], [(b"two", 70_000)], []]


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("pack", PACKERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_every_oci_dialect_gives_the_same_image(write, pack, source, tmp_path: Path) -> None:
    image = Image(LAYERS, pack)
    contents = source(write(image), tmp_path)
    assert file_list(contents) == EXPECTED
    assert contents.ref == "docker.io/weir/tiny:1"
    assert contents.manifest_digest == make.sha(image.manifest())
    assert [layer.command for layer in contents.layers] == ["RUN step 0", "RUN step 1", "RUN step 2"]
    assert [layer.tar_bytes for layer in contents.layers] == [len(layer) for layer in LAYERS]
    stored = [None if pack is make.plain else len(blob) for blob in image.blobs()]
    assert [layer.stored_bytes for layer in contents.layers] == stored


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_a_legacy_archive_gives_the_same_image_without_a_digest(source, tmp_path: Path) -> None:
    contents = source(make.docker_legacy(Image(LAYERS)), tmp_path)
    assert file_list(contents) == EXPECTED
    assert contents.digest is None
    assert [layer.stored_bytes for layer in contents.layers] == [None] * 3


LISTS = ("manifest.json", "index.json", "repositories")


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [(), LISTS[:1], LISTS[1:2], LISTS], ids=lambda lost: " ".join(lost) or "-")
@pytest.mark.parametrize("dialect", make.DIALECTS)
def test_every_dialect_gives_the_same_image_shuffled_and_with_its_lists_lost(dialect: str, lost) -> None:
    write, pack = make.DIALECTS[dialect]
    members = {path: content for path, content in write(Image(LAYERS, pack)).items() if path not in lost}
    order = random.Random(dialect).sample(sorted(members), len(members))
    contents = read(make.archive(members, order))
    assert file_list(contents) == EXPECTED
    assert [layer.tar_bytes for layer in contents.layers] == [len(layer) for layer in LAYERS]
    if not set(members) & {"index.json", "manifest.json"}:
        assert "index.json and manifest.json are missing" in contents.notes[0]


def test_without_any_list_a_damaged_layer_is_missing_and_a_changed_config_is_noted() -> None:
    members = make.skopeo_archive(Image(LAYERS))
    del members["manifest.json"]
    layer, config = next(iter(members)), next(path for path in members if path.endswith(".json"))
    with pytest.raises(MissingContent, match="layer 0 with content sha256:"):
        read(make.archive(members | {layer: members[layer][:-700] + b"x" * 700}))
    changed = read(make.archive(members | {config: members[config].replace(b"step 0", b"step 9")}))
    assert "not its name; it was renamed or changed" in changed.notes[1]


def test_without_any_list_several_configs_are_not_chosen_from() -> None:
    members = make.skopeo_archive(Image(LAYERS)) | make.skopeo_archive(Image(LAYERS[:1]))
    del members["manifest.json"]
    with pytest.raises(NoSuchImage, match="holds several images\n  choose one with --image: sha256:"):
        read(make.archive(members))


def test_the_digest_is_the_one_that_the_reference_names() -> None:
    image = Image(LAYERS)
    nested = make.containerd_nested(image)
    contents = read(make.archive(nested))
    assert contents.digest != contents.manifest_digest == make.sha(image.manifest())
    assert make.blob_path(nested["index.json"]) not in nested
    assert f'"{contents.digest}"'.encode() in nested["index.json"]


def test_attestations_are_counted_apart() -> None:
    contents = read(make.archive(make.containerd_nested(Image(LAYERS))))
    assert contents.attestations.count == 1
    assert contents.attestations.stored_bytes > 0
    assert len(contents.layers) == 3


def test_an_artifact_attestation_is_no_image() -> None:
    image = Image(LAYERS)
    config = b"{}"
    artifact = make.dump(
        {
            "artifactType": "application/vnd.docker.attestation.manifest.v1+json",
            "config": make.descriptor(config, "application/vnd.oci.empty.v1+json"),
            "layers": [make.descriptor(b'{"a": 1}', "application/vnd.in-toto+json")],
            "subject": make.descriptor(image.manifest()),
        }
    )
    members = make.oci_layout(image) | make.stored(config, artifact, b'{"a": 1}')
    members["index.json"] = make.index_of(make.named(image), make.descriptor(artifact))
    assert read(make.archive(members)).attestations.count == 1


def two_platforms() -> Members:
    amd, arm = Image(LAYERS), Image(LAYERS[:1], architecture="arm64")
    inner = make.index_of(make.descriptor(arm.manifest()), make.descriptor(amd.manifest()))
    parts = make.oci_layout(amd) | make.oci_layout(arm) | make.stored(inner)
    return parts | {"index.json": make.index_of(make.descriptor(inner))}


@pytest.mark.parametrize(("architecture", "layers"), [("amd64", 3), ("arm64", 1)])
def test_of_several_platforms_the_wanted_one_is_read_and_named(architecture: str, layers: int) -> None:
    contents = read(make.archive(two_platforms()), platform=Platform("linux", architecture))
    assert len(contents.layers) == layers
    assert contents.notes == (f"of 2 platforms, linux/{architecture} was read",)


def test_rows_of_an_index_for_several_platforms_are_chosen_by_platform() -> None:
    amd, arm = Image(LAYERS), Image(LAYERS[:1], architecture="arm64")
    index = make.index_of(make.descriptor(amd.manifest()), make.descriptor(arm.manifest()))
    archive = make.archive(make.oci_layout(amd) | make.oci_layout(arm) | {"index.json": index})
    assert len(read(archive, platform=Platform("linux", "arm64")).layers) == 1
    assert len(read(archive, platform=Platform("linux", "amd64")).layers) == 3


@pytest.mark.parametrize("target", ["usr/bin", "/gone"])
def test_a_root_file_system_is_no_image_and_says_what_one_is(target: str) -> None:
    """What `docker export` writes: its links lead to no blob."""
    with pytest.raises(MissingContent, match=r"neither index\.json nor manifest\.json, and no image config"):
        read(make.tar(make.folder("usr/bin"), make.symlink("bin", target), file("usr/bin/true", b"x")))


def test_a_platform_that_is_not_there_is_asked_for() -> None:
    with pytest.raises(NoSuchImage, match="--platform: linux/arm64, linux/amd64"):
        read(make.archive(two_platforms()), platform=Platform("linux", "riscv64"))


def test_the_only_platform_is_not_read_in_place_of_the_one_that_was_asked_for() -> None:
    archive = make.archive(make.oci_layout(Image(LAYERS)))
    with pytest.raises(NoSuchImage, match="no image for linux/arm64\n  choose with --platform: linux/amd64"):
        read(archive, platform=Platform("linux", "arm64"))


def test_manifests_of_other_platforms_may_be_absent() -> None:
    image = Image(LAYERS)
    other = make.descriptor(b"elsewhere", platform={"os": "linux", "architecture": "s390x"})
    members = make.oci_layout(image) | {"index.json": make.index_of(other, make.named(image))}
    assert read(make.archive(members)).notes == ("the manifest for linux/s390x is not in the archive",)


def two_images() -> Members:
    one, two = Image(LAYERS, ref="weir/one:1"), Image(LAYERS[:1], ref="weir/two:latest")
    index = make.index_of(make.named(one), make.named(two))
    return make.oci_layout(one) | make.oci_layout(two) | {"index.json": index}


def test_of_several_images_the_named_one_is_read() -> None:
    assert len(read(make.archive(two_images()), ref="weir/two").layers) == 1
    with pytest.raises(NoSuchImage, match=r"choose one with --image: docker\.io/weir/one:1"):
        read(make.archive(two_images()))


def test_legacy_layers_may_be_links_to_each_other() -> None:
    image = Image([LAYERS[0], LAYERS[0]])
    members = make.docker_legacy(image)
    paths = [path for path in members if path.endswith("layer.tar")]
    kept = {path: content for path, content in members.items() if path != paths[1]}
    raw = make.archive(kept)[: -len(make.archive({}))]
    link = make.symlink(paths[1], f"../{paths[0]}")
    body = b"".join(file(path, content) for path, content in kept.items()) + link
    assert raw
    assert len(file_list(read(body + make.END))) == 2


def test_a_foreign_layer_may_be_absent_and_is_reported() -> None:
    image = Image(LAYERS[:1])
    manifest = make.dump(
        {
            "config": make.descriptor(image.config()),
            "layers": [
                make.descriptor(b"elsewhere", "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip")
            ],
        }
    )
    members = make.stored(image.config(), manifest) | {"index.json": make.index_of(make.descriptor(manifest))}
    contents = read(make.archive(members))
    assert contents.layers[0].index is None
    assert "foreign" in contents.notes[0]


def test_a_wrong_media_type_is_reported_and_the_content_decides() -> None:
    image = Image(LAYERS[:1], make.zstandard)
    manifest = image.manifest().replace(b"+zstd", b"+gzip")
    members = make.stored(*image.blobs(), image.config(), manifest)
    members["index.json"] = make.index_of(make.descriptor(manifest))
    assert read(make.archive(members)).notes == ("layer 0 is zstd although its media type says gzip",)


def test_an_image_without_layers_has_no_bytes() -> None:
    assert read(make.archive(make.oci_layout(Image([])))).layers == ()


def tampered(
    change: Callable[[Members, Image], None], write: Callable[[Image], Members] = make.docker_25
) -> bytes:
    image = Image(LAYERS)
    members = write(image)
    change(members, image)
    return make.archive(members)


def corrupt_layer(members: Members, image: Image) -> None:
    path = make.blob_path(image.blobs()[1])
    members[path] = make.gzipped(tar(file("two", b"evil")))


def corrupt_config(members: Members, image: Image) -> None:
    members[make.blob_path(image.config())] = image.config().replace(b"amd64", b"arm64")


def cut_layer(members: Members, image: Image) -> None:
    path = make.blob_path(image.blobs()[1])
    members[path] = members[path][:-20]


def drop_layer(members: Members, image: Image) -> None:
    del members[make.blob_path(image.blobs()[1])]


def drop_lists_and_config(members: Members, image: Image) -> None:
    for path in ("index.json", "manifest.json", make.blob_path(image.config())):
        del members[path]


def drop_config(members: Members, image: Image) -> None:
    del members[make.blob_path(image.config())]


def drop_manifest_json_and_empty_the_index(members: Members, image: Image) -> None:
    del members["manifest.json"]
    members["index.json"] = make.index_of()


def swap_lists_for(manifest_json: bytes) -> Callable[[Members, Image], None]:
    def change(members: Members, image: Image) -> None:
        del members["index.json"]
        members["manifest.json"] = manifest_json

    return change


def disagree(members: Members, image: Image) -> None:
    layers = [make.blob_path(blob) for blob in reversed(image.blobs())]
    members["manifest.json"] = make.dump([{"Config": make.blob_path(image.config()), "Layers": layers}])


def text_layer(members: Members, image: Image) -> None:
    evil = Image(LAYERS, lambda layer: b"no tar at all" + layer[:9])
    members |= make.docker_25(evil)


def swap(path: str, content: bytes) -> Callable[[Members, Image], None]:
    def change(members: Members, image: Image) -> None:
        members[path] = content

    return change


def point_to(document: bytes) -> Callable[[Members, Image], None]:
    def change(members: Members, image: Image) -> None:
        members |= make.stored(document)
        members["index.json"] = make.index_of(make.descriptor(document))

    return change


def two_configs(members: Members, image: Image) -> None:
    more = Image([*LAYERS, LAYERS[0]])
    manifest = make.dump(
        {
            "config": make.descriptor(more.config()),
            "layers": [make.descriptor(blob) for blob in image.blobs()],
        }
    )
    members |= make.stored(more.config(), manifest)
    members["index.json"] = make.index_of(make.descriptor(manifest))


def wrong_diff_id(members: Members, image: Image) -> None:
    config = image.config().replace(make.sha(LAYERS[0]).encode(), make.sha(b"").encode())
    blobs = [make.descriptor(blob) for blob in image.blobs()]
    manifest = make.dump({"config": make.descriptor(config), "layers": blobs})
    members |= make.stored(config, manifest)
    members["index.json"] = make.index_of(make.descriptor(manifest))


REFUSED = {
    "a layer's content was exchanged": (corrupt_layer, Mismatch),
    "the config was changed": (corrupt_config, Mismatch),
    "a layer is cut short": (cut_layer, Truncated),
    "a layer is missing": (drop_layer, MissingContent),
    "neither index nor manifest nor config": (drop_lists_and_config, MissingContent),
    "index.json and manifest.json disagree": (disagree, Mismatch),
    "a layer is no tar": (text_layer, MalformedStream),
    "more diff_ids than layers": (two_configs, MalformedDocument),
    "a wrong diff_id": (wrong_diff_id, Mismatch),
    "index.json is no JSON": (swap("index.json", b"{"), MalformedDocument),
    "index.json is a list": (swap("index.json", b"[]"), MalformedDocument),
    "index.json is empty": (swap("index.json", b""), MalformedDocument),
    "index.json nested deeply": (swap("index.json", b"[" * 10_000), MalformedDocument),
    "index.json nested at depth 100": (
        swap("index.json", b'{"manifests":' + b"[" * 100 + b"]" * 100 + b"}"),
        ImageError,
    ),
    "a doubled key": (swap("index.json", b'{"manifests": [], "manifests": []}'), MalformedDocument),
    "NaN": (swap("index.json", b'{"manifests": NaN}'), MalformedDocument),
    "an integer of 5,000 digits": (
        swap("index.json", b'{"manifests": ' + b"9" * 5000 + b"}"),
        MalformedDocument,
    ),
    "an index of 2,000 manifests": (
        swap("index.json", make.index_of(*[make.descriptor(b"x")] * 2_000)),
        LimitExceeded,
    ),
    "an index of 5 MiB": (
        swap("index.json", b'{"manifests": [' + b" " * (5 << 20) + b"]}"),
        LimitExceeded,
    ),
    "manifest and index in one document": (
        point_to(make.dump({"manifests": [], "layers": [], "config": {}})),
        MalformedDocument,
    ),
    "an index inside itself without end": (
        swap("index.json", make.index_of({"digest": "sha256:x", "size": 1})),
        MalformedDocument,
    ),
    "a negative size": (
        swap("index.json", make.index_of({"digest": make.sha(b""), "size": -1})),
        MalformedDocument,
    ),
    "no manifest": (drop_manifest_json_and_empty_the_index, MissingContent),
    "no rows": (swap_lists_for(b"[]"), MissingContent),
    "no config": (drop_config, MissingContent),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_trusted_is_refused(case: str, tmp_path: Path) -> None:
    change, fault = REFUSED[case]
    content = tampered(change)
    with pytest.raises(fault):
        read(content)
    path = tmp_path / "image.tar"
    path.write_bytes(content)
    with pytest.raises(fault):
        read_image(open_archive(path), label="test", platform=AMD64)


def test_indexes_are_followed_to_a_bounded_depth() -> None:
    image = Image(LAYERS)
    members = make.oci_layout(image)
    inner = image.manifest()
    for _ in range(6):
        inner = make.index_of(make.descriptor(inner))
        members |= make.stored(inner)
    members["index.json"] = make.index_of(make.descriptor(inner))
    with pytest.raises(LimitExceeded, match="nested without end"):
        read(make.archive(members))


def test_an_archive_without_its_end_is_truncated() -> None:
    content = make.archive(make.oci_layout(Image(LAYERS)))
    with pytest.raises(Truncated, match="no end marker\n  it was cut short"):
        read(content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 512))


def test_a_doubled_manifest_is_refused() -> None:
    members = make.oci_layout(Image(LAYERS))
    body = b"".join(file(path, content) for path, content in members.items())
    with pytest.raises(MalformedTar, match=r"index\.json twice"):
        read(body + file("index.json", b"{}") + make.END)


def test_links_in_a_layout_directory_are_not_followed(tmp_path: Path) -> None:
    image = Image(LAYERS)
    root = make.layout_directory(make.oci_layout(image), tmp_path / "layout")
    blob = root / make.blob_path(image.blobs()[0])
    outside = tmp_path / "outside"
    blob.rename(outside)
    blob.symlink_to(outside)
    with pytest.raises(MissingContent):
        read_image(open_archive(root), label="test", platform=AMD64)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(600), bytes(100)])
def test_what_is_no_archive_is_answered_with_what_one_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ToolError, match="docker save"):
        read_image(open_archive(path), label="test")


def test_a_directory_that_is_no_layout_is_not_searched(tmp_path: Path) -> None:
    with pytest.raises(MalformedDocument, match="no image layout"):
        open_archive(tmp_path)


def test_entries_stop_at_the_memory_that_was_allowed() -> None:
    layer = tar(*(file(f"f{n}") for n in range(2000)))
    content = make.archive(make.oci_layout(Image([layer])))
    archive = StreamArchive(make.chunks(content), label="t", limits=Limits(index_bytes=100_000))
    with pytest.raises(LimitExceeded, match="--memory"):
        read_image(archive, label="t", platform=AMD64)


@pytest.mark.parametrize("pack", [make.gzipped, make.zstandard])
def test_a_decompression_bomb_stops_at_its_limit(pack: make.Packer) -> None:
    layer = tar(file("zeros", bytes(4 << 20)))
    content = make.archive(make.oci_layout(Image([layer], pack)))
    archive = StreamArchive(make.chunks(content), label="t", limits=Limits(unpacked_bytes=1 << 20))
    with pytest.raises(LimitExceeded, match="unpacks to more than 1,048,576 bytes"):
        read_image(archive, label="t", platform=AMD64)


def wide_window(layer: bytes) -> bytes:
    parameters = make.zstd.CompressionParameter
    packer = make.zstd.ZstdCompressor(options={parameters.window_log: 28, parameters.compression_level: 1})
    return packer.compress(layer) + packer.flush()


def test_a_zstd_window_beyond_the_limit_is_refused() -> None:
    image = Image([tar(file("f", b"x" * 5000))], wide_window)
    with pytest.raises(MalformedStream, match="zstd"):
        read(make.archive(make.oci_layout(image)))
