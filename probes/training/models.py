"""What is trained: a model with random weights and synthetic samples, or a user's own of both."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset, IterableDataset

from probes.core.errors import ModelFails, UsageError
from probes.fit.step import adapted, checkpoint
from probes.placement.models.inputs import inputs_of
from probes.placement.models.reading import config_of
from probes.placement.models.transformers_config import config_object, config_refusals, import_transformers
from probes.training.report import SYNTHETIC, Settings

RESNET: Final = "resnet-50"
PIXELS: Final = 224  # of an image's side, where a config doesn't say
CLASSES: Final = {"tokens": 2, "images": 1000}
POOL: Final = {"tokens": 512, "images": 64}  # samples that are made; the others repeat them
MOST_WORDS: Final = 200
_HANDED_ON: Final = "Original Traceback (most recent call last):"
_PLACE: Final = re.compile(r' {2}File "([^"]{1,4096})", line ([0-9]{1,9})')


@dataclass(frozen=True)
class Workload:
    """A model, its samples, and whose model it is."""

    module: torch.nn.Module
    samples: "Dataset[Any]"
    library: str


class Repeated(Dataset[Any]):  # type: ignore[misc]  # torch isn't there when types are checked
    """As many samples as are asked for, from a pool that was made once: loading them takes no time."""

    def __init__(self, columns: Mapping[str, torch.Tensor], count: int) -> None:
        self._columns, self._count = columns, count
        self._pool = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: column[number % self._pool] for name, column in self._columns.items()}


class Tensors(torch.nn.Module):  # type: ignore[misc]
    """A model of images and labels, called as those of transformers are."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss alone."""
        return {"loss": torch.nn.functional.cross_entropy(self.inner(pixel_values), labels)}


def workload(settings: Settings, count: int) -> Workload:
    """What the settings name, on the CPU, with `count` synthetic samples unless samples are a user's.

    Raises UsageError, ModelUnknown, LibraryMissing, and ModelFails for what a user's function raises.
    """
    if is_function(settings.model):
        if settings.data == SYNTHETIC:
            raise UsageError(
                f"nothing is known here of the samples that {settings.model} takes",
                "name a function that returns a dataset of them: --data MODULE:FUNCTION",
            )
        module, library = _called(settings.model), "the user's"
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"{settings.model} returned {type(module).__name__}, no torch.nn.Module")
        made = None
    elif settings.model == RESNET:
        module, library = _resnet()
        made = _images((3, PIXELS, PIXELS), CLASSES["images"])
    else:
        module, library, made = *_transformer(settings), None
    if settings.lora:
        module = adapted(module, settings.lora)
    if settings.data != SYNTHETIC:
        samples = _called(settings.data)
        numbered = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
        if not numbered or isinstance(samples, IterableDataset):
            kind = type(samples).__name__
            raise UsageError(
                f"{settings.data} returned {kind}, no dataset with a length and numbered samples"
            )
        return Workload(module, samples, library)
    return Workload(module, Repeated(made or _synthetic(module, settings), count), library)


def is_function(name: str) -> bool:
    """Whether a name is that of a user's function, such as train:build."""
    module, _, function = name.partition(":")
    return bool(function) and all(map(str.isidentifier, (*module.split("."), function)))


def loss_of(module: torch.nn.Module, batch: Any) -> torch.Tensor:  # as the user's dataset has it
    """The loss of a batch: a mapping gives the model's own `loss`; inputs and labels, a cross entropy.

    Raises ModelFails for anything else.
    """
    if isinstance(batch, Mapping):
        output = module(**batch)
        loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss
        raise ModelFails("the model returns no loss", "return one under the name `loss`, or (inputs, labels)")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
    raise ModelFails(
        f"the dataset's batches are {type(batch).__name__}",
        "samples are mappings of the model's arguments, or pairs of an input and a label",
    )


def _called(name: str) -> Any:  # the user's
    """What a user's function returns. Its module is looked for in the current directory last."""
    if not is_function(name):
        raise UsageError(f"{name!r} is not MODULE:FUNCTION", "write it as train:dataset")
    module, _, function = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109  # sys.path holds texts
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{name} can't be called: {str(error)[:MOST_WORDS]}", "run this where its module can be imported"
        ) from error
    except Exception as error:
        raise ModelFails(f"{name} raised {described(error)}") from error


def described(error: BaseException) -> str:
    """An error in a line: its class, its message, and the last place in a file where it was raised.

    One that a process of the loader met has that process's own; torch hands them on as a text.
    """
    places = traceback.extract_tb(error.__traceback__)
    where = f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    kind, text = type(error).__name__, str(error)
    if _HANDED_ON in text:
        there = text.partition(_HANDED_ON)[2].splitlines()
        files = [found for line in there if (found := _PLACE.match(line))]
        after = there.index(files[-1].string) + 1 if files else 0
        said = [line for line in there[after:] if line and not line.startswith(" ")]
        if files and said:
            where = f"{Path(files[-1][1]).name}:{files[-1][2]}"
            kind, _, text = " ".join(said).partition(": ")
    words = " ".join(text.split())[:MOST_WORDS]
    place = f" ({where})" if where else ""
    return f"{kind}: {words}{place}" if words else f"{kind}{place}"


def _resnet() -> tuple[torch.nn.Module, str]:
    """torchvision's ResNet-50, else that of transformers, which has the same layers and sizes."""
    try:
        from torchvision.models import resnet50
    except ImportError:
        transformers = import_transformers()
        config = transformers.ResNetConfig(num_labels=CLASSES["images"])
        return transformers.AutoModelForImageClassification.from_config(config), "transformers"
    return Tensors(resnet50()), "torchvision"


def _transformer(settings: Settings) -> tuple[torch.nn.Module, str]:
    """A language model where the config names one, else a classifier of images or of sequences."""
    config = dict(config_of(settings.model))
    transformers = import_transformers()
    named = str((config.get("architectures") or [""])[0])
    with config_refusals():
        made = config_object(config)
        maker = transformers.AutoModelForSequenceClassification
        if named.endswith(("ForCausalLM", "LMHeadModel")):
            maker = transformers.AutoModelForCausalLM
        elif type(made) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            maker = transformers.AutoModelForImageClassification
        how = {} if settings.attention == "own" else {"attn_implementation": settings.attention}
        module: torch.nn.Module = maker.from_config(made, dtype=torch.float32, **how)
    if settings.checkpointing:
        checkpoint(module)
    return module, "transformers"


def _synthetic(module: Any, settings: Settings) -> dict[str, torch.Tensor]:
    """Samples of a model of transformers, by its configuration."""
    config = module.config
    classes = int(getattr(config, "num_labels", 0) or CLASSES["tokens"])
    if str(module.main_input_name) == "pixel_values":
        side = getattr(config, "image_size", PIXELS)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return _images((int(getattr(config, "num_channels", 3)), *sides), classes)
    words = inputs_of(module).vocabulary
    ids = torch.randint(1, words, (POOL["tokens"], settings.tokens))
    if "CausalLM" in type(module).__name__ or hasattr(module, "lm_head") or _writes(module):
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "labels": torch.randint(classes, (POOL["tokens"],))}


def _writes(module: Any) -> bool:
    """Whether a model, within its adapters if it has some, has a head over the vocabulary."""
    return bool(module.get_output_embeddings() is not None)


def _images(shape: tuple[int, ...], classes: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(classes, (POOL["images"],))
    return {"pixel_values": torch.randn(POOL["images"], *shape), "labels": labels}
