"""Images as they are read, whole: every field and note; what manifests, lists and configs must agree on."""

from collections.abc import Callable
from dataclasses import replace

import image_maker as make
import pytest
from image_maker import Image, Members, file, folder, tar

from buildtool.image import reader as reading
from buildtool.image.archive import StreamArchive
from buildtool.image.documents import Platform, parse_config
from buildtool.image.errors import (
    LIMITS,
    LimitExceeded,
    Limits,
    MalformedDocument,
    MissingContent,
    NoSuchImage,
)
from buildtool.image.layer import LayerIndex
from buildtool.image.reader import Attestations, ImageContents, Layer, host_platform, read_image

AMD64 = Platform("linux", "amd64")
LAYERS = [tar(folder("etc"), file("etc/one", b"1" * 900)), tar(file("two", b"2" * 70))]
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"


def read(members: Members, limits: Limits = LIMITS, **options: object) -> ImageContents:
    archive = StreamArchive(make.chunks(make.archive(members)), label="test")
    return read_image(archive, label="test", limits=limits, **{"platform": AMD64, **options})  # type: ignore[arg-type]


def without_indexes(contents: ImageContents) -> ImageContents:
    """The same with empty indexes in the place of those of its layers."""
    layers = (replace(layer, index=layer.index and LayerIndex()) for layer in contents.layers)
    return replace(contents, layers=tuple(layers))


def expected_layers(image: Image, *, stored: bool = True, digests: bool = True) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            make.sha(blob) if digests else None,
            make.sha(layer),
            len(blob) if stored else None,
            len(layer),
            f"RUN step {at}",
            LayerIndex(),
        )
        for at, (layer, blob) in enumerate(zip(image.layers, image.blobs(), strict=True))
    )


# The whole.


@pytest.mark.parametrize("pack", [make.plain, make.gzipped, make.zstandard])
def test_an_image_of_a_layout_is_read_with_all_that_its_manifest_says(pack: make.Packer) -> None:
    image = Image(LAYERS, pack)
    members = make.containerd_nested(image)
    contents = read(members)
    attestation = contents.attestations
    assert without_indexes(contents) == ImageContents(
        ref="docker.io/weir/tiny:1",
        digest=contents.digest,
        manifest_digest=make.sha(image.manifest()),
        config_digest=make.sha(image.config()),
        config=parse_config(image.config(), place="c"),
        layers=expected_layers(image, stored=pack is not make.plain),
        attestations=attestation,
        notes=(),
    )
    assert [layer.unpacked_bytes for layer in contents.layers] == [900, 70]


def test_attestations_count_with_their_manifest_config_and_statements() -> None:
    image = Image(LAYERS)
    statement, other, absent, config = b'{"_type": "x"}', b"no JSON", b'{"not": "here"}', b"{}"
    layers = (make.descriptor(content) for content in (statement, other, absent))
    manifest = make.manifest_of(config, *layers)
    members = make.oci_layout(image) | make.stored(statement, other, config, manifest)
    marked = make.descriptor(manifest, annotations={"vnd.docker.reference.type": "attestation-manifest"})
    members["index.json"] = make.index_of(make.named(image), marked)
    n_bytes = len(manifest) + len(config) + len(statement) + len(other) + len(absent)
    assert read(members).attestations == Attestations(1, n_bytes, (statement,))
    assert read(make.oci_layout(image)).attestations == Attestations(0, 0, ())


def test_an_attestation_that_is_not_in_the_archive_is_no_absent_platform() -> None:
    image = Image(LAYERS)
    unknown = make.descriptor(b"elsewhere", platform={"os": "unknown", "architecture": "unknown"})
    bare = make.descriptor(b"somewhere")
    members = make.oci_layout(image) | {"index.json": make.index_of(unknown, bare, make.named(image))}
    assert read(members).notes == ()


@pytest.mark.parametrize("write", [make.docker_legacy, make.kaniko, make.skopeo_archive])
def test_an_image_without_a_manifest_is_read_with_all_that_its_list_says(
    write: Callable[[Image], Members],
) -> None:
    image = Image(LAYERS, make.gzipped if write is make.kaniko else make.plain)
    contents = read(write(image))
    assert without_indexes(contents) == ImageContents(
        ref="weir/tiny:1",
        digest=None,
        manifest_digest=None,
        config_digest=make.sha(image.config()),
        config=parse_config(image.config(), place="c"),
        layers=expected_layers(image, stored=write is make.kaniko),
        attestations=Attestations(0, 0, ()),
        notes=(),
    )


@pytest.mark.parametrize("digest_named", [True, False])
def test_an_image_without_any_list_is_read_by_the_digests_in_its_config(digest_named: bool) -> None:
    image = Image(LAYERS, make.plain)
    digits = make.sha(image.config()).removeprefix("sha256:")
    name = digits if digest_named else "f" * 64
    members = {
        name: image.config(),
        "b.tar": LAYERS[1],
        "a.tar": LAYERS[0],
        "odd.json": b"{}",
        "no.json": b"[",
    }
    contents = read(members)
    assert without_indexes(replace(contents, notes=())) == ImageContents(
        ref="test",
        digest=None,
        manifest_digest=None,
        config_digest=make.sha(image.config()),
        config=parse_config(image.config(), place="c"),
        layers=expected_layers(image, stored=False),
        attestations=Attestations(0, 0, ()),
        notes=(),
    )
    assert len(contents.notes) == (1 if digest_named else 2)
    if not digest_named:
        assert contents.notes[1].startswith(f"{'f' * 64}: ")
        assert make.sha(image.config()) in contents.notes[1]


def test_a_config_under_several_names_is_called_by_the_last_whatever_their_order() -> None:
    image = Image(LAYERS[:1], make.plain)
    names = [f"{n:064x}" for n in range(8)]
    members = {"l.tar": LAYERS[0]} | {name: image.config() for name in reversed(names)}
    assert read(members).notes[1].startswith(f"{names[-1]}: ")


def test_configs_of_nothing_are_no_images() -> None:
    """A config without layers, or of an unknown system, is what artifacts have."""
    image = Image(LAYERS[:1], make.plain)
    unknown = image.config().replace(b'"linux"', b'"unknown"')
    members = {"a.json": image.config(), "l.tar": LAYERS[0], "b.json": unknown, "c.json": Image([]).config()}
    assert read(members).config_digest == make.sha(image.config())
    del members["a.json"]
    with pytest.raises(MissingContent, match="no image config") as told:
        read(members)
    assert (told.value.place, "docker save" in told.value.hint) == ("test", True)


def test_a_layer_without_a_step_in_the_history_has_no_command() -> None:
    image = Image(LAYERS, history=[{"created_by": "only one"}])
    for write in (make.oci_layout, make.docker_legacy):
        assert [layer.command for layer in read(write(image)).layers] == [None, None]


def test_notes_of_the_config_come_after_those_of_the_archive() -> None:
    image = Image(LAYERS[:1])
    config = image.config().replace(b'"history": [', b'"history": [null, ', 1)
    manifest = make.manifest_of(config, make.descriptor(image.blobs()[0], f"{OCI_LAYER}+zstd"))
    members = make.stored(config, manifest, *image.blobs()) | {"index.json": make.pointing_to(manifest)}
    first, second = read(members).notes
    assert first == "layer 0 is gzip although its media type says zstd"
    assert "a row of its history is null" in second
    del members["index.json"]
    digits = make.sha(config).removeprefix("sha256:")
    row = {"Config": f"blobs/sha256/{digits}", "Layers": [make.blob_path(image.blobs()[0])]}
    assert read(members | {"manifest.json": make.dump([row])}).notes == (
        second.replace(f"config {make.sha(config)}", f"blobs/sha256/{digits}"),
    )


# Platforms.


@pytest.mark.parametrize(
    ("kernel", "architecture"),
    [
        ("x86_64", "amd64"),
        ("aarch64", "arm64"),
        ("armv7l", "arm"),
        ("i686", "386"),
        ("riscv64", "riscv64"),
        ("s390x", "s390x"),
    ],
)
def test_this_host_is_called_as_go_calls_it(
    kernel: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "machine", lambda: kernel)
    assert host_platform() == Platform("linux", architecture)


def variants(*names: str) -> Members:
    images = [Image([tar(file(name))], architecture="arm") for name in names]
    configs = [
        image.config().replace(b'"os"', b'"variant": "%s", "os"' % name.encode())
        for image, name in zip(images, names, strict=True)
    ]
    manifests = [
        make.manifest_of(config, make.descriptor(image.blobs()[0]))
        for image, config in zip(images, configs, strict=True)
    ]
    inner = make.pointing_to(*manifests)
    blobs = [image.blobs()[0] for image in images]
    return make.stored(*blobs, *configs, *manifests, inner) | {"index.json": make.pointing_to(inner)}


@pytest.mark.parametrize(("variant", "chosen"), [("v7", b"v7"), ("v6", b"v6"), ("", b"v6"), ("v5", b"v6")])
def test_the_wanted_variant_is_read_or_else_the_first_one(variant: str, chosen: bytes) -> None:
    contents = read(variants("v6", "v7"), platform=Platform("linux", "arm", variant))
    index = contents.layers[0].index
    assert index is not None
    assert index.names == [chosen]
    assert contents.notes == (f"of 2 platforms, linux/arm/{chosen.decode()} was read",)


def test_another_operating_system_is_another_platform() -> None:
    with pytest.raises(NoSuchImage, match=r"test has no image for windows/amd64\n.*: linux/amd64"):
        read(make.oci_layout(Image(LAYERS)), platform=Platform("windows", "amd64"))


def test_none_of_several_platforms_is_read_on_a_host_that_fits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "machine", lambda: "s390x")
    with pytest.raises(NoSuchImage, match=r"no image for linux/s390x\n.*: linux/arm/v6, linux/arm/v7"):
        read(variants("v6", "v7"), platform=None)


def test_the_only_image_is_read_on_another_host_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "machine", lambda: "aarch64")
    contents = read(make.oci_layout(Image(LAYERS)), platform=None)
    assert len(contents.layers) == 2
    assert len(contents.notes) == 1
    assert all(word in contents.notes[0] for word in ("linux/amd64", "linux/arm64"))
    monkeypatch.setattr(reading, "machine", lambda: "x86_64")
    assert read(make.oci_layout(Image(LAYERS)), platform=None).notes == ()


# Indexes.


def nested(levels: int) -> Members:
    """A layout whose manifest stands below so many indexes, index.json among them."""
    image = Image(LAYERS)
    members, inner = make.oci_layout(image), image.manifest()
    for _ in range(levels - 1):
        inner = make.pointing_to(inner)
        members |= make.stored(inner)
    return members | {"index.json": make.pointing_to(inner)}


def test_indexes_are_followed_as_deep_as_allowed_and_no_deeper() -> None:
    assert len(read(nested(LIMITS.index_depth)).layers) == 2
    with pytest.raises(LimitExceeded, match="nested without end"):
        read(nested(LIMITS.index_depth + 1))


def test_as_many_manifests_as_allowed_are_looked_at_in_all_indexes_together() -> None:
    image = Image(LAYERS)
    inner = make.index_of(*(make.descriptor(b"%d" % n) for n in range(3)))
    members = make.oci_layout(image) | make.stored(inner)
    members["index.json"] = make.index_of(make.named(image), make.descriptor(inner))
    assert len(read(members, replace(LIMITS, manifests=5)).layers) == 2
    with pytest.raises(LimitExceeded):
        read(members, replace(LIMITS, manifests=4))


def test_a_manifest_with_two_names_answers_to_both() -> None:
    image = Image(LAYERS)
    names = [{"io.containerd.image.name": f"docker.io/library/{name}:1"} for name in ("one", "two")]
    rows = [make.descriptor(image.manifest(), annotations=name) for name in names]
    members = make.oci_layout(image) | {"index.json": make.index_of(*rows, make.descriptor(image.manifest()))}
    assert [read(members, ref=name).ref for name in ("one:1", "two:1")] == ["one:1", "two:1"]


def test_a_manifest_that_is_listed_twice_does_not_hide_those_after_it() -> None:
    amd, arm = Image(LAYERS), Image(LAYERS[:1], architecture="arm64")
    inner = make.pointing_to(amd.manifest(), amd.manifest(), arm.manifest())
    members = make.oci_layout(amd) | make.oci_layout(arm) | make.stored(inner)
    members["index.json"] = make.pointing_to(inner)
    assert read(members).notes == ("of 2 platforms, linux/amd64 was read",)


def test_every_digest_on_the_way_to_an_image_chooses_it() -> None:
    image, other = Image(LAYERS), Image(LAYERS[:1])
    inner = make.pointing_to(image.manifest())
    members = make.oci_layout(image) | make.oci_layout(other) | make.stored(inner)
    members["index.json"] = make.pointing_to(inner, other.manifest())
    for document in (inner, image.manifest(), image.config()):
        contents = read(members, ref=make.sha(document))
        assert (contents.digest, len(contents.layers)) == (make.sha(inner), 2)


def test_what_leads_to_no_image_is_reported_with_the_reasons() -> None:
    image = Image(LAYERS)
    members = make.oci_layout(image)
    del members[make.blob_path(image.config())]
    with pytest.raises(MissingContent) as told:
        read(members)
    assert f"the config of manifest {make.sha(image.manifest())} is not in the archive" in told.value.message
    assert (told.value.place, "docker save" in told.value.hint) == ("test", True)
    other = Image(LAYERS[:1])
    members |= make.oci_layout(other) | {"index.json": make.pointing_to(image.manifest(), other.manifest())}
    assert read(members).notes == (
        f"the config of manifest {make.sha(image.manifest())} is not in the archive",
    )


def test_a_manifest_in_the_place_of_the_index_is_refused() -> None:
    image = Image(LAYERS)
    with pytest.raises(MalformedDocument, match=r"^index\.json: "):
        read(make.oci_layout(image) | {"index.json": image.manifest()})
