"""Statements about an image (in-toto), signed (DSSE), as manifests that refer to it (OCI 1.1).

All statements are in one manifest of the form that BuildKit writes, unsigned, which tools of Docker read.
With a key, each is in a Sigstore bundle besides, as `cosign attest --key` attaches it; these are verified.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from buildtool.image.written import Referrer, packed, referrer
from buildtool.sbom.keys import PrivateKey

IN_TOTO = "application/vnd.in-toto+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUILDKIT = "application/vnd.docker.attestation.manifest.v1+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
PREDICATES = {
    "https://cyclonedx.org/bom": "CycloneDX",
    "https://spdx.dev/Document": "SPDX",
    PROVENANCE: "provenance",
}
PREDICATE_NOTE = {IN_TOTO: "in-toto.io/predicate-type", BUNDLE: "dev.sigstore.bundle.predicateType"}


def statement(predicate_type: str, predicate: Mapping[str, Any], *, name: str, digest: str) -> bytes:
    """What is said of the image `name` whose manifest has a `digest`."""
    return packed({
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    })  # fmt: skip


def referrers(
    subject: Mapping[str, object], statements: Mapping[str, bytes], key: PrivateKey | None
) -> tuple[Referrer, ...]:
    """The manifests of statements, by their predicate's type, about the image of a descriptor."""
    layers = [(text, IN_TOTO, {PREDICATE_NOTE[IN_TOTO]: kind}) for kind, text in statements.items()]
    as_buildkit = {
        "platform": {"architecture": "unknown", "os": "unknown"},
        "annotations": {
            "vnd.docker.reference.digest": str(subject["digest"]),
            "vnd.docker.reference.type": "attestation-manifest",
        },
    }
    made = [referrer(subject, BUILDKIT, layers, row=as_buildkit)]
    for kind, text in statements.items() if key else ():
        assert key
        notes = {"dev.sigstore.bundle.content": "dsse-envelope", PREDICATE_NOTE[BUNDLE]: kind}
        made.append(referrer(subject, BUNDLE, [(bundle(text, key), BUNDLE, {})], annotations=notes))
    return tuple(made)


def bundle(text: bytes, key: PrivateKey) -> bytes:
    """A statement and its signature as a Sigstore bundle, which names the key by its id."""
    signature = key.sign(pre_authentication_encoding(IN_TOTO, text))
    return packed({
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.key_id}},
        "dsseEnvelope": {
            "payload": base64.b64encode(text).decode(),
            "payloadType": IN_TOTO,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": key.key_id}],
        },
    })  # fmt: skip


def pre_authentication_encoding(kind: str, payload: bytes) -> bytes:
    """What a DSSE signature is of: https://github.com/secure-systems-lab/dsse, protocol 1.0."""
    parts: Sequence[bytes] = (kind.encode(), payload)
    return b"DSSEv1" + b"".join(b" %d %s" % (len(part), part) for part in parts)
