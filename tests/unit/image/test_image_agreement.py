"""Manifests, lists and configs that must agree on an image, and what is refused where they don't."""

import json
from pathlib import Path

import image_maker as make
import pytest
from image_maker import Image, Members, file, folder, tar

from buildtool.image.archive import DirectoryArchive, StreamArchive
from buildtool.image.documents import Platform
from buildtool.image.errors import (
    LIMITS,
    Limits,
    MalformedDocument,
    MalformedStream,
    Mismatch,
    MissingContent,
    Truncated,
)
from buildtool.image.reader import ImageContents, Layer, read_image

AMD64 = Platform("linux", "amd64")
LAYERS = [tar(folder("etc"), file("etc/one", b"1" * 900)), tar(file("two", b"2" * 70))]
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"


def read(members: Members, limits: Limits = LIMITS, **options: object) -> ImageContents:
    archive = StreamArchive(make.chunks(make.archive(members)), label="test")
    return read_image(archive, label="test", limits=limits, **{"platform": AMD64, **options})  # type: ignore[arg-type]


# What must agree.


def test_a_layer_of_another_length_than_announced_is_reported_with_both() -> None:
    image = Image(LAYERS[:1])
    blob = image.blobs()[0]
    for size in (len(blob) - 1, len(blob) + 1):
        manifest = make.manifest_of(image.config(), make.descriptor(blob) | {"size": size})
        members = make.stored(blob, image.config(), manifest) | {"index.json": make.pointing_to(manifest)}
        with pytest.raises(Mismatch, match=f"{len(blob):,} bytes, announced {size:,}") as told:
            read(members)
        assert told.value.place == make.blob_path(blob)


def test_a_count_of_layers_that_differs_is_reported_with_both() -> None:
    image = Image(LAYERS)
    manifest = make.manifest_of(image.config(), make.descriptor(image.blobs()[0]))
    members = make.oci_layout(image) | make.stored(manifest) | {"index.json": make.pointing_to(manifest)}
    with pytest.raises(MalformedDocument, match="1 layers, the config 2") as told:
        read(members)
    assert told.value.place == make.sha(manifest)
    legacy = make.docker_legacy(image)
    row = {
        "Config": next(iter(legacy)),
        "Layers": [path for path in legacy if path.endswith("layer.tar")][:1],
    }
    with pytest.raises(MalformedDocument, match="1 layers, the config 2") as told:
        read(legacy | {"manifest.json": make.dump([row])})
    assert told.value.place == row["Config"]


def test_a_config_that_lists_no_layers_is_described_with_a_note() -> None:
    image = Image(LAYERS[:1])
    config = make.dump({"architecture": "amd64", "os": "linux"})
    manifest = make.manifest_of(config, make.descriptor(image.blobs()[0]))
    layout = make.oci_layout(image) | make.stored(config, manifest)
    layout |= {"index.json": make.pointing_to(manifest)}
    row = {"Config": make.blob_path(config), "Layers": [make.blob_path(image.blobs()[0])]}
    saved = make.stored(config, image.blobs()[0]) | {"manifest.json": make.dump([row])}
    for members in (layout, saved):
        contents = read(members)
        assert [layer.diff_id for layer in contents.layers] == [make.sha(LAYERS[0])]
        assert contents.layers[0].unpacked_bytes
        assert [note for note in contents.notes if "the config lists no layers" in note]


def test_names_of_manifest_json_may_be_in_another_case_as_old_jib_wrote_them() -> None:
    image = Image(LAYERS)
    legacy = make.docker_legacy(image)
    [row] = json.loads(legacy["manifest.json"])
    jib = {"config": row["Config"], "repoTags": row["RepoTags"], "layers": row["Layers"]}
    contents = read(legacy | {"manifest.json": make.dump([jib])})
    assert len(contents.layers) == len(LAYERS)
    assert "manifest.json spells `Config` as 'config'" in contents.notes
    with pytest.raises(MalformedDocument, match="spelled in two ways"):
        read(legacy | {"manifest.json": make.dump([{**row, "layers": row["Layers"][:1]}])})


@pytest.mark.parametrize(
    ("media", "urls"),
    [
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", []),
        (f"{OCI_LAYER.replace('layer', 'layer.nondistributable')}", []),
        (OCI_LAYER, ["https://example.org/layer"]),
    ],
)
def test_only_foreign_layers_may_be_absent(media: str, urls: list[str]) -> None:
    image = Image(LAYERS)
    present, absent = image.blobs()[0], make.descriptor(b"elsewhere", media, urls=urls)
    manifest = make.manifest_of(image.config(), make.descriptor(present, media), absent)
    members = make.stored(present, image.config(), manifest) | {"index.json": make.pointing_to(manifest)}
    contents = read(members)
    assert contents.layers[0].unpacked_bytes == 900
    assert contents.layers[1] == Layer(
        make.sha(b"elsewhere"), make.sha(LAYERS[1]), len(b"elsewhere"), 0, "RUN step 1", None
    )
    assert contents.layers[1].unpacked_bytes == 0
    assert contents.notes == (f"layer 1 ({make.sha(b'elsewhere')}) is foreign and not in the archive",)
    del absent["urls"]
    own = make.manifest_of(image.config(), make.descriptor(present), absent | {"mediaType": OCI_LAYER})
    with pytest.raises(MissingContent, match=f"layer 1, {make.sha(b'elsewhere')}, is missing"):
        read(members | make.stored(own) | {"index.json": make.pointing_to(own)})


def saved_row(image: Image, *layers: str, config: str = "") -> bytes:
    row = {"Config": config or make.blob_path(image.config()), "Layers": list(layers)}
    return make.dump([{"Config": "other.json", "Layers": ["blobs/sha256/0"]}, row])


def test_the_list_beside_an_index_must_name_the_same_layers_in_the_same_order() -> None:
    image = Image(LAYERS)
    members = make.oci_layout(image)
    one, two = (make.blob_path(blob) for blob in image.blobs())
    assert len(read(members | {"manifest.json": saved_row(image, one, two)}).layers) == 2
    old = ("1/layer.tar", "2/layer.tar")  # paths without a digest say nothing
    assert len(read(members | {"manifest.json": saved_row(image, *old)}).layers) == 2
    assert len(read(members | {"manifest.json": saved_row(image, one, old[1])}).layers) == 2
    for row in (saved_row(image, two, one), saved_row(image, one), saved_row(image, one, two, config="none")):
        with pytest.raises(Mismatch, match=r"^manifest\.json: "):
            read(members | {"manifest.json": row})


# Lists without an index.


def test_paths_in_a_list_are_those_of_the_archive_however_they_are_written() -> None:
    image = Image(LAYERS[:1], make.plain)
    digits = make.sha(image.config()).removeprefix("sha256:")
    members = {f"{digits}.json": image.config(), "~a/layer.tar": LAYERS[0]}
    for config, layer in ((f"./{digits}.json", "/~a//layer.tar"), (f"a/../{digits}.json", "../~a/layer.tar")):
        row = {"Config": config, "Layers": [layer], "RepoTags": ["x:1"]}
        contents = read(members | {"manifest.json": make.dump([row])})
        assert (contents.ref, len(contents.layers), contents.notes) == ("x:1", 1, ())


def test_what_a_list_names_and_the_archive_lacks_is_reported_by_its_path() -> None:
    image = Image(LAYERS, make.plain)
    members = make.docker_legacy(image)
    path = next(path for path in members if path.endswith("layer.tar"))
    damaged = members | {path: make.gzipped(LAYERS[0])[:-20]}
    with pytest.raises(Truncated, match=path):
        read(damaged)
    del members[path]
    with pytest.raises(MissingContent) as told:
        read(members)
    assert told.value.place == path


def test_an_image_of_a_list_is_chosen_by_its_configs_digest() -> None:
    one, two = Image(LAYERS, make.plain), Image(LAYERS[:1], make.plain)
    rows = [make.docker_legacy(image)["manifest.json"][1:-1] for image in (one, two)]
    members = make.docker_legacy(one) | make.docker_legacy(two)
    members["manifest.json"] = b"[" + b",".join(rows) + b"]"
    for image in (one, two):
        contents = read(members, ref=make.sha(image.config()))
        assert (len(contents.layers), contents.ref) == (len(image.layers), "weir/tiny:1")


@pytest.mark.parametrize("below", ["", "blobs/sha256/"])
def test_a_lone_manifest_finds_its_blobs_by_their_digests(below: str, tmp_path: Path) -> None:
    image = Image(LAYERS)
    parts = (*image.blobs(), image.config())
    members = {below + make.sha(part).removeprefix("sha256:"): part for part in parts}
    members["manifest.json"] = image.manifest()
    contents = read_image(
        DirectoryArchive(make.layout_directory(members, tmp_path)), label="dir", platform=AMD64
    )
    layers = zip(contents.layers, LAYERS, image.blobs(), strict=True)
    assert all(row.diff_id == make.sha(tar) and row.digest == make.sha(blob) for row, tar, blob in layers)
    assert (contents.ref, contents.config_digest) == ("dir", make.sha(image.config()))


@pytest.mark.parametrize("text", [b"{", b"{}", b"[{}]", b'[{"Config": 1}]', b"[" * 100, b"hsqs"])
def test_a_list_that_cannot_be_read_is_reported_by_its_name(text: bytes) -> None:
    for members in ({}, make.oci_layout(Image(LAYERS))):
        with pytest.raises(MalformedDocument, match=r"^manifest\.json[:,]") as told:
            read(members | {"manifest.json": text})
        assert told.value.place.partition(",")[0] == "manifest.json"


@pytest.mark.parametrize("text", [b"{", b"{}", b"[" * 100, b"hsqs"])
def test_an_index_that_cannot_be_read_is_reported_by_its_name(text: bytes) -> None:
    with pytest.raises(MalformedDocument, match=r"^index\.json: "):
        read(make.docker_25(Image(LAYERS)) | {"index.json": text})


@pytest.mark.parametrize("prefix", ["", "sha256:"])
def test_a_config_that_is_not_what_its_name_says_is_noted(prefix: str) -> None:
    """Engines don't check it, but it may be damage."""
    image = Image(LAYERS, make.plain)
    members, name = make.docker_legacy(image), f"{prefix}{'0' * 64}"
    row = {"Config": name, "Layers": [path for path in members if path.endswith("layer.tar")]}
    changed = members | {name: image.config(), "manifest.json": make.dump([row])}
    (note,) = read(changed).notes
    assert note.startswith(f"{name}: ")
    assert make.sha(image.config()) in note
    right = make.sha(image.config()).removeprefix("sha256:")
    listed = make.dump([row | {"Config": f"d/{prefix}{right}"}])
    assert read(members | {f"d/{prefix}{right}": image.config(), "manifest.json": listed}).notes == ()


def test_an_index_in_the_place_of_a_lone_manifest_is_refused() -> None:
    with pytest.raises(MalformedDocument, match=r"^manifest\.json: "):
        read({"manifest.json": make.index_of(make.descriptor(b"x"))})


def test_an_encrypted_layer_is_named_by_its_position() -> None:
    image = Image(LAYERS)
    media = f"{OCI_LAYER}+gzip"
    blobs = [make.descriptor(image.blobs()[0], media), make.descriptor(b"\x8e\x11", f"{media}+encrypted")]
    with pytest.raises(MalformedStream, match=r"^manifest\.json: layer 1 is encrypted"):
        read(make.skopeo_directory(image) | {"manifest.json": make.manifest_of(image.config(), *blobs)})
