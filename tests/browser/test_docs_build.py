"""The site isn't built from pages with dead links or anchors, or with anything that another host serves."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = """# Faulty

[a page](no-such-page.md), [an anchor](audit.md#no-such-anchor), [one of this page](#nor-this).

<script src="https://example.org/script.js"></script>
![image](//example.org/image.png)
"""


def test_a_page_with_a_dead_link_or_a_foreign_script_fails_the_build(tmp_path: Path) -> None:
    few = shutil.ignore_patterns("decisions", "results", "howto", "tutorial")  # fewer pages are built sooner
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=few)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "buildtool", "probes", "images"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "faulty.md").write_text(FAULTS)
    command = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no-such-page.md" in done.stderr
    assert "#no-such-anchor" in done.stderr
    assert "#nor-this" in done.stderr
    loaded = "<script> https://example.org/script.js, <img> //example.org/image.png"
    assert f"faulty.html loads from another host: {loaded}" in done.stderr
