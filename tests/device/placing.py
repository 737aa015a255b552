"""Placement on a GPU, group by group: `python tests/device/placing.py --only square --out DIR` (see
run_placement.sh).

Each group is a process of its own and writes DIR/bars/bench-placement-GROUP.json: bars, and as rows of their
own every case with what its plan predicted and what was measured. `summary` judges the predictions of all
groups.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from board import Board
from placing_case import BUDGET, BY_HAND, Bench, Found
from placing_measure import Vram, cores, free, line_rate
from placing_models import Model, square

from probes.core.errors import PlanImpossible
from probes.placement import Plan

OVER_LINK = "x the link's limit for the bytes that don't fit"


class Group:
    """What every group needs."""

    def __init__(self, board: Board, machine: str, vram: Vram) -> None:
        self.board, self.machine, self.vram = board, machine, vram
        self.begun = time.monotonic()

    @contextmanager
    def tried(self, what: str) -> Iterator[None]:
        """A failure is a row and a missed bar, and what comes after it is measured all the same."""
        said = ""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:500]
        if said:
            free()  # now that nobody holds the failed case's frames any more
            self.board.bar(f"{what}: failures", 1, 0, "failures", error=said)

    def bench(self, model: Model) -> Bench:
        """A model to measure."""
        return Bench(model, self.machine, self.vram)

    def keep(self, name: str, found: Found, bench: Bench | None = None) -> None:
        """A case as a row, and the bars that hold for each: nothing above the budget, peaks as predicted."""
        row = found.row()
        if bench:
            reference = bench.reference(found.plan.workload.batch)
            row["resident"] = {"eager_s": reference.eager_s, "captured_s": reference.captured_s}
        self.board.line({"case": name, "at_s": round(time.monotonic() - self.begun, 1), **row})
        replayed = found.more["captured_differing"]
        if replayed is not None and found.plan.objective == "exact":
            self.board.bar(f"{name}, captured: differing bits", replayed, 0, "elements")
        taken = found.more["taken"]
        for what in ("vram", "pinned"):
            if taken[f"{what}_asked"]:
                over = taken[f"{what}_taken"] / taken[f"{what}_asked"]
                self.board.bar(f"{name}: {what} taken over asked", over, 1.02, "x")
        peak, predicted = found.vram["peak"], found.plan.vram.total
        share = found.vram["reserved"] / found.plan.vram_budget
        self.board.bar(
            f"{name}: peak VRAM over the budget", share, 1.0, "x", nvml_bytes=found.vram["nvml_now"]
        )
        if found.plan.machine != BY_HAND:
            self.board.bar(f"{name}: peak VRAM as predicted", abs(predicted / peak - 1), 0.03, "share off")


def squares(group: Group) -> None:
    """40 layers of 8192 x 8192 bfloat16: fused at batch 1, bit-identical at 1, 256 and 2048."""
    bench = group.bench(square(40))
    bench.resident(1, 256, 2048)
    with group.tried("40 layers, batch 1, fused"):
        _fused(group, bench)
    for batch, limit in ((1, 3.0), (256, 2.1), (2048, 1.15)):
        name = f"40 layers, batch {batch}, bit-identical"
        with group.tried(name):
            exact = bench.measure(bench.quicker_plan(batch, "exact"))
            group.keep(name, exact, bench)
            over = exact.best_s / bench.reference(batch).best_s
            group.board.bar(f"{name}, over all-resident", over, limit, "x")
            group.board.bar(f"{name}: differing bits", exact.differing, 0, "elements")


def _fused(group: Group, bench: Bench) -> None:
    fused = bench.measure(bench.plan(1, "fast"))
    group.keep("40 layers, batch 1, fused", fused, bench)
    reference = bench.reference(1)
    over = fused.best_s / reference.best_s
    group.board.bar("40 layers, batch 1, fused, over all-resident", over, 1.10, "x")
    group.board.bar("moonshot: the same", over, 0.95, "x")
    group.board.figure("40 layers, batch 1, fused, eager over eager", fused.eager_s / reference.eager_s, "x")
    group.board.figure("40 layers, batch 1, fused: worst error", fused.worst_error, "of the largest output")


def twice(group: Group) -> None:
    """8.6 GB in 4 GiB."""
    bench = group.bench(square(64))
    bench.resident(1)
    rate = line_rate()
    for objective in ("fast", "exact"):
        with group.tried(f"64 layers, {objective}"):
            # with "fast" the CPU helps, and no graph holds its work
            found = bench.measure(bench.plan(1, objective, captured=objective == "exact"))
            group.keep(f"64 layers, batch 1, {objective}", found, bench)
            weights = sum(block.weight_bytes for block in found.plan.blocks)
            over = found.best_s / ((weights - BUDGET) / rate)
            group.board.bar(f"64 layers (twice the VRAM), {objective}", over, 0.62, OVER_LINK, line_rate=rate)
            if objective == "exact":
                group.board.bar("64 layers, exact: differing bits", found.differing, 0, "elements")


def dtypes(group: Group) -> None:
    """float16 and float32, Gaussian: what doesn't fit is streamed packed."""
    rate = line_rate()
    for model, limit in ((square(40, dtype=torch.float16), 0.92), (square(20, dtype=torch.float32), 0.90)):
        bench = group.bench(model)
        bench.resident(1)
        for by_hand in (True, False):
            with group.tried(f"{model.name}, {'by hand' if by_hand else 'as planned'}"):
                _narrowed(group, bench, by_hand=by_hand, rate=rate, limit=limit)
        del bench
        free()


def _narrowed(group: Group, bench: Bench, *, by_hand: bool, rate: float, limit: float) -> None:
    made = bench.spread("streamed_packed") if by_hand else bench.plan(1, "exact")
    found = bench.measure(made)
    how = "streamed packed" if by_hand else "as planned"
    group.keep(f"{bench.model.name}, {how}", found, bench)
    moved = sum(b.weight_bytes for b in made.blocks if b.wire_bytes)
    weights = sum(b.weight_bytes for b in made.blocks)
    over = found.best_s / ((moved if by_hand else weights - BUDGET) / rate)
    group.board.bar(f"{bench.model.name}, {how}", over, limit, OVER_LINK, line_rate=rate)
    group.board.bar(f"{bench.model.name}, {how}: differing bits", found.differing, 0, "elements")


def stream(group: Group) -> None:
    """Unpacked streaming against the pinned line rate, eager and captured."""
    bench = group.bench(square(40))
    bench.resident(1)
    made = bench.spread("streamed")
    rate = line_rate()
    found = bench.measure(made)
    group.keep("40 layers, streamed", found, bench)
    wire = sum(block.wire_bytes for block in made.blocks)
    for how, seconds in (("eager", found.eager_s), ("captured", found.captured_s)):
        name = f"unpacked streaming, {how}, wall"
        if seconds is None:
            group.board.waive(name, found.why_not)
        else:
            group.board.bar(
                name, wire / seconds / rate, 0.97, "of the pinned line rate", at_least=True, line_rate=rate
            )
    group.board.bar("unpacked streaming: differing bits", found.differing, 0, "elements")


def zoo(names: tuple[str, ...]) -> Callable[[Group], None]:
    """Published architectures, random weights: same bits, and a replay takes what its own kernels take."""

    def run(group: Group) -> None:
        import placing_models as models

        for name in names:
            model: Model = getattr(models, name)()
            bench = group.bench(model)
            weights = sum(p.numel() * p.element_size() for p in bench.module.parameters())
            bench.resident(1, 8)
            for batch in (1, 8):
                with group.tried(f"{model.name}, batch {batch}"):
                    _architecture(group, bench, batch, _tight(bench, batch, weights))
            del bench
            free()

    return run


def both(first: Callable[[Group], None], second: Callable[[Group], None]) -> Callable[[Group], None]:
    """One after the other."""

    def run(group: Group) -> None:
        first(group)
        second(group)

    return run


def _tight(bench: Bench, batch: int, weights: int) -> Plan:
    """A plan in 0.75 of what the weights take, at most 4 GiB; in more where that's impossible."""
    budget = min(BUDGET, int(weights * 0.75))
    while True:
        try:
            return bench.plan(batch, "exact", budget=budget)
        except PlanImpossible:
            budget += 64 << 20


def _architecture(group: Group, bench: Bench, batch: int, made: Plan) -> None:
    found = bench.measure(made)
    title = f"{bench.model.name}, batch {batch}"
    group.keep(title, found, bench)
    group.board.bar(f"{title}: differing bits", found.differing, 0, "elements")
    name = f"{title}: replay's wall time over its device time"
    if found.captured_s is None:
        group.board.waive(name, found.why_not)
    else:
        group.board.bar(name, found.captured_s / found.more["replay_device_s"], 1.15, "x")


def packing(group: Group) -> None:
    """Packing on the GPU and on the host's cores."""
    from probes.placement.packing.tensors import pack

    for device, n_bytes in (("cuda", 1 << 29), ("cpu", 1 << 28)):
        weights = (torch.randn(n_bytes // 2 // 8192, 8192, device=device) * 0.02).bfloat16()
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            packed = pack(weights)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            assert packed is not None
            del packed
        name = f"packing on {'the GPU' if device == 'cuda' else f'{cores()} cores'}"
        group.board.figure(name, n_bytes / sorted(times)[1] / 1e9, "GB/s")
        rate = n_bytes / min(times[1:]) / 1e9
        if device == "cuda":
            group.board.bar(name, rate, 1.5, "GB/s", at_least=True)


def groups() -> dict[str, Callable[[Group], None]]:
    """All groups by name, in the order in which they run."""
    from placing_any import any_architecture
    from placing_eager import eager
    from placing_experts import experts
    from placing_generate import qwen
    from placing_load import load_group
    from placing_peers import peers
    from placing_refined import refined
    from placing_summary import summary
    from placing_times import times
    from placing_trouble import trouble

    return {
        "square": squares,
        "twice": twice,
        "dtypes": dtypes,
        "stream": stream,
        "qwen": qwen,
        "bert": zoo(("bert",)),
        "gpt2": zoo(("gpt2_xl",)),
        "dit": zoo(("dit",)),
        "experts": both(zoo(("experts",)), experts),
        "peers": peers,
        "trouble": trouble,
        "packing": packing,
        "load": load_group,
        "times": times,
        "eager": eager,
        "refined": refined,
        "any": any_architecture,
        "summary": summary,
    }


def profile_of(name: str) -> str:
    """The planner's profile of a card, by torch's name of it."""
    lowered = name.lower()
    return next(known for known in ("h200", "h100") if known in lowered)


def main() -> int:
    """Run the groups that are named, in this process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--only", required=True, choices=groups())
    parser.add_argument("--out", type=Path, default=Path("reports/placement"))
    parser.add_argument("--machine", default=os.environ.get("WEIR_MACHINE", ""))
    args = parser.parse_args()
    results = args.out / "bars"
    results.mkdir(parents=True, exist_ok=True)
    part = ""
    if args.only == "any":
        asked = (os.environ.get("ANY_WAYS", ""), os.environ.get("ANY_MODELS", "").replace(":", "-"))
        part = "-".join(filter(None, asked))
    board = Board(
        f"placement-{args.only}{part and '-' + part}",
        command=f"tests/device/run_placement.sh --only {args.only}",
        results=results,
    )
    if args.only == "summary":  # reads results, and needs no card
        groups()[args.only](SimpleNamespace(board=board))
        return board.finish()
    vram = Vram()  # before anything uses CUDA
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    board.line({"device": name, "torch": torch.__version__, "cores": cores(), "machine": args.machine})
    group = Group(board, args.machine or profile_of(name), vram)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: what was measured so far is kept"))
    try:
        with group.tried(args.only):
            groups()[args.only](group)
    finally:
        status = board.finish()
    return status


if __name__ == "__main__":
    sys.exit(main())
