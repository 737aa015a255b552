"""A run's checkpoint: one file, replaced as a whole, from which the same losses follow.

It holds weights and the optimizer's state in full, each rank's generators, and where the run is. With LoRA it
holds the adapters alone: the other weights come from the same seed, or from the user's function.
"""

import pickle
import random
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from probes.core import files
from probes.core.codec import decode, encode
from probes.core.errors import ReportError
from probes.records.files import reason
from probes.training.loop import Place, Trainer
from probes.training.report import Epoch

NAME: Final = "checkpoint.pt"
FORM: Final = "weir training checkpoint 2"
PARTS: Final = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def save(trainer: Trainer, folder: Path) -> None:
    """Write the checkpoint over an older one, which stays where this fails. All ranks call it.

    Raises ReportError on rank 0 where the file can't be written; the other ranks then lose contact with it.
    """
    trainer.look(trainer.place.step)  # so that all losses are in it
    weights, states = get_state_dict(trainer.module, trainer.optimizer, options=PARTS)
    own = {
        "generators": _generators(trainer),
        "losses": trainer.losses,
        "epochs": [encode(epoch) for epoch in trainer.epochs],
    }
    ranks: list[Any] = [own]
    if trainer.world > 1:
        ranks = [None] * trainer.world
        distributed.all_gather_object(ranks, own)
    if trainer.rank == 0:
        content = {
            "form": FORM,
            "settings": encode(trainer.settings),
            "place": asdict(trainer.place),
            "weights": weights,
            "optimizer": states,
            "scaler": trainer.scaler.state_dict(),
            "ranks": ranks,
        }
        _write(content, folder / NAME, trainer.place.step)
    if trainer.world > 1:
        distributed.barrier()
    trainer.clock.ends("checkpoint", trainer.place.step)


def _write(content: dict[str, Any], path: Path, step: int) -> None:
    try:
        with files.replacing(path) as partial, partial.open("r+b") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch hides the disk's error in one of its own
        cause = error if isinstance(error, OSError) else error.__context__ or error.__cause__
        why = reason(cause) if isinstance(cause, OSError) else str(error).split("\n")[0][:120]
        kept = "the one before is whole" if path.is_file() else "there is none before it"
        raise ReportError(
            f"can't write the checkpoint of step {step} to {path}: {why}; {kept}",
            "free space there, or choose another folder: --out DIR",
        ) from error


def resume(trainer: Trainer, folder: Path) -> bool:
    """Go on from the folder's checkpoint; False where there is none. All ranks call it.

    Raises ReportError for one that can't be read, or that is of another run.
    """
    path = folder / NAME
    if not path.exists():
        return False
    again = f"remove it, or choose another folder: {path}"
    if not path.is_file():  # a pipe would be waited for
        raise ReportError(f"{path} is no regular file", again)
    try:
        with zipfile.ZipFile(path) as archive:  # torch compares no checksums
            if (name := archive.testzip()) is not None:
                raise ReportError(f"{path} is broken: the checksum of {name} differs", again)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or content.get("form") != FORM:
            raise ReportError(f"{path} is no checkpoint of this program", again)
        theirs = len(content["ranks"])
        if content["settings"] != encode(trainer.settings) or theirs != trainer.world:
            other = f"of {theirs} ranks" if theirs != trainer.world else "with other settings"
            raise ReportError(
                f"{path} is of a run {other}", "resume it as it was begun, or choose another folder"
            )
        _same_weights(trainer, content["weights"], path)
        _restore(trainer, content)
    except OSError as error:
        raise ReportError(f"can't read {path}: {error.strerror or error}", again) from error
    except zipfile.BadZipFile as error:
        raise ReportError(f"{path} is broken: it isn't a whole file as torch writes it", again) from error
    except (RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ReportError(f"{path} is broken: {str(error)[:120] or type(error).__name__}", again) from error
    return True


def _same_weights(trainer: Trainer, weights: dict[str, Any], path: Path) -> None:
    """Raises ReportError where a checkpoint has other weights than the model: torch would leave these out."""
    module = trainer.module.module if isinstance(trainer.module, DistributedDataParallel) else trainer.module
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    shapes = {name: value.shape for name, value in module.state_dict().items() if hasattr(value, "shape")}
    odd = sorted((trained - weights.keys()) | {n for n, v in weights.items() if shapes.get(n) != v.shape})
    if odd:
        more = f", and {len(odd) - 1} more" if odd[1:] else ""
        raise ReportError(
            f"{path} is of another model: {odd[0][:120]!r}{more} is of another name or shape there",
            "resume it with the model that it was begun with, or choose another folder",
        )


def _restore(trainer: Trainer, content: dict[str, Any]) -> None:
    own = content["ranks"][trainer.rank]
    set_state_dict(
        trainer.module,
        trainer.optimizer,
        model_state_dict=content["weights"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False),
    )
    trainer.scaler.load_state_dict(content["scaler"])
    trainer.place = Place(**content["place"])
    trainer.begin_next()
    trainer.losses = list(own["losses"])
    trainer.epochs = [decode(Epoch, epoch, "epoch") for epoch in own["epochs"]]
    kept = own["generators"]
    torch.set_rng_state(kept["torch"])
    if trainer.on_gpu:
        torch.cuda.set_rng_state(kept["gpu"], trainer.device)
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    if kept["numpy"] is not None and "numpy" in sys.modules:
        name, words, *rest = kept["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(words, dtype="uint32"), *rest))


def seed_generators(seed: int) -> None:
    """Seed what dropout, a dataset and a model may draw from: torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _generators(trainer: Trainer) -> dict[str, Any]:
    """Their states, in what `torch.load(weights_only=True)` reads."""
    drawn: Any = None
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        drawn = (name, words.tolist(), *rest)
    return {
        "torch": torch.get_rng_state(),
        "gpu": torch.cuda.get_rng_state(trainer.device) if trainer.on_gpu else None,
        "python": random.getstate(),
        "numpy": drawn,
    }
