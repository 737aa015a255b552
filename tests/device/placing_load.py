"""A checkpoint larger than the budget, loaded tensor by tensor: `run_placement.sh --only load`.

Qwen2.5-3B is written to a folder as safetensors. A process of its own, `python tests/device/placing_load.py
FOLDER`, loads it by the plan there, then another one, which finds what the first has packed. Host memory is
that process's own, of no file, beyond what it had after a small model was loaded the same way.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from placing_measure import Vram, differing_bits, free, host_bytes, wall_s
from placing_models import Model, qwen_3b, square
from torch import nn

from probes.core.codec import encode
from probes.placement import load, plan, read_plan

ROW = "loaded: "


def load_group(group: Any) -> None:
    """The bars of loading."""
    from safetensors.torch import save_file

    bench = group.bench(qwen_3b())
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        output = bench.model.output(bench.one_pass(1)()).cpu()
        torch.save(output, folder / "output.pt")
        state = {key: value.cpu() for key, value in bench.module.state_dict().items()}
        state.pop("lm_head.weight")  # tied to the embedding
        save_file(state, folder / "model.safetensors")
        with torch.device("meta"):  # so the plan counts what loading takes; to("meta") would untie weights
            bench.module = _factory(bench.model)().eval()
        made = bench.plan(1, "exact")
        del state
        free()
        (folder / "plan.json").write_text(json.dumps(encode(made)))
        found = {nth: _child(folder) for nth in ("first", "second")}
    board = group.board
    for nth, row in found.items():
        title = f"Qwen2.5-3B, {nth} load"
        board.line({"loaded": title, **row})
        board.bar(f"{title}: differing bits", row["differing"], 0, "elements")
        over = row["host_peak"] / made.host.total
        board.bar(f"{title}: host memory over the plan's", over, 1.0, "x")
        board.bar(f"{title}: peak VRAM over the budget", row["reserved"] / made.vram_budget, 1.0, "x")
        board.figure(title, row["load_s"], "s")


def _child(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "WEIR_STATE": str(folder / "state")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(ROW)]
    if done.returncode or not found:
        raise RuntimeError(f"the loading process ended with {done.returncode}")
    loaded: dict[str, Any] = json.loads(found[-1].removeprefix(ROW))
    return loaded


def _anonymous() -> int:
    """Bytes of this process that are of no file: the heap, arenas, pinned memory."""
    now = host_bytes()
    return now["RssAnon"] + now["RssShmem"]


@contextmanager
def _highest(found: list[int]) -> Iterator[None]:
    """Append the most anonymous memory that there was meanwhile, seen every 2 ms."""
    ended = threading.Event()
    seen = [_anonymous()]

    def look() -> None:
        while not ended.wait(0.002):
            seen.append(_anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found.append(max(*seen, _anonymous()))


def _factory(model: Model) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)
        try:
            return model.build()
        finally:
            torch.set_default_dtype(before)

    return build


def _warm(folder: Path) -> None:
    """What torch, Triton and CUDA take once."""
    from safetensors.torch import save_file

    small = square(16, 2048)
    where = folder / "small"
    where.mkdir(exist_ok=True)
    module = _factory(small)()
    made = plan(module, vram=176 << 20, machine="h200", batch=1, captured=True)
    save_file(dict(module.state_dict()), where / "model.safetensors")
    del module
    loaded = load(_factory(small), where, made)
    with torch.inference_mode():
        loaded(torch.zeros(1, 2048, dtype=small.dtype, device="cuda"))
    loaded.placement.remove()


def main(folder: Path) -> None:
    """Load once, and print what was seen."""
    vram = Vram()
    model, made = qwen_3b(), read_plan(folder / "plan.json")
    inputs = model.inputs(1, torch.device("cuda"))
    _warm(folder)
    with torch.device("meta"):
        _factory(model)()  # imports transformers
    free()
    base, peak = _anonymous(), list[int]()
    with vram.capped(made.vram_budget), torch.inference_mode():
        begun = time.perf_counter()
        with _highest(peak):
            module = load(_factory(model), folder / "model.safetensors", made)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        output = model.output(module(**inputs)).cpu()
        wall = wall_s(module.placement.captured(lambda: module(**inputs)))
        seen = vram.peak()
    row = {
        "load_s": seconds,
        "host_base": base,
        "host_peak": peak[0] - base,
        "host_planned": made.host.total,
        "reserved": seen["reserved"],
        "nvml": seen["nvml_now"],
        "captured_s": wall,
        "differing": differing_bits(output, torch.load(folder / "output.pt")),
    }
    print(ROW + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
