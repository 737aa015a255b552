"""The single changes that are offered: each makes less of one thing, and nothing that is so already."""

from dataclasses import replace

import pytest

from probes.fit.answer import LORA_RANK, changes
from probes.fit.forecast import CPU, place_of
from probes.fit.report import Question, Task
from probes.placement.models.reading import describe
from probes.placement.planner.machine import profile

TRAINING = Question(model="m", task="training", batch=9, tokens=65, optimizer="adamw", precision="fp32")


def offered(asked: Question) -> dict[str, Question]:
    return {name: changed for name, changed, _ in changes(asked)}


def test_halves_are_rounded_up_and_as_many_texts_stay_in_a_step() -> None:
    asked = replace(TRAINING, accumulate=2)
    found = offered(asked)
    assert found["batch 5"] == replace(asked, batch=5)
    assert found["batch 5, accumulated 4 times"] == replace(asked, batch=5, accumulate=4)
    assert found["sequences of 33 tokens"] == replace(asked, tokens=33)
    assert found["no accumulation"] == replace(asked, accumulate=1)


def test_each_change_alters_one_thing_that_is_not_so_already() -> None:
    found = offered(TRAINING)
    assert {
        "precision amp-bf16": replace(TRAINING, precision="amp-bf16"),
        "precision bf16": replace(TRAINING, precision="bf16"),
        "gradient checkpointing": replace(TRAINING, checkpointing=True),
        f"LoRA of rank {LORA_RANK}": replace(TRAINING, lora_rank=LORA_RANK),
        "optimizer momentum": replace(TRAINING, optimizer="momentum"),
        "optimizer sgd": replace(TRAINING, optimizer="sgd"),
    }.items() <= found.items()
    assert TRAINING not in found.values()
    least = replace(
        TRAINING, batch=1, tokens=1, precision="bf16", checkpointing=True, lora_rank=4, optimizer="sgd"
    )
    assert offered(least) == {}


def test_inference_is_offered_what_needs_no_training() -> None:
    asked = replace(TRAINING, task="inference", batch=2, tokens=1)
    assert list(offered(asked)) == ["batch 1", "precision bf16", "precision fp16"]
    assert offered(asked)["precision fp16"].precision == "fp16"


@pytest.mark.parametrize("task", ["training", "inference"])
def test_libraries_of_a_cpu_take_more_room_in_halves(task: Task) -> None:
    machine = replace(profile("rtx4090"), vram_bytes=0)
    model = describe("bert-base")
    whole, halves = (
        place_of(machine, model, Question(model="m", task=task, precision=precision))
        for precision in ("fp32", "bf16")
    )
    assert whole.workspace < halves.workspace
    assert replace(whole, workspace=0) == replace(halves, workspace=0) == replace(CPU, workspace=0)
