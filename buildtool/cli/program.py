"""The program `weir`: finds the verb's module, runs it, turns failures into messages and exit codes."""

import argparse
import importlib
from collections.abc import Collection, Sequence
from functools import cache

from buildtool.core.errors import ConfigError, Exit
from probes.core.entry import delivered, run_as_program
from probes.core.invocation import host_command, version_line
from probes.core.output import Parser, error

# verb -> one line of help; the verb's module is buildtool.cli.<verb>, imported only when asked for
VERBS = {
    "build": "build images from a catalog, test each in a container, and audit it (what `make images` does)",
    "plan": "print what `build` would do, as JSON, and change nothing",
    "audit": "show what takes the bytes of an image, and which commands make it smaller",
    "diff": "compare two images, archives or saved audits: owners, kinds, packages, places",
    "sbom": "list what an image is made of, with the libraries inside wheels, as CycloneDX or SPDX",
    "verify": "check that a key signed what is attached to an image, and that nothing of it was changed",
    "observe": "list the files that an image's containers open, for a slim image (build --keep)",
    "ablate": "find the least that a compose service needs: privileges, devices, groups, mounts",
    "prune": "remove GPU code for other cards from a file, a directory tree or an image",
    "probe": "measure GPU memory on this machine, plan a model for a card, watch a run; has verbs of its own",
    "engine": "install and start a Docker engine if none answers (Debian, Ubuntu; as root)",
    "doctor": "show this host's cards, engine and disk, which torch runs here, and what to type next",
    "launch": "hand a command and an image to Slurm, Kubernetes, SkyPilot or torchrun; collect the reports",
    "fits": "answer whether a model runs on a card: which torch, how much memory, how fast, and what helps",
    "completion": "print a script that completes verbs, options and paths in a shell, or the manual page",
    "clean": "show what weir keeps on this host, with sizes, and remove what is named",
}

# what brings people here -> what answers it
QUESTIONS = (
    ("Why is my PyTorch image so large?", "audit IMAGE"),
    ("Which torch runs on my card?", "doctor [--card NAME]"),
    ("Will this model fit, and how fast?", "fits MODEL [CARD]"),
    ("Is my service saturated?", "probe throughput --url URL"),
)

EXITS = (
    "Exit codes: 0 done; 1 done, but a budget or a check failed, something was left, or the answer is no; "
    "2 usage; 3 environment; 4 a build or another step failed; 5 data that can't be read or written."
)


def build_parser(filled: Collection[str], prog: str) -> argparse.ArgumentParser:
    """The parser of `prog` with every verb; only those in `filled` are imported for their arguments."""
    parser = Parser(
        prog=prog,
        description="Build, audit and prune container images of PyTorch services; measure and plan GPU "
        f"memory. Begin with `{prog} doctor`, or with `{prog} audit IMAGE`.",
        epilog=EXITS,
    )
    parser.add_argument("--version", action="version", version=version_line())
    parser.elsewhere = _verbs_of_probe
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        about = f"{summary[:1].upper()}{summary[1:]}."
        sub = verbs.add_parser(name, help=summary, description=about, epilog=EXITS)
        if name in filled:
            importlib.import_module(f"buildtool.cli.{name}").add_arguments(sub)
    return parser


def _verbs_of_probe() -> dict[str, str]:
    """The verbs of `weir probe`, by what somebody may type for them, and how they are typed."""
    names = importlib.import_module("probes.cli.program").verb_names()
    return {name: f"{host_command()} probe {name}" for name in names if name not in VERBS}


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code and never raises for anything a user can cause."""
    return delivered(
        _run_verb, argv, interrupted="half-written files are removed, by the next run at the latest"
    )


def questions(program: str) -> str:
    """What is printed where no verb was typed: the questions, each with the command that answers it."""
    rows = [f"{question}\n    {program} {words}" for question, words in QUESTIONS]
    return "\n".join([*rows, f"all verbs: {program} --help"])


def _run_verb(argv: Sequence[str]) -> int:
    if not argv:  # a mistake all the same: in a script, a variable with the verb may be empty
        error(questions(host_command()))
        return Exit.USAGE
    if list(argv[:1]) == ["probe"]:  # its arguments, --help included, are for the other program
        return int(importlib.import_module("buildtool.cli.probe").run(argv[1:]))
    verb = next((word for word in argv if word in VERBS), None)
    args = _parser(verb, host_command()).parse_args(argv)
    try:
        return int(importlib.import_module(f"buildtool.cli.{args.verb}").run(args))
    except ConfigError as refused:
        raise _with_a_cards_target(refused) from refused


def _with_a_cards_target(refused: ConfigError) -> ConfigError:
    """The error, with what to type where a card was named instead of its target."""
    from buildtool.gpucode.source import BadTarget
    from probes.hardware.cards import cards_meant, is_card

    named = refused.message.split("`")
    if not isinstance(refused, BadTarget) or named[2:] != [" is not a GPU target"] or not is_card(named[1]):
        return refused
    targets = sorted({card.target for card in cards_meant(named[1])})
    return BadTarget(refused.message, f"it is a card: --targets {','.join(targets)}")


@cache
def _parser(verb: str | None, prog: str) -> argparse.ArgumentParser:
    """Made once: a process may run many verbs."""
    return build_parser([verb] if verb else [], prog)


def entry() -> None:
    """Console entry point."""
    run_as_program(main)
