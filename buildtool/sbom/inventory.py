"""What an image is made of: packages, libraries inside wheels, models; each file has an owner or is listed.

A file is a regular file or a hard link of the final tree; links and directories have no content of their own.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from buildtool.audit.packages import UNOWNED, Manager, Ownership, Package, assign_unlisted_files, find_owners
from buildtool.core.model import Wheel, normalised
from buildtool.image.layer import LayerIndex
from buildtool.image.merge import Merged, merge
from buildtool.image.reader import ImageContents
from buildtool.image.tar import FILE, HARDLINK
from buildtool.sbom.binaries import EMPTY, FileFacts, digests
from buildtool.sbom.libraries import (
    Component,
    declared_as,
    identify,
    inside,
    is_extension_module,
    purl_of,
)
from probes.core.codec import load
from probes.core.quoting import terminal

_HUB_CACHE = re.compile(r"(?:.*/)?models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/")
_SNAPSHOT = re.compile(r"snapshots/(?P<revision>[0-9a-f]{40})/")
_HUB_FOLDER = "/.cache/huggingface/download/"  # below a folder that huggingface_hub filled
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_PACKAGE = Package(Manager.PYTHON, "", "")
_ORDER = attrgetter("kind", "purl", "name", "path")
_MOST_DECLARED = 1000  # components of a wheel's own bill of materials
_MOST_CHARS = 4096  # of an evidence or a name from outside


@dataclass(frozen=True)
class Inventory:
    """An image's parts. `digest` is its manifest's, or its config's where the archive has no manifest.

    Every file is one of a component's `n_files`, or in `unowned`. `created` is the image's own time.
    """

    name: str
    digest: str
    platform: str
    created: str
    components: tuple[Component, ...]
    unowned: tuple[Component, ...]
    notes: tuple[str, ...] = ()

    @property
    def n_files(self) -> int:
        """All files of the image."""
        return sum(each.n_files for each in self.components) + len(self.unowned)


@dataclass(frozen=True)
class _File:
    raw: bytes  # its path
    facts: FileFacts

    @property
    def path(self) -> str:
        return _text(self.raw)


def take_inventory(
    contents: ImageContents, *, name: str, created: str = "", wheels: Iterable[Wheel] = ()
) -> Inventory:
    """The inventory of an image that was read with `binaries.inspect`; `wheels` are those it was made from.

    The same image gives the same inventory. Raises ImageError for layers that contradict each other.
    """
    layers = [layer.index for layer in contents.layers if layer.index]
    merged = merge(layers)
    ownership = find_owners(merged)
    assign_unlisted_files(merged, ownership)
    captured = dict(_captured(merged))
    files = _sort(merged, ownership)
    system = _os_release(captured)
    archives = {(wheel.distribution, wheel.version): wheel for wheel in wheels}
    declared = _declared(captured)
    components = [_system(system)] if system else []
    for number, package in enumerate(ownership.packages):
        if number != UNOWNED:
            component = _package(package, system, archives, n_files=len(files[number]))
            own = declared.get((package.place, normalised(package.name), package.version), [])
            components.append(replace(component, parts=_libraries(files[number], package, own)))
    models, unowned = _models(files[UNOWNED], _revisions(merged), captured)
    return Inventory(
        name=terminal(name),
        digest=contents.manifest_digest or contents.config_digest,
        platform=str(contents.config.platform),
        created=created,
        components=tuple(sorted([*components, *models], key=_ORDER)),
        unowned=tuple(sorted((_unowned(file) for file in unowned), key=lambda each: each.path)),
        notes=(*contents.notes, *contents.layer_notes()),
    )


def image_name(contents: ImageContents, label: str) -> str:
    """What an image is called: by its title, else by the name that it was asked for, never by a path."""
    titles = (contents.config.labels.get(f"org.opencontainers.image.{key}") for key in ("title", "ref.name"))
    return next((title for title in titles if title), contents.ref if contents.ref != label else "image")


# Files.


def _sort(merged: Merged, ownership: Ownership) -> Mapping[int, list[_File]]:
    """Files by their owner's number."""
    files: dict[int, list[_File]] = defaultdict(list)
    dangling = {*merged.dangling}
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, kind in enumerate(index.kinds):
            row = start + at
            if kind not in (FILE, HARDLINK) or not merged.visible[row] or row in dangling:
                continue
            content = merged.links.get(row, row)
            layer = merged.layer_of(content)
            held, at_held = merged.layers[layer], content - merged.starts[layer]
            if held.kinds[at_held] != FILE:
                continue  # another name of a symbolic link
            files[ownership.owner[row]].append(_File(index.path(at), _facts(held, at_held)))
    return files


def _facts(index: LayerIndex, at: int) -> FileFacts:
    """A file's digests; of a captured one they are computed now."""
    facts = index.facts.get(at)
    if isinstance(facts, FileFacts):
        return facts
    return digests(index.pieces(at)) if at in index.captured else EMPTY


def _text(path: bytes) -> str:
    return terminal(path.decode("utf-8", "surrogateescape"))


def _captured(merged: Merged) -> Iterator[tuple[str, bytes]]:
    """The small files that say what is installed, but for lists of packages' files, by path."""
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at in index.captured:
            path = _text(index.path(at))
            if merged.visible[start + at] and path.endswith(("/os-release", ".cdx.json", ".metadata")):
                yield path, b"".join(index.pieces(at))


def _unowned(file: _File) -> Component:
    facts = file.facts
    parts: tuple[Component, ...] = ()
    if facts.shared:
        itself = _library(file, _NO_PACKAGE, [])
        parts = itself.parts if is_extension_module(file.path) else (itself,)
    return Component(
        "file", file.path, path=file.path, sha256=facts.sha256, sha1=facts.sha1, technique="filename",
        why_unknown="no package lists it", parts=parts,
    )  # fmt: skip


# Packages.


def _os_release(captured: Mapping[str, bytes]) -> dict[str, str]:
    """The fields of /etc/os-release, or of that which it leads to; none where there is none."""
    text = captured.get("etc/os-release") or captured.get("usr/lib/os-release") or b""
    rows = (line.partition("=") for line in text.decode("utf-8", "replace").splitlines())
    return {
        key.strip(): terminal(value.strip().strip("\"'"))[:200] for key, _, value in rows if key and value
    }


def _system(release: Mapping[str, str]) -> Component:
    return Component(
        "operating-system", release.get("ID", "linux"), release.get("VERSION_ID", ""),
        evidence=f"os-release: {release.get('PRETTY_NAME', '')}",
        why_unknown="" if release.get("VERSION_ID") else "os-release has no VERSION_ID",
    )  # fmt: skip


def _package(
    package: Package,
    system: Mapping[str, str],
    archives: Mapping[tuple[str, str], Wheel],
    *,
    n_files: int,
) -> Component:
    """A package by what its manager says of it."""
    name, version = package.name, package.version
    sha256 = archive = ""
    match package.manager:
        case Manager.DEB:
            ids = system.get("ID", "debian"), system.get("VERSION_ID", "")
            distribution = "-".join(part for part in ids if part)
            source, _, other = package.source.partition(" ")
            upstream = f"{source}@{other.strip('()')}" if other else source
            purl = purl_of(
                "deb", f"{ids[0]}/{name}".lower(), version,
                arch=package.architecture, distro=distribution, upstream=upstream,
            )  # fmt: skip
            evidence = "var/lib/dpkg/status"
        case Manager.PYTHON:
            purl = purl_of("pypi", normalised(name), version)
            evidence = f"{package.place}: RECORD and METADATA"
            if wheel := archives.get((normalised(name), version)):
                sha256, archive = wheel.sha256, wheel.filename
        case Manager.CONDA:
            purl, evidence = purl_of("conda", name.lower(), version), f"{package.place}: conda-meta"
        case Manager.ROCM:
            purl, evidence = purl_of("generic", f"rocm-{name}", version), f"files below {package.place}"
    listed = package.manager is not Manager.ROCM
    return Component(
        "library", name, version, purl, sha256=sha256, archive=archive, n_files=n_files,
        confidence=1.0 if listed else 0.6, technique="manifest-analysis" if listed else "filename",
        evidence=evidence, why_unknown="" if version else "its package manager lists none",
    )  # fmt: skip


# Libraries inside wheels.


def _declared(captured: Mapping[str, bytes]) -> dict[tuple[str, str, str], list[Component]]:
    """What wheels' own bills of materials list (PEP 770), by place, name and version of the wheel.

    Damaged ones list nothing.
    """
    listed: dict[tuple[str, str, str], list[Component]] = defaultdict(list)
    for path, text in sorted(captured.items()):
        place, _, info = path.rpartition("/sboms/")[0].rpartition("/")
        name, _, version = info.removesuffix(".dist-info").partition("-")
        if path.endswith(".cdx.json"):
            rows = dict.fromkeys(islice(_rows_of(text), _MOST_DECLARED))
            own = (row for row in rows if not row.purl.startswith("pkg:pypi/"))
            listed[place, normalised(name), version] += own
    return listed


def _rows_of(text: bytes) -> Iterator[Component]:
    try:
        document: Any = load(text)
    except ValueError:
        return
    for row in _components(document):
        fields = [row.get(key) for key in ("name", "version", "purl")]
        name, version, purl = (
            terminal(value)[:_MOST_CHARS] if isinstance(value, str) else "" for value in fields
        )
        if name and row.get("type") == "library":
            yield Component(
                "library", name, version, purl if purl.startswith("pkg:") else "",
                confidence=0.9, evidence="the wheel's own bill of materials lists it",
                why_unknown="" if version else "the wheel's own bill of materials gives none",
            )  # fmt: skip


def _components(node: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """The components of a document and of those, as deep as a document may be."""
    inner = node.get("components") if isinstance(node, dict) else None
    for row in inner if isinstance(inner, list) else ():
        if isinstance(row, dict):
            yield row
            yield from _components(row)


def _libraries(
    files: Sequence[_File], package: Package, declared: Sequence[Component]
) -> tuple[Component, ...]:
    """The native libraries of a wheel: each that is a file of its own, then what is declared but no file."""
    if package.manager not in (Manager.PYTHON, Manager.CONDA):
        return ()
    shared = sorted((file for file in files if file.facts.shared), key=lambda each: each.path)
    found = [_library(file, package, declared) for file in shared]
    kept = [each for each in found if each.parts or not is_extension_module(each.path)]
    used = {declared_as(file.path.rpartition("/")[2], declared) for file in shared}
    missing = [
        replace(row, purl=row.purl or purl_of("generic", row.name, row.version))
        for row in declared
        if row not in used
    ]
    return (*kept, *missing)


def _library(file: _File, package: Package, declared: Sequence[Component]) -> Component:
    """A shared library, with those whose code is linked into it."""
    facts, path = file.facts.shared, file.path
    assert facts  # of files that are none, nothing asks
    wheel = normalised(package.name), package.version
    own = identify(path.removeprefix(f"{package.place}/"), facts, wheel=wheel, declared=declared)
    why = f"{own.why_unknown}; its tables can't be read: {facts.unread}" if facts.unread else own.why_unknown
    return replace(
        own, path=path, sha256=file.facts.sha256, sha1=file.facts.sha1, build_id=facts.build_id,
        why_unknown=terminal(why) if not own.version else "", parts=inside(path, facts),
    )  # fmt: skip


# Models.


def _revisions(merged: Merged) -> dict[str, set[str]]:
    """The commits of each model in a cache of huggingface_hub's, by its folder: names of `snapshots/*`."""
    commits: dict[str, set[str]] = defaultdict(set)
    for index in merged.layers:
        for directory in dict.fromkeys(index.dirs):
            if b"models--" in directory:
                path = _text(directory) + "/"
                cache = _HUB_CACHE.match(path)
                if cache and (snapshot := _SNAPSHOT.match(path, cache.end())):
                    commits[cache[0]].add(snapshot["revision"])
    return commits


def _models(
    files: Sequence[_File], commits: Mapping[str, set[str]], captured: Mapping[str, bytes]
) -> tuple[list[Component], list[_File]]:
    """Models with their revisions, and the files that are no model's.

    A model is a folder of huggingface_hub's cache, or one that it filled (`local_dir`), where a file beside
    says which commit each file is of.
    """
    counts: Counter[tuple[str, str, str]] = Counter()  # name, revision, folder -> files
    left: list[_File] = []
    local = dict(_local_files(captured))
    for file in files:
        if cache := _HUB_CACHE.match(file.path):
            revision = ", ".join(sorted(commits.get(cache[0], ())))
            counts[f"{cache['owner']}/{cache['name']}", revision, cache[0].rstrip("/")] += 1
        elif file.path in local:
            folder, commit = local[file.path]
            counts[folder.rpartition("/")[2], commit, folder] += 1
        else:
            left.append(file)
    models = [
        Component(
            "machine-learning-model", name, revision,
            purl_of("huggingface", name, revision if _COMMIT.fullmatch(revision) else "")
            if "/" in name
            else "",
            path=folder, n_files=n_files, confidence=0.9, evidence="what huggingface_hub wrote beside it",
            why_unknown="" if revision else "its cache has no folder of a commit",
        )
        for (name, revision, folder), n_files in sorted(counts.items())
    ]  # fmt: skip
    return models, left


def _local_files(captured: Mapping[str, bytes]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Files that huggingface_hub brought into a folder, and those beside them: path -> folder and commit."""
    for path, text in captured.items():
        folder, inside, name = path.partition(_HUB_FOLDER)
        commit = text.partition(b"\n")[0].decode("ascii", "replace")
        if inside and path.endswith(".metadata") and _COMMIT.fullmatch(commit):
            yield path, (folder, commit)
            yield f"{folder}/{name.removesuffix('.metadata')}", (folder, commit)
