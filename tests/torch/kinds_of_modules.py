"""Kinds of modules and of calls, each with a small model: what users place. Data for two tests.

`KINDS` has, by name, how a model is made and what is done with it. Done with a placed model, that gives what
it gives of the model itself, or is refused. `DEVICE`: where inputs are.
"""

# ruff: noqa: PLW0108  # functions are defined beside the kinds that they are of, below the list

import threading
import typing
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("cpu")  # as `kinds_of_modules.DEVICE`, which a script sets


@dataclass(frozen=True)
class Kind:
    """`work(model)` is compared. `steady`: a pass changes nothing, so it can be recorded as a graph."""

    make: typing.Callable
    work: typing.Callable
    steady: bool = True


KINDS: dict[str, Kind] = {}


def kind(name, make, work, *, steady=True):
    assert name not in KINDS, name
    KINDS[name] = Kind(make, work, steady)


def given(*shape, seed=1, dtype=torch.float32):
    """Random numbers, the same at each call, where the model computes."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(DEVICE)


def ids(*shape, below=16):
    made = torch.randint(1, below, shape, generator=torch.Generator().manual_seed(2))
    return made.to(DEVICE)


def here(*values, dtype=None):
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def padding(rows, columns):
    """A mask that ends each row earlier than the one before: True where there is nothing."""
    ends = columns - torch.arange(rows)[:, None]
    return (torch.arange(columns)[None] >= ends).to(DEVICE)


# Layers of torch, three of a kind, with the same input


class Three(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, *args, **kwargs):
        return [layer(*args, **kwargs) for layer in self.layers]


def three(name, make, *inputs, steady=True, **named):
    def work(model):
        return model(*[one() for one in inputs], **{key: one() for key, one in named.items()})

    kind(name, lambda: Three(make), work, steady=steady)


def x(*shape, **options):
    return partial(given, *shape, **options)


three("linear", lambda: nn.Linear(16, 24), x(3, 16))
three("linear without bias", lambda: nn.Linear(16, 24, bias=False), x(2, 3, 16))
three("linear of one row", lambda: nn.Linear(64, 64), x(64))
three("bilinear", lambda: nn.Bilinear(5, 6, 7), x(3, 5), x(3, 6))
three("linear in bfloat16", lambda: nn.Linear(64, 64).bfloat16(), x(3, 64, dtype=torch.bfloat16))
three("linear in float16", lambda: nn.Linear(64, 64).half(), x(3, 64, dtype=torch.float16))
three("linear in float64", lambda: nn.Linear(8, 8).double(), x(3, 8, dtype=torch.float64))
three("convolution 1d", lambda: nn.Conv1d(4, 8, 3), x(2, 4, 9))
three("convolution 2d", lambda: nn.Conv2d(4, 8, 3, padding=1), x(2, 4, 9, 9))
three("convolution 3d", lambda: nn.Conv3d(2, 4, 3), x(1, 2, 5, 5, 5))
three("convolution in groups", lambda: nn.Conv2d(8, 8, 3, groups=4), x(2, 8, 7, 7))
three("convolution by depth", lambda: nn.Conv2d(8, 8, 3, groups=8, bias=False), x(2, 8, 7, 7))
three("convolution with dilation", lambda: nn.Conv2d(4, 4, 3, dilation=2), x(2, 4, 9, 9))
three("convolution same", lambda: nn.Conv2d(4, 4, 4, padding="same"), x(2, 4, 9, 9))
three("convolution circular", lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), x(2, 4, 9, 9))
three("convolution reflecting", lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect"), x(2, 4, 9))
three(
    "convolution with channels last",
    lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
    lambda: given(2, 8, 7, 7).to(memory_format=torch.channels_last),
)
three("transposed convolution 1d", lambda: nn.ConvTranspose1d(4, 8, 3, stride=2), x(2, 4, 9))
three(
    "transposed convolution 2d",
    lambda: nn.ConvTranspose2d(4, 8, 3, stride=2, output_padding=1),
    x(2, 4, 5, 5),
)
three("transposed convolution 3d", lambda: nn.ConvTranspose3d(2, 4, 2), x(1, 2, 4, 4, 4))
three("batch norm", lambda: nn.BatchNorm2d(4), x(2, 4, 5, 5))
three("batch norm 1d", lambda: nn.BatchNorm1d(4), x(3, 4))
three("batch norm without statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), x(2, 4, 5, 5))
three("instance norm", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), x(2, 4, 5, 5))
three("group norm", lambda: nn.GroupNorm(2, 8), x(2, 8, 5))
three("layer norm", lambda: nn.LayerNorm(16), x(2, 3, 16))
three("layer norm of two dimensions", lambda: nn.LayerNorm((3, 16), bias=False), x(2, 3, 16))
three("root mean square norm", lambda: nn.RMSNorm(16), x(2, 3, 16))
three("rectifier with parameters", lambda: nn.PReLU(4), x(2, 4, 5))
three("embedding", lambda: nn.Embedding(16, 8), lambda: ids(2, 5))
three("embedding with padding", lambda: nn.Embedding(16, 8, padding_idx=3), lambda: ids(2, 5))
three(
    "embedding with a largest norm",
    lambda: nn.Embedding(16, 8, max_norm=0.5),
    lambda: ids(2, 5),
    steady=False,
)
three(
    "bag of embeddings with a largest norm",
    lambda: nn.EmbeddingBag(16, 8, max_norm=0.5),
    lambda: ids(2, 5),
    steady=False,
)
three("bag of embeddings", lambda: nn.EmbeddingBag(16, 8, mode="sum"), lambda: ids(2, 5))
three(
    "bag of the largest", lambda: nn.EmbeddingBag(16, 8, mode="max"), lambda: ids(12), lambda: here(0, 3, 7)
)
three(
    "bag with weights",
    lambda: nn.EmbeddingBag(16, 8, mode="sum"),
    lambda: ids(2, 5),
    per_sample_weights=x(2, 5),
)
three("lstm", lambda: nn.LSTM(8, 12, 2), x(5, 2, 8))
three("lstm both ways", lambda: nn.LSTM(8, 12, bidirectional=True, batch_first=True), x(2, 5, 8))
three("lstm with projections", lambda: nn.LSTM(8, 12, proj_size=4), x(5, 2, 8))
three("lstm with a state", lambda: nn.LSTM(8, 12), x(5, 2, 8), lambda: (given(1, 2, 12), given(1, 2, 12)))
three("lstm without bias", lambda: nn.LSTM(8, 12, bias=False), x(5, 2, 8))
three("gru", lambda: nn.GRU(8, 12, 2, bidirectional=True), x(5, 2, 8))
three("simple recurrence", lambda: nn.RNN(8, 12, nonlinearity="relu"), x(5, 2, 8))
three(
    "lstm of packed sequences",
    lambda: nn.LSTM(8, 12, batch_first=True),
    lambda: rnn.pack_padded_sequence(given(3, 5, 8), torch.tensor([5, 3, 2]), batch_first=True),
)
three("lstm cell", lambda: nn.LSTMCell(8, 12), x(2, 8))
three("gru cell", lambda: nn.GRUCell(8, 12), x(2, 8), x(2, 12))
three("simple cell", lambda: nn.RNNCell(8, 12), x(2, 8))
three("softmax in clusters", lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10]), x(4, 16), lambda: ids(4))
three("lazy linear after its first call", lambda: initialised(nn.LazyLinear(8), torch.ones(1, 16)), x(3, 16))
three(
    "lazy convolution after its first call",
    lambda: initialised(nn.LazyConv2d(8, 3), torch.ones(1, 4, 9, 9)),
    x(2, 4, 9, 9),
)


def initialised(module, example):
    with torch.no_grad():
        module(example)
    return module


def attention(
    name, make=lambda: nn.MultiheadAttention(16, 4), *, query=(5, 2, 16), key=None, value=None, **named
):
    def work(model):
        q = given(*query)
        k = q if key is None else given(*key, seed=2)
        v = k if value is None else given(*value, seed=3)
        return model(q, k, v, **{name: one() for name, one in named.items()})

    kind(name, lambda: Three(make), work)


def first(**options):
    return lambda: nn.MultiheadAttention(16, 4, batch_first=True, **options)


attention("attention")
attention("attention without its weights", need_weights=lambda: False)
attention("attention batch first", first(), query=(2, 5, 16), need_weights=lambda: False)
attention("attention with padding", first(), query=(2, 5, 16), key_padding_mask=lambda: padding(2, 5))
attention(
    "attention with padding, without its weights",
    first(),
    query=(2, 5, 16),
    key_padding_mask=lambda: padding(2, 5),
    need_weights=lambda: False,
)
attention("attention with a mask", first(), query=(2, 5, 16), attn_mask=lambda: padding(5, 5) & False)
attention(
    "attention that is causal",
    first(),
    query=(2, 5, 16),
    attn_mask=lambda: nn.Transformer.generate_square_subsequent_mask(5).to(DEVICE),
    is_causal=lambda: True,
    need_weights=lambda: False,
)
attention("attention across", first(), query=(2, 5, 16), key=(2, 7, 16))
attention(
    "attention across widths", first(kdim=8, vdim=12), query=(2, 5, 16), key=(2, 7, 8), value=(2, 7, 12)
)
attention("attention with biases of keys", first(add_bias_kv=True, add_zero_attn=True), query=(2, 5, 16))
attention("attention without bias", first(bias=False), query=(2, 5, 16), need_weights=lambda: False)
attention("attention without a batch", query=(5, 16))
attention("attention of each head", first(), query=(2, 5, 16), average_attn_weights=lambda: False)


def encoder(layers=3, *, norm=False, nested=True, **options):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    final = nn.LayerNorm(16) if norm else None
    return nn.TransformerEncoder(layer, layers, norm=final, enable_nested_tensor=nested)


def encoded(name, make=encoder, shape=(2, 5, 16), **named):
    kind(name, make, lambda model: model(given(*shape), **{key: one() for key, one in named.items()}))


encoded("encoder")
encoded("encoder with padding", src_key_padding_mask=lambda: padding(2, 5))
encoded(
    "encoder with padding and a last norm",
    partial(encoder, norm=True),
    src_key_padding_mask=lambda: padding(2, 5),
)
encoded(
    "encoder with padding, not nested",
    partial(encoder, nested=False),
    src_key_padding_mask=lambda: padding(2, 5),
)
encoded(
    "encoder with gelu and padding",
    partial(encoder, activation="gelu"),
    src_key_padding_mask=lambda: padding(2, 5),
)
encoded(
    "encoder with norms first",
    partial(encoder, norm_first=True, nested=False),
    src_key_padding_mask=lambda: padding(2, 5),
)
encoded("encoder with a mask", mask=lambda: nn.Transformer.generate_square_subsequent_mask(5).to(DEVICE))
encoded("encoder of one layer with padding", partial(encoder, 1), src_key_padding_mask=lambda: padding(2, 5))
encoded(
    "encoder without bias",
    partial(encoder, bias=False, nested=False),
    src_key_padding_mask=lambda: padding(2, 5),
)
encoded("encoder layers of their own", lambda: nn.Sequential(*encoder().layers))


class Encoding(nn.Module):
    """An encoder behind an embedding, and before a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(16, 16), encoder(), nn.Linear(16, 16)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.encoder(self.embed(words), src_key_padding_mask=padding(*words.shape)))


class OwnLayer(nn.TransformerEncoderLayer):
    """A subclass, of which torch says nothing."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 2


kind("encoder in a model, tied", Encoding, lambda model: model(ids(2, 5)))
kind(
    "encoder of a subclass",
    lambda: nn.TransformerEncoder(OwnLayer(16, 4, 32, batch_first=True), 2),
    lambda model: model(given(2, 5, 16), src_key_padding_mask=padding(2, 5)),
)
three(
    "encoder layer with padding",
    lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    x(2, 5, 16),
    src_key_padding_mask=lambda: padding(2, 5),
)
three(
    "decoder layer", lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), x(2, 5, 16), x(2, 4, 16)
)
kind(
    "decoder with padding",
    lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2, nn.LayerNorm(16)
    ),
    lambda model: model(
        given(2, 5, 16),
        given(2, 4, 16),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5).to(DEVICE),
        memory_key_padding_mask=padding(2, 4),
    ),
)
kind(
    "encoder and decoder",
    lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    lambda model: model(given(2, 5, 16), given(2, 4, 16), src_key_padding_mask=padding(2, 5)),
)

# Parametrisations


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrised(module, name="weight"):
    parametrize.register_parametrization(module, name, Doubled())
    return module


class RecurrentWithItsOwn(nn.LSTM):
    """A parameter that isn't among those of the recurrence."""

    def __init__(self):
        super().__init__(8, 12)
        self.scale = nn.Parameter(torch.full((12,), 0.5))

    def forward(self, sequence):
        output, state = super().forward(sequence)
        return output * self.scale, state


def pruned(module):
    prune.l1_unstructured(module, "weight", 0.5)
    return module


three("weight norm", lambda: parametrizations.weight_norm(nn.Linear(8, 8)), x(3, 8))
three("weight norm of a convolution", lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), x(2, 4, 9))
three("older weight norm", lambda: nn.utils.weight_norm(nn.Linear(8, 8)), x(3, 8))
three(
    "older weight norm of an lstm", lambda: nn.utils.weight_norm(nn.LSTM(8, 12), "weight_hh_l0"), x(5, 2, 8)
)
three(
    "weight norm of an lstm", lambda: parametrizations.weight_norm(nn.LSTM(8, 12), "weight_hh_l0"), x(5, 2, 8)
)
three("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), x(3, 8))
three("older spectral norm", lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), x(3, 8))
three("orthogonal weights", lambda: parametrizations.orthogonal(nn.Linear(8, 8)), x(3, 8))
three("a parametrisation", lambda: parametrised(nn.Linear(8, 8)), x(3, 8))
three("a parametrised bias", lambda: parametrised(nn.Conv2d(4, 4, 3), "bias"), x(2, 4, 5, 5))
three("pruned weights", lambda: pruned(nn.Linear(8, 8)), x(3, 8))
three("a recurrence with a parameter of its own", RecurrentWithItsOwn, x(5, 2, 8))

# Weights that are read outside their block's call


class Reading(nn.Module):
    """Two linear layers, called one after the other, and something else done with their weights."""

    def __init__(self, read):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.read = read

    def forward(self, given):
        return self.second(torch.relu(self.first(given))), self.read(self, given)


def reading(name, read, *, steady=True):
    kind(f"a weight {name}", partial(Reading, read), lambda model: model(given(3, 16)), steady=steady)


def two_layers(given, up, down, bias):
    return F.linear(torch.relu(F.linear(given, up)), down, bias)


@cache
def script():
    return torch.jit.script(two_layers)


def scripted(*given):
    return script()(*given)


def threaded(read):
    def work(model, given):
        found = []
        thread = threading.Thread(target=lambda: found.append(read(model, given)))
        thread.start()
        thread.join(60)
        assert found, "the thread doesn't end"
        return found[0]

    return work


class Own(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, given, weight):
        return given @ weight.t()


compiled = torch.compile(lambda given, weight: torch.relu(given @ weight.t()), backend="eager")
reading("in a scripted function", lambda m, x: scripted(x, m.first.weight, m.second.weight, m.second.bias))
reading("in vmap", lambda m, _: torch.func.vmap(lambda row: row.sum() * 2)(m.first.weight))
reading("closed over in vmap", lambda m, x: torch.func.vmap(lambda row: m.first.weight @ row)(x))
reading("in jvp", lambda m, x: torch.func.jvp(lambda one: one @ m.first.weight.t(), (x,), (x,)))
reading("in jacfwd", lambda m, x: torch.func.jacfwd(lambda one: m.first.weight @ one)(x[0]))
reading("in a function of autograd", lambda m, x: Own.apply(x, m.first.weight))
reading("in a compiled function", lambda m, x: compiled(x, m.first.weight))
reading("in a linear function", lambda m, x: F.linear(x, m.first.weight, m.first.bias))
reading("in a linear function by names", lambda m, x: F.linear(input=x, weight=m.first.weight))
reading("as the input of a linear function", lambda m, _: F.linear(m.first.weight, m.second.weight.t()))
reading("transposed", lambda m, x: x @ m.first.weight.T)
reading("in part", lambda m, _: m.first.weight[1:3, ::2].clone())
reading("by an index", lambda m, _: m.first.weight[here(0, 2)])
reading("as rows of a table", lambda m, _: F.embedding(ids(3), m.first.weight))
reading("joined with another", lambda m, _: torch.cat([m.first.weight, m.second.weight.t()]))
reading("stacked", lambda m, _: torch.stack([m.first.weight, m.second.weight.t()]))
reading("in einsum", lambda m, x: torch.einsum("bi,oi->bo", x, m.first.weight))
reading("in a convolution", lambda m, x: F.conv1d(x[:, :, None], m.first.weight[:, :, None]))
reading("in a norm", lambda m, x: F.layer_norm(x, (16,), m.second.bias))
reading("in attention", lambda m, _: F.scaled_dot_product_attention(*[m.first.weight[None]] * 3))
reading("as a sum", lambda m, _: m.first.weight.float().pow(2).sum())
reading("as its norm", lambda m, _: torch.linalg.vector_norm(m.first.weight, dim=0))
reading("detached", lambda m, x: F.linear(x, m.first.weight.detach()))
reading("as data", lambda m, x: F.linear(x, m.first.weight.data, m.first.bias.data))
reading("on the host", lambda m, _: m.first.weight.detach().cpu() * 2)
reading(
    "as an array", lambda m, _: torch.from_numpy(m.first.weight.detach().cpu().numpy().copy()), steady=False
)
reading("as a list", lambda m, _: torch.tensor(m.first.bias.tolist()), steady=False)
reading("as a number", lambda m, _: m.first.weight[0, 0].item(), steady=False)
reading("as a condition", lambda m, x: x if m.first.weight[0, 0] > 0 else -x, steady=False)
reading("as pieces", lambda m, _: [one.clone() for one in m.first.weight.chunk(2)])
reading("row by row", lambda m, _: [row * 2 for row in m.first.weight][3])
reading("in other strides", lambda m, _: m.first.weight.as_strided((4, 4), (2, 1)).clone())
reading("by foreach", lambda m, _: torch._foreach_mul([m.first.weight, m.second.weight], 2.0))
reading("in autocast", lambda m, x: autocast(m, x))
reading("converted", lambda m, x: x.double() @ m.first.weight.double().t())
reading("copied into another tensor", lambda m, _: torch.zeros(32, 16, device=DEVICE).copy_(m.first.weight))
reading("as a view of other numbers", lambda m, _: m.first.weight.view(torch.int32) + 1)
reading("compared", lambda m, _: torch.equal(m.first.weight, m.first.weight.clone()))
reading("that isn't changed", lambda m, _: torch.where(m.first.weight > 0, m.first.weight, 0.0))
reading("by another thread", threaded(lambda m, _: m.first.weight * 2), steady=False)
reading("of a state dict", lambda m, _: [one.to(DEVICE) * 2 for one in m.state_dict().values()])
reading("among all parameters", lambda m, _: sum(one.sum() for one in m.parameters()))
reading("as an exchanged parameter", lambda m, x: exchanged_call(m, x))
reading("of a vector of all", lambda m, _: nn.utils.parameters_to_vector(m.parameters()))
reading("in a block's state", lambda m, _: torch.func.stack_module_state([m.first, m.first])[0]["weight"] * 2)
reading("asked what it is", lambda m, _: asked(m.first.weight))
reading("asked within its call", lambda m, _: m.answers)
reading("by dlpack", lambda m, _: torch.from_dlpack(m.first.weight.detach()) * 2, steady=False)
reading(
    "by older dlpack",
    lambda m, _: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(m.first.weight)) * 2,
    steady=False,
)
reading("by its address", lambda m, _: m.first.weight.data_ptr() > 0, steady=False)
reading("by its storage", lambda m, _: m.first.weight.untyped_storage().data_ptr() > 0, steady=False)
reading("written to", lambda m, _: m.first.weight.mul_(1.0), steady=False)
reading("written to in part", lambda m, _: m.first.weight.__setitem__(0, 1.0), steady=False)
reading(
    "that is a function's output", lambda m, _: torch.mul(m.first.weight, 2, out=m.first.weight), steady=False
)


def autocast(model, given):
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return F.linear(given, model.first.weight)


def exchanged_call(model, given):
    return torch.func.functional_call(
        model.second, {"bias": model.second.bias * 2}, (F.linear(given, model.first.weight),)
    )


def asked(weight):
    """What a library asks of a weight before it chooses a way."""
    return [
        torch.overrides.has_torch_function((weight,)),
        isinstance(weight, nn.Parameter),
        weight.is_leaf,
        weight.requires_grad,
        weight.grad is None,
        weight.is_contiguous(),
        weight.stride(),
        weight.dtype,
        weight.layout,
        weight.is_floating_point(),
        weight.numel() * weight.element_size(),
        weight.is_sparse,
        weight.is_quantized,
        weight.dim(),
        len(weight),
        weight.is_inference(),
        getattr(weight, "_is_hf_initialized", False),
        tuple(weight.size()),
        weight.grad_fn,
        weight._backward_hooks,
    ]


class Asking(nn.Linear):
    """Asks of its own weight within its call."""

    def forward(self, given):
        self.answers = [*asked(self.weight), type(self.weight) is nn.Parameter, self.weight.data_ptr() > 0]
        return super().forward(given)


def marked():
    model = Reading(lambda m, _: asked(m.first.weight))
    model.first = Asking(16, 32)
    model.first.weight._is_hf_initialized = True
    return model


KINDS["a weight asked what it is"] = Kind(marked, lambda model: model(given(3, 16)))
KINDS["a weight asked within its call"] = Kind(
    marked, lambda model: (model(given(3, 16)), model.first.answers)
)


class ScriptedParts(nn.Module):
    """A layer that gives two children's weights to a scripted function and calls neither."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)

    def forward(self, given):
        return given + scripted(given, self.up.weight, self.down.weight, self.down.bias)


three("a scripted function of children's weights", ScriptedParts, x(3, 16))

# What goes in and comes out

Pair = namedtuple("Pair", "left right")  # such as users have


@dataclass
class Outcome:
    values: torch.Tensor
    more: object = None


@dataclass(frozen=True)
class Frozen:
    values: torch.Tensor


class Table(nn.Module):
    """Returns a part of its weight, within something."""

    def __init__(self, wrap):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.wrap = wrap

    def forward(self, given):
        return self.wrap(self.weight[:3], given)


class Tables(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layers = nn.ModuleList(Table(wrap) for _ in range(4))

    def forward(self, given):
        return [layer(given) for layer in self.layers]


def returning(name, wrap):
    kind(f"a weight returned {name}", partial(Tables, wrap), lambda model: model(given(3, 16)))


returning("as it is", lambda w, _: w)
returning("in a tuple", lambda w, x: (w, x))
returning("in a named tuple", lambda w, x: Pair(w, x))
returning("in a list", lambda w, x: [x, [w]])
returning("in a dict", lambda w, _: {"weight": w})
returning("in an ordered dict", lambda w, _: OrderedDict(weight=w))
returning("in a defaultdict", lambda w, _: defaultdict(list, weight=[w]))
returning("in a user's dict", lambda w, _: UserDict(weight=w))
returning("in a user's list", lambda w, _: UserList([w]))
returning("in a deque", lambda w, x: deque([w, x], maxlen=2))
returning("in a dataclass", lambda w, x: Outcome(x, {"weight": w}))
returning("in a frozen dataclass", lambda w, _: Frozen(w))
returning("as a torch type", lambda w, _: torch.max(w, dim=0))
returning("as a view", lambda w, _: w.t().unsqueeze(0).expand(2, 16, 3))


class Writing(nn.Module):
    """A layer that writes into what it is given."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.write = write

    def forward(self, given, kept):
        found = self.linear(given)
        self.write(kept, found)
        return found


class Writers(nn.Module):
    def __init__(self, write, container):
        super().__init__()
        self.layers = nn.ModuleList(Writing(write) for _ in range(4))
        self.container = container

    def forward(self, given):
        kept = self.container(given)
        for layer in self.layers:
            given = layer(given, kept)
        return given, kept


def writing(name, container, write):
    kind(f"a block that writes {name}", partial(Writers, write, container), lambda model: model(given(3, 16)))


writing("into a list", lambda x: [x], lambda kept, found: kept.append(found))
writing("into an empty list", lambda _: [], lambda kept, found: kept.append(found))
writing("into a dict", lambda x: {"x": x}, lambda kept, found: kept.update({len(kept): found}))
writing("into a dict's list", lambda x: {"x": [x]}, lambda kept, found: kept["x"].append(found))
writing(
    "into an ordered dict", lambda x: OrderedDict(x=x), lambda kept, found: kept.update(x=kept["x"] + found)
)
writing("into a defaultdict", lambda x: defaultdict(list, x=[x]), lambda kept, found: kept["y"].append(found))
writing(
    "into a user's dict", lambda x: UserDict(x=x), lambda kept, found: kept.__setitem__(len(kept.data), found)
)
writing("into a deque", lambda x: deque([x], maxlen=3), lambda kept, found: kept.append(found))
writing("into a dataclass", lambda x: Outcome(x), lambda kept, found: setattr(kept, "more", found))
writing("into a tensor", lambda x: torch.zeros_like(x), lambda kept, found: kept.add_(found))
writing(
    "into a part of a tensor",
    lambda x: {"x": torch.zeros_like(x)},
    lambda kept, found: kept["x"][1].copy_(found[1]),
)
writing("by taking away", lambda x: [x, x, x, x], lambda kept, _: kept.pop())
writing("by clearing", lambda x: {"x": x}, lambda kept, _: kept.clear())


class InPlace(nn.Module):
    """Rectifies its input where it is, as many convolution nets do."""

    def __init__(self):
        super().__init__()
        self.act, self.conv = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, given):
        return given + self.conv(self.act(given))


class Chain(nn.Module):
    """Layers one after another."""

    def __init__(self, make, n=3):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(n))

    def forward(self, given):
        for layer in self.layers:
            given = layer(given)
        return given


def chain(name, make, *shape, steady=True, n=3):
    kind(name, partial(Chain, make, n), lambda model: model(given(*shape)), steady=steady)


chain("rectified in place", InPlace, 2, 4, 5, 5)


class Same(nn.Module):
    """Says whether two inputs are one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, one, other, *, third):
        return self.linear(one), one is other, other is third, one


def thrice(model):
    one = given(3, 16)
    return model(one, one, third=one)


kind("one input given thrice", lambda: Three(Same), thrice)

# Calls


class Layer(nn.Module):
    """A layer with two methods and a buffer."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, given):
        return given + self.project(given)

    def project(self, given):
        return self.down(torch.relu(self.up(self.norm(given))))


class Counting(Layer):
    def forward(self, given):
        self.calls += 1
        return super().forward(given) * self.calls


class Model(nn.Module):
    """Layers, called by `run(model, given)`."""

    def __init__(self, run, make=Layer, n=4):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(n))
        self.root = nn.Parameter(torch.randn(16))
        self.run = run

    def forward(self, given, **options):
        return self.run(self, given, **options)


def calling(name, run, make=Layer, work=lambda model: model(given(3, 16)), *, steady=True):
    kind(name, partial(Model, run, make), work, steady=steady)


def each(model, given):
    for layer in model.layers:
        given = layer(given)
    return given


def loop(times, model, given):
    for _ in range(times):
        given = each(model, given)
    return given


calling("layers in turn", each)
calling("layers that count their calls", each, Counting, steady=False)
calling("layers twice", partial(loop, 2))
calling("layers backwards", lambda m, x: each(m, x) + [x := layer(x) for layer in reversed(m.layers)][-1])
calling("some layers only", lambda m, x: m.layers[2](m.layers[0](x)))
calling("one layer again and again", lambda m, x: m.layers[1](m.layers[1](m.layers[1](x))))
calling("a method that isn't forward", lambda m, x: m.layers[0].project(m.layers[1](x)))
calling("forward without its hooks", lambda m, x: m.layers[0].forward(m.layers[1].forward(x)))
calling("a parameter of the model itself", lambda m, x: each(m, x * m.root) @ m.root)
calling(
    "layers by checkpoint",
    lambda m, x: [x := checkpoint(layer, x, use_reentrant=False) for layer in m.layers][-1],
)
calling(
    "layers by an older checkpoint",
    lambda m, x: [x := checkpoint(layer, x, use_reentrant=True) for layer in m.layers][-1],
)
calling("a layer in vmap", lambda m, x: torch.func.vmap(m.layers[0])(x))
calling("a layer in jvp", lambda m, x: torch.func.jvp(m.layers[0], (x,), (x,)))
calling("a layer in jacfwd", lambda m, x: torch.func.jacfwd(m.layers[0])(x[0]))
calling(
    "a model in jvp", each, work=lambda m: torch.func.jvp(m, (given(3, 16),), (given(3, 16),)), steady=False
)
calling("a model in vmap", each, work=lambda m: torch.func.vmap(m)(given(2, 3, 16)), steady=False)
calling("a layer with exchanged weights", lambda m, x: torch.func.functional_call(m.layers[0], {}, (x,)))
calling("layers in autocast", lambda m, x: in_autocast(m, x))
calling("layers in a generator", lambda m, x: list(yielded(m, x)))
calling(
    "weights read by a closure later",
    lambda m, x: [later(x) for later in [closure(layer) for layer in m.layers]],
)
calling(
    "layers that end early", lambda m, x: m.layers[0](x) if x.sum() > 1e9 else m.layers[3](x), steady=False
)
calling("a sequence of layers", lambda m, x: nn.Sequential(*m.layers)(x))
calling("layers chosen by name", lambda m, x: m.get_submodule("layers.2")(x))
calling("layers called with names", lambda m, x: [x := layer(given=x) for layer in m.layers][-1])
calling("an empty batch", each, work=lambda model: model(given(0, 16)))
calling("a batch that isn't contiguous", each, work=lambda model: model(given(16, 3).t()))
calling("a batch of views", each, work=lambda model: model(given(6, 16)[::2]))
# a recorded pass writes over what the one before has returned
calling("shapes that differ", each, work=lambda model: [model(given(n, 16)).clone() for n in (1, 2, 1)])
calling("hooks", each, work=lambda model: hooked(model), steady=False)
calling("hooks before with names", each, work=lambda model: hooked_before(model), steady=False)
calling("a hook of all modules", each, work=lambda model: hooked_everywhere(model), steady=False)
calling("a thread that calls the model", each, work=lambda model: in_thread(model), steady=False)
calling("gradients allowed", each, work=lambda model: with_gradients(model), steady=False)
calling("training mode without gradients", each, work=lambda model: model.train()(given(3, 16)), steady=False)


def in_autocast(model, given):
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return each(model, given)


def yielded(model, given):
    for layer in model.layers:
        given = layer(given)
        yield given


def closure(layer):
    return lambda given: F.linear(given, layer.up.weight)


def hooked(model):
    handles = [layer.register_forward_hook(lambda _, __, output: output * 2) for layer in model.layers]
    try:
        return model(given(3, 16))
    finally:
        for handle in handles:
            handle.remove()


def hooked_before(model):
    def before(layer, args, kwargs):
        return (args[0] + layer.up.weight.mean(),), kwargs

    handle = model.layers[1].register_forward_pre_hook(before, with_kwargs=True)
    try:
        return model(given(3, 16))
    finally:
        handle.remove()


def hooked_everywhere(model):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, _, __: seen.append(type(module)))
    try:
        return model(given(3, 16)), seen
    finally:
        handle.remove()


def in_thread(model):
    found = []

    def run():
        with torch.no_grad():
            found.append(model(given(3, 16)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found


def with_gradients(model):
    with torch.inference_mode(False), torch.enable_grad():
        return model(given(3, 16)).requires_grad, model(given(3, 16)).detach()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, given):
        return torch.relu(self.norm(self.conv(given)))


kind(
    "batch norm that learns its statistics",
    partial(Chain, Normed),
    lambda model: (model.train()(given(2, 4, 5, 5)), [one.to(DEVICE, copy=True) for one in model.buffers()]),
    steady=False,
)


class Reassigned(nn.Module):
    """Puts another tensor in its buffer's place in each pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("state", torch.zeros(16), persistent=False)

    def forward(self, given):
        self.state = self.state + self.linear(given).mean(0)
        return given + self.state


class Reparametrised(nn.Module):
    """Exchanges its weight's data, in each pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, given):
        found = self.linear(given)
        self.linear.weight.data = self.linear.weight.data * 0.5
        return found


chain("a buffer that is reassigned", Reassigned, 3, 16, steady=False)
chain("data that is exchanged in a pass", Reparametrised, 3, 16, steady=False)

# As in libraries of vision


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, given):
        return self.act(self.body(given).add_(given))


class Squeezed(nn.Module):
    """An inverted residual with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True)
        )
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.less, self.more = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1)

    def forward(self, given):
        found = self.depth(self.expand(given))
        scale = self.more(F.silu(self.less(F.adaptive_avg_pool2d(found, 1)), inplace=True))
        return given + self.project(found.mul_(torch.sigmoid(scale)))


class Dense(nn.Module):
    """Joins the outputs of all layers before it, in a list that grows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3))

    def forward(self, given):
        found = [given]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)[:, :8]


class NextBlock(nn.Module):
    """With a scale of each channel, as ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.depth, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, given):
        found = self.norm(self.depth(given).permute(0, 2, 3, 1))
        return given + (self.gamma * self.down(F.gelu(self.up(found)))).permute(0, 3, 1, 2)


class Windowed(nn.Module):
    """Attention with a table of relative positions, as Swin."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(9, 4))
        self.register_buffer("where", torch.arange(25).reshape(5, 5) % 9, persistent=False)

    def forward(self, given):
        rows, n, _ = given.shape
        q, k, v = self.qkv(given).view(rows, n, 3, 4, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.where.view(-1)].view(n, n, 4).permute(2, 0, 1)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return given + self.out(found.transpose(1, 2).reshape(rows, n, 16))


class Standardised(nn.Conv2d):
    """Convolves with weights that are standardised first, as in BiT and NFNets."""

    def forward(self, given):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(given, weight, self.bias, padding=1)


class Fused(nn.Module):
    """Joins three weights for one product, and calls none of their layers."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, given):
        weight = torch.cat([one.weight for one in (self.q, self.k, self.v)])
        bias = torch.cat([one.bias for one in (self.q, self.k, self.v)])
        return sum(F.linear(given, weight, bias).chunk(3, -1))


class Experts(nn.Module):
    """One parameter of three dimensions for all experts."""

    def __init__(self):
        super().__init__()
        # small ones: with large ones several shares are 0, and which of these is chosen differs by device
        self.router, self.up = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 24) / 8)
        self.down = nn.Parameter(torch.randn(4, 24, 16) / 8)

    def forward(self, given):
        share, chosen = self.router(given).softmax(-1).topk(2)
        found = torch.zeros_like(given)
        for expert in range(4):
            where = (chosen == expert).any(-1)
            part = torch.relu(given[where] @ self.up[expert]) @ self.down[expert]
            found[where] += part * share[where].sum(-1, keepdim=True)
        return found


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.channels = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5))

    def forward(self, given):
        return given + self.channels(self.tokens(given).transpose(1, 2)).transpose(1, 2)


class Spectral(nn.Module):
    """Complex weights on a Fourier transform."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 9, dtype=torch.complex64))

    def forward(self, given):
        return torch.fft.irfft(torch.fft.rfft(given) * self.weight[: given.shape[-2]], n=16)


class HalfSpectral(nn.Module):
    """Complex weights of two half numbers each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16).to(torch.complex32), requires_grad=False)

    def forward(self, given):
        return given * self.weight.to(torch.complex64).real


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        self.register_buffer("edges", torch.eye(3).roll(1, 0).to_sparse())

    def forward(self, given):
        return torch.relu(torch.sparse.mm(self.edges, self.linear(given)))


class Hyper(nn.Module):
    """One layer makes another's weights."""

    def __init__(self):
        super().__init__()
        self.maker, self.code = nn.Linear(4, 16 * 16), nn.Parameter(torch.randn(4))

    def forward(self, given):
        return F.linear(given, self.maker(self.code).view(16, 16))


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scales = nn.BatchNorm1d(16, affine=False), nn.Embedding(16, 32)

    def forward(self, given):
        scale, shift = self.scales(ids(given.shape[0]).to(given.device)).chunk(2, -1)
        return self.norm(given) * scale + shift


class Named(nn.Module):
    """Parameters in lists and mappings."""

    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList(torch.randn(16) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(16), "b": torch.randn(16)})
        self.parts = nn.ModuleDict({"x": nn.Linear(16, 16), "y": nn.Linear(16, 16)})

    def forward(self, given):
        for one in self.several:
            given = given * one
        return self.parts["y"](given + self.named["a"]) - self.parts["x"](given) * self.named["b"]


class Tied(nn.Module):
    """Decodes with the transposed weight of its encoder."""

    def __init__(self):
        super().__init__()
        self.encode, self.bias = nn.Linear(16, 8), nn.Parameter(torch.zeros(16))

    def forward(self, given):
        return F.linear(self.encode(given), self.encode.weight.t(), self.bias)


class Numbers(nn.Module):
    """Parameters without dimensions, and without numbers."""

    def __init__(self):
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(16, 16)

    def forward(self, given):
        return self.linear(given) * self.scale + self.none.sum()


class Integers(nn.Module):
    """A parameter of whole numbers, as of quantised layers that unpack themselves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-128, 127, (16, 16), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(16, 1))

    def forward(self, given):
        return F.linear(given, self.weight.to(given.dtype) * self.scale / 64)


class Patches(nn.Module):
    """With a class token and positions that belong to the model itself, as a vision transformer."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, image):
        found = self.patch(image).flatten(2).transpose(1, 2)
        found = torch.cat([self.token.expand(len(found), -1, -1), found], 1) + self.positions
        for layer in self.layers:
            found = layer(found)
        return self.head(self.norm(found)[:, 0])


class Pyramid(nn.Module):
    """Goes down and up, and joins what it kept on the way down."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d(8, 4, 2, stride=2) for _ in range(2))

    def forward(self, given):
        kept = []
        for layer in self.down:
            given = layer(given)
            kept.append(given)
        for layer in self.up:
            given = layer(torch.cat([given, kept.pop()], 1))
        return given


for name, make, shape in (
    ("a residual net", Residual, (2, 8, 6, 6)),
    ("an inverted residual net", Squeezed, (2, 8, 6, 6)),
    ("a dense net", Dense, (2, 8, 6, 6)),
    ("a net with scales of channels", NextBlock, (2, 8, 8, 8)),
    ("attention in windows", Windowed, (2, 5, 16)),
    ("standardised convolutions", partial(Standardised, 8, 8, 3), (2, 8, 6, 6)),
    ("joined projections", Fused, (2, 5, 16)),
    ("experts in one parameter", Experts, (6, 16)),
    ("a mixer", Mixer, (2, 5, 16)),
    ("complex weights", Spectral, (3, 16)),
    ("complex weights of half numbers", HalfSpectral, (3, 16)),
    ("a sparse graph", Graph, (3, 16)),
    ("weights made by a layer", Hyper, (3, 16)),
    ("conditioned norms", Conditioned, (3, 16)),
    ("parameters in containers", Named, (3, 16)),
    ("tied with its own transposed", Tied, (3, 16)),
    ("parameters without dimensions", Numbers, (3, 16)),
    ("whole numbers", Integers, (3, 16)),
):
    chain(name, make, *shape)
kind("a vision transformer", Patches, lambda model: model(given(2, 3, 8, 8)))
kind("a pyramid", Pyramid, lambda model: model(given(2, 4, 8, 8)))

# Weights that are kept beyond a call


class Keeping(Table):
    """Adds a view of its weight that it keeps between calls."""

    def __init__(self, keep):
        super().__init__(None)
        self.keep, self.kept = keep, {}

    def forward(self, given):
        if not self.kept:
            self.kept["rows"] = [self.keep(self.weight)]
        return given + self.kept["rows"][0]


def keeping(name, keep):
    kind(
        f"a weight kept {name}",
        partial(Chain, partial(Keeping, keep)),
        lambda m: m(given(3, 16)),
        steady=False,
    )


class KeepingLater(Keeping):
    """Keeps it in its third call, as a table of positions for longer inputs."""

    def forward(self, given):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(given) if self.calls > 2 else given + self.weight[:3]


chain("a weight kept by a later call", partial(KeepingLater, lambda weight: weight[:3]), 3, 16, steady=False)
keeping("in part", lambda weight: weight[:3])
keeping("detached", lambda weight: weight.detach()[:3])
keeping("as data", lambda weight: weight.data[:3])
keeping("transposed twice", lambda weight: weight.t()[:, :3].t())
returning("in an object", lambda w, _: SimpleNamespace(weight=w))
kind(
    "weights put into a list",
    partial(Model, lambda m, x: into_a_list(m, x), lambda: Table(lambda w, kept: kept.append(w))),
    lambda model: model(given(3, 16)),
)
kind(
    "weights read by a closure of a call",
    partial(Model, lambda m, x: [one(x) for one in [layer(x) for layer in m.layers]], lambda: Table(reader)),
    lambda model: model(given(3, 16)),
)


def into_a_list(model, _given):
    kept = []
    for layer in model.layers:
        layer(kept)
    return [one.clone() for one in kept]


def reader(weight, _given):
    return lambda given: given + weight


# A module that several layers share, and the model too, as positional encodings of CoaT


class Sharing(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(16, 16)

    def forward(self, given):
        return self.linear(self.shared(given))


class Shared(nn.Module):
    def __init__(self, *, first):
        super().__init__()
        shared = nn.Linear(16, 16)
        if first:
            self.shared = shared
        self.layers = nn.ModuleList(Sharing(shared) for _ in range(3))
        self.shared = shared

    def forward(self, given):
        for layer in self.layers:
            given = layer(given)
        return given


kind("a module that layers share, named first", partial(Shared, first=True), lambda m: m(given(3, 16)))
kind("a module that layers share, named last", partial(Shared, first=False), lambda m: m(given(3, 16)))
