"""Shell scripts as commands with their words and lines, by tree-sitter's grammar of bash. Nothing is run.

A text that isn't bash still gives the commands around what the grammar doesn't know.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from buildtool.doctor.lint.fault import Word
from buildtool.errors import EnvironmentMissing

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MOST_NODES = 400_000
NO_NAME = Word("", 0)


@dataclass(frozen=True)
class Heredoc:
    """A text fed to a command, which begins at a line."""

    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """One command: the settings in front, its words, and what is fed to it."""

    settings: tuple[Word, ...]  # NAME=value
    words: tuple[Word, ...]
    heredocs: tuple[Heredoc, ...] = ()
    piped_into: str = ""  # the name of the next command of a pipeline
    alone: bool = False  # nothing else is in the script

    @property
    def name(self) -> str:
        """The program's own name, without sudo, exec, time and the like in front."""
        return (self.program() or [NO_NAME])[0].text.rpartition("/")[2]

    def program(self) -> list[Word]:
        """The words from the program's name on."""
        words = list(self.words)
        while words and words[0].text in ("sudo", "exec", "time", "nohup", "command", "env", "then", "do"):
            words = words[1:]
            while words and (words[0].text.startswith("-") or "=" in words[0].text):
                words = words[1:]
        return words

    def arguments(self) -> list[Word]:
        """The words after the program's name."""
        return self.program()[1:]


@cache
def _parser() -> "Parser":
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise EnvironmentMissing(
            f"--lint needs {error.name}, which is not installed", "pip install 'gpu-weir[lint]'"
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def commands_in(text: str, first_line: int = 1) -> list[Command]:
    """Every command of a script, in order, also those inside functions, branches and substitutions."""
    found = []
    for node, _ in _nodes(text):
        if node.type == "command":
            found.append(_command(node))
        elif node.type == "declaration_command":
            found.append(_declaration(node))
    alone = len(found) == 1
    return [_moved(command, first_line - 1, alone=alone) for command in found]


def comments_in(text: str) -> list[Word]:
    """Every comment of a script."""
    return [Word(_text(node), line) for node, line in _nodes(text) if node.type == "comment"]


def _nodes(text: str) -> Iterator[tuple["Node", int]]:
    tree = _parser().parse(text.encode("utf-8", "replace"))
    waiting, seen = [tree.root_node], 0
    while waiting and seen < MOST_NODES:
        node = waiting.pop()
        seen += 1
        yield node, node.start_point[0] + 1
        waiting.extend(reversed(node.children))


def _moved(command: Command, by: int, *, alone: bool) -> Command:
    def moved(words: tuple[Word, ...]) -> tuple[Word, ...]:
        return tuple(Word(word.text, word.line + by) for word in words)

    heredocs = tuple(Heredoc(one.text, one.line + by) for one in command.heredocs)
    return Command(moved(command.settings), moved(command.words), heredocs, command.piped_into, alone=alone)


def _command(node: "Node") -> Command:
    settings, words = [], []
    for child in node.children:
        if child.type == "variable_assignment":
            settings.append(Word(_value(child), child.start_point[0] + 1))
        elif child.type not in ("heredoc_redirect", "herestring_redirect", "file_redirect", "comment"):
            words.append(Word(_value(child), child.start_point[0] + 1))
    return Command(tuple(settings), tuple(words), tuple(_heredocs(node)), _piped_into(node))


def _declaration(node: "Node") -> Command:
    """`export A=b` and its like."""
    return Command((), tuple(Word(_value(child), child.start_point[0] + 1) for child in node.children))


def _holder(node: "Node") -> "Node":
    """The statement that redirects a command: also one around a list that the command ends."""
    inner, parent = node, node.parent
    while parent is not None and parent.type == "list" and parent.children[-1] == inner:
        inner, parent = parent, parent.parent
    return parent if parent is not None and parent.type == "redirected_statement" else node


def _heredocs(node: "Node") -> Iterator[Heredoc]:
    for child in {one.id: one for one in (*node.children, *_holder(node).children)}.values():
        if child.type == "heredoc_redirect":
            for body in child.children:
                if body.type == "heredoc_body":
                    yield Heredoc(_text(body), body.start_point[0] + 1)


def _piped_into(node: "Node") -> str:
    """The name of the command after this one in a pipeline."""
    inner = _holder(node)
    fed = [child for child in inner.children if child.type == "heredoc_redirect"]
    pipes = [child for one in fed for child in one.children if child.type == "pipeline"]
    if pipes:  # the grammar puts what follows `<<EOF |` inside the redirection
        return _first_name(pipes[0].children)
    parent = inner.parent
    if parent is None or parent.type != "pipeline":
        return ""
    return _first_name([one for one in parent.children if one.start_byte > inner.start_byte and one.is_named])


def _first_name(nodes: Sequence["Node"]) -> str:
    """The name of the first command among nodes."""
    for node in nodes:
        inner = node.children[0] if node.type == "redirected_statement" else node
        if inner.type == "command":
            return _command(inner).name
    return ""


def _value(node: "Node") -> str:
    """The text of a word without its quotes."""
    match node.type:
        case "string":
            return _text(node)[1:-1]
        case "raw_string":
            return _text(node)[1:-1]
        case "concatenation" | "command_name" | "variable_assignment" if node.children:
            return "".join(_value(child) for child in node.children)
        case _:
            return _text(node).replace("\\\n", "")


def _text(node: "Node") -> str:
    return (node.text or b"").decode("utf-8", "replace")
