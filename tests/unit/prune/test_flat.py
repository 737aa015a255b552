"""An image remade from its files: its configuration is data that passes unchanged, whatever it holds."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from typing import Any

import pytest

from buildtool.core.errors import ConfigError, DataError
from buildtool.gpucode.target import parse_targets
from buildtool.image.documents import Platform
from buildtool.image.written import LayerFile, WrittenImage, archive_chunks, written_image
from buildtool.prune.flat_image import config_of, flat_image
from buildtool.prune.images import created_at, name_of_copy

LAYER_BYTES = b"layer" * 300
LAYER = LayerFile("sha256:" + "a" * 64, "sha256:" + "b" * 64, len(LAYER_BYTES))
HOSTILE = "a\nRUN x\r\n${FOO:-x} $BAR \\ \" ' \x1b[2J \u2028 é \ud800"
RUN: dict[str, Any] = {
    "Env": ["PATH=/bin", "EMPTY=", f"A\nB={HOSTILE}", "NOEQUALS"],
    "User": HOSTILE,
    "WorkingDir": HOSTILE,
    "ExposedPorts": {f"1/tcp\nCOPY --from=x / /{HOSTILE}": {}},
    "Volumes": {HOSTILE: {}},
    "StopSignal": HOSTILE,
    "Shell": ["/bin/sh", HOSTILE],
    "Healthcheck": {"Test": ["CMD-SHELL", HOSTILE], "Interval": 1, "Retries": 0, "StartInterval": 10**18},
    "Entrypoint": [],
    "Cmd": ["${FOO:-x}", HOSTILE, ""],
    "OnBuild": [HOSTILE],
    "ArgsEscaped": True,
    "Labels": {"${FOO:-x}": HOSTILE, HOSTILE: "", "io.weir.pruned": "no"},
    "not yet invented": [None, 1.5, {"x": -1}],
}
CONFIG: dict[str, Any] = {
    "architecture": "arm64",
    "os": "linux",
    "variant": "v8",
    "os.features": ["x"],
    "author": HOSTILE,
    "created": "2026-01-01T00:00:00.5Z",
    "config": RUN,
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "c" * 64] * 2},
    "history": [{"created_by": "one"}, {"created_by": "two"}],
    "unknown": {"kept": True},
}


def remade(config: object) -> dict[str, Any]:
    """The config as an engine finds it in the archive: by the digests of index and manifest."""
    image = flat_image(packed(config), LAYER, targets="gfx906,sm_90")
    with tarfile.open(fileobj=io.BytesIO(archive(image, LAYER_BYTES))) as tar:
        files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    assert files[f"blobs/sha256/{'b' * 64}"] == LAYER_BYTES
    [row] = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(files[f"blobs/sha256/{row['digest'][7:]}"])
    config_path = f"blobs/sha256/{manifest['config']['digest'][7:]}"
    assert image.ids == (row["digest"], manifest["config"]["digest"])
    for path in (f"blobs/sha256/{row['digest'][7:]}", config_path):
        assert hashlib.sha256(files[path]).hexdigest() == path[-64:]
    [saved] = json.loads(files["manifest.json"])
    assert saved == {
        "Config": config_path, "RepoTags": ["docker.io/library/x:t"], "Layers": [f"blobs/sha256/{'b' * 64}"],
    }  # fmt: skip
    assert row["annotations"]["io.containerd.image.name"] == "docker.io/library/x:t"
    assert [layer["digest"] for layer in manifest["layers"]] == [LAYER.digest]
    return dict(json.loads(files[config_path]))


def archive(image: WrittenImage, layer: bytes, name: str = "docker.io/library/x:t") -> bytes:
    return b"".join(archive_chunks(image, name, lambda _layer: iter([layer])))


def packed(value: object) -> bytes:
    return json.dumps(value).encode()


def test_no_value_of_a_configuration_changes_and_none_is_interpreted() -> None:
    found = remade(CONFIG)
    assert found["rootfs"] == {"type": "layers", "diff_ids": [LAYER.diff_id]}
    assert [step["created_by"] for step in found["history"]] == ["weir prune --targets gfx906,sm_90"]
    labels = {**RUN["Labels"], "io.weir.pruned": "yes", "io.weir.gpu-targets": "gfx906,sm_90"}
    rest = {key: value for key, value in CONFIG.items() if key not in ("rootfs", "history", "config")}
    assert found == {
        **rest, "config": {**RUN, "Labels": labels}, "rootfs": found["rootfs"], "history": found["history"],
    }  # fmt: skip
    assert list(found["config"]) == list(RUN)


@pytest.mark.parametrize("run", [{}, None, {"Labels": None, "Cmd": None}])
def test_an_empty_configuration_gets_only_our_labels(run: dict[str, None] | None) -> None:
    labels = {"io.weir.gpu-targets": "gfx906,sm_90", "io.weir.pruned": "yes"}
    assert remade({"config": run})["config"] == {**(run or {}), "Labels": labels}


def test_bytes_that_are_no_utf8_are_read_as_the_engine_reads_them() -> None:
    text = b'{"config": {"User": "\xff"}}'
    image = flat_image(text, LAYER, targets="gfx906")
    config = json.loads(image.config)
    assert config["config"]["User"] == "\ufffd"


@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"[]", b'{"config": 1}', b'{"config": {"Labels": []}}', b'{"x": NaN}', b"[" * 100_000,
     b'{"x": ' + b"1" * 5000 + b"}"],
)  # fmt: skip
def test_a_configuration_that_is_none_is_an_error_without_a_traceback(text: bytes) -> None:
    with pytest.raises(DataError, match="config"):
        flat_image(text, LAYER, targets="gfx906")


def test_a_plain_layer_is_described_as_one() -> None:
    image = flat_image(b"{}", LayerFile(LAYER.diff_id, LAYER.diff_id, 5, ""), targets="g")
    [layer] = json.loads(image.manifest)["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar"


def saved(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return out.getvalue()


def digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def row(text: bytes, **more: object) -> dict[str, object]:
    return {"mediaType": "application/x", "digest": digest(text), "size": len(text), **more}


def test_the_config_is_found_through_an_index_of_several_platforms() -> None:
    configs = {arch: packed({"architecture": arch, "rootfs": {}}) for arch in ("amd64", "arm64")}
    manifests = {arch: packed({"config": row(text), "layers": []}) for arch, text in configs.items()}
    attestation = packed({"config": row(b"{}"), "layers": []})
    rows = [row(text, platform={"os": "linux", "architecture": arch}) for arch, text in manifests.items()]
    rows.append(row(attestation, annotations={"vnd.docker.reference.type": "attestation-manifest"}))
    index = packed({"schemaVersion": 2, "manifests": rows})
    texts = [index, *configs.values(), *manifests.values(), attestation]
    chunks = saved({f"blobs/sha256/{digest(text)[7:]}": text for text in texts})
    for arch, text in configs.items():
        for image_id in (digest(index), digest(manifests[arch]), digest(text)):
            assert config_of(iter([chunks]), image_id, platform=Platform("linux", arch)) == text
    with pytest.raises(DataError, match="no image for linux/riscv64"):
        config_of(iter([chunks]), digest(index), platform=Platform("linux", "riscv64"))


def test_a_config_under_another_digest_is_refused() -> None:
    text = packed({"rootfs": {}})
    chunks = saved({f"blobs/sha256/{digest(b'other')[7:]}": text})
    with pytest.raises(DataError, match="lacks"):
        config_of(iter([chunks]), digest(b"other"), platform=Platform("linux", "amd64"))
    old = saved({f"{digest(text)[7:]}.json": text})
    assert config_of(iter([old]), digest(text), platform=Platform("linux", "amd64")) == text


def test_when_an_image_was_made() -> None:
    assert created_at({"Created": "2026-01-01T00:00:00.123456789Z"}) == 1767225600
    assert created_at({"Created": None}) == 0
    assert created_at({"Created": "0001-01-01T00:00:00Z"}) == 0


IMAGE_ID = "sha256:" + "0123456789ab" + "0" * 52


@pytest.mark.parametrize(
    ("ref", "targets", "tag"),
    [
        ("weir/rocm:latest", "gfx906", "weir/rocm:gfx906"),
        ("weir/rocm", "gfx906,gfx1100", "weir/rocm:gfx1100-gfx906"),
        ("registry:5000/a/b", "gfx906", "registry:5000/a/b:gfx906"),
        (f"a/b@{IMAGE_ID}", "gfx90a:xnack+", "a/b:gfx90axnack-on"),
        (IMAGE_ID, "gfx906", "weir/rocm:gfx906"),
        ("0123456789ab", "gfx906", "weir/rocm:gfx906"),
    ],
)
def test_the_copys_own_name(ref: str, targets: str, tag: str) -> None:
    record = {"Id": IMAGE_ID, "RepoTags": ["weir/rocm:latest"]}
    assert str(name_of_copy(ref, record, parse_targets(targets))) == tag


def test_an_image_without_a_name_needs_one_for_its_copy() -> None:
    with pytest.raises(ConfigError, match="no name"):
        name_of_copy("0123456789ab", {"Id": IMAGE_ID, "RepoTags": []}, parse_targets("gfx906"))


def described(kind: str, text: bytes) -> dict[str, object]:
    """A descriptor as OCI's image format has it."""
    name = f"application/vnd.oci.image.{kind}.v1+json"
    return {"mediaType": name, "digest": f"sha256:{hashlib.sha256(text).hexdigest()}", "size": len(text)}


@pytest.mark.parametrize("made", [None, "2026-01-01T00:00:00Z"])
def test_every_document_is_what_both_stores_of_an_engine_read(made: str | None) -> None:
    image = flat_image(packed({"created": made}), LAYER, targets="gfx906")
    manifest_id, config_id = image.ids
    with tarfile.open(fileobj=io.BytesIO(archive(image, LAYER_BYTES, "host:5000/a/x:t"))) as tar:
        files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    assert files.pop(f"blobs/sha256/{LAYER.digest[7:]}") == LAYER_BYTES
    texts = {path: json.loads(text) for path, text in files.items()}
    manifest, config = image.manifest, image.config
    labels = {"io.weir.gpu-targets": "gfx906", "io.weir.pruned": "yes"}
    step = {"created_by": "weir prune --targets gfx906"} | ({"created": made} if made else {})
    assert texts == {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    **described("manifest", manifest),
                    "annotations": {
                        "io.containerd.image.name": "host:5000/a/x:t",
                        "org.opencontainers.image.ref.name": "t",
                    },
                }
            ],
        },
        "manifest.json": [
            {
                "Config": f"blobs/sha256/{config_id[7:]}",
                "RepoTags": ["host:5000/a/x:t"],
                "Layers": [f"blobs/sha256/{LAYER.digest[7:]}"],
            }
        ],
        f"blobs/sha256/{config_id[7:]}": {
            "created": made,
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [LAYER.diff_id]},
            "history": [step],
        },
        f"blobs/sha256/{manifest_id[7:]}": {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": described("config", config),
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar+zstd",
                    "digest": LAYER.digest,
                    "size": LAYER.n_bytes,
                }
            ],
        },
    }
    assert config.startswith(b'{"created":')  # no blanks: the same image has the same digest everywhere


@pytest.mark.parametrize("n_bytes", [0, 1, 511, 512, 513])
def test_an_archive_is_padded_to_blocks_and_ends_with_two_of_zeros(n_bytes: int) -> None:
    layer = replace(LAYER, n_bytes=n_bytes)
    image = flat_image(b"{}", layer, targets="gfx906")
    data = archive(image, b"l" * n_bytes)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    assert members[-1].name == f"blobs/sha256/{LAYER.digest[7:]}"
    assert {info.mode for info in members} == {0o644}
    assert len(data) == sum(512 + -(-info.size // 512) * 512 for info in members) + 1024


def test_layers_that_an_engine_has_are_not_sent_again_and_others_once() -> None:
    again = replace(LAYER, digest="sha256:" + "d" * 64)
    image = written_image({}, [LAYER, again, again], [])
    chunks = archive_chunks(image, "x:t", lambda _layer: iter([LAYER_BYTES]), without={LAYER.digest})
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        names = [name for name in tar.getnames() if name[13:14] in "bd"]
        [saved] = json.loads(tar.extractfile("manifest.json").read())  # type: ignore[union-attr]
    assert [name for name in names if name[13:] in ("b" * 64, "d" * 64)] == [f"blobs/sha256/{'d' * 64}"]
    assert len(saved["Layers"]) == 3, "an engine finds those that it has by their place"


def test_a_fraction_of_a_second_or_a_missing_time_is_no_traceback() -> None:
    assert created_at({}) == 0
    assert created_at({"Created": "1970-01-01T00:00:01+00:00"}) == 1


def test_keys_in_another_letter_case_do_not_bring_the_original_layers_back() -> None:
    """The engine would read `RootFS`, which comes last, as the new image's layers."""
    odd = {key: value for key, value in CONFIG.items() if key not in ("rootfs", "config", "history")}
    run = {"labels": {"A": "1"}, "User": "u"}
    odd |= {"Config": run, "RootFS": CONFIG["rootfs"], "History": CONFIG["history"]}
    made = remade(odd)
    assert {key for key in made if key.lower() in ("config", "rootfs", "history")} == {
        "config", "rootfs", "history",
    }  # fmt: skip
    assert made["rootfs"]["diff_ids"] == [LAYER.diff_id]
    assert made["config"]["User"] == "u"
    assert made["config"]["Labels"]["A"] == "1"
    assert "labels" not in made["config"]
