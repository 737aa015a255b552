"""`weir launch` and programs of engines that no test can have: stand-ins keep what they were given."""

import json
from pathlib import Path

import pytest
import yaml

from buildtool.cli.program import main

KUBECTL = """#!/bin/sh
echo "$@" >> "$KEPT/words"
case "$*" in
*create*) cat > "$KEPT/document"; echo created ;;
*get*) cat "$KEPT/answer" ;;
*logs*) echo "[pod/a] error: rank 1, step 7: the loss isn't finite"; echo "[pod/a] bye" ;;
esac
"""
SKY = """#!/bin/sh
echo "$@" >> "$KEPT/words"
case "$1" in
launch) for last; do :; done; cat "$last" > "$KEPT/document" ;;
logs) echo "error: rank 0, step 3: no progress"; exit 100 ;;
esac
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("kubectl", KUBECTL), ("sky", SKY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KEPT", str(tmp_path))
    return tmp_path


def launched(kept: Path, engine: str, *more: str) -> int:
    words = ["launch", "--engine", engine, "--out", str(kept / "out"), "--image", "registry.example/x:1"]
    return main([*words, "--mount", f"{kept}=claim", *more, "--", "python3", "t.py"])


@pytest.mark.parametrize(("engine", "kind"), [("trainjob", "TrainJob"), ("jobset", "JobSet"), ("job", "Job")])
def test_a_cluster_gets_the_documents_and_its_failure_is_told(
    kept: Path, engine: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    (kept / "answer").write_text(json.dumps({"status": {"conditions": [condition]}}))
    assert launched(kept, engine, "--option=--namespace=team") == 1
    told = capsys.readouterr()
    assert list(yaml.safe_load_all((kept / "document").read_text()))[-1]["kind"] == kind
    assert (kept / "words").read_text().startswith("--namespace=team create --validate=strict --filename=-")
    assert "weir: Failed (BackoffLimitExceeded)" in told.out
    assert "  [pod/a] error: rank 1, step 7: the loss isn't finite" in told.err


def test_a_cluster_that_succeeds_ends_with_0(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / "answer").write_text(
        json.dumps({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    )
    assert launched(kept, "job") == 0
    assert "no reports below" in capsys.readouterr().err
    assert launched(kept, "job", "--check") == 0
    assert "--dry-run=server" in (kept / "words").read_text()


def test_skypilot_gets_a_task_and_its_failure_is_told(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched(kept, "skypilot", "--option=--infra=k8s") == 1
    assert yaml.safe_load((kept / "document").read_text())["num_nodes"] == 1
    assert "launch --yes --cluster=weir --detach-run --infra=k8s" in (kept / "words").read_text()
    assert "error: rank 0, step 3: no progress" in capsys.readouterr().err
