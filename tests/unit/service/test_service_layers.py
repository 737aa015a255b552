"""Torch is imported only when a model is loaded: the service starts, refuses and reports without it."""

from pathlib import Path

import service
from sources import imports

HERE = Path(service.__file__).parent
USING_TORCH = {path for path in HERE.rglob("*.py") if "torch" in imports(path)}


def test_only_files_of_inference_import_torch() -> None:
    assert USING_TORCH
    assert {path.parent.name for path in USING_TORCH} == {"inference"}


def test_torch_is_reached_only_when_a_model_is_loaded() -> None:
    heavy = {f"service.inference.{path.stem}" for path in USING_TORCH}
    for path in set(HERE.rglob("*.py")) - USING_TORCH:
        assert not imports(path, top_level=True) & heavy, path
