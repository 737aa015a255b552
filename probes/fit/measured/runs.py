"""Trials from the parent's side: whether the host has memory, the worker, and what is kept when it ends."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from probes.errors import DeviceUnusable, Exit, ProbeError, UsageError
from probes.fit.measured import nursery
from probes.fit.measured.bracket import summary
from probes.fit.measured.caps import DATA_LIMIT, GPU_LIMIT
from probes.fit.measured.nursery import Found, Hunt
from probes.fit.question import Axis, Measured, Question, Trial
from probes.machine.snapshot import available_bytes, floor_bytes, spendable_bytes
from probes.records.schema import Failed
from probes.run import supervisor
from probes.shared.units import binary_bytes
from probes.shared.unknown import Unknown

IMPORT_S: Final = 60.0  # beyond the limit, for a cold import of torch and transformers


@dataclass(frozen=True)
class Ask:
    """What to measure. `guess` is where the search begins."""

    config: Mapping[str, Any]
    asked: Question
    device: Literal["cpu", "gpu"]
    axis: Axis
    budget: int
    guess: int
    most: int
    limit_s: float


def command(descriptor: int) -> list[str]:
    """The worker's command line."""
    return [sys.executable, "-m", nursery.__name__, str(descriptor), str(os.getpid())]


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
        ask.guess,
        ask.most,
        ask.limit_s,
    )
    ended = supervisor.oversee(
        hunt, nursery.found, limit_s=ask.limit_s + IMPORT_S, heard=hear, command=command
    )
    why = ""
    if isinstance(ended.outcome, Failed):
        if not trials and ended.outcome.exit_code != Exit.INTERRUPTED:
            raise _raised(ended.outcome)
        why = ended.outcome.reason
    traced = next((message for message in ended.records if message.taken is not None), None)
    return assembled(ask, trials, traced, seconds=ended.seconds, why=why)


def assembled(ask: Ask, trials: list[Trial], traced: Found | None, *, seconds: float, why: str) -> Measured:
    """What the trials say together. Pure."""
    known = {trial.size: trial.verdict == "fits" for trial in trials if trial.verdict != "out_of_time"}
    largest = summary(known, ask.axis, most=ask.most)
    at = next((trial for trial in trials if trial.size == largest.fits), None)
    if not why and not largest.exact:
        why = f"the limit of {ask.limit_s:.0f} s was reached"
    return Measured(
        device=(traced.device if traced else "") or ask.device.upper(),
        cap=DATA_LIMIT if ask.device == "cpu" else GPU_LIMIT,
        largest=largest,
        trials=tuple(trials),
        at_size=traced.taken
        if traced and traced.taken is not None
        else Unknown("nothing that fits was traced"),
        peak_bytes=at.peak_bytes if at else Unknown("nothing fits"),
        seconds=seconds,
        ended=why,
    )


def refuse_what_the_host_lacks(budget: int, root: Path) -> None:
    """Raise DeviceUnusable where a process with this budget could take the host's last memory."""
    available = available_bytes(root)
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
