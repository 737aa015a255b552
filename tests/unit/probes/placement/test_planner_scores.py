"""The planner leaves room for the scores of attention where no fused kernel attends."""

from dataclasses import replace

from probes.placement.planner.api import resolve_machine, resolve_model
from probes.placement.planner.tiers import surroundings
from probes.placement.types import Workload

BERT = resolve_model("bert-base").blocks
HEADS = 12


def activations(card: str, tokens: int) -> int:
    return surroundings(BERT, resolve_machine(card), Workload(2, tokens)).activations


def test_scores_are_counted_on_a_card_without_fused_attention() -> None:
    assert activations("mi50", 512) == activations("mi100", 512) + 2 * 512 * 2 * 4 * HEADS * 512


def test_a_single_token_has_hardly_any_scores() -> None:
    assert activations("mi50", 1) - activations("mi100", 1) <= 2 * 2 * 4 * HEADS


def test_grouped_heads_have_a_fused_kernel_in_halves_only() -> None:
    machine = resolve_machine("rtx4090")
    assert machine.fuses_attention(halves=True, grouped=True)
    assert machine.fuses_attention(halves=False, grouped=False)
    assert not machine.fuses_attention(halves=False, grouped=True)
    assert not replace(machine, bfloat16=False).fuses_attention(halves=True, grouped=False)
