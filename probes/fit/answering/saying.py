"""The answer of `fit` as text: what fits, bars of what takes the bytes, the knobs, the trials. Pure."""

from collections.abc import Iterator
from typing import Final

from probes.fit.question import FitReport, Largest, Measured, Parts, Taken
from probes.report.render import table
from probes.shared.quoting import terminal
from probes.shared.units import binary_bytes, duration
from probes.shared.unknown import Unknown

BAR: Final = 32  # characters of the longest bar
MOST_WORDS: Final = 100  # characters of an error in the table; the JSON has more
PARTS: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "activations": "activations",
    "kv_cache": "keys and values",
    "workspace": "workspace of libraries",
    "rounding": "rounding of torch's allocator",
    "context": "the driver's context",
}
DIVIDED: Final = ("weights", "optimizer's state", "gradients, activations and all else")
VERDICTS: Final = {
    "fits": "fits",
    "gpu_out_of_memory": "the GPU's memory is used up",
    "allocation_refused": "an allocation was refused",
    "memory_error": "Python raised MemoryError",
    "killed_for_memory": "killed by the cgroup's limit",
    "crashed": "crashed",
    "out_of_time": "stopped: out of time",
}


def lines(report: FitReport) -> str:
    """The whole answer."""
    parts = [_answer(report), bars(report), _knobs(report)]
    if isinstance(report.measured, Measured):
        parts.append(_measured(report.measured))
        parts.append(_beside(report, report.measured))
    else:
        parts.append(f"not measured: {terminal(report.measured.reason)}")
    parts += [f"note: {terminal(note)}" for note in report.notes]
    return "\n\n".join(part for part in parts if part)


def verdict(report: FitReport) -> str:
    """Whether it fits and what it needs, in a sentence each."""
    asked = report.question
    what = f"{asked.model}, {described(report)}, batch {asked.batch} x {asked.tokens} tokens"
    answer = "fits" if report.fits else "doesn't fit"
    needs = binary_bytes(report.smallest_budget_bytes)
    budget = binary_bytes(report.budget_bytes)
    return (
        f"{what}: {answer} into {budget} of {report.machine}, predicted. Smallest budget that works: {needs}"
        f" (and {binary_bytes(report.predicted.context)} for the driver's context)."
    )


def _answer(report: FitReport) -> str:
    asked, card = report.question, terminal(report.constants.rpartition(": ")[2])
    return (
        f"{terminal(verdict(report))}\n"
        f"Largest batch of {asked.tokens} tokens: {size(report.predicted_largest_batch)}; "
        f"longest sequence at batch {asked.batch}: {size(report.predicted_largest_tokens)}; both predicted.\n"
        f"predicted by {report.predicted_by}; the card's figures: {card}"
    )


def described(report: FitReport) -> str:
    """What is done, in a few words."""
    asked = report.question
    if asked.task == "inference":
        return f"inference in {asked.precision}"
    words = [f"a training step in {asked.precision} with {asked.optimizer}"]
    if asked.lora_rank:
        words.append(f"LoRA of rank {asked.lora_rank}")
    if asked.checkpointing:
        words.append("gradient checkpointing")
    if asked.accumulate > 1:
        words.append(f"{asked.accumulate} batches accumulated")
    return ", ".join(words)


def size(found: Largest | Unknown) -> str:
    """A largest size, with what is open about it."""
    if isinstance(found, Unknown):
        return "not known"
    if found.contradictions:
        return f"{found.fits} to {found.top}"
    if found.exact:
        return str(found.fits)
    return f"at least {found.fits}" + (f", less than {found.fails}" if found.fails else "")


def bars(report: FitReport) -> str:
    """What takes the bytes at the peak, as a table with bars."""
    parts = shares(report.predicted)
    most = max((n for _, n in parts), default=1)
    rows = [[name, binary_bytes(n), "#" * max(round(BAR * n / most), 1)] for name, n in parts]
    rows.append(["in all", binary_bytes(report.predicted.total), ""])
    return table([f"at the peak ({report.moment})", "predicted", ""], rows, markdown=False)


def shares(taken: Taken) -> list[tuple[str, int]]:
    """What takes bytes, and how many; nothing that takes none."""
    return [(name, getattr(taken, key)) for key, name in PARTS.items() if getattr(taken, key)]


def largest_parts(found: Measured) -> Parts | Unknown:
    """What the largest size that fits took, measured."""
    at = next((trial.parts for trial in found.trials if trial.size == found.largest.fits), None)
    return at or Unknown("nothing fits")


def beside(report: FitReport, found: Measured) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: what takes the bytes at the largest size measured to fit, predicted and measured."""
    predicted = [
        (name, taken)
        for name, taken in (
            (f"predicted by {report.predicted_by}", report.predicted_at_largest),
            ("predicted by a trace", found.at_size),
        )
        if isinstance(taken, Taken)
    ]
    columns = [(t.weights, t.optimizer, t.allocated - t.weights - t.optimizer) for _, t in predicted]
    headers = [f"at {found.largest.axis} {found.largest.fits}", *(name for name, _ in predicted)]
    parts = largest_parts(found)
    if isinstance(parts, Parts):
        columns.append((parts.weights, parts.optimizer, parts.rest))
        headers.append("measured")
    rows = [[name, *(binary_bytes(column[n]) for column in columns)] for n, name in enumerate(DIVIDED)]
    rows.append(["in all", *(binary_bytes(sum(column)) for column in columns)])
    return headers, rows


def phases(parts: Parts) -> list[list[str]]:
    """The peak of each part of a step, measured."""
    return [[phase.name, binary_bytes(phase.peak_bytes)] for phase in parts.phases]


def _beside(report: FitReport, found: Measured) -> str:
    headers, rows = beside(report, found)
    if len(headers) == 1:
        return ""
    parts = largest_parts(found)
    more = ""
    if isinstance(parts, Parts):
        more = "\n\n" + table(["while", "measured peak"], phases(parts), markdown=False)
    return table(headers, rows, markdown=False) + more


def _knobs(report: FitReport) -> str:
    if not report.knobs:
        return ""
    return f"{buys_most(report)}\n{table(KNOBS, knob_rows(report), markdown=False)}"


def buys_most(report: FitReport) -> str:
    """Which single change saves most, in a sentence; empty where none is known to save anything."""
    best = report.knobs[0] if report.knobs else None
    if best is None or best.saves <= 0:
        return ""
    return (
        f"The single change that saves most, predicted: {best.name} ({saved(best.saves)} less; {best.cost})."
    )


KNOBS: Final = (
    "one change",
    "saves, predicted",
    "then in all, predicted",
    "largest batch then, predicted",
    "what it costs",
)


def knob_rows(report: FitReport) -> list[list[str]]:
    """Every single change, as rows under `KNOBS`."""
    return [
        [knob.name, saved(knob.saves), binary_bytes(knob.total), str(knob.largest_batch), knob.cost]
        for knob in report.knobs
    ]


def saved(n_bytes: int) -> str:
    """Bytes with a sign where they are lost."""
    return binary_bytes(n_bytes) if n_bytes >= 0 else f"-{binary_bytes(-n_bytes)}"


def _measured(found: Measured) -> str:
    what = found.largest
    axis = "batch" if what.axis == "batch" else "sequence"
    parts = [
        f"Measured on {terminal(found.device)}: largest {axis} {size(what)} "
        f"({len(found.trials)} trials, {duration(found.seconds)}). {terminal(found.cap)}"
    ]
    if found.ended:
        parts.append(f"ended early: {terminal(found.ended)}")
    if what.contradictions:
        share = f" ({what.top / what.fits - 1:.1%} more)" if what.fits else ""
        parts.append(
            f"trials near the edge disagree: up to {axis} {what.fits} every one fitted, and one fitted at "
            f"{what.top}{share}"
        )
    for fails, fits in what.contradictions:
        parts.append(
            f"{axis} {fails} fitted in one trial and failed in another"
            if fails == fits
            else f"{axis} {fails} failed, and the larger {fits} fits: not every larger one needs more"
        )
    if isinstance(found.at_size, Taken) and isinstance(found.peak_bytes, int):
        error = found.at_size.allocated / max(found.peak_bytes, 1) - 1
        parts.append(
            f"peak at {axis} {what.fits}: {binary_bytes(found.at_size.allocated)} predicted by a trace, "
            f"{binary_bytes(found.peak_bytes)} measured ({error:+.1%})"
        )
    parts += [f"note: {terminal(note)}" for note in found.notes]
    parts.append(table(TRIALS, list(trials(found)), markdown=False))
    return "\n".join(parts)


TRIALS: Final = ("size", "verdict", "measured peak", "took")


def trials(found: Measured) -> Iterator[list[str]]:
    """Every size that was tried, as rows under `TRIALS`."""
    for trial in sorted(found.trials, key=lambda trial: trial.size):
        peak = "" if isinstance(trial.peak_bytes, Unknown) else binary_bytes(trial.peak_bytes)
        words = VERDICTS[trial.verdict]
        if trial.verdict == "crashed" and trial.said:
            words += f": {terminal(trial.said[:MOST_WORDS])}"
        yield [str(trial.size), words, peak, duration(trial.seconds)]
