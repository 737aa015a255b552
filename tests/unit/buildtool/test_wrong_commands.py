"""Commands that are nearly right name the one that was meant, whole, to paste."""

import os
import shlex
from pathlib import Path

import pytest

from buildtool.cli.program import main

MEANT = {
    "doctor 4090": " doctor --card 4090",
    "doctor --targets MI50": " doctor --card MI50",
    "doctor --machine=4090": " doctor --card 4090",
    "fits 4090 qwen2.5-3b": " fits qwen2.5-3b 4090",
    "fits qwen2.5-3b --card 4090": " fits qwen2.5-3b 4090",
    "fits qwen2.5-3b 4090 --host 64G": "write it as 64GiB",
    "fits 4090": "the model comes first",
    "probe plan qwen2.5-3b 4090": " plan qwen2.5-3b --machine 4090",
    "probe plan qwen2.5-3b --card 4090": " plan qwen2.5-3b --machine 4090",
    "probe plan --vram 4GiB 4090 qwen2.5-3b": " plan --vram 4GiB qwen2.5-3b --machine 4090",
    "probe plan qwen2.5-3b --vram 8gb": "write it as 8GiB",
    "probe fit --card 4090 qwen2.5-3b": " fit qwen2.5-3b --machine 4090",
    "probe throughput http://127.0.0.1:1": " throughput --url http://127.0.0.1:1",
    "prune x --targets MI50": "--targets gfx906",
    "audit x --targets 'MI50 16GB'": "--targets gfx906",
}


@pytest.mark.parametrize("words", MEANT)
def test_a_wrong_command_names_the_one_that_was_meant(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(shlex.split(words))
    except SystemExit as ended:
        code = int(str(ended.code))
    said = capsys.readouterr()
    assert code == 2
    assert MEANT[words] in said.err
    assert not said.out


ALIASES = "a0: &a0 {x: y, z: y}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, z: *a{n - 1}}}\n" for n in range(1, 60)
)
ITSELF = "services: &a {api: *a}\n"


@pytest.mark.thorough
@pytest.mark.parametrize("text", [ALIASES, ITSELF, f"services: {{api: 1}}\n--- \n{ALIASES}"])
@pytest.mark.parametrize(
    "words", ["ablate {} api", "plan --catalog {}", "build --catalog {}", "doctor --lint {}"]
)
def test_aliases_without_end_are_refused(
    words: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    code = main(shlex.split(words.format(tmp_path / "compose.yaml")))
    said = capsys.readouterr()
    assert (code, "compose.yaml:" in said.err + said.out) == (1 if "lint" in words else 2, True)
    assert "Traceback" not in said.err


READERS = {
    "ablate {} api": 2,
    "audit x --keep {}": 5,
    "audit x --baseline {}": 5,
    "build cpu --keep {}": 5,
    "build --catalog {}": 2,
    "observe --keep {} x -- true": 5,
    "doctor --lint {}": 5,
}


@pytest.mark.parametrize("words", READERS)
def test_a_pipe_that_nobody_writes_into_is_not_waited_for(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(shlex.split(words.format(tmp_path / "pipe"))) == READERS[words]
    said = capsys.readouterr().err
    assert f"{tmp_path}/pipe: it is a pipe, and nobody writes into it" in said


def test_a_pipe_is_read_where_somebody_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, wait = tmp_path / "pipe", os.set_blocking
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    os.write(held, b"FROM x\nRUN pip install torch\n")

    def wait_and_end(descriptor: int, blocking: bool, /) -> None:
        wait(descriptor, blocking)
        os.close(held)  # its reader is there now

    monkeypatch.setattr(os, "set_blocking", wait_and_end)
    code = main(["doctor", "--lint", str(pipe)])
    assert (code, "pipe:2: " in capsys.readouterr().out) == (1, True)


def test_restore_needs_a_list_that_can_be_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["build", "cpu", "--keep", str(tmp_path / "pipe"), "--restore", "torch"]) == 2
    assert "is a named pipe: --restore adds to a file" in capsys.readouterr().err
