"""10,000 hostile texts, each quoted for five readers, and the readers' own word for what they saw.

The readers are real: dash, bash and an interactive bash; BuildKit, through the engine; GitHub's Markdown
renderer and markdown-it; html5lib, which parses as browsers must. A changed word is a text that its reader
saw as anything but itself. Texts that can't be pasted are refused, which is counted apart: none of them may
be printable.
"""

import json
import subprocess
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import html5lib
import strict_readers as read
from board import Board
from hostile_texts import hostile_texts

from buildtool.audit.kinds import Pattern, command_naming
from probes.core.quoting import Unquotable, html, markdown, markdown_block, markdown_code, shell, terminal

COUNT = 10_000
TAG = "weir/bench-injection:latest"
LINES_A_BUILD = 2_500
# Prints how many words it was given, and the words: `\1` and `\2` are in no text that is pasted.
SHOW = r"""show() { printf '%d\001' "$#"; [ $# -eq 0 ] || printf '%s\001' "$@"; printf '\002'; }
"""
SHELLS = (["dash"], ["bash"], ["bash", "--norc", "--noprofile", "-i"])
TYPED = "set -o history -o histexpand\nexport PS1= PS2=\n: a first line for the history\n"
SIGNS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # Unicode's categories of what acts or can't be seen
TEMPLATES = {
    "paragraph": ("{}", ["p"]),
    "item": ("- {}", ["ul", "li"]),
    "heading": ("# {}", ["h1"]),
    "second line": ("x\n{}", ["p"]),
    "cell": ("|a|b|\n|-|-|\n| {} | z |", ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]),
}


def judge(board: Board, work: Path) -> None:
    """Ask every reader about every text."""
    texts = list(hostile_texts(COUNT))
    refused = {text for text in texts if not is_quotable(text)}
    printable = sum(text.isprintable() for text in refused)
    board.bar("injection: printable texts that are refused", printable, 0, "texts", refused=len(refused))
    pasted = list(islice(filter(is_quotable, hostile_texts(2 * COUNT)), COUNT))
    for program in SHELLS:
        said = spoken(program, map(shell, pasted), work)
        changed = sum(words != [text] for words, text in zip(said, pasted, strict=True))
        board.bar(f"injection: words changed by {' '.join(program)}", changed, 0, f"of {len(pasted)}")
    judge_dockerfile(board, pasted, work)
    board.bar("injection: words changed by Markdown renderers", sum(map(markdown_changes, texts)), 0, "words")
    board.bar("injection: words changed by an HTML parser", html_changes(texts), 0, f"of {2 * len(texts)}")
    acting = sum(unicodedata.category(char) in SIGNS for text in texts for char in terminal(text))
    board.bar("injection: characters that act on a terminal", acting, 0, "characters")


def is_quotable(text: str) -> bool:
    try:
        shell(text)
    except Unquotable:
        return False
    return True


def spoken(program: Sequence[str], quoted: Iterable[str], work: Path) -> list[list[str]]:
    """The words that a shell makes of each quoted text, in a directory whose files a pattern would find."""
    lines = "".join(f"show {word}\n" for word in quoted)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for name in ("a", "b", "x", ".hidden"):
            Path(folder, name).touch()
        script = (TYPED if "-i" in program else "") + SHOW + lines
        done = subprocess.run(
            program, input=script.encode(), capture_output=True, cwd=folder, timeout=300, check=False
        )
        left = {path.name for path in Path(folder).iterdir()}
    assert left == {"a", "b", "x", ".hidden"}, f"a text ran as a command: {left}"
    said = done.stdout.decode().split("\2")[:-1]
    return [words_of(part) for part in said] + [[]] * (lines.count("\n") - len(said))


def words_of(said: str) -> list[str]:
    count, *words = said.split("\1")[:-1]
    return words if len(words) == int(count) else []


def judge_dockerfile(board: Board, texts: Sequence[str], work: Path) -> None:
    """Remedies as instructions: what BuildKit keeps of each, and what a shell then makes of that."""
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode:
        board.waive("injection: words changed by BuildKit and the shell of its RUN", "no engine answers")
        return
    changed = 0
    cases = list(remedies(texts))
    for start in range(0, len(cases), LINES_A_BUILD):
        part = cases[start : start + LINES_A_BUILD]
        kept = kept_by_buildkit([line for line, _ in part], work)
        wanted = [line.removeprefix("ONBUILD ") for line, _ in part]
        changed += abs(len(kept) - len(wanted)) + sum(a != b for a, b in zip(kept, wanted, strict=False))
        commands = [line.removeprefix("RUN rm -rf ") for line in kept]
        said = spoken(["dash"], commands, work)
        changed += sum(a != [b] for a, (_, b) in zip(said, part, strict=False))
    board.bar("injection: words changed by BuildKit and the shell of its RUN", changed, 0, f"of {len(cases)}")


def remedies(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Instructions as a finding writes them, kept for later so that nothing runs; each with its one word."""

    def command(words: str) -> str:
        return f"ONBUILD RUN rm -rf {words}   # in the layer that installs"

    for number, text in enumerate(filter(None, texts)):
        if number % 2:
            yield command_naming([text.encode()], command), f"/{text}"
        else:
            yield command_naming([Pattern(text.encode(), b"so")], command), f"/{text}/*.so"


def kept_by_buildkit(lines: Sequence[str], work: Path) -> list[str]:
    """The ONBUILD instructions of an image that BuildKit makes of these lines."""
    with tempfile.TemporaryDirectory(dir=work) as context:
        Path(context, "Dockerfile").write_text("\n".join(["FROM scratch", "LABEL a=b", *lines, ""]))
        built = subprocess.run(
            ["docker", "build", "-q", "-t", TAG, context], capture_output=True, text=True, check=False
        )
    if built.returncode:
        return [f"no image: {built.stderr}"]
    try:
        shown = subprocess.run(
            ["docker", "image", "inspect", "--format={{json .Config.OnBuild}}", TAG],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        subprocess.run(["docker", "image", "rm", "-f", TAG], capture_output=True, check=True)
    return json.loads(shown.stdout)


def markdown_changes(text: str) -> int:
    """In how many of its places a text isn't rendered as itself, or is rendered as more than text."""
    shown = terminal(text)
    changed = 0
    for template, tags in TEMPLATES.values():
        if shown.strip():  # an empty heading or item is rendered in several ways, all of them empty
            for said, found, attributes in read.markdown_renderings(template.format(markdown(text))):
                changed += (
                    shown not in said or [tag for tag in found if tag != "code"] != tags or attributes != []
                )
    for said, found, attributes in read.markdown_renderings(f"- x {markdown_code(text)} y"):
        changed += said.strip() != f"x {shown} y" or attributes != [] or not {*found} <= {"ul", "li", "code"}
    for said, found, _ in read.markdown_renderings(f"{markdown_block(text, 'sh')}\n\nafter"):
        changed += terminal(text, keep="\n\t") not in said or found != ["pre", "code", "p"]
    return changed


def html_changes(texts: Sequence[str]) -> int:
    """How many texts and attributes of one large page aren't what was written."""
    page = "".join(f'<p title="{html(text)}">{html(text)}</p>' for text in texts)
    body = html5lib.parse(f"<!DOCTYPE html><title>t</title>{page}", namespaceHTMLElements=False).find("body")
    assert body is not None
    elements = list(body)
    wrong = abs(len(elements) - len(texts)) * 2
    for element, text in zip(elements, texts, strict=False):
        shown = terminal(text, keep="\n\t")
        wrong += len(element) + (element.tag != "p")
        wrong += (element.text or "") != shown
        wrong += dict(element.attrib) != {"title": shown}
    return wrong
