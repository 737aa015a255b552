"""Where an image exposes credentials: in its metadata, and in files of any layer."""

from collections.abc import Iterator
from dataclasses import dataclass

from buildtool.audit.inspect.secrets import (
    kinds_in_document,
    kinds_in_text,
    values_in_document,
    values_in_text,
)
from buildtool.audit.read.contents import ImageContents
from buildtool.audit.read.merge import Merged
from probes.shared.quoting import terminal


@dataclass(frozen=True)
class SecretPlace:
    """Where a credential was seen, and of which kinds; never the credential."""

    where: str
    kinds: tuple[str, ...]
    unpacked_bytes: int  # of the file; 0 in ENV, labels and history


def exposed_secrets(contents: ImageContents, merged: Merged) -> Iterator[SecretPlace]:
    """Every place, in ENV, labels, history, attestations and files; also files that a later layer removed."""
    yield from _metadata_secrets(contents)
    yield from _stored_secrets(merged)


def exposed_values(contents: ImageContents) -> frozenset[bytes]:
    """The credentials themselves, in all of these places: what no part of a report may repeat."""
    found: set[bytes] = set()
    for _, text in _texts(contents):
        found |= values_in_text(text)
    for document in contents.attestations.documents:
        found |= values_in_document(document)
    for layer in contents.layers:
        found |= layer.index.secret_values if layer.index else set()
    return frozenset(found)


def _texts(contents: ImageContents) -> Iterator[tuple[str, str]]:
    """Every text of the config in which credentials are searched for, and where it is."""
    config = contents.config
    yield from ((f"ENV {text.partition('=')[0]}", text) for text in config.env)
    yield from ((f"label {key}", f"{key}={value}") for key, value in config.labels.items())
    yield from ((f"history, step {n}", step.command) for n, step in enumerate(config.history))


def _metadata_secrets(contents: ImageContents) -> Iterator[SecretPlace]:
    """Credentials in an image's metadata."""
    for where, text in _texts(contents):
        kinds = kinds_in_text(text)
        if kinds:
            yield SecretPlace(terminal(where), kinds, 0)
    for document in contents.attestations.documents:
        kinds = kinds_in_document(document)
        if kinds:
            yield SecretPlace("an attestation (provenance or SBOM) of the image", kinds, 0)


def _stored_secrets(merged: Merged) -> Iterator[SecretPlace]:
    """Credentials in files of any layer."""
    for layer, (index, start) in enumerate(zip(merged.layers, merged.starts, strict=True)):
        for at, kinds in index.secrets.items():
            later = "" if merged.shown[start + at] else ", gone from later layers but still stored"
            where = f"{terminal(index.path(at))} (layer {layer}{later})"
            yield SecretPlace(where, kinds, index.sizes[at])
