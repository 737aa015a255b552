"""Makes the JSON Schemas in this folder from what the projects publish as Python packages.

    python3 -m pip download --no-deps kubeflow-trainer-api==2.3.0 kubernetes-validate==1.37.0 skypilot==0.14.1
    (unzip all three into FOLDER)
    PYTHONPATH=FOLDER python3 tests/unit/launch/schemas/published.py FOLDER

All three are under the Apache licence 2.0. Texts for people are left out, and keys that a schema doesn't
name are refused, as `kubectl` does (`--validate=strict`).
"""

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

TEXTS = {"description", "title", "example", "$schema", "x-kubernetes-group-version-kind"}


def plain(schema: Any, *, strict: bool, names: bool = False) -> Any:
    """Without texts; `names`: the keys of this mapping are names, not words of JSON Schema."""
    if isinstance(schema, list):
        return [plain(each, strict=strict) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {key: plain(value, strict=strict) for key, value in schema.items()}
    kept = {
        key: plain(value, strict=strict, names=key in ("properties", "$defs"))
        for key, value in schema.items()
        if key not in TEXTS
    }
    if strict and kept.get("properties"):
        kept.setdefault("additionalProperties", False)
    return kept


def kubernetes(folder: Path) -> dict[str, Any]:
    from kubeflow_trainer_api import models

    found: dict[str, Any] = {
        "TrainJob": models.TrainerV1alpha1TrainJob.model_json_schema(),
        "JobSet": models.JobsetV1alpha2JobSet.model_json_schema(),
    }
    for schema in found.values():  # their Python classes wrap what is either a text or a number
        for name, either in schema["$defs"].items():
            if "actual_instance" in either.get("properties", {}):
                schema["$defs"][name] = {"type": ["string", "number"]}
    bundled = folder / "kubernetes_validate" / "kubernetes-json-schema" / "v1.37.0-local-strict"
    for kind, file in (("Job", "job-batch-v1.json"), ("Service", "service-v1.json")):
        found[kind] = {**json.loads((bundled / file).read_text()), "$defs": {}}
        waiting = [found[kind]]
        while waiting:
            for reference in references(waiting.pop()):
                name = reference.rpartition("/")[2]
                if name not in found[kind]["$defs"]:
                    definitions = json.loads((bundled / "_definitions.json").read_text())["$defs"]
                    found[kind]["$defs"][name] = definitions[name]
                    waiting.append(definitions[name])
    text = json.dumps({kind: plain(schema, strict=True) for kind, schema in found.items()})
    return json.loads(text.replace("/api/_definitions.json#/$defs/", "#/$defs/"))


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [name for each in value.values() for name in references(each)]
    return [name for each in value for name in references(each)] if isinstance(value, list) else []


def skypilot(folder: Path) -> dict[str, Any]:
    """Its schemas are functions of a module that imports little; the package's own start imports much."""
    for name in ("sky", "sky.skylet", "sky.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.modules["sky"].__version__ = "0.14.1"
    sys.modules["sky.skylet.autostop_lib"] = stop = MagicMock()  # imports all of SkyPilot, for three words
    stop.AutostopWaitFor.supported_modes.return_value = ["jobs_and_ssh", "jobs", "none"]
    from sky.utils import schemas

    schemas._task_config_schema = lambda: False  # likewise, for the key `config`, which we don't write
    task = schemas.get_task_schema()
    task["properties"]["resources"] = schemas.get_resources_schema()  # as Task.from_yaml_config checks it
    return plain(task, strict=False)


if __name__ == "__main__":
    source, here = Path(sys.argv[1]), Path(__file__).parent
    for name, schema in (*kubernetes(source).items(), ("SkyPilot", skypilot(source))):
        (here / f"{name}.json").write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")
