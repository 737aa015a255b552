"""`train`: the model and the optimizer stay as they are; where their bytes are follows a plan."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.unknown import Unknown
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, find_blocks
from probes.placement.packing.format import aligned
from probes.placement.packing.staging import bytes_of
from probes.placement.runtime.host_memory import HostArena, node_of_gpu
from probes.placement.runtime.streams import Streams, streams_of
from probes.placement.training.activations import Recomputation, in_backward
from probes.placement.training.frozen import FrozenBlocks
from probes.placement.training.groups import Group, NeverCopied, Trained, groups_of
from probes.placement.training.plan import BlockOfStep, TrainingPlan, casts, moves
from probes.placement.training.updates import Updates, is_elementwise, state_names
from probes.placement.training.weights import Casts, GoneGradient, computed_with, placeholder


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: TrainingPlan,
    *,
    device: torch.device | str | None = None,
) -> "Training":
    """Let a model and its optimizer take the VRAM that a plan gives them; the loop stays an ordinary one.

    `device` is the current GPU by default, and the CPU where there is none. The optimizer has the model's
    parameters, and may have states already. `optimizer.step()`, learning rate schedulers, `zero_grad()`,
    `state_dict()` and `load_state_dict()` of both work as before; tensors of state dicts that are in host
    memory are on the CPU. With updates in the backward pass no gradient is left at `step()`, so clipping and
    GradScaler raise PlacementError; plan with `updates="step"` for those.

    Raises PlacementError where the model isn't the planned one, or memory is refused.
    """
    return Training(model, optimizer, plan, streams_of(device))


class Training(NeverCopied):
    """A model in training, and where its bytes are. `remove()` gives everything back."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: TrainingPlan, streams: Streams
    ) -> None:
        if getattr(optimizer.__dict__.get("step"), "of_training", False):
            raise PlacementError("this optimizer is in a training already", "call its remove() first")
        if any(_is_begin(hook) for hook in model._forward_pre_hooks.values()):
            raise PlacementError(
                "this model is in a training already",
                "call its remove() first; give one optimizer all parameters, in groups where they differ",
            )
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.steps, self._removed = 0, False
        self._streams, self._device = streams, streams.device
        self._blocks = find_blocks(model)
        self._autocast = getattr(torch, plan.autocast) if plan.autocast else None
        self._origins: list[tuple[torch.Tensor, torch.device]] = []
        self._handles: list[Any] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._numbered: dict[str, int] = {}  # blocks in the order of their first calls
        self._first_others: dict[Trained, dict[str, Any]] = {}  # states of other sizes that were there before
        self._late: list[Group] = []  # of parameters that are used outside their block's call
        planned = {block.name: block for block in plan.blocks}
        own = {id(p) for p in model.parameters()}
        self._given = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) not in own for p in self._given):
            raise PlacementError(
                "the optimizer has parameters that aren't the model's", "give it those of model.parameters()"
            )
        if any(p.grad is not None for p in self._given):
            raise PlacementError("parameters have gradients already", "call zero_grad() before train()")
        if {block.name for block in self._blocks} != set(planned):
            raise PlacementError(
                "the model's blocks aren't those of the plan", "plan again for this model: plan_training(...)"
            )
        with torch.no_grad():
            try:
                self._set_up(planned)
            except torch.cuda.OutOfMemoryError as error:
                self.remove()
                raise PlacementError(
                    f"the card refused memory while the model was placed: {first_line(error)}",
                    "end what else uses the card, or plan with a smaller vram",
                ) from error
            except BaseException:
                self.remove()
                raise

    # ---- placing -------------------------------------------------------------------------------------------

    def _set_up(self, planned: dict[str, BlockOfStep]) -> None:
        self._setting = {
            id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }
        self._state_names = state_names(self.optimizer, self._device)
        self._arena = HostArena(max(self.plan.host_bytes, 1), self._node())
        self.trained: list[Trained] = []
        self._taken: set[int] = set()
        self._by_parameter: dict[int, Trained] = {}
        groups: list[Group] = []
        divides = is_elementwise(self.optimizer)
        of_block: dict[str, list[Group]] = {}
        self._frozen = FrozenBlocks(self._streams, self._arena)
        for block in self._blocks:
            facts = planned[block.name]
            ours = groups_of(
                self._adopt(block, facts),
                block.name,
                self._streams,
                self._state_names,
                numbers=self.plan.piece_numbers,
                divides=divides,
            )
            of_block[block.name] = ours
            groups += ours
            if facts.frozen == "host":
                self._frozen.add(block, self._setting)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if id(tensor) not in self._taken and not self._frozen.has(tensor):
                self._move(tensor)
        self._plain = [
            [p for p in group["params"] if p.requires_grad and id(p) not in self._by_parameter]
            for group in self.optimizer.param_groups
        ]
        for parameter in (p for group in self._plain for p in group):
            _move_state(self.optimizer.state.get(parameter), self._device)
        self._arena.pin(self._streams.finish)
        room = max((group.slot_bytes for group in groups), default=0)
        slots = [
            torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(max(self.plan.slots, 1))
        ]
        self.updates = Updates(
            self.optimizer,
            groups,
            slots,
            self._streams,
            names=self._state_names,
            backlog_bytes=self.plan.vram.gradients,
        )
        self._frozen.allocate()
        self._casts = Casts(self._device)
        self._hook(planned, of_block)
        self._streams.finish()

    def _node(self) -> "int | Unknown":
        return node_of_gpu(self._device)

    def _move(self, tensor: torch.Tensor) -> None:
        self._origins.append((tensor, tensor.device))
        self._taken.add(id(tensor))
        tensor.data = tensor.data.to(self._device)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(self._device)

    def _adopt(self, block: Block, facts: BlockOfStep) -> list[Trained]:
        trained: list[Trained] = []
        narrow: list[Trained] = []  # of which the card has a copy in autocast's dtype
        wide: list[Trained] = []
        for entry in block.entries:
            parameter = entry.parameter
            setting = self._setting.get(id(parameter))
            if setting is None or not parameter.requires_grad or not moves(parameter):
                continue
            one = Trained(entry.name, parameter, setting, facts.states == "host")
            trained.append(one)
            if one.streams and self._autocast is not None and casts(block, parameter):
                narrow.append(one)
                continue
            if one.streams:
                wide.append(one)
            self._move(parameter)
        self._house(narrow, ("master", *self._state_names))
        self._house(wide, self._state_names)
        for one in narrow:
            self._origins.append((one.parameter, one.parameter.device))
            self._taken.add(id(one.parameter))
            one.master = one.states.pop("master")
            one.master.copy_(one.parameter.data)
            one.working = one.parameter.data.to(self._device).to(self._autocast)
            one.parameter.grad = None
            one.parameter.data = placeholder(one.parameter, self._device)
        for one in trained:
            state = self.optimizer.state.get(one.parameter) or {}
            if state:
                self._take_states(one, state)
        self.trained += trained
        self._by_parameter |= {id(one.parameter): one for one in trained}
        return trained

    def _house(self, trained: Sequence[Trained], names: Sequence[str]) -> None:
        """Host memory for states of parameters, by name: parameters that are neighbours stay neighbours.

        Each tensor has a storage of its own: a saved state dict has no more.
        """
        ends = [0]
        for one in trained:
            one.at = ends[-1]
            ends.append(ends[-1] + aligned(one.parameter.nbytes))
        for name in names if trained else ():
            if self._arena.used + ends[-1] > max(self.plan.host_bytes, 1):
                self._arena.widen(ends[-1])
            home = self._arena.take(ends[-1])
            for one in trained:
                one.homes[name] = home
                numbers = bytes_of(home[one.at : one.at + one.parameter.nbytes])
                like = one.parameter
                one.states[name] = torch.frombuffer(numbers, dtype=like.dtype).view(like.shape)

    def _take_states(self, one: Trained, state: dict[str, Any]) -> None:
        for key in self._state_names:
            if key in state:
                if one.streams:
                    one.states[key].copy_(state[key])
                else:
                    one.states[key] = state[key].to(self._device)
        self._first_others[one] = {k: v for k, v in state.items() if k not in self._state_names}
        self.optimizer.state[one.parameter] = {
            k: one.states[k] if k in self._state_names else v for k, v in state.items()
        }

    # ---- hooks ---------------------------------------------------------------------------------------------

    def _hook(self, planned: dict[str, BlockOfStep], of_block: dict[str, list[Group]]) -> None:
        for each, others in self._first_others.items():
            self._restate(each, others)
        self.updates.share()
        keep, again = self._handles, Recomputation(self._streams)
        for each in self.trained:
            made = functools.partial(_made, weakref.ref(self), weakref.ref(each))
            keep.append(each.parameter.register_post_accumulate_grad_hook(made))
        for block in self._blocks:
            facts, groups = planned[block.name], of_block[block.name]
            for entry in block.entries:
                one = self._by_parameter.get(id(entry.parameter))
                if one is not None and one.working is not None:
                    for owner, key in entry.owners:
                        self._exchange(owner, computed_with(one, owner, key, self._casts))
            if not block.called:
                self._late += groups
                continue
            for module in block.modules:
                if facts.frozen == "host":
                    self._exchange(module, self._frozen.computed(block, module.forward))
                if facts.activations != "kept":
                    self._exchange(module, again.again(module, moves=facts.activations == "moved"))
                enter = functools.partial(self._enter, block.name, groups)
                keep.append(module.register_forward_pre_hook(enter))
        keep.append(self.model.register_forward_pre_hook(self._begin))
        self._hook_states()
        before = self.optimizer.step
        self._step_before = self.optimizer.__dict__.get("step")

        @functools.wraps(before)
        def step(closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401  # the closure's
            return self.step(closure)

        step.__dict__.update(of_training=True, _wrapped_by_lr_sched=True)  # it says that it was called
        self.optimizer.step = step
        self._scales = getattr(self.optimizer, "_step_supports_amp_scaling", None)
        if self._scales:
            self.optimizer._step_supports_amp_scaling = False

    def _exchange(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._forwards.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _begin(self, *_: object) -> None:
        """The model is called."""
        if self._autocast is not None and torch.is_grad_enabled() and not in_backward():
            self._casts.begin()
        self.updates.ready(self._late)
        self.updates.pump()

    def _enter(self, name: str, groups: Sequence[Group], *_: object) -> None:
        """A block is called."""
        if name not in self._numbered:
            self._numbered[name] = len(self._numbered)
            for group in groups:
                group.order = self._numbered[name]
        if not in_backward():
            self.updates.ready(groups)
            self.updates.hold_back()

    def _made(self, one: Trained, parameter: torch.Tensor) -> None:
        """A gradient is there."""
        one.passes += 1
        narrow, one.narrow = one.narrow, None
        if self.plan.updates == "step" or one.passes < self.plan.accumulate:
            return
        if one.passes > self.plan.accumulate:
            raise PlacementError(
                f"{one.name} got gradients of {one.passes} backward passes before optimizer.step(), and the "
                f"plan says {self.plan.accumulate}: it has been updated already",
                "plan with accumulate= as many as there are, or with updates='step'; after a backward pass "
                "that has failed, load a checkpoint into the model and then into the optimizer",
            )
        self._take(one, narrow if one.uses == 1 else None)
        parameter.grad = _gone(one)
        self.updates.made(one)

    def _take(self, one: Trained, narrow: torch.Tensor | None = None) -> None:
        gradient = one.parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise PlacementError(
                f"{one.name} has a sparse gradient", "build its embedding without sparse=True"
            )
        one.parameter.grad = None
        one.gradient = gradient if narrow is None else narrow
        if one.gradient is not None and not one.gradient.is_contiguous():  # as the parameter is
            one.gradient = one.gradient.contiguous()
        one.groups_left = len(self.updates.of[one])
        one.uses = 0

    # ---- the optimizer -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401  # the closure's
        """What `optimizer.step()` does: update what hasn't been updated. The card may still be at it."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})
        self.optimizer._opt_called = True  # schedulers ask
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self._given):
            raise PlacementError(
                "the optimizer has got other parameters since", "remove() the training, plan and train again"
            )
        plain = {id(p) for group in self._plain for p in group}
        for parameter in self._given:
            if (
                parameter.grad is not None
                and id(parameter) not in self._by_parameter
                and id(parameter) not in plain
            ):
                raise PlacementError(
                    "a parameter has a gradient that required none when the training began",
                    "remove() the training, plan and train again",
                )
        for one in self.trained:
            if one.parameter.grad is not None and not isinstance(one.parameter.grad, GoneGradient):
                self._take(one)
                one.parameter.grad = _gone(one)  # until zero_grad()
        for group in self.updates.groups:
            if any(part.of.gradient is not None for part in group.parts):  # others may have got none
                self.updates.push(group)
        self.updates.pump()
        self.updates.update_at_once(self._plain)
        self.updates.end_step()
        for one in self.trained:
            one.passes = one.uses = 0
        self.steps += 1
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})
        return result

    def finish(self) -> None:
        """Wait until all weights are updated and all states are where they stay."""
        self.updates.finish()

    # ---- state dicts ---------------------------------------------------------------------------------------

    def _hook_states(self) -> None:
        optimizer, keep = self.optimizer, self._handles
        keep.append(optimizer.register_state_dict_pre_hook(self._in_order))
        keep.append(optimizer.register_load_state_dict_pre_hook(self._load_settings))
        keep.append(optimizer.register_load_state_dict_post_hook(self._load_states))
        owners: dict[nn.Module, list[tuple[str, Trained]]] = {}
        for block in self._blocks:
            for entry in block.entries:
                one = self._by_parameter.get(id(entry.parameter))
                if one is not None:
                    for owner, key in entry.owners:
                        owners.setdefault(owner, []).append((key, one))
        for module in {o for b in self._blocks for e in b.entries for o, _ in e.owners}:
            keep.append(module._register_state_dict_hook(self._frozen.into_states))
            keep.append(
                module._register_load_state_dict_pre_hook(
                    lambda module, *_: self._frozen.open(module), with_module=True
                )
            )
            keep.append(
                module.register_load_state_dict_post_hook(lambda module, _: self._frozen.close(module))
            )
        for module, held in owners.items():
            keep.append(module.register_state_dict_pre_hook(lambda *_: self.finish()))
            keep.append(module._register_state_dict_hook(functools.partial(_masters, held)))
            keep.append(
                module._register_load_state_dict_pre_hook(
                    lambda _, *__, held=held: self._open(held), with_module=True
                )
            )
            keep.append(
                module.register_load_state_dict_post_hook(
                    lambda module, _, held=held: self._close(module, held)
                )
            )

    def _in_order(self, optimizer: torch.optim.Optimizer) -> None:
        """States are in the order of parameters, as they are where all are updated at once; none shared."""
        self.finish()
        states = {p: optimizer.state.pop(p) for p in self._given if p in optimizer.state}
        for one in self.trained:
            for key, value in states.get(one.parameter, {}).items():
                if key not in self._state_names and isinstance(value, torch.Tensor):
                    states[one.parameter][key] = value.clone()
        optimizer.state.update(states)

    def _open(self, held: Iterable[tuple[str, Trained]]) -> None:
        """Values are about to be loaded into these parameters."""
        self.finish()
        for _, one in held:
            if one.master is not None:
                one.parameter.data = one.master

    def _close(self, module: nn.Module, held: Iterable[tuple[str, Trained]]) -> None:
        for key, one in held:
            if module._parameters.get(key) is not one.parameter:
                raise PlacementError(
                    f"{one.name} was replaced by load_state_dict(assign=True)",
                    "go on from remove(), or load without assign",
                )
            if one.master is not None and one.working is not None:
                one.working.copy_(one.master)
                one.parameter.data = placeholder(one.parameter, self._device)
        self._streams.finish()

    def _load_settings(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """States go to where they stay, not through VRAM as a whole: torch loads the settings alone.

        Raises PlacementError where they are another optimizer's; nothing is changed then.
        """
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, self._given, strict=False):  # torch refuses other lengths
            one, its = self._by_parameter.get(id(parameter)), state["state"].get(number)
            if one is None or its is None:
                continue
            shapes = {k: v.shape for k, v in its.items() if isinstance(v, torch.Tensor) and v.dim()}
            if any(shapes.get(k) != parameter.shape for k in self._state_names) or any(
                k not in self._state_names and shape == parameter.shape for k, shape in shapes.items()
            ):
                raise PlacementError(
                    f"the states to be loaded for {one.name} are {_listed(shapes)}; here they are "
                    f"{_listed(dict.fromkeys(self._state_names, parameter.shape))}",
                    "load a checkpoint of this model and of an optimizer with these settings",
                )
        self.finish()
        self._loading = state
        return {**state, "state": {}}

    def _load_states(self, optimizer: torch.optim.Optimizer) -> None:
        loaded, self._loading = self._loading, {}
        numbers = [n for group in loaded["param_groups"] for n in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        cast = torch.optim.Optimizer._process_value_according_to_param_policy
        optimizer.state.clear()
        for number, parameter in zip(numbers, parameters, strict=True):
            state = loaded["state"].get(number)
            one = self._by_parameter.get(id(parameter))
            if state is None:
                continue
            if one is None:
                optimizer.state[parameter] = {
                    k: cast(parameter, v, number, loaded["param_groups"], k)
                    if isinstance(v, torch.Tensor)
                    else v
                    for k, v in state.items()
                }
                continue
            others = {
                k: cast(parameter, v, number, loaded["param_groups"], k) if isinstance(v, torch.Tensor) else v
                for k, v in state.items()
                if k not in self._state_names
            }
            for key in self._state_names:
                if key in state:
                    if key in one.states:
                        one.states[key].copy_(state[key])
                    else:
                        one.states[key] = state[key].to(self._device, one.parameter.dtype)
            self._restate(one, others)
            optimizer.state[parameter] = {
                k: one.states[k] if k in self._state_names else one.others[0][k] for k in state
            }
        for one in self.trained:
            if one.parameter not in optimizer.state:
                one.begun = [False] * len(one.begun)
            if isinstance(one.parameter.grad, GoneGradient):
                one.parameter.grad = None
        self.updates.share()
        self.updates.restart()  # after a backward pass that ended in an error
        self._streams.finish()

    def _restate(self, one: Trained, others: dict[str, Any]) -> None:
        one.others = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in others.items()}
            for _ in one.others
        ]
        one.begun = [True] * len(one.begun)

    # ---- the end -------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Give the model and the optimizer back as they were, with what they have learned. Once is enough."""
        if self._removed:
            return
        self._removed = True
        updates = getattr(self, "updates", None)
        if updates is not None:
            self._in_order(self.optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for one in getattr(self, "trained", ()):
            if isinstance(one.parameter.grad, GoneGradient):
                one.parameter.grad = None
        for module, forward in reversed(self._forwards):
            if forward is None:
                with suppress(KeyError):
                    del module.__dict__["forward"]
            else:
                module.forward = forward
        self._forwards.clear()
        if "_step_before" in self.__dict__:
            del self.optimizer.__dict__["step"]
            if self._step_before is not None:
                self.optimizer.step = self._step_before
            if self._scales:
                self.optimizer._step_supports_amp_scaling = True
            del self._step_before
        with torch.no_grad():
            self._give_back()

    def _give_back(self) -> None:
        places = {id(tensor): device for tensor, device in self._origins}
        for one in getattr(self, "trained", ()):
            device = places.get(id(one.parameter), self._device)
            if one.master is not None:
                one.parameter.data = one.master.to(device, copy=True)
            state = self.optimizer.state.get(one.parameter)
            if state:
                for key in self._state_names:
                    if key in state:
                        state[key] = state[key].to(device, copy=one.streams)
            one.master = one.working = one.cast = None
            one.states = {}
        for parameter in (p for group in getattr(self, "_plain", ()) for p in group):
            if places.get(id(parameter), self._device) != self._device:
                _move_state(self.optimizer.state.get(parameter), places[id(parameter)])
        for tensor, device in self._origins:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
        self._origins.clear()
        frozen = getattr(self, "_frozen", None)
        if frozen is not None:
            frozen.remove()
        arena = getattr(self, "_arena", None)
        if arena is not None:
            arena.release()


def _made(training: "weakref.ref[Training]", one: "weakref.ref[Trained]", parameter: torch.Tensor) -> None:
    """A gradient is there. Weak: torch's garbage collection doesn't see what such a hook holds."""
    held, its = training(), one()
    if held is not None and its is not None:
        held._made(its, parameter)


def _is_begin(hook: object) -> bool:
    return getattr(hook, "__func__", None) is Training._begin


def _gone(one: Trained) -> torch.Tensor:
    if one.gone is None:
        one.gone = GoneGradient(one.parameter)
    return one.gone


def _listed(shapes: "dict[str, torch.Size]") -> str:
    return ", ".join(f"{str(k)[:40]!r} {tuple(shape)}" for k, shape in sorted(shapes.items())[:8]) or "none"


def _move_state(state: "dict[str, Any] | None", device: torch.device) -> None:
    """Let states of a parameter's size be where it is; a step's number stays where the optimizer put it."""
    state = {} if state is None else state
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            state[key] = value.to(device)


def _masters(
    held: Sequence[tuple[str, Trained]],
    _: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *__: object,
) -> None:
    """Let a state dict have the values of weights, wherever they are."""
    for key, one in held:
        if one.master is not None and f"{prefix}{key}" in state:
            state[f"{prefix}{key}"] = one.master.detach()
