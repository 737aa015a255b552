"""Trials from the parent's side: whether the host has memory, the worker, and what is kept when it ends."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from probes.errors import DeviceUnusable, Exit, ProbeError, UsageError
from probes.fit.measured import nursery
from probes.fit.measured.bracket import Hint, summary
from probes.fit.measured.nursery import Began, Found, Hunt
from probes.fit.question import NOT_BUILT, Axis, Cap, Measured, Question, Trial
from probes.machine.snapshot import floor_bytes, meminfo_bytes, spendable_bytes
from probes.records.schema import Failed
from probes.run import supervisor
from probes.shared.units import binary_bytes
from probes.shared.unknown import Unknown

NOT_BEGUN: Final = Began(NOT_BUILT, "No trial was begun.")
IMPORT_S: Final = 60.0  # beyond the limit, for a cold import of torch and transformers


@dataclass(frozen=True)
class Ask:
    """What to measure. `hint` is where the search begins."""

    config: Mapping[str, Any]
    asked: Question
    device: Literal["cpu", "gpu"]
    axis: Axis
    budget: int
    hint: Hint
    most: int
    limit_s: float
    cap: Cap = "auto"


def measure(ask: Ask, heard: Callable[[Trial], None], *, root: Path = Path("/")) -> Measured:
    """Try sizes until the largest that fits is known, or until time is up.

    Raises DeviceUnusable where the host hasn't the memory or torch is missing, and what refuses the model.
    """
    if ask.device == "cpu":
        refuse_what_the_host_lacks(ask.budget, root)
    trials: list[Trial] = []

    def hear(message: Found) -> None:
        if message.trial is not None:
            trials.append(message.trial)
            heard(message.trial)

    hunt = Hunt(
        json.dumps(dict(ask.config)),
        ask.asked,
        ask.device,
        ask.axis,
        ask.budget,
        ask.hint,
        ask.most,
        ask.limit_s,
        ask.cap,
    )
    ended = supervisor.oversee(
        hunt,
        nursery.found,
        limit_s=ask.limit_s + IMPORT_S,
        heard=hear,
        command=supervisor.running(nursery.__name__),
    )
    why = ""
    if isinstance(ended.outcome, Failed):
        if not trials and ended.outcome.exit_code != Exit.INTERRUPTED:
            raise _raised(ended.outcome)
        why = ended.outcome.reason
    traced = next((message for message in ended.records if message.taken is not None), None)
    began = next((message.began for message in ended.records if message.began is not None), None)
    return assembled(ask, trials, traced, began or NOT_BEGUN, seconds=ended.seconds, why=why)


def assembled(
    ask: Ask, trials: list[Trial], traced: Found | None, began: Began, *, seconds: float, why: str
) -> Measured:
    """What the trials say together. Pure."""
    tries = [(trial.size, trial.verdict == "fits") for trial in trials if trial.verdict != "out_of_time"]
    largest = summary(tries, ask.axis, most=ask.most)
    at = next((trial for trial in trials if trial.size == largest.fits), None)
    if not why and not largest.ended:
        why = f"the limit of {ask.limit_s:.0f} s was reached"
    return Measured(
        device=(traced.device if traced else "") or ask.device.upper(),
        cap=began.cap,
        largest=largest,
        trials=tuple(trials),
        at_size=traced.taken
        if traced and traced.taken is not None
        else Unknown("nothing that fits was traced"),
        peak_bytes=at.peak_bytes if at else Unknown("nothing fits"),
        seconds=seconds,
        ended=why,
        built=began.built,
        notes=began.notes,
    )


def refuse_what_the_host_lacks(budget: int, root: Path) -> None:
    """Raise DeviceUnusable where a process with this budget could take the host's last memory.

    A container's own limit isn't a reason: the kernel kills the trial, whose size then doesn't fit.
    """
    available = meminfo_bytes(root, "MemAvailable")
    if isinstance(available, Unknown):
        raise DeviceUnusable(f"how much memory is free isn't known: {available.reason}", "predict only")
    most = spendable_bytes(available, floor_bytes(available))
    if budget > most:
        raise DeviceUnusable(
            f"trials may take {binary_bytes(budget)}, and this host can spare {binary_bytes(most)}",
            f"give a budget of at most that: --budget {most}",
        )


def _raised(failed: Failed) -> ProbeError:
    """The worker's refusal, with its exit code."""
    kinds = {int(kind.exit_code): kind for kind in (DeviceUnusable, UsageError)}
    return kinds.get(failed.exit_code, ProbeError)(failed.reason, failed.hint)
