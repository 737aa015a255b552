"""Eager passes that wait for Python, in operations: what was timed in turns with a plain layer's."""

from typing import Any

import pytest

from probes.placement.models.families import from_config
from probes.placement.planner.machine import profile
from probes.placement.planner.rules import Pass
from probes.placement.planner.tiers import options

# Operations of a resident pass on an H200's host (which the counts were made from) and on an H100's, which
# they weren't: docs/decisions/0058-eager-passes-in-operations.md
COUNTED: dict[str, tuple[float, dict[str, Any]]] = {
    "BERT-base": (256.0, {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12}),
    "GPT-2 large, 18 layers": (443.0, {"model_type": "gpt2", "hidden_size": 1280, "num_hidden_layers": 18}),
    "Qwen2.5-1.5B, 14 layers": (586.7, {"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 14}),
}
HELD_OUT: dict[str, tuple[float, dict[str, Any]]] = {
    "BERT-large": (470.9, {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24}),
    "Llama, 12 layers of 2048": (
        467.4,
        {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 12},
    ),
    "OPT, 12 layers of 2048": (229.7, {"model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 12}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", (COUNTED | HELD_OUT).keys())
def test_a_resident_pass_has_as_many_operations_as_its_host_time_is_long(name: str) -> None:
    took, sizes = (COUNTED | HELD_OUT)[name]
    whole = "BertModel" if sizes["model_type"] == "bert" else "ForCausalLM"
    config = {"architectures": [whole], "vocab_size": 30000, "num_attention_heads": 16, **sizes}
    model = from_config(config, name=name, where="config.json")
    machine = profile("h100")
    resident = (options(block, machine, Pass(128, 1, 128, "exact"))[0] for block in model.blocks)
    counted = sum(option.launch_s for option in resident) / machine.operation_s
    assert counted == pytest.approx(took, rel=0.2)
