"""What can go wrong around a build: wrong words, a full disk, an engine that dies, a person who stops it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container, ContainerCollection
from standins import ROOT, Index, Shop, make_torch, package_index

from buildtool.core import command
from buildtool.core.errors import Exit
from buildtool.engine.buildx import bake_plan
from buildtool.engine.client import Engine
from probes.core.files import sweep_partials

NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false")
SLOW = "FROM scratch AS rootfs\nADD rootfs.tar /\nFROM rootfs\nRUN --network=none sleep 120\n"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as found:
        make_torch(found.files, "9.1.0+cpu")
        found.refresh()
        yield found


@pytest.fixture
def shop(tmp_path: Path, index: Index) -> Shop:
    """A catalog whose image takes two minutes to build, on the cached root file system of `cpu`."""
    folder = tmp_path / "shop"
    (folder / "slow").mkdir(parents=True)
    (folder / "slow/Dockerfile").write_text(SLOW)
    made = Shop(folder)
    made.state.mkdir()
    (made.state / "rootfs").symlink_to(ROOT / ".weir/rootfs")
    text = (ROOT / "images/variants.yaml").read_text()
    bootstrap = text[text.index("      - bootstrap:") : text.index("    torch:")]
    made.write(
        "  standin:\n    summary: stand-in, slow to build\n    dockerfile: slow\n"
        f'    python: "3.11"\n    base:\n{bootstrap}    torch:\n'
        f'      - {{name: standin-index, build: cpu, require: ["torch==9.1.0+cpu"], index: "{index.url}"}}\n'
    )
    return made


def test_an_unknown_variant_is_a_usage_error(shop: Shop) -> None:
    done = shop.build("nonsense")
    assert done.returncode == Exit.USAGE
    assert "no variant 'nonsense'" in done.stderr
    assert "there are: standin" in done.stderr


def test_a_duplicate_key_is_a_usage_error(shop: Shop) -> None:
    with (shop.folder / "variants.yaml").open("a") as file:
        file.write("    summary: again\n")
    done = shop.build()
    assert done.returncode == Exit.USAGE
    assert "variants.standin.summary: this key occurs twice" in done.stderr


def test_a_nearly_full_disk_is_refused_before_anything_is_made(shop: Shop, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(small)], check=True)
    try:
        done = shop.build(WEIR_STATE=str(small / "state"))
        left = [p.name for p in small.rglob("*") if p.is_file()]
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == Exit.ENVIRONMENT
    assert "free; building standin may take" in done.stderr
    assert left == ["build.lock"]  # held by a build from its beginning on


@pytest.fixture
def second_engine() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """An engine of our own, to be killed, with all that it started and mounted."""
    folder = Path(tempfile.mkdtemp(prefix="weir-engine-"))
    socket = f"unix://{folder}/sock"
    places = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            # a network namespace of its own: `--bridge=none` removes docker0, and it must not be the host's
            ["unshare", "--net", "dockerd", "-H", socket, *places, *NO_NETWORK],
            stdout=log,
            stderr=log,
        )
    try:
        wait_for_engine(socket, folder / "log")
        yield socket, process
    finally:
        process.kill()
        process.wait()
        kill_all_that_mounts(str(folder))
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if str(folder) in line:
                subprocess.run(["umount", "-l", line.split()[1]], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def kill_all_that_mounts(folder: str) -> None:
    """containerd and the containers that outlived their engine: they see its folder in command or mounts."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            seen = (process / "mountinfo").read_text() if process.name != str(os.getpid()) else ""
            own = [line for line in seen.splitlines() if " / / " in line and folder in line]
            if own or folder.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def wait_for_engine(socket: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while subprocess.run(["docker", "-H", socket, "info"], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.3)


def start_and_wait_for_the_slow_step(shop: Shop, **environment: str) -> "subprocess.Popen[str]":
    # a test run in the background ignores SIGINT, and its children would with it
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *shop.command("--no-audit")],
        cwd=ROOT,
        env=shop.environment(**environment),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stderr
    for line in process.stderr:
        if "RUN --network=none sleep 120" in line:
            return process
    raise AssertionError("the build ended before its slow step")


def test_an_engine_that_dies_in_the_middle_is_named_as_the_cause(
    shop: Shop, second_engine: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    address, engine = second_engine
    process = start_and_wait_for_the_slow_step(shop, DOCKER_HOST=address)
    engine.kill()
    _, said = process.communicate(timeout=180)
    assert process.returncode == Exit.ENVIRONMENT, said
    assert "the engine stopped during the build" in said
    assert "Traceback" not in said
    assert shop.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_that_is_stopped_leaves_nothing_half_made(shop: Shop, number: signal.Signals) -> None:
    process = start_and_wait_for_the_slow_step(shop)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=180)
    assert process.returncode == Exit.INTERRUPTED, said
    assert "Traceback" not in said
    assert shop.leftovers() == []


@pytest.mark.parametrize("pause_s", [0.005, 0.5])
def test_a_second_signal_does_not_end_the_clean_up_after_the_first(shop: Shop, pause_s: float) -> None:
    process = start_and_wait_for_the_slow_step(shop)
    os.kill(process.pid, signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(pause_s)
        process.send_signal(number)
    _, said = process.communicate(timeout=180)
    assert process.returncode == Exit.INTERRUPTED, said
    assert "Traceback" not in said
    assert shop.leftovers() == []


STOPPABLE = """
from functools import partial
from buildtool.core import command, parallel
from probes.core.entry import interruptible

programs = [["sh", "-c", f"echo $$ > {i}.part; mv {i}.part {i}; sleep 300 & sleep 300"] for i in range(5)]
tasks = [partial(command.run, words) for words in programs]
with interruptible():
    parallel.run_parallel(tasks, workers=2, stop=command.stop_children)
"""


def test_a_stop_ends_programs_with_all_that_they_started_and_starts_no_queued_one(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[0-9]"))) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=180)
    assert "KeyboardInterrupt" in said
    started = list(tmp_path.glob("[0-9]"))
    assert len(started) == 2
    sessions = {path.read_text().strip() for path in started}
    wait_until(lambda: not sessions.intersection(sessions_of_living_processes()))


WRITER = """
import sys, time
from pathlib import Path
from buildtool.core.files import replacing, scratch

with scratch(Path(".")) as folder, replacing(Path("result")) as partial:
    (folder / "file").write_text("half")
    partial.write_text("half")
    print("writing", flush=True)
    time.sleep(300)
"""


def test_what_a_living_run_writes_is_left_alone_and_what_a_killed_one_left_is_swept(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    assert writer.stdout.readline() == "writing\n"
    sweep_partials(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    writer.kill()
    writer.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    sweep_partials(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_container_of_a_killed_run_is_removed_by_the_next_one(
    cached_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))  # for the next run of other tests isn't the next one here
    script = f"from buildtool.engine.client import Engine; Engine().run({cached_base!r}, ['sleep', '300'])"
    killed = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    wait_until(lambda: len(containers_of(cached_base)) == 1)
    killed.kill()
    killed.wait()
    assert len(containers_of(cached_base)) == 1
    assert Engine().run(cached_base, ["true"]).exit_code == 0
    assert containers_of(cached_base) == []


def test_a_container_that_an_interrupted_run_asked_for_is_removed(
    cached_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    create = ContainerCollection.create

    def create_and_interrupt(*arguments: Any, **settings: Any) -> Container:
        made = create(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # the engine's answer comes after the interrupt
        return made

    monkeypatch.setattr(ContainerCollection, "create", create_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            Engine().run(cached_base, ["true"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert containers_of(cached_base) == []


def test_a_container_that_somebody_else_removes_fails_no_run(cached_base: str) -> None:
    with Engine().held(cached_base, ["true"], {}) as container:
        subprocess.run(["docker", "rm", "-f", str(container.id)], check=True, capture_output=True)


BOOTSTRAP = """
import sys
from pathlib import Path
from buildtool.core.model import Bootstrap
from buildtool.build.rootfs import RootfsCache

RootfsCache(Path("cache"), lambda line: print(line, flush=True)).bring(Bootstrap("bookworm", ("tini",)), 1)
"""


def test_a_killed_bootstrap_leaves_no_mounts_and_no_processes(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout
    for line in killed.stdout:
        if "installing essential packages" in line:  # now /proc and /sys are mounted in there
            break
    killed.kill()
    killed.communicate()
    wait_until(lambda: not processes_that_name(str(tmp_path)))
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    sweep_partials(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def processes_that_name(text: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


@pytest.fixture
def cached_base(tmp_path: Path) -> Iterator[str]:
    """An image of the cached root file system of `cpu`, under a name of its own."""
    rootfs = next((ROOT / ".weir/rootfs").glob("bookworm-*.tar"))
    name = f"weir-test-{os.getpid()}:base"
    subprocess.run(["docker", "import", str(rootfs), name], check=True, capture_output=True)
    yield name
    Engine().remove_tag(name)


def containers_of(ref: str) -> list[str]:
    listing = ["docker", "ps", "-aq", "--filter", f"ancestor={ref}"]
    return subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def sessions_of_living_processes() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z":  # dead, and nobody has asked for its exit code
                yield session


def test_programs_whose_output_is_parsed_speak_english(monkeypatch: pytest.MonkeyPatch) -> None:
    """A German `apt-cache policy` says "Installationskandidat", which read as "no such package"."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    said = command.run(["sh", "-c", "echo $LC_ALL,$LANGUAGE"]).stdout
    assert said == "C,\n"
    lines: list[str] = []
    command.run_streaming(["sh", "-c", "echo $LC_ALL,$LANGUAGE"], progress=lines.append, env=dict(os.environ))
    assert lines == ["C,"]


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Docker CLI with settings of its own."""
    folder = tmp_path / "docker-config"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder


def test_the_context_that_the_cli_uses_is_used(
    docker_config: Path, second_engine: tuple[str, "subprocess.Popen[bytes]"]
) -> None:
    address, _ = second_engine
    here = Engine().info().root_dir
    for command_line in (
        ["docker", "context", "create", "second", f"--docker=host={address}"],
        ["docker", "context", "use", "second"],
    ):
        subprocess.run(command_line, check=True, capture_output=True)
    there = Engine().info().root_dir
    assert there != here
    assert there.startswith(str(Path(address.removeprefix("unix://")).parent))
    assert bake_one(docker_config, Engine())


def test_a_builder_that_the_user_chose_does_not_take_the_image_elsewhere(
    docker_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ["docker", "buildx", "create", "--name=elsewhere", "--driver=docker-container", "--use"]
    subprocess.run(create, check=True, capture_output=True)
    monkeypatch.setenv("BUILDX_BUILDER", "elsewhere")
    engine = Engine()
    assert bake_one(docker_config, engine)


def bake_one(folder: Path, engine: Engine) -> bool:
    """Build an image of one file; whether the engine has what was built."""
    context = folder / "context"
    context.mkdir()
    (context / "file").write_text("x")
    target = {"context": str(context), "dockerfile-inline": "FROM scratch\nCOPY file /\n"}
    tag = f"weir-test-{os.getpid()}:latest"
    baked = {"group": {"default": {"targets": ["one"]}}, "target": {"one": {**target, "tags": [tag]}}}
    try:
        digest = bake_plan(baked, engine=engine, progress=lambda _line: None)["one"]
        return engine.inspect(digest) is not None
    finally:
        engine.remove_tag(tag)


BECOME_NOBODY = """
import os
from buildtool.engine.client import Engine

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
Engine()
"""


def test_an_engine_that_we_may_not_use_says_so() -> None:
    command_line = [sys.executable, "-c", BECOME_NOBODY]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "EngineForbidden: permission denied on unix:///var/run/docker.sock" in done.stderr, done.stderr


def test_no_engine_at_all_gives_the_next_step(shop: Shop) -> None:
    done = shop.build(DOCKER_HOST="unix:///nowhere/docker.sock", PATH="/nowhere")
    assert done.returncode == Exit.ENVIRONMENT
    assert "no Docker engine answers" in done.stderr
