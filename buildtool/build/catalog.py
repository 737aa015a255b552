"""Reads variants.yaml into a Catalog. Every error names the file, the line and the key.

The published JSON Schema (images/variants.schema.json) does the validation, so editors and this program
agree.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buildtool.core.errors import ConfigError
from buildtool.core.model import Base, Bootstrap, Budget, Catalog, Registry, TorchSource, Variant, parse_size
from buildtool.core.shipped import CATALOG, IMAGES
from buildtool.core.yaml_text import Document, KeyPath, Limits, parse
from buildtool.engine.reference import parse_reference
from probes.core.codec import decode
from probes.core.files import read_text
from probes.core.spelling import guess

if TYPE_CHECKING:
    import jsonschema

LIMITS = Limits(depth=12, nodes=10_000)  # legitimate catalogs stay far below
MAX_BYTES = 4 << 20  # ours has 8 kB
_FAULTS, _KEYS = 20, 8  # the most that a message names
Fields = dict[str, Any]  # an object of the file; the schema has checked its types


def load(path: Path = CATALOG) -> Catalog:
    """The catalog in a file. Raises ConfigError, with everything that the schema rejects in one message."""
    import jsonschema  # here: an audit needs no catalog

    document = _read(path)
    schema = json.loads((IMAGES / "variants.schema.json").read_text(encoding="utf-8"))
    faults = sorted(
        jsonschema.Draft202012Validator(schema).iter_errors(document.data),
        key=lambda e: list(map(str, e.path)),
    )
    if faults:
        messages = [str(document.error(tuple(error.path), *_explain(error))) for error in faults[:_FAULTS]]
        more = [f"... and {len(faults) - _FAULTS} more faults"] if len(faults) > _FAULTS else []
        raise ConfigError("\n".join([*messages, *more]))
    return _catalog(document)


def _read(path: Path) -> Document:
    try:
        text = read_text(path, most_bytes=MAX_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", "give the file with --catalog FILE") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"can't read {path}: {why}", "check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text", "save it as UTF-8") from error
    document = parse(text, str(path), LIMITS)
    if document.data is None:
        raise ConfigError(
            f"{path}:1: the file is empty", "start from images/variants.yaml of this repository"
        )
    return document


def _explain(error: "jsonschema.ValidationError") -> tuple[str, str]:
    """The message and the hint for one error of the schema's."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    wanted = str(schema.get("description", ""))
    match error.validator:
        case "additionalProperties" if isinstance(error.instance, dict):
            allowed = list(schema.get("properties", {}))
            unknown = [key for key in error.instance if key not in allowed]
            close = difflib.get_close_matches(unknown[0], allowed, 1) if unknown else []
            hint = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(allowed)}"
            named = map(repr, unknown[:_KEYS])
            more = [f"{len(unknown) - _KEYS} more"] if len(unknown) > _KEYS else []
            return f"unknown key {', '.join([*named, *more])}", hint
        case "type":
            kinds = {
                dict: "a mapping",
                list: "a list",
                str: "text",
                bool: "a truth value",
                type(None): "nothing",
            }
            kind = kinds.get(type(error.instance), f"the number {error.instance}")
            quote = (
                "quote it"
                if error.validator_value == "string" and not isinstance(error.instance, dict | list)
                else wanted
            )
            return f"expected {error.validator_value}, found {kind}", quote
        case "pattern":
            return f"{error.instance!r} does not match what may stand here", wanted
        case "required":
            return error.message.replace("'", "`"), "add it"
        case _:
            return error.message, wanted


def _catalog(document: Document) -> Catalog:
    data = cast(Fields, document.data)
    raw = data["variants"]
    variants = tuple(_variant(name, fields, document) for name, fields in raw.items())
    default = tuple(data.get("default") or raw)
    for index, name in enumerate(default):
        if name not in raw:
            raise document.error(
                ("default", index),
                f"no variant {name!r}",
                f"{guess(name, raw)}there are: {', '.join(raw)}",
            )
    # 1.0 is an integer to JSON Schema
    return Catalog(source_date_epoch=int(data["source_date_epoch"]), default=default, variants=variants)


def _variant(name: str, raw: Fields, document: Document) -> Variant:
    where: KeyPath = ("variants", name)
    sources = tuple(
        _torch(item, (*where, "torch", index), document) for index, item in enumerate(raw["torch"])
    )
    _check_sources(sources, (*where, "torch"), document)
    budget = {key: parse_size(text) for key, text in raw.get("budget", {}).items()}
    return Variant(
        name=name,
        summary=raw["summary"],
        python=raw["python"],
        base=_bases(raw["base"], (*where, "base"), document),
        torch=sources,
        wheels=tuple(raw.get("wheels", ())),
        system_packages=tuple(raw.get("system_packages", ())),
        gpu_targets=tuple(raw.get("gpu_targets", ())),
        prune=raw.get("prune", False),
        labels=tuple(raw.get("labels", {}).items()),
        budget=Budget(unpacked_bytes=budget.get("unpacked"), stored_bytes=budget.get("stored")),
        dockerfile=_dockerfile(raw["dockerfile"], where, document) if "dockerfile" in raw else None,
    )


def _check_sources(sources: tuple[TorchSource, ...], where: KeyPath, document: Document) -> None:
    """The lock file names a source only by its name; a build other than the first one's must be declared."""
    for index, source in enumerate(sources):
        if source.name in [earlier.name for earlier in sources[:index]]:
            raise document.error(
                (*where, index, "name"), f"two sources are called {source.name!r}", "rename one of them"
            )
        if source.build is not sources[0].build and not source.fallback:
            raise document.error(
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
    raise document.error(
        (*where, "dockerfile"),
        f"there is no {folder}/Dockerfile next to the file or in images/",
        "leave `dockerfile` out for an image without one: root file system, wheels and service, a layer each",
    )


def _bases(raw: Sequence[Fields], where: KeyPath, document: Document) -> tuple[Base, ...]:
    """A list of bases. The lock file names a base only by its kind and its reference or suite."""
    bases: list[Base] = []
    for index, item in enumerate(raw):
        base = _base(item, (*where, index), document)
        suites = [earlier.suite for earlier in bases if isinstance(earlier, Bootstrap)]
        if isinstance(base, Bootstrap) and base.suite in suites:
            raise document.error(
                (*where, index, "bootstrap", "suite"),
                f"two bases in this list are made from {base.suite!r}",
                "put the packages of both into one of them, or take another suite",
            )
        bases.append(base)
    return tuple(bases)


def _base(raw: Fields, where: KeyPath, document: Document) -> Base:
    if "bootstrap" in raw:
        return decode(Bootstrap, raw["bootstrap"])
    try:
        parse_reference(raw["registry"])
    except ConfigError as error:
        raise document.error((*where, "registry"), error.message, error.hint) from error
    return Registry(raw["registry"])


def _torch(raw: Fields, where: KeyPath, document: Document) -> TorchSource:
    source = decode(TorchSource, {**raw, "base": []})
    return replace(source, base=_bases(raw.get("base", ()), (*where, "base"), document))
