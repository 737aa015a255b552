"""A signed layout is verified, and after each tampering it isn't.

Each case changes a layout that verifies, as somebody could who can write it but hasn't the key; where what he
changes has a digest, he corrects the digests that lead to it.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import image_maker as make
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from sbom_image import image

from buildtool.audit import audit
from buildtool.cli import main
from buildtool.core.errors import ConfigError, Exit
from buildtool.engine.reference import parse_reference
from buildtool.image.written import OCI, digest_of, packed
from buildtool.sbom import attest, verify
from buildtool.sbom.keys import PrivateKey, PublicKey
from buildtool.sbom.verify import NotVerified, verify_archive

BOM, SPDX = "https://cyclonedx.org/bom", "https://spdx.dev/Document"
MANIFEST = f"{OCI}.manifest.v1+json"
Json = dict[str, Any]


def pem(seed: int) -> bytes:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(seed: int) -> bytes:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name, seed in (("ours", 1), ("theirs", 2)):
        (folder / f"{name}.pem").write_bytes(pem(seed))
        (folder / f"{name}.pub").write_bytes(public_pem(seed))
    return folder


@dataclass
class Layout:
    """A layout in memory: its blobs by digest, and the rows of its index."""

    blobs: dict[str, bytes]
    rows: list[Json]

    def put(self, content: bytes) -> str:
        self.blobs[digest_of(content)] = content
        return digest_of(content)

    def json(self, digest: str) -> Json:
        value: Json = json.loads(self.blobs[digest])
        return value

    def row(self, artifact: str, predicate: str = "") -> Json:
        """The row of an attached manifest, by what it is."""
        for row in self.rows:
            known = row.get("annotations", {}).get("dev.sigstore.bundle.predicateType", "")
            if row.get("artifactType", "") == artifact and predicate in ("", known):
                return row
        raise LookupError(artifact)

    def change(self, row: Json, edit: Callable[[Json], None]) -> None:
        """Change a manifest, and the row that leads to it."""
        manifest = self.json(row["digest"])
        edit(manifest)
        self.set(row, packed(manifest))

    def set(self, row: Json, text: bytes) -> None:
        row.update(digest=self.put(text), size=len(text))

    def change_layer(self, row: Json, edit: Callable[[bytes], bytes], at: int = 0) -> None:
        """Change what an attached manifest holds, and all digests that lead to it."""

        def layer(manifest: Json) -> None:
            own = manifest["layers"][at]
            self.set(own, edit(self.blobs[own["digest"]]))

        self.change(row, layer)

    def change_bundle(self, edit: Callable[[Json], None], predicate: str = BOM) -> None:
        def edited(text: bytes) -> bytes:
            bundle = json.loads(text)
            edit(bundle)
            return packed(bundle)

        self.change_layer(self.row(attest.BUNDLE, predicate), edited)

    def write(self, root: Path) -> Path:
        members = {f"blobs/sha256/{digest[7:]}": content for digest, content in self.blobs.items()}
        members["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
        members["index.json"] = packed({"schemaVersion": 2, "manifests": self.rows})
        return make.layout_directory(members, root)


def subject_of(which: make.Image) -> Json:
    return make.descriptor(which.manifest(), MANIFEST)


@cache
def attached(seed: int, ref: str = "demo", *, version: int = 1) -> Layout:
    """The image with its attestations, signed by a key; a `version` makes another image."""
    made = image() if version == 1 else make.Image([make.tar(make.file("other", b"o"))])
    subject = subject_of(made)
    statements = {
        kind: attest.statement(kind, {"of": kind}, name=f"weir/{ref}", digest=str(subject["digest"]))
        for kind in attest.PREDICATES
    }
    with_key = PrivateKey("", None)  # type: ignore[arg-type]
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    der = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with_key = PrivateKey(hashlib.sha256(der).hexdigest(), key)
    layout = Layout({}, [{**subject, "annotations": {"org.opencontainers.image.ref.name": ref}}])
    for content in (made.manifest(), made.config(), *made.blobs()):
        layout.put(content)
    for each in attest.referrers(subject, statements, with_key):
        for content in (*each.blobs, each.manifest):
            layout.put(content)
        layout.rows.append(dict(each.descriptor()))
    return layout


def fresh(seed: int = 1, **more: Any) -> Layout:
    layout = attached(seed, **more)
    return Layout(dict(layout.blobs), json.loads(json.dumps(layout.rows)))


# ---- tamperings, by what somebody would do

Tampering = Callable[[Layout], None]
TAMPERINGS: dict[str, Tampering] = {}


def tampering(function: Tampering) -> Tampering:
    TAMPERINGS[function.__name__] = function
    return function


def layer_digest(layout: Layout) -> str:
    digest: str = layout.json(layout.rows[0]["digest"])["layers"][0]["digest"]
    return digest


@tampering
def a_layer_has_a_changed_byte(layout: Layout) -> None:
    digest = layer_digest(layout)
    layout.blobs[digest] = layout.blobs[digest][:-9] + b"x" + layout.blobs[digest][-8:]


@tampering
def a_layer_is_cut_short(layout: Layout) -> None:
    digest = layer_digest(layout)
    layout.blobs[digest] = layout.blobs[digest][:-1]


@tampering
def a_layer_is_missing(layout: Layout) -> None:
    del layout.blobs[layer_digest(layout)]


@tampering
def a_layer_is_another_with_its_digest_corrected(layout: Layout) -> None:
    other = make.gzipped(make.tar(make.file("etc/shadow", b"root::")))
    layout.change(layout.rows[0], lambda manifest: layout.set(manifest["layers"][0], other))


@tampering
def the_config_is_another_with_its_digest_corrected(layout: Layout) -> None:
    def edit(manifest: Json) -> None:
        config = layout.json(manifest["config"]["digest"])
        config["config"]["User"] = "0"
        layout.set(manifest["config"], packed(config))

    layout.change(layout.rows[0], edit)


@tampering
def the_config_has_changed_bytes(layout: Layout) -> None:
    digest = layout.json(layout.rows[0]["digest"])["config"]["digest"]
    layout.blobs[digest] = layout.blobs[digest].replace(b"acme", b"evil")


@tampering
def the_manifest_is_that_of_another_image(layout: Layout) -> None:
    other = fresh(version=2)
    layout.blobs |= other.blobs
    layout.rows[0] |= {key: other.rows[0][key] for key in ("digest", "size")}


@tampering
def the_manifest_has_an_annotation_more(layout: Layout) -> None:
    layout.change(layout.rows[0], lambda manifest: manifest.update(annotations={"a": "b"}))


@tampering
def attestations_of_another_image_are_attached(layout: Layout) -> None:
    """A replay: another image's, signed by the right key, each said to be about this one."""
    other = fresh(version=2)
    layout.blobs |= other.blobs
    rows = other.rows[1:]
    for row in rows:

        def edit(manifest: Json) -> None:
            manifest["subject"] = {key: layout.rows[0][key] for key in ("mediaType", "digest", "size")}

        layout.change(row, edit)
        if "vnd.docker.reference.digest" in row.get("annotations", {}):
            row["annotations"]["vnd.docker.reference.digest"] = layout.rows[0]["digest"]
    layout.rows = [layout.rows[0], *rows]


@tampering
def one_attestation_of_another_image_is_attached_besides(layout: Layout) -> None:
    other = fresh(version=2)
    layout.blobs |= other.blobs
    row = other.row(attest.BUNDLE, BOM)
    subject = {key: layout.rows[0][key] for key in ("mediaType", "digest", "size")}
    layout.change(row, lambda manifest: manifest.update(subject=subject))
    layout.rows.append(row)


@tampering
def the_subject_of_a_bundle_is_another_image(layout: Layout) -> None:
    other = subject_of(make.Image([make.tar()]))
    layout.change(layout.row(attest.BUNDLE, SPDX), lambda manifest: manifest.update(subject=other))


@tampering
def the_subject_has_another_size(layout: Layout) -> None:
    layout.change(layout.row(attest.BUNDLE, SPDX), lambda manifest: manifest["subject"].update(size=1))


@tampering
def the_subject_has_another_media_type(layout: Layout) -> None:
    layout.change(
        layout.row(attest.BUNDLE, SPDX),
        lambda manifest: manifest["subject"].update(mediaType=f"{OCI}.index.v1+json"),
    )


@tampering
def a_signature_has_a_changed_bit(layout: Layout) -> None:
    def edit(bundle: Json) -> None:
        row = bundle["dsseEnvelope"]["signatures"][0]
        raw = bytearray(base64.b64decode(row["sig"]))
        raw[10] ^= 1
        row["sig"] = base64.b64encode(bytes(raw)).decode()

    layout.change_bundle(edit)


@tampering
def a_signature_is_empty(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig=""))


@tampering
def a_signature_is_no_base64(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="**" * 40))


@tampering
def signatures_are_taken_out_of_an_envelope(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle["dsseEnvelope"].update(signatures=[]))


@tampering
def a_second_signature_stands_beside_the_first(layout: Layout) -> None:
    layout.change_bundle(
        lambda bundle: bundle["dsseEnvelope"]["signatures"].append({"sig": "AAAA", "keyid": ""})
    )


@tampering
def the_signature_is_that_of_another_statement(layout: Layout) -> None:
    row = layout.row(attest.BUNDLE, SPDX)
    other = json.loads(layout.blobs[layout.json(row["digest"])["layers"][0]["digest"]])
    layout.change_bundle(
        lambda bundle: bundle["dsseEnvelope"].update(signatures=other["dsseEnvelope"]["signatures"])
    )


@tampering
def another_key_signed_everything(layout: Layout) -> None:
    other = fresh(2)
    layout.blobs, layout.rows = other.blobs, other.rows


@tampering
def another_key_signed_and_claims_the_id_of_ours(layout: Layout) -> None:
    own_id = json.loads(bundle_text(layout))["dsseEnvelope"]["signatures"][0]["keyid"]
    other = fresh(2)
    layout.blobs, layout.rows = other.blobs, other.rows
    for kind in attest.PREDICATES:
        layout.change_bundle(
            lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(keyid=own_id), kind
        )


def bundle_text(layout: Layout) -> bytes:
    return layout.blobs[layout.json(layout.row(attest.BUNDLE, BOM)["digest"])["layers"][0]["digest"]]


@tampering
def our_signature_claims_the_id_of_another_key(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(keyid="ab" * 32))


@tampering
def another_key_says_something_else_besides(layout: Layout) -> None:
    subject = {key: layout.rows[0][key] for key in ("mediaType", "digest", "size")}
    said = attest.statement(BOM, {"of": "nothing"}, name="weir/demo", digest=subject["digest"])
    key = PrivateKey("cd" * 32, ed25519.Ed25519PrivateKey.from_private_bytes(b"\2" * 32))
    made = attest.referrers(subject, {BOM: said}, key)[1]
    for content in (*made.blobs, made.manifest):
        layout.put(content)
    layout.rows.append(dict(made.descriptor()))


@tampering
def the_payload_is_another_under_the_old_signature(layout: Layout) -> None:
    def edit(bundle: Json) -> None:
        said = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        said["predicate"] = {"of": "nothing bad"}
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(packed(said)).decode()

    layout.change_bundle(edit)


@tampering
def the_payload_has_a_blank_more(layout: Layout) -> None:
    def edit(bundle: Json) -> None:
        said = base64.b64decode(bundle["dsseEnvelope"]["payload"])
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(said + b" ").decode()

    layout.change_bundle(edit)


@tampering
def the_payload_type_is_another(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle["dsseEnvelope"].update(payloadType="application/json"))


@tampering
def the_bundle_is_of_another_version(layout: Layout) -> None:
    layout.change_bundle(
        lambda bundle: bundle.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.1")
    )


@tampering
def the_bundle_holds_a_bare_signature_besides(layout: Layout) -> None:
    layout.change_bundle(lambda bundle: bundle.update(messageSignature={"signature": "AAAA"}))


@tampering
def every_bundle_is_taken_away(layout: Layout) -> None:
    """A downgrade: what is left is unsigned."""
    layout.rows = [row for row in layout.rows if row.get("artifactType") != attest.BUNDLE]


@tampering
def everything_attached_is_taken_away(layout: Layout) -> None:
    layout.rows = layout.rows[:1]


@tampering
def the_provenance_is_taken_away(layout: Layout) -> None:
    layout.rows.remove(layout.row(attest.BUNDLE, attest.PROVENANCE))


@tampering
def a_bundle_is_listed_as_another_kind_of_artifact(layout: Layout) -> None:
    layout.row(attest.BUNDLE, SPDX)["artifactType"] = "application/vnd.acme.notes"


@tampering
def a_bundle_is_another_kind_of_artifact(layout: Layout) -> None:
    row = layout.row(attest.BUNDLE, SPDX)
    row["artifactType"] = "application/vnd.acme.notes"
    layout.change(row, lambda manifest: manifest.update(artifactType="application/vnd.acme.notes"))


@tampering
def a_bundle_is_annotated_as_another_statement(layout: Layout) -> None:
    layout.change(
        layout.row(attest.BUNDLE, SPDX),
        lambda manifest: manifest["annotations"].update({"dev.sigstore.bundle.predicateType": BOM}),
    )


@tampering
def a_bundle_has_a_second_layer(layout: Layout) -> None:
    layout.change(
        layout.row(attest.BUNDLE, SPDX), lambda manifest: manifest["layers"].append(manifest["layers"][0])
    )


@tampering
def a_bundles_layer_has_another_media_type(layout: Layout) -> None:
    layout.change(
        layout.row(attest.BUNDLE, SPDX),
        lambda manifest: manifest["layers"][0].update(mediaType="application/json"),
    )


@tampering
def a_bundle_is_cut_short(layout: Layout) -> None:
    layout.change_layer(layout.row(attest.BUNDLE, BOM), lambda text: text[: len(text) // 2])


@tampering
def a_bundle_has_a_key_twice(layout: Layout) -> None:
    """A reader that takes the first of two sees another envelope than one that takes the last."""
    layout.change_layer(
        layout.row(attest.BUNDLE, BOM),
        lambda text: b'{"dsseEnvelope":{"payload":"","payloadType":"x","signatures":[]},' + text[1:],
    )


@tampering
def a_manifest_has_a_key_twice(layout: Layout) -> None:
    row = layout.row(attest.BUNDLE, BOM)
    layout.set(row, b'{"subject":null,' + layout.blobs[row["digest"]][1:])


@tampering
def the_index_has_a_key_twice(layout: Layout) -> None:
    layout.rows[0]["digest\0"] = ""  # written by `written` below as a second `digest`


@tampering
def a_manifest_is_cut_short(layout: Layout) -> None:
    row = layout.row(attest.BUNDLE, BOM)
    layout.set(row, layout.blobs[row["digest"]][:-20])


@tampering
def a_bundles_bytes_are_not_what_its_digest_says(layout: Layout) -> None:
    digest = layout.json(layout.row(attest.BUNDLE, BOM)["digest"])["layers"][0]["digest"]
    layout.blobs[digest] = layout.blobs[digest].replace(b"payloadType", b"payloadtype")


@tampering
def a_bundle_is_missing(layout: Layout) -> None:
    del layout.blobs[layout.json(layout.row(attest.BUNDLE, BOM)["digest"])["layers"][0]["digest"]]


@tampering
def the_statement_that_buildkits_tools_read_is_another(layout: Layout) -> None:
    """The signed ones are whole, but `docker buildx imagetools` shows the others."""
    layout.change_layer(layout.row(attest.BUILDKIT), lambda text: text.replace(b'{"of"', b'{"if"'), 1)


@tampering
def an_unsigned_statement_is_attached_in_buildkits_older_form(layout: Layout) -> None:
    said = attest.statement(BOM, {"of": "nothing"}, name="weir/demo", digest=layout.rows[0]["digest"])
    config = b'{"architecture":"unknown","os":"unknown","rootfs":{"diff_ids":[]}}'
    layer = make.descriptor(said, attest.IN_TOTO, annotations={"in-toto.io/predicate-type": BOM})
    text = packed({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": make.descriptor(config), "layers": [layer],
    })  # fmt: skip
    for content in (said, config, text):
        layout.put(content)
    notes = {
        "vnd.docker.reference.type": "attestation-manifest",
        "vnd.docker.reference.digest": layout.rows[0]["digest"],
    }
    layout.rows.append(make.descriptor(text, MANIFEST, annotations=notes))


@tampering
def the_row_says_it_is_about_another_image(layout: Layout) -> None:
    layout.row(attest.BUILDKIT)["annotations"]["vnd.docker.reference.digest"] = "sha256:" + "0" * 64


@tampering
def the_manifest_that_buildkits_tools_read_is_about_another_image(layout: Layout) -> None:
    """They go by the row, which says that it is about this one."""
    layout.change(
        layout.row(attest.BUILDKIT),
        lambda manifest: manifest["subject"].update(digest="sha256:" + "0" * 64),
    )


@tampering
def the_statement_that_buildkits_tools_read_is_listed_as_dockers_manifest(layout: Layout) -> None:
    row = layout.row(attest.BUILDKIT)
    row["mediaType"] = "application/vnd.docker.distribution.manifest.v2+json"


def written(layout: Layout, root: Path) -> Path:
    place = layout.write(root)
    index = place / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"digest\\u0000"', b'"digest"'))
    return place


def test_there_are_tamperings_enough() -> None:
    assert len(TAMPERINGS) >= 30


@pytest.mark.thorough
@pytest.mark.parametrize("name", TAMPERINGS)
def test_nothing_is_verified_after(name: str, keys: Path, tmp_path: Path) -> None:
    layout = fresh()
    TAMPERINGS[name](layout)
    place = written(layout, tmp_path / "layout")
    code = main(["verify", str(place), "--key", str(keys / "ours.pub"), "--platform", "linux/amd64"])
    assert code in (Exit.FINDINGS, Exit.DATA)


ODD: tuple[object, ...] = (None, [], {}, "x", -1, True, 10**400, "../../manifests/latest", "\ud800")


@pytest.mark.parametrize("field", ["digest", "size", "mediaType"])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: ascii(odd)[:12])
def test_odd_descriptors_of_a_registry_are_no_tracebacks(
    field: str, odd: object, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = fresh()
    row = layout.row(attest.BUNDLE, BOM)
    layout.change(row, lambda manifest: manifest["layers"][0].update({field: odd}))
    monkeypatch.setattr(verify, "Registry", lambda _name: OfLayout(layout))
    with pytest.raises(NotVerified):
        verify.verify_registry(parse_reference("registry.example/a"), PublicKey.read(keys / "ours.pub"))


@dataclass
class OfLayout:
    """A registry that has what a layout has."""

    layout: Layout

    def manifest(self, ref: str) -> bytes:
        return self.layout.blobs[self.layout.rows[0]["digest"] if ref == "latest" else ref]

    def blob(self, digest: str, _n_bytes: int) -> list[bytes]:
        return [self.layout.blobs[digest]]

    def referrers(self, _subject: str) -> list[Json]:
        return self.layout.rows[1:]

    def close(self) -> None:
        pass


# ---- what is verified


def test_a_layout_that_nobody_changed_is_verified(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = written(fresh(), tmp_path / "layout")
    assert main(["verify", str(place), "--key", str(keys / "ours.pub"), "--platform", "linux/amd64"]) == 0
    shown = capsys.readouterr().out
    assert digest_of(image().manifest()) in shown
    assert "about weir/demo" in shown
    (tmp_path / "a.tar").write_bytes(
        make.archive(
            {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        )
    )
    verify_archive(tmp_path / "a.tar", PublicKey.read(keys / "ours.pub"))


def test_what_is_read_is_shown_as_by_an_audit(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "PROGRESS_EVERY_S", 0.0)
    root = attached(1).write(tmp_path / "layout")
    assert main([*["verify", "--key"], str(keys / "ours.pub"), str(root)]) == 0
    said = capsys.readouterr()
    assert f"verify {root}: " in said.err
    assert "read" not in said.out


def test_another_key_verifies_nothing(keys: Path, tmp_path: Path) -> None:
    place = written(fresh(), tmp_path / "layout")
    with pytest.raises(NotVerified, match="didn't sign"):
        verify_archive(place, PublicKey.read(keys / "theirs.pub"))


def test_what_somebody_else_signed_of_another_kind_is_only_noted(keys: Path, tmp_path: Path) -> None:
    layout = fresh()
    subject = {key: layout.rows[0][key] for key in ("mediaType", "digest", "size")}
    kind = "https://acme.example/scan"
    said = attest.statement(kind, {}, name="x", digest=subject["digest"])
    key = PrivateKey("", ed25519.Ed25519PrivateKey.from_private_bytes(b"\2" * 32))
    made = attest.referrers(subject, {kind: said}, key)[1]
    for content in (*made.blobs, made.manifest):
        layout.put(content)
    layout.rows.append(dict(made.descriptor()))
    verified = verify_archive(written(layout, tmp_path / "layout"), PublicKey.read(keys / "ours.pub"))
    assert [kind in note for note in verified.notes] == [True]


def test_an_unsigned_artifact_of_another_form_is_never_passed_over_in_silence(
    keys: Path, tmp_path: Path
) -> None:
    layout = fresh()
    row = dict(layout.row(attest.BUNDLE, BOM))
    kind = "application/vnd.cyclonedx+json\x1b[31m"
    row["artifactType"] = kind
    layout.change(row, lambda manifest: manifest.update(artifactType=kind))
    layout.rows.append(row)
    verified = verify_archive(written(layout, tmp_path / "layout"), PublicKey.read(keys / "ours.pub"))
    assert ["vnd.cyclonedx+json\\x1b[31m, and was not judged" in note for note in verified.notes] == [True]


def test_an_image_with_attestations_is_still_one_image(keys: Path, tmp_path: Path) -> None:
    """An audit and an inventory read it without --image."""
    place = written(fresh(), tmp_path / "layout")
    assert main(["sbom", str(place), "--platform", "linux/amd64", "--output", str(tmp_path / "bom")]) == 0


def test_signing_twice_gives_the_same_bytes() -> None:
    attached.cache_clear()
    first = fresh().blobs
    attached.cache_clear()
    assert fresh().blobs == first


# ---- keys


def test_only_ed25519_keys_of_the_right_half_are_taken(keys: Path, tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    formats = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "ec.pem").write_bytes(other.private_bytes(serialization.Encoding.PEM, *formats))
    (tmp_path / "ec.pub").write_bytes(
        other.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    (tmp_path / "text").write_text("no key")
    (tmp_path / "long").write_bytes(bytes(70_000))
    locked = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"word"),
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    for path in (keys / "ours.pem", tmp_path / "ec.pub", tmp_path / "text", tmp_path / "long"):
        with pytest.raises(ConfigError):
            PublicKey.read(path)
    for path in (keys / "ours.pub", tmp_path / "ec.pem", tmp_path / "text", tmp_path / "locked.pem"):
        with pytest.raises(ConfigError):
            PrivateKey.read(path)


def test_a_signature_is_one_that_openssl_would_make(keys: Path) -> None:
    """RFC 8032's key and message of test 1, and DSSE's own example of what is signed."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = PrivateKey("", ed25519.Ed25519PrivateKey.from_private_bytes(seed))
    assert (
        key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb")
    )
    encoded = attest.pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_a_key_through_a_pipe_is_read_and_a_pipe_without_one_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buildtool.sbom.keys._WAIT_S", 0.01)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="nothing comes"):
        PrivateKey.read(pipe)
    reader, writer = os.pipe()
    os.write(writer, pem(1))
    os.close(writer)
    monkeypatch.setattr("buildtool.sbom.keys._WAIT_S", 10)
    try:
        assert PrivateKey.read(Path(f"/dev/fd/{reader}")).key_id
    finally:
        os.close(reader)
