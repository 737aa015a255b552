"""What modules hold in plain attributes: parameters in lists, and caches, also those of `lru_cache`."""

import copy
import functools
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from random_models import plan_of
from test_kinds_of_modules import FromDisk
from torch import nn
from torch.nn.utils import prune

from probes.placement import plan
from probes.placement.models.modules import describe_module, find_blocks
from probes.placement.runtime.pass_state import PassState
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams


@functools.lru_cache
def table(rows):
    return torch.arange(16.0 * rows).view(rows, 16).sin()


class Positions(nn.Module):
    """Adds a table that it makes in its first call, and keeps."""

    def __init__(self, keep):
        super().__init__()
        self.linear, self.keep = nn.Linear(16, 16), keep
        self.named, self.last, self.state = {}, deque(maxlen=2), SimpleNamespace(found=None)

    def forward(self, given):
        return self.linear(given) + self.keep(self, given)

    @functools.lru_cache  # noqa: B019
    def table(self, rows):
        return (table.__wrapped__(rows),)


def in_a_mapping(module, given):
    return module.named.setdefault(len(given), (table.__wrapped__(len(given)),))[0]


def in_a_queue(module, given):
    module.last.append(given)
    return sum(module.last)


def in_an_object(module, given):
    if module.state.found is None:
        module.state.found = table.__wrapped__(len(given))
    return module.state.found


KEEPS = {
    "a mapping": in_a_mapping,
    "a queue": in_a_queue,
    "an object": in_an_object,
    "a method's cache": lambda module, given: module.table(len(given))[0],
    "a function's cache": lambda _, given: table(len(given)),
}


@pytest.mark.parametrize("keep", KEEPS)
def test_a_plan_leaves_nothing_of_its_trace_in_what_modules_keep(keep):
    table.cache_clear()
    model = nn.Sequential(Positions(KEEPS[keep]), Positions(KEEPS[keep])).requires_grad_(False)
    given = torch.randn(3, 16)
    planned = plan(model, vram=4 << 30, machine="nvidia-h100", inputs=given)
    assert any("traced with fake tensors" in note for note in planned.notes)
    assert not any(part.named or part.last or part.state.found is not None for part in model)
    found = model(given)
    assert type(found) is torch.Tensor
    assert torch.equal(found, model(given)) or keep == "a queue"


def kept_in(model, how):
    weights = [part.weight for part in model.parts]
    model.kept = {
        "a list": weights,
        "a tuple": tuple(weights),
        "a mapping of lists": {"all": weights},
        "an object": SimpleNamespace(all=weights),
    }[how]
    return model


class Penalised(nn.Module):
    """Returns the sum of its weights, too, which it reads where it keeps them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))

    def all(self):
        kept = getattr(self.kept, "all", self.kept)
        return kept["all"] if isinstance(kept, dict) else kept

    def forward(self, given):
        for part in self.parts:
            given = part(given)
        return given, sum(weight.float().square().sum() for weight in self.all())


@pytest.mark.parametrize("how", ["a list", "a tuple", "a mapping of lists", "an object"])
@pytest.mark.parametrize("tier", ["packed", "streamed_packed", "streamed", "disk", "cpu"])
def test_weights_are_read_where_an_attribute_keeps_them(how, tier):
    torch.manual_seed(0)
    model = kept_in(Penalised().requires_grad_(False), how)
    given = torch.randn(2, 64, dtype=torch.bfloat16)
    wanted, before = model(given), list(model.all())
    tiers = {block.name: tier for block in find_blocks(model)}
    handle = place_model(model, plan_of(model, tiers), FromDisk(), Streams())
    assert all(map(torch.equal, model(given), wanted))
    handle.remove()
    assert all(map(torch.equal, model(given), wanted))
    assert all(now is then for now, then in zip(model.all(), before, strict=True))


def test_a_trace_finds_weights_that_an_attribute_keeps():
    model = kept_in(Penalised().requires_grad_(False), "a list")
    planned = plan(
        model, vram=4 << 30, machine="nvidia-h100", inputs=torch.randn(2, 64, dtype=torch.bfloat16)
    )
    assert any("its weights are read outside its own calls" in note for note in planned.notes)


def test_a_pass_that_is_undone_leaves_nothing_in_what_modules_keep():
    module = Positions(in_a_queue)
    state = PassState([], modules=[module])
    module(torch.randn(3, 16))
    assert not state.left_modules_alone
    state.restore()
    assert not module.last


def test_a_copied_layer_can_be_called_once_the_model_is_given_back():
    """A copy has the layer's forward, which was the hook: an IndexError."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    handle = place_model(model, plan_of(model, {"0": "streamed", "1": "packed"}), FromDisk(), Streams())
    twin, given = copy.copy(model[0]), torch.randn(3, 16)
    assert torch.equal(twin(given), model[0](given))
    handle.remove()
    assert torch.equal(twin(given), model[0](given))


def test_a_weight_that_was_renamed_while_it_was_placed_is_given_back():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    before = model[0].weight
    handle = place_model(model, plan_of(model, {"0": "streamed"}), FromDisk(), Streams())
    prune.identity(model[0], "weight")
    handle.remove()
    assert model[0].weight_orig is before
    assert torch.equal(model(torch.ones(1, 16)), model(torch.ones(1, 16)))


class Answering(nn.Module):
    """Answers None for what it doesn't know, as some wrappers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def __getattr__(self, name):
        return self._modules.get(name)


def test_a_module_that_answers_for_any_attribute_is_not_taken_for_a_compiled_one():
    assert describe_module(nn.Sequential(Answering(), nn.Linear(16, 16))).blocks


@pytest.mark.parametrize("tiers", [["packed", "streamed", "cpu"], ["disk"], ["cpu"], ["resident", "packed"]])
@pytest.mark.parametrize("how", ["one memory", "tied"])
def test_weights_of_one_memory_have_one_again(how, tiers):
    """They had memory of their own: what trained the model afterwards no longer changed both of two tied."""
    parts = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    memory = torch.randn(3, 64, 64).bfloat16()
    for part, values in zip(parts, memory, strict=True):
        part.weight = nn.Parameter(memory[0].t() if how == "tied" else values, requires_grad=False)
    model, given = nn.Sequential(*parts), torch.randn(2, 64, dtype=torch.bfloat16)
    wanted = model(given)
    chosen = {str(number): tiers[number % len(tiers)] for number in range(3)}
    handle = place_model(model, plan_of(model, chosen), FromDisk(), Streams())
    assert torch.equal(model(given), wanted)
    handle.remove()
    assert torch.equal(model(given), wanted)
    first, *others = [part.weight for part in parts]
    assert all(one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for one in others)
    model[2].weight.data.zero_()
    assert bool(first.any()) == (how == "one memory")
