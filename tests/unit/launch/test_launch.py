"""What `weir launch` renders: taken by the engines' own schemas, the same command everywhere, quoted."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from buildtool.cli.program import main
from buildtool.core.command import CommandFailed, Completed
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.yaml_text import Limits, dump, parse
from buildtool.launch import kubernetes
from buildtool.launch.collect import commands
from buildtool.launch.engines import ENGINES
from buildtool.launch.job import Job, load
from buildtool.launch.kubernetes import literal, state_of
from buildtool.launch.slurm import directive

SCHEMAS = Path(__file__).parent / "schemas"
REPORT = Path(__file__).parents[3] / "docs/results/h200-quick.json"
CLUSTERS = ("trainjob", "jobset", "job", "skypilot")
HOSTILE = (
    "$(touch /tmp/x)",
    "`id`",
    "a'b\"c",
    "; rm -rf /",
    "--",
    "#x",
    "\\",
    "$$(A)",
    "$local_rank",
    "${local_rank}",
    "{out}'$X",
    "é ü",
    "1e3",
    "no",
)


def job(engine: str, **fields: object) -> Job:
    usual = {"command": ["python3", "t.py", "--out", "{out}"], "out": "/data/r", "engine": engine, "nodes": 2}
    if engine in CLUSTERS:
        usual |= {"image": "registry.example/cpu:1", "mounts": {"/data": "claim"}}
    if engine == "local":
        usual["nodes"] = 1
    return load(None, {**usual, **fields})


def documents(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


CASES = [
    {},
    {"processes": 4, "gpus": 4, "gpu": "MI300X", "vendor": "amd", "memory": "64GiB", "queue": "q"},
    {"batches": [32, 64, 1 << 20], "command": ["x", "{batch}", "{rank}", "{node}", "{out}"]},
    {"env": {f"V{n}": text for n, text in enumerate(HOSTILE)}, "command": ["x", *HOSTILE]},
    {"nodes": 1, "name": "a" * 40, "mounts": {"/data/r": "/host/r", "/b": "s3://bucket/x"}, "port": 1024},
]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", CLUSTERS)
@pytest.mark.parametrize("fields", CASES)
def test_every_document_is_valid_by_the_published_schema(engine: str, fields: dict) -> None:
    for text in ENGINES[engine].render(job(engine, **fields)):
        for document in documents(text.text):
            kind = document.get("kind", "SkyPilot")
            schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
            jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet", "Job", "SkyPilot"])
def test_a_schema_refuses_a_key_that_nobody_knows(kind: str) -> None:
    engine = kind.lower()
    document = documents(ENGINES[engine].render(job(engine))[0].text)[-1]
    schema = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind}.json").read_text()))
    inner = document["spec"] if "spec" in document else document["resources"]
    inner["replicas_"] = 1
    assert not schema.is_valid(document)


def kubernetes_expands(text: str, values: dict[str, str]) -> str:
    """As k8s.io/kubernetes/third_party/forked/golang/expansion reads it."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


@given(st.text("$()A x", max_size=12))
def test_kubernetes_reads_a_text_as_it_is(text: str) -> None:
    assert kubernetes_expands(literal(text), {"A": "gone", "": "gone", "x": "gone"}) == text


def sbatch_reads(line: str) -> list[str]:
    """As _get_argument of Slurm's src/sbatch/opt.c does: quotes, backslashes, comments."""
    words, word, quote, escaped, begun = [], "", "", False, False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if char == quote else (quote, word + char)
        elif char in "\"'":
            quote, begun = char, True
        elif char == "#":
            break
        elif char.isspace():
            if word or begun:
                words.append(word)
            word, begun = "", False
        else:
            word += char
    return [*words, word] if word or begun else words


@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" #'\"\\"), min_size=1
    )
)
def test_sbatch_reads_a_directive_as_one_word(text: str) -> None:
    assert sbatch_reads(f"{directive(f'--comment={text}')} --next")[:1] == [f"--comment={text}"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029\ufeff")))
def test_yaml_holds_a_text_as_it_is(text: str) -> None:
    assert parse(dump({"a": [text], "b": {"c": text}}), "t", Limits(5, 50)).data == {
        "a": [text],
        "b": {"c": text},
    }


@pytest.mark.parametrize(
    "text", ["1e3", "no", "y", "0x1F", "1_000", "2026-01-01", "~", "null", ".5", "012", "=", "<<"]
)
def test_no_text_can_be_read_as_something_else(text: str) -> None:
    assert dump({"a": text}) == f'a: "{text}"\n'


@pytest.mark.parametrize("engine", list(ENGINES))
def test_no_word_of_a_command_reaches_a_shell(engine: str) -> None:
    """Each word arrives whole, whatever is between: shells, Kubernetes' variables, torchrun's templates."""
    words = ["x", *(word for word in HOSTILE if "{out}" not in word)]
    text = ENGINES[engine].render(job(engine, command=words))[0].text
    if engine not in ("local", "slurm"):
        document = documents(text)[-1]
        text = document.get("run") or kubernetes_expands(_command(document)[-1], {"A": "gone"})
    inner = [line for line in text.splitlines() if "torchrun" in line or "sh -c" in line][-1]
    read = shlex.split(inner)
    if engine == "slurm":
        read = shlex.split(read[2])
        assert read[-len(words) :] == words
    else:
        first, *rest = read[read.index("--no-python") + 1 :]
        assert [first, *(Template(word).safe_substitute(local_rank="7") for word in rest)] == words


def _command(document: dict) -> list[str]:
    spec = document["spec"]
    if "trainer" in spec:
        return spec["trainer"]["command"]
    pods = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    return pods["template"]["spec"]["containers"][0]["command"]


REFUSED = {
    "name": ["A", "a\n#SBATCH --wrap=x", "", "-a", "a" * 41],
    "out": ["relative", "/a\nb", "/a/../b", "/a%j", "/a:b", '/a"b'],
    "queue": ["a b", "-x", "a\n"],
    "memory": ["64", "64GB", "0GiB"],
    "env": [{"1A": "x"}, {"RANK": "0"}, {"A": "a\nb"}, {"A;x": ""}],
    "mounts": [{"relative": "/x"}, {"/a": "b\n"}, {"/a,b": "x"}],
    "warning_s": [3600, -1],
    "nodes": [0, -1, 10**9, "two", 1.5],
    "batches": [[0], [1, 1], ["a"], list(range(1, 1002))],
    "command": [[], ["a\nb"], ["{batch}"], "text", ["\x1b[0m"]],
    "container": ["pyxis", "docker"],
    "options": [["a\nb"]],
    "engine": ["lsf"],
    "unheard": [1],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values]
)
def test_what_an_engine_could_misread_is_refused(key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(dump({"command": ["x"], "out": "/data", "engine": "slurm", key: value}))
    with pytest.raises(ConfigError, match=key):
        load(file, {})


def test_a_name_leaves_room_for_what_engines_append_to_that_of_each_run() -> None:
    job("jobset", name="a" * 35, batches=[1024])
    with pytest.raises(ConfigError, match="is no name"):
        job("jobset", name="a" * 36, batches=[32, 1024])


@pytest.mark.parametrize(("option", "form"), [("--env", "NAME=VALUE"), ("--mount", "INSIDE=OUTSIDE")])
def test_a_pair_without_a_value_is_refused_with_its_own_form(
    option: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--out", "/data", option, "/x", "--dry-run", "--", "x"]) == 2
    assert f"write it as {option} {form}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "fields", "hint"),
    [
        ("local", {"nodes": 2}, "--nodes 1"),
        ("slurm", {"image": "a.sqsh"}, "pyxis"),
        ("skypilot", {"gpus": 1}, "--gpu"),
        ("job", {"gpus": 1}, "--vendor"),
        ("job", {"image": ""}, "--image"),
        ("jobset", {"mounts": {}}, "--mount"),
    ],
)
def test_an_error_says_what_an_engine_lacks(engine: str, fields: dict, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ENGINES[engine].render(job(engine, **fields))
    assert hint in f"{raised.value} {raised.value.hint}"


def test_options_win_over_the_file_and_are_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: [a, '{out}']\nout: /data\nnodes: 3\nengine: slurm\n")
    assert main(["launch", str(file), "--nodes", "5", "--batch", "7", "--env", "A=b c", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=5\n" in shown
    assert "batches=(7)" in shown
    assert "A='\"'\"'b c'\"'\"'" in shown
    assert not (tmp_path / "data").exists()


def test_a_command_keeps_its_own_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--out", "/data", "--dry-run", "--", "ch-run", "img", "--", "x", "--nodes", "9"]
    assert main(words) == 0
    assert "--no-python ch-run img -- x --nodes 9" in capsys.readouterr().out


def test_a_command_behind_options_is_taken_beside_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: [a]\nout: /data\n")
    assert main(["launch", str(file), "--dry-run", "--", "b", "", "--", "c.yaml"]) == 0
    assert "--no-python b '' -- c.yaml\n" in capsys.readouterr().out
    assert main(["launch", "--out", "/data", "--dry-run", "--", "c.yaml"]) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ["-x"]},
        {"command": [""]},
        {"mounts": {"/a\u202e": "claim"}},
        *({"mounts": {"/a": place}, "image": "i", "container": "pyxis"} for place in ("/b,/etc:/c", "/b:/c")),
    ],
)
def test_no_text_passes_for_an_option_or_for_a_second_mount(fields: dict) -> None:
    with pytest.raises(ConfigError):
        job("slurm", **fields)


@pytest.mark.parametrize(
    "answer", ["[]", '{"status": []}', '{"status": {"conditions": [1, {"status": "True"}]}}']
)
def test_odd_answers_of_kubernetes_are_no_tracebacks(answer: str) -> None:
    assert state_of(json.loads(answer))[1] is None


def test_a_cluster_that_does_not_answer_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[str | None] = iter(
        [None, None, '{"status": {"conditions": [{"type": "Complete", "status": "True"}]}}']
    )
    told: list[str] = []

    def run(words: list[str]) -> Completed:
        if "logs" in words:
            return Completed("", "")
        if (answer := next(answers)) is None:
            raise CommandFailed(words, 1, "connection refused")
        return Completed(answer, "")

    monkeypatch.setattr(kubernetes, "run", run)
    monkeypatch.setattr(kubernetes, "POLL_S", 0)
    (ended,) = ENGINES["job"].follow(job("job"), "x", told.append)
    assert ended.ok
    assert told[:2] == ["connection refused"] * 2
    gone = CommandFailed(["kubectl"], 1, 'Error from server (NotFound): jobs.batch "x" not found')
    monkeypatch.setattr(kubernetes, "run", raising(gone))
    with pytest.raises(CommandFailed):
        ENGINES["job"].follow(job("job"), "x", told.append)


def raising(error: Exception) -> Callable[[list[str]], Completed]:
    def run(_words: list[str]) -> Completed:
        raise error

    return run


def test_a_kubectl_that_gives_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "run", lambda _words: Completed("\x1b[31mno", ""))
    with pytest.raises(DataError, match=r"\\x1b\[31mno"):
        ENGINES["job"].follow(job("job"), "", lambda _line: None)


def test_states_of_kubernetes_are_read_as_they_end() -> None:
    def state(*conditions: tuple[str, str]) -> tuple[str, bool | None]:
        listed = [{"type": kind, "status": holds, "reason": "R"} for kind, holds in conditions]
        return state_of({"status": {"conditions": listed}})

    assert state(("Complete", "True"))[1] is True
    assert state(("Suspended", "False"), ("Failed", "True")) == ("Failed (R)", False)
    assert state(("Complete", "False"))[1] is None
    assert state_of({})[1] is None


@pytest.mark.thorough
def test_reports_of_training_and_of_probes_are_found(tmp_path: Path) -> None:
    run = job("slurm", out=str(tmp_path))
    assert commands(run) == ([], [])
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model": "of the job\'s own"}')
        (tmp_path / name / "probe.json").write_bytes(REPORT.read_bytes())
    os.mkfifo(tmp_path / "n1" / "pipe.json")
    ((verb, *files),), missing = commands(run)
    assert (verb, files[-2], len(files), missing) == ("compare", "--html", 5, [])
    (tmp_path / "n1" / "rank-0.json").write_text("{}")
    assert [words[0] for words in commands(run)[0]] == ["epochs", "html"]


@pytest.mark.thorough
def test_a_node_whose_report_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    for name, text in (
        ("n1", REPORT.read_bytes()),
        ("n2", REPORT.read_bytes()),
        ("n3", REPORT.read_bytes()[:900]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "probe.json").write_bytes(text)
    other = json.loads(REPORT.read_text()) | {"schema_version": 99}
    (tmp_path / "n4.json").write_text(json.dumps(other))
    ((verb, *files),), missing = commands(job("slurm", out=str(tmp_path), nodes=5))
    assert (verb, len(files)) == ("compare", 2)
    half, newer, few = sorted(missing)
    assert "n3/probe.json is not a probe report: not JSON" in half
    assert "n4.json is not a probe report: schema_version is 99" in newer
    assert few == f"reports of 2 processes are below {tmp_path}, and 5 were started"
