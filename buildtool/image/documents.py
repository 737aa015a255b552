"""The JSON documents of an image (index, manifest, config, manifest.json): text to values.

Lists that identify content are read strictly. A config is read as the engines read it, with
a note for what a strict reader would refuse (docs/decisions/0010).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar

from buildtool.core.json_text import Json, folded, load_as_engines_do, merged, spellings
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedDocument
from probes.core.codec import load


class Node:
    """A JSON object, read by key and type. Raises MalformedDocument, which names the key.

    Engines ignore the case of field names. A name in another case is refused, unless there is `spelled`,
    where it is then recorded: right name -> name as written.
    """

    def __init__(self, value: Json, place: str, spelled: dict[str, str] | None = None) -> None:
        if not isinstance(value, Mapping):
            raise MalformedDocument("a JSON object is missing", place=place)
        self._value = value
        self._spelled = spelled
        self.place = place

    @cached_property
    def _spellings(self) -> Mapping[str, list[str]]:
        return spellings(self._value)

    def _get(self, key: str) -> Json:
        names = self._spellings.get(folded(key), [])
        for name in names:
            if name != key and self._spelled is None:
                raise MalformedDocument(
                    f"`{key}` is spelled {name[:40]!r}, which engines take for it", place=self.place
                )
            if name != key and self._spelled is not None:
                self._spelled.setdefault(key, name)
        return reduce(merged, (self._value[name] for name in names)) if names else None

    def refuse_two_spellings(self) -> None:
        """Raises MalformedDocument where a field occurs twice, in different cases: readers differ then."""
        for names in self._spellings.values():
            if len(names) > 1:
                raise MalformedDocument(f"{names[0][:40]!r} is spelled in two ways", place=self.place)

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._get(key) is not None

    def child(self, key: str) -> "Node":
        """The object at a key, an empty one where there is none."""
        return Node(self._get(key) or {}, f"{self.place}, `{key}`", self._spelled)

    def names(self, key: str) -> bool:
        """Whether the key is there, be it with null."""
        self._get(key)
        return key in self._value

    def items_or_null(self, key: str) -> "tuple[Node | None, ...]":
        """The objects of a list, None for each null in it."""
        rows = enumerate(self._list(key))
        return tuple(None if row is None else self._item(row, key, at) for at, row in rows)

    def items(self, key: str) -> tuple["Node", ...]:
        """The objects of a list."""
        return tuple(self._item(row, key, at) for at, row in enumerate(self._list(key)))

    def _item(self, row: Json, key: str, at: int) -> "Node":
        return Node(row, f"{self.place}, `{key}[{at}]`", self._spelled)

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of a list."""
        return tuple(row if isinstance(row, str) else self._wrong(key) for row in self._list(key))

    def text(self, key: str, default: str | None = None) -> str:
        """The text at a key; `default`, if there is one, where the key has no value."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        return value if isinstance(value, str) else self._wrong(key)

    def flag(self, key: str) -> bool:
        """Whether the value is true."""
        return self._get(key) is True

    def count(self, key: str) -> int:
        """A number of bytes."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise MalformedDocument(f"`{key}` is not a size", place=self.place)
        return value

    def string_map(self) -> Mapping[str, str]:
        """The members whose values are texts."""
        return {key: value for key, value in self._value.items() if isinstance(value, str)}

    def _list(self, key: str) -> Sequence[Json]:
        value = self._get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise MalformedDocument(f"`{key}` is not a list", place=self.place)
        return value

    def _wrong(self, key: str) -> str:
        raise MalformedDocument(f"`{key}` is missing or not text", place=self.place)


T = TypeVar("T")

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ATTESTATION = "vnd.docker.reference.type"


@dataclass(frozen=True)
class Platform:
    """The platform of a manifest. `unknown/unknown` marks attestations."""

    os: str
    architecture: str
    variant: str = ""

    def resembles(self, other: "Platform | None") -> bool:
        """Whether the two differ in the variant at most."""
        return other is not None and (self.os, self.architecture) == (other.os, other.architecture)

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclass(frozen=True)
class Descriptor:
    """A pointer to content, by digest and size."""

    media_type: str
    digest: str
    stored_bytes: int
    platform: Platform | None
    names: tuple[str, ...]  # the image's name in annotations
    urls: tuple[str, ...]
    is_attestation: bool


@dataclass(frozen=True)
class Index:
    """A list of manifests, or of further indexes."""

    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True)
class Manifest:
    """One image for one platform; layers from the bottom up."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    is_attestation: bool


@dataclass(frozen=True)
class Step:
    """One step of an image's history: what made it, and whether it made a layer."""

    command: str
    has_layer: bool


@dataclass(frozen=True)
class ImageConfig:
    """What a config says about its image.

    `commands`: a text for each layer, None if the history doesn't fit.
    """

    platform: Platform
    diff_ids: tuple[str, ...]
    commands: tuple[str, ...] | None
    labels: Mapping[str, str]
    env: tuple[str, ...]
    user: str
    history: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # what a strict reader would have refused
    created: str = ""  # as the config has it


@dataclass(frozen=True)
class SavedImage:
    """One row of docker's manifest.json: paths inside the archive. `notes`: what other readers may refuse."""

    config: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]
    notes: tuple[str, ...] = ()


def parse_json(text: bytes, *, place: str, limits: Limits = LIMITS) -> Json:
    """A JSON value, read strictly. Raises MalformedDocument, LimitExceeded."""
    return _bounded(text, load, place=place, limits=limits)


def parse_index_or_manifest(text: bytes, *, place: str, limits: Limits = LIMITS) -> Index | Manifest:
    """An OCI index or manifest, or Docker's equivalent (v2 list and manifest), recognised by content.

    Raises MalformedDocument, also for a document that could be read as either (CVE-2021-41190).
    """
    top = Node(parse_json(text, place=place, limits=limits), place)
    if top.has("manifests") and top.has("layers"):
        raise MalformedDocument("an image index and an image manifest in one", place=place)
    if top.has("layers") or (top.has("config") and not top.has("manifests")):
        return _manifest(top, limits)
    if not top.names("manifests"):
        raise MalformedDocument("neither an image index nor an image manifest", place=place)
    rows = top.items("manifests")  # null from Docker 25.0, for an image without a tag
    if len(rows) > limits.manifests:
        raise LimitExceeded(f"an index of {len(rows):,} manifests", place=place)
    return Index(tuple(_descriptor(row) for row in rows))


def parse_config(text: bytes, *, place: str, limits: Limits = LIMITS) -> ImageConfig:
    """An image's config, as the engines read it. Raises MalformedDocument, LimitExceeded."""
    loaded = _bounded(text, load_as_engines_do, place=place, limits=limits)
    spelled: dict[str, str] = {}
    top = Node(loaded.value, place, spelled)
    rootfs = top.child("rootfs")
    diff_ids = tuple(_digest(rootfs, text) for text in rootfs.texts("diff_ids"))
    if len(diff_ids) > limits.layers:
        raise LimitExceeded(f"a config of {len(diff_ids):,} layers", place=place)
    rows = top.items_or_null("history")
    history = tuple(
        Step(row.text("created_by", ""), not row.flag("empty_layer")) if row else Step("", has_layer=True)
        for row in rows
    )
    null = ("a row of its history is null",) if None in rows else ()
    commands = tuple(step.command for step in history if step.has_layer)
    run = top.child("config")
    platform, labels = _platform(top), run.child("Labels").string_map()
    env, user = run.texts("Env"), run.text("User", "")
    case = tuple(f"it spells `{key}` as {name[:40]!r}" for key, name in spelled.items())
    return ImageConfig(
        platform=platform,
        diff_ids=diff_ids,
        commands=commands if len(commands) == len(diff_ids) else None,
        labels=labels,
        env=env,
        user=user,
        history=history,
        notes=tuple(
            f"{place}: {note}; the engines read it all the same" for note in loaded.notes + null + case
        ),
        created=top.string_map().get("created", ""),
    )


def is_saved_list(text: bytes, *, place: str, limits: Limits = LIMITS) -> bool:
    """Whether a manifest.json is docker's list, and not a manifest itself. Raises MalformedDocument."""
    return not isinstance(parse_json(text, place=place, limits=limits), Mapping)


def parse_saved(text: bytes, *, place: str, limits: Limits = LIMITS) -> tuple[SavedImage, ...]:
    """docker's manifest.json, with its names in any case, as old Jib wrote them. Raises MalformedDocument."""
    spelled: dict[str, str] = {}
    rows = Node({"rows": parse_json(text, place=place, limits=limits)}, place, spelled).items("rows")
    for row in rows:
        row.refuse_two_spellings()
    images = [SavedImage(row.text("Config"), row.texts("Layers"), row.texts("RepoTags")) for row in rows]
    notes = tuple(f"{place} spells `{key}` as {name[:40]!r}" for key, name in spelled.items())
    return tuple(replace(image, notes=notes) for image in images)


def _manifest(top: Node, limits: Limits) -> Manifest:
    layers = tuple(_descriptor(row) for row in top.items("layers"))
    if len(layers) > limits.layers:
        raise LimitExceeded(f"a manifest of {len(layers):,} layers", place=top.place)
    return Manifest(_descriptor(top.child("config")), layers, top.text("artifactType", "") != "")


def _descriptor(row: Node) -> Descriptor:
    annotations = row.child("annotations").string_map()
    platform = _platform(row.child("platform")) if row.has("platform") else None
    names = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
    return Descriptor(
        media_type=row.text("mediaType", ""),
        digest=_digest(row, row.text("digest")),
        stored_bytes=row.count("size"),
        platform=platform,
        names=tuple(annotations[key] for key in names if annotations.get(key)),
        urls=row.texts("urls"),
        is_attestation=_ATTESTATION in annotations
        or (platform is not None and platform.os == "unknown")
        or row.text("artifactType", "") != "",
    )


def _digest(row: Node, text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise MalformedDocument(f"{text[:80]!r} is not a sha256 digest", place=row.place)
    return text


def _platform(row: Node) -> Platform:
    return Platform(row.text("os", "unknown"), row.text("architecture", "unknown"), row.text("variant", ""))


def _bounded(text: bytes, parse: Callable[[bytes], T], *, place: str, limits: Limits) -> T:
    if len(text) > limits.document_bytes:
        raise LimitExceeded(f"a JSON document of {len(text):,} bytes", place=place)
    try:
        return parse(text)
    except ValueError as error:
        message = f"not a usable JSON document ({str(error)[:120]})"
        raise MalformedDocument(message, place=place) from error
