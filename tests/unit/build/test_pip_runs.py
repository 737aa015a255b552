"""What pip is run for: which wheels, from where, into what, and what of its output is shown."""

import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from buildtool.build import wheels
from buildtool.build.wheels import TOOLS, WheelCache
from buildtool.core.command import Completed
from buildtool.core.errors import DataError, SourceUnreachable
from buildtool.core.model import TorchBuild, TorchSource, Wheel

INDEX = "https://example.org/whl"
SOURCE = TorchSource("own", TorchBuild.CPU, ("torch",), index=INDEX)


class Pip:
    """Puts the wheels that it was told to have into the folder that a call names, and keeps the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.names = names
        self.calls: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.output = ["Collecting torch", "Saved /a/torch.whl"]
        monkeypatch.setattr(wheels, "run_streaming", self.run)
        monkeypatch.setattr(wheels, "run", lambda _command: Completed("global.cert='/c.pem'\n", ""))

    def run(self, command: Sequence[str], *, progress: Callable[[str], None], env: dict[str, str]) -> None:
        self.calls.append(list(command))
        self.environments.append(env)
        folder = Path(self.after("--dest"))
        wanted = [word for word in command[command.index("--dest") + 2 :] if not word.startswith("-")]
        asked = [re.split("[=>]", word)[0] for word in wanted if "/" not in word]
        alone = "--no-deps" in command and asked
        for name in self.names:
            if not alone or name.partition("-")[0] in asked:
                with zipfile.ZipFile(folder / name, "w") as wheel:
                    wheel.writestr("a", "a")
        for line in self.output:
            progress(line)

    def after(self, word: str) -> str:
        return self.calls[-1][self.calls[-1].index(word) + 1]


def name(distribution: str) -> str:
    return f"{distribution}-1.0-py3-none-any.whl"


def test_torch_comes_from_its_index_alone_and_the_rest_is_resolved_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://elsewhere.example")
    pip = Pip(monkeypatch, name("torch"), name("numpy"))
    found = WheelCache(tmp_path, lambda _line: None).resolve(SOURCE, "3.11", ["numpy>=1"])
    assert {wheel.distribution for wheel in found} == {"torch", "numpy"}
    first, second = pip.calls
    assert f"--index-url={INDEX}" in first
    assert "torch" in first
    assert "numpy>=1" not in first
    assert "PIP_EXTRA_INDEX_URL" not in pip.environments[0]
    assert pip.environments[0]["PIP_CERT"] == "/c.pem"
    assert f"--extra-index-url={INDEX}" in second
    assert {"torch==1.0", "numpy>=1"} <= set(second)
    assert any(word.startswith("--find-links=") for word in second)
    assert all({"--only-binary=:all:", "--python-version=3.11"} <= set(call) for call in pip.calls)


@pytest.mark.parametrize(
    ("build", "stranger"),
    [(TorchBuild.CPU, "nvidia_cublas"), (TorchBuild.ROCM, "nvidia_cublas"), (TorchBuild.CUDA, "rocm_sdk")],
)
def test_a_source_that_brings_another_build_is_refused_with_what_gave_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: TorchBuild, stranger: str
) -> None:
    Pip(monkeypatch, name("torch"), name(stranger))
    source = TorchSource("own", build, ("torch",), index=INDEX)
    with pytest.raises(SourceUnreachable, match=stranger.replace("_", "-")):
        WheelCache(tmp_path, lambda _line: None).resolve(source, "3.11", [])


def test_wheels_without_torch_are_all_asked_for_and_none_is_taken_for_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pip(monkeypatch, name("numpy"))
    cache = WheelCache(tmp_path, lambda _line: None)
    none = TorchSource("none", TorchBuild.CPU, ())
    assert cache.resolve(none, "3.11", []) == ()
    assert [wheel.distribution for wheel in cache.resolve(none, "3.11", ["numpy"])] == ["numpy"]
    with pytest.raises(SourceUnreachable, match="scipy"):
        cache.resolve(none, "3.11", ["numpy", "scipy"])


def test_the_tools_of_a_build_come_without_what_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch, *(name(re.split("[=>]", tool)[0]) for tool in TOOLS))
    assert WheelCache(tmp_path, lambda _line: None).tools()
    assert "--no-deps" in pip.calls[0]
    assert set(TOOLS) <= set(pip.calls[0])


def test_only_missing_wheels_of_a_lock_are_fetched_each_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch, name("numpy"))
    cache = WheelCache(tmp_path, lambda _line: None)
    [here] = cache.resolve(TorchSource("none", TorchBuild.CPU, ()), "3.11", ["numpy"])
    cache.fetch([here], "3.11", index=INDEX)
    assert len(pip.calls) == 1
    missing = Wheel(name("scipy"), "ab" * 32, 5)
    listed: list[str] = []
    run = pip.run
    monkeypatch.setattr(
        wheels,
        "run_streaming",
        lambda command, **more: (
            listed.append(Path(command[command.index("-r") + 1]).read_text()),
            run(command, **more),
        ),
    )
    with pytest.raises(DataError, match="hasn't its name or its bytes"):  # this pip saves others
        cache.fetch([here, missing], "3.11", index=INDEX)
    assert listed == [f"scipy==1.0 --hash=sha256:{'ab' * 32}"]
    assert {"--require-hashes", "--no-deps", f"--extra-index-url={INDEX}"} <= set(pip.calls[-1])


@pytest.mark.parametrize("verbose", [False, True])
def test_of_pips_output_the_saved_files_are_shown_and_all_of_it_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    Pip(monkeypatch, name("numpy"))
    said: list[str] = []
    cache = WheelCache(tmp_path, said.append, **({"verbose": True} if verbose else {}))
    cache.resolve(TorchSource("none", TorchBuild.CPU, ()), "3.11", ["numpy"])
    shown = ["Collecting torch", "Saved /a/torch.whl"] if verbose else ["torch.whl"]
    assert said == [f"python 3.11: {line}" for line in shown]
