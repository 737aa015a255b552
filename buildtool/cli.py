"""The command line: finds the verb's module, runs it, turns failures into messages and exit codes."""

import argparse
import importlib
from collections.abc import Collection, Sequence

from probes.shared.entry import delivered, run_as_program
from probes.shared.invocation import host_command, tool_version
from probes.shared.output import Parser

# verb -> one line of help; the verb's module is buildtool.commands.<verb>, imported only when asked for
VERBS = {
    "build": "build image variants, prove them, audit them (what `make images` does)",
    "plan": "print the build plan (docker buildx bake JSON) and do nothing",
    "audit": "show where an image's bytes are and what to do about them",
    "diff": "compare two images, archives or saved audits: owners, kinds, packages, places",
    "prune": "take GPU code for other cards out of a file, a directory tree or an image",
    "probe": "measure memory placement on this machine; show, compare and draw the reports",
    "engine": "install and start a Docker engine if none answers (Debian, Ubuntu; as root)",
    "doctor": "show what this host has and what is missing: engine, plugins, cards, groups, disk",
    "completion": "print a script that completes verbs, options and paths in bash or zsh",
}


def build_parser(filled: Collection[str], prog: str) -> argparse.ArgumentParser:
    """The parser with every verb, of which those `filled` have their arguments (imports stay lazy)."""
    parser = Parser(
        prog=prog,
        description="Build, audit and prune container images of PyTorch services.",
        epilog="Exit codes: 0 done; 1 done, but a budget or a check failed; 2 usage; 3 environment; 4 build; "
        "5 data that can't be read or written.",
    )
    parser.add_argument("--version", action="version", version=f"gpu-weir {tool_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        sub = verbs.add_parser(name, help=summary, description=summary)
        if name in filled:
            importlib.import_module(f"buildtool.commands.{name}").add_arguments(sub)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code and never raises for anything a user can cause."""
    return delivered(
        _run_verb, argv, interrupted="half-written files are removed, by the next run at the latest"
    )


def _run_verb(argv: Sequence[str]) -> int:
    if list(argv[:1]) == ["probe"]:  # its arguments, --help included, are for the other program
        return int(importlib.import_module("buildtool.commands.probe").run(argv[1:]))
    verb = next((word for word in argv if word in VERBS), None)
    args = build_parser([verb] if verb else [], host_command()).parse_args(argv)
    return int(importlib.import_module(f"buildtool.commands.{args.verb}").run(args))


def entry() -> None:
    """Console entry point."""
    run_as_program(main)
