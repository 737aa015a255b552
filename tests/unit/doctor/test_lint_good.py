"""Good files raise no alarm; hostile ones end in a fault, never in a traceback."""

import contextlib
import json
import locale
import random
from pathlib import Path

import pytest
from lint_files import broken
from lint_good import good

from buildtool.cli.program import main
from buildtool.doctor.lint import report, shell_parser
from buildtool.doctor.lint.linter import MOST_BYTES, kind_of, lint
from buildtool.doctor.lint.rules import rules
from buildtool.doctor.lint.shell_parser import commands_in

GOOD = good()


@pytest.mark.thorough
def test_at_most_one_good_file_in_fifty_raises_an_alarm() -> None:
    assert len({text for _, text in GOOD}) >= 200
    alarms = {name: lint(name, text.encode()) for name, text in GOOD}
    assert len([name for name, faults in alarms.items() if faults]) <= len(GOOD) // 50


@pytest.mark.thorough
def test_a_good_file_that_is_spoilt_raises_an_alarm() -> None:
    for name, text in GOOD:
        if name.endswith("Dockerfile"):
            assert lint(name, (text + "\nRUN pip install torch\n").encode()), name


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '*a'] * 9)}]\n" for n in range(9)
)
HOSTILE: dict[str, tuple[str, bytes]] = {
    "binary": ("Dockerfile", bytes(range(256)) * 40),
    "utf-16": ("compose.yaml", "services: {}".encode("utf-16")),
    "not utf-8": ("run.sh", b"echo \xff\xfe\n"),
    "an alias bomb": ("compose.yaml", BOMB.encode()),
    "deep yaml": ("compose.yaml", b"[" * 100_000),
    "deep json": ("devcontainer.json", b'{"a":' * 50_000),
    "a python object": ("compose.yaml", b"!!python/object/apply:os.system [ls]"),
    "no mapping": ("compose.yaml", b"- a\n- b\n"),
    "services that are a list": ("compose.yaml", b"services: [a]\n"),
    "a service that is a text": ("compose.yaml", b"services:\n  a: b\n"),
    "an unending comment": ("devcontainer.json", b'{"a": 1 /* '),
    "an unending heredoc": ("Dockerfile", b"FROM a:1\nRUN <<EOF\necho\n"),
    "no FROM": ("Dockerfile", b"RUN echo\n"),
    "a definition without bootstrap": ("x.def", b"%post\nls\n"),
    "YAML with a NUL": ("compose.yaml", b"a: \x00"),
}


_DIGITS = "9" * 6000
_LONG_NUMBERS = {
    "compose.yaml": f"services:\n  a:\n    ports: 0x{'f' * 6000}\n",
    "devcontainer.json": '{"image": "a:1", "runArgs": [0x' + "f" * 6000 + "]}",
    "job.sbatch": "#!/bin/bash\n#SBATCH --gpus=1\n"
    f"#SBATCH --ntasks-per-node={_DIGITS}\nsrun torchrun train.py\n",
    "Dockerfile": f"FROM python:3.{_DIGITS}\nRUN pip install torch==2.1\n",
    "requirements.txt": f"torch==2.{_DIGITS}\ntorchvision==0.1\n"
    "--index-url https://download.pytorch.org/whl/cu118\n",
}


@pytest.mark.parametrize("name", _LONG_NUMBERS)
def test_a_number_of_6000_digits_is_read_without_a_traceback(name: str) -> None:
    found = [(name, lint(name, _LONG_NUMBERS[name].encode()))]
    assert report.lint_text(found, rules())
    assert report.lint_json(found, rules()) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_a_fault(name: str) -> None:
    faults = lint(*HOSTILE[name])
    assert faults
    assert {fault.rule for fault in faults} & {"unreadable", "compose-wrong-type"}, faults


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "(" * 20_000),
        ("run.sh", "docker run - --rm -it a:1\ndocker run\ndocker run --\napptainer exec\npip install -r\n"),
        ("run.sh", "$(" * 5_000),
        ("run.sh", "'" * 9_999),
        ("run.sh", "a=" + "x" * 200_000),
        ("run.sh", "if " * 5_000),
        ("x.py", "(" * 50_000),
        ("x.py", "-" * 100_000 + "1"),
        ("Dockerfile", "FROM a:1\n" + "RUN a \\\n" * 4_000),
        ("Dockerfile", "FROM a:1\nRUN [" + '"a",' * 20_000),
        ("requirements.txt", "torch\\\n" * 20_000),
        ("requirements.txt", "torch" + "[" * 20_000),
        ("compose.yaml", "services:\n" + "".join(f"  s{n}: {{image: a:1}}\n" for n in range(5_000))),
        ("job.sbatch", "#SBATCH --gres\n" * 5_000),
    ],
)
def test_long_and_deep_files_are_read_to_their_end(name: str, text: str) -> None:
    lint(name, text.encode())


def test_a_file_that_is_too_large_is_not_read() -> None:
    assert [fault.rule for fault in lint("Dockerfile", b"a" * (MOST_BYTES + 1))] == ["too-large"]


def test_an_instruction_that_is_too_long_for_the_parser_is_named() -> None:
    text = "FROM a:1\nRUN x\nRUN a" + " \\\n b" * 2_500
    assert [(fault.line, fault.rule) for fault in lint("Dockerfile", text.encode())] == [(3, "too-large")]
    assert lint("Dockerfile", text.replace(" \\\n b" * 1_000, "").encode()) == []


@pytest.mark.parametrize("file", broken()[:20], ids=lambda file: file.name)
def test_windows_line_ends_and_a_byte_order_mark_change_no_line(file: object) -> None:
    name, text, faults = file.name, file.text, file.faults  # type: ignore[attr-defined]
    data = "\ufeff".encode() + text.replace("\n", "\r\n").encode()
    assert sorted((fault.line, fault.rule) for fault in lint(name, data)) == list(faults)


def test_a_turkish_locale_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    before = locale.setlocale(locale.LC_ALL)
    with contextlib.suppress(locale.Error):  # where it isn't installed, the environment says so alone
        locale.setlocale(locale.LC_ALL, "tr_TR.UTF-8")
    try:
        text = b'from debian:bookworm-slim\nrun apt-get INSTALL\ncmd ["a"]\nONBUILD run pip install x\n'
        assert [(f.line, f.rule) for f in lint("DOCKERFILE", text)] == [(4, "pip-cache")]
        assert kind_of("REQUIREMENTS.TXT", "torch") == "requirements"
    finally:
        locale.setlocale(locale.LC_ALL, before)


@pytest.mark.thorough
def test_damaged_files_end_without_a_traceback() -> None:
    rng = random.Random(1)
    sources = [(file.name, file.text) for file in broken()] + GOOD[::9]
    for _ in range(4_000):
        name, text = rng.choice(sources)
        data = bytearray(text.encode())
        for _ in range(rng.randrange(1, 12)):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randrange(30)]
                case 2:
                    data[place:place] = rng.choice(
                        [b"<<EOF", b"$(", b"'", b'"', b"\\\n", b"{", b"&a", b"*a", b"\t"]
                    )
                case _:
                    data += data[place : place + 50]
            data = data or bytearray(b"x")
        lint(name, bytes(data))


# ---- reading -----------------------------------------------------------------------------------------


def test_commands_have_words_lines_settings_and_heredocs() -> None:
    text = "A=1 sudo docker run \\\n  -e 'B c' \"$D\" && cat <<X | python3 -\nimport torch\nX\n"
    run, cat, python = commands_in(text)
    assert run.name == "docker"
    assert [(word.text, word.line) for word in run.words][-3:] == [("-e", 2), ("B c", 2), ("$D", 2)]
    assert [word.text for word in run.settings] == ["A=1"]
    assert (cat.piped_into, [(h.text, h.line) for h in cat.heredocs]) == ("python3", [("import torch\n", 3)])
    assert python.name == "python3"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("Dockerfile.rocm", "", "dockerfile"),
        ("app.Dockerfile", "", "dockerfile"),
        ("x", "# c\nARG A=1\nFROM $A\n", "dockerfile"),
        ("docker-compose.override.yml", "", "compose"),
        ("x", "services:\n", "compose"),
        ("requirements-dev.txt", "", "requirements"),
        ("job", "#!/bin/bash\n#SBATCH -N 1\n", "slurm"),
        ("x.def", "", "apptainer"),
        ("x", "Bootstrap: docker\n", "apptainer"),
        ("x", "#!/usr/bin/env python3\n", "python"),
        ("x", "echo\n", "shell"),
    ],
)
def test_a_file_is_recognised(name: str, text: str, kind: str) -> None:
    assert kind_of(name, text) == kind


# ---- the verb ----------------------------------------------------------------------------------------


def test_the_verb_names_line_reason_and_fix_and_writes_sarif(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compose.yaml").write_text("services:\n  a:\n    image: a:1\n    devices: [/dev/fdk]\n")
    sarif = tmp_path / "out.sarif"
    assert main(["doctor", "--lint", str(tmp_path / "compose.yaml"), "--sarif", str(sarif)]) == 1
    shown = capsys.readouterr().out
    assert "compose.yaml:4: error: /dev/fdk is misspelt [dev-fdk]" in shown
    assert "why: " in shown
    assert "fix: write /dev/kfd" in shown
    (run,) = json.loads(sarif.read_text())["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "dev-fdk"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 4}


def test_a_clean_file_and_a_note_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text('FROM debian:trixie-slim\nCMD ["sleep"]\n')
    assert main(["doctor", "--lint", str(tmp_path / "Dockerfile")]) == 0
    assert capsys.readouterr().out == "no faults in 1 file\n"
    (tmp_path / "Dockerfile").write_text("FROM debian:trixie-slim\nRUN sudo true\n")
    assert main(["doctor", "--lint", str(tmp_path / "Dockerfile"), "--json"]) == 0
    assert [row["rule"] for row in json.loads(capsys.readouterr().out)] == ["sudo-in-image"]


def test_sarif_never_replaces_a_file_that_was_to_be_linted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dockerfile, link = tmp_path / "Dockerfile", tmp_path / "lint.sarif"
    dockerfile.write_text("FROM debian:trixie-slim\n")
    link.symlink_to(dockerfile)
    for sarif in (dockerfile, link):
        assert main(["doctor", "--lint", str(dockerfile), "--sarif", str(sarif)]) == 2
        assert "is what this command reads" in capsys.readouterr().err
    assert dockerfile.read_text() == "FROM debian:trixie-slim\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--fix", "--json"],
        ["--variants", "here.yaml", "--json"],
        ["--prove", "weir/cpu", "--json"],
        ["--lint", "Dockerfile", "--card", "gfx803"],
        ["--lint", "Dockerfile", "--dry-run"],
        ["--sarif", "lint.sarif"],
        ["--on", "wsl"],
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM debian:trixie-slim\n")
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    assert main(["doctor", *words]) == 2
    assert "error: --" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"Dockerfile", "compose.yaml"}


@pytest.mark.parametrize("other", [["--fix"], ["--variants", "here.yaml"], ["--prove", "weir/cpu"]])
def test_the_doctor_does_one_thing_at_a_time(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--lint", "Dockerfile", *other])
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lint", "/nowhere/Dockerfile"]) == 5
    assert "can't read /nowhere/Dockerfile" in capsys.readouterr().err


def test_a_missing_parser_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    shell_parser._parser.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    (tmp_path / "run.sh").write_text("ls\n")
    assert main(["doctor", "--lint", str(tmp_path / "run.sh")]) == 3
    assert "pip install 'gpu-weir[lint]'" in capsys.readouterr().err


def test_every_rule_says_why_and_what_to_write() -> None:
    for name, rule in rules().items():
        assert name == name.lower()
        assert min(map(len, (rule.title, rule.reason, rule.fix))) > 3, name


@pytest.mark.parametrize(
    "run",
    [
        ". /clone.sh",
        "source ./install-everything",
        "apt-get update && rosdep install --from-paths src -y",
        "apt-get update && cat packages | xargs apt-get install -y && rm -rf /var/lib/apt/lists/*",
        "apt-get update && ./install.sh",
        "apt-get update && bash /tmp/install.sh",
        "apt-get update && npx playwright install --with-deps chromium",
    ],
)
def test_what_may_do_more_than_its_words_say_is_no_fault(run: str) -> None:
    assert lint("Dockerfile", f"FROM ubuntu:24.04\nRUN {run}\n".encode()) == []


@pytest.mark.parametrize("run", ["apt-get update && pip list", "apt-get update", "/usr/bin/apt-get update"])
def test_an_update_beside_what_installs_nothing_is_alone(run: str) -> None:
    [fault] = lint("Dockerfile", f"FROM ubuntu:24.04\nRUN {run}\n".encode())
    assert fault.rule == "apt-update-alone"


def test_a_fault_in_a_stage_that_is_not_in_the_final_image_says_so() -> None:
    text = """ARG BASE=ubuntu:24.04
FROM ${BASE} AS base
RUN apt-get update
FROM base AS build
RUN cd /opt
FROM base AS other
RUN cd /opt
FROM debian:trixie-slim
RUN cd /opt
FROM other
COPY --from=build /a /a
RUN cd /opt
"""
    details = {fault.line: fault.detail for fault in lint("Dockerfile", text.encode())}
    assert details == {
        3: "apt-get update",
        5: "cd /opt (stage build: not part of the final image)",
        7: "cd /opt",
        9: "cd /opt (stage 3: not part of the final image)",
        12: "cd /opt",
    }


@pytest.mark.thorough
def test_a_heredoc_of_more_lines_than_its_parser_reads_in_linear_time_is_too_large() -> None:
    body = "echo x\n" * 1990
    short = f"RUN <<E\n{body}E\n"
    assert lint("Dockerfile", f"FROM a:1\n{short}{short}".encode()) == []
    for begin in ("RUN <<E", "RUN cat <<-'E' > x", 'COPY <<"E" /x', "ONBUILD run <<E"):
        found = lint("Dockerfile", f"FROM a:1\n{short}{begin}\n{body}{body}E\n".encode())
        assert [(fault.line, fault.rule) for fault in found] == [(1994, "too-large")], begin
    two = f"FROM a:1\nRUN cat <<A <<B\n{body}A\n{body}B\n"
    assert [fault.rule for fault in lint("Dockerfile", two.encode())] == ["too-large"]
    never = 'FROM a:1\nLABEL x="a <<b"\n' + "RUN true\n" * 3000
    assert lint("Dockerfile", never.encode()) == []
