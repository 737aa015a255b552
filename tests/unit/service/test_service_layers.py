"""Torch is imported only when a model is loaded: the service starts, refuses and reports without it."""

from pathlib import Path

import service
from sources import imports

HERE = Path(service.__file__).parent
USING_TORCH = {
    "bert",
    "cuda_graphs",
    "model",
    "mounted",
    "placement",
}  # modules of service.inference


def test_torch_is_imported_in_few_modules() -> None:
    users = {path.stem for path in HERE.rglob("*.py") if "torch" in imports(path)}
    assert users == USING_TORCH


def test_torch_is_reached_only_when_a_model_is_loaded() -> None:
    heavy = {f"service.inference.{name}" for name in USING_TORCH}
    for path in HERE.rglob("*.py"):
        if path.stem not in USING_TORCH:
            assert not imports(path, top_level=True) & heavy, path
