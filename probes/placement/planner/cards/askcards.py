"""`plan_cards`: the public function that plans a model over several equal cards."""

from pathlib import Path

from probes.placement.models.reading import named_path
from probes.placement.planner.asking import Model, constants, described, ranges
from probes.placement.planner.cards.severalcards import make_cards
from probes.placement.planner.computing import Compute
from probes.placement.planner.costs.constants import Constants
from probes.placement.values import CardsPlan, Objective, Workload


def plan_cards(
    model: Model,
    *,
    cards: int,
    vram: int,
    machine: Constants | str | Path,
    host: int | None = None,
    batch: int = 1,
    tokens: int = 1,
    context: int = 0,
    objective: Objective = "exact",
    compute: Compute = "auto",
    weights: str | Path | None = None,
) -> CardsPlan:
    """The plan over `cards` equal cards with `vram` bytes each and `host` bytes in all.

    The rest is as for `plan`. Raises as that does, and UsageError for more cards than the model has blocks.
    """
    found, known = described(model), constants(machine)
    of = model if weights is None else named_path(weights, "weights' checkpoint")
    return make_cards(
        found,
        known,
        cards=cards,
        vram=vram,
        host=host,
        workload=Workload(batch, tokens, context),
        objective=objective,
        compute=compute,
        ranges=ranges(of, found, known, objective=objective, compute=compute),
    ).plan
