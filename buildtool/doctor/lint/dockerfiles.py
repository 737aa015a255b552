"""Dockerfiles, by BuildKit's own parser: heredocs, ONBUILD and parser directives are as it reads them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from buildtool.doctor.lint import containers, python_code, shell
from buildtool.doctor.lint.rules import Fault, Word, extra_needed
from buildtool.doctor.lint.shell import Context

if TYPE_CHECKING:
    import dockerfile

SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY)(_|$)|^(HF|WANDB|OPENAI)_\w*(TOKEN|KEY)", re.I
)
HARMLESS = re.compile(r"^$|^\$|^(none|null|true|false|changeme|dummy|xxx+)$|file$|^/", re.I)
INSTRUCTIONS = frozenset({
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL",
    "MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"
})  # fmt: skip
MOST_CONTINUED = 2_000  # lines of one instruction; real ones have a hundred
ESCAPE = re.compile(r"^\s*#\s*escape\s*=\s*(\S)\s*$", re.I)
TAKES_HEREDOCS = re.compile(r"\s*(ONBUILD\s+)?(RUN|COPY|ADD)\s", re.I)
HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)(?P<end>[^\s<\"']+)\1")
DIRECTIVE = re.compile(r"^\s*#\s*\w+\s*=")


@dataclass
class Stage:
    """What is known of a stage while its instructions are read."""

    image: str = ""
    name: str = ""  # or its number
    below: "Stage | None" = None  # the stage that it begins as
    is_final: bool = False  # its layers are in the image that a build without --target makes
    faults: list[Fault] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)
    copied: list[str] = field(default_factory=list)  # destinations of COPY and ADD


def lint_dockerfile(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a Dockerfile."""
    with extra_needed():
        import dockerfile
    lines, escape = text.split("\n"), _escape(text)
    vast = _vast_instruction(lines, escape)
    if vast:
        yield Fault(vast, "too-large", f"an instruction of more than {MOST_CONTINUED} lines")
        return
    try:
        instructions = dockerfile.parse_string(text)
    except dockerfile.GoParseError as error:
        yield unreadable(str(error))
        return
    unknown = [one for one in instructions if (one.cmd or "").upper() not in INSTRUCTIONS]
    if unknown or not any((one.cmd or "").upper() == "FROM" for one in instructions):
        line = unknown[0].start_line if unknown else 1
        yield Fault(
            line, "unreadable", f"unknown instruction {unknown[0].cmd}" if unknown else "there is no FROM"
        )
        return
    yield from _stages(instructions, lines, escape, for_cpu=for_cpu)


def _vast_instruction(lines: Sequence[str], escape: str) -> int:
    """The line where an instruction begins that is too long for BuildKit's parser, whose time is quadratic
    in an instruction's lines, also in those of its heredocs; 0 where there is none.
    """
    begun = 1
    waiting: list[str] = []  # the words that end the heredocs of this instruction
    for number, line in enumerate(lines, 1):
        if number - begun > MOST_CONTINUED:
            return begun
        if waiting:
            if line.strip("\t") == waiting[0]:
                del waiting[0]
        elif TAKES_HEREDOCS.match(lines[begun - 1]):
            waiting = [found["end"] for found in HEREDOC.finditer(line)]
        if not waiting and not line.rstrip().endswith(escape):
            begun = number + 1
    return 0


def unreadable(said: str) -> Fault:
    """The parser's words as a fault, at the line that they name."""
    line = re.search(r"line (\d{1,9})\b", said)
    return Fault(int(line[1]) if line else 1, "unreadable", said[:200])


def _escape(text: str) -> str:
    for line in text.split("\n")[:20]:
        found = ESCAPE.match(line)
        if found:
            return found[1]
        if not DIRECTIVE.match(line):
            break
    return "\\"


def _stages(
    instructions: "Sequence[dockerfile.Command]", lines: list[str], escape: str, *, for_cpu: bool
) -> Iterator[Fault]:
    """The faults of each stage; those that aren't part of the final image say so."""
    found, arguments = [Stage()], dict[str, str]()
    named: dict[str, Stage] = {}
    for one in instructions:
        name, stage = one.cmd.upper(), found[-1]
        if name == "FROM" and one.value:
            image = _filled(one.value[0], arguments)
            below = named.get(image.lower())
            called = one.value[2] if len(one.value) == 3 else ""
            stage = Stage(below.image if below else image, called or str(len(found) - 1), below)
            found.append(stage)
            if not below:
                stage.faults += containers.unpinned_image(Word(image, one.start_line))
            if called:
                named[called.lower()] = stage
        elif name == "ARG" and not stage.image:
            arguments |= dict(part.partition("=")[::2] for part in one.value)
        else:
            stage.faults += _instruction(one, stage, lines, escape=escape, for_cpu=for_cpu)
    last: Stage | None = found[-1]
    while last:
        last.is_final, last = True, last.below
    for stage in found:
        for fault in stage.faults:
            apart = "" if stage.is_final else f" (stage {stage.name}: not part of the final image)"
            yield replace(fault, detail=fault.detail + apart)


def _filled(text: str, arguments: dict[str, str]) -> str:
    """An image's name with the defaults of ARGs filled in; a variable without one stays."""

    def value(match: re.Match[str]) -> str:
        return arguments.get(match[1], "").strip("\"'") or match[2] or match[0]

    return re.sub(r"\$\{?(\w+)(?::-([^}]*))?\}?", value, text)


def _instruction(
    one: "dockerfile.Command", stage: Stage, lines: list[str], *, escape: str, for_cpu: bool
) -> Iterator[Fault]:
    name = (one.sub_cmd or one.cmd).upper()
    if name in ("ENV", "ARG"):
        yield from _variables(one, name, stage)
    elif name in ("COPY", "ADD") and one.value:
        stage.copied.append(one.value[-1])
    elif name == "RUN":
        where = Context(
            image=stage.image,
            builds=True,
            caches=frozenset(_caches(one.flags)),
            variables=frozenset(stage.variables),
            for_cpu=for_cpu,
        )
        yield from _run(one, stage, lines, where=where, escape=escape)
    elif name in ("CMD", "ENTRYPOINT"):
        text = shell.exec_form(
            lines[one.start_line - 1].partition("[")[1] + lines[one.start_line - 1].partition("[")[2]
        )
        yield from _python_of(text or " ".join(one.value), one.start_line)


def _python_of(text: str, line: int) -> Iterator[Fault]:
    yield from shell.container_command_faults(text, line, Context(builds=True))


def _variables(one: "dockerfile.Command", name: str, stage: Stage) -> Iterator[Fault]:
    pairs = list(zip(one.value[::2], one.value[1::2], strict=False)) if name == "ENV" else []
    pairs = pairs or [(part.partition("=")[0], part.partition("=")[2]) for part in one.value]
    for key, raw in pairs:
        value = raw.strip("\"'")
        stage.variables.add(key)
        if key == "HSA_OVERRIDE_GFX_VERSION" and name == "ENV":
            yield Fault(one.start_line, "override-in-image", f"{key}={value}")
            yield from containers.override_value(Word(value, one.start_line))
        if SECRET.search(key) and not HARMLESS.search(value) and len(value) > 7:
            yield Fault(one.start_line, "secret-in-image", key)


def _caches(flags: Sequence[str]) -> Iterator[str]:
    for flag in flags:
        parts = dict(part.partition("=")[::2] for part in flag.removeprefix("--mount=").split(","))
        if flag.startswith("--mount=") and parts.get("type") == "cache":
            yield parts.get("target") or parts.get("dst") or parts.get("destination") or ""


def _run(
    one: "dockerfile.Command", stage: Stage, lines: list[str], *, where: Context, escape: str
) -> Iterator[Fault]:
    if one.heredocs:
        first = one.value[0].strip() if one.value else ""
        body, line = one.heredocs[0].content, one.start_line + 1
        program = re.split(r"\s*<<", first)[0].strip()
        if not program or re.match(r"(\S*/)?(ba|da|z)?sh\b", program):
            shebang = re.match(r"#!\s*\S*\bpython", body)
            yield from (
                python_code.lint_python(body, line) if shebang else shell.lint_script(body, line, where)
            )
        elif re.match(r"(\S*/)?python", program):
            yield from python_code.lint_python(body, line)
        return
    if one.json:
        yield from shell.lint_script(" ".join(one.value), one.start_line, where)
        return
    script = shell_text(lines[one.start_line - 1 : one.end_line], escape)
    yield from shell.lint_script(script, one.start_line, where)
    yield from _copies(script, one.start_line, stage)


def shell_text(lines: Sequence[str], escape: str) -> str:
    """RUN's lines as a shell sees them, each on its own line still: comments in between are left out."""
    shown = []
    for number, raw in enumerate(lines):
        line = raw.rstrip("\r")
        is_comment = number > 0 and (not line.strip() or line.lstrip().startswith("#"))
        if is_comment:
            shown.append("\\" if number + 1 < len(lines) else "")
            continue
        if escape != "\\" and line.rstrip().endswith(escape):
            line = line.rstrip()[: -len(escape)] + "\\"
        shown.append(line.rstrip() if line.rstrip().endswith("\\") else line)
    text = "\n".join(shown)
    head = re.match(r"\s*(?:ONBUILD\s+)?RUN\s+(?:\\\n\s*)*(?:--\w+(?:=\S+)?\s+(?:\\\n\s*)*)*", text, re.I)
    kept = head[0].count("\n") if head else 0
    return "\n" * kept + text[head.end() :] if head else text


def _copies(script: str, line: int, stage: Stage) -> Iterator[Fault]:
    """A layer that only changes the owner of what COPY brought."""
    words = script.split()
    if (
        words[:2] in (["chown", "-R"], ["chmod", "-R"])
        and "&&" not in words
        and ";" not in script
        and stage.copied
    ):
        yield Fault(line, "chown-copies", " ".join(words)[:80])
