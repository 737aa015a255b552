"""Commands that are nearly right name the one that was meant, whole, to paste."""

import shlex

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
