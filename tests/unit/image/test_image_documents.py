"""The JSON documents of an image as whole values, and the limits and types that each key is held to."""

import json
from dataclasses import replace

import pytest

from buildtool.image.documents import (
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    SavedImage,
    Step,
    is_saved_list,
    parse_config,
    parse_index_or_manifest,
    parse_json,
    parse_saved,
)
from buildtool.image.errors import LIMITS, LimitExceeded, MalformedDocument

ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "1a3")
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
PLAIN = {"digest": ONE, "size": 7}
PLAIN_READ = Descriptor("", ONE, 7, None, (), (), is_attestation=False)
ATTESTATION = "application/vnd.docker.attestation.manifest.v1+json"


def parsed(**keys: object) -> Index | Manifest:
    return parse_index_or_manifest(json.dumps(keys).encode(), place="x")


def config(**keys: object) -> ImageConfig:
    return parse_config(json.dumps(keys).encode(), place="x")


def only(**keys: object) -> Descriptor:
    found = parsed(manifests=[{**PLAIN, **keys}])
    assert isinstance(found, Index)
    return found.manifests[0]


def test_a_descriptor_keeps_all_that_is_said_of_its_content() -> None:
    notes = {
        "org.opencontainers.image.ref.name": "short",
        "io.containerd.image.name": "docker.io/long:1",
        "other": "x",
        "n": 1,
    }
    platform = {"os": "linux", "architecture": "arm", "variant": "v7"}
    found = only(
        mediaType=MANIFEST_TYPE, annotations=notes, urls=["u://1", "u://2"], platform=platform, more=[1]
    )
    assert found == Descriptor(
        media_type=MANIFEST_TYPE,
        digest=ONE,
        stored_bytes=7,
        platform=Platform("linux", "arm", "v7"),
        names=("docker.io/long:1", "short"),
        urls=("u://1", "u://2"),
        is_attestation=False,
    )
    assert str(found.platform) == "linux/arm/v7"
    assert str(Platform("linux", "amd64")) == "linux/amd64"


def test_a_descriptor_needs_no_more_than_a_digest_and_a_size() -> None:
    assert only() == PLAIN_READ
    empty = only(annotations={"io.containerd.image.name": ""}, platform=None, urls=None, mediaType=None)
    assert empty == PLAIN_READ


def test_attestations_are_recognised_by_their_note_or_their_platform() -> None:
    assert only(annotations={"vnd.docker.reference.type": "attestation-manifest"}).is_attestation
    found = only(platform={"os": "unknown", "architecture": "unknown"})
    assert (found.is_attestation, found.platform) == (True, Platform("unknown", "unknown"))
    assert only(platform={"architecture": "amd64"}).platform == Platform("unknown", "amd64")
    assert only(platform={"os": "linux"}).platform == Platform("linux", "unknown")
    assert not only(platform={"os": "linux"}).is_attestation


@pytest.mark.parametrize("size", [-1, 1 << 63, 1.5, "7", True, None])
def test_a_size_that_no_content_has_is_refused(size: object) -> None:
    with pytest.raises(MalformedDocument, match=r"^x, `manifests\[0\]`: `size` is not a size"):
        only(size=size)


def test_sizes_reach_from_nothing_to_63_bits() -> None:
    assert only(size=0).stored_bytes == 0
    assert only(size=(1 << 63) - 1).stored_bytes == (1 << 63) - 1


@pytest.mark.parametrize("digest", ["", ONE[:-1], ONE + "0", ONE.upper(), ONE + "\n", "sha512:" + "1" * 64])
def test_what_is_no_sha256_digest_is_refused(digest: str) -> None:
    with pytest.raises(MalformedDocument, match="is not a sha256 digest"):
        only(digest=digest)


def test_a_long_text_in_a_digests_place_is_reported_by_its_beginning() -> None:
    with pytest.raises(MalformedDocument, match=r": 'a{80}' is not a sha256 digest"):
        only(digest="a" * 5000)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"mediaType": 1}, "`mediaType` is missing or not text"),
        ({"digest": None}, "`digest` is missing or not text"),
        ({"urls": "u"}, "`urls` is not a list"),
        ({"urls": {"u": 1}}, "`urls` is not a list"),
        ({"urls": [1]}, "`urls` is missing or not text"),
        ({"platform": "linux"}, "`platform`: a JSON object is missing"),
        ({"annotations": ["a"]}, "`annotations`: a JSON object is missing"),
    ],
)
def test_a_key_of_the_wrong_type_is_named_with_its_place(keys: dict[str, object], told: str) -> None:
    with pytest.raises(MalformedDocument, match=r"^x, `manifests\[0\]`") as error:
        only(**keys)
    assert told in str(error.value)


def test_a_manifest_has_a_config_and_layers_from_the_bottom_up() -> None:
    layers = [{"digest": TWO, "size": 2}, {"digest": THREE, "size": 3}]
    expected = Manifest(
        PLAIN_READ,
        (replace(PLAIN_READ, digest=TWO, stored_bytes=2), replace(PLAIN_READ, digest=THREE, stored_bytes=3)),
        is_attestation=False,
    )
    assert parsed(config=PLAIN, layers=layers) == expected
    assert parsed(config=PLAIN, layers=layers, manifests=None) == expected
    assert parsed(config=PLAIN) == replace(expected, layers=())
    artifact = parsed(config=PLAIN, layers=layers, artifactType=ATTESTATION)
    assert artifact == replace(expected, is_attestation=True)
    assert parsed(config=PLAIN, layers=layers, artifactType="x") == artifact, "an artifact is no image"


def test_an_index_may_be_empty_or_null_but_not_missing() -> None:
    assert parsed(manifests=[]) == parsed(manifests=None) == Index(())
    assert parsed(manifests=[PLAIN], config=PLAIN) == Index((PLAIN_READ,))
    with pytest.raises(MalformedDocument, match=r"^x: neither"):
        parsed(other=1)
    with pytest.raises(MalformedDocument, match=r"^x: an image index and an image manifest"):
        parsed(manifests=[], layers=[])
    with pytest.raises(MalformedDocument, match=r"`manifests\[1\]`: a JSON object is missing"):
        parsed(manifests=[PLAIN, None])
    with pytest.raises(MalformedDocument, match=r"^x: a JSON object is missing"):
        parse_index_or_manifest(b"[]", place="x")


def test_an_index_and_a_manifest_have_as_many_rows_as_allowed() -> None:
    limits = replace(LIMITS, manifests=2, layers=2)
    for rows in (2, 3):
        index = json.dumps({"manifests": [PLAIN] * rows}).encode()
        manifest = json.dumps({"config": PLAIN, "layers": [PLAIN] * rows}).encode()
        configured = json.dumps({"rootfs": {"diff_ids": [ONE] * rows}}).encode()
        if rows == 2:
            assert parse_index_or_manifest(index, place="x", limits=limits) == Index((PLAIN_READ,) * 2)
            assert parse_index_or_manifest(manifest, place="x", limits=limits)
            assert parse_config(configured, place="x", limits=limits).diff_ids == (ONE, ONE)
            continue
        for parse, content, told in (
            (parse_index_or_manifest, index, "an index of 3 manifests"),
            (parse_index_or_manifest, manifest, "a manifest of 3 layers"),
            (parse_config, configured, "a config of 3 layers"),
        ):
            with pytest.raises(LimitExceeded, match=f"^x: {told}"):
                parse(content, place="x", limits=limits)


def test_a_config_keeps_what_it_says_of_its_image() -> None:
    found = config(
        os="linux",
        architecture="arm64",
        variant="v8",
        rootfs={"diff_ids": [ONE, TWO]},
        history=[
            {"created_by": "ADD base"},
            {"created_by": "ENV a=b", "empty_layer": True},
            {"empty_layer": False},
            {"created_by": None, "empty_layer": True},
        ],
        config={"Labels": {"a": "b", "n": 1}, "Env": ["A=1"], "User": "app", "Cmd": ["x"]},
    )
    assert found == ImageConfig(
        platform=Platform("linux", "arm64", "v8"),
        diff_ids=(ONE, TWO),
        commands=("ADD base", ""),
        labels={"a": "b"},
        env=("A=1",),
        user="app",
        history=(
            Step("ADD base", has_layer=True),
            Step("ENV a=b", has_layer=False),
            Step("", has_layer=True),
            Step("", has_layer=False),
        ),
        notes=(),
    )


def test_a_config_may_leave_everything_out() -> None:
    empty = ImageConfig(Platform("unknown", "unknown"), (), (), {}, (), "", ())
    assert config() == empty
    assert config(config=None, rootfs=None, history=None) == empty


def test_commands_are_unknown_where_the_history_is_not_that_of_the_layers() -> None:
    rootfs = {"diff_ids": [ONE, TWO]}
    assert config(rootfs=rootfs, history=[{"created_by": "a"}]).commands is None
    assert config(rootfs=rootfs, history=[{"created_by": "a"}] * 3).commands is None


def test_a_null_row_of_a_history_is_a_layer_and_is_noted() -> None:
    found = config(rootfs={"diff_ids": [ONE]}, history=[None])
    assert (found.commands, found.history) == (("",), (Step("", has_layer=True),))
    assert [note.partition(":")[0] for note in found.notes] == ["x"]
    assert "null" in found.notes[0]


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"history": [1]}, r"x, `history\[0\]`"),
        ({"history": [{}, {"created_by": 1}]}, r"x, `history\[1\]`: `created_by`"),
        ({"rootfs": {"diff_ids": ["x"]}}, "x, `rootfs`: 'x'"),
        ({"config": {"Env": [1]}}, "x, `config`: `Env`"),
        ({"config": {"Labels": [1]}}, "x, `config`, `Labels`"),
        ({"config": {"User": 1}}, "x, `config`: `User`"),
        ({"os": 1}, "x: `os`"),
        ({"architecture": 1}, "x: `architecture`"),
        ({"variant": 1}, "x: `variant`"),
    ],
)
def test_a_wrong_value_in_a_config_is_named_with_its_place(keys: dict[str, object], place: str) -> None:
    with pytest.raises(MalformedDocument, match=f"^{place}"):
        config(**keys)


def test_dockers_list_of_images_is_distinguished_from_a_manifest_and_read() -> None:
    rows = [
        {"Config": "c.json", "Layers": ["1/layer.tar", "2/layer.tar"], "RepoTags": ["a:1", "b:2"]},
        {"Config": "d.json", "Layers": None},
    ]
    text = json.dumps(rows).encode()
    assert is_saved_list(text, place="x")
    assert not is_saved_list(b"{}", place="x")
    assert parse_saved(text, place="x") == (
        SavedImage("c.json", ("1/layer.tar", "2/layer.tar"), ("a:1", "b:2")),
        SavedImage("d.json", (), ()),
    )
    for broken in (b"{}", b'"text"', b"[1]", b'[{"Config": null}]', b'[{"Config": "c", "Layers": [1]}]'):
        with pytest.raises(MalformedDocument, match=r"^x"):
            parse_saved(broken, place="x")


def test_a_document_of_the_largest_size_is_read_and_a_larger_one_is_not() -> None:
    limits = replace(LIMITS, document_bytes=1200)
    text = b'"' + b"x" * 1198 + b'"'
    assert parse_json(text, place="p", limits=limits) == "x" * 1198
    with pytest.raises(LimitExceeded, match=r"^p: a JSON document of 1,201 bytes"):
        parse_json(text + b" ", place="p", limits=limits)


def test_why_a_document_cannot_be_read_is_reported_in_few_words() -> None:
    with pytest.raises(MalformedDocument, match=r"^p: not a usable JSON document") as error:
        parse_json(b'{"%s": 1, "%s": 2}' % (b"k" * 999, b"k" * 999), place="p")
    assert len(str(error.value)) < 250
