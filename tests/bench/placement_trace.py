"""Traces: their counts against torch's own, and predicted passes against those that were recorded on GPUs.

`bars(board)` is called by bench_placement.py. The recorded passes were seen by whoever wrote the cost model:
they are not held out. BERT's were recorded by a transformers that gave a mask, so they are traced with one.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from board import Board
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "device"))

from placing_architectures import BATCHES, SHARES, every  # noqa: E402
from placing_models import Model  # noqa: E402
from placing_times import judged, traced  # noqa: E402

from probes.core.errors import CheckpointUnreadable, ModelUnknown  # noqa: E402
from probes.placement.models.description import ModelDescription  # noqa: E402
from probes.placement.models.families import from_config  # noqa: E402
from probes.placement.models.modules import describe_module  # noqa: E402
from probes.placement.models.operations import EXPERTS, Operation  # noqa: E402
from probes.placement.planner.api import resolve_model  # noqa: E402
from probes.placement.planner.costs import GpuTime  # noqa: E402
from probes.placement.planner.machine import profile  # noqa: E402
from probes.placement.planner.rules import Pass  # noqa: E402
from probes.placement.trace import as_it_was, fill, no_packed_sequences, trace_pass  # noqa: E402
from probes.placement.types import Workload  # noqa: E402

RECORDED = {"h200": "bench-placement-times.json", "h100": "bench-placement-times-h100.json"}
META, CPU = torch.device("meta"), torch.device("cpu")


def bars(board: Board) -> None:
    """All of it."""
    _counts(board)
    _recorded(board)
    cases = len(every()) * len(BATCHES) * len(SHARES)
    for how in ("captured", "eager"):
        name = f"{cases} cases of {len(every())} architectures, {how}: predicted time, out of memory"
        board.waive(name, "needs a GPU: tests/device/run_placement.sh --only any")


def on_meta(model: Model) -> nn.Module:
    """The model in its dtype, without weights."""
    torch.set_default_dtype(model.dtype)
    try:
        with META:
            return model.build().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def _counts(board: Board) -> None:
    """Each architecture's FLOPs, and what tracing takes."""
    differing, seconds = [], []
    for model in every():
        module, given = on_meta(model), model.inputs(1, META)
        begun = time.perf_counter()
        trace = trace_pass(module, (), given)
        seconds.append(time.perf_counter() - begun)
        theirs = _by_torch(module, given)
        if theirs not in _sums(trace.operations):
            differing.append({"model": model.name, "traced": trace.flops, "torch": theirs})
        row = {"flops": trace.flops, "operations": trace.count, "seconds": seconds[-1]}
        peak = {"alive_bytes": trace.peak.alive, "reserved_bytes": trace.peak.reserved}
        board.line({"traced": model.name, **row, **peak})
    board.bar(
        "architectures whose traced FLOPs differ from torch's", len(differing), 0, "models", which=differing
    )
    board.figure("seconds to trace a pass, median", statistics.median(seconds), "s", worst=max(seconds))


def _sums(operations: Sequence[Operation]) -> set[int]:
    """FLOPs with and without what torch's counter for a CPU counts as products, or not at all."""
    classes = {"attention": 0, "recurrent": 0, "experts": 0}
    rest = 0
    for operation in operations:
        name = "experts" if operation.name in EXPERTS else str(operation.kind)
        if name in classes:
            classes[name] += operation.flops
        else:
            rest += operation.flops
    return {rest + sum(chosen) for n in range(4) for chosen in itertools.combinations(classes.values(), n)}


def _by_torch(module: nn.Module, given: dict[str, Any]) -> int:
    """By torch's FlopCounterMode, on fake tensors of a CPU."""
    counter = FlopCounterMode(display=False)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        as_it_was(module),
        no_packed_sequences(),
        torch.no_grad(),
    ):
        fill(module, "cpu")
        made = {
            name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        with counter:
            module(**made)
    return int(counter.get_total_flops())


def _recorded(board: Board) -> None:
    """Resident captured passes: by rules and by traces against what was measured."""
    errors: dict[str, list[float]] = {"rules": [], "traces": []}
    rows = dict(_measured())
    for model, cases in judged() + traced():
        module = on_meta(model)
        for case in cases:
            name = f"{model.name}, batch {case.batch}, {case.objective}"
            workload = Workload(case.batch, model.tokens)
            for machine in RECORDED:
                resident_s = rows.get((machine, name))
                if resident_s is None:
                    continue
                found = {
                    "rules": _resident_s(_by_rule(module), machine, workload),
                    "traces": _resident_s(_traced(model, module, workload), machine, workload),
                }
                for how, seconds in found.items():
                    errors[how].append(seconds / resident_s - 1)
                predicted = {f"predicted_by_{how}_s": seconds for how, seconds in found.items()}
                board.line(
                    {
                        "recorded earlier, seen": name,
                        "machine": machine,
                        "measured_s": resident_s,
                        **predicted,
                    }
                )
    for how, found in errors.items():
        sizes = sorted(map(abs, found))
        within = sum(size <= 0.10 for size in sizes)
        label = f"resident captured passes recorded earlier and seen, predicted by {how}"
        more = {"cases": len(sizes), "worst": sizes[-1], "within_10_percent": within}
        board.figure(f"{label}, median", statistics.median(sizes), "share off", **more)


def _measured() -> Iterator[tuple[tuple[str, str], float]]:
    for machine, file in RECORDED.items():
        for row in json.loads((ROOT / "docs" / "results" / file).read_text(encoding="utf-8"))["rows"]:
            if row.get("resident_s"):
                yield (machine, row["times"]), row["resident_s"]


def _by_rule(module: nn.Module) -> ModelDescription:
    """As torchless plans describe it: by its config where there is a rule for that, else by its tensors."""
    config: Any = getattr(module, "config", None)
    try:
        dtype = str(next(module.parameters()).dtype)
        values = {**config.to_dict(), "dtype": dtype, "architectures": [type(module).__name__]}
        return from_config(values, name="m", where="its config")
    except (AttributeError, CheckpointUnreadable, ModelUnknown):
        return describe_module(module)


def _traced(model: Model, module: nn.Module, workload: Workload) -> ModelDescription:
    given = model.inputs(workload.batch, CPU)
    if "BERT" in model.name:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    return resolve_model(module, workload, given)


def _resident_s(model: ModelDescription, machine: str, workload: Workload) -> float:
    work = Pass(workload.batch * workload.tokens, workload.batch, workload.tokens, "exact", captured=True)
    return sum(GpuTime(block, profile(machine), work).from_vram() for block in model.blocks)
