"""A folder with a config.json and safetensors, checked before torch is imported: no weight is read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.errors import ModelUnknown, UsageError
from probes.placement.models.headers import DTYPES, StoredFile, read_checkpoint
from probes.placement.models.reading import config_of
from probes.placement.split import DTYPE_BYTES, MODELS


@dataclass(frozen=True)
class CheckpointFolder:
    """What a checkpoint says of itself."""

    path: Path
    config: Mapping[str, Any]  # the content of config.json
    names: tuple[str, ...]  # of the stored tensors
    dtype: str  # torch's name of what most bytes are


def read_folder(path: Path) -> CheckpointFolder:
    """The folder's config.json and the headers of its safetensors.

    Raises UsageError where the path isn't a folder or lacks a config.json, CheckpointUnreadable for files
    that can't be read or contradict themselves, ModelUnknown for quantised weights.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither a known model nor a folder with a checkpoint",
            f"known are {', '.join(MODELS)}; else give the folder that has config.json and *.safetensors",
        )
    files = read_checkpoint(path)
    config = config_of(str(path))
    dtype = _main_dtype(files)
    if config.get("quantization_config") or dtype not in DTYPE_BYTES:
        raise ModelUnknown(
            f"{path} has quantised weights or others that aren't floating point: most are {dtype}",
            f"give a checkpoint in {', '.join(DTYPE_BYTES)}",
        )
    return CheckpointFolder(path, config, tuple(t.name for file in files for t in file.tensors), dtype)


def _main_dtype(files: tuple[StoredFile, ...]) -> str:
    sizes: Counter[str] = Counter()
    for file in files:
        for tensor in file.tensors:
            sizes[DTYPES[tensor.dtype]] += tensor.n_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="unknown")
