"""Diagrams of the site: every box is drawn once and apart from the others, every arrow points down."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs" / "tools"))

import diagram  # noqa: E402

CHART = """flowchart TD
  subgraph a_program[a]
    top[top]
    left[left & <right>]
    other[other]
  end
  subgraph b_program[b]
    low[a long label of the lowest]
  end
  top --> left
  top --> other
  left --> low
  other --> low
  top --> low
"""


def test_every_box_and_arrow_is_drawn() -> None:
    drawing = ElementTree.fromstring(diagram.svg(CHART))
    labels = [text.text for text in drawing.iter("text")]
    assert sorted(labels) == ["a", "a long label of the lowest", "b", "left & <right>", "other", "top"]
    assert len([path for path in drawing.iter("path") if path.get("class") == "arrow"]) == 5


def test_no_two_boxes_overlap_and_none_leaves_the_drawing() -> None:
    drawing = ElementTree.fromstring(diagram.svg(CHART))
    *_, width, height = map(float, drawing.attrib["viewBox"].split())
    boxes = [
        tuple(float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        for rect in drawing.iter("rect")
    ]
    for index, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        for x2, y2, w2, h2 in boxes[:index]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_every_arrow_points_down_a_layer_at_a_time() -> None:
    chart = diagram.parse(CHART)
    layers, routes = diagram.layered(chart)
    depth = {stop.name: index for index, layer in enumerate(layers) for stop in layer}
    assert [depth[name] for name in ("top", "left", "other", "low")] == [0, 1, 1, 2]
    for route in routes:
        assert [depth[name] for name in route] == list(range(depth[route[0]], depth[route[-1]] + 1))


@pytest.mark.parametrize(
    "line", ["a -.-> b", "a --> nowhere", "click a", "a[one]\n  b[two]\n  a --> b\n  b --> a"]
)
def test_what_cannot_be_drawn_is_an_error_and_no_half_drawing(line: str) -> None:
    with pytest.raises(diagram.NotDrawn):
        diagram.svg(f"flowchart TD\n  {line}\n")
