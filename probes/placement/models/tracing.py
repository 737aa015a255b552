"""A description with what a trace of the model's pass says: each block's operations, and the bytes of all.

`traced_module` traces a module, `traced_config` one that transformers builds on meta from a config.json.
"""

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from probes.core.errors import LibraryMissing, ModelUnknown, PlacementError, UsageError
from probes.placement.models.description import (
    BlockDescription,
    ModelDescription,
    TensorDescription,
    TracedFacts,
)
from probes.placement.models.inputs import cache_name, example, inputs_of
from probes.placement.models.modules import MOST_ABOVE, describe_module, find_blocks
from probes.placement.models.operations import AROUND, EXPERTS, Operation, Trace, WeightUse
from probes.placement.models.reading import config_of, describe
from probes.placement.models.transformers_config import model_on_meta, silently
from probes.placement.pass_time import host_time
from probes.placement.trace import Prepare, trace_pass, trace_real_pass
from probes.placement.types import Workload

MOST_REAL_BYTES: Final = 1 << 30  # of weights, for a real pass on the CPU
MOST_BLOCKS: Final = 1_000  # of a model that is traced
_SAFE: Final = (torch.Tensor, int, float, str, type(None))  # inputs that a trace leaves as they are
NO_INPUTS: Final = "nothing was traced: what the model is called with isn't known; give plan(..., inputs=...)"


@dataclass(frozen=True)
class Called:
    """How a pass is called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Positional inputs, named ones, both, or one tensor
PassInputs: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any] | Called


def called_with(inputs: PassInputs) -> Called:
    """Positional and named inputs of what a caller gave."""
    if isinstance(inputs, Called):
        return inputs
    if isinstance(inputs, Mapping):
        return Called((), dict(inputs))
    return Called(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {})


def traced_config(
    model: str, workload: Workload, *, measure: torch.device | None = None, captured: bool = False
) -> ModelDescription:
    """The description of what `describe` takes, its model built on meta and traced.

    As `describe` gives it, with a note, where transformers can't build the model, or not the same one.
    Raises what `describe` raises where neither knows it.
    """
    described: ModelDescription | None = None
    refusal: ModelUnknown | None = None
    try:
        described = describe(model)
    except ModelUnknown as error:
        refusal = error
    try:
        dtype = described.main_dtype if described else ""
        module = model_on_meta(config_of(model), dtype)
    except (ModelUnknown, LibraryMissing, UsageError) as error:
        if described is None:
            raise refusal or error from None
        return _untraced(described, f"nothing was traced: {error.message}")
    if described is None:
        described = replace(describe_module(module), in_memory=False)
    with silently():
        return traced_module(module, described, workload, None, measure=measure, captured=captured)


def traced_module(
    model: nn.Module,
    described: ModelDescription,
    workload: Workload,
    inputs: PassInputs | None,
    *,
    measure: torch.device | None = None,
    captured: bool = False,
) -> ModelDescription:
    """`described` with a trace of the module; without one, and a note, where that can't be made.

    `measure`: the device on which each distinct operation of the trace is run and timed. `captured`: passes
    are recorded as graphs.
    """
    if not described.blocks:
        return described  # a plan of it is refused
    blocks = find_blocks(model, [block.name for block in described.blocks])
    if len(blocks) > MOST_BLOCKS:
        return _untraced(described, f"nothing was traced: it has more than {MOST_BLOCKS:,} blocks")
    if {block.name for block in blocks} != {block.name for block in described.blocks}:
        return _untraced(described, "nothing was traced: transformers builds other blocks")
    try:
        traces = _traces(model, workload, inputs, measure, captured=captured)
    except ModelUnknown:
        return _untraced(described, NO_INPUTS)
    except PlacementError as error:
        return _untraced(described, f"nothing was traced: {error.message}")
    around = AROUND if hasattr(getattr(model, "config", None), "to_dict") else 0
    names = {id(part): name for name, part in model.named_modules()}
    paths = {names[id(part)]: block.name for block in blocks for part in block.modules}
    loose = {block.name for block in blocks if not block.called}
    return with_trace(described, traces, paths, loose, around=around)


def skeleton_of(model: nn.Module) -> nn.Module | None:
    """A copy of a module without its weights, for a trace once the module is placed; None: it has no copy."""
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
    try:
        return copy.deepcopy(model, made)
    except Exception:  # a module may hold anything: locks, files, what raises errors of its own
        return None


def traced_by_call(
    skeleton: nn.Module,
    described: ModelDescription,
    workload: Workload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ModelDescription:
    """`described` with a trace as `plan` makes it: by the config, else with the inputs of a call.

    Inputs that a trace might write to, such as caches, are a reason for none.
    """
    if is_of_transformers(skeleton):
        inputs = None
    elif all(isinstance(value, _SAFE) for value in tree_iter((args, kwargs))):
        inputs = Called(args, kwargs)
    else:
        return described
    with torch.inference_mode(False), torch.no_grad():
        return traced_module(skeleton, described, workload, inputs)


def _untraced(described: ModelDescription, note: str) -> ModelDescription:
    return replace(described, notes=(*described.notes, note))


def _traces(
    model: nn.Module,
    workload: Workload,
    inputs: PassInputs | None,
    measure: torch.device | None,
    *,
    captured: bool,
) -> list[Trace]:
    """The pass that is timed, and others whose activations need room as well."""
    if inputs is None:
        if not is_of_transformers(model):
            raise ModelUnknown(NO_INPUTS)
        return _of_transformers(model, workload, measure, captured=captured)
    called = called_with(inputs)
    if not all(isinstance(value, _SAFE) for value in tree_iter((called.args, called.kwargs))):
        raise PlacementError("its inputs hold objects, such as caches, which a trace would write to")
    generated = (
        _of_transformers(model, workload, None, captured=captured)
        if workload.context_tokens and is_of_transformers(model)
        else []
    )
    try:
        whole = trace_pass(model, called.args, called.kwargs, measure=measure, captured=captured)
    except PlacementError:
        if not _can_run(model, called):
            raise
        whole = trace_real_pass(model, called.args, called.kwargs, measure=measure)
    return [whole if captured else _timed(whole, model, called, measure), *generated]


def _timed(
    trace: Trace,
    model: nn.Module,
    called: Called,
    measure: torch.device | None,
    prepare: Prepare | None = None,
) -> Trace:
    """The trace with what the pass takes the host, where operations are measured on a GPU."""
    if measure is None or measure.type != "cuda":
        return trace
    return replace(trace, host_s=host_time(model, called.args, called.kwargs, measure, prepare=prepare))


def is_of_transformers(model: nn.Module) -> bool:
    """Whether its config says what it is called with."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def _can_run(model: nn.Module, called: Called) -> bool:
    """Whether the weights and the inputs are on the CPU, and few enough for a pass there."""
    tensors = (*model.parameters(), *model.buffers(), *called.args, *called.kwargs.values())
    there = all(t.device.type == "cpu" for t in tensors if isinstance(t, torch.Tensor))
    return there and sum(p.nbytes for p in model.parameters()) <= MOST_REAL_BYTES


def _of_transformers(
    model: Any,  # noqa: ANN401
    workload: Workload,
    measure: torch.device | None,
    *,
    captured: bool,
) -> list[Trace]:
    """Of a model of transformers, with inputs by its config. Generation: one token, and the prompt."""
    takes = inputs_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def given(tokens: int) -> dict[str, Any]:
        return example(takes, batch=workload.batch, tokens=tokens, device="cpu", dtype=dtype)

    generates = bool(takes.vocabulary) and not takes.decodes and hasattr(model, "lm_head")
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    called = Called((), {**given(workload.tokens), **no_cache})
    whole = trace_pass(model, (), called.kwargs, measure=measure, captured=captured)
    if not workload.context_tokens:
        return [whole if captured else _timed(whole, model, called, measure)]
    if not generates:
        raise ModelUnknown("only causal language models generate token by token here")

    def prepared(module: nn.Module, named: dict[str, Any]) -> tuple[dict[str, Any], Iterable[torch.Tensor]]:
        from transformers import StaticCache

        cache = StaticCache(model.config, max_cache_len=workload.context_tokens)
        more = {cache_name(model): cache, "use_cache": True}
        module(**named, **more)
        held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return {**named, **more}, held

    one = trace_pass(model, (), given(1), prepare=prepared, measure=measure, captured=captured)
    return [one if captured else _timed(one, model, Called((), given(1)), measure, prepared), whole]


def with_trace(
    described: ModelDescription,
    traces: Sequence[Trace],
    paths: Mapping[str, str],
    loose: Collection[str],
    *,
    around: int,
) -> ModelDescription:
    """The description with the first trace's operations, and the largest peaks of all traces.

    `paths`: blocks by the paths of their modules; `loose`: blocks that no call fetches. Blocks are put in the
    order of their calls. A weight that is read outside its block's calls has to stay where it is, and a note
    says so.
    """
    trace = traces[0]
    tensors = {tensor.name: tensor for block in described.blocks for tensor in block.tensors}
    trace = replace(trace, operations=tuple(_with_chosen(each, tensors) for each in trace.operations))
    kept = next((each.kept for each in traces if each.kept), {})
    attributed = Attributed(described, trace, paths, loose, kept)
    made = [
        replace(
            block,
            work=tuple(attributed.work[place]),
            modules_called=attributed.called[place],
            mixed=any(o.kind not in ("product", "view") for o in attributed.work[place]),
            calls=max(attributed.fetches[place] - block.looked_up, 1),
            around=around if place == attributed.order[0] else 0,
            cache_bytes=attributed.kept[place],
            anytime=block.anytime or place in attributed.outside,
            divisible=block.divisible and not _is_read_apart(block, attributed.work[place]),
        )
        for place, block in enumerate(described.blocks)
    ]
    notes = tuple(note for note in described.notes if not note.startswith("the order of calls"))
    outside = [described.blocks[place].name for place in sorted(attributed.outside)]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        notes += (f"{outside[0][:80]}{more} can't move: its weights are read outside its own calls",)
    return replace(
        described,
        blocks=tuple(made[place] for place in attributed.order),
        notes=notes,
        traced=TracedFacts(
            how=trace.how,
            peak=max((each.peak for each in traces), key=lambda peak: peak.reserved),
            peak_with_scores=max((each.peak_with_scores for each in traces), key=lambda peak: peak.reserved),
            flops=trace.flops,
            operations=trace.count,
            measured=trace.measured,
            host_s=trace.host_s,
        ),
    )


def _is_read_apart(block: BlockDescription, work: Iterable[Operation]) -> bool:
    """Whether more of a block than a little is read outside calls of the modules that hold it.

    As parts of their own, such weights would be brought for each reading.
    """
    apart = {
        use.name
        for operation in work
        for use in operation.weights
        if not f"{operation.at}.".startswith(f"{use.name.rpartition('.')[0]}.")
    }
    n_bytes = sum(tensor.given_bytes for tensor in block.tensors if tensor.name in apart)
    return n_bytes > MOST_ABOVE * sum(tensor.given_bytes for tensor in block.tensors)


def _with_chosen(operation: Operation, tensors: Mapping[str, TensorDescription]) -> Operation:
    """A product of all experts with the number of them that its rows are expected to choose."""
    if operation.name not in EXPERTS or not operation.weights:
        return operation
    tensor = tensors.get(operation.weights[0].name)
    if tensor is None or tensor.active >= 1.0:
        return operation
    count = tensor.shape[0]
    share = 1.0 - (1.0 - tensor.active) ** (operation.rows / max(count * tensor.active, 1.0))
    weights = tuple(WeightUse(use.name, int(share * use.n_bytes)) for use in operation.weights)
    return replace(operation, groups=share * count, weights=weights)


class Attributed:
    """A trace's operations by block, and what else it says of each: by place in the description."""

    def __init__(
        self,
        described: ModelDescription,
        trace: Trace,
        block_of: Mapping[str, str],
        loose: Collection[str],
        kept: Mapping[str, int],
    ) -> None:
        count = len(described.blocks)
        self.work: list[list[Operation]] = [[] for _ in range(count)]
        self.called = [0] * count  # modules, each time
        self.fetches = [0] * count  # calls of the block
        self.kept = [0] * count  # bytes
        self.outside: set[int] = set()
        place_of = {block.name: place for place, block in enumerate(described.blocks)}
        paths = {path: place_of[block] for path, block in block_of.items()}
        on_their_own = {place_of[block] for block in loose}
        holders = {tensor.name: p for p, block in enumerate(described.blocks) for tensor in block.tensors}
        ordered: dict[int, None] = {}
        for path, calls in trace.calls.items():
            if (place := _inside(path, paths)) is not None:
                self.called[place] += calls
                ordered.setdefault(place)
                self.fetches[place] += calls if path in paths else 0
        for path, n_bytes in kept.items():
            if (place := _inside(path, paths)) is not None:
                self.kept[place] += n_bytes
        last = next(iter(ordered), 0)
        for operation in trace.operations:
            at = _inside(operation.at, paths)
            read = {holders[use.name] for use in operation.weights if use.name in holders}
            self.outside |= {p for p in read if p != at and p not in on_their_own}
            place = at if at is not None else next(iter(read), last)
            self.work[place].append(operation)
            ordered.setdefault(place)
            last = place
        self.order = [*ordered, *(place for place in range(count) if place not in ordered)]


def _inside(path: str, paths: Mapping[str, int]) -> int | None:
    """The place of the block whose module has this path, or holds the one that has it."""
    while path not in paths:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return paths[path]
