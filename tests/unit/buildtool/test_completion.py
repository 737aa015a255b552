"""The completion scripts know every verb, option and path argument of both command lines."""

import re
from pathlib import Path

import pytest

from buildtool.cli import completion
from buildtool.cli import program as cli
from buildtool.cli.program import main
from buildtool.core.errors import Exit
from probes.cli.program import build_parser
from probes.core import invocation

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_no_verb_or_option_is_missing_from_a_completion(shell: str) -> None:
    script = completion.script(shell)
    parsers = [cli.build_parser(cli.VERBS, "weir"), build_parser()]
    actions = [action for parser in parsers for action in completion._actions(parser)]
    words = {str(word) for action in actions for word in (*action.option_strings, *(action.choices or ()))}
    assert {"audit", "probe", "compare", "--budget-unpacked", "--resume"} <= words
    known = set(re.findall(r"[\w.-]+", script))
    if shell == "fish":  # writes `-l resume`, `-s h`
        words = {word.lstrip("-") for word in words}
    assert words <= known


def test_paths_are_completed_where_a_path_may_stand() -> None:
    script = completion.script("bash")
    for place in ("audit_pos_0", "audit___json", "diff_pos_1", "prune___out", "probe_show_pos_0"):
        assert f"_shtab_weir_{place}_COMPGEN=_shtab_compgen_files" in script, place
    assert "_shtab_weir_audit___targets_COMPGEN" not in script


def test_fish_completes_paths_where_a_path_may_stand() -> None:
    lines = completion.script("fish").splitlines()
    paths = [line for line in lines if "__fish_complete_path" in line]
    assert any("'_shtab_weir_using audit' -l json " in line for line in paths)
    assert any("_shtab_weir_using audit" in line and "_npos" in line for line in paths)
    assert not any(" -l targets " in line for line in paths)


def test_a_script_completes_weir_however_it_was_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(invocation, "_is_weir", lambda: False)
    assert main(["completion", "bash"]) == Exit.OK
    assert capsys.readouterr().out.rstrip().endswith("-F _shtab_weir weir")


def test_a_shell_that_is_not_served_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["completion", "tcsh"])
    assert left.value.code == Exit.USAGE
    assert "bash" in capsys.readouterr().err


@pytest.mark.thorough
def test_colours_are_written_in_two_places_only() -> None:
    """So NO_COLOR has nothing to turn off elsewhere but Python's own help texts (3.14), which heed it.

    `paint` heeds it: tests/unit/audit/test_audit_answer.py. `weir probe watch` draws a
    table with rich, in one module, and prints lines where NO_COLOR is set:
    tests/unit/probes/watch/test_screen.py.
    """
    drawn = (ROOT / "probes/watch/screen.py", ROOT / "probes/core/output.py")
    coloured = re.compile(r"""(x1b|033|u001b)\[[0-9;]*m|\bcolor=True|\b(colorama|termcolor|rich)\b""")
    for program in ("buildtool", "probes", "images"):
        for path in (ROOT / program).rglob("*.py"):
            assert path in drawn or not coloured.search(path.read_text()), path
