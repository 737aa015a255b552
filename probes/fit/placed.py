"""The plan that answers the same question as `fit`: where a model goes that doesn't fit as a whole. Pure."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from probes.core.errors import PlanImpossible, UsageError
from probes.core.invocation import probe_line
from probes.core.units import binary_bytes, typed_bytes
from probes.fit.report import FitReport
from probes.placement.models.description import ModelDescription
from probes.placement.planner.machine import Constants
from probes.placement.planner.plan import make_plan
from probes.placement.types import Workload

MIB: Final = 1 << 20


def workload_of(report: FitReport) -> Workload:
    """The pass that a plan is for: a prompt and room for it in the KV cache, if the model has one."""
    question = report.question
    context = question.tokens if report.predicted.kv_cache else 0
    return Workload(question.batch, question.tokens, context)


def whole_mib(n_bytes: int) -> int:
    """Bytes rounded down to MiB, which is how a command names a budget."""
    return n_bytes // MIB * MIB


def plan_line(model: str, machine: str | None, vram: int, work: Workload, *, host: int | None = None) -> str:
    """The command that plans a pass, with `vram` and `host` in bytes.

    `machine`: as the user names it; None: this host's card.
    """
    named = ["--machine", machine] if machine else []
    words = [Path(model) if model.startswith("-") else model, *named, "--vram", typed_bytes(vram)]
    words += ["--host", typed_bytes(host)] if host is not None else []
    sizes = {"--batch": work.batch, "--tokens": work.tokens, "--context": work.context_tokens}
    words += [word for name, n in sizes.items() if n not in (0, 1) for word in (name, str(n))]
    return probe_line("plan", *words)


def with_placement(
    report: FitReport, model: ModelDescription, machine: Constants, *, named: str
) -> FitReport:
    """The report; where inference doesn't fit but runs when placed, with a note that names the command.

    `named`: the machine, as the user names it.
    """
    if report.fits or report.question.task != "inference" or not machine.has_gpu:
        return report
    work, vram = workload_of(report), whole_mib(report.budget_bytes)
    try:
        made = make_plan(model, machine, vram=vram, host=None, workload=work, objective="exact").plan
    except (PlanImpossible, UsageError):
        return report
    outside = binary_bytes(made.host.pinned + made.host.pageable + made.host.disk)
    line = plan_line(report.question.model, named, vram, work)
    note = f"placed, it runs, with {outside} outside the VRAM: {line}"
    return replace(report, notes=(*report.notes, note))
