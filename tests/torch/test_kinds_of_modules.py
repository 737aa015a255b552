"""Kinds of modules and calls that users place: the same outputs, or refused before anything has changed."""

import os
import re
from dataclasses import fields, is_dataclass
from functools import partial

import pytest
import torch
from kinds_of_modules import KINDS, Kind
from late_lanes import LateLanes
from random_models import TIERS, plan_of
from test_random_placements import exact_linear

from probes.core.errors import PlacementError
from probes.placement.models.modules import describe_module, find_blocks
from probes.placement.runtime import hooks
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights, WeightSource
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, for what is deprecated and used
PASSES = 4  # with graphs, the third is recorded
REFUSED = {
    "embedding with a largest norm": "can only be resident",
    "bag of embeddings with a largest norm": "can only be resident",
    "a weight by dlpack": "has no address",
    "a weight by older dlpack": "Cannot access data pointer",
    "a weight by its address": "has no address",
    "a weight by its storage": "data is not allocated|invalid python storage",
    "a weight as an exchanged parameter": "was exchanged after",
    "data that is exchanged in a pass": "can't be changed",
    "a weight written to": "can't be changed",
    "a weight written to in part": "can't be changed",
    "a weight that is a function's output": "can't be changed",
    "a weight returned in an object": "keeps a weight",
    "weights put into a list": "keeps a weight",
    "weights read by a closure of a call": "keeps a weight",
}


class FromDisk(ModuleWeights):
    """A module's own values, as if they were in a file."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def weight_source(self, stored, _lanes):
        flat = torch.zeros(stored.n_bytes, dtype=torch.uint8)
        for item in stored.items:
            self.kept[id(item.entry)] = item.entry.parameter.detach().clone()
            item.raw(flat).copy_(item.entry.parameter.detach())
        return WeightSource(flat)

    def fill(self, entry, target):
        if id(entry) in self.kept:
            target.copy_(self.kept[id(entry)])
        else:
            super().fill(entry, target)


def across(tensor, device):
    """To another device and back, as a GPU's tensors go to the host."""
    return tensor.clone() if not torch.is_inference_mode_enabled() else _ordinary(tensor)


def _ordinary(tensor):
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def divided(model):
    """The names of blocks, of which those that can be divided are."""
    return [block.name for block in describe_module(model).divided().blocks]


WAYS = ("streamed", "packed", "mixed", "cpu", "disk", "divided", "recorded", "fused")


def placed(model, way, seed=0, *, steady=True):
    """A model placed in one of the ways, on the CPU."""
    names = divided(model) if way == "divided" else None
    blocks = [block for block in find_blocks(model, names) if block.called]
    mixed = {block.name: TIERS[1 + (i + seed) % 5] for i, block in enumerate(blocks)}
    tiers = mixed if way in ("mixed", "fused") else {}
    if way in ("streamed", "packed", "cpu", "disk"):
        tiers = {block.name: way for block in blocks}
    if way in ("recorded", "divided"):
        tiers = {
            block.name: ("streamed", "streamed_packed", "packed")[(i + seed) % 3]
            for i, block in enumerate(blocks)
        }
    rings = PrefetchPool(2, scratches=2)
    plan = plan_of(model, tiers, rings, names=names, objective="fast" if way == "fused" else "exact")
    late = way == "recorded" or (
        steady and way in ("mixed", "divided")
    )  # who writes to a weight is found stale
    lanes = LateLanes(seed) if late else Streams()
    work = PackedOperations()
    if way == "fused":
        work = PackedOperations(linear=exact_linear, multiplies=bool)
    elif isinstance(lanes, LateLanes):
        work = PackedOperations(reads=lanes.reads)
    with torch.no_grad(), torch.inference_mode(False):
        handle = place_model(model, plan, FromDisk(), lanes, work=work, capture=way == "recorded")
    lanes.engine = handle._engine
    return handle


def same(one, other):
    """Whether two outputs are equal in kind and in every bit."""
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided or one.is_nested:
            return one.is_nested == other.is_nested and same(list(one.unbind()), list(other.unbind()))
        return type(one) is type(other) and one.dtype is other.dtype and torch.equal(bits(one), bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict | hooks.Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | hooks.deque | hooks.UserList):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if hasattr(one, "__dict__") and not callable(one):
        return same(vars(one), vars(other))
    return one == other or one is other or callable(one)


def bits(tensor):
    return (
        tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
    )


def noted(model):
    """What `remove()` has to give back."""
    parameters = {
        name: (one, one.detach().clone(), one.stride(), one.requires_grad, dict(vars(one)))
        for name, one in model.named_parameters()
    }
    return parameters, {name: one.detach().clone() for name, one in model.named_buffers()}


def require_given_back(model, before):
    parameters, _ = before
    assert dict(model.named_parameters()).keys() == parameters.keys()
    for name, one in model.named_parameters():
        known, values, stride, trains, attributes = parameters[name]
        assert one is known, name
        assert same(one.detach(), values), name
        assert one.stride() == stride, name
        assert one.requires_grad is trains, name
        assert vars(one).items() >= attributes.items(), name
    for module in model.modules():
        assert not {"forward", "_apply", "_save_to_state_dict", "load_state_dict"} & vars(module).keys()


def made(kind):
    torch.manual_seed(0)
    return kind.make().eval().requires_grad_(False)


def work_or_refusal(kind, model, refused):
    """What the work gives, or None where it is refused for this reason."""
    try:
        return kind.work(model)
    except (PlacementError, RuntimeError) as error:
        if not refused or not re.search(refused, str(error)):
            raise
        return None


def compare(kind, way, monkeypatch, *, seed, refused=None):
    """`refused`: what a refusal says; none is expected where it isn't given."""
    if way == "cpu":
        monkeypatch.setattr(hooks, "on_device", across)
    model, own = made(kind), made(kind)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(
            number % 3 != 0 and (parameter.is_floating_point() or parameter.is_complex())
        )
    mode = partial(torch.inference_mode) if seed % 2 else torch.no_grad
    before = noted(model)
    try:
        handle = placed(model, way, seed, steady=kind.steady)
    except PlacementError as error:
        if not refused or not re.search(refused, str(error)):
            raise
        require_given_back(model, before)
        return
    with mode():
        for number in range(PASSES):
            found = work_or_refusal(kind, model, refused)
            if found is None:
                break
            assert same(kind.work(own), found), f"other outputs in pass {number}"
    if isinstance(handle._engine.streams, LateLanes):
        handle._engine.streams.compute.drain()
    handle.remove()
    if kind.steady:
        require_given_back(model, before)
    with mode():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        assert same(kind.work(own), kind.work(model)), "other outputs after remove()"


def cases(kinds: dict[str, Kind], ways: int):
    """Each kind with so many ways to place it, which others have in turn; all of them in `make thorough`."""
    for number, (name, kind) in enumerate(kinds.items()):
        able = [way for way in WAYS if kind.steady or way != "recorded"]
        each = len(able) if os.environ.get("ALL_CASES") else ways
        for place in range(each):
            yield name, able[(number + place * len(able) // each) % len(able)]


@pytest.mark.parametrize(("name", "way"), list(cases(KINDS, 2)))
def test_a_placed_module_gives_what_it_gives_itself_or_is_refused(name, way, monkeypatch):
    compare(KINDS[name], way, monkeypatch, seed=list(KINDS).index(name), refused=REFUSED.get(name))


def test_there_are_as_many_kinds_as_were_asked_for():
    assert len(KINDS) >= 210
    assert set(REFUSED) <= set(KINDS)
