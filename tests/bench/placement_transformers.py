"""Every model type that the installed transformers registers, shrunk, placed at random on the CPU: same bits.

`bars(board)` is called by bench_placement.py. The rule: each type's default configuration with the sizes of
`SMALL`, bfloat16, weights by seed 0, a batch of two. Types that transformers can't build or run so within a
minute, or of over 60 million parameters, are counted and left out. Each other one is traced and planned, and
placed three times: its blocks as they are, then twice as the plan divides them, each in a tier drawn by its
name. After each it is given back, and must still have its bits. Passes are seeded: a first
run counted two types that draw random numbers as ones with other bits.
"""

import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from board import Board, tell
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "torch"))

from random_models import plan_of

from probes.core.errors import PlacementError
from probes.placement import Handle, place, plan
from probes.placement.models.modules import find_blocks
from probes.placement.types import PrefetchPool, Tier

TURNS = 3
MINUTE = 60
MOST_PARAMETERS = 60_000_000
TIERS: tuple[Tier, ...] = ("resident", "packed", "in_place", *2 * ("streamed", "streamed_packed"))
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "n_embed"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"vocab_size": 512, "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "state_size": 16},
    "rotary_dim": 16,
}


def bars(board: Board) -> None:
    """Place each type, and count what differs and what fails."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    outcomes: dict[str, list[str]] = {"left out": [], "same bits": [], "other bits": [], "failed": []}
    for name in sorted(CONFIG_MAPPING):
        try:
            with _at_most(MINUTE):
                model, given = _made(CONFIG_MAPPING[name](), MODEL_MAPPING)
                wanted = _pass(model, given)
        except Exception as error:  # whatever transformers raises for these sizes
            outcomes["left out"].append(f"{name}: {type(error).__name__}")
            continue
        try:
            wrong = _wrong(name, model, given, wanted)
        except Exception as error:  # of ours: counted, and the next type follows
            outcomes["failed"].append(f"{name}: {type(error).__name__}: {error}"[:200])
            continue
        outcomes["other bits" if wrong else "same bits"].append(f"{name}{wrong and ': '}{wrong}")
        if not len(outcomes["same bits"]) % 20:
            tell(f"{len(outcomes['same bits'])} model types with the same bits")
    version = transformers.__version__
    title = "model types of transformers, placed at random"
    board.bar(f"{title}: other bits", len(outcomes["other bits"]), 0, "types", which=outcomes["other bits"])
    board.bar(f"{title}: failures", len(outcomes["failed"]), 0, "types", which=outcomes["failed"])
    board.figure(f"{title}: same bits", len(outcomes["same bits"]), "types", transformers=version)
    why = Counter(reason.partition(": ")[2] for reason in outcomes["left out"])
    board.figure(f"{title}: left out", len(outcomes["left out"]), "types", why=dict(why))


def _made(config: Any, models: Mapping[Any, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A shrunk model, and what to call it with. Raises what transformers raises."""
    _shrink(config)
    kind = models[type(config)]
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError("too many parameters")
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).eval().requires_grad_(requires_grad=False)
    return model, _inputs(model, config)


def _shrink(config: Any) -> None:
    for key, value in SMALL.items():
        now = getattr(config, key, None)
        if isinstance(now, int | float) and not isinstance(now, bool):
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: SMALL["n_layer"]]
    for part in vars(config).values():
        if hasattr(part, "to_diff_dict"):  # a configuration within
            _shrink(part)


def _inputs(model: Any, config: Any) -> dict[str, Any]:
    """Two rows of whatever the model's main input is."""
    generator = torch.Generator().manual_seed(0)
    accepted = signature(model.forward).parameters
    ids = torch.randint(3, 500, (2, 16), generator=generator)
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else 32
    shapes = {
        "pixel_values": (2, getattr(config, "num_channels", None) or 3, size, size),
        "input_values": (2, 4000),
        "input_features": (2, getattr(config, "num_mel_bins", 16), 128),
    }
    main = model.main_input_name
    if main == "input_ids":
        given: dict[str, Any] = {main: ids}
    else:
        given = {main: torch.randn(*shapes[main], generator=generator).to(torch.bfloat16)}
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = ids
    if "use_cache" in accepted and main == "input_ids":
        given["use_cache"] = False
    return given


def _wrong(name: str, model: nn.Module, given: dict[str, Any], wanted: list[torch.Tensor]) -> str:
    """What differs after some placements, empty if nothing."""
    drawn = random.Random(name)
    made = plan(model, vram=4 << 30, machine="nvidia-h100", batch=2, inputs=given, captured=False)
    for turn in range(TURNS):
        divided = turn > 0 and made.experts is None
        names = [block.name for block in made.blocks] if divided else None
        tiers = {block.name: drawn.choice(TIERS) for block in find_blocks(model, names)}
        pool = PrefetchPool(drawn.choice([1, 2, 3]), scratches=drawn.choice([1, 2]))
        handle = _placed(model, names, tiers, pool)
        for _ in range(2):
            if not _same(_pass(model, given), wanted):
                return f"placement {turn}"
        handle.remove()
        if not _same(_pass(model, given), wanted):
            return f"given back after placement {turn}"
    return ""


def _placed(model: nn.Module, names: list[str] | None, tiers: dict[str, Tier], pool: PrefetchPool) -> Handle:
    """A placement, in which what says that it can only be resident is."""
    try:
        return place(model, plan_of(model, tiers, pool, names=names), device="cpu")
    except PlacementError as error:
        name, only, _ = str(error).partition(" is used while other blocks are called")
        if not only:
            raise
    return _placed(model, names, tiers | {name: "resident"}, pool)


@torch.no_grad()
def _pass(model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)  # some passes draw random numbers
    return list(_tensors(model(**given)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*_numbers(a, b))
        for a, b in zip(found, wanted, strict=True)
    )


def _numbers(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else (a, b)


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
