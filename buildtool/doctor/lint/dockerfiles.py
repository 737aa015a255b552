"""Rules for Dockerfiles, read by BuildKit's own parser: with heredocs, ONBUILD and parser directives.

A rule for an instruction joins `instruction_checks`; one for a command of RUN belongs in `shell`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from buildtool.doctor.lint.containers import override_value, unpinned_image
from buildtool.doctor.lint.python_code import lint_python
from buildtool.doctor.lint.rules import Checks, Fault, Word, extra_needed
from buildtool.doctor.lint.shell import Context, container_command_faults, exec_form, lint_script

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
MOST_LINES = 2_000  # lines of one instruction; real ones have a hundred
ESCAPE = re.compile(r"^\s*#\s*escape\s*=\s*(\S)\s*$", re.I)
TAKES_HEREDOCS = re.compile(r"\s*(ONBUILD\s+)?(RUN|COPY|ADD)\s", re.I)
HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)(?P<end>[^\s<\"']+)\1")
DIRECTIVE = re.compile(r"^\s*#\s*\w+\s*=")


@dataclass
class Stage:
    """What is known of a stage while its instructions are read."""

    image: str = ""
    name: str = ""  # or its number
    parent: "Stage | None" = None  # the stage that it begins from
    is_final: bool = False  # its layers are in the image that a build without --target makes
    faults: list[Fault] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)  # set by ENV and ARG so far
    copied: list[str] = field(default_factory=list)  # destinations of COPY and ADD so far


@dataclass(frozen=True)
class Instruction:
    """An instruction other than FROM; for ONBUILD, the one that it holds."""

    name: str  # RUN, in capitals
    parsed: "dockerfile.Command"
    source: str  # its lines, as they stand in the file
    escape: str  # the character that continues a line
    for_cpu: bool  # the file's name says that it is for CPUs

    @property
    def line(self) -> int:
        """Return the line where the instruction begins."""
        return int(self.parsed.start_line)

    @property
    def settings(self) -> list[tuple[str, str]]:
        """Names and values of an ENV or ARG; none for other instructions."""
        values = self.parsed.value if self.name in ("ENV", "ARG") else ()
        pairs = list(zip(values[::2], values[1::2], strict=False)) if self.name == "ENV" else []
        pairs = pairs or [(text.partition("=")[0], text.partition("=")[2]) for text in values]
        return [(name, value.strip("\"'")) for name, value in pairs]

    @property
    def caches(self) -> frozenset[str]:
        """The targets of RUN's cache mounts."""
        mounts = [flag.removeprefix("--mount=") for flag in self.parsed.flags if flag.startswith("--mount=")]
        keys = [dict(part.partition("=")[::2] for part in mount.split(",")) for mount in mounts]
        return frozenset(
            mount.get("target") or mount.get("dst") or mount.get("destination") or ""
            for mount in keys
            if mount.get("type") == "cache"
        )


instruction_checks = Checks[[Instruction, Stage]]()  # the stage as the instructions before have left it


def lint_dockerfile(text: str, *, for_cpu: bool) -> Iterator[Fault]:
    """Every fault of a Dockerfile."""
    with extra_needed():
        import dockerfile
    lines, escape = text.split("\n"), _escape(text)
    too_long = _overlong_instruction(lines, escape)
    if too_long:
        yield Fault(too_long, "too-large", f"an instruction of more than {MOST_LINES} lines")
        return
    try:
        commands = dockerfile.parse_string(text)
    except dockerfile.GoParseError as error:
        yield _unreadable(str(error))
        return
    unknown = next((each for each in commands if (each.cmd or "").upper() not in INSTRUCTIONS), None)
    if unknown:
        yield Fault(unknown.start_line, "unreadable", f"unknown instruction {unknown.cmd}")
    elif not any((each.cmd or "").upper() == "FROM" for each in commands):
        yield Fault(1, "unreadable", "there is no FROM")
    else:
        yield from _stages(commands, lines, escape, for_cpu=for_cpu)


def _overlong_instruction(lines: Sequence[str], escape: str) -> int:
    """The line where an instruction of more than MOST_LINES lines begins; 0 where there is none.

    The parser's time is quadratic in an instruction's lines, those of its heredocs included.
    """
    start = 1
    waiting: list[str] = []  # the words that end the heredocs of this instruction
    for number, line in enumerate(lines, 1):
        if number - start > MOST_LINES:
            return start
        if waiting:
            if line.strip("\t") == waiting[0]:
                del waiting[0]
        elif TAKES_HEREDOCS.match(lines[start - 1]):
            waiting = [match["end"] for match in HEREDOC.finditer(line)]
        if not waiting and not line.rstrip().endswith(escape):
            start = number + 1
    return 0


def _unreadable(message: str) -> Fault:
    """The parser's error as a fault, at the line that it names."""
    match = re.search(r"line (\d{1,9})\b", message)
    return Fault(int(match[1]) if match else 1, "unreadable", message[:200])


def _escape(text: str) -> str:
    """The character that continues a line, by the parser directive `escape`."""
    for line in text.split("\n")[:20]:
        match = ESCAPE.match(line)
        if match:
            return match[1]
        if not DIRECTIVE.match(line):
            break
    return "\\"


def _stages(
    commands: "Sequence[dockerfile.Command]", lines: list[str], escape: str, *, for_cpu: bool
) -> Iterator[Fault]:
    """The faults of all stages; the detail says which stages aren't part of the final image."""
    stages, arguments = [Stage()], dict[str, str]()
    by_name: dict[str, Stage] = {}
    for command in commands:
        name, stage = command.cmd.upper(), stages[-1]
        if name == "FROM" and command.value:
            image = _filled(command.value[0], arguments)
            parent = by_name.get(image.lower())
            stage_name = command.value[2] if len(command.value) == 3 else ""
            stage = Stage(parent.image if parent else image, stage_name or str(len(stages) - 1), parent)
            stages.append(stage)
            if not parent:
                stage.faults += unpinned_image(Word(image, command.start_line))
            if stage_name:
                by_name[stage_name.lower()] = stage
        elif name == "ARG" and not stage.image:
            arguments |= dict(part.partition("=")[::2] for part in command.value)
        else:
            source = "\n".join(lines[command.start_line - 1 : command.end_line])
            instruction = Instruction(
                (command.sub_cmd or command.cmd).upper(), command, source, escape, for_cpu
            )
            stage.faults += instruction_checks(instruction, stage)
            stage.variables |= {key for key, _ in instruction.settings}
            if instruction.name in ("COPY", "ADD") and command.value:
                stage.copied.append(command.value[-1])
    last: Stage | None = stages[-1]
    while last:
        last.is_final, last = True, last.parent
    for stage in stages:
        for fault in stage.faults:
            apart = "" if stage.is_final else f" (stage {stage.name}: not part of the final image)"
            yield replace(fault, detail=fault.detail + apart)


def _filled(text: str, arguments: dict[str, str]) -> str:
    """An image's name with the defaults of ARGs filled in; a variable without one stays."""

    def value(match: re.Match[str]) -> str:
        return arguments.get(match[1], "").strip("\"'") or match[2] or match[0]

    return re.sub(r"\$\{?(\w+)(?::-([^}]*))?\}?", value, text)


# ---- rules -------------------------------------------------------------------------------------------


@instruction_checks.add
def _override(instruction: Instruction, _stage: Stage) -> Iterator[Fault]:
    for name, value in instruction.settings:
        if name == "HSA_OVERRIDE_GFX_VERSION" and instruction.name == "ENV":
            yield Fault(instruction.line, "override-in-image", f"{name}={value}")
            yield from override_value(Word(value, instruction.line))


@instruction_checks.add
def _secrets(instruction: Instruction, _stage: Stage) -> Iterator[Fault]:
    for name, value in instruction.settings:
        if SECRET.search(name) and not HARMLESS.search(value) and len(value) > 7:
            yield Fault(instruction.line, "secret-in-image", name)


@instruction_checks.add
def _command(instruction: Instruction, _stage: Stage) -> Iterator[Fault]:
    """The command that the image starts with."""
    if instruction.name in ("CMD", "ENTRYPOINT"):
        first = instruction.source.partition("\n")[0]
        words = exec_form("".join(first.partition("[")[1:]))
        text = words or " ".join(instruction.parsed.value)
        yield from container_command_faults(text, instruction.line, Context(builds=True))


@instruction_checks.add
def _run(instruction: Instruction, stage: Stage) -> Iterator[Fault]:
    """Everything that scripts can do wrong."""
    if instruction.name != "RUN":
        return
    context = Context(
        image=stage.image,
        builds=True,
        caches=instruction.caches,
        variables=frozenset(stage.variables),
        for_cpu=instruction.for_cpu,
    )
    parsed = instruction.parsed
    if parsed.heredocs:
        yield from _heredoc(instruction, context)
    elif parsed.json:
        yield from lint_script(" ".join(parsed.value), instruction.line, context)
    else:
        script = shell_text(instruction.source.split("\n"), instruction.escape)
        yield from lint_script(script, instruction.line, context)


def _heredoc(instruction: Instruction, context: Context) -> Iterator[Fault]:
    """The faults of RUN's first heredoc, by the program that reads it."""
    words = instruction.parsed.value
    program = re.split(r"\s*<<", words[0].strip())[0].strip() if words else ""
    body, line = instruction.parsed.heredocs[0].content, instruction.line + 1
    if not program or re.match(r"(\S*/)?(ba|da|z)?sh\b", program):
        is_python = re.match(r"#!\s*\S*\bpython", body)
        yield from lint_python(body, line) if is_python else lint_script(body, line, context)
    elif re.match(r"(\S*/)?python", program):
        yield from lint_python(body, line)


@instruction_checks.add
def _owner(instruction: Instruction, stage: Stage) -> Iterator[Fault]:
    """A layer that only changes the owner or mode of what COPY brought."""
    parsed = instruction.parsed
    if instruction.name != "RUN" or parsed.heredocs or parsed.json or not stage.copied:
        return
    script = shell_text(instruction.source.split("\n"), instruction.escape)
    words = script.split()
    alone = "&&" not in words and ";" not in script
    if words[:2] in (["chown", "-R"], ["chmod", "-R"]) and alone:
        yield Fault(instruction.line, "chown-copies", " ".join(words)[:80])


def shell_text(lines: Sequence[str], escape: str) -> str:
    """RUN's script, line for line: without RUN and its flags, and without comments in between."""
    kept = []
    for number, raw in enumerate(lines):
        line = raw.rstrip("\r")
        is_comment = number > 0 and (not line.strip() or line.lstrip().startswith("#"))
        if is_comment:
            kept.append("\\" if number + 1 < len(lines) else "")
            continue
        if escape != "\\" and line.rstrip().endswith(escape):
            line = line.rstrip()[: -len(escape)] + "\\"
        kept.append(line.rstrip() if line.rstrip().endswith("\\") else line)
    text = "\n".join(kept)
    head = re.match(r"\s*(?:ONBUILD\s+)?RUN\s+(?:\\\n\s*)*(?:--\w+(?:=\S+)?\s+(?:\\\n\s*)*)*", text, re.I)
    above = head[0].count("\n") if head else 0
    return "\n" * above + text[head.end() :] if head else text
