"""A schema says of a file what its reader takes, for every form that a class may have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import pytest
from jsonschema import Draft202012Validator

from probes.core.codec import Misfit, decode, encode
from probes.records.json_schema import document


class Way(Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True)
class Every:
    pair: tuple[str, int]
    pairs: tuple[tuple[str, float], ...]
    sizes: Mapping[str, int]
    way: Way
    ways: Mapping[str, tuple[Way, ...]] = field(default_factory=dict)


SCHEMA = Draft202012Validator(json.loads(document(Every, title="t", description="d", versions={})))
GOOD = {"pair": ["a", 1], "pairs": [["b", 0.5]], "sizes": {"c": 3}, "way": "fast"}


def test_what_the_reader_takes_keeps_to_the_schema() -> None:
    read = decode(Every, GOOD)
    assert read == Every(("a", 1), (("b", 0.5),), {"c": 3}, Way.FAST)
    assert not list(SCHEMA.iter_errors(GOOD))
    assert encode(read.pairs) == [["b", 0.5]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"pair": ["a"]},
        {"pair": ["a", 1, 2]},
        {"pair": [1, "a"]},
        {"pairs": [["b"]]},
        {"sizes": {"c": "three"}},
        {"sizes": ["c"]},
        {"way": "FAST"},
        {"ways": {"x": ["fast", "other"]}},
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(Misfit):
        decode(Every, GOOD | wrong)
    assert list(SCHEMA.iter_errors(GOOD | wrong))
