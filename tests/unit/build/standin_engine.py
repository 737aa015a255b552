"""Stands in for an engine: names and images in a dictionary, and a fault at any of its calls."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.audit.text import SummaryRow
from buildtool.build import pipeline, plan
from buildtool.cli import build
from buildtool.cli.arguments import BuildOptions
from buildtool.cli.program import main
from buildtool.core.errors import DataError
from buildtool.core.model import Variant
from buildtool.engine import proof
from buildtool.engine.client import EngineInfo, RunResult
from buildtool.engine.reference import Reference, parse_reference

GOOD = {
    "python": "3.11.2",
    "uid": 10001,
    "torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None, "product_ok": True},
    "service": True,
    "probes": True,
    "rocminfo": {"present": False},
}


class Killed(BaseException):
    """The process has ended: nothing that it would do afterwards happens."""


class StandinEngine:
    """Images by name, each as `sha256:VARIANT-RUN`; `proved` are those whose proof was run to its end."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.proved: set[str] = set()
        self.done: list[str] = []
        self.bad: set[str] = set()  # images whose proof fails
        self.run_number = 1
        self.fault: BaseException | None = None
        self.fault_at = -1  # the number of the call
        self.late = False  # whether the call has its effect nevertheless

    def _call(self, what: str) -> None:
        """Begin a call, which may fail before it has an effect."""
        self.done.append(what)
        self._fail(late=False)

    def _end(self) -> None:
        """End a call, which may fail after it has had its effect."""
        self._fail(late=True)

    def _fail(self, *, late: bool) -> None:
        number = len(self.done) - 1
        lasting = isinstance(self.fault, Killed) and number > self.fault_at >= 0
        if self.fault and (lasting or (number, late) == (self.fault_at, self.late)):
            raise self.fault

    def _known(self, ref: str) -> str | None:
        if ref.startswith("sha256:"):
            return ref if ref in self.names.values() else None
        return self.names.get(parse_reference(ref).canonical)

    def info(self) -> EngineInfo:
        self._call("info")
        return EngineInfo("1", True, "h", "/", ())

    def inspect(self, ref: str) -> Mapping[str, Any] | None:
        self._call(f"inspect {ref}")
        found = self._known(ref)
        return {"Id": found} if found else None

    def load(self, _place: object, images: Mapping[str, Any], named: str, **_more: object) -> dict[str, str]:
        """Stands in for `pipeline.load`."""
        for name, image in images.items():
            self._call(f"load {name}")
            self.names[parse_reference(f"{named}-{name}").canonical] = image.digest
            self._end()
        return {name: image.digest for name, image in images.items()}

    def run(self, ref: str, _command: list[str]) -> RunResult:
        self._call(f"run {ref}")
        found = self._known(ref)
        if found is None:
            raise DataError(f"no {ref}")
        if found in self.bad:
            return RunResult(1, "", "broken")
        self.proved.add(found)
        self._end()
        return RunResult(0, proof.MARK + json.dumps(GOOD), "")

    def save(self, ref: str) -> None:
        self._call(f"save {ref}")
        assert self._known(ref)

    def tag(self, image: str, name: Reference) -> str:
        self._call(f"tag {image} {name}")
        self.names[name.canonical] = image  # an image that has lost its names can be named by its id
        self._end()
        return image

    def remove_tag(self, ref: str) -> None:
        self._call(f"remove_tag {ref}")
        self.names.pop(parse_reference(ref).canonical, None)
        self._end()

    def tags(self, repository: str) -> tuple[str, ...]:
        self._call(f"tags {repository}")
        return tuple(
            name.removeprefix("docker.io/library/") for name in self.names if f"/{repository}:" in name
        )

    def sweep_containers(self) -> None:
        self._call("sweep")


def build_on(
    engine: StandinEngine,
    patch: pytest.MonkeyPatch,
    folder: Path,
    variants: Sequence[Variant],
    *words: str,
    verdict: str = "pass",
) -> int:
    """`weir build` of these variants with their inputs at hand; the exit code."""

    def audited(_place: object, planned: plan.ImagePlan, image: Any, *_: object) -> SummaryRow:
        engine.save(image.digest)
        cells: dict[str, Any] = dict.fromkeys(SummaryRow.__dataclass_fields__, "-")
        return SummaryRow(**cells | {"verdict": verdict, "ref": planned.variant.ref})

    targets = tuple(plan.ImagePlan(each, plan.unresolved(each), folder) for each in variants)
    options = BuildOptions(False, [[each] for each in variants], 0, tuple(variants))
    patch.setenv("WEIR_STATE", str(folder / "state"))
    patch.setattr(build, "build_options", lambda *_: options)
    patch.setattr(build.provision, "ensure_engine", lambda *_, **__: engine)
    patch.setattr(build, "Engine", lambda: engine)
    patch.setattr(pipeline, "make_plan", lambda *_, **__: plan.BuildPlan(targets, 0))
    made = {
        each.name: SimpleNamespace(digest=f"sha256:{each.name}-{engine.run_number}", below="")
        for each in variants
    }
    patch.setattr(pipeline, "write", lambda *_, **__: made)
    patch.setattr(pipeline, "load", engine.load)
    patch.setattr(pipeline, "keep", lambda *_: None)
    patch.setattr(pipeline, "keep_unproved", lambda *_: None)
    patch.setattr(pipeline, "audit", audited)
    names = [each.name for each in variants]
    return main(["build", *names, "--reports", str(folder / "reports"), *words])
