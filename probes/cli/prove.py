"""The verb `prove`: the kernels of placement on this card, its bits compared with the recorded ones."""

import argparse
import json
from pathlib import Path

from probes.cli.arguments import Verbs, add_verb
from probes.core import files
from probes.core.errors import Exit, UsageError
from probes.core.output import echo, option, progress
from probes.measure.worker import require_torch
from probes.records.files import reserving


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    prove = add_verb(
        verbs,
        "prove",
        "run the kernels that unpack and multiply on this card in 260 cases, compare the bits with recorded "
        "ones, and time them",
        exits="0: every bit is right; 4: a case is wrong, which the report names; 3: no card that "
        "runs kernels. "
        "Nothing is sent anywhere: attach the report to an issue.",
    )
    option(prove, "--report", "FILE", "write all cases with their bits and times, as JSON", Path)
    option(prove, "--kernel", "NAME", "only kernels with this in their name, e.g. unpack")
    prove.set_defaults(do=_prove)


def _prove(args: argparse.Namespace) -> Exit:
    require_torch("run it where torch is built for ROCm or CUDA")
    from probes.measure import proving

    device = proving.card()
    facts = proving.machine(device)
    echo(f"{facts['card']}, {facts['target']}, Triton {facts['triton']}")
    rows = []
    with reserving(args.report, "choose a place that can be written: --report FILE") as place:
        for row in proving.prove(device, args.kernel or ""):
            rows.append(row)
            progress(f"{len(rows)} cases, {sum(bool(of.wrong) for of in rows)} wrong: {row.case}")
        if not rows:
            raise UsageError(f"no kernel has {args.kernel} in its name", "leave --kernel out for all")
        if place:
            files.write_text(place, json.dumps(proving.document(facts, rows), indent=1) + "\n")
    echo("\n".join(summary(rows)))
    return Exit.BROKEN if any(row.wrong for row in rows) else Exit.OK


def summary(rows: "list") -> list[str]:  # type: ignore[type-arg]
    """A line for each kernel, then the cases that are wrong."""
    lines = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        own = [row for row in rows if row.kernel == kernel]
        right = sum(not row.wrong for row in own)
        recorded = sum(bool(row.recorded) for row in own)
        text = f"{kernel}: {right} of {len(own)} cases right, {recorded} with recorded bits"
        times = [row.weights / row.median_s / 1e9 for row in own if row.median_s]
        if times:
            text += f", {max(times):.3g} billion weights/s at most"
        lines.append(text)
    lines += [f"wrong: {row.case}: {row.wrong}" for row in rows if row.wrong]
    return lines
