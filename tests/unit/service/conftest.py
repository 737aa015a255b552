"""The service is copied into images and never installed: its tests find it in place."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logged import Logged

sys.path.insert(0, str(Path(__file__).parents[3] / "images"))

from service.inference.classifier import ModelInfo


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What the service logs."""
    kept, log = Logged(), logging.getLogger("service")
    before = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    yield kept
    log.setLevel(before)
    log.removeHandler(kept)


@pytest.fixture
def info() -> ModelInfo:
    return ModelInfo(
        name="finbert",
        weights="random",
        weights_source="seed 0, untrained",
        tokenizer="hashing-stand-in",
        device="cpu",
        device_description="cpu, torch 0",
        labels=("positive", "negative", "neutral"),
        parameters=1,
        vocab_size=2000,
        max_tokens=8,
        hidden_size=2,
    )
