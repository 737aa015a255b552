"""A torch module as blocks: the pieces that are placed, and moved, as wholes. Works on meta.

A block is a module that is called as a whole (a transformer layer, an embedding, a head) with the parameters
below it. A parameter that several such modules hold is a block of its own, named after itself. A layer of a
recurrent module can be a block, too: it is called as a module of that one layer.

`find_blocks` finds the blocks for the runtime; `describe_module` describes them for the planner.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.models.description import (
    POSITIONS,
    BlockDescription,
    ModelDescription,
    TensorDescription,
    Use,
    part_name,
)
from probes.placement.models.experts import find_experts

_CALLING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # read no weights of the modules in them
_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, *_NEVER_CALLED)


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter, every place that holds it, and its state when the blocks were found."""

    name: str
    parameter: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype  # that calls compute with
    trains: bool  # whether it required gradients
    given: torch.dtype  # the model's own

    @property
    def n_bytes(self) -> int:
        """Bytes of the values that calls compute with, unpacked."""
        return prod(self.shape) * int(self.dtype.itemsize)

    @property
    def given_bytes(self) -> int:
        """Bytes of the model's own values, unpacked."""
        return prod(self.shape) * int(self.given.itemsize)

    def like(self, values: torch.Tensor) -> nn.Parameter:
        """A parameter with these values and the model's own attributes, which requires no gradients."""
        parameter = nn.Parameter(values, requires_grad=False)
        parameter.__dict__ = self.parameter.__dict__
        return parameter

    def held(self) -> Any:  # noqa: ANN401
        """What its first module holds for it now."""
        owner, key = self.owners[0]
        return owner._parameters[key]

    def holders(self) -> Iterator[tuple[Any, str | int]]:
        """Every container in which a module looks the parameter up, and its key there."""
        for owner, key in self.owners:
            yield owner._parameters, key
            if isinstance(owner, nn.RNNBase) and key in owner._flat_weights_names:
                yield owner._flat_weights, owner._flat_weights_names.index(key)  # it computes with this list

    @property
    def converts(self) -> bool:
        """Whether calls compute in another dtype than the model's."""
        return self.dtype is not self.given


@dataclass(frozen=True, eq=False)
class RecurrentLayers:
    """A recurrent module of torch, and modules of one layer each, which have its parameters.

    Called one after the other, they give what the whole gives.
    """

    whole: nn.RNNBase
    layers: tuple[nn.RNNBase, ...]

    @staticmethod
    def of(whole: nn.RNNBase) -> "RecurrentLayers":
        """The layers as modules, whose parameters have the names of a first layer's."""
        size = (2 if whole.bidirectional else 1) * (whole.proj_size or whole.hidden_size)
        options = {name: getattr(whole, name) for name in ("bias", "batch_first", "bidirectional")}
        options |= {"proj_size": whole.proj_size} if whole.proj_size else {}
        options |= {"nonlinearity": whole.nonlinearity} if type(whole) is nn.RNN else {}
        layers = []
        for number in range(whole.num_layers):
            layer = type(whole)(
                size if number else whole.input_size, whole.hidden_size, device="meta", **options
            )
            for name in layer._flat_weights_names:
                setattr(layer, name, whole._parameters[name.replace("_l0", f"_l{number}")])
            layers.append(layer.train(whole.training))
        return RecurrentLayers(whole, tuple(layers))

    def call(self, forward: Callable[..., Any], input: Any, hx: Any = None) -> Any:  # noqa: ANN401
        """Call each layer with what the one before gave, and its own part of the state.

        Where the module drops outputs between layers, or the state doesn't fit, `forward` is called instead.
        """
        whole, layers = self.whole, self.layers
        directions = 2 if whole.bidirectional else 1
        states = () if hx is None else hx if type(hx) in (tuple, list) else (hx,)
        if (whole.training and whole.dropout) or any(len(x) != directions * len(layers) for x in states):
            return forward(input, hx)
        output, ends = input, []
        for number, layer in enumerate(layers):
            layer.training = whole.training
            own = tuple(state[number * directions :][:directions] for state in states)
            output, end = layer(output, (own if isinstance(whole, nn.LSTM) else own[0]) if own else None)
            ends.append(end)
        if isinstance(whole, nn.LSTM):
            return output, tuple(map(torch.cat, zip(*ends, strict=True)))
        return output, torch.cat(ends)


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are placed together, and the modules whose call needs them."""

    name: str
    modules: tuple[nn.Module, ...]
    entries: tuple[Entry, ...]
    called: bool = True  # False: it is used while other blocks are called, so it can't wait for its turn
    recurrent: "RecurrentLayers | None" = None  # of which it is a layer

    @property
    def written(self) -> str:
        """Its first parameter that calls write to: if it moved, that would be lost. Empty: none."""
        names = (entry.name for entry in self.entries for owner, _ in entry.owners if _writes(owner))
        return next(names, "")

    @property
    def n_bytes(self) -> int:
        """Bytes of all values that calls compute with, unpacked."""
        return sum(entry.n_bytes for entry in self.entries)

    @property
    def given_bytes(self) -> int:
        """Bytes of all values as the model has them, unpacked."""
        return sum(entry.given_bytes for entry in self.entries)


def find_blocks(
    model: nn.Module, names: Collection[str] | None = None, *, becomes: torch.dtype | None = None
) -> tuple[Block, ...]:
    """The blocks of a model in the order of their definition.

    A module is a block when it is called as a whole: it is neither a container, nor the model itself, nor
    above lists of layers that hold most of its bytes. With `names`, those of a plan, the modules that they
    name are the blocks instead; parameters outside them are blocks of their own. `becomes`: what bfloat16
    parameters are converted to.

    Raises PlacementError for parameters that can't be placed: tensor subclasses, sparse tensors and
    parameters without a shape yet.
    """
    layers = _named_layers(model, names or ())
    entries = _entries(model, layers, becomes)
    units = list(_called_modules(model) if names is None else _named(model, names, layers))
    depth = Counter(key for _, module in units for key in inside_order(module))
    by_owner: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        for owner, _ in entry.owners:
            by_owner[id(owner)].append(entry)
    blocks: list[Block] = []
    taken: set[int] = set()
    # a module inside another block, such as experts, is apart from it: it takes its parameters first
    for name, module in sorted(units, key=lambda unit: -depth[id(unit[1])]):
        recurrent = layers[name][0] if name in layers else None
        own, shared = _below(module, by_owner, taken, recurrent)
        taken |= {id(entry) for entry in (*own, *shared)}
        if own:
            blocks.append(Block(name, (module,), own, recurrent=recurrent))
        blocks += [Block(entry.name, _owners(entry), (entry,)) for entry in shared]
    loose = [entry for entry in entries if id(entry) not in taken]
    called = {id(module) for block in blocks for module in block.modules}
    return (*blocks, *(_loose(entry, called, model) for entry in loose))


def _writes(module: nn.Module) -> bool:
    """Whether a module of torch writes to its own parameters in its forward."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.max_norm is not None  # longer rows are shortened where they are
    return type(module).__name__ == "_LearnableFakeQuantize"


def why_gpu_only(blocks: Sequence[Block]) -> dict[str, str]:
    """The blocks that can't compute on the CPU of a machine with a GPU, by name, and why.

    A hook that computes a weight before each call, as those of `weight_norm` and pruning do, reads parameters
    on the GPU. Parameters of another block, which a call uses, are on the GPU too.
    """
    owned: dict[int, set[str]] = defaultdict(set)
    for block in blocks:
        for entry in block.entries:
            for owner, _ in entry.owners:
                owned[id(owner)].add(block.name)
    reasons = {}
    for block in blocks:
        inside = {key for module in block.modules for key in inside_order(module)}
        others = sorted(set().union(*(owned.get(key, ()) for key in inside)) - {block.name})
        if others:
            reasons[block.name] = f"its calls use {others[0]}, which is another block"
        elif computed := next(filter(None, map(_computed_by_a_hook, block.modules)), ""):
            reasons[block.name] = f"a hook computes its {computed} before each call, on the GPU"
    return reasons


def _computed_by_a_hook(module: nn.Module) -> str:
    """The name of a tensor of the module that its hooks probably compute before a call. Empty: none."""
    if not module._forward_pre_hooks:
        return ""
    return next((name for name, value in vars(module).items() if isinstance(value, torch.Tensor)), "")


MOST_ABOVE: Final = 1 / 16  # of a block's bytes: parameters of modules above its parts, which stay in VRAM


def is_divisible(block: Block) -> bool:
    """Whether each of its parts that holds parameters is called by itself, as far as types can say.

    torch's own compositions, such as MultiheadAttention, read weights of modules that they don't call. A
    model's own code may do so too; it gets the right values then, slowly. A module may have parameters of its
    own beside those of modules that it calls, if they are few: they stay in VRAM.
    """
    held: dict[int, int] = defaultdict(int)  # bytes of each module's own
    for entry in block.entries:
        owner, *others = _owners(entry)
        parts = {part_name(key) for _, key in entry.owners}  # layers of a recurrent module; "": it has none
        if others or len(parts) > 1 or isinstance(owner, _NEVER_CALLED):
            return False
        if parts != {""} and not has_layers(owner):
            return False
        held[id(owner)] += entry.given_bytes
    above = 0
    for module in (module for top in block.modules for module in top.modules()):
        below = [inner for inner in module.modules() if id(inner) in held]
        if not below or below == [module]:
            continue
        if not isinstance(module, _CALLING) and type(module).__module__.startswith("torch.nn."):
            return False
        above += held.get(id(module), 0)
    return above <= MOST_ABOVE * block.given_bytes


def has_layers(module: nn.Module) -> bool:
    """Whether it is a recurrent module of torch that computes with its own parameters and nothing else."""
    if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or "forward" in module.__dict__:
        return False
    return set(module._parameters) == set(module._flat_weights_names)


def _loose(entry: Entry, called: set[int], model: nn.Module) -> Block:
    """The block of a parameter outside all others. It moves only if its owners call no other block."""
    owners = _owners(entry)
    spans = any(
        (owner is model and any(owner.children())) or not called.isdisjoint(inside_order(owner)[1:])
        for owner in owners
    )
    return Block(entry.name, () if spans else owners, (entry,), called=not spans)


def _owners(entry: Entry) -> tuple[nn.Module, ...]:
    return tuple({id(owner): owner for owner, _ in entry.owners}.values())


def _below(
    module: nn.Module, by_owner: dict[int, list[Entry]], taken: set[int], recurrent: RecurrentLayers | None
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The module's parameters that aren't taken: its own, and those that modules outside it hold too.

    Those of a layer of a recurrent module are held by the whole module as well.
    """
    order = inside_order(module)
    inside = frozenset((*order, id(recurrent.whole) if recurrent else 0))
    below = {id(entry): entry for key in order for entry in by_owner.get(key, ())}
    free = [entry for key, entry in below.items() if key not in taken]
    own = tuple(entry for entry in free if all(id(owner) in inside for owner, _ in entry.owners))
    return own, tuple(entry for entry in free if entry not in own)


def inside_order(module: nn.Module) -> tuple[int, ...]:
    """The identities of a module and of those below it, in the order of definition."""
    return tuple(map(id, module.modules()))


def _called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are called as a whole; none comes twice. One that several share is inside others."""
    seen: set[int] = set()
    for name, module in _walk("", model, model):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _walk(name: str, module: nn.Module, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    if not _bytes(module):
        return
    if children and (module is model or isinstance(module, _CONTAINERS) or _is_lists(module)):
        for child_name, child in children:
            yield from _walk(f"{name}.{child_name}".lstrip("."), child, model)
    else:
        yield name, module


def _is_lists(module: nn.Module) -> bool:
    """Whether most of the module is lists of layers, which are the blocks then."""
    return 2 * _listed_bytes(module) > _bytes(module)


def _listed_bytes(module: nn.Module) -> int:
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
        return _bytes(module)
    return sum(map(_listed_bytes, module.children()))


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if not _is_shapeless(p))


Layers: TypeAlias = dict[str, tuple[RecurrentLayers, nn.RNNBase]]  # by name


def _named_layers(model: nn.Module, names: Collection[str]) -> Layers:
    """The layers of recurrent modules among the names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    wholes: dict[int, RecurrentLayers] = {}
    layers: Layers = {}
    for name in names:
        parent, _, layer = name.rpartition(".")
        whole = modules.get(parent)
        if name in modules or whole is None or not has_layers(whole):
            continue
        if id(whole) not in wholes:
            wholes[id(whole)] = RecurrentLayers.of(whole)
        for number, module in enumerate(wholes[id(whole)].layers):
            if layer == f"l{number}":
                layers[name] = wholes[id(whole)], module
    return layers


def _named(model: nn.Module, names: Collection[str], layers: Layers) -> list[tuple[str, nn.Module]]:
    """The modules among the names, in order."""
    modules = dict(model.named_modules(remove_duplicate=False)) | {name: m for name, (_, m) in layers.items()}
    return [(name, modules[name]) for name in names if name in modules]


def _entries(model: nn.Module, layers: Layers, becomes: torch.dtype | None) -> tuple[Entry, ...]:
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    first: dict[int, tuple[str, nn.Parameter]] = {}
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}".lstrip(".")
                _refuse_unusual(full, parameter)
                if id(parameter) in buffers:
                    raise PlacementError(
                        f"{full} is the buffer {buffers[id(parameter)]} too: only parameters move",
                        "register it as a parameter in both places",
                    )
                first.setdefault(id(parameter), (full, parameter))
                owners[id(parameter)].append((module, name))
    for recurrent in {id(recurrent): recurrent for recurrent, _ in layers.values()}.values():
        for layer in recurrent.layers:
            for name, parameter in layer._parameters.items():
                owners[id(parameter)].append((layer, name))
    return tuple(
        Entry(
            name,
            p,
            tuple(owners[key]),
            tuple(p.shape),
            tuple(p.stride()),
            becomes if becomes and p.dtype is torch.bfloat16 else p.dtype,
            p.requires_grad,
            p.dtype,
        )
        for key, (name, p) in first.items()
    )


def _is_shapeless(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedTensorMixin)


def _refuse_unusual(name: str, parameter: nn.Parameter) -> None:
    if _is_shapeless(parameter):
        raise PlacementError(
            f"{name} has no shape yet, so its bytes aren't known", "call the model once before you place it"
        )
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        kind = type(parameter if type(parameter) is not nn.Parameter else parameter.data).__name__
        if kind in ("OffloadedParameter", "PackedParameter"):
            raise placed_already()
        raise PlacementError(
            f"{name} is a {kind}: tensor subclasses, such as those of quantised models, can't be placed",
            "place the model before it is quantised, or leave it to the library that quantised it",
        )
    if parameter.layout is not torch.strided or parameter.is_quantized or parameter.is_nested:
        raise PlacementError(
            f"{name} is sparse, nested or quantised: only plain tensors can be placed",
            f"make it one, model.get_parameter({name!r}).to_dense() for example, or register it as a buffer",
        )
    if not _is_dense(parameter):
        raise PlacementError(
            f"{name} has gaps or repetitions in memory (shape {tuple(parameter.shape)}, strides "
            f"{parameter.stride()}), which a placed one couldn't have",
            f"let it have memory of its own: model.get_parameter({name!r}).data = "
            f"model.get_parameter({name!r}).data.contiguous()",
        )


def _is_dense(parameter: nn.Parameter) -> bool:
    """Whether its numbers fill its memory, each once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return not parameter.numel()
        expected *= size
    return True


def require_module(model: object) -> None:
    """Raise PlacementError for what is no module, and for one that is scripted or compiled, or holds such."""
    if not isinstance(model, nn.Module):
        raise PlacementError(
            f"a model is a torch.nn.Module, not a {type(model).__name__}", "give the module itself"
        )
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
            raise PlacementError(
                "a scripted or compiled model can't be placed", "plan and place the model it was made of"
            )


def placed_already() -> PlacementError:
    """The error for a model, or a part of one, that a handle has placed."""
    return PlacementError(
        "this model is placed already", "call remove() of its handle before you place it again"
    )


Module: TypeAlias = nn.Module  # for modules that don't import torch


def describe_module(model: Module) -> ModelDescription:
    """The description of a module: its blocks in the order of definition. What they compute, a trace says.

    Raises PlacementError for parameters that can't be placed, and for scripted or compiled modules.
    """
    require_module(model)
    parts = find_blocks(model)
    gpu_only = why_gpu_only(parts)
    active = {
        id(parameter): experts.chosen / experts.count
        for experts in find_experts(model)
        for parameter in experts.module.parameters()
    }
    blocks = tuple(_block(part, active, gpu_only=part.name in gpu_only) for part in parts)
    name = type(model).__name__
    notes = ("the order of calls is that of definition; attention isn't counted",)
    in_memory = not any(parameter.is_meta for parameter in model.parameters())
    config: Any = getattr(model, "config", None)
    positions = next((n for key in POSITIONS if type(n := getattr(config, key, None)) is int), None)
    return ModelDescription(
        name, blocks, "module tree", notes=notes, in_memory=in_memory, positions=positions
    )


def _block(block: Block, active: Mapping[int, float], *, gpu_only: bool) -> BlockDescription:
    tensors = tuple(_tensor(entry, active.get(id(entry.parameter), 1.0)) for entry in block.entries)
    lookups = any(isinstance(owner, nn.Embedding) for entry in block.entries for owner, _ in entry.owners)
    looked_up = lookups and any(tensor.use == "product" for tensor in tensors)
    return BlockDescription(
        block.name,
        tensors,
        looked_up=looked_up,
        anytime=not block.called or bool(block.written),
        divisible=is_divisible(block),
        gpu_only=gpu_only,
    )


def _tensor(entry: Entry, active: float) -> TensorDescription:
    dtype = str(entry.dtype).removeprefix("torch.")
    return TensorDescription(entry.name, entry.shape, dtype, _use(entry), active)


def _use(entry: Entry) -> Use:
    if len(entry.shape) < 2:
        return "elementwise"
    if all(isinstance(owner, nn.Embedding) for owner, _ in entry.owners):
        return "lookup"
    return "product"
