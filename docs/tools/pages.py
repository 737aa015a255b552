"""The reference pages: Markdown made from parsers, schemas, exit codes and docstrings, so never stale."""

import argparse
import ast
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from doctor_pages import compatibility_page, rules_page
from parsers import Main, parser_of, programs, subparsers, summaries, verbs

ROOT = Path(__file__).parents[2]
PROGRAMS = {"buildtool": ROOT / "buildtool", "probes": ROOT / "probes", "service": ROOT / "images/service"}
STARTED_BY = {"buildtool": "weir", "probes": "python3 -m probes", "service": "python3 -m service"}
CODE_SPAN = re.compile(r"(`+[^`\n]*`+)")


def reference() -> dict[str, str]:
    """Every generated page by its path in the site, apart from the modules' pages."""
    schemas = ROOT / "docs" / "schema"
    return {
        "reference/commands.md": commands_page(),
        "reference/exit-codes.md": exit_codes_page(),
        "reference/variants.md": schema_page("variants.yaml", ROOT / "images" / "variants.schema.json"),
        "reference/audit-report.md": schema_page("Audit report", schemas / "audit-report.schema.json"),
        "reference/audit-diff.md": schema_page("Audit diff", schemas / "audit-diff.schema.json"),
        "reference/compatibility.md": compatibility_page(),
        "reference/lint-rules.md": rules_page(),
        "reference/epochs.md": schema_page("Epochs", schemas / "epochs.schema.json"),
        "reference/fit.md": schema_page("Fit", schemas / "fit.schema.json"),
        "reference/placement-plan.md": schema_page("Placement plan", schemas / "placement-plan.schema.json"),
        "reference/watch-report.md": schema_page("Watch report", schemas / "watch-report.schema.json"),
        "reference/probe-report.md": schema_page("Probe report", schemas / "probe-report.schema.json"),
        "reference/throughput.md": schema_page("Throughput report", schemas / "throughput.schema.json"),
    }


# ---- commands ----------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every verb of both programs with its arguments."""
    lines = [
        "# Commands",
        "",
        "`weir` runs on the host; `python3 -m buildtool` is the same program. `python3 -m probes` runs on "
        "the host and in every image. What their exit codes mean: [exit codes](exit-codes.md).",
        "",
    ]
    mains = programs()
    for name in ("weir", "python3 -m probes"):
        lines += program_section(name, mains[name])
    return "\n".join(lines)


def program_section(name: str, main: Main) -> Iterator[str]:
    """Every verb of one program."""
    about = summaries(parser_of(main, ["--help"]))
    for verb, parser in verbs(main):
        yield from command_section(f"{name} {verb}", parser, level=2, summary=about.get(verb, ""))


def command_section(
    name: str, parser: argparse.ArgumentParser, *, level: int, summary: str = ""
) -> Iterator[str]:
    """A heading, the description, the usage and a table of arguments; then the same for the verbs below."""
    parser = copy(parser)  # a program makes its own once
    parser.prog = name
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = textwrap.wrap(usage, 104, subsequent_indent="    ", break_on_hyphens=False)
    yield from ("#" * level + f" `{name}`", "", sentence(escaped(summary or parser.description or "")), "")
    yield from ("```text", *lines, "```", "")
    rows = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction)
        and action.help != argparse.SUPPRESS
        and action.dest != "help"
    ]
    if rows:
        yield from ("| Argument | Meaning |", "|---|---|")
        yield from (f"| {code(label(action))} | {cell(meaning(parser, action))} |" for action in rows)
        yield ""
    about = summaries(parser)
    for verb, below in subparsers(parser).items():
        yield from command_section(f"{name} {verb}", below, level=level + 1, summary=about.get(verb, ""))


def label(action: argparse.Action) -> str:
    """`--out DIR`, or the name of a positional argument."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices and not action.metavar:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The argument's help with its placeholders filled in, as `--help` shows it."""
    return sentence(parser._get_formatter()._expand_help(action)) if action.help else ""


# ---- exit codes --------------------------------------------------------------------------------------


def exit_codes_page() -> str:
    """What each program ends with: its class `Exit`, whose comments say when."""
    shared = (
        "The verbs of a program share them; `--help` of a verb says where a number means something narrower."
    )
    lines = ["# Exit codes", "", shared, ""]
    for program, folder in PROGRAMS.items():
        for path in sorted(folder.rglob("*.py")):
            rows = exit_codes(path)
            if rows:
                lines += [f"## `{STARTED_BY[program]}`", "", "| Code | Name | When |", "|---|---|---|"]
                lines += [
                    f"| {value} | `{name}` | {cell(sentence(when))} |" for name, value, when in rows
                ] + [""]
    return "\n".join(lines)


def exit_codes(path: Path) -> list[tuple[str, int, str]]:
    """Name, number and comment of each member of a module's class `Exit`; empty where there is none."""
    text = path.read_text(encoding="utf-8")
    if "class Exit" not in text:  # to parse every file takes a second
        return []
    tree = ast.parse(text)
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Exit"]
    if not found:
        return []
    with path.open("rb") as file:
        comments = {
            token.start[0]: token.string.removeprefix("#").strip()
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.COMMENT
        }
    usual = {"OK": "done", "USAGE": "wrong arguments or configuration", "INTERRUPTED": "interrupted"}
    return [
        (name.id, ast.literal_eval(node.value), comments.get(node.lineno, usual.get(name.id, "")))
        for node in found[0].body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    ]


# ---- schemas -----------------------------------------------------------------------------------------


def schema_page(title: str, path: Path) -> str:
    """A JSON Schema as tables: one for each object, however deep, and one for each definition."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"# {title}", "", sentence(escaped(schema.get("description", ""))), ""]
    lines += object_tables(schema, title="")
    for name, definition in sorted(schema.get("$defs", {}).items()):
        about = sentence(escaped(definition.get("description", "")))
        lines += [f"## {name} {{: #{anchor(name)} }}", "", about, ""]
        inner, form = inner_object(definition)
        shown = [] if inner is definition and "properties" in definition else [kind(definition), ""]
        lines += shown + object_tables(inner, title=f"{name}{form}")
    return "\n".join(lines)


def object_tables(schema: Mapping[str, Any], *, title: str) -> list[str]:
    """A table of an object's keys, then one for every object within it; nothing where there are no keys."""
    properties: Mapping[str, Mapping[str, Any]] = schema.get("properties", {})
    if not properties:
        return [kind(schema), ""] if "$ref" in schema and not title else []
    required = set(schema.get("required", ()))
    lines, below = ["| Key | Type | Meaning |", "|---|---|---|"], []
    for key, one in properties.items():
        inner, form = inner_object(one)
        path = f"{title}.{key}{form}" if title else f"{key}{form}"
        shown = kind(one)
        if inner.get("properties"):
            below += [f"### `{path}` {{: #{anchor(path)} }}", "", *object_tables(inner, title=path)]
            shown = shown.replace("object", f"[object](#{anchor(path)})")
        optional = "" if key in required else " (optional)"
        lines.append(f"| `{key}`{optional} | {shown} | {cell(sentence(one.get('description', '')))} |")
    return [*lines, "", *below]


def inner_object(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The object that a value consists of, and how its path is written: `x`, `x[]` or `x.*`."""
    if isinstance(schema.get("items"), dict):
        return schema["items"], "[]"
    if isinstance(schema.get("additionalProperties"), dict) and "properties" not in schema:
        return schema["additionalProperties"], ".*"
    return schema, ""


def kind(schema: Mapping[str, Any]) -> str:
    """A schema's type in a few words, with a link where it is a definition's."""
    match {**schema, "enum": [schema["const"]]} if "const" in schema else schema:
        case {"$ref": str(ref)}:
            name = ref.rsplit("/", 1)[-1]
            return f"[{name}](#{anchor(name)})"
        case {"enum": values}:
            return ", ".join(f"`{json.dumps(one)}`" for one in values)
        case {"anyOf": choices} | {"oneOf": choices}:
            return " or ".join(kind(one) for one in choices)
        case {"type": "array"}:
            return f"list of {kind(schema.get('items', {}))}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"map to {kind(values)}"
    return simple_kind(schema)


def simple_kind(schema: Mapping[str, Any]) -> str:
    """A type that holds no other; of text, also what it must match."""
    found = schema.get("type", "anything")
    name = " or ".join(found) if isinstance(found, list) else str(found)
    pattern = schema.get("pattern", "").replace("\n", "\\n")
    return f"{name}, matching {code(pattern)}" if pattern else name


def anchor(name: str) -> str:
    """The anchor of a definition, or of an object by its path."""
    return "def-" + re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


# ---- modules -----------------------------------------------------------------------------------------


def module_pages() -> dict[str, str]:
    """A page for each package: its modules with what is public in them, from their docstrings."""
    pages = {}
    for program, folder in PROGRAMS.items():
        for package in sorted(path.parent for path in folder.rglob("__init__.py")):
            name = ".".join((program, *package.relative_to(folder).parts))
            pages[f"reference/modules/{name}.md"] = package_page(name, package)
    return pages


def package_page(name: str, folder: Path) -> str:
    """The modules of one package."""
    about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    lines = ["---", "search: {boost: 0.2}", "---", f"# {name}", "", *prose(about), ""]
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("__"):
            lines += module_section(f"{name}.{path.stem}", ast.parse(path.read_text(encoding="utf-8")))
    return "\n".join(lines)


def module_section(name: str, tree: ast.Module) -> Iterator[str]:
    """A module's docstring, then its public classes and functions."""
    yield from (f"## {name}", "", *prose(ast.get_docstring(tree) or ""), "")
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and is_public(node):
            yield from (
                f"### {node.name} {{: #{name}.{node.name} }}",
                "",
                "```python",
                signature(node),
                "```",
                "",
            )
            yield from (*prose(ast.get_docstring(node) or ""), "")
            yield from methods(node)


def is_public(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether others use it: it has a docstring and no underscore in front."""
    return not node.name.startswith("_") and ast.get_docstring(node) is not None


def signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The definition without decorators and body; of a class, its fields."""
    if isinstance(node, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        fields = [each for each in node.body if isinstance(each, (ast.AnnAssign, ast.Assign))]
        return "\n".join([f"class {node.name}{bases}:", *(f"    {ast.unparse(each)}" for each in fields)])
    head = f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}({ast.unparse(node.args)})"
    return f"{head} -> {ast.unparse(node.returns)}" if node.returns else head


def methods(node: ast.AST) -> Iterator[str]:
    """A line for each public method of a class."""
    if not isinstance(node, ast.ClassDef):
        return
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and is_public(each):
            about = " ".join((ast.get_docstring(each) or "").split())
            yield f"- {code(signature(each))}: {escaped(about)}"
    yield ""


# ---- text --------------------------------------------------------------------------------------------


def prose(text: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs are text, indented ones are kept as they are laid out."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip("\n").splitlines()
        if any(line.startswith("  ") for line in lines):
            yield from ("```text", *lines, "```", "")
        elif lines:
            yield from (escaped("\n".join(lines)), "")


def escaped(text: str) -> str:
    """Text whose Markdown is taken as it is, apart from code spans."""
    parts = CODE_SPAN.split(text)
    return "".join(
        part if index % 2 else re.sub(r"([\\*_\[\]<>#|{}$~!])", r"\\\1", part).replace("\\<", "&lt;")
        for index, part in enumerate(parts)
    )


def code(text: str) -> str:
    """A code span that holds any text, also in a table."""
    fence = "`" * (1 + max(map(len, re.findall(r"`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{' '.join(text.split())}{pad}{fence}".replace("|", "\\|")


def cell(text: str) -> str:
    """Text that keeps to one table cell."""
    return escaped(" ".join(text.split()))


def sentence(text: str) -> str:
    """The text with its first letter upper case."""
    return text[:1].upper() + text[1:]
