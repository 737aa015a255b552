"""A pass that runs out of memory is done again with more room: once, said, with the same bits."""

import contextlib
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo  # which a first pass imports: before what is here is left out of collections
from late_lanes import LateLanes
from random_models import plan_of
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from probes.placement import load
from probes.placement.runtime import own_thread, placed_model
from probes.placement.runtime.handle import _tried
from probes.placement.runtime.hooks import ModelHook
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.packed_tables import autocast_dtype
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
WIDTH, LAYERS = 64, 5
TIERS = ("resident", "packed", "streamed", "resident", "streamed_packed")


class Layer(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return torch.relu(self.linear(x)) + x * self.calls


class Model(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.inside = contextlib.nullcontext()

    def forward(self, x, kept=None):
        with self.inside:
            for layer in self.layers:
                x = layer(x)
                if kept is not None:
                    kept.append(x)
        return x


class Unrestored(list):
    """What a pass that is done again doesn't restore, as it does with a list itself."""


class Planted(TorchDispatchMode):
    """Operations of a pass in which memory runs out: at their numbers."""

    def __init__(self, *at, size="20.00 MiB"):
        super().__init__()
        self.at, self.size, self.calls = at, size, Unrestored()

    @property
    def seen(self):
        return len(self.calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(0)
        if self.seen in self.at:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.size}.")
        return func(*args, **(kwargs or {}))


class Blocked(nn.Module):
    """In the middle of a model: runs out as often as it is told, and never in a trial of its own."""

    def __init__(self):
        super().__init__()
        self.failures = Unrestored()

    def forward(self, x):
        if self.failures:
            self.failures.pop()
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")
        return x


class Stingy(nn.Module):
    """As a library does that is refused its workspace: another algorithm, other bits, and no error."""

    def __init__(self, refusals):
        super().__init__()
        self.streams, self.refusals = Streams(), Unrestored([0] * refusals)
        self.streams.refused_allocations = lambda: refusals - len(self.refusals)
        self.threads = Unrestored()

    def forward(self, x):
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_dtype("cpu")
        self.threads.append((threading.current_thread(), *state))
        if self.refusals:
            self.refusals.pop()
            return x * (1 + 2**-20)
        return x


@pytest.fixture(autouse=True)
def this_thread_is_not_left():
    yield
    vars(own_thread._here).clear()


def made(seed=0):
    torch.manual_seed(seed)
    return Model().eval().requires_grad_(False)


def placed(model, *, tiers=TIERS, streams=None, capture=False, work=None):
    plan = plan_of(model, {f"layers.{i}": tier for i, tier in enumerate(tiers)}, PrefetchPool(2, scratches=2))
    return place_model(model, plan, ModuleWeights(), streams or Streams(), capture=capture, work=work)


def resident(handle):
    return sum(use.blocks for use in handle.report().tiers if use.tier in ("resident", "packed"))


@torch.no_grad()
@pytest.mark.parametrize("passes", [0, 1])  # before: the first of its shapes, or a later one
def test_memory_that_runs_out_anywhere_in_a_pass_leaves_the_same_bits(passes):
    x, whole = torch.randn(2, WIDTH), made()
    want = [whole(x) for _ in range(passes + 2)]
    counted = Planted()
    placed(model := made())
    for _ in range(passes):
        model(x)
    model.inside = counted
    model(x)
    assert counted.seen > 4 * LAYERS
    done = 0
    for at in range(1, counted.seen + 1):
        handle = placed(model := made())
        before = resident(handle)
        for number in range(passes):
            assert torch.equal(model(x), want[number])
        model.inside = Planted(at)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got, error = _tried(model, x)
        if error is not None:  # after the first, passes that count in their modules aren't undone
            assert passes
            assert "change modules" in "".join(error.__notes__), at
            continue
        done += 1
        assert torch.equal(got, want[passes]), at
        assert ["a pass ran out of memory" in str(warning.message) for warning in said] == [True], at
        assert resident(handle) < before
        assert "a pass ran out of memory" in str(handle.report())
        assert torch.equal(model(x), want[passes + 1]), at
        assert [layer.seen for layer in model.layers] == [passes + 2] * LAYERS
        handle.remove()
        assert torch.equal(model.layers[0].linear.weight, whole.layers[0].linear.weight)
    assert done == (0 if passes else counted.seen)


def with_blocked():
    model = made()
    model.layers.insert(3, Blocked())
    return model


@torch.no_grad()
def test_a_pass_that_no_room_is_enough_for_leaves_the_model_as_it_was():
    x, model, whole = torch.randn(2, WIDTH), with_blocked(), made()
    want = whole(x)
    handle = placed(model, tiers=(*TIERS[:3], "resident", *TIERS[3:]))
    before, plan = resident(handle), handle.plan
    model.layers[3].failures += [1] * 9
    kept = []
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
        model(x, kept)
    assert len(model.layers[3].failures) == 6  # with a quarter more room, then with all
    model.layers[3].failures[1:] = []
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        model(x)
    assert "has run out of memory before" in "".join(error.value.__notes__)
    assert not kept
    assert resident(handle) == before
    assert handle.plan is plan
    assert not handle.report().events
    assert torch.equal(model(x), want)
    model.layers[3].failures[:] = [1]
    smaller = torch.randn(1, WIDTH)
    with pytest.warns(RuntimeWarning, match="out of memory"):  # of other shapes: room may be enough
        assert torch.equal(model(smaller), whole(smaller))


@torch.no_grad()
def test_what_a_pass_kept_in_its_arguments_is_there_once():
    x, model = torch.randn(2, WIDTH), with_blocked()
    want, kept = [], []
    made()(x, want)
    placed(model, tiers=(*TIERS[:3], "resident", *TIERS[3:]))
    model.layers[3].failures += [1]
    with pytest.warns(RuntimeWarning, match="out of memory"):
        model(x, kept)
    assert len(kept) == LAYERS + 1
    assert all(map(torch.equal, [*kept[:3], *kept[4:]], want))


class Rows:
    def __init__(self):
        self.rows = []

    def append(self, row):
        self.rows.append(row)


@torch.no_grad()
def test_a_pass_that_is_given_a_cache_object_is_not_done_again():
    """What the cache holds would be there twice, or be kept alive through each pass."""
    x, model = torch.randn(2, WIDTH), with_blocked()
    placed(model, tiers=(*TIERS[:3], "resident", *TIERS[3:]))
    model.layers[3].failures += [1]
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        model(x, Rows())
    assert "an object such as a cache" in "".join(error.value.__notes__)


@torch.no_grad()
def test_where_nothing_can_move_the_error_says_so():
    x, model = torch.randn(2, WIDTH), with_blocked()
    placed(model, tiers=("streamed",) * 6)
    model.layers[3].failures += [1, 1]
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        model(x)
    assert "no block that stays in VRAM can stream" in "".join(error.value.__notes__)
    assert torch.equal(model(x), made()(x))


@torch.no_grad()
def test_a_pass_whose_recording_runs_out_is_recorded_again_with_more_room():
    x = torch.randn(2, WIDTH)
    model = (
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Blocked()).eval().requires_grad_(False)
    )
    want = model(x)
    lanes = LateLanes(1)
    plan = plan_of(model, {"0": "packed", "1": "streamed"}, PrefetchPool(2, scratches=2))
    work = PackedOperations(reads=lanes.reads)
    handle = place_model(model, plan, ModuleWeights(), lanes, capture=True, work=work)
    lanes.engine = handle._engine
    for _ in range(2):
        assert torch.equal(model(x), want)
    model[-1].failures += [1]
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert torch.equal(model(x), want)
    lanes.engine = handle._engine
    assert handle.recorder.count == 0
    for _ in range(3):
        assert torch.equal(model(x), want)
        lanes.compute.drain()
    assert handle.recorder.count == 1
    assert lanes.replayed
    handle.remove()


@torch.no_grad()
def test_no_call_comes_past_its_turn_while_the_model_is_placed_again(monkeypatch):
    x = torch.randn(2, WIDTH)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Blocked()).eval()
    want, seen = model(x), []

    def looked():
        seen.append(model.__dict__.get("forward"))

    monkeypatch.setattr(placed_model, "free_memory", looked)
    plan = plan_of(model, {"0": "packed", "1": "streamed"}, PrefetchPool(2, scratches=2))
    handle = place_model(model, plan, ModuleWeights(), Streams())
    hook = model.__dict__["forward"]
    for _ in range(2):
        model[-1].failures += [1]
        with pytest.warns(RuntimeWarning, match="out of memory"):
            assert torch.equal(model(x), want)
    assert seen
    assert seen[0] is hook
    assert all(isinstance(each, ModelHook) for each in seen)
    handle.remove()
    assert "forward" not in model.__dict__
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_threads_that_wait_meanwhile_get_the_right_output():
    inputs = [torch.randn(2, WIDTH) for _ in range(12)]
    model = (
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Blocked()).eval().requires_grad_(False)
    )
    want = [model(x) for x in inputs]
    plan = plan_of(model, {"0": "packed", "1": "streamed"}, PrefetchPool(2, scratches=2))
    handle = place_model(model, plan, ModuleWeights(), Streams())
    got, waiting = [None] * len(inputs), threading.Barrier(4)

    def work(first):
        waiting.wait()
        with torch.no_grad():
            for i in range(first, len(inputs), 4):
                if i == 5:
                    model[-1].failures += [1]
                got[i] = model(inputs[i])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(torch.equal, got, want))
    assert handle.report().events
    handle.remove()
    assert torch.equal(model(inputs[0]), want[0])


def blocked(layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), Blocked())
    return model.eval().requires_grad_(False)


def test_weights_placed_again_within_inference_mode_are_ordinary_tensors():
    model = blocked()
    with torch.inference_mode():
        x = torch.randn(2, WIDTH)
        want = model(x)
        handle = place_model(model, plan_of(model, {"1": "streamed"}), ModuleWeights(), Streams())
        model[-1].failures += [1]
        with pytest.warns(RuntimeWarning, match="out of memory"):
            assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
        handle.remove()
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert torch.equal(model(x.clone()), want)


@torch.no_grad()
def test_a_loaded_model_that_runs_out_reads_its_checkpoint_again(tmp_path):
    x, model = torch.randn(2, WIDTH), blocked()
    want = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    tiers = {"0": "packed", "1": "streamed", "2": "disk"}
    loaded = load(blocked, tmp_path, plan_of(model, tiers), device="cpu", cache=False)
    assert torch.equal(loaded(x), want)
    loaded[-1].failures += [1]
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert torch.equal(loaded(x), want)
    assert torch.equal(loaded(x), want)
    loaded[-1].failures += [1] * 9
    with pytest.raises(torch.cuda.OutOfMemoryError):
        loaded(torch.randn(3, WIDTH))
    loaded[-1].failures.clear()
    assert torch.equal(loaded(x), want)
    loaded.placement.remove()
    assert torch.equal(loaded(x), want)


@torch.no_grad()
@pytest.mark.parametrize("when", ["captured", "captured, quietly", "in a later call"])
def test_a_captured_function_that_runs_out_is_captured_again(when):
    x, model = torch.randn(2, WIDTH), blocked()
    want = model(x).tanh()
    lanes = LateLanes(2)
    plan = plan_of(model, {"0": "packed", "1": "streamed"}, PrefetchPool(2, scratches=2))
    handle = place_model(model, plan, ModuleWeights(), lanes, work=PackedOperations(reads=lanes.reads))
    lanes.engine = handle._engine
    own = handle.place

    def place_again():
        own()
        lanes.engine = handle._engine

    handle.place = place_again
    if when == "captured":
        model[-1].failures += [1]
        with pytest.warns(RuntimeWarning, match="out of memory"):
            captured = handle.captured(lambda x: model(x).tanh(), x)
    elif when == "captured, quietly":
        assert torch.equal(model(x).tanh(), want)
        own_record, records = lanes.record, []
        lanes.record = lambda *work, **more: records.append(1) or own_record(*work, **more)
        lanes.refused_allocations = lambda: len(records[:1])  # by a library, in the first recording
        with pytest.warns(RuntimeWarning, match="out of memory"):
            captured = handle.captured(lambda x: model(x).tanh(), x)
        assert len(records) == 2
    else:
        captured = handle.captured(lambda x: model(x).tanh(), x)
        captured.recorder.clear()
        model[-1].failures += [1]
        with pytest.warns(RuntimeWarning, match="out of memory"):
            assert torch.equal(captured(x), want)
    for _ in range(3):
        assert torch.equal(captured(x), want)
        lanes.compute.drain()
    assert captured.recorder.count == 1
    handle.remove()


@torch.no_grad()
def test_where_host_memory_is_missing_the_placement_stays_and_the_error_says_so(monkeypatch):
    x, model = torch.randn(2, WIDTH), blocked()
    want = model(x)
    handle = place_model(model, plan_of(model, {"1": "streamed"}), ModuleWeights(), Streams())
    monkeypatch.setattr("probes.placement.runtime.placed_model.available_bytes", lambda _root: 10)
    before = handle._builder
    model[-1].failures += [1, 1]
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        model(x)
    assert "host memory are free" in "".join(error.value.__notes__)
    assert handle._builder is before
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_the_memory_that_a_pass_held_is_free_when_it_is_done_again():
    """Frames of a failed pass hold its tensors, and gone blocks refer to the arena in circles."""
    x, model = torch.randn(2, WIDTH), blocked()
    handle = place_model(model, plan_of(model, {"1": "streamed"}), ModuleWeights(), Streams())
    held = [weakref.ref(handle._builder.vram.whole)]
    own = model[1].forward

    def keeping(x):
        output = own(x)
        held.append(weakref.ref(output))
        return output

    model[1].forward = keeping
    model[-1].failures += [1]
    alive = []
    place_before = handle.place

    def place():
        alive.extend(reference() is not None for reference in held)
        place_before()

    handle.place = place
    with pytest.warns(RuntimeWarning, match="out of memory"):
        model(x)
    assert alive == [False, False]


@torch.no_grad()
@pytest.mark.parametrize(("refusals", "same_bits"), [(1, True), (2, True), (9, False)])
def test_a_pass_whose_library_quietly_did_without_memory_is_done_again_with_more_room(refusals, same_bits):
    x, whole, model, stingy = torch.randn(2, WIDTH), made(), made(), Stingy(refusals)
    want = [whole(x) for _ in range(2)]
    model.layers.insert(3, stingy)
    handle = placed(model, tiers=(*TIERS[:3], "resident", *TIERS[3:]), streams=stingy.streams)
    before = resident(handle)
    with pytest.warns(RuntimeWarning, match="ran out of memory" if same_bits else "bits may differ"):
        assert torch.equal(model(x), want[0]) == same_bits
    assert (resident(handle) < before) == same_bits
    passes = refusals if same_bits else 4  # as placed, with a little room, with all, and as placed again
    assert len(stingy.refusals) == refusals - passes
    model(x)
    assert len(stingy.refusals) == max(refusals - passes - 1, 0)
    assert [layer.seen for layer in model.layers if layer is not stingy] == [2] * LAYERS


@pytest.mark.parametrize("cast", [False, True])
def test_a_pass_that_a_library_was_refused_memory_in_is_done_again_in_a_new_thread(cast):
    """torch keeps, for the thread, what cuDNN chose without its workspace (seen on an H200)."""
    with ThreadPoolExecutor(1) as callers:  # which is of no use to other tests afterwards
        callers.submit(_in_new_threads, cast).result()


def _in_new_threads(cast):
    x, model, stingy = torch.randn(2, WIDTH), made(), Stingy(2)
    model.layers.insert(3, stingy)
    tiers = (*TIERS[:3], "resident", *TIERS[3:])
    handle = placed(model, tiers=tiers, streams=stingy.streams)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        with pytest.warns(RuntimeWarning, match="in a thread of their own"):
            model(x)
        model(x)
    threads, *states = zip(*stingy.threads, strict=True)
    here = threading.current_thread()
    assert [threads.index(thread) for thread in threads] == [0, 1, 2, 2]
    assert threads[0] is here
    assert [set(each) for each in states] == [{False}, {True}, {torch.bfloat16 if cast else None}]
    with pytest.raises(ZeroDivisionError):
        handle.captured(lambda y: model(y) / (1 // 0), x)
    handle.measure(model, x)
    assert {thread for thread, *_ in stingy.threads[4:]} == {threads[2]}
    handle.remove()
    threads[2].join(60)
    assert not any(thread.is_alive() for thread in threads[1:])
    model(x)
    assert stingy.threads[-1][0] is here
    again = placed(model, tiers=tiers, streams=Streams())
    model(x)
    assert stingy.threads[-1][0] is not here
    assert "in a thread of their own" in str(again.report())
    again.remove()


def test_a_thread_is_left_too_where_the_pass_cannot_be_done_again():
    class Notes:
        """Which nobody can undo."""

        def append(self, _):
            """Note nothing."""

    x, model, stingy = torch.randn(2, WIDTH), made(), Stingy(1)
    model.layers.insert(3, stingy)
    placed(model, tiers=(*TIERS[:3], "resident", *TIERS[3:]), streams=stingy.streams)
    with pytest.warns(RuntimeWarning, match="bits may differ"):
        model(x, Notes())
    model(x)
    here = threading.current_thread()
    assert [thread is here for thread, *_ in stingy.threads] == [True, False]
