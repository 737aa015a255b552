"""Reads arguments that several verbs have: sizes, numbers, seeds, models, and the files that they write."""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from probes.core import files
from probes.core.errors import ReportError, UsageError
from probes.core.output import Parser, flag, option, progress, whole
from probes.core.quoting import command
from probes.core.units import binary_bytes, parse_bytes, typed_bytes
from probes.fit.report import OPTIMIZERS, PRECISIONS
from probes.records.files import word_under, writing

if TYPE_CHECKING:
    from probes.placement.planner.machine import Constants


PROFILES = "wx4100, mi50, mi100, mi210, mi300x, w7900, rx6800, rx7900xtx, strix-halo, h100, h200, rtx4090"
VRAM = "VRAM that the program may use beside the driver's context, e.g. 4GiB"  # what --vram is
LEAST_BARE = 1 << 20  # of a size without a unit, in bytes
FEW_GIB = 256  # below it, a number without a unit is rather GiB than MiB
MOST_WRITTEN = 64 << 20  # bytes of a plan or an answer
EIGHT_BITS = "adamw8bit"
PLACE = "check the path, its permissions and the disk"  # where a file can't be written

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EXITS = (
    "Exit codes: 0 done, 1 done but --require is unmet, 2 usage, 3 torch, device or library missing "
    "or unusable, 4 a probe broke, 5 unreadable or unwritable report."
)


def add_verb(verbs: Verbs, name: str, summary: str, *, exits: str | None = None) -> argparse.ArgumentParser:
    """A verb that shows its summary in the program's help and above its own; `exits`: its exit codes."""
    about = f"{summary[:1].upper()}{summary[1:]}."
    return verbs.add_parser(name, help=summary, description=about, epilog=exits)


def size(text: str) -> int:
    """Bytes, as in 4GiB. Raises argparse.ArgumentTypeError.

    That is so also for a number below 1 MiB, or a fraction, without a unit: 4 is hardly meant as 4 bytes.
    """
    try:
        n_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    number = text.strip()
    if number[-1].isdigit() and float(number) and (n_bytes < LEAST_BARE or not number.isdecimal()):
        unit = "GiB" if float(number) < FEW_GIB else "MiB"
        raise argparse.ArgumentTypeError(f"{text!r} without a unit is bytes; write {number}{unit}")
    return n_bytes


def number(fits: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Returns what reads a number that fits, or raises argparse.ArgumentTypeError: it isn't `what`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
        return value

    return read


def seed(text: str) -> int:
    """A seed, as every generator takes it. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def picture(text: str) -> Path:
    """The file of a picture. Raises argparse.ArgumentTypeError for -, which prints other answers."""
    if text == "-":
        raise argparse.ArgumentTypeError("a picture isn't printed: name a file, such as picture.svg")
    return Path(text)


def refuse_overwriting(model: Path, read: Sequence[Path], written: Sequence[Path | None]) -> None:
    """Refuse to write over what is read or beside it in the model's folder, or twice into one file.

    What Weir has written there itself may be written again. Raises UsageError, and ReportError where a file's
    folder isn't there.
    """
    places = {os.path.realpath(path) for path in (model, *read)}
    folder = os.path.realpath(model if model.is_dir() else model.parent) if model.exists() else None
    for path in written:
        if path is None or path == Path("-"):
            continue
        place = os.path.realpath(path)
        if place in places:
            raise UsageError(f"{path} is what this command reads or writes already", "choose another file")
        beside = folder is not None and Path(place).is_relative_to(folder)
        if beside and os.path.lexists(place) and not _is_ours(Path(place)):
            raise UsageError(f"{path} is a file of the model's folder", "choose another file")
        _require_folder(path)
        places.add(place)


def _is_ours(path: Path) -> bool:
    """Whether a file is a picture, or JSON that Weir wrote."""
    return path.suffix == ".svg" or bool(word_under(path, "schema", "weir-", most_bytes=MOST_WRITTEN))


def _require_folder(path: Path) -> None:
    """Raise ReportError where a file's folder isn't there: one is made below the current folder only."""
    folder = Path(os.path.abspath(path)).parent  # noqa: PTH100  # of links, where they are
    if not folder.exists() and not folder.is_relative_to(Path.cwd()):
        make_it = command("mkdir", "-p", "--", str(folder))
        raise ReportError(f"can't write {path}: there is no folder {folder}", f"make it: {make_it}")


def refuse_more_than_the_card(
    option: str, n_bytes: int | None, machine: "Constants", *, other: str = "another --machine"
) -> None:
    """Raise UsageError for more VRAM than the machine's card has. `other`: what else could be given."""
    if n_bytes is not None and machine.has_gpu and n_bytes > machine.vram_bytes:
        raise UsageError(
            f"{option} is {binary_bytes(n_bytes)}, and {machine.name} has {binary_bytes(machine.vram_bytes)}",
            f"give {option} {typed_bytes(machine.vram_bytes)} or less, or {other}",
        )


def torch_note(constants: str) -> str:
    """Where to ask whether a torch runs on a profile's card; empty for a report, which torch has written.

    `constants`: where a machine's figures come from, as plans and answers say it.
    """
    from probes.placement.planner.machine import profile, profile_names

    name = constants.removeprefix("predicted: profile ")
    if name not in profile_names():
        return ""
    return f"whether a torch runs on this card: {command('weir', 'doctor', '--card', profile(name).target)}"


def paragraphs(*texts: str) -> str:
    """The texts that aren't empty, with an empty line between."""
    return "\n\n".join(filter(None, texts))


OF_A_CARD = ("--card", "--machine", "--gpu", "--target", "--targets")


def card_by(parser: argparse.ArgumentParser, option: str) -> None:
    """Let a verb that takes a card by `option` say so where one was given in another way.

    Empty: it is the last word of the command.
    """

    def meant(given: Sequence[str], unknown: Sequence[str]) -> Sequence[str]:
        from probes.hardware.cards import is_card

        words = [
            part for word in given for part in word.split("=", 1) if word.startswith("--") or part == word
        ]
        wrong = next((word for word in unknown if word.split("=")[0] in OF_A_CARD), "").split("=")[0]
        if wrong and wrong in words[:-1]:
            at = words.index(wrong)
            card, rest = words[at + 1], [*words[:at], *words[at + 2 :]]
        elif card := next((word for word in words if not word.startswith("-") and is_card(word)), ""):
            rest = [word for word in words if word != card]
        else:
            return ()
        return [*rest, *([option] if option else []), card]

    if isinstance(parser, Parser):
        parser.meant = meant


def write_file(path: Path, text: str, *, place: Path | None = None) -> None:
    """Write an answer, at a place that was reserved for it if any, and say so. Raises ReportError."""
    with writing(path, PLACE):
        files.write_text(place or path, text)
    progress(f"wrote {path}")


def add_compute(verb: argparse.ArgumentParser) -> None:
    """Add the argument that says what a GPU without bfloat16 units does with bfloat16 weights."""
    verb.add_argument(
        "--compute",
        choices=("auto", "float16", "float32"),
        default="auto",
        help="what bfloat16 weights become on a GPU without bfloat16 units (default: auto, which is float32 "
        "with --objective exact, and float16 with fast; a weight beyond its range is refused when it is "
        "placed)",
    )


def machine_of(named: str | None) -> "Constants":
    """The machine that --machine names, else this host's. Raises UsageError and ReportError."""
    from probes.placement.planner.api import resolve_machine, this_hosts_machine

    return this_hosts_machine() if named is None else resolve_machine(named)


def add_step(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that say how numbers are kept, and how a training step is made."""
    verb.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="number format of weights; amp: float32 weights, products in 16 bits (default: the model's own, "
        "or float32 where that is bfloat16 and the card has no units for it; for training without --lora, "
        "amp-bf16, or amp-fp16 on such a card)",
    )
    verb.add_argument(
        "--optimizer",
        choices=(*OPTIMIZERS, EIGHT_BITS),
        help="optimizer of a training step (default: adamw)",
    )
    flag(verb, "--checkpointing", "use gradient checkpointing")
    verb.add_argument(
        "--lora",
        type=whole(1, 10**9),
        default=0,
        metavar="RANK",
        help="train only LoRA adapters of this rank",
    )
    option(verb, "--targets", "NAME,NAME", "linear layers that get adapters (default: those of attention)")
    option(
        verb,
        "--accumulate",
        "N",
        "batches whose gradients are added up for one step (default: 1)",
        whole(1, 10**9),
    )


def step_of(args: argparse.Namespace) -> dict[str, Any]:
    """What these arguments say of a question but for its precision. Raises UsageError."""
    if args.optimizer == EIGHT_BITS:
        raise UsageError(
            "what 8-bit optimizers keep isn't known here: each library has a format of its own",
            "ask for an upper bound: --optimizer adamw",
        )
    if args.targets and not args.lora:
        raise UsageError("--targets names layers for adapters, and none are asked for", "add --lora RANK")
    targets = tuple(word.strip() for word in (args.targets or "").split(",") if word.strip())
    if args.targets is not None and not targets:
        raise UsageError(
            "--targets names no layer", "name some, by the ends of their names: --targets q_proj,v_proj"
        )
    return {
        "optimizer": args.optimizer or "adamw",
        "checkpointing": args.checkpointing,
        "lora_rank": args.lora,
        "lora_targets": targets,
        "accumulate": args.accumulate or 1,
    }


def add_model(verb: argparse.ArgumentParser) -> None:
    """The model and the machine of a verb that needs neither."""
    verb.add_argument(
        "model",
        metavar="MODEL",
        help="config.json, *.safetensors, a folder that has one, or a name such as qwen2.5-3b",
    )
    card_by(verb, "--machine")
    option(
        verb,
        "--machine",
        "CARD|REPORT",
        f"card, in any spelling, of which there is a profile ({PROFILES}), or the file of a probe report "
        "(default: this host's card)",
    )
