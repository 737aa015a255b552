"""Plans over several cards: every block is on one card, in order; a pass waits for all of them."""

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from probes.cli.program import main
from probes.core.errors import Exit, PlanImpossible, UsageError
from probes.placement.models.reading import describe
from probes.placement.plan_file import cards_schema
from probes.placement.planner.machine import Constants, profile
from probes.placement.planner.multi_gpu import CardsResult, make_cards_plan
from probes.placement.planner.plan import make_plan
from probes.placement.types import Workload

GIB = 2**30
MODEL = "qwen2.5-7b"


def made(
    cards: int, *, machine: str = "rtx4090", vram: int = 6 * GIB, host: int | None = None
) -> CardsResult:
    return make_cards_plan(
        describe(MODEL),
        profile(machine),
        cards=cards,
        vram=vram,
        host=host,
        workload=Workload(1, 1, 1024),
        objective="exact",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("cards", [1, 2, 4])
def test_every_block_is_on_one_card_and_in_order(cards: int) -> None:
    plan = made(cards).plan
    assert len(plan.cards) == cards
    names = [block.name for card in plan.cards for block in card.blocks]
    assert names == [block.name for block in describe(MODEL).blocks]
    shares = [sum(block.weight_bytes for block in card.blocks) for card in plan.cards]
    assert max(shares) < 1.3 * min(shares)


@pytest.mark.thorough
def test_one_card_is_the_plan_for_one_card() -> None:
    alone = make_plan(
        describe(MODEL),
        profile("rtx4090"),
        vram=6 * GIB,
        host=None,
        workload=Workload(1, 1, 1024),
        objective="exact",
    ).plan
    assert made(1).plan.cards == (alone,)
    assert made(1).plan.time.middle_s == pytest.approx(alone.time.middle_s)


@pytest.mark.thorough
def test_each_card_keeps_to_its_own_budget_and_the_host_is_shared() -> None:
    plan = made(4, vram=2 * GIB, host=32 * GIB).plan
    for card in plan.cards:
        assert card.vram.total - card.vram.context <= 2 * GIB
    assert sum(card.host.total for card in plan.cards) <= 32 * GIB


@pytest.mark.thorough
def test_more_cards_keep_more_resident_and_so_take_less_time() -> None:
    times = [made(cards, vram=4 * GIB).plan.time.middle_s for cards in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


@pytest.mark.thorough
def test_a_pass_takes_no_longer_than_all_stages_and_no_less_than_the_slowest() -> None:
    found = made(2, vram=4 * GIB)
    stages = [stage.time.middle_s for stage in found.plan.cards]
    assert max(stages) <= found.plan.interval_s <= found.plan.time.middle_s <= 1.05 * sum(stages)


def test_more_cards_than_blocks_and_parts_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(UsageError, match="1 to 16 stages"):
        made(17)
    with pytest.raises(PlanImpossible, match="part 1 of 2"):
        made(2, vram=1 << 20)


@pytest.mark.thorough
def test_the_verb_plans_for_several_cards(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", MODEL, "--machine", "wx4100", "--vram", "4GiB", "--cards", "4", "--objective", "fast"]
    assert main(asked) == Exit.OK
    said = capsys.readouterr().out
    assert "on 4 x AMD Radeon Pro WX 4100: can be placed" in said
    assert "card 4:" in said
    assert main([*asked, "--json", "-"]) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert not list(Draft202012Validator(json.loads(cards_schema())).iter_errors(document))


@pytest.mark.parametrize(
    "given", [{"cards": 2.0}, {"cards": "2"}, {"cards": True}, {"cards": 2, "host": "x"}]
)
def test_what_is_no_whole_number_of_cards_or_bytes_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="not a whole number") as caught:
        made(**given)  # type: ignore[arg-type]
    assert caught.value.message.startswith(list(given)[-1])


@pytest.mark.thorough
def test_a_row_between_cards_is_as_wide_as_the_layers_where_weights_are_stored_inputs_first() -> None:
    """GPT-2 stores queries, keys and values as (1600, 4800); a row that goes to them has 1,600 numbers."""
    plan = make_cards_plan(
        describe("gpt2-xl"),
        profile("h200"),
        cards=2,
        vram=16 * GIB,
        host=None,
        workload=Workload(1, 1, 512),
        objective="exact",
    ).plan
    assert plan.hand_over_bytes == 1600 * (4 if plan.cards[0].compute_dtype == "float32" else 2)


@pytest.mark.thorough
def test_what_crosses_between_two_cards_takes_its_way_through_the_host_twice() -> None:
    """With all blocks resident a pass over two cards is one card's, and the rows in between."""

    def seconds(cards: int, tokens: int, machine: Constants) -> float:
        return make_cards_plan(
            describe("bert-base"),
            machine,
            cards=cards,
            vram=40 * GIB,
            host=None,
            workload=Workload(1, tokens, 0),
            objective="fast",
        ).plan.time.middle_s

    quick = replace(profile("rtx4090"), link_rate=1e15, operation_s=0.0)  # Python would hide the hand-over
    slow = replace(quick, link_rate=1e6)
    moved = 512 * 768 * 4  # a row of BERT in float32
    assert seconds(1, 512, slow) == pytest.approx(seconds(1, 512, quick))
    crossed = seconds(2, 512, slow) - seconds(2, 512, quick)
    assert crossed == pytest.approx(2 * moved / 1e6, rel=1e-4)
    assert seconds(2, 512, quick) > seconds(1, 512, quick) + 2 * quick.link_alpha_s


@pytest.mark.thorough
def test_all_blocks_of_all_cards_are_in_one_picture_in_their_order() -> None:
    both = make_cards_plan(
        describe("bert-base"),
        profile("rtx4090"),
        cards=3,
        vram=GIB,
        host=None,
        workload=Workload(1, 16, 0),
        objective="fast",
    )
    joined = both.joined
    assert (joined.model, joined.machine) == (describe("bert-base").name, f"3 x {both.plan.cards[0].machine}")
    assert [block.name for block in joined.blocks] == [block.name for block in describe("bert-base").blocks]
    assert joined.time == both.plan.time
    assert both.timeline.seconds == both.plan.time.middle_s
