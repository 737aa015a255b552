"""What an operation of a pass computes, reads and launches, told from its name and its arguments.

`operation_facts` gives what the record of an operation says (`models.operations.Operation`), and
`result_by_shape` what an operation returns that fake tensors would run step by step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from probes.placement.models.operations import OperationKind

# Of torch's composed operations, those that a GPU is asked for as one
WHOLE: Final = frozenset(
    {
        "batch_norm",
        "contiguous",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "cumsum",
        "dropout",
        "gru",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "linear",
        "log_softmax",
        "lstm",
        "reshape",
        "rms_norm",
        "rnn_relu",
        "rnn_tanh",
        "scaled_dot_product_attention",
        "softmax",
        "to",
    }
)
PRODUCTS: Final = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm"})
NORMS: Final = frozenset(
    {"_log_softmax", "_safe_softmax", "_softmax", "_weight_norm_interface", "group_norm", "layer_norm"}
    | {"log_softmax", "native_group_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "softmax"}
    | {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"}
)
# Kernels of those that take several: statistics, what they become, and their use
NORM_LAUNCHES: Final = {"group_norm": 3, "native_group_norm": 3, "instance_norm": 3}
REDUCTIONS: Final = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "aminmax", "linalg_vector_norm", "logsumexp", "max"}
    | {"mean", "min", "norm", "prod", "std", "sum", "var", "var_mean"}
)
POOLS: Final = ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool", "_adaptive_avg_pool")
SCANS: Final = {
    "cumsum": 2,
    "cumprod": 2,
    "sort": 8,
    "argsort": 8,
    "topk": 2,
    "multinomial": 4,
    "nonzero": 3,
    "unique2": 6,
}
LOOKUPS: Final = frozenset({"embedding", "_embedding_bag", "embedding_bag"})
RECURRENT: Final = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # numbers of gates
NO_KERNEL: Final = frozenset(
    {"alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "dropout"}
    | {"new_empty_strided", "sym_size", "sym_stride", "sym_numel", "is_same_size", "set_", "resize_"}
)
# Attention with a mask is computed step by step: kernels, in launches of attention's (2 of which a fused one
# takes), and bytes that they read and write for each of the scores': BERT-large's passes at batch 2 and 8,
# which had a mask, took 48 and 92 us a layer more than without on an H100 (docs/results)
STEPWISE_LAUNCHES: Final = 9
STEPWISE_TOUCHED: Final = 14
LAYERS_IN_ONE: Final = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


def numbers_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor takes: of numbers that are repeated by a stride of 0, each once."""
    numbers = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0
    )
    return int(numbers * tensor.element_size())


def result_by_shape(name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401, PLR0911  # None: fake tensors know it
    """The result of an operation that fake tensors would run step by step; None: they know it."""
    if name == "scaled_dot_product_attention":
        q, v = args[0], args[2]
        if q.dim() != 4:
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        batch, heads, rows, _ = q.shape
        return q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)
    if name in RECURRENT and not isinstance(args[1], torch.Tensor | None):
        return _recurrent_result(name, args)
    if name in RECURRENT and isinstance(args[3], bool):
        return _recurrent_result(name, args)
    if name == "_grouped_mm" and args[0].dim() == 2 and args[1].dim() == 3:
        return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
    if name == "_transformer_encoder_layer_fwd":
        return torch.empty_like(args[0])
    return None


def _recurrent_result(name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401  # tensors
    """Outputs and last states. `args` of the overload for whole batches, as torch's modules call it."""
    x, hidden, both_ways = args[0], args[1], args[7]
    first = hidden[0] if isinstance(hidden, list | tuple) else hidden
    width = first.shape[-1] * (2 if both_ways else 1)
    out = x.new_empty((*x.shape[:-1], width))
    if name == "lstm":
        return out, torch.empty_like(hidden[0]), torch.empty_like(hidden[1])
    return out, torch.empty_like(first)


Facts = dict[str, Any]
FOREACH_TENSORS: Final = 32  # that one kernel of a whole list goes over: torch's own has room for 30 to 110


def operation_facts(  # noqa: PLR0911  # one for each kind
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> Facts:
    """What a record says of an operation's kind: shapes, multiplications, kernels, workspace."""
    if name in PRODUCTS:
        return _product(name, args, results[0])
    if "conv" in name and len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() > 2:
        return _convolution(name, args, kwargs, results[0])
    if name == "scaled_dot_product_attention":
        return _attention(args, kwargs)
    if name.startswith("_scaled_dot_product"):  # as a training step calls it
        return _fused_attention(name, args)
    if name == "convolution_backward":
        forward = _convolution(name, args[1:3], {"transposed": args[7]}, args[0])
        return {**forward, "flops": 2 * forward["flops"], "launches": 2 * forward["launches"]}
    if name.removesuffix("_data").removesuffix("_backward") in NORMS and "backward" in name:
        return {"kind": "norm", "launches": 2}
    if name.startswith(("_foreach", "_fused_ad", "_fused_sgd")):
        return {"kind": "plain", "launches": 1 + len(given) // FOREACH_TENSORS}
    if name in RECURRENT:
        return _loop(name, args)
    if name in LOOKUPS or (name == "index_select" and given[0].dim() == 2):
        return {"kind": "lookup", "dtype": dtype_name(given[0]), "read": 0}
    if name in NORMS:
        return {"kind": "norm", "launches": NORM_LAUNCHES.get(name, 1)}
    if name in SCANS:
        return {"kind": "scan", "launches": SCANS[name]}
    if (name in REDUCTIONS and results[0].numel() < max(t.numel() for t in given)) or name.startswith(POOLS):
        return {"kind": "reduction"}
    return {"kind": _elementwise(name, (*given, *results))}


def _elementwise(name: str, tensors: Sequence[torch.Tensor]) -> OperationKind:
    whole = [tensor for tensor in tensors if tensor.dim()]
    alike = len({(tensor.shape, tensor.dtype) for tensor in whole}) < 2
    plain = alike and name not in ("cat", "contiguous", "copy") and all(t.is_contiguous() for t in whole)
    return "plain" if plain else "strided"


def dtype_name(tensor: torch.Tensor) -> str:
    """As records have it: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def _product(name: str, args: Sequence[Any], result: torch.Tensor) -> Facts:
    first, second = (args[1], args[2]) if name in ("addmm", "baddbmm", "addmv") else (args[0], args[1])
    inputs = first.shape[-1] if first.dim() else 1
    outputs = result.shape[-1] if name not in ("mv", "addmv", "dot") else 1
    groups = first.shape[0] if name in ("bmm", "baddbmm") else 1
    if name == "_grouped_mm":
        groups = second.shape[0] if second.dim() == 3 else 1
    rows = result.numel() // max(outputs * (groups if name != "_grouped_mm" else 1), 1)
    numbers = result.numel()
    return {
        "kind": "product",
        "flops": 2 * numbers * inputs,
        "rows": rows,
        "outputs": outputs,
        "inputs": inputs,
        "groups": groups,
        "dtype": dtype_name(first),
    }


def _convolution(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor) -> Facts:
    x, weight = args[0], args[1]
    transposed = "transpose" in name or (
        name in ("convolution", "_convolution")
        and bool(args[6] if len(args) > 6 else kwargs.get("transposed"))
    )
    positions = math.prod((x if transposed else result).shape[2:]) * result.shape[0]
    each = math.prod(weight.shape[1:])
    channels = weight.shape[0]
    numbers = x.numel() + weight.numel() + result.numel()
    packed = not (x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else False)
    pointwise = x.dim() == 4 and x.shape[1] == 1 and weight.shape[0] == x.shape[1]
    groups = x.shape[1] // weight.shape[1] if not transposed and weight.shape[1] else 1
    depthwise = groups > 1 and weight.shape[1] == 1
    # cuDNN's kernels for matrix units take channels last: what isn't so is brought there and back
    turned = packed and not depthwise and not pointwise and x.element_size() <= 4
    return {
        "kind": "convolution",
        "flops": 2 * positions * channels * each,
        "rows": positions,
        "outputs": channels,
        "inputs": each,
        "groups": groups,
        "dtype": dtype_name(x),
        "launches": 4 if turned else 1,
        "workspace": numbers * x.element_size() if turned else 0,
    }


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Facts:
    q, k, v = args[:3]
    rows, kept = q.shape[-2], k.shape[-2]
    batch = math.prod(q.shape[:-2])
    masked = (args[3] if len(args) > 3 else kwargs.get("attn_mask")) is not None
    scores = 2 * 4 * batch * rows * kept  # in float32, twice while they are normalised
    stepwise = masked and rows > 1
    keys_bytes = sum(numbers_bytes(tensor) for tensor in (q, k, v))
    return {
        "kind": "attention",
        "read": keys_bytes + (STEPWISE_TOUCHED * scores if stepwise else 0),
        "flops": 2 * batch * rows * kept * (q.shape[-1] + v.shape[-1]),
        "rows": rows,
        "outputs": v.shape[-1],
        "inputs": kept,
        "groups": batch,
        "steps": 1,
        "launches": STEPWISE_LAUNCHES if stepwise else 2,
        "workspace": scores if stepwise else 0,
        "scores": 0 if stepwise else scores,
        "dtype": dtype_name(q),
    }


def _fused_attention(name: str, args: Sequence[Any]) -> Facts:
    """Attention that keeps no scores. Backward it computes them again, and four products with them."""
    backward = "backward" in name
    q, k, v = args[1:4] if backward else args[:3]
    width = 3 * q.shape[-1] + 2 * v.shape[-1] if backward else q.shape[-1] + v.shape[-1]
    return {
        "kind": "attention",
        "flops": 2 * math.prod(q.shape[:-1]) * k.shape[-2] * width,
        "rows": q.shape[-2],
        "outputs": v.shape[-1],
        "inputs": k.shape[-2],
        "groups": math.prod(q.shape[:-2]),
        "launches": 4 if backward else 2,
        "dtype": dtype_name(q),
    }


def _loop(name: str, args: Sequence[Any]) -> Facts:
    """A loop over time, as cuDNN computes it: inputs of all steps as one product, then step by step."""
    x, hidden, parameters, _, layers, _, _, both_ways, batch_first = args[:9]
    first = hidden[0] if isinstance(hidden, list | tuple) else hidden
    steps = x.shape[1 if batch_first else 0] if x.dim() == 3 else x.shape[0]
    batch = x.numel() // max(steps * x.shape[-1], 1)
    matrices = [p for p in parameters if p.dim() > 1]
    flops = sum(2 * p.numel() for p in matrices) * steps * batch
    passes = layers * (2 if both_ways else 1)
    gates = RECURRENT[name] * first.shape[-1]
    width = x.element_size()
    # weights apart from each other are copied to one buffer; and the inputs' share of every gate is kept
    copied = sum(p.numel() for p in parameters) * width
    return {
        "kind": "recurrent",
        "flops": flops,
        "rows": batch,
        "outputs": gates,
        "inputs": first.shape[-1],
        "groups": passes,
        "steps": steps,
        "launches": passes * (1 + 2 * steps),
        "workspace": copied + 2 * steps * batch * gates * width,
        "dtype": dtype_name(x),
    }
