"""A thousand hostile requests over real sockets: none is a 500 (`make bench-service` sends ten thousand)."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from test_service_sockets import LIMITS, served

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from service_fuzz import fuzzed


def test_no_hostile_request_is_a_500_or_left_unanswered() -> None:
    with served(replace(LIMITS, max_in_flight=64)) as here:
        found = asyncio.run(fuzzed(here.port, 1000, seed=3))
        assert here.predict() == 200
    assert set(found) <= {200, 400, 404, 504}
    assert found[400] > 300
    assert found[200] > 30
