"""Training whose optimizer states, master weights, frozen weights and activations aren't on the card: the
same losses and the same state dicts as torch's own loop, bit by bit, whatever the streams put off."""

import copy
import dataclasses
import functools
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from late_lanes import LateLanes
from torch import nn

from probes.placement import PlacementError, PlanImpossible, plan_training, train
from probes.placement.training import activations, updates
from probes.placement.training import plan as plans
from probes.placement.training.handle import Training

torch.manual_seed(0)
WIDTH, WORDS = 96, 50
BATCHES = [torch.randint(WORDS, (2, 8)) for _ in range(6)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def curve(model, optimizer, *, amp=torch.bfloat16, accumulate=1, clip=None, schedule=None, scaler=None):
    losses = []
    for number, ids in enumerate(BATCHES, 1):
        with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
            loss = loss_of(model, ids) / accumulate
        (scaler.scale(loss) if scaler else loss).backward()
        losses.append(loss.item())
        if number % accumulate:
            continue
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
    return losses


def pair(kind=torch.optim.AdamW, **settings):
    model = Words()
    other = copy.deepcopy(model)
    return model, kind(model.parameters(), **settings), other, kind(other.parameters(), **settings)


@functools.cache
def planned():
    model, optimizer, _, _ = pair()
    return plan_training(
        model, optimizer, 1 << 30, lambda m: loss_of(m, BATCHES[0]), autocast=torch.bfloat16, device="cpu"
    )


def moving(amp=torch.bfloat16, made="kept", **more):
    """A plan in which everything moves that can."""
    blocks = [
        dataclasses.replace(b, states="host", activations=made if "layers" in b.name else "kept")
        for b in planned().blocks
    ]
    name = str(amp or "").removeprefix("torch.")
    return dataclasses.replace(planned(), blocks=tuple(blocks), piece_numbers=50_000, autocast=name, **more)


@pytest.fixture(autouse=True)
def small_ones_move_too(monkeypatch):
    monkeypatch.setattr(activations, "LEAST_BYTES", 1)
    monkeypatch.setattr(plans, "LEAST_NUMBERS", 1 << 16)


def same(a, b):
    assert list(a) == list(b)
    for key, value in a.items():
        if isinstance(value, dict):
            same(value, b[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


def same_states(model, optimizer, other, its):
    same(model.state_dict(), other.state_dict())
    same(optimizer.state_dict(), its.state_dict())


@pytest.mark.parametrize(
    ("kind", "settings", "how", "loop"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}, {}, {}),
        (torch.optim.Adam, {"amsgrad": True}, {"amp": None}, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"made": "recomputed"}, {}),
        (torch.optim.SGD, {"lr": 0.1}, {}, {}),
        (torch.optim.AdamW, {}, {"accumulate": 2, "made": "moved"}, {"accumulate": 2}),
        (torch.optim.AdamW, {}, {"updates": "step"}, {"clip": 0.1, "accumulate": 3}),
        (torch.optim.AdamW, {"fused": True}, {"updates": "step"}, {"scaler": True, "clip": 0.1}),
    ],
)
def test_losses_and_state_dicts_are_those_of_plain_torch(kind, settings, how, loop):
    model, optimizer, other, its = pair(kind, **settings)
    plan = moving(**how)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, its)]
    training = train(other, its, plan, device="cpu")
    loop = {"amp": how.get("amp", torch.bfloat16), **loop}
    scalers = [torch.amp.GradScaler("cpu") if loop.get("scaler") else None for _ in range(2)]
    for _ in range(2):
        plain = curve(model, optimizer, **{**loop, "schedule": schedules[0], "scaler": scalers[0]})
        assert curve(other, its, **{**loop, "schedule": schedules[1], "scaler": scalers[1]}) == plain
        same_states(model, optimizer, other, its)
        assert any(one.streams for one in training.trained)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training.remove()
    assert all(type(p.data) is torch.Tensor and p.is_contiguous() for p in other.parameters())
    plain = curve(model, optimizer, amp=loop["amp"])
    assert curve(other, its, amp=loop["amp"]) == plain
    same_states(model, optimizer, other, its)


class Now:
    """The model computes on the host at once: what the computing stream waits for is done there and then."""

    def run(self, work):
        work()

    def record(self, mark):
        mark.place = None

    def wait(self, mark):
        mark.block()

    def follow(self):
        """There is one stream for the caller."""

    def step(self):
        return False

    def drain(self):
        """Nothing is put off."""


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_read_before_it_is_there_whatever_streams_put_off(seed):
    model, optimizer, other, its = pair()
    streams = LateLanes(seed)
    streams.compute = Now()
    plan = moving(made=("kept", "moved")[seed % 2])
    training = Training(other, its, plan, streams)
    assert curve(other, its) == curve(model, optimizer)
    same_states(model, optimizer, other, its)
    training.remove()


def test_gradients_that_were_used_are_never_taken_for_none():
    _, _, other, its = pair()
    training = train(other, its, moving(), device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(other, BATCHES[0]).backward()
    with pytest.raises(PlacementError, match="updates='step'"):
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    its.param_groups[0]["lr"] = 0.5
    with pytest.raises(PlacementError, match="lr was changed between"):
        its.step()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlacementError, match="accumulate="):
        loss_of(other, BATCHES[0]).backward()
    training.remove()


def test_a_layer_outside_autocast_and_a_second_training_are_refused():
    _, _, other, its = pair()
    training = train(other, its, moving(), device="cpu")
    with pytest.raises(PlacementError, match="outside autocast"):
        loss_of(other, BATCHES[0])
    with pytest.raises(PlacementError, match="remove"):
        train(other, its, training.plan, device="cpu")
    with pytest.raises(PlacementError, match="this model is in a training"):
        train(other, torch.optim.SGD(other.parameters()), training.plan, device="cpu")
    other.layers[0].up.weight = nn.Parameter(torch.zeros(8 * WIDTH, WIDTH))
    with pytest.raises(PlacementError, match="replaced"), torch.autocast("cpu", torch.bfloat16):
        loss_of(other, BATCHES[0])
    training.remove()


def test_the_end_of_a_training_is_not_the_end_of_the_next():
    model, optimizer, other, its = pair()
    first = train(other, its, moving(), device="cpu")
    curve(other, its)
    first.remove()
    second = train(other, its, moving(), device="cpu")
    curve(other, its)
    first.remove()
    curve(model, optimizer)
    curve(model, optimizer)
    same_states(model, optimizer, other, its)
    second.remove()


def test_a_plan_keeps_its_budget_and_says_the_least_one():
    _, _, other, its = pair()
    whole = plan_training(
        other, its, 1 << 30, lambda m: loss_of(m, BATCHES[0]), autocast=torch.bfloat16, device="cpu"
    )
    assert not whole.to_card_bytes
    budget = int(whole.vram.total * 0.85)
    plan = plan_training(
        other, its, budget, lambda m: loss_of(m, BATCHES[0]), autocast=torch.bfloat16, device="cpu"
    )
    assert plan.vram.total <= budget < whole.vram.total
    assert plan.to_card_bytes
    with pytest.raises(PlanImpossible, match="at least") as refused:
        plan_training(other, its, 1 << 20, lambda m: loss_of(m, BATCHES[0]), device="cpu")
    least = int(refused.value.hint.split("=")[1].split()[0]) << 20
    plan_training(other, its, least, lambda m: loss_of(m, BATCHES[0]), device="cpu")


def test_frozen_weights_under_adapters_are_packed_and_give_the_same_losses():
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        model = Words().to(torch.bfloat16)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["up", "down"])
        model = peft.get_peft_model(model, config)
        return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    (model, optimizer), (other, its) = adapted(), adapted()
    plan = plan_training(
        other, its, 1 << 30, lambda m: loss_of(m, BATCHES[0]), autocast=torch.bfloat16, device="cpu"
    )
    blocks = [
        dataclasses.replace(b, frozen="host", activations="recomputed") if ".layers." in b.name else b
        for b in plan.blocks
    ]
    training = train(other, its, dataclasses.replace(plan, blocks=tuple(blocks)), device="cpu")
    assert curve(other, its) == curve(model, optimizer)
    training.remove()
    same_states(model, optimizer, other, its)


def test_the_page_runs_as_it_is_printed(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "howto" / "train-larger-than-vram.md"
    code = "from test_training_beyond import BATCHES as batches, Words as build, loss_of\n"
    (tmp_path / "mymodel.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, known)
    saved = torch.load("checkpoint.pt")
    model = Words()
    model.load_state_dict(saved["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer"])


def trained_as_plain(build, loss, made, amp=None):
    """A model of any family in plain torch and with everything moved: equal losses and state dicts."""
    torch.manual_seed(0)
    model = build()
    other = copy.deepcopy(model)
    losses = []
    for each in (model, other):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        if each is other:
            plan = plan_training(each, optimizer, 1 << 30, loss, autocast=amp, device="cpu")
            blocks = [
                dataclasses.replace(
                    b,
                    states="host",
                    activations=made,
                    frozen="host" if b.frozen_bytes and made != "kept" else "vram",
                )
                for b in plan.blocks
            ]
            plan = dataclasses.replace(plan, blocks=tuple(blocks), piece_numbers=50_000)
            training = train(each, optimizer, plan, device="cpu")
        torch.manual_seed(1)
        for _ in range(3):
            with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
                value = loss(each)
            value.backward()
            losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:3] == losses[3:]
    same(model.state_dict(), other.state_dict())
    return training


@pytest.mark.parametrize("made", ["recomputed", "moved"])
def test_buffers_that_a_forward_changes_are_changed_once_though_it_is_done_again(made):
    def build():
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(WIDTH, 8 * WIDTH)),
            nn.BatchNorm1d(8 * WIDTH),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(8 * WIDTH, WIDTH),
        )

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(build() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    trained_as_plain(Layers, lambda model: model(torch.randn(8, WIDTH)).square().mean(), made)


@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_of_a_layer_that_is_called_twice_are_added_up_in_the_dtype_of_autocast(calls):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

        def forward(self, x):
            return x + self.layer(x + self.layer(x)) if calls == 1 else x + self.layer(x)

    def loss(model):
        return sum(model(torch.randn(16, WIDTH)).float().square().mean() for _ in range(calls))

    trained_as_plain(Twice, loss, "kept", torch.bfloat16)


def test_state_dicts_have_the_values_of_frozen_weights_that_are_packed():
    def build():
        model = Words().to(torch.bfloat16)
        for layer in model.layers:
            layer.up.weight.requires_grad_(False)
        return model

    training = trained_as_plain(build, lambda model: loss_of(model, BATCHES[0]), "recomputed")
    model = training.model
    assert model.layers[1].up.weight.isnan().all()  # not another block's numbers
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    state["layers.1.up.weight"] += 1
    with pytest.raises(PlacementError, match="other values were loaded"):
        model.load_state_dict(state)
    with pytest.raises(PlacementError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)
    training.remove()


def test_a_parameter_without_a_gradient_keeps_no_other_from_its_update_and_none_is_updated_twice():
    def loss(model):  # each step trains other parameters of a layer, some of them in several groups
        for number, parameter in enumerate(model.layers.parameters()):
            parameter.requires_grad_((model.passes + number) % 3 > 0)
        model.passes += 1
        return loss_of(model, BATCHES[0])

    model, optimizer, other, its = pair()
    training = train(other, its, moving(amp=None), device="cpu")
    for each, steps in ((model, optimizer), (other, its)):
        each.passes = 0
        for _ in range(4):
            loss(each).backward()
            steps.step()
            steps.zero_grad()
    same(model.state_dict(), other.state_dict())
    same(*(dict(sorted(steps.state_dict()["state"].items())) for steps in (optimizer, its)))
    training.remove()


def test_training_goes_on_from_a_checkpoint_after_a_backward_pass_that_was_interrupted():
    model, optimizer, other, its = pair()
    training = train(other, its, moving(made="moved"), device="cpu")

    def interrupted(gradient):
        raise KeyboardInterrupt

    for each, steps in ((model, optimizer), (other, its)):
        curve(each, steps)
        state = copy.deepcopy((each.state_dict(), steps.state_dict()))
        hook = each.layers[1].norm.register_forward_hook(
            lambda _, __, y: y.register_hook(interrupted) and None
        )
        with pytest.raises(KeyboardInterrupt):
            curve(each, steps)
        hook.remove()
        steps.zero_grad()
        each.load_state_dict(state[0])
        steps.load_state_dict(state[1])
    assert curve(other, its) == curve(model, optimizer)
    same_states(model, optimizer, other, its)
    training.remove()


def test_gradients_that_would_add_up_and_copies_of_the_model_are_refused():
    _, _, other, its = pair()
    loss_of(other, BATCHES[0]).backward()
    with pytest.raises(PlacementError, match="zero_grad"):
        train(other, its, moving(amp=None), device="cpu")
    its.zero_grad()
    training = train(other, its, moving(amp=None), device="cpu")
    loss_of(other, BATCHES[0]).backward()
    its.step()
    with pytest.raises(PlacementError, match="call zero_grad"):
        loss_of(other, BATCHES[0]).backward()
    for each in (other, other.head, other.layers[0].up):
        with pytest.raises(PlacementError, match="copied"):
            copy.deepcopy(each)
    training.remove()
    copy.deepcopy(other)


def test_graphs_that_are_kept_or_never_used_give_plain_gradients_and_hold_no_host_memory():
    model, optimizer, other, its = pair()
    training = train(other, its, moving(amp=None, made="moved", accumulate=2), device="cpu")
    for each, steps in ((model, optimizer), (other, its)):
        loss_of(each, BATCHES[1])  # without a backward pass
        loss = loss_of(each, BATCHES[0])
        loss.backward(retain_graph=True)
        (loss / 2).backward()
        steps.step()
    same_states(model, optimizer, other, its)
    del loss
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is activations._Call]
    training.remove()


@pytest.mark.parametrize("made", ["recomputed", "moved"])
def test_a_block_is_never_made_again_from_an_input_that_it_changed(made):
    _, _, other, its = pair()
    training = train(other, its, moving(amp=None, made=made), device="cpu")
    other.layers[0].norm.register_forward_pre_hook(lambda _, given: (given[0].add_(1),))
    with pytest.raises(PlacementError, match="in place"):
        loss_of(other, BATCHES[0])
    training.remove()


def test_an_input_that_is_changed_while_it_leaves_is_never_made_again_from():
    class Casts(Layer):  # its input, and keeps the cast: plain torch lets the input be changed
        def forward(self, x):
            return self.down(self.up(x))

    class Adds(Words):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Casts() for _ in range(3))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x += layer(x)
            return self.head(x)

    def loss(model):
        return loss_of(model, BATCHES[0])

    trained_as_plain(Adds, loss, "kept", torch.bfloat16).remove()
    with pytest.raises(PlacementError, match="in place"):
        trained_as_plain(Adds, loss, "moved", torch.bfloat16)


class Picture(nn.Module):
    """Inputs that are channels_last, transposed, and three times the same."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.convs = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.attend = nn.MultiheadAttention(WIDTH, 4)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.stem(x)
        for conv in self.convs:
            x = x + conv(x).relu()
        x = x.flatten(2).permute(2, 0, 1)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(x.transpose(0, 1))


@pytest.mark.parametrize(
    ("made", "amp"), [("moved", None), ("moved", torch.bfloat16), ("recomputed", torch.bfloat16)]
)
def test_inputs_of_blocks_come_back_in_their_order_in_memory_and_the_same_one_as_one(made, amp):
    def loss(model):
        images = torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
        return model(images).float().square().mean()

    trained_as_plain(Picture, loss, made, amp)


def test_updates_are_the_same_whatever_the_pass_that_they_wait_for_is_in():
    model, optimizer, other, its = pair(torch.optim.Adafactor, lr=1e-2)
    training = train(other, its, moving(updates="step", slots=1), device="cpu")
    assert len(training.updates.groups) > 1 + updates.QUEUED
    for each, steps in ((model, optimizer), (other, its)):
        for ids in BATCHES[:3]:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(each, ids)
            loss.backward()
            steps.step()
            steps.zero_grad()
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                loss_of(each, ids)
    same_states(model, optimizer, other, its)
    training.remove()


def test_states_of_another_optimizer_are_refused_and_change_nothing():
    model, optimizer, other, its = pair()
    training = train(other, its, moving(), device="cpu")
    curve(other, its)
    before = copy.deepcopy(its.state_dict())
    momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for steps in (momentum, optimizer):
        curve(model, steps)
        saved = steps.state_dict()
        if steps is optimizer:
            saved["state"] = {
                k: {**v, "exp_avg": v["exp_avg"].flatten()[:1]} for k, v in saved["state"].items()
            }
        with pytest.raises(PlacementError, match="to be loaded for"):
            its.load_state_dict(saved)
    same(before, its.state_dict())
    training.remove()


def test_a_model_that_is_dropped_without_an_end_to_its_training_is_freed():
    _, _, other, its = pair()
    training = train(other, its, moving(), device="cpu")
    curve(other, its)
    alive = weakref.ref(other)
    del other, its, training
    gc.collect()
    assert alive() is None


def test_a_block_that_remembers_its_last_call_is_not_taken_for_one_that_does_not():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.seen = nn.Linear(WIDTH, 8 * WIDTH), []

        def forward(self, x):
            self.seen.append(x)
            return self.up(torch.cat(self.seen))[-len(x) :].tanh().mean(-1, keepdim=True) + x

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Remembers() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                layer.seen.clear()
                x = layer(x)
            return x

    with pytest.raises(PlacementError, match="computes something else"):
        trained_as_plain(Layers, lambda model: model(torch.randn(8, WIDTH)).square().mean(), "recomputed")
