"""Which library a file is: by its build id, what its wheel declares, its name, and texts in its code.

`libraries.toml` holds what is known; what it doesn't know is named by its soname, with little confidence.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from probes.core.quoting import terminal

_DATA = Path(__file__).with_name("libraries.toml")
# auditwheel writes digits of the original's SHA-256 into a file's name; a rebuilt wheel has them twice
_FILE = re.compile(
    r"(?:lib)?(?P<stem>.+?)(?:-[0-9a-f]{8})*(?:-r0)?(?:-[0-9a-f]{8})*(?P<inner>\.[\d.]+)?\.so(?:\.(?P<version>[\w.]+))?"
)
_EXTENSION = re.compile(r"\.(?:cpython-\d+\w*(?:-[\w-]+)?|abi3|pypy\d+\w*-[\w-]+)\.so$")
_MOST_CHARS = 255  # of a file's name, as file systems have it; a tar may hold longer ones
_BY_TEXT = "binary-analysis"
_RELEASE = re.compile(r"\d+\.\d+[\w.]*")


@dataclass(frozen=True)
class Library:
    """A row of `libraries.toml`; `mark` as bytes, empty where there is none."""

    name: str
    files: frozenset[str] = frozenset()
    declared: frozenset[str] = frozenset()
    mark: bytes = b""
    version: re.Pattern[bytes] | None = None
    release_in_name: bool = False

    def version_in(self, text: bytes) -> str:
        """The release in the surroundings of the mark; empty for none."""
        found = self.version.search(text) if self.version else None
        groups = found.groups(b"") if found else ()
        return ".".join(group.decode("ascii", "replace") for group in groups if group)


@dataclass(frozen=True)
class ElfFacts:
    """What identifies a shared library.

    `marks` are the libraries whose code is in it, each with its release or an empty text. `confirmed`: its
    constants have the version of its file's name as a text.
    """

    soname: str = ""
    build_id: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    confirmed: bool = False
    unread: str = ""  # why its tables couldn't be read


@dataclass(frozen=True)
class Component:
    """Something that an image has. `kind` is a type of CycloneDX's, `technique` one of its techniques.

    `why_unknown` is the reason where there is no `version`. Digests are in hex, of the file at `path` or,
    for a wheel, of the `archive` that it was installed from. `n_files` are those that are its own.
    `confidence` is from 0 to 1, `evidence` what was seen.
    """

    kind: str
    name: str
    version: str = ""
    purl: str = ""
    path: str = ""
    sha256: str = ""
    sha1: str = ""
    archive: str = ""
    n_files: int = 0
    confidence: float = 1.0
    technique: str = "manifest-analysis"
    evidence: str = ""
    why_unknown: str = ""
    build_id: str = ""
    parts: tuple["Component", ...] = ()


def _load() -> tuple[tuple[Library, ...], Mapping[str, str]]:
    with _DATA.open("rb") as file:
        data = tomllib.load(file)
    return tuple(_library(row) for row in data["library"]), data["builds"]


def _library(row: Mapping[str, Any]) -> Library:
    version = row.get("version")
    return Library(
        row["name"],
        frozenset(row.get("files", ())),
        frozenset(row.get("declared", ())),
        row.get("mark", "").encode(),
        re.compile(version.encode()) if version else None,
        row.get("release_in_name", False),
    )


LIBRARIES, BUILDS = _load()


@cache
def _by_stem() -> Mapping[str, Library]:
    return {stem: library for library in LIBRARIES for stem in library.files}


def purl_of(kind: str, name: str, version: str = "", /, *, path: str = "", **qualifiers: str) -> str:
    """A package URL; `name` may have a namespace before a slash. Qualifiers without a value stay out."""
    words = "/".join(quote(part, safe="") for part in name.split("/"))
    at = f"@{quote(version, safe=':')}" if version else ""
    pairs = "&".join(f"{key}={quote(value, safe=':/')}" for key, value in sorted(qualifiers.items()) if value)
    below = f"#{quote(path, safe='/')}" if path else ""
    return f"pkg:{kind}/{words}{at}{f'?{pairs}' if pairs else ''}{below}"


def is_extension_module(path: str) -> bool:
    """Whether Python imports a file of this name."""
    return _EXTENSION.search(path.rpartition("/")[2][-_MOST_CHARS:]) is not None


def file_version(file_name: str) -> str:
    """The version in a library's file name, `1.5.7` of `libzstd-40ad5e7e.so.1.5.7`; empty for none."""
    match = _FILE.fullmatch(file_name) if len(file_name) <= _MOST_CHARS else None
    return (match["version"] or "") if match else ""


def identify(
    path: str, facts: ElfFacts, *, wheel: tuple[str, str], declared: Iterable[Component]
) -> Component:
    """What the library at a `path` in a wheel (name, version) is; the path is from the wheel's place on.

    `declared` is what the wheel lists.
    """
    folder, _, file = path.rpartition("/")
    stem = _stem(file)
    known = _by_stem().get(stem)
    shown = f"soname {terminal(facts.soname)}" if facts.soname else f"the file's name {file}"
    if purl := BUILDS.get(facts.build_id):
        name, _, version = unquote(purl.partition("?")[0].rpartition("/")[2]).partition("@")
        return Component(
            "library", name, version, purl, technique="hash-comparison", evidence=f"build id {facts.build_id}"
        )
    if row := declared_as(file, declared):
        name = known.name if known and not row.purl else row.name
        evidence = f"{shown}; the wheel's bill of materials lists {row.name}"
        purl = row.purl or purl_of("generic", name, row.version)
        return replace(row, name=name, purl=purl, confidence=0.95, evidence=evidence)
    if known:
        return _known(known, file_version(file), shown, facts)
    vendored = folder.endswith(".libs")
    if wheel[0] and not vendored and (not file_version(file) or _is_named_after(stem, wheel[0])):
        purl = purl_of("pypi", wheel[0], wheel[1], path=path)
        evidence = f"{shown}: without a version of its own, in the wheel's folder"
        return replace(_generic(f"lib{stem}", wheel[1], 0.8, evidence), purl=purl)
    version = file_version(file) if facts.confirmed else ""
    why = "the name is unknown to libraries.toml, and a file's version isn't its release"
    return _generic(stem, version, 0.6 if version else 0.3, shown, why)


def _generic(
    name: str, version: str, confidence: float, evidence: str, why: str = "", *, technique: str = "filename"
) -> Component:
    """A library that no registry has; `why` there is no version, where there is none."""
    return Component(
        "library", name, version, purl_of("generic", name, version), confidence=confidence,
        technique=technique, evidence=evidence, why_unknown="" if version else why,
    )  # fmt: skip


def _known(library: Library, in_name: str, shown: str, facts: ElfFacts) -> Component:
    """The component of a library by its row."""
    name, is_release = library.name, _RELEASE.fullmatch(in_name) is not None
    if version := dict(facts.marks).get(name, ""):
        return _generic(name, version, 0.9, f"{shown}; the text of its version", technique=_BY_TEXT)
    if facts.confirmed and is_release:
        evidence = f"{shown}; {in_name} is in its file's name and in its code"
        return _generic(name, in_name, 0.9, evidence, technique=_BY_TEXT)
    if library.release_in_name and is_release:
        return _generic(name, in_name, 0.7, f"{shown}; its file's name has the release")
    why = "its code has no text of its release, its build id isn't known, and its wheel declares nothing"
    return _generic(name, "", 0.6, shown, why)


def inside(path: str, facts: ElfFacts) -> tuple[Component, ...]:
    """The libraries that are linked into a file which is another one."""
    itself = _by_stem().get(_stem(path.rpartition("/")[2]))
    evidence, why = "a text among the constants that only its code has", "its code has no text of its release"
    parts = (
        _generic(name, version, 0.7 if version else 0.6, evidence, why, technique=_BY_TEXT)
        for name, version in sorted(facts.marks)
        if not itself or name != itself.name
    )
    return tuple(replace(part, path=path) for part in parts)


def _stem(file: str) -> str:
    """The part of a library's file name that says which it is, in lower case."""
    match = _FILE.fullmatch(file) if len(file) <= _MOST_CHARS else None
    return (match["stem"] if match else file).lower().rstrip("_")


def declared_as(file: str, declared: Iterable[Component]) -> Component | None:
    """What a wheel declares of a file of this name; None where it doesn't."""
    stem = _stem(file)
    known = _by_stem().get(stem)
    names = known.declared | {known.name} if known else frozenset()
    for row in declared:
        name = row.name.lower()
        if name in names or name.removeprefix("lib") == stem.removeprefix("lib"):
            return row
    return None


def _is_named_after(stem: str, wheel: str) -> bool:
    """Whether a word of a wheel's name begins the stem: cublas of nvidia-cublas begins cublasLt."""
    return any(len(word) >= 4 and stem.startswith(word) for word in re.split(r"[-_.]", wheel.lower()))
