"""Pruning images that somebody hostile made: nothing is lost or executed, and the host keeps its own."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handmade import CREATED, KERNELS, Handmade, load_image, python_that_is, saved_config

from buildtool.core.errors import ProofFailed, ToolError
from buildtool.engine import proof
from buildtool.engine.client import Engine, RunLimits
from buildtool.engine.tags import temporary_prefix
from buildtool.gpucode.target import parse_targets
from buildtool.prune import images as imageprune

ROOT = Path(__file__).parents[2]
ODD = "a\nRUN touch /pwned\r\n${FOO:-x} $(id) $HOME \\ \" ' \x1b[2J \u2028 é"
RUN: dict[str, Any] = {
    "Env": ["PATH=/bin", "EMPTY=", f"ODD={ODD}", "A\nRUN touch /pwned\nB=c"],
    "User": "1000:1000",
    "WorkingDir": "/a b\nRUN touch",
    "ExposedPorts": {"8000/tcp": {}, "53/udp": {}},
    "Volumes": {"/data": {}, "/with space": {}},
    "StopSignal": "SIGINT",
    "Shell": ["/bin/sh", "-c", ODD],
    "Healthcheck": {"Test": ["CMD-SHELL", ODD], "Interval": 1500000001, "Timeout": 10**9, "Retries": 3},
    "Entrypoint": ["${FOO:-x}", ODD],
    "Cmd": ["${FOO:-x}", "", ODD],
    "OnBuild": ["COPY --from=x / /", ODD],
    "ArgsEscaped": True,
    "Labels": {"odd ${FOO:-x}": ODD, "${FOO:-x}": "", "io.weir.pruned": "no"},
    "vnd.unknown": {"kept": [1, None]},
}
SMOKE = json.loads(
    '{"python": "3", "uid": 0, "torch": {"version": "2", "hip": null, "cuda": null, "product_ok": true},'
    ' "service": false, "probes": false, "rocminfo": {"present": false}}'
)
GOOD = f"echo 'SMOKE {json.dumps(SMOKE)}'"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


OWN = f"t-prune-{os.getpid()}"  # other checkouts' tests may use the same engine
OF_ANOTHER = f"weir-pruning:of-{OWN}"
OURS = (f"{OWN}/", f"localhost:5000/{OWN}/", OF_ANOTHER)
TITLE = "org.opencontainers.image.title"  # what `weir build` makes beside these tests has one
OWNER = '{{.ID}} {{.Label "io.weir.owner"}}'


@pytest.fixture(scope="module", autouse=True)
def _no_image_without_a_name(engine: Engine) -> Iterator[None]:
    """The tests leave none. Listing those takes the engine a while, so it isn't done for each."""
    before = unnamed(engine)
    yield
    eventually_none(lambda: unnamed(engine) - before)


@pytest.fixture(autouse=True)
def _clean(
    engine: Engine, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No test leaves a container, a volume or a temporary name; the images that it named are removed. Other
    tests use the engine, too: their volumes come and go, and their names stay.
    """
    here = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("WEIR_STATE", str(here / "state"))
    ours = (*OURS, temporary_prefix("weir-pruning", tmp_path))
    before = left(engine, ours, here)
    yield
    for name in left(engine, ours, here) - before:
        if name.startswith(ours):
            engine.remove_tag(name)
    eventually_none(lambda: left(engine, ours, here) - before)


def eventually_none(of: Callable[[], set[str]]) -> None:
    ends = time.monotonic() + 60
    while more := of():
        assert time.monotonic() < ends, more
        time.sleep(0.1)


def left(engine: Engine, ours: tuple[str, ...], here: Path) -> set[str]:
    """Our names, containers of runs that keep their state here, and unnamed volumes that nobody uses."""
    repositories = (f"{OWN}/*", f"localhost:5000/{OWN}/*", "weir-pruning")  # a list of all takes long
    names = (name for each in repositories for name in engine.tags(each))
    containers = docker("ps", "-a", "--no-trunc", "--format", OWNER).splitlines()
    volumes = ("--filter", "dangling=true", "--filter", "label=com.docker.volume.anonymous")
    return {
        *(name for name in names if name.startswith(ours)),
        *(line for line in containers if str(here) in line),
        *docker("volume", "ls", "-q", *volumes).split(),
    }


def unnamed(engine: Engine) -> set[str]:
    """Handmade images without a name."""
    return {row.Id for row in engine.images() if not row.RepoTags and is_handmade(engine, row.Id)}


def is_handmade(engine: Engine, ref: str) -> bool:
    """Whether an image, or what it was pruned from, was made by hand: those have no title."""
    made = engine.inspect(ref) or {}
    config = made.get("Config") or {}
    return made.get("Created") == CREATED and TITLE not in (config.get("Labels") or {})


def temporary_names(engine: Engine, state: Path) -> list[str]:
    prefix = temporary_prefix("weir-pruning", state)
    return [name for name in engine.tags("weir-pruning") if name.startswith(prefix)]


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


def prune(*words: str, state: Path) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".venv/bin/python"), "-m", "buildtool", "prune", *words, "--targets", "gfx906"]
    environment = {**os.environ, "WEIR_STATE": str(state), "FOO": "interpolated"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert not [path for path in state.glob("*") if path.name.startswith(".weir-")]
    return done


@pytest.fixture
def plain() -> Handmade:
    return load_image(f"{OWN}/plain:1", {"Cmd": ["x"]}, KERNELS)


def test_no_value_of_a_configuration_is_lost_or_interpreted(engine: Engine, tmp_path: Path) -> None:
    made = load_image(f"{OWN}/odd:1", RUN, KERNELS, author=ODD, **{"vnd.top": {"kept": True}})
    done = prune(made.name, "--tag", f"{OWN}/odd:small", state=tmp_path)
    assert done.returncode == 0, done.stderr
    old, new = (json.loads(text) for text in (made.config, saved_config(f"{OWN}/odd:small")))
    labels = {**RUN["Labels"], "io.weir.pruned": "yes", "io.weir.gpu-targets": "gfx906"}
    assert new["config"] == {**RUN, "Labels": labels}
    assert new["author"] == ODD
    assert {key for key in old if old[key] != new[key]} == {"config", "rootfs", "history"}
    seen = [engine.inspect(name)["Config"] for name in (made.name, f"{OWN}/odd:small")]  # type: ignore[index]
    assert seen[1] == {**seen[0], "Labels": labels}
    assert "touch" not in docker("history", "--no-trunc", f"{OWN}/odd:small")


@pytest.mark.parametrize(
    "run",
    [
        {"User": "x\nCOPY --from=weir/cpu:latest / /"},
        {"ExposedPorts": {"1/tcp\nRUN touch /pwned": {}}},
        {"StopSignal": "9\nRUN touch /pwned"},
        {"Volumes": {"/a\nRUN touch /pwned": {}}},
        {"OnBuild": ["x\nRUN touch /pwned"], "Cmd": ["${FOO:?}"]},
    ],
    ids=lambda run: next(iter(run)),
)
def test_a_line_break_becomes_no_instruction(engine: Engine, tmp_path: Path, run: dict[str, Any]) -> None:
    made = load_image(f"{OWN}/odd:1", run, KERNELS)
    done = prune(made.name, "--tag", f"{OWN}/odd:small", state=tmp_path)
    if done.returncode:  # what the engine itself takes for no image
        assert "the engine refused" in done.stderr
        assert engine.inspect(f"{OWN}/odd:small") is None
        return
    config = json.loads(saved_config(f"{OWN}/odd:small"))["config"]
    assert {key: config[key] for key in run} == run
    listed = {
        name for name in exported_names(engine, f"{OWN}/odd:small") if "Kernels" in name or "pwned" in name
    }
    assert listed == {"usr/lib/library/Kernels_gfx906.co"}


def exported_names(engine: Engine, ref: str) -> list[str]:
    done = subprocess.run(["tar", "-t"], input=b"".join(engine.export(ref)), check=True, capture_output=True)
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("{}/named", "{}/named:latest"),
        ("localhost:5000/{}/x", "localhost:5000/{}/x:latest"),
        ("localhost:5000/{}/x:y", "localhost:5000/{}/x:y"),
        (None, "{}/plain:gfx906"),
    ],
)
def test_a_copy_is_found_under_the_name_that_was_asked_for(
    engine: Engine, plain: Handmade, tmp_path: Path, tag: str | None, name: str
) -> None:
    done = prune(plain.name, *(["--tag", tag.format(OWN)] if tag else []), state=tmp_path)
    assert done.returncode == 0, done.stderr
    name = name.format(OWN)
    record = engine.inspect(name)
    assert record
    assert name in record["RepoTags"]
    assert record["Id"][:19] in done.stdout
    assert engine.inspect(plain.name)["Id"] != record["Id"]  # type: ignore[index]
    assert temporary_names(engine, tmp_path) == []


def test_the_disk_check_knows_what_files_take_unpacked(engine: Engine, tmp_path: Path) -> None:
    made = load_image(f"{OWN}/zeros:1", {}, {**KERNELS, "zeros": bytes(30_000_000)})
    done = prune(made.name, "--tag", f"{OWN}/zeros:small", state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert engine.unpacked_bytes(f"{OWN}/zeros:small") >= 30_000_000


NO_NAMES = ("", ":x", "a/B", "a b", "a:b:c", "x@sha256:" + "0" * 64, "a\n", f"{OWN}/plain:1", "$(touch x)")


def test_a_name_that_cannot_be_given_is_refused_before_any_work(plain: Handmade, tmp_path: Path) -> None:
    state = tmp_path / "state"
    for tag in NO_NAMES:
        done = prune(plain.name, "--tag", tag, state=state)
        assert done.returncode == 2, tag
        assert "taking the files out" not in done.stderr
        assert not state.exists() or not list(state.iterdir())


def test_an_image_goes_by_its_id_and_by_its_digest(engine: Engine, plain: Handmade, tmp_path: Path) -> None:
    record = engine.inspect(plain.name)
    assert record
    image_id = str(record["Id"])
    for ref in (image_id, image_id[7:19], *record["RepoDigests"]):  # the classic store has none
        done = prune(ref, state=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"{OWN}/plain:gfx906" in done.stdout
        assert engine.inspect(f"{OWN}/plain:gfx906")
        engine.remove_tag(f"{OWN}/plain:gfx906")


def test_what_is_pruned_proved_and_named_is_one_image_though_its_tag_moves(
    engine: Engine, plain: Handmade, tmp_path: Path
) -> None:
    docker("tag", plain.name, f"{OWN}/kept:1")  # so that the original stays an image with a name
    other = load_image(f"{OWN}/other:1", {"Labels": {"other": "yes"}}, KERNELS)

    def progress(line: str) -> None:
        if line.startswith(("reading", "taking", "making", "proving")):
            docker("tag", other.name, plain.name)

    made = imageprune.prune_image(
        plain.name, parse_targets("gfx906"), f"{OWN}/x:1", engine=engine, state=tmp_path, progress=progress
    )
    assert made
    assert "other" not in json.loads(saved_config(f"{OWN}/x:1"))["config"]["Labels"]
    assert engine.inspect(f"{OWN}/x:1")["Id"] == made.image_id  # type: ignore[index]


def test_what_a_killed_prune_left_in_the_engine_goes_and_what_lives_stays(
    engine: Engine, plain: Handmade, tmp_path: Path
) -> None:
    prefix = temporary_prefix("weir-pruning", tmp_path)
    for name in (f"{prefix}{'0' * 16}", OF_ANOTHER):
        docker("tag", plain.name, name)
    done = prune(plain.name, "--tag", f"{OWN}/x:1", state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert temporary_names(engine, tmp_path) == []
    assert OF_ANOTHER in engine.tags("weir-pruning")


@pytest.mark.parametrize(
    "script",
    [
        "echo 'SMOKE {}'",
        "echo 'SMOKE [1]'",
        "echo 'SMOKE x'",
        "printf 'SMOKE \\033[2J'",
        "printf '\\033[2J'; exit 3",
    ],
    ids=["object", "list", "word", "escape", "failure"],
)
def test_an_original_that_answers_nonsense_is_copied_and_said_not_to_be_proved(
    tmp_path: Path, script: str
) -> None:
    made = load_image(f"{OWN}/liar:1", {}, python_that_is(script))
    done = prune(made.name, "--tag", f"{OWN}/liar:small", state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not proved" in done.stdout


@pytest.mark.parametrize("answer", ["echo 'SMOKE [1]'", "exit 1", GOOD.replace('"uid": 0', '"uid": 1')])
def test_a_copy_that_answers_otherwise_gets_no_name(engine: Engine, tmp_path: Path, answer: str) -> None:
    script = f"if [ -e /usr/lib/library/Kernels_gfx803.co ]; then {GOOD}; else {answer}; fi"
    made = load_image(f"{OWN}/liar:1", {}, python_that_is(script))
    done = prune(made.name, "--tag", f"{OWN}/liar:small", state=tmp_path)
    assert done.returncode == 4, done.stderr
    assert engine.inspect(f"{OWN}/liar:small") is None
    assert temporary_names(engine, tmp_path) == []


def test_a_copy_that_answers_alike_is_proved(tmp_path: Path) -> None:
    made = load_image(f"{OWN}/honest:1", {}, python_that_is(GOOD))
    done = prune(made.name, "--tag", f"{OWN}/honest:small", state=tmp_path)
    assert "torch 2 computes" in done.stdout, done.stderr


@pytest.fixture
def shell() -> Handmade:
    return load_image(f"{OWN}/shell:1", {"Volumes": {"/data": {}, "/tmp": {}}}, python_that_is("exit 0"))


def test_a_command_that_never_ends_is_stopped(engine: Engine, shell: Handmade) -> None:
    with pytest.raises(ProofFailed, match="more than 3 s"):
        engine.run(shell.name, ["/bin/sh", "-c", "while :; do :; done"], limits=RunLimits(seconds=3))


def test_a_flood_of_output_is_cut_to_its_end(engine: Engine, shell: Handmade) -> None:
    script = "i=0; while [ $i -lt 40000 ]; do echo $i 0123456789; i=$((i+1)); done; echo the end"
    ran = engine.run(shell.name, ["/bin/sh", "-c", script], limits=RunLimits(log_bytes=1 << 16, seconds=120))
    assert ran.exit_code == 0
    assert len(ran.stdout) <= 1 << 16
    assert ran.stdout.endswith("the end\n")


@pytest.mark.parametrize(
    "script",
    ["x=0123456789abcdef; while :; do x=$x$x; done", "bomb() { bomb | bomb & bomb; }; bomb"],
    ids=["memory", "processes"],
)
def test_memory_and_processes_of_a_hostile_image_are_limited(
    engine: Engine, shell: Handmade, script: str
) -> None:
    limits = RunLimits(memory_bytes=64 << 20, scratch_bytes=16 << 20, processes=20, seconds=4)
    try:
        assert engine.run(shell.name, ["/bin/sh", "-c", script], limits=limits).exit_code
    except ProofFailed as error:
        assert "more than 4 s" in str(error)  # noqa: PT017  either end is one


def test_a_hostile_image_writes_nothing_to_the_hosts_disk(engine: Engine, shell: Handmade) -> None:
    script = "for d in /data /usr /; do echo x > $d/f && echo wrote $d; done; echo x > /tmp/f && echo scratch"
    ran = engine.run(shell.name, ["/bin/sh", "-c", script])
    assert ran.stdout == "scratch\n"


def test_a_reader_of_facts_takes_what_a_container_said(engine: Engine) -> None:
    made = load_image(f"{OWN}/liar:1", {}, python_that_is("echo 'SMOKE {}'"))
    with pytest.raises(ToolError, match="smoke test"):
        proof.facts_of(engine.run(made.name, ["python3"]).stdout)
