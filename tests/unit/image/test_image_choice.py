"""Which image of an archive is read, and configs that only a strict reader would refuse."""

import json
from dataclasses import replace
from pathlib import Path

import image_maker as make
import pytest
from image_maker import Image, Members, file, tar
from odd_configs import ODD, odd_archive

from buildtool.cli.program import main
from buildtool.core.errors import Exit
from buildtool.core.json_text import load_as_engines_do
from buildtool.image.archive import Blob, StreamArchive, open_archive
from buildtool.image.documents import ImageConfig, parse_config, parse_index_or_manifest
from buildtool.image.errors import LimitExceeded, MalformedDocument, MalformedStream, Mismatch, NoSuchImage
from buildtool.image.layer import LayerIndex
from buildtool.image.reader import (
    ImageContents,
    ImageNames,
    ImageRequest,
    Layer,
    choose_images,
    display_name,
    host_platform,
    json_document,
    read_image,
    refuse_encrypted,
    same_name,
    with_index,
)
from buildtool.image.streams import Form
from probes.core.codec import load

HERE = host_platform().architecture
LAYERS = [tar(file("one", b"1" * 900)), tar(file("two", b"2" * 70))]


def an_image(ref: str = "weir/tiny:1", layers: int = 2) -> Image:
    return Image(LAYERS[:layers], ref=ref, architecture=HERE)


def read(members: Members, **options: object) -> ImageContents:
    archive = StreamArchive(make.chunks(make.archive(members)), label="test")
    return read_image(archive, label="test", **options)  # type: ignore[arg-type]


DIALECTS = sorted(make.DIALECTS)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_archive_of_one_image_is_not_passed_off_as_another(dialect: str) -> None:
    write, pack = make.DIALECTS[dialect]
    members = write(Image(LAYERS, pack, architecture=HERE))
    with pytest.raises(
        NoSuchImage, match="holds no image myapp:2\\.0\n  choose one with --image: "
    ) as refused:
        read(members, ref="myapp:2.0")
    offered = refused.value.hint.partition("--image: ")[2]
    assert file_names(read(members, ref=offered)) == ["one", "two"], "what the hint offers is accepted"
    assert read(members, ref="myapp:2.0", from_engine=True).ref == "myapp:2.0", (
        "an engine's answer is what was asked"
    )


def file_names(contents: ImageContents) -> list[str]:
    return [layer.index.path(0).decode() for layer in contents.layers if layer.index]


def two(write: make.Packer, ref: str = "", more: str = "") -> Members:
    one, other = an_image(ref), an_image(more, layers=1)
    members = write(one) | write(other)  # type: ignore[arg-type, operator]
    index = make.index_of(make.named(one), make.named(other))
    rows = json.loads(make.docker_legacy(one)["manifest.json"]) + json.loads(
        make.docker_legacy(other)["manifest.json"]
    )
    if write is make.oci_layout:
        return members | {"index.json": index}
    return members | {"manifest.json": make.dump(rows)}


@pytest.mark.parametrize("refs", [("weir/one:1", "weir/two:1"), ("weir/same:1", "weir/same:1")])
@pytest.mark.parametrize("write", [make.oci_layout, make.docker_legacy])
def test_the_hint_for_several_images_offers_only_what_the_option_accepts(
    write, refs: tuple[str, str]
) -> None:
    members = two(write, *refs)
    with pytest.raises(NoSuchImage, match="holds several images") as refused:
        read(members)
    offered = refused.value.hint.partition("--image: ")[2].split(", ")
    assert len(offered) == 2
    assert sorted(len(read(members, ref=word).layers) for word in offered) == [1, 2]


def test_a_digest_beside_a_name_chooses_too_and_the_report_keeps_the_name() -> None:
    image = an_image()
    contents = read(make.oci_layout(image), ref=f"weir/tiny@{make.sha(image.manifest())}")
    assert contents.ref == "docker.io/weir/tiny:1"


def test_the_image_option_is_refused_beside_an_image_of_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["audit", "weir/tiny", "--image", "other"]) == Exit.USAGE
    assert "leave --image out" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_hint_stays_short_for_an_archive_of_many_images() -> None:
    rows = [{"Config": f"{n}.json", "RepoTags": [f"a/b:{n}"], "Layers": []} for n in range(5_000)]
    with pytest.raises(NoSuchImage) as refused:
        read({"manifest.json": make.dump(rows)})
    assert len(refused.value.hint) < 1000


NO_IMAGE = {
    "an empty index": make.oci_layout(an_image()) | {"index.json": make.index_of()},
    "no config": {
        k: v for k, v in make.oci_layout(an_image()).items() if k != make.blob_path(an_image().config())
    },
    "no manifest": {
        k: v for k, v in make.oci_layout(an_image()).items() if k != make.blob_path(an_image().manifest())
    },
    "no rows": {"manifest.json": b"[]"},
    "a tar of something else": {"README": b"hello", "data/x.json": b"{}"},
}


@pytest.mark.parametrize("case", NO_IMAGE)
def test_an_archive_without_an_image_exits_5_and_not_as_a_usage_error(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(make.archive(NO_IMAGE[case]))
    assert main(["audit", str(path)]) == Exit.DATA, capsys.readouterr().err


def test_an_archive_of_an_image_without_a_tag_is_read() -> None:
    members = make.docker_25(an_image())
    row = json.loads(members["manifest.json"])[0]
    untagged = members | {"manifest.json": make.dump([row | {"RepoTags": None}])}
    assert read(untagged).ref == "docker.io/weir/tiny:1"
    old = make.docker_legacy(an_image())
    row = json.loads(old["manifest.json"])[0]
    del old["repositories"]
    assert read(old | {"manifest.json": make.dump([row | {"RepoTags": None}])}).ref == "test"
    for empty in (b'{"schemaVersion": 2, "manifests": null}', b'{"schemaVersion": 2, "manifests": []}'):
        contents = read(untagged | {"index.json": empty})
        assert file_names(contents) == ["one", "two"]
        assert "manifest.json was read" in contents.notes[0]


@pytest.mark.parametrize("case", ODD)
def test_a_config_that_engines_load_is_read_and_what_is_odd_is_noted(case: str, tmp_path: Path) -> None:
    change, note = ODD[case]
    members = odd_archive(change)
    path = tmp_path / "image.tar"
    path.write_bytes(make.archive(members))
    for contents in (read(members), read_image(open_archive(path), label="test")):
        assert file_names(contents) == ["etc/one"]
        assert note in "; ".join(contents.notes)
        assert bool(note) == any("the engines read it all the same" in row for row in contents.notes)


@pytest.mark.parametrize("name", ["config.json", "0" * 64 + ".json"])
def test_a_config_under_another_name_than_its_digest_is_read(name: str) -> None:
    contents = read(odd_archive(lambda config: config, config_name=name))
    assert file_names(contents) == ["etc/one"]
    assert any("renamed or changed" in note for note in contents.notes) == name.startswith("0000")


def test_the_lists_that_say_which_content_is_meant_stay_strict() -> None:
    for text in (
        b'{"manifests": [], "manifests": []}',
        b"{" + b'"a":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a": "\xe9"}',
        b'{"manifests": [], "Manifests": []}',
        b'{"Manifests": []}',
        b'{"layers": [], "config": {}, "LAYERS": []}',
    ):
        with pytest.raises(MalformedDocument):
            parse_index_or_manifest(text, place="index.json")


def test_a_config_beyond_what_engines_read_is_refused() -> None:
    for text in (b"[" * 20_000, b'{"rootfs": {"diff_ids": [NaN]}}', b"\xef\xbb\xbf{}", b'{"a":' * 100):
        with pytest.raises(MalformedDocument):
            parse_config(text, place="config")
    with pytest.raises(LimitExceeded):
        parse_config(b" " * (5 << 20) + b"{}", place="config")


def test_what_is_too_deep_is_left_out_whatever_strings_hold() -> None:
    deep = b'{"a": "]}\\"[", "b": ' + b'{"[": ' * 80 + b'"}\\\\"' + b"}" * 80 + b', "c": [1, -1e999]}'
    loaded = load_as_engines_do(deep)
    assert isinstance(loaded.value, dict)
    assert (loaded.value["a"], loaded.value["c"]) == (']}"[', [1, float("-inf")])
    with pytest.raises(ValueError, match="nested more than 64"):
        load(deep)


# Names, without an archive.


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", "docker.io/library/a:latest", True),
        ("docker.io/b/a:1", "b/a:1", True),
        ("library/a:1", "a:1", True),
        ("a", "a:1", False),
        ("localhost:5000/a", "localhost:5000/a:latest", True),
        ("localhost:5000/a", "localhost:5000/a:1", False),
        ("a@sha256:0", "a@sha256:0", True),
        ("a@sha256:0", "a@sha256:0:latest", False),
        ("ghcr.io/a", "a", False),
    ],
)
def test_what_a_reference_may_leave_out_is_known(one: str, other: str, same: bool) -> None:
    assert same_name(one, other) is same_name(other, one) is same


CALLED = ImageNames(("b/a:1", "b/a:2"), ("sha256:first", "sha256:second"))


@pytest.mark.parametrize(
    ("ref", "answer"),
    [
        ("b/a:1", True),
        ("docker.io/b/a:2", True),
        ("b/a", False),
        ("sha256:second", True),
        ("anything@sha256:first", True),
        ("b/a:1@sha256:third", False),
    ],
)
def test_an_image_answers_to_its_names_and_digests_alone(ref: str, answer: bool) -> None:
    assert CALLED.matches(ref) is answer


@pytest.mark.parametrize(
    ("wanted", "names", "shown"),
    [
        (ImageRequest("a.tar"), ("x:1", "y:1"), "x:1"),
        (ImageRequest("a.tar"), (), "a.tar"),
        (ImageRequest("a.tar", "y:1"), ("x:1",), "y:1"),
        (ImageRequest("a.tar", "sha256:0"), ("x:1",), "x:1"),
        (ImageRequest("a.tar", "sha256:0"), (), "sha256:0"),
        (ImageRequest("a.tar", "sha256:0", from_engine=True), ("x:1",), "sha256:0"),
    ],
)
def test_a_report_calls_an_image_by_the_most_specific_name(
    wanted: ImageRequest, names: tuple[str, ...], shown: str
) -> None:
    assert display_name(wanted, ImageNames(names, ("sha256:0",))) == shown


def test_one_image_on_several_platforms_is_no_choice_between_images() -> None:
    amd, arm, other = (ImageNames(("x:1",), (top, leaf)) for top, leaf in ("tm", "tn", "uo"))
    assert choose_images(ImageRequest("a"), [amd, arm]) == (0, 1)
    assert choose_images(ImageRequest("a", "n"), [amd, arm, other]) == (1,)
    assert choose_images(ImageRequest("a", "t"), [other, amd, arm]) == (1, 2)
    assert choose_images(ImageRequest("a", "unheard-of", from_engine=True), [amd]) == (0,)
    with pytest.raises(NoSuchImage) as several:
        choose_images(ImageRequest("a.tar", "x:1"), [amd, arm, other])
    assert "--image: t, u" in several.value.hint
    with pytest.raises(NoSuchImage, match=r"a\.tar holds no image z:1"):
        choose_images(ImageRequest("a.tar", "z:1"), [amd])


def refusal_of_nothing() -> NoSuchImage:
    with pytest.raises(NoSuchImage) as refused:
        choose_images(ImageRequest("a.tar", "z"), [ImageNames((), ("",))])
    return refused.value


def test_a_hint_offers_a_name_that_one_image_has_alone_and_forty_words_at_most() -> None:
    images = [ImageNames((f"x:{n}", "same:1"), (f"sha256:{n}",)) for n in range(41)]
    nameless = ImageNames(("same:1",), ("sha256:nameless",))
    with pytest.raises(NoSuchImage) as refused:
        choose_images(ImageRequest("a.tar"), [nameless, *images])
    words = refused.value.hint.partition("--image: ")[2].split(", ")
    assert words == ["sha256:nameless", *(f"x:{n}" for n in range(39))]
    for digests, offered in ((("",), ""), (("", "d"), "d")):
        with pytest.raises(NoSuchImage) as refused:
            choose_images(ImageRequest("a.tar", "z"), [ImageNames((), (digest,)) for digest in digests])
        assert refused.value.hint.partition("--image: ")[2] == offered
    assert "--image" not in refusal_of_nothing().hint


# Blobs in the place of documents and layers.


def test_a_blob_that_is_no_document_is_reported_with_its_place() -> None:
    assert json_document(Blob(Form.JSON, document=b""), "p") == b""
    with pytest.raises(LimitExceeded, match=r"p: .*1,234,567 bytes"):
        json_document(Blob(Form.JSON, stored_bytes=1_234_567), "p")
    with pytest.raises(MalformedDocument, match=r"p: .*squashfs"):
        json_document(Blob(Form.SQUASHFS), "p")


@pytest.mark.parametrize(
    ("form", "stored"),
    [(Form.TAR, None), (Form.EMPTY, None), (Form.GZIP, 7), (Form.ZSTD, 7)],
)
def test_a_layer_takes_its_sizes_from_its_blob(form: Form, stored: int | None) -> None:
    layer = Layer("sha256:l", "sha256:d", 3, 0, "RUN x", None)
    index = LayerIndex()
    blob = Blob(form, "sha256:l", 7, None, index, "sha256:d", 11)
    assert with_index(layer, blob, "p") == Layer("sha256:l", "sha256:d", stored, 11, "RUN x", index)
    with pytest.raises(Mismatch, match=r"p: .*sha256:e, .*sha256:d"):
        with_index(layer, replace(blob, diff_id="sha256:e"), "p")
    with pytest.raises(MalformedStream, match=f"p: .*{form.value}"):
        with_index(layer, replace(blob, index=None), "p")


def test_only_a_media_type_that_ends_in_encrypted_is_refused() -> None:
    refuse_encrypted("application/x+encrypted+gzip", 0, "p")
    refuse_encrypted("", 0, "p")
    with pytest.raises(MalformedStream, match="p: layer 3 "):
        refuse_encrypted("application/x+gzip+encrypted", 3, "p")


def config_of_text(run: str) -> ImageConfig:
    text = f'{{"os": "linux", "architecture": "amd64", "rootfs": {{"diff_ids": []}}, {run}}}'
    return parse_config(text.encode(), place="c")


@pytest.mark.parametrize(
    ("run", "env", "user"),
    [
        ('"Config": {"env": ["A=1"], "USER": "u"}', ("A=1",), "u"),
        ('"config": {"Env": ["A=1"], "env": ["A=2"]}', ("A=2",), ""),
        ('"config": {"env": ["A=2"], "Env": ["A=1"]}', ("A=1",), ""),
        ('"config": {"Env": ["A=1"], "env": ["A=2"], "Env": ["A=3"]}', ("A=3",), ""),
        ('"config": {"Env": ["A=1"]}, "CONFIG": {"User": "u"}', ("A=1",), "u"),
        ('"config": {"Env": ["A=1"]}, "config": {"User": "u"}', ("A=1",), "u"),
        ('"con\ufb01g": {"User": "u"}, "config": {"U\u017fer": "v"}', (), "v"),
    ],
)
def test_a_config_says_what_it_says_to_the_engine_whatever_the_case_of_its_keys(
    run: str, env: tuple[str, ...], user: str
) -> None:
    """Go's encoding/json: a field has any letter case, each occurrence counts on top of those before."""
    found = config_of_text(run)
    assert (found.env, found.user) == (env, user)
    assert found.notes


def test_labels_keep_the_case_of_their_keys() -> None:
    found = config_of_text('"config": {"Labels": {"a": "1", "A": "2"}}')
    assert found.labels == {"a": "1", "A": "2"}
    assert found.notes == ()
