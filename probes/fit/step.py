"""A real pass or training step of a model with random weights, by torch, transformers and peft themselves."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from probes.core.errors import LibraryMissing, ModelUnknown, UsageError
from probes.fit.report import Built, Question
from probes.fit.tape import LAYER_TARGETS
from probes.placement.models.inputs import Inputs, cache_name, example, inputs_of
from probes.placement.models.transformers_config import config_object, config_refusals, import_transformers

DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "amp-bf16": torch.float32,
    "amp-fp16": torch.float32,
}
HALVES: Final = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
QUARTERS: Final = 4
RATE: Final = 1e-4  # of learning: any that trains


@dataclass(frozen=True)
class Prepared:
    """A model on its device, and its optimizer where it is trained."""

    module: Any  # transformers' or peft's
    optimizer: torch.optim.Optimizer | None
    device: str
    takes: Inputs
    has_head: bool  # over the vocabulary: it says a loss itself


@dataclass(frozen=True)
class Made:
    """A model before it is run."""

    module: Any  # transformers' or peft's
    takes: Inputs
    has_head: bool


def prepare(config: Mapping[str, Any], question: Question, device: str) -> Prepared:
    """The model of a config.json with random weights. Raises LibraryMissing, ModelUnknown, UsageError."""
    return ready(make(config, question, device), question, device)


def make(config: Mapping[str, Any], question: Question, device: str) -> Made:
    """The model alone, with its adapters. Raises what `prepare` raises."""
    module, has_head = _built(config, question, device)
    takes = inputs_of(module)
    if takes.spectrum is not None:
        raise ModelUnknown(
            "it takes sound, and steps are tried here with tokens or with images of one size",
            "give the config.json of a model of text or images",
        )
    module.train(question.task == "training")
    if question.checkpointing:
        checkpoint(module)
    if question.lora_rank:
        with torch.device(device):  # peft fills its matrices where they are made
            module = adapted(module, question.lora_rank, question.lora_targets)
    return Made(module, takes, has_head and takes.image is None)


def built(module: Any) -> Built:
    """The bytes of a model's weights, those that are shared once, and of those that are trained."""
    held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return Built(
        sum(tensor.nbytes for tensor in held.values()),
        sum(tensor.nbytes for tensor in held.values() if tensor.requires_grad),
    )


def checkpoint(module: Any) -> None:
    """Turn gradient checkpointing on, by the name that this version of transformers has for it."""
    how = {"use_reentrant": False}
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(how)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def ready(made: Made, question: Question, device: str, *, foreach: bool | None = None) -> Prepared:
    """A model with the optimizer that trains it, if it is trained; `foreach` as torch has it on a device."""
    trained = [p for p in made.module.parameters() if p.requires_grad]
    all_at_once = device.startswith("cuda") if foreach is None else foreach
    optimizer = _optimizer(trained, question, foreach=all_at_once) if question.task == "training" else None
    return Prepared(made.module, optimizer, device, made.takes, made.has_head)


def _built(config: Mapping[str, Any], question: Question, device: str) -> tuple[Any, bool]:
    transformers = import_transformers()
    named = config.get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else ""
    with config_refusals():
        made = config_object(config)
        for key, value in made.to_dict().items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value:
                setattr(made, key, 0.0)
        maker = transformers.AutoModel
        if made.is_encoder_decoder and kind.endswith("ForConditionalGeneration"):
            maker = transformers.AutoModelForSeq2SeqLM
        elif kind.endswith(("ForCausalLM", "LMHeadModel")):
            maker = transformers.AutoModelForCausalLM
        with torch.device(device):
            module = maker.from_config(made, dtype=DTYPES[question.precision])
            return module, maker is not transformers.AutoModel


def adapted(module: Any, rank: int, targets: Sequence[str] = ()) -> Any:
    """The module with LoRA adapters, which alone are trained; without targets, those of attention.

    Raises LibraryMissing without peft, and UsageError for targets that it refuses.
    """
    try:
        import peft
    except ImportError as error:
        raise LibraryMissing(f"LoRA needs peft: {error}", "pip install peft") from error
    present = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    targets = targets or tuple(name for name in LAYER_TARGETS if name in present)
    try:
        adapters = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=0.0,
            target_modules=list(targets),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name of before
            return peft.get_peft_model(module, adapters)
    except ValueError as error:
        raise UsageError(
            f"peft refuses these targets: {str(error)[:200]}", "name others: --targets"
        ) from error


def _optimizer(
    trained: list[torch.nn.Parameter], question: Question, *, foreach: bool
) -> torch.optim.Optimizer:
    """The optimizer with torch's defaults; `foreach` is one on a GPU, which a trace doesn't show."""
    if question.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=RATE, foreach=foreach)
    momentum = 0.9 if question.optimizer == "momentum" else 0.0
    return torch.optim.SGD(trained, lr=RATE, momentum=momentum, foreach=foreach)


def run(ready: Prepared, question: Question, begins: Callable[[str], None]) -> None:
    """Do all that decides the peak: two steps of training, or two tokens. `begins` takes a phase's name."""
    if ready.optimizer is None:
        _infer(ready, question, begins)
        return
    with _quarters(ready.module, begins) as backward:
        for number in (1, 2):  # from the second on, the optimizer has its state
            for _ in range(question.accumulate):
                begins(f"step {number}: forward")
                loss = _loss(ready, question)
                backward(number)
                (loss / question.accumulate).backward()
                del loss
            begins(f"step {number}: optimizer")
            ready.optimizer.step()
            ready.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _quarters(module: Any, begins: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Makes phases of a backward pass: until each quarter of the weights has its gradient.

    At its beginning activations take most, at its end gradients do; what each takes by itself is a straight
    line over the batch.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    borders = {max(len(trained) * part // QUARTERS, 1): part for part in range(QUARTERS)}
    step, done = 0, 0

    def backward(number: int) -> None:
        nonlocal step, done
        step, done = number, 0
        begins(f"step {step}: backward, to the first gradient")

    def count(_: torch.Tensor) -> None:
        nonlocal done
        done += 1
        if done in borders:
            begins(f"step {step}: backward, part {borders[done] + 1} of {QUARTERS}")

    hooks = [parameter.register_post_accumulate_grad_hook(count) for parameter in trained]
    try:
        yield backward
    finally:
        for hook in hooks:
            hook.remove()


def _loss(ready: Prepared, question: Question) -> torch.Tensor:
    given = _given(ready, question)
    with _autocast(ready, question):
        if ready.has_head:
            more = {} if ready.takes.decodes else {"use_cache": False}
            loss: torch.Tensor = ready.module(**given, labels=given["input_ids"], **more).loss
            return loss
        return _first(ready.module(**given)).float().pow(2).mean()


def _first(outputs: Any) -> torch.Tensor:
    """The last hidden states, or whatever a model without them says first."""
    hidden: torch.Tensor = getattr(outputs, "last_hidden_state", None)
    return outputs[0] if hidden is None else hidden


def _autocast(ready: Prepared, question: Question) -> AbstractContextManager[Any]:
    half = HALVES.get(question.precision)
    return nullcontext() if half is None else torch.autocast(ready.device.partition(":")[0], dtype=half)


def _given(ready: Prepared, question: Question) -> dict[str, torch.Tensor]:
    """Token ids, all kinds of them, or images, under the names that the model has for them."""
    given = example(
        ready.takes,
        batch=question.batch,
        tokens=question.tokens,
        device=ready.device,
        dtype=DTYPES[question.precision],
    )
    if ready.has_head and ready.optimizer:
        given.pop("decoder_input_ids", None)  # the labels say them
    return given


def _infer(ready: Prepared, question: Question, begins: Callable[[str], None]) -> None:
    """The prompt with keys and values kept, then one more token; of what doesn't generate one pass."""
    with torch.no_grad():
        begins("prompt")
        given = _given(ready, question)
        if not ready.has_head or ready.takes.decodes:
            ready.module(**given)
            return
        outputs = ready.module(**given, use_cache=True, logits_to_keep=1)
        chosen = outputs.logits[:, -1:].argmax(-1)
        name = cache_name(ready.module)
        cache = getattr(outputs, name, None)
        del outputs
        if cache is not None:  # a state of another kind goes by another name
            begins("next token")
            ready.module(input_ids=chosen, **{name: cache}, use_cache=True, logits_to_keep=1)
