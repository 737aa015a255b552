"""YAML from outside as plain data, with the line of each key, and back; the one module that imports yaml.

Bounded in depth and in the number of nodes after aliases are followed, so that a small file can't become
a large one. Every error names the file, the line and the key.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field

import yaml

from buildtool.core.errors import ConfigError
from probes.core.codec import Json

KeyPath = tuple[str | int, ...]

_SHOWN_CHARS = 120  # of either end of a text in a message
_NUMBER_CHARS = 64  # Python reads longer integers in other bases than ten, and then can't print them
MERGE = "<<"


@dataclass(frozen=True)
class Limits:
    """What is accepted: nesting, nodes (an alias counts as what it unfolds to), and YAML's merge key."""

    depth: int
    nodes: int
    merge: bool = False  # follow `<<`, as compose does


@dataclass
class Document:
    """Plain data, and the line of each key and item."""

    name: str
    data: Json = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    nodes: int = 0

    def line(self, where: KeyPath) -> int:
        """The line of a key, or of the nearest one around it."""
        return next((self.lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in self.lines), 1)

    def error(self, where: KeyPath, what: str, hint: str = "") -> ConfigError:
        """An error about a key."""
        key = ".".join(map(str, where)) or "the document"
        return ConfigError(f"{self.name}:{self.line(where)}: {_brief(key)}: {_brief(what)}", hint)


def _brief(text: str) -> str:
    """The beginning and end of a long text: messages repeat a file's keys and values, perhaps megabytes."""
    return text if len(text) <= 2 * _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ... {text[-_SHOWN_CHARS:]}"


def parse(text: str, name: str, limits: Limits) -> Document:
    """The one YAML document in a text; `data` is None for an empty one. Raises ConfigError."""
    document = Document(name)
    try:
        _require_shallow(text, name, limits)
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    if root is not None:
        document.data = _plain(root, (), document, limits=limits)
    return document


def require_bounded(text: str, name: str, limits: Limits) -> None:
    """Raises ConfigError where documents for another program nest too deep, or unfold to too many nodes.

    What isn't YAML passes: that program says so better.
    """
    with suppress(yaml.YAMLError):
        _require_shallow(text, name, limits)
        nodes: dict[int, int] = {}
        for root in yaml.compose_all(text, Loader=yaml.CSafeLoader):
            if root is not None and _unfolded(root, nodes, limits.nodes) > limits.nodes:
                raise ConfigError(
                    f"{name}: its aliases unfold to more than {limits.nodes:,} values, or to themselves",
                    "write the values out",
                )


def _unfolded(node: yaml.Node, known: dict[int, int], most: int) -> int:
    """How many nodes a node is with all its aliases followed; more than `most` where it is without end."""
    if id(node) not in known:
        known[id(node)] = most + 1  # until it is counted: it may hold itself
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        held = (
            node.value if isinstance(node, yaml.SequenceNode) else [each for pair in pairs for each in pair]
        )
        known[id(node)] = 1 + sum(_unfolded(each, known, most) for each in held)
    return known[id(node)]


def text_of(value: Json) -> str:
    """Plain data as a YAML document, keys in their order."""
    return str(yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=100))


def _require_shallow(text: str, name: str, limits: Limits) -> None:
    """Raises ConfigError for deep nesting: libyaml's composer recurses in C, and ends the process.

    Raises what the library raises for what isn't YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > limits.depth + 1:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError(f"{name}:{line}: nested too deep", "such a file has a few levels only")


def _plain(node: yaml.Node, where: KeyPath, document: Document, *, limits: Limits) -> Json:
    """A YAML node as plain data; scalars as YAML 1.1 types them, duplicate keys refused."""
    document.nodes += 1
    document.lines.setdefault(where, node.start_mark.line + 1)
    if len(where) > limits.depth or document.nodes > limits.nodes:
        raise document.error(where, "nested too deep or aliased too often", "write the values out")
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, where, document, limits=limits)
    if isinstance(node, yaml.SequenceNode):
        return [
            _plain(item, (*where, index), document, limits=limits) for index, item in enumerate(node.value)
        ]
    return _scalar(node, where, document)


def _plain_mapping(node: yaml.MappingNode, where: KeyPath, document: Document, *, limits: Limits) -> Json:
    result: dict[str, Json] = {}
    merged: dict[str, Json] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{document.name}:{line}: a key is a list or a mapping", "keys are words")
        key = str(key_node.value)
        at = (*where, key)
        if limits.merge and key == MERGE:
            merged |= _merged(_plain(value_node, at, document, limits=limits))
            continue
        if key in result:
            first = document.lines[at]
            document.lines[at] = key_node.start_mark.line + 1
            raise document.error(at, f"this key occurs twice (first on line {first})", "keep one of them")
        document.lines[at] = key_node.start_mark.line + 1
        result[key] = _plain(value_node, at, document, limits=limits)
    return merged | result if merged else result


def _merged(value: Json) -> dict[str, Json]:
    """What a merge key adds: a mapping, or a list of them, in which earlier ones take precedence."""
    result: dict[str, Json] = {}
    for mapping in value if isinstance(value, list) else [value]:
        result = (mapping | result) if isinstance(mapping, dict) else result
    return result


def _scalar(node: yaml.Node, where: KeyPath, document: Document) -> Json:
    text, kind = str(node.value), node.tag.rsplit(":", 1)[-1]
    try:
        if kind in ("int", "float") and len(text) > _NUMBER_CHARS:
            raise ValueError
        match kind:
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
        raise document.error(
            where, f"{text!r} is not a number that this tool reads", "quote it to keep it as text"
        ) from None


# ---- writing -----------------------------------------------------------------------------------------

# text to every reader, YAML 1.1 and 1.2, whether or not it resolves numbers, dates and truth values otherwise
_TEXT = re.compile(r"(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/][A-Za-z0-9./_-]*")


class _Dumper(yaml.SafeDumper):
    """Texts that might be read as anything else stand in quotes; several lines are a block."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's own
        """Write a value again where it occurs again."""
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _TEXT.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def dump(value: Json) -> str:
    """Plain data as one YAML document, keys in their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return text
