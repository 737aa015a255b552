"""A small model with dropout and samples that take a while: a step of a size that signals can fall into."""

import os
import time
from functools import cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

PAUSE_S = 0.002


class Samples(Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(PAUSE_S)
        _mark()
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(16, generator=drawn), torch.tensor(number % 4)


@cache
def _mark() -> None:
    """Show that the first sample of this start was asked for."""
    Path(os.environ["MARKS"], f"begun-{os.environ.get('SLURM_RESTART_COUNT', '0')}").touch()


def samples() -> Samples:
    return Samples()


def model() -> torch.nn.Module:
    parts = (torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4))
    return torch.nn.Sequential(*parts)
