"""A real pass or training step of a model with random weights, by torch, transformers and peft themselves."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from probes.errors import LibraryMissing, UsageError
from probes.fit.predicted.programs import LAYER_TARGETS
from probes.fit.question import Question
from probes.placement.models.fromconfig import configured, library, refusals

DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "amp-bf16": torch.float32,
    "amp-fp16": torch.float32,
}
HALVES: Final = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
RATE: Final = 1e-4  # of learning: any that trains


@dataclass(frozen=True)
class Prepared:
    """A model on its device, and its optimizer where it is trained."""

    module: Any  # transformers' or peft's
    optimizer: torch.optim.Optimizer | None
    device: str
    vocabulary: int
    has_head: bool


@dataclass(frozen=True)
class Made:
    """A model before it is run."""

    module: Any  # transformers' or peft's
    vocabulary: int
    has_head: bool


def prepare(config: Mapping[str, Any], asked: Question, device: str) -> Prepared:
    """The model of a config.json with random weights. Raises LibraryMissing, ModelUnknown, UsageError."""
    return ready(make(config, asked, device), asked, device)


def make(config: Mapping[str, Any], asked: Question, device: str) -> Made:
    """The model alone, with its adapters. Raises what `prepare` raises."""
    module, has_head = _built(config, asked, device)
    module.train(asked.task == "training")
    if asked.checkpointing:
        _checkpoint(module)
    vocabulary = int(module.config.vocab_size)
    return Made(_adapted(module, asked) if asked.lora_rank else module, vocabulary, has_head)


def _checkpoint(module: Any) -> None:
    """Turn gradient checkpointing on, by the name that this version of transformers has for it."""
    how = {"use_reentrant": False}
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(how)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def ready(made: Made, asked: Question, device: str) -> Prepared:
    """A model with the optimizer that trains it, if it is trained."""
    trained = [p for p in made.module.parameters() if p.requires_grad]
    optimizer = (
        _optimizer(trained, asked, foreach=device.startswith("cuda")) if asked.task == "training" else None
    )
    return Prepared(made.module, optimizer, device, made.vocabulary, made.has_head)


def _built(config: Mapping[str, Any], asked: Question, device: str) -> tuple[Any, bool]:
    transformers = library()
    named = config.get("architectures") or [""]
    has_head = str(named[0]).endswith(("ForCausalLM", "LMHeadModel"))
    with refusals():
        made = configured(config)
        for key, value in made.to_dict().items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value:
                setattr(made, key, 0.0)
        maker = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
        with torch.device(device):
            return maker.from_config(made, dtype=DTYPES[asked.precision]), has_head


def _adapted(module: Any, asked: Question) -> Any:
    try:
        import peft
    except ImportError as error:
        raise LibraryMissing(f"LoRA needs peft: {error}", "pip install peft") from error
    present = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    targets = asked.lora_targets or tuple(name for name in LAYER_TARGETS if name in present)
    try:
        adapters = peft.LoraConfig(
            r=asked.lora_rank, lora_alpha=2 * asked.lora_rank, lora_dropout=0.0, target_modules=list(targets)
        )
        return peft.get_peft_model(module, adapters)
    except ValueError as error:
        raise UsageError(
            f"peft refuses these targets: {str(error)[:200]}", "name others: --targets"
        ) from error


def _optimizer(trained: list[torch.nn.Parameter], asked: Question, *, foreach: bool) -> torch.optim.Optimizer:
    """As torch itself would make it; `foreach` is its default on a GPU, which a trace doesn't show."""
    if asked.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=RATE, foreach=foreach)
    momentum = 0.9 if asked.optimizer == "momentum" else 0.0
    return torch.optim.SGD(trained, lr=RATE, momentum=momentum, foreach=foreach)


def steps(ready: Prepared, asked: Question) -> Iterator[str]:
    """Do all that decides the peak, yielding what comes next: two steps of training, or two tokens."""
    if ready.optimizer is None:
        yield from _infer(ready, asked)
        return
    for number in (1, 2):  # from the second on, the optimizer has its state
        for _ in range(asked.accumulate):
            yield f"step {number}: forward"
            loss = _loss(ready, asked)
            yield f"step {number}: backward"
            (loss / asked.accumulate).backward()
            del loss
        yield f"step {number}: optimizer"
        ready.optimizer.step()
        ready.optimizer.zero_grad(set_to_none=True)
    yield "done"


def _loss(ready: Prepared, asked: Question) -> torch.Tensor:
    tokens = _tokens(ready, asked)
    with _autocast(ready, asked):
        if ready.has_head:
            found: torch.Tensor = ready.module(input_ids=tokens, labels=tokens, use_cache=False).loss
            return found
        hidden: torch.Tensor = ready.module(input_ids=tokens).last_hidden_state
        return hidden.float().pow(2).mean()


def _autocast(ready: Prepared, asked: Question) -> AbstractContextManager[Any]:
    half = HALVES.get(asked.precision)
    return nullcontext() if half is None else torch.autocast(ready.device.partition(":")[0], dtype=half)


def _tokens(ready: Prepared, asked: Question) -> torch.Tensor:
    """Token ids, all kinds of them."""
    count = torch.arange(asked.batch * asked.tokens, device=ready.device)
    return count.remainder_(ready.vocabulary).view(asked.batch, asked.tokens)


def _infer(ready: Prepared, asked: Question) -> Iterator[str]:
    """The prompt with keys and values kept, then one more token; of an encoder one pass."""
    with torch.no_grad():
        yield "prompt"
        tokens = _tokens(ready, asked)
        if not ready.has_head:
            ready.module(input_ids=tokens)
            yield "done"
            return
        found = ready.module(input_ids=tokens, use_cache=True, logits_to_keep=1)
        chosen = found.logits[:, -1:].argmax(-1)
        cache = found.past_key_values
        del found
        yield "next token"
        ready.module(input_ids=chosen, past_key_values=cache, use_cache=True, logits_to_keep=1)
        yield "done"
