"""`weir doctor`: what this host has, which torch its cards can run, and what to type next."""

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from buildtool.core.errors import ConfigError, DataError, Exit
from buildtool.core.files import reading, refuse_overwriting, write_text
from buildtool.doctor import gather, text
from buildtool.doctor.advice import Advice, advise, for_card, is_target, supposed_host
from buildtool.doctor.compatibility import Compatibility, compatibility
from buildtool.doctor.host import Display, Host
from buildtool.engine import host as engine_host
from probes.cli.arguments import card_by
from probes.core.codec import encode
from probes.core.errors import UsageError
from probes.core.files import read_head, read_regular
from probes.core.invocation import tool_version
from probes.core.output import echo, flag, option, write
from probes.core.quoting import command
from probes.core.unknown import Unknown
from probes.hardware.cards import Card, cards_meant, find_target

_MOST_BYTES = 1 << 20  # of a file of settings
_SHOWN = 4  # names of cards that share a target
ABSENT = Unknown("the card isn't in this machine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    card_by(parser, "--card")
    flag(parser, "--json", "print facts and advice, or with --lint the faults, as JSON; sizes in bytes")
    option(
        parser,
        "--card",
        "NAME|TARGET|PCI-ID",
        "answer for this card instead of those that are here: 'WX 4100', gfx803, 1002:67e3",
    )
    parser.add_argument(
        "--on", choices=("linux", "wsl", "windows"), help="with --card: where (default: as this host is)"
    )
    acts = parser.add_mutually_exclusive_group()
    flag(
        acts,
        "--fix",
        "write .env and compose.here.yaml for this host (groups as numbers, device files, CDI), after "
        "showing what changes; changes nothing else",
    )
    option(
        acts,
        "--variants",
        "FILE",
        "write a catalog with one variant for this host's card: weir build --catalog FILE builds it",
        Path,
    )
    option(
        acts,
        "--prove",
        "IMAGE",
        "try what the image's torch promises on this host's card: copies, products, a convolution",
    )
    acts.add_argument(
        "--lint",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="name the faults of Dockerfiles, compose files, scripts, devcontainers, Slurm and Apptainer "
        "files, requirements, instead of looking at this host; exit 1 if there is one that isn't a note",
    )
    flag(parser, "--dry-run", "with --fix: show it only")
    option(parser, "--sarif", "FILE", "with --lint: write the faults as SARIF", Path)


def run(args: argparse.Namespace) -> int:
    """Print facts, routes and the next command; 3 when something that every build needs is missing."""
    _refuse_ignored(args)
    if args.lint:
        return _lint(args)
    data = compatibility()
    engine = engine_host.gather()
    host = gather.gather(Path("/"), os.environ, engine, cwd=Path.cwd())
    if args.card:
        host = supposed_host(host, display_named(args.card, data), args.on or host.platform)
    if args.prove:
        return _prove(args.prove, host)
    advice = advise(host, data, datetime.datetime.now(datetime.UTC).date())
    if args.card:
        advice = for_card(advice, ["--card", args.card, *(("--on", args.on) if args.on else ())])
    if args.variants:
        return _variants(args.variants, advice)
    if args.fix:
        return _fix(host, advice, dry=args.dry_run)
    rows = list(engine_host.diagnose(engine))
    if args.json:
        write(json.dumps({"host": encode(host), "advice": encode(advice)}, indent=1) + "\n")
    else:
        echo(text.answer_text(host, advice, rows))
    missing = any(row.fails for row in rows)
    return int(Exit.ENVIRONMENT if missing else Exit.OK)


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Refuse options that would change nothing. Raises ConfigError."""
    if args.sarif and not args.lint:
        raise ConfigError(
            "--sarif needs files", "name them: weir doctor --lint Dockerfile --sarif lint.sarif"
        )
    if args.dry_run and not args.fix:
        raise ConfigError("--dry-run is for --fix", "weir doctor --fix --dry-run")
    if args.on and not args.card:
        raise ConfigError("--on needs a card", "name one: weir doctor --card gfx803 --on windows")
    if args.card and args.lint:
        raise ConfigError("--lint looks at files, whatever the card", "leave --card out")
    if args.json and (args.fix or args.variants or args.prove):
        raise ConfigError("--json is for facts, advice and --lint", "leave --json out")


def _variants(path: Path, advice: Advice) -> int:
    """Write a catalog with one variant for the host's card."""
    from buildtool.build import catalog
    from buildtool.doctor.fix import variant_text

    write_text(path, variant_text(advice, catalog.load()))
    echo(f"wrote {path}\nnext, type:\n  {command('weir', 'build', '--catalog', str(path))}")
    return int(Exit.OK)


def _fix(host: Host, advice: Advice, *, dry: bool) -> int:
    """Show what changes in this directory, then write it."""
    from buildtool.doctor import fix

    if not Path(fix.BASE).is_file():
        raise ConfigError("there is no compose.yaml in this directory", "cd to the directory that has it")
    before = {name: settings_text(Path(name)) for name in (fix.ENV, fix.OVERLAY)}
    changed = fix.changes(host, advice, before)
    echo(fix.shown(changed, written=not dry))
    for change in () if dry else changed:
        write_text(Path(change.path), change.after)
    return int(Exit.OK)


def settings_text(path: Path) -> str | None:
    """The text of a file of settings; None where there is none. Raises DataError for what can't be read."""
    try:
        return read_regular(Path(os.path.realpath(path)), most_bytes=_MOST_BYTES).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}", "correct or remove it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text", "save it as UTF-8, or remove it") from error


def _prove(image: str, host: Host) -> int:
    """Run the image's own `probes doctor` on this host's card; exit code 0 if every check holds."""
    from buildtool.doctor import prove
    from buildtool.engine.client import Engine

    passed = prove.devices_of(host)
    result = Engine().run(image, prove.COMMAND, devices=passed)
    checks = prove.checks_of(result.exit_code, result.stdout, result.stderr)
    echo("\n".join(prove.lines(image, passed, checks)))
    return int(Exit.OK if all(check.holds for check in checks) else Exit.BUILD)


def _lint(args: argparse.Namespace) -> int:
    """Print the faults of files; 1 when one of them is more than a note."""
    from buildtool.doctor.lint import report
    from buildtool.doctor.lint.linter import MOST_BYTES, lint
    from buildtool.doctor.lint.rules import rules

    texts = rules()
    refuse_overwriting([args.sarif] if args.sarif else [], inputs=args.lint)
    results = [(str(path), lint(str(path), _content(path, most_bytes=MOST_BYTES + 1))) for path in args.lint]
    if args.sarif:
        write_text(args.sarif, report.lint_sarif(results, texts, version=tool_version()))
    if args.json:
        write(json.dumps(report.lint_json(results, texts), indent=1) + "\n")
    else:
        echo(report.lint_text(results, texts))
    serious = any(texts[fault.rule].level != "note" for _, faults in results for fault in faults)
    return int(Exit.FINDINGS if serious else Exit.OK)


def _content(path: Path, *, most_bytes: int) -> bytes:
    """The beginning of a file."""
    with reading(path, "name files that exist"):
        return read_head(path, most_bytes)


def display_named(words: str, data: Compatibility) -> Display:
    """The card that a user names. Raises ConfigError for none and for several of different targets."""
    if is_target(words):
        return _display("", words, words)
    if card := data.card(words):
        return _display(card.pci, card.product, card.target)
    try:
        cards, target = cards_meant(words), find_target(words)
    except UsageError as error:
        raise ConfigError(error.message, error.hint) from error
    known = [pci for card in cards for pci in card.pci_ids if len(cards) == 1 and data.card(pci)]
    return _display(known[0] if known else "", _named(cards), target)


def _named(cards: Sequence[Card]) -> str:
    """The names of cards that share a target."""
    names = [card.name for card in cards]
    return " or ".join(names) if len(names) <= _SHOWN else f"{', '.join(names[:_SHOWN])} and their like"


def _display(product: str, name: str, target: str) -> Display:
    blank = Display("not here", product, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT)
    return replace(blank, name=name, target=target)
