"""Models of transformers, diffusers and peft, placed: the same outputs, or refused before a change."""

import pytest
from kinds_of_libraries import KINDS
from test_kinds_of_modules import cases, compare

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = {
    "adapters merged": "can't be changed",
}


@pytest.mark.parametrize(("name", "way"), list(cases(KINDS, 1)))
def test_a_placed_model_gives_what_it_gives_itself_or_is_refused(name, way, monkeypatch):
    compare(KINDS[name], way, monkeypatch, seed=list(KINDS).index(name), refused=REFUSED.get(name))
