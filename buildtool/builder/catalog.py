"""Reads variants.yaml into a Catalog. Every error names the file, the line and the key.

The published JSON Schema (images/variants.schema.json) does the validation, so editors and this program
agree.
"""

import difflib
import json
from pathlib import Path

import jsonschema

from buildtool.errors import ConfigError
from buildtool.model import (
    Base,
    Bootstrap,
    Budget,
    Catalog,
    Registry,
    TorchBuild,
    TorchSource,
    Variant,
    parse_size,
)
from buildtool.shipped import IMAGES
from buildtool.yamltext import Document, Json, KeyPath, Limits, parse
from probes.shared.files import read_text

LIMITS = Limits(depth=12, nodes=10_000)  # legitimate catalogs stay far below
MAX_BYTES = 4 << 20  # ours has 8 kB


def load(path: Path = IMAGES / "variants.yaml") -> Catalog:
    """The catalog in a file. Raises ConfigError, with everything that the schema rejects in one message."""
    document = _read(path)
    schema = json.loads((IMAGES / "variants.schema.json").read_text(encoding="utf-8"))
    found = sorted(
        jsonschema.Draft202012Validator(schema).iter_errors(document.data),
        key=lambda e: list(map(str, e.path)),
    )
    if found:
        complaints = [document.complain(tuple(error.path), *_explain(error)) for error in found]
        raise ConfigError("\n".join(str(complaint) for complaint in complaints))
    return _catalog(document)


def _read(path: Path) -> Document:
    try:
        text = read_text(path, most_bytes=MAX_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", "give the file with --catalog FILE") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    document = parse(text, str(path), LIMITS)
    if document.data is None:
        raise ConfigError(
            f"{path}:1: the file is empty", "start from images/variants.yaml of this repository"
        )
    return document


def _explain(error: jsonschema.ValidationError) -> tuple[str, str]:
    """The error and the remedy for one finding of the schema."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    wanted = str(schema.get("description", ""))
    match error.validator:
        case "additionalProperties" if isinstance(error.instance, dict):
            allowed = list(schema.get("properties", {}))
            unknown = [key for key in error.instance if key not in allowed]
            close = difflib.get_close_matches(unknown[0], allowed, 1) if unknown else []
            hint = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(allowed)}"
            return f"unknown key {', '.join(map(repr, unknown))}", hint
        case "type":
            got = {
                dict: "a mapping",
                list: "a list",
                str: "text",
                bool: "a truth value",
                type(None): "nothing",
            }
            said = got.get(type(error.instance), f"the number {error.instance}")
            quote = (
                "quote it"
                if error.validator_value == "string" and not isinstance(error.instance, dict | list)
                else wanted
            )
            return f"expected {error.validator_value}, found {said}", quote
        case "required":
            return error.message.replace("'", "`"), "add it"
        case _:
            return error.message, wanted


def _catalog(document: Document) -> Catalog:
    data = document.data
    assert isinstance(data, dict)  # the schema reported it
    raw = data["variants"]
    assert isinstance(raw, dict)
    variants = tuple(_variant(name, value, document) for name, value in raw.items())
    default = _texts(data.get("default")) or tuple(raw)
    for index, name in enumerate(default):
        if name not in raw:
            raise document.complain(
                ("default", index), f"no variant {name!r}", f"there are: {', '.join(raw)}"
            )
    epoch = data["source_date_epoch"]
    assert isinstance(epoch, int | float)  # 1.0 is an integer to JSON Schema
    return Catalog(source_date_epoch=int(epoch), default=default, variants=variants)


def _variant(name: str, raw: Json, document: Document) -> Variant:
    assert isinstance(raw, dict)
    where: KeyPath = ("variants", name)
    labels = raw.get("labels") or {}
    budget = raw.get("budget") or {}
    assert isinstance(labels, dict)
    assert isinstance(budget, dict)
    torch = raw["torch"]
    assert isinstance(torch, list)
    sources = tuple(_torch(item, (*where, "torch", index), document) for index, item in enumerate(torch))
    _check_sources(sources, (*where, "torch"), document)
    return Variant(
        name=name,
        summary=str(raw["summary"]),
        dockerfile=_dockerfile(str(raw["dockerfile"]), where, document),
        python=str(raw["python"]),
        base=_bases(raw["base"], (*where, "base"), document),
        torch=sources,
        wheels=_texts(raw.get("wheels")),
        system_packages=_texts(raw.get("system_packages")),
        gpu_targets=_texts(raw.get("gpu_targets")),
        prune=bool(raw.get("prune", False)),
        labels=tuple((key, str(value)) for key, value in labels.items()),
        budget=Budget(
            unpacked_bytes=parse_size(str(budget["unpacked"])) if "unpacked" in budget else None,
            stored_bytes=parse_size(str(budget["stored"])) if "stored" in budget else None,
        ),
    )


def _check_sources(sources: tuple[TorchSource, ...], where: KeyPath, document: Document) -> None:
    """The lock file names a source only by its name; a build other than the first one's must be declared."""
    for index, source in enumerate(sources):
        if source.name in [earlier.name for earlier in sources[:index]]:
            raise document.complain(
                (*where, index, "name"), f"two sources are called {source.name!r}", "rename one of them"
            )
        if source.build is not sources[0].build and not source.fallback:
            raise document.complain(
                (*where, index, "build"),
                f"this source gives a {source.build.value} build, the first one a "
                f"{sources[0].build.value} build",
                "if that is meant, say so: fallback: true",
            )


def _dockerfile(folder: str, where: KeyPath, document: Document) -> Path:
    """The Dockerfile of a folder next to the catalog, else of one in `images/`."""
    for directory in (Path(document.name).parent, IMAGES):
        if (directory / folder / "Dockerfile").is_file():
            return (directory / folder / "Dockerfile").resolve()
    raise document.complain(
        (*where, "dockerfile"), f"there is no {folder}/Dockerfile next to the file or in images/"
    )


def _bases(raw: Json, where: KeyPath, document: Document) -> tuple[Base, ...]:
    """A list of bases. The lock file names a base only by its kind and its reference or suite."""
    assert isinstance(raw, list)
    found: list[Base] = []
    for index, item in enumerate(raw):
        assert isinstance(item, dict)
        if "registry" in item:
            found.append(Registry(str(item["registry"])))
            continue
        inner = item["bootstrap"]
        assert isinstance(inner, dict)
        suite = str(inner["suite"])
        if any(isinstance(base, Bootstrap) and base.suite == suite for base in found):
            raise document.complain(
                (*where, index, "bootstrap", "suite"),
                f"two bases in this list are made from {suite!r}",
                "put the packages of both into one of them, or take another suite",
            )
        lists = (_texts(inner.get(key)) for key in ("packages", "remove", "cut"))
        found.append(Bootstrap(suite, *lists))
    return tuple(found)


def _torch(raw: Json, where: KeyPath, document: Document) -> TorchSource:
    assert isinstance(raw, dict)
    return TorchSource(
        name=str(raw["name"]),
        build=TorchBuild(raw["build"]),
        require=_texts(raw.get("require")),
        index=str(raw["index"]) if raw.get("index") else None,
        fallback=bool(raw.get("fallback", False)),
        python=str(raw["python"]) if raw.get("python") else None,
        base=_bases(raw["base"], (*where, "base"), document) if raw.get("base") else (),
    )


def _texts(raw: Json) -> tuple[str, ...]:
    return tuple(str(item) for item in raw) if isinstance(raw, list) else ()
