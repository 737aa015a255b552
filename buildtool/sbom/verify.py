"""Whether what is attached to an image was signed by a key, and is about this image.

An image is verified where the key has signed a statement of each kind about it, and nothing of these kinds is
attached that it hasn't signed. The image's own bytes are read, too: all layers, against their digests.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buildtool.core.errors import DataError, Exit, ToolError
from buildtool.engine.reference import Reference
from buildtool.engine.registry_api import Registry
from buildtool.image.archive import Archive, Tick, open_archive
from buildtool.image.documents import Manifest, Platform, parse_index_or_manifest
from buildtool.image.errors import LIMITS
from buildtool.image.reader import read_image
from buildtool.image.written import OCI, digest_of
from buildtool.sbom.attest import (
    BUILDKIT,
    BUNDLE,
    IN_TOTO,
    PREDICATE_NOTE,
    PREDICATES,
    STATEMENT,
    pre_authentication_encoding,
)
from buildtool.sbom.keys import PublicKey
from probes.core.codec import load
from probes.core.quoting import terminal

_MANIFEST, _INDEX = f"{OCI}.manifest.v1+json", f"{OCI}.index.v1+json"
_LIMITS = replace(LIMITS, document_bytes=128 << 20, documents_bytes=512 << 20)  # statements list many files
_MOST_REFERRERS = 200
_ABOUT = "vnd.docker.reference.digest"  # annotation of BuildKit's, which says what a row is about
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BUNDLE_FIELDS = {"mediaType", "verificationMaterial", "dsseEnvelope"}
Json = Mapping[str, Any]
Fetch = Callable[[Json, str], bytes]  # what a descriptor names, and what errors call it


class NotVerified(ToolError):
    """An image that isn't what a key says, or of which it says nothing."""

    exit_code = Exit.FINDINGS


@dataclass(frozen=True)
class Verified:
    """An image that is verified: its digest, its names in what was signed, and the digests of statements."""

    digest: str
    names: tuple[str, ...]
    statements: Mapping[str, str]
    notes: tuple[str, ...]


def verify_archive(
    path: Path,
    key: PublicKey,
    *,
    image: str | None = None,
    platform: Platform | None = None,
    tick: Tick = lambda _n_bytes: None,
) -> Verified:
    """Verify an image of an OCI layout, a directory or an archive of it.

    Raises NotVerified, ImageError for bytes that aren't what their digest says, DataError, ConfigError.
    """
    archive = open_archive(path, limits=_LIMITS, tick=tick, inspect=lambda _path, _size, _pieces: None)
    contents = read_image(archive, label=str(path), ref=image, platform=platform, limits=_LIMITS)
    if contents.manifest_digest is None:
        raise DataError(
            f"{path} has no manifest, which attestations are about",
            "verify the layout that `weir build --layout` wrote, or the name in a registry",
        )

    def fetch(descriptor: Json, what: str) -> bytes:
        place = "blobs/" + _text(descriptor, "digest", what).replace(":", "/")
        return _checked(_document(archive, place), descriptor, what)

    rows = list(_rows(_document(archive, "index.json"), fetch))
    subject = next((row for row in rows if row.get("digest") == contents.manifest_digest), {})
    return _verified(subject, [row for row in rows if row is not subject], fetch, key)


def verify_registry(name: Reference, key: PublicKey, *, tick: Tick = lambda _n_bytes: None) -> Verified:
    """Verify an image in a registry: its layers are fetched and hashed.

    Raises NotVerified, and as the methods of `Registry` do.
    """
    with closing(Registry(name)) as registry:
        text = registry.manifest(name.digest or name.tag or "latest")
        parsed = parse_index_or_manifest(text, place=str(name))
        if not isinstance(parsed, Manifest):
            raise NotVerified(
                f"{name} is an index of several images", "name one of them by digest: NAME@sha256:..."
            )

        def fetch(descriptor: Json, what: str) -> bytes:
            content, n_bytes = b"", descriptor.get("size")
            attached = _text(descriptor, "digest", what)
            if not _DIGEST.fullmatch(attached):  # it becomes a part of an address
                raise NotVerified(f"{what} has no digest that is one: {_shown(attached)}")
            if not isinstance(n_bytes, int) or not 0 <= n_bytes <= _LIMITS.document_bytes:
                raise NotVerified(f"{what} is longer than any statement, or doesn't say how long it is")
            if descriptor.get("mediaType") == _MANIFEST:
                content = registry.manifest(attached)
            else:
                content = b"".join(registry.blob(attached, n_bytes))
            return _checked(content, descriptor, what)

        for part in (parsed.config, *parsed.layers):
            n_bytes = 0
            for piece in registry.blob(part.digest, part.stored_bytes):
                n_bytes += len(piece)
                tick(len(piece))
            if n_bytes != part.stored_bytes:
                raise NotVerified(
                    f"{part.digest} has {n_bytes:,} bytes, its manifest says {part.stored_bytes:,}"
                )
        media = _object(load(text), "the manifest").get("mediaType")
        digest = digest_of(text)
        subject = {"mediaType": media, "digest": digest, "size": len(text)}
        return _verified(subject, registry.referrers(digest), fetch, key)


# What is attached.


@dataclass(frozen=True)
class _Statement:
    """A statement that is attached, and whether the key signed it."""

    text: bytes
    kind: str
    where: str
    is_signed: bool


def _verified(subject: Json, rows: Sequence[Json], fetch: Fetch, key: PublicKey) -> Verified:
    """Judge everything that refers to the image of a descriptor."""
    if len(rows) > _MOST_REFERRERS:
        raise NotVerified(f"{len(rows):,} manifests are attached, more than {_MOST_REFERRERS}")
    digest, signer = _text(subject, "digest", "the image"), f"the key {key.key_id[:16]}"
    attached: list[_Statement] = []
    notes: list[str] = []
    for row in rows:
        place = f"the attached manifest {_text(row, 'digest', 'a descriptor')[:19]}"
        if row.get("mediaType") != _MANIFEST:
            if _noted(row).get(_ABOUT) == digest:  # other tools may read it
                raise NotVerified(f"{place} is listed as a statement, and is {_shown(row.get('mediaType'))}")
            notes.append(f"{place} is {_shown(row.get('mediaType'))}, and was not read")
            continue
        manifest = _object(_parsed(fetch(row, place), place), place)
        if _is_about(manifest, row, subject, place):
            held = list(_statements(manifest, row, place, fetch, key))
            attached += held
            if not held:
                notes.append(f"{place} is {_shown(manifest.get('artifactType'))}, and was not judged")
    signed = {each.text for each in attached if each.is_signed}
    for each in attached:
        if each.kind not in PREDICATES:
            notes.append(f"{each.where}: {_shown(each.kind)} was not judged")
        elif each.text not in signed:
            raise NotVerified(
                f"{each.where} says something ({PREDICATES[each.kind]}) that {signer} didn't sign"
            )
    kinds = {each.kind: digest_of(each.text) for each in attached if each.text in signed}
    if missing := [name for kind, name in PREDICATES.items() if kind not in kinds]:
        raise NotVerified(
            f"{signer} signed no statement of {', '.join(missing)} about {digest[:19]}",
            "sign what is built: weir build --sign KEY, with --layout or --push",
        )
    named = {_name_of(text, digest) for text in signed}
    return Verified(
        digest, tuple(sorted(named)), {PREDICATES[kind]: kinds[kind] for kind in PREDICATES}, tuple(notes)
    )


def _is_about(manifest: Json, row: Json, subject: Json, place: str) -> bool:
    """Whether an attached manifest is about the image: by its subject or, as of older BuildKits, by its row.

    Raises NotVerified where both don't agree, or what it says of the image is wrong.
    """
    about = manifest.get("subject")
    noted = _noted(row).get(_ABOUT)
    if not isinstance(about, Mapping):
        return bool(noted == subject["digest"])
    if subject["digest"] not in (about.get("digest"), noted):
        return False
    if (manifest.get("mediaType"), manifest.get("schemaVersion")) != (_MANIFEST, 2):
        raise NotVerified(f"{place} is no manifest of OCI's, whose type it has")
    if noted not in (None, subject["digest"]) or any(
        about.get(field) != subject.get(field) for field in ("mediaType", "digest", "size")
    ):
        raise NotVerified(f"{place} says something else of the image than the image is")
    if row.get("artifactType", manifest.get("artifactType")) != manifest.get("artifactType"):
        raise NotVerified(f"{place} is listed as {_shown(row.get('artifactType'))}, and is not")
    return True


def _statements(manifest: Json, row: Json, place: str, fetch: Fetch, key: PublicKey) -> Iterator[_Statement]:
    """The statements of a manifest in one of BuildKit's forms or of a Sigstore bundle; of others none."""
    artifact = manifest.get("artifactType") or (BUILDKIT if _noted(row) else "")
    if artifact not in (BUILDKIT, BUNDLE):
        return
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not layers or (artifact == BUNDLE and len(layers) != 1):
        raise NotVerified(f"{place} has another number of layers than its kind has")
    expected = BUNDLE if artifact == BUNDLE else IN_TOTO
    for layer in layers:
        own = _object(layer, place)
        if own.get("mediaType") != expected:
            raise NotVerified(f"{place} has a layer of the type {_shown(own.get('mediaType'))}")
        content = fetch(own, place)
        text, is_signed = _opened(content, place, key) if artifact == BUNDLE else (content, False)
        kind = _text(_object(_parsed(text, place), place), "predicateType", place)
        if _noted(manifest if artifact == BUNDLE else own).get(PREDICATE_NOTE[expected]) != kind:
            raise NotVerified(f"{place} is annotated as another kind of statement than it holds")
        yield _Statement(text, kind, place, is_signed)


def _noted(value: Json) -> Json:
    notes = value.get("annotations")
    return notes if isinstance(notes, Mapping) else {}


def _opened(content: bytes, place: str, key: PublicKey) -> tuple[bytes, bool]:
    """The statement in a Sigstore bundle, and whether the key signed it."""
    bundle = _object(_parsed(content, place), place)
    envelope = _object(bundle.get("dsseEnvelope"), place)
    if {*bundle} != _BUNDLE_FIELDS or (bundle["mediaType"], envelope.get("payloadType")) != (BUNDLE, IN_TOTO):
        raise NotVerified(f"{place} is a bundle of another kind, or of something other than a statement")
    rows = envelope.get("signatures")
    if not isinstance(rows, list) or len(rows) != 1:
        raise NotVerified(f"{place} has another number of signatures than one")
    row = _object(rows[0], place)
    payload, signature = _decoded(envelope.get("payload"), place), _decoded(row.get("sig"), place)
    by_us = row.get("keyid", "") in ("", key.key_id)  # nothing rests on it, but others may show it
    return payload, by_us and key.verifies(signature, pre_authentication_encoding(IN_TOTO, payload))


def _name_of(text: bytes, digest: str) -> str:
    """The name that a signed statement gives the image, after it was checked to be about this one alone."""
    said = _object(_parsed(text, "a statement"), "a statement")
    subjects = said.get("subject")
    if said.get("_type") != STATEMENT or not isinstance(subjects, list) or len(subjects) != 1:
        raise NotVerified("a signed statement is of another form than in-toto's, or about several things")
    named = _object(subjects[0], "a statement")
    if named.get("digest") != {"sha256": digest.removeprefix("sha256:")}:
        raise NotVerified(f"a signed statement that is attached is about another image than {digest[:19]}")
    return _shown(named.get("name"))


# Documents.


def _rows(index: bytes, fetch: Fetch) -> Iterator[Json]:
    """The descriptors of an index, and of those in it."""
    waiting, seen = [(index, 0)], 0
    while waiting:
        text, depth = waiting.pop(0)
        manifests = _object(_parsed(text, "index.json"), "index.json").get("manifests")
        for row in manifests if isinstance(manifests, list) else ():
            seen += 1
            if seen > LIMITS.manifests:
                raise NotVerified(f"the layout lists more than {LIMITS.manifests} manifests")
            own = _object(row, "index.json")
            if own.get("mediaType") == _INDEX and depth < LIMITS.index_depth:
                waiting.append((fetch(own, "an index"), depth + 1))
            else:
                yield own


def _document(archive: Archive, path: str) -> bytes:
    try:
        text = archive.blob(path).document
    except KeyError:
        text = None
    if text is None:
        raise NotVerified(f"{path} is missing, or no JSON")
    return text


def _checked(content: bytes, descriptor: Json, what: str) -> bytes:
    if digest_of(content) != descriptor.get("digest") or len(content) != descriptor.get("size"):
        raise NotVerified(f"{what} isn't what its digest and size say")
    return content


def _parsed(text: bytes, place: str) -> Any:  # noqa: ANN401
    try:
        return load(text)
    except ValueError as error:
        raise NotVerified(
            f"{place} holds no JSON that can be trusted: {terminal(str(error))[:120]}"
        ) from error


def _object(value: object, place: str) -> Json:
    if not isinstance(value, Mapping):
        raise NotVerified(f"{place}: an object is missing")
    return value


def _shown(value: object) -> str:
    return terminal(str(value))[:120]


def _text(value: Json, key: str, place: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise NotVerified(f"{place}: `{key}` is missing or no text")
    return text


def _decoded(text: object, place: str) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotVerified(f"{place} has a signature or payload that is no base64") from error
