"""Pages among the results."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.mark.parametrize("scan", sorted(RESULTS.glob("scan-*.json")), ids=lambda path: path.stem)
def test_each_kept_scan_has_its_page(scan: Path) -> None:
    began = json.loads(scan.read_text())["started"].replace("T", " ").replace("Z", " UTC")
    assert f'<p class="meta">{began}' in scan.with_suffix(".html").read_text()
