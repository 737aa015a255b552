"""What the planner counts for a layer's kernels and activations, against what its code calls."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probes.placement.models.modules import describe_module

transformers = pytest.importorskip("transformers")

WIDTH, TOKENS = 256, 16
# Times on an H200 in units of 2.3 us, a kernel of the planner's: of operations on contiguous numbers, on
# strided or broadcast ones, of norms and sums along rows, and of torch's attention with what precedes it.
PLAIN, STRIDED = 0.8, 1.25
SLOW = {"layer_norm": 2.1, "mean": 1.9, "attention": 4.2}
FREE = {"view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "split", "chunk"}
FREE |= {"dropout", "empty", "empty_like", "alias", "detach", "reshape", "unbind", "permute", "squeeze"}
PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm"}
LLAMA = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 3 * WIDTH}
GEMMA = {**LLAMA, "head_dim": 64, "num_key_value_heads": 2}


class Operations(TorchDispatchMode):
    """Sums up operations besides views and products, and the numbers that they read and write."""

    def __init__(self):
        super().__init__()
        self.kernels = self.numbers = 0

    def note(self, name, inputs, outputs):
        self.numbers += sum(t.numel() for t in (*inputs, *outputs))
        whole = [t for t in (*inputs, *outputs) if t.dim()]
        plain = name not in ("cat", "contiguous") and len({(t.shape, t.dtype) for t in whole}) < 2
        plain = plain and all(t.is_contiguous() for t in whole)
        self.kernels += SLOW.get(name, PLAIN if plain else STRIDED)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__.rstrip("_")
        if name not in FREE | PRODUCTS:
            tensors = [[t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (args, found)]
            self.note(name, *tensors)
        return found


def operations(monkeypatch, kind, layers, batch, **sizes):
    """Of a pass on meta as it is recorded as a graph, with torch's attention as one operation."""
    from transformers import masking_utils

    config = getattr(transformers, f"{kind}Config")(vocab_size=512, num_hidden_layers=layers, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    counted = Operations()

    def attention(query, key, value, *_, **__):
        counted.note("attention", (query, key, value), (query,))
        return torch.empty_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    with torch.inference_mode(), counted:
        model(input_ids=torch.zeros(batch, TOKENS, dtype=torch.long, device="meta"), use_cache=False)
    layer = next(block for block in describe_module(model).blocks if block.attention)
    return counted, layer


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("GPTNeoX", LLAMA),
        ("Phi", LLAMA),
        ("GPT2", {"n_embd": WIDTH, "n_head": 4}),
        ("OPT", {"hidden_size": WIDTH, "num_attention_heads": 4, "ffn_dim": 4 * WIDTH}),
        ("Llama", LLAMA),
        ("Phi3", {**LLAMA, "num_key_value_heads": 4, "pad_token_id": 0}),
        ("Granite", {**LLAMA, "num_key_value_heads": 2}),
        ("Qwen3", GEMMA),
        ("Gemma", GEMMA),
        ("Gemma2", GEMMA),
        ("Gemma3Text", GEMMA),
    ],
)
def test_a_layers_kernels_and_activations_are_those_of_its_code(monkeypatch, kind, sizes):
    def of(layers, batch):
        return operations(monkeypatch, kind, layers, batch, **sizes)

    (one, _), (two, layer), (more, _), (most, _) = of(2, 1), of(3, 1), of(2, 2), of(3, 2)
    kernels = two.kernels - one.kernels
    numbers = (most.numbers - more.numbers - two.numbers + one.numbers) / TOKENS
    assert layer.kernels == pytest.approx(kernels, rel=0.25)
    # activations stay in the cache in part; a module that counts none is guessed by its products' outputs
    assert not layer.touched_numbers or 0.6 * numbers < layer.touched_numbers < 1.3 * numbers
