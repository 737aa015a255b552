"""Shell scripts as commands with their words and lines, by tree-sitter's grammar of bash. Nothing is run.

A text that isn't bash still gives the commands around what the grammar doesn't know.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from buildtool.doctor.lint.rules import Word, extra_needed

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

    @property
    def line(self) -> int:
        """Where its first word stands; 0 for a command that only sets variables."""
        return self.words[0].line if self.words else 0

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
    with extra_needed():
        import tree_sitter
        import tree_sitter_bash
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


@dataclass(frozen=True)
class _Tree:
    """A script's nodes in order, their parents, and what follows each in a pipeline.

    These are collected in one pass: asking a node for its parent takes time in proportion to its siblings.
    """

    nodes: list["Node"]
    parents: dict[int, "Node"]
    following: dict[int, "Node"]


def commands_in(text: str, first_line: int = 1) -> list[Command]:
    """Every command of a script, in order, also those inside functions, branches and substitutions."""
    tree, commands = _read(text), []
    for node in tree.nodes:
        if node.type == "command":
            commands.append(_command(node, tree))
        elif node.type == "declaration_command":
            commands.append(_declaration(node))
    return [_moved(command, first_line - 1) for command in commands]


def comments_in(text: str) -> list[Word]:
    """Every comment of a script."""
    return [
        Word(_text(node), node.start_point[0] + 1) for node in _read(text).nodes if node.type == "comment"
    ]


def _read(text: str) -> _Tree:
    tree = _Tree([], {}, {})
    waiting = [_parser().parse(text.encode("utf-8", "replace")).root_node]
    while waiting and len(tree.nodes) < MOST_NODES:
        node = waiting.pop()
        children = node.children
        tree.nodes.append(node)
        tree.parents.update((child.id, node) for child in children)
        if node.type == "pipeline":
            named = [child for child in children if child.is_named]
            tree.following.update((before.id, after) for before, after in itertools.pairwise(named))
        waiting.extend(reversed(children))
    return tree


def _moved(command: Command, by: int) -> Command:
    def moved(words: tuple[Word, ...]) -> tuple[Word, ...]:
        return tuple(Word(word.text, word.line + by) for word in words)

    heredocs = tuple(Heredoc(heredoc.text, heredoc.line + by) for heredoc in command.heredocs)
    return Command(moved(command.settings), moved(command.words), heredocs, command.piped_into)


def _command(node: "Node", tree: _Tree) -> Command:
    settings, words = [], []
    for child in node.children:
        if child.type == "variable_assignment":
            settings.append(Word(_value(child), child.start_point[0] + 1))
        elif child.type not in ("heredoc_redirect", "herestring_redirect", "file_redirect", "comment"):
            words.append(Word(_value(child), child.start_point[0] + 1))
    holder = _holder(node, tree)
    redirects = [child for child in holder.children if child.type == "heredoc_redirect"]
    redirects += [child for child in node.children if child.type == "heredoc_redirect" and holder != node]
    return Command(
        tuple(settings), tuple(words), tuple(_heredocs(redirects)), _piped_into(holder, redirects, tree)
    )


def _declaration(node: "Node") -> Command:
    """`export A=b` and its like."""
    return Command((), tuple(Word(_value(child), child.start_point[0] + 1) for child in node.children))


def _holder(node: "Node", tree: _Tree) -> "Node":
    """The statement that redirects a command: also one around a list that the command ends."""
    inner, parent = node, tree.parents.get(node.id)
    while parent is not None and parent.type == "list" and parent.children[-1] == inner:
        inner, parent = parent, tree.parents.get(parent.id)
    return parent if parent is not None and parent.type == "redirected_statement" else node


def _heredocs(redirects: Sequence["Node"]) -> Iterator[Heredoc]:
    for redirect in redirects:
        for body in redirect.children:
            if body.type == "heredoc_body":
                yield Heredoc(_text(body), body.start_point[0] + 1)


def _piped_into(holder: "Node", redirects: Sequence["Node"], tree: _Tree) -> str:
    """The name of the command after this one in a pipeline."""
    pipes = [child for redirect in redirects for child in redirect.children if child.type == "pipeline"]
    if pipes:  # the grammar puts what follows `<<EOF |` inside the redirection
        return _first_name(pipes[0].children)
    after = tree.following.get(holder.id)
    return _first_name([after]) if after is not None else ""


def _first_name(nodes: Sequence["Node"]) -> str:
    """The name of the first command among nodes."""
    for node in nodes:
        inner = node.children[0] if node.type == "redirected_statement" else node
        if inner.type == "command":
            words = [
                Word(_value(child), 1) for child in inner.children if child.type != "variable_assignment"
            ]
            return Command((), tuple(words)).name
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
