"""devcontainer.json: JSON with comments, whose runArgs are docker run's."""

from collections.abc import Iterator
from typing import Any

from buildtool.core.errors import ConfigError
from buildtool.core.yaml_text import Document, Limits, parse
from buildtool.doctor.lint import containers
from buildtool.doctor.lint.compose import unreadable
from buildtool.doctor.lint.fault import Fault, Word

LIMITS = Limits(depth=40, nodes=100_000)


def judged(text: str, name: str) -> Iterator[Fault]:
    """Every fault of a devcontainer."""
    try:
        document = parse(uncommented(text), name, LIMITS)
    except ConfigError as error:
        yield from unreadable(error, name)
        return
    data = document.data
    if not isinstance(data, dict):
        yield Fault(1, "unreadable", "there is no object")
        return
    yield from containers.judged(_started(data, document))


def _started(data: dict[str, Any], document: Document) -> containers.Started:
    raw = data.get("runArgs")
    words = (
        [Word(str(one), document.line(("runArgs", n))) for n, one in enumerate(raw)]
        if isinstance(raw, list)
        else []
    )
    options = containers.run_arguments(words)
    for key, option in (("capAdd", "cap-add"), ("securityOpt", "security-opt")):
        values = data.get(key)
        options += (
            [(option, Word(str(one), document.line((key, n)))) for n, one in enumerate(values)]
            if isinstance(values, list)
            else []
        )
    if data.get("privileged") is True:
        options.append(("privileged", Word("", document.line(("privileged",)))))
    image, variables = data.get("image"), data.get("containerEnv")
    environment = {
        str(key): Word(str(value), document.line(("containerEnv", key)))
        for key, value in (variables.items() if isinstance(variables, dict) else ())
    }
    for option, word in options:
        if option == "env":
            key, _, value = word.text.partition("=")
            environment[key] = Word(value, word.line)
    shown = Word(str(image), document.line(("image",))) if image else None
    return containers.Started(
        1, shown, tuple(options), environment, "", "build" in data or "dockerComposeFile" in data
    )


def uncommented(text: str) -> str:
    """JSON with comments as JSON that YAML reads: comments and tabs become spaces, lines stay."""
    kept, place, inside = [], 0, False
    while place < len(text):
        char, two = text[place], text[place : place + 2]
        if inside and char == "\\":
            kept.append(two)
            place += 2
        elif not inside and two in ("//", "/*"):
            end = text.find("\n" if two == "//" else "*/", place + 2)
            end = len(text) if end < 0 else end + (0 if two == "//" else 2)
            kept.append("\n" * text.count("\n", place, end))
            place = end
        else:
            inside ^= char == '"'
            kept.append(" " if char == "\t" and not inside else char)
            place += 1
    return "".join(kept)
