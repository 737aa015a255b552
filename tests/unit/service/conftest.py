"""The service is copied into images and never installed: its tests find it in place."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "images"))

from service.model.classifier import ModelInfo


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
