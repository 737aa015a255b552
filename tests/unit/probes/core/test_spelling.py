"""Did you mean: the names that a mistyped one resembles, in both programs."""

import pytest

from buildtool.cli import program as weir
from probes.cli import program as probes
from probes.core.spelling import close_names, guess

MODELS = ("qwen2.5-3b", "qwen2.5-32b", "bert-base", "gpt2-xl")


@pytest.mark.parametrize(
    ("typed", "close"),
    [
        ("qwen25-3b", ["qwen2.5-3b"]),
        ("Bert Base", ["bert-base"]),
        ("bert-bas", ["bert-base"]),
        ("opera", []),
        ("", []),
        ("x" * 10_000, []),
    ],
)
def test_a_name_that_differs_by_few_letters_is_meant(typed: str, close: list[str]) -> None:
    assert close_names(typed, MODELS) == close
    assert bool(guess(typed, MODELS)) == bool(close)


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (weir.main, ["plam"], "did you mean plan?"),
        (weir.main, ["fit"], "probe fit?"),
        (weir.main, ["throughputt"], "probe throughput?"),
        (probes.main, ["plam"], "did you mean plan?"),
        (probes.main, ["fit", "bert-base", "--task", "trainning"], "did you mean training?"),
    ],
)
def test_a_mistyped_verb_or_choice_names_the_one_that_is_meant(
    main, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_what_resembles_nothing_is_refused_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        weir.main(["zzzzzz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.thorough
def test_a_mistyped_model_or_variant_names_the_one_that_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert probes.main(["plan", "qwen25-3b", "--machine", "h200"]) == 2
    assert "did you mean qwen2.5-3b?" in capsys.readouterr().err
    assert weir.main(["plan", "rcom"]) == 2
    assert "did you mean rocm?" in capsys.readouterr().err
