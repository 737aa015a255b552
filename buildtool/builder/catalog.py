"""Reads variants.yaml into a Catalog. Every error names the file, the line and the key.

The published JSON Schema (images/variants.schema.json) does the validation, so editors and this program
agree.
"""

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import yaml

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

MAX_DEPTH = 12
MAX_NODES = 10_000  # an alias bomb unfolds to more; legitimate catalogs stay far below

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
KeyPath = tuple[str | int, ...]


@dataclass
class _Document:
    """Plain data, and the line of each key and item."""

    path: Path
    data: Json = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    nodes: int = 0

    def complain(self, where: KeyPath, what: str, hint: str = "") -> ConfigError:
        line = next((self.lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in self.lines), 1)
        key = ".".join(map(str, where)) or "the document"
        return ConfigError(f"{self.path}:{line}: {key}: {what}", hint)


def load(path: Path = IMAGES / "variants.yaml", *, gpu_targets: tuple[str, ...] = ()) -> Catalog:
    """The catalog in a file. Raises ConfigError, with everything that the schema rejects in one message.

    `gpu_targets` replace those that a variant names.
    """
    document = _read(path)
    schema = json.loads((IMAGES / "variants.schema.json").read_text())
    found = sorted(
        jsonschema.Draft202012Validator(schema).iter_errors(document.data),
        key=lambda e: list(map(str, e.path)),
    )
    if found:
        complaints = [document.complain(tuple(error.path), *_explain(error)) for error in found]
        raise ConfigError("\n".join(str(complaint) for complaint in complaints))
    return _catalog(document, gpu_targets)


def _read(path: Path) -> _Document:
    document = _Document(path)
    try:
        text = path.read_text(encoding="utf-8")
        _require_shallow(text, path)
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", "give the file with --catalog FILE") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if root is None:
        raise ConfigError(
            f"{path}:1: the file is empty", "start from images/variants.yaml of this repository"
        )
    document.data = _plain(root, (), document)
    return document


def _require_shallow(text: str, path: Path) -> None:
    """Raises ConfigError for deep nesting: libyaml's composer recurses in C, and ends the process.

    Raises what the library raises for what isn't YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH + 1:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError(f"{path}:{line}: nested too deep", "a catalog has a few levels only")


def _plain(node: yaml.Node, where: KeyPath, document: _Document) -> Json:
    """A YAML node as plain data; scalars as YAML 1.1 types them, duplicate keys refused."""
    document.nodes += 1
    document.lines.setdefault(where, node.start_mark.line + 1)
    if len(where) > MAX_DEPTH or document.nodes > MAX_NODES:
        raise document.complain(where, "nested too deep or aliased too often", "write the values out")
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, where, document)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*where, index), document) for index, item in enumerate(node.value)]
    return _scalar(node, where, document)


def _plain_mapping(node: yaml.MappingNode, where: KeyPath, document: _Document) -> Json:
    result: dict[str, Json] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{document.path}:{line}: a key is a list or a mapping", "keys are words")
        key = str(key_node.value)
        at = (*where, key)
        if key in result:
            first = document.lines[at]
            document.lines[at] = key_node.start_mark.line + 1
            raise document.complain(at, f"this key occurs twice (first on line {first})", "keep one of them")
        document.lines[at] = key_node.start_mark.line + 1
        result[key] = _plain(value_node, at, document)
    return result


def _scalar(node: yaml.Node, where: KeyPath, document: _Document) -> Json:
    text = str(node.value)
    try:
        match node.tag.rsplit(":", 1)[-1]:
            case "null":
                return None
            case "bool":
                return text.lower() in ("yes", "true", "on")
            case "int":
                return int(text.replace("_", ""), 0) if ":" not in text else float(text.replace(":", "."))
            case "float":
                return float(text.replace("_", ""))
            case _:
                return text
    except ValueError:
        raise document.complain(
            where, f"{text!r} is not a number that this tool reads", "quote it to keep it as text"
        ) from None


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


def _catalog(document: _Document, gpu_targets: tuple[str, ...]) -> Catalog:
    data = document.data
    assert isinstance(data, dict)  # the schema reported it
    raw = data["variants"]
    assert isinstance(raw, dict)
    variants = tuple(_variant(name, value, document, gpu_targets=gpu_targets) for name, value in raw.items())
    default = _texts(data.get("default")) or tuple(raw)
    for index, name in enumerate(default):
        if name not in raw:
            raise document.complain(
                ("default", index), f"no variant {name!r}", f"there are: {', '.join(raw)}"
            )
    epoch = data["source_date_epoch"]
    assert isinstance(epoch, int | float)  # 1.0 is an integer to JSON Schema
    return Catalog(source_date_epoch=int(epoch), default=default, variants=variants)


def _variant(name: str, raw: Json, document: _Document, *, gpu_targets: tuple[str, ...]) -> Variant:
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
    own_targets = _texts(raw.get("gpu_targets"))
    gpu_targets = gpu_targets if own_targets and gpu_targets else own_targets
    return Variant(
        name=name,
        summary=str(raw["summary"]),
        dockerfile=_dockerfile(str(raw["dockerfile"]), where, document),
        python=str(raw["python"]),
        base=_bases(raw["base"], (*where, "base"), document),
        torch=sources,
        wheels=_texts(raw.get("wheels")),
        system_packages=_texts(raw.get("system_packages")),
        gpu_targets=gpu_targets,
        prune=bool(raw.get("prune", False)),
        labels=tuple((key, str(value)) for key, value in labels.items()),
        budget=Budget(
            unpacked_bytes=parse_size(str(budget["unpacked"])) if "unpacked" in budget else None,
            stored_bytes=parse_size(str(budget["stored"])) if "stored" in budget else None,
        ),
    )


def _check_sources(sources: tuple[TorchSource, ...], where: KeyPath, document: _Document) -> None:
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


def _dockerfile(folder: str, where: KeyPath, document: _Document) -> Path:
    """The Dockerfile of a folder next to the catalog, else of one in `images/`."""
    for directory in (document.path.parent, IMAGES):
        if (directory / folder / "Dockerfile").is_file():
            return (directory / folder / "Dockerfile").resolve()
    raise document.complain(
        (*where, "dockerfile"), f"there is no {folder}/Dockerfile next to the file or in images/"
    )


def _bases(raw: Json, where: KeyPath, document: _Document) -> tuple[Base, ...]:
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


def _torch(raw: Json, where: KeyPath, document: _Document) -> TorchSource:
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
