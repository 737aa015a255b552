"""Importing a torch that is broken, or isn't one."""

import sys
from pathlib import Path

import pytest

from probes.core.errors import DeviceUnusable
from probes.measure import worker


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('half removed')", "RuntimeError: half removed"),
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("def (:", "SyntaxError: "),
        (None, "has no attribute 'Tensor'"),
    ],
)
def test_a_broken_torch_is_an_error_of_ours(
    source: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    if source is not None:
        (tmp_path / "torch/__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(worker, "why_without", worker.why_without.__wrapped__)
    with pytest.raises(DeviceUnusable, match="torch can't be imported") as refused:
        worker.require_torch("run it where torch is")
    assert why in refused.value.message
    sys.modules.pop("torch", None)
