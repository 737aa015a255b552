"""Each kind of module of tests/torch on a GPU: placed, it gives the bits of the model that is all in VRAM.

Run from the repository root: `python tests/device/kinds_on_gpu.py [seconds]`, 110 of them by default. Needs
torch, pytest and, for models of libraries, transformers, diffusers and peft. Exit code 1: some are wrong.
"""

# ruff: noqa: E402
import re
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "torch"), str(Path(__file__).resolve().parents[2])]

import kinds_of_modules
import torch
from random_models import plan_of
from test_kinds_of_modules import REFUSED, divided, made, same
from torch.utils._pytree import tree_map

from probes.core.errors import PlacementError
from probes.placement import place
from probes.placement.models.modules import find_blocks
from probes.placement.runtime.capture import EAGER_FIRST as RECORDED
from probes.placement.types import PrefetchPool

GPU = torch.device("cuda")
WAYS = {
    "streamed": ("streamed",),
    "packed": ("packed", "streamed_packed"),
    "in place": ("in_place", "streamed"),
    "divided": ("streamed", "streamed_packed", "packed"),
    "recorded": ("streamed", "streamed_packed", "packed"),
    "cpu": ("cpu", "streamed"),  # rounded there otherwise than on a GPU: outputs are close
}


def placed(model, way):
    names = divided(model) if way == "divided" else None
    blocks = [block.name for block in find_blocks(model, names) if block.called]
    tiers = {name: WAYS[way][number % len(WAYS[way])] for number, name in enumerate(blocks)}
    plan = plan_of(model, tiers, PrefetchPool(2, scratches=2), names=names)
    return place(model, plan, device=GPU, capture=way == "recorded")


def close(one, other):
    """Whether tensors in two outputs of one kind are alike, on the same devices."""
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.device != other.device:
            return False
        if one.is_nested or not one.is_floating_point() or not one.numel():
            return True
        most = 2e-2 * max(1.0, float(other.abs().max()))
        return torch.allclose(one.float(), other.float(), rtol=0, atol=most, equal_nan=True)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return type(one) is type(other)


def outcome(kind, model):
    """What the work gives, or the error that it ends with."""
    try:
        return kind.work(model)
    except Exception as error:  # each kind is judged
        return error


def said(error):
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def compare(name, kind, way, refused):
    """Why the kind is wrong when it is placed that way; empty where it isn't.

    An error isn't wrong where it is an expected refusal, or the same that the model itself ends with.
    """
    model, own = made(kind), made(kind).to(GPU)
    before = {key: one.clone() for key, one in model.named_parameters()}
    try:
        handle = placed(model, way)
    except PlacementError as error:
        expected = refused or (GPU_ONLY if way == "cpu" else None)
        return "" if expected and re.search(expected, str(error)) else said(error)
    alike = close if way == "cpu" else same
    try:
        with torch.inference_mode():
            for number in range(4):
                want, found = outcome(kind, own), outcome(kind, model)
                if isinstance(found, Exception):
                    if (refused and re.search(refused, str(found))) or said(found) == said(want):
                        break
                    return f"{said(found)} (pass {number}; {_itself(want)})"
                if isinstance(want, Exception):
                    break  # torch can't do it with the model itself
                if way == "recorded" and number == RECORDED and not alike(want, found):
                    record(own)  # libraries may compute otherwise in a graph: attention without a mask does
                    want = outcome(kind, own)
                if not alike(want, found):
                    return f"other outputs in pass {number}"
    finally:
        handle.remove()
    torch.cuda.synchronize()
    if kind.steady and not all(same(before[key], one.detach()) for key, one in model.named_parameters()):
        return "other weights after remove()"
    return ""


def record(model):
    """Let the model itself, all in VRAM, compute in a graph of torch's from now on."""
    forward = model.forward

    def recorded(*args, **kwargs):
        kept, graph = tree_map(own_copy, (args, kwargs)), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward(*kept[0], **kept[1])
        graph.replay()
        recorded.graph = graph  # its memory holds the output
        return output

    model.forward = recorded


def own_copy(thing):
    return thing.clone() if isinstance(thing, torch.Tensor) else thing


def _itself(want):
    return f"the model itself: {said(want)}" if isinstance(want, Exception) else "not of the model itself"


GPU_ONLY = "can't compute on the CPU"  # hooks or other blocks' weights that its calls use are on the GPU

# errors of older torch itself for tensors without memory, which its newer releases compile
OLDER = {"a weight in a compiled function": r"tls_on_entry\.has_value\(\) INTERNAL ASSERT"}


def kinds():
    """Kinds of torch's modules, then of the libraries that are installed, with what their refusals say."""
    older = OLDER if torch.torch_version.TorchVersion(torch.__version__) < "2.12" else {}
    refusals = {**REFUSED, **older, "lstm without bias": "joins weights of a recurrent module"}
    yield from ((name, kind, refusals.get(name)) for name, kind in kinds_of_modules.KINDS.items())
    try:
        import kinds_of_libraries
    except ImportError as error:
        print(f"not tried: {error}")
        return
    for name, kind in kinds_of_libraries.KINDS.items():
        yield name, kind, "can't be changed" if name == "adapters merged" else None


def main(seconds: float) -> int:
    warnings.simplefilter("ignore")
    kinds_of_modules.DEVICE = GPU
    end, wrong, tried, left = time.monotonic() + seconds, [], 0, 0
    rounds = [(number, one) for number in range(len(WAYS)) for one in enumerate(kinds())]
    for turn, (number, (name, kind, refused)) in rounds:  # each kind once, then each another way
        way = list(WAYS)[(number + turn) % len(WAYS)]
        if way == "recorded" and not kind.steady:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        tried += 1
        try:
            why = compare(name, kind, way, refused)
        except Exception as error:  # each kind is judged
            why = said(error)
        if why:
            wrong.append(f"{name}, {way}: {why}")
            print(wrong[-1], flush=True)
    print(f"kinds of modules on a GPU: {len(wrong)} wrong of {tried} tried, {left} left for lack of time")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 110.0))
