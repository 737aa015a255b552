"""The screen that `weir fits` prints: at most 15 lines. Pure."""

from collections.abc import Iterator
from typing import Final

from buildtool.fits.answer import Answer, Change, Memory, Placement, Speed
from buildtool.fits.card import TorchAnswer
from probes.core.quoting import terminal
from probes.core.units import binary_bytes, counted
from probes.core.unknown import Unknown
from probes.placement.types import TIER_FACTS

WIDTH: Final = 10  # characters of the words in front
TASK_WORDS: Final = {"inference": "it", "lora": "LoRA of rank 16", "training": "training all weights"}
NO_TORCH: Final = "no published torch computes on this card; the figures below would hold if one did"


def lines(answer: Answer) -> str:
    """The whole answer; the last line is the command to type next."""
    return "\n".join([*_lines(answer), "next, type:", f"  {answer.next_command}"])


def _lines(answer: Answer) -> Iterator[str]:
    card, torch = answer.card, answer.torch
    if isinstance(torch, TorchAnswer) and not torch.computes_on_card:
        yield NO_TORCH
    yield (
        f"{terminal(answer.model)} ({binary_bytes(answer.weight_bytes)} of weights) on {terminal(card.name)} "
        f"({', '.join(filter(None, [card.target, binary_bytes(card.vram_bytes)]))}): {_verdict(answer)}"
    )
    yield from _torch(answer)
    yield _row("memory", _budget(answer))
    yield from _inference(answer) if answer.task == "inference" else _task(answer)
    change = answer.change
    if not isinstance(change, Unknown):
        yield _row("helps most", f"{change.name}: {change.brings} ({change.costs}), predicted")
    yield from (_row("note", terminal(note)) for note in answer.notes)


def _row(what: str, text: str) -> str:
    return f"{what + ':':<{WIDTH + 2}}{text}"


def _verdict(answer: Answer) -> str:
    what = "" if answer.task == "inference" else f"{TASK_WORDS[answer.task]} "
    does, would, not_ = (
        ("runs", "would run", "doesn't run") if not what else ("fits", "would fit", "doesn't fit")
    )
    if what and isinstance(answer.memory, Unknown):
        return f"whether {what}fits is unknown"
    if not answer.has_room:
        return f"{what}{not_}, predicted"
    return f"{what}{does if answer.runs else would}{_slowly(answer)}, predicted"


def _slowly(answer: Answer) -> str:
    """How long a token or sequence takes, where that is over a second."""
    placement = answer.placement
    if isinstance(placement, Unknown) or isinstance(placement.speed, Unknown):
        return ""
    speed = placement.speed
    if speed.per_second >= 1:
        return ""
    return f" at {1 / speed.per_second:.2g} s a {speed.of.removesuffix('s')}"


def _torch(answer: Answer) -> Iterator[str]:
    torch = answer.torch
    if isinstance(torch, Unknown):
        yield _row("torch", f"unknown ({torch.reason})")
        return
    if torch.computes_on_card:
        yield _row("torch", f"{torch.torch} with {torch.runtime} ({torch.rank}). {torch.says}")
        return
    yield _row("torch", f"{torch.rank}: {torch.says}")
    if isinstance(answer.cpu, Speed):
        yield _row("on the CPU", _speed(answer.cpu))


def _budget(answer: Answer) -> str:
    card = answer.card
    budget = (
        f"{binary_bytes(answer.vram_budget_bytes)} for torch, {binary_bytes(card.context_bytes)} for the "
        "driver's context"
    )
    if answer.task != "inference":
        return budget
    lacks = ", for want of bfloat16 units" if answer.compute_dtype != answer.stored_dtype else ""
    return f"{budget}; computed in {answer.compute_dtype}{lacks}"


def _inference(answer: Answer) -> Iterator[str]:
    memory, placement = answer.memory, answer.placement
    sizes = f"batch {answer.batch} of {counted(answer.tokens, 'token')}"
    if isinstance(memory, Memory):
        fits = "fits whole" if memory.fits else "doesn't fit whole"
        yield _row(
            "whole",
            f"{fits} at {sizes}: needs {binary_bytes(memory.smallest_budget_bytes)}; "
            f"largest batch {memory.largest_batch}, predicted",
        )
    elif answer.weight_bytes > answer.vram_budget_bytes:
        yield _row("whole", f"doesn't fit whole: the weights alone take {binary_bytes(answer.weight_bytes)}")
    else:
        yield _row("whole", f"unknown ({terminal(memory.reason)})")
    if isinstance(placement, Unknown):
        yield _row("placed", f"can't be: {terminal(placement.reason)}")
    else:
        yield _row("placed", _where(answer, placement))
        speed = placement.speed
        yield _row("speed", _speed(speed) if isinstance(speed, Speed) else f"unknown ({speed.reason})")
    yield _row("LoRA", f"of rank 16 {_needs(answer.lora, change=True)}")


def _task(answer: Answer) -> Iterator[str]:
    sizes = f"batch {answer.batch} of {counted(answer.tokens, 'token')}"
    yield _row(
        "LoRA" if answer.task == "lora" else "training", f"{sizes} {_needs(answer.memory, change=False)}"
    )


def _needs(memory: Memory | Unknown, *, change: bool) -> str:
    if isinstance(memory, Unknown):
        return f"is unknown ({terminal(memory.reason)})"
    if memory.fits:
        return (
            f"fits in {memory.precision}: needs {binary_bytes(memory.smallest_budget_bytes)}; largest batch "
            f"{memory.largest_batch}, predicted"
        )
    by = memory.change
    helps = f"; with {by.name}: {by.brings}" if change and isinstance(by, Change) else ""
    needs = binary_bytes(memory.smallest_budget_bytes)
    return f"doesn't fit in {memory.precision}: needs {needs}{helps}, predicted"


def _where(answer: Answer, placement: Placement) -> str:
    kept = [tier for tier in placement.tiers if tier.weight_bytes]
    parts = [f"{binary_bytes(tier.weight_bytes)} {TIER_FACTS[tier.tier].description}" for tier in kept]
    if placement.is_whole:
        return "all weights are resident in VRAM, predicted"
    if placement.converted_bytes:
        parts.append(f"{binary_bytes(placement.converted_bytes)} of it bfloat16 that each pass converts")
    assumed = " (assumed)" if answer.host_is_assumed else ""
    return f"{', '.join(parts)}; of {binary_bytes(answer.host_budget_bytes)} host memory{assumed}, predicted"


def _speed(speed: Speed) -> str:
    interval = f"{speed.low_per_second:.3g} to {speed.high_per_second:.3g} in 9 of 10 cases"
    return f"{speed.per_second:.3g} {speed.of}/s ({interval}), predicted"
