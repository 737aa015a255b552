"""The command line: all verbs, of which the smallest (list, machine, doctor) are here.

Failures become messages and exit codes.
"""

import argparse
import importlib
import json
from collections.abc import Sequence
from functools import cache

from probes.cli.arguments import EXITS, Verbs, add_verb
from probes.core.codec import encode, to_json
from probes.core.entry import delivered
from probes.core.errors import Exit
from probes.core.invocation import probe_command, version_line
from probes.core.output import Parser, echo, flag, write

# verb -> its module, probes.cli.<name>, in the order of the help; a process imports that of its verb alone
MODULES = {
    "list": "program",
    "machine": "program",
    "doctor": "program",
    "run": "run",
    "show": "reports",
    "html": "reports",
    "compare": "reports",
    "prometheus": "reports",
    "schema": "reports",
    "plan": "plan",
    "place": "place",
    "watch": "watch",
    "throughput": "throughput",
    "fit": "fit",
    "epochs": "epochs",
    "prove": "prove",
}

PURPOSE = (
    "Measure what memory placement costs on this machine: copy inputs into VRAM or leave them in system RAM? "
    "What happens when VRAM is full? What runs a model larger than VRAM fastest? Begin with: run --quick. It "
    "ends with the answer in three sentences; show FILE has the tables."
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. It is made once: a process may run many verbs."""
    return _parser(probe_command())


@cache
def _parser(prog: str, module: str = "") -> argparse.ArgumentParser:
    """The whole command line, or what a module adds to it."""
    parser = Parser(prog=prog, description=PURPOSE, epilog=EXITS)
    add_arguments(parser, *([module] if module else []))
    return parser


def add_arguments(parser: argparse.ArgumentParser, *modules: str) -> None:
    """The verbs of these modules, or of all, with their arguments."""
    parser.add_argument("--version", action="version", version=version_line())
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in modules or dict.fromkeys(MODULES.values()):
        importlib.import_module(f"probes.cli.{name}").add_verbs(verbs)


def add_verbs(verbs: Verbs) -> None:
    """Add the verbs that are here, and their arguments."""
    add_verb(verbs, "list", "list the probes and what each measures").set_defaults(do=_list)
    here = add_verb(verbs, "machine", "show this machine: cards, memory, drivers, torch")
    flag(here, "--json", "print JSON instead of text; sizes are in bytes")
    here.set_defaults(do=_machine)
    doctor = add_verb(
        verbs, "doctor", "show which devices are visible here, and check that torch works on the card"
    )
    flag(doctor, "--json", "print JSON instead of text")
    doctor.set_defaults(do=_doctor)


def verb_names() -> tuple[str, ...]:
    """The names of the verbs."""
    return tuple(MODULES)


def _list(_args: argparse.Namespace) -> Exit:
    from probes.measure import catalog

    for probe in catalog.PROBES:
        echo(f"{probe.name:<10} {probe.summary}{' (needs a GPU)' if probe.needs_gpu else ''}")
    return Exit.OK


def _machine(args: argparse.Namespace) -> Exit:
    from probes.hardware.expectation import expect
    from probes.hardware.snapshot import machine_lines
    from probes.measure import this_machine
    from probes.reports.run import expectation_line
    from probes.reports.run_headline import next_step

    machine = this_machine.describe()
    if args.json:
        write(to_json(machine))
    else:
        echo("\n".join(machine_lines(machine)))
        echo(f"a request for more VRAM than there is, {expectation_line(expect(machine))}")
        if next_step(machine):
            echo(next_step(machine))
    return Exit.OK


def _doctor(args: argparse.Namespace) -> Exit:
    from probes.measure import this_machine

    machine, checks = this_machine.check_machine()
    if args.json:
        document = {"machine": encode(machine), "checks": encode(checks)}
        write(json.dumps(document, indent=1, allow_nan=False) + "\n")
    else:
        echo("\n".join(this_machine.check_lines(machine, checks)))
    return this_machine.check_exit_code(machine, checks)


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code and never raises for anything a user can cause."""
    return delivered(_run_verb, argv, interrupted="files that aren't whole were not written")


def _run_verb(argv: Sequence[str]) -> int:
    module = MODULES.get(argv[0], "") if argv else ""
    args = _parser(probe_command(), module).parse_args(argv)
    code: int = args.do(args)
    return code
