"""Images without an engine: one digest everywhere, read by others, pushed, killed, as squashfs and as conda.

Run by `make bench-layout`, as root, on Debian; it installs nothing. What a bar needs and isn't here is waived
with the reason: apt-get install podman skopeo umoci buildah charliecloud bubblewrap squashfs-tools
docker-registry. The `cpu` image is the one of the last `make images`: its inputs are taken from the caches.

Cases of the digest are drawn before the first run, by the rule of `cases`: every value of every setting, and
as many cases as that takes. Rounds of killed runs are drawn by `--seed`.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/docker"), str(ROOT / "tests/bench")]

from board import Board, tell  # noqa: E402
from layout_pull import pull_bars  # noqa: E402

from buildtool.build import catalog, pipeline, plan, publish  # noqa: E402
from buildtool.build.lockfile import Lock  # noqa: E402
from buildtool.build.runtimes import unpack  # noqa: E402
from buildtool.build.workplace import Workplace  # noqa: E402
from buildtool.core.errors import ToolError  # noqa: E402
from buildtool.core.model import (  # noqa: E402
    Bootstrap,
    PinnedBase,
    Resolved,
    TorchBuild,
    TorchSource,
    Variant,
    Wheel,
)
from buildtool.engine import proof  # noqa: E402
from buildtool.engine.reference import parse_new_name  # noqa: E402
from buildtool.engine.registry_api import MANIFESTS  # noqa: E402
from buildtool.image.written import WrittenImage, archive_chunks  # noqa: E402

PLAIN_USER = 65534
UMASKS = (0o022, 0o077, 0o000, 0o027)
LOCALES = ("C", "C.UTF-8", "de_DE.ISO-8859-1")
ZONES = ("UTC", "Pacific/Kiritimati")
ABSENT = "unix:///absent.sock"  # an engine's address at which none answers
SMOKE = ["python3", "-B", "/opt/weir/app/smoke.py"]
ROUNDS = 50


@dataclass(frozen=True)
class Case:
    """Where and as whom one image is written."""

    umask: int
    locale: str
    zone: str
    user: int
    place: str
    python: str


def cases(pythons: Sequence[str], n_cases: int) -> list[Case]:
    """The first of twelve cases; six hold every value of every setting, twelve most pairs of them."""
    return [
        Case(
            UMASKS[n % 4], LOCALES[n % 3], ZONES[n // 2 % 2], (0, PLAIN_USER)[n // 3 % 2],
            ("/var/tmp", "/dev/shm/some other place")[n % 2], pythons[n // 2 % len(pythons)],
        )
        for n in range(n_cases)
    ]  # fmt: skip


def cpu_plan(workplace: Workplace) -> plan.BuildPlan:
    """The plan of `cpu` from the lock; nothing is fetched."""
    loaded = catalog.load()
    [variant] = loaded.select(("cpu",))
    resolved = Lock.load(workplace.lock).get(variant)
    if resolved is None:
        raise SystemExit("the inputs of cpu aren't locked: make images VARIANTS=cpu")
    return plan.BuildPlan((workplace.image(variant, resolved),), loaded.source_date_epoch)


def write_cpu(workplace: Workplace) -> WrittenImage:
    with workplace.alone():
        return pipeline.write(workplace, cpu_plan(workplace))["cpu"]


def usual() -> Workplace:
    return Workplace(ROOT / ".weir", ROOT / "images/variants.lock.json", lambda _line: None)


def lend(state: Path, owner: int) -> None:
    """A state directory with the inputs of `cpu`, as links where that is possible."""
    here = usual()
    [image] = cpu_plan(here).images
    files = [here.wheels.path(wheel) for wheel in image.resolved.wheels]
    files.append(here.rootfs_of(image, catalog.load().source_date_epoch) or Path())
    for file in files:
        target = state / file.relative_to(here.state)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    shutil.copyfile(here.lock, state / "lock.json")
    for path in (state, *state.rglob("*")):
        os.chown(path, owner, owner)


def run_case(case: Case) -> str:
    Path(case.place).mkdir(exist_ok=True)
    above = Path(tempfile.mkdtemp(prefix="weir-layout-", dir=case.place))
    above.chmod(0o755)
    try:
        lend(above / "state", case.user)
        shell = f'umask {case.umask:04o}; exec "$@"'
        user = ["setpriv", f"--reuid={case.user}", f"--regid={case.user}", "--clear-groups"]
        words = [*user, "sh", "-c", shell, "sh", case.python, __file__, "--make", str(above / "state")]
        taste = {
            "LC_ALL": case.locale,
            "TZ": case.zone,
            "HOME": "/nonexistent",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        kept = {name: value for name, value in os.environ.items() if name == "PATH"}
        done = subprocess.run(words, env={**kept, **taste}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case}:\n{done.stderr[-2000:]}")
        return done.stdout.strip()
    finally:
        shutil.rmtree(above)


def pythons(folder: Path) -> list[str]:
    """This Python, and environments with the same packages of others that are installed here."""
    found = []
    for name in (
        "/usr/bin/python3",
        *map(str, sorted(Path("/root/.pyenv/versions").glob("3.1[2-9]*/bin/python"))),
    ):
        place = folder / f"python-{len(found)}"
        made = subprocess.run([name, "-m", "venv", "--copies", str(place)], capture_output=True, check=False)
        if made.returncode:
            continue
        needs = ["installer", "jsonschema", "pyyaml", "tabulate", "docker", "shtab", "backports.zstd"]
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", *needs]
        if subprocess.run(pip, capture_output=True, check=False).returncode == 0:
            found.append(str(place / "bin/python"))
        if len(found) == 2:
            break
    return found


def digest_bars(board: Board, n_cases: int = 12) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-pythons-") as name:
        Path(name).chmod(0o755)
        others = pythons(Path(name))
        usable = [p for p in others if plain_user_can(p)]
        drawn = [
            replace(c, python=c.python if c.user == 0 or c.python in usable else usable[0])
            for c in cases(others, n_cases)
        ]
        digests = {}
        for case in drawn:
            digests[case] = run_case(case)
            tell(f"{case}: {digests[case][:19]}")
    versions = sorted({subprocess_version(p) for p in others}) if others else []
    board.bar(
        "same digest", len({*digests.values()}), 1, "digests", cases=len(drawn), pythons=len(others),
        umasks=4, locales=3, zones=2, users=2, versions=versions,
    )  # fmt: skip


def subprocess_version(python: str) -> str:
    return Path(python).parent.parent.name


def plain_user_can(python: str) -> bool:
    words = ["setpriv", f"--reuid={PLAIN_USER}", f"--regid={PLAIN_USER}", "--clear-groups", python, "-c", "1"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


# ---- read by others


@dataclass(frozen=True)
class Layout:
    """The cpu image as a layout of its own."""

    path: Path
    image: WrittenImage
    stored_bytes: int


@contextlib.contextmanager
def layout_of_cpu() -> Iterator[Layout]:
    here = usual()
    image = write_cpu(here)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-layout-") as name:
        target = Path(name) / "oci"
        here.layers.copy(image, "cpu", target)
        yield Layout(target, image, sum(layer.n_bytes for layer in image.layers))


def program(words: Sequence[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=900
    )


def warned(done: "subprocess.CompletedProcess[str]") -> int:
    """Lines of warnings and errors that a program printed."""
    lines = (done.stdout + done.stderr).lower().splitlines()
    return sum("warn" in line or "error" in line for line in lines)


def reader_bars(board: Board) -> None:
    with layout_of_cpu() as layout, tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-read-") as name:
        folder, source = Path(name), f"oci:{layout.path}:cpu"
        own = [f"--root={folder}/store", f"--runroot={folder}/run", "--storage-driver=vfs"]
        tree = folder / "tree"
        tree.mkdir()
        unpack(layout.image, usual().layers, tree)
        reads = {
            "skopeo": [["skopeo", "copy", source, f"dir:{folder}/skopeo"]],
            "podman": [["podman", *own, "pull", "-q", source]],
            "buildah": [["buildah", *own, "from", "--name", "weir", source]],
            # 0.4.7 of Debian 12 reads no zstd: the same image by `weir build --compression gzip`
            "umoci": [["umoci", "unpack", "--image", f"{in_gzip(folder)}:cpu", f"{folder}/umoci"]],
            "charliecloud": [
                ["ch-run", "--unset-env=*", *ch_environment(layout.image), str(tree), "--", *SMOKE]
            ],
        }
        for reader, commands in reads.items():
            if missing := [words[0] for words in commands if not shutil.which(words[0])]:
                board.waive(f"read by {reader}", f"not installed: {', '.join(missing)}")
                continue
            codes, warnings, words_said = [], 0, ""
            for words in commands:
                done = program(words, USER="root")
                codes.append(done.returncode)
                warnings += warned(done)
                words_said = (done.stdout + done.stderr)[-300:]
            failed = sum(map(bool, codes))
            board.bar(
                f"read by {reader}",
                failed + warnings,
                0,
                "failures and warnings",
                said=words_said if failed else "",
            )
        run_in_podman(board, own, layout)
        for store in ("containerd", "classic"):
            engine_bar(board, store, layout, folder)


def in_gzip(folder: Path) -> Path:
    """The cpu image as a layout with gzip."""
    here = replace(usual(), compression="gzip")
    here.layers.copy(write_cpu(here), "cpu", folder / "gzip")
    return folder / "gzip"


def ch_environment(image: WrittenImage) -> list[str]:
    return [f"--set-env={text}" for text in json.loads(image.config)["config"]["Env"]]


def run_in_podman(board: Board, own: Sequence[str], layout: Layout) -> None:
    if not shutil.which("podman"):
        return
    done = program(["podman", *own, "images", "-q", "--no-trunc"])
    if not done.stdout.split():
        board.waive("run by podman", "it holds no image")
        return
    ran = program(
        ["podman", *own, "run", "--rm", "--network=none", "--ulimit=host", done.stdout.split()[0], *SMOKE]
    )
    if proof.MARK in ran.stdout:
        board.bar("run by podman", warned(ran), 0, "warnings")
    else:
        board.waive("run by podman", ran.stderr.strip()[-200:])


def engine_bar(board: Board, store: str, layout: Layout, folder: Path) -> None:
    """Load and run in an engine of our own with this image store."""
    place = folder / f"engine-{store}"
    place.mkdir()
    settings = place / "daemon.json"
    settings.write_text(json.dumps({"features": {"containerd-snapshotter": store == "containerd"}}))
    socket = f"unix://{place}/sock"
    places = [f"--data-root={place}/data", f"--exec-root={place}/exec", f"--pidfile={place}/pid"]
    quiet = ["--bridge=none", "--iptables=false", "--ip6tables=false", f"--config-file={settings}"]
    with (place / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["unshare", "--net", "dockerd", "-H", socket, *places, *quiet], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while program(["docker", "-H", socket, "info"]).returncode and time.monotonic() < deadline:
            time.sleep(0.3)
        begun = time.monotonic()
        chunks = archive_chunks(layout.image, "docker.io/library/t-layout:1", usual().layers.content)
        load = subprocess.Popen(
            ["docker", "-H", socket, "load", "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert load.stdin
        with contextlib.suppress(BrokenPipeError):
            for chunk in chunks:
                load.stdin.write(chunk)
        said, _ = load.communicate()
        seconds = time.monotonic() - begun
        ran = program(["docker", "-H", socket, "run", "--rm", "--network=none", "t-layout:1", *SMOKE])
        failed = load.returncode + (proof.MARK not in ran.stdout) + warned(ran) + said.lower().count(b"warn")
        board.bar(
            f"read by docker, {store} store",
            failed,
            0,
            "failures and warnings",
            load_s=round(seconds, 1),
            said=ran.stderr[-200:],
        )
    finally:
        daemon.terminate()
        daemon.wait()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if str(place) in line:
                subprocess.run(["umount", "-l", line.split()[1]], check=False, capture_output=True)


# ---- registries


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    from standins import registry as debians

    folder.mkdir(parents=True, exist_ok=True)
    with debians(folder) as address:
        yield address


def push_bars(board: Board) -> None:
    here = usual()
    image = write_cpu(here)
    pushed_bytes: list[str] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-push-") as name:
        folder = Path(name)
        pushed = publish.Pushed(folder / "pushed")
        with registry(folder / "registry") as host:

            def push(one: WrittenImage, ref: str) -> tuple[float, str]:
                begun = time.monotonic()
                publish.push(
                    one,
                    parse_new_name(f"{host}/{ref}"),
                    store=here.layers,
                    pushed=pushed,
                    progress=pushed_bytes.append,
                )
                return time.monotonic() - begun, pushed_bytes[-1]

            first, _ = push(image, "team/cpu:1")
            again, said_again = push(image, "team/cpu:2")
            elsewhere, said_elsewhere = push(image, "other/cpu:1")
            changed = with_other_service(here, image)
            after_change, said_change = push(changed, "team/cpu:3")
    board.figure("push: everything", first, "s")
    moved = sum(
        f"sent 0 B in 0 blobs, {len(image.layers) + 1} were there" in said
        for said in (said_again, said_elsewhere)
    )
    moved += f"{len(image.layers) + 1} of them in another repository" in said_elsewhere
    moved += f"in 2 blobs, {len(image.layers) - 1} were there" in said_change
    board.bar("a push moves only missing blobs", moved, 4, "pushes of 4 facts", at_least=True,
              again_s=round(again, 2), mounted_s=round(elsewhere, 2),
              changed_service_s=round(after_change, 2))  # fmt: skip


def with_other_service(here: Workplace, image: WrittenImage) -> WrittenImage:
    """The image with another last layer."""
    from buildtool.image.layer_writer import TarMembers
    from buildtool.image.written import written_image

    def make(layer: object) -> object:
        members = TarMembers(layer, 1)  # type: ignore[arg-type]
        members.file("opt/weir/app/changed", 1, [b"x"])
        return members.end()

    layer, _ = here.layers.bring(here.layers.key("bench", time.time()), make)  # type: ignore[arg-type]
    config = json.loads(image.config)
    made = written_image(config, [*image.layers[:-1], layer], config["history"])
    here.layers.put(made)
    return made


# ---- squashfs, conda, without an engine


def squashfs_bars(board: Board) -> None:
    from buildtool.build import squashfs

    here = usual()
    image = write_cpu(here)
    stored = sum(layer.n_bytes for layer in image.layers)
    if not shutil.which(squashfs.PROGRAM):
        board.waive("sqsh", f"not installed: {squashfs.PROGRAM}")
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-sqsh-") as name:
        seconds, digests = [], set()
        for number in range(3):
            target = Path(name) / f"{number}.sqsh"
            begun = time.monotonic()
            squashfs.write_squashfs(image, target, store=here.layers, epoch=1, progress=tell)
            seconds.append(time.monotonic() - begun)
            digests.add(hashlib.sha256(target.read_bytes()).hexdigest())
        board.bar(
            "sqsh: bytes over the OCI image's", target.stat().st_size / stored, 1.15, "of the stored bytes"
        )
        board.bar("sqsh: after the layers", sorted(seconds)[1], 10, "s", each=[round(s, 1) for s in seconds])
        board.bar("sqsh: one file", len(digests), 1, "digests", of=3)
        if shutil.which("ch-run"):
            ran = program(
                ["ch-run", "--unset-env=*", *ch_environment(image), str(target), "--", *SMOKE], USER="root"
            )
            board.bar(
                "sqsh: runs in ch-run",
                int(proof.MARK in ran.stdout),
                1,
                "runs",
                at_least=True,
                said=ran.stderr[-200:],
            )
        else:
            board.waive("sqsh: runs in ch-run", "not installed: charliecloud")
        listed = program(["unsquashfs", "-cat", str(target), "etc/rc"])
        board.bar(
            "sqsh: enroot's files", int("exec python3 -m service" in listed.stdout), 1, "files", at_least=True
        )
    for runtime in ("enroot", "apptainer"):
        if not shutil.which(runtime):
            board.waive(f"sqsh: runs in {runtime}", "Debian has no package of it")


def conda_bar(board: Board) -> None:
    from buildtool.build.conda import environment_text

    here = usual()
    [image] = cpu_plan(here).images
    text = environment_text(image.variant, image.resolved)
    lines = [
        json.loads(line.strip().removeprefix("- ")) for line in text.partition("- pip:\n")[2].splitlines()
    ]
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-conda-") as name:
        python = Path(name) / "env/bin/python"
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        install = program([str(python), "-m", "pip", "install", "-q", *lines])
        everything = program([str(python), "-m", "pip", "freeze", "--all"]).stdout.split()
        frozen = [row for row in everything if not row.startswith("pip==")]
        root = Path(name) / "root"
        root.mkdir()
        unpack(write_cpu(here), here.layers, root)
        held = [
            f"{each.name}=={each.version}"
            for each in importlib.metadata.distributions(path=[str(root / "opt/weir/lib")])
        ]

    def alike(rows: Sequence[str]) -> set[str]:
        return {row.lower().replace("_", "-").replace(".", "-") for row in rows}

    different = alike(frozen) ^ alike(held)
    board.bar(
        "conda: the two freezes",
        len(different),
        0,
        "packages that differ",
        packages=len(held),
        differ=sorted(different),
        pip=install.returncode,
    )
    if not shutil.which("conda") and not shutil.which("micromamba"):
        board.waive(
            "conda: an environment by conda itself",
            "no conda and no channel of it can be reached here; its pip section was installed by pip",
        )


def without_engine_bars(board: Board) -> None:
    """`weir build cpu` by a plain user in a container without docker: bubblewrap over this host's files."""
    if not shutil.which("bwrap"):
        board.waive("without engine, without root", "not installed: bubblewrap")
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-plain-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        lend(folder / "state", PLAIN_USER)
        (folder / "out").mkdir()
        os.chown(folder / "out", PLAIN_USER, PLAIN_USER)
        python = pythons(folder)[0]
        inside = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--tmpfs",
            "/run",
        ]
        inside += [
            "--ro-bind",
            "/dev/null",
            shutil.which("docker") or "/dev/null",
            "--bind",
            str(folder),
            str(folder),
            "--tmpfs",
            "/tmp",
        ]
        user = ["setpriv", f"--reuid={PLAIN_USER}", f"--regid={PLAIN_USER}", "--clear-groups"]
        env = {
            "WEIR_STATE": str(folder / "state"),
            "WEIR_LOCK": str(folder / "state/lock.json"),
            "HOME": "/nonexistent",
            "USER": "nobody",
        }
        build = [python, "-m", "buildtool", "build", "cpu", "--reports", str(folder / "out/reports")]
        build += ["--layout", str(folder / "out/oci"), "--sqsh", str(folder / "out/cpu.sqsh")]
        begun = time.monotonic()
        done = subprocess.run(
            [*user, *inside, "--chdir", str(ROOT), *build],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begun
        made = [path for path in (folder / "out/oci/index.json", folder / "out/cpu.sqsh") if path.is_file()]
        board.bar("without engine, without root", len(made), 2, "files", at_least=True,
                  seconds=round(seconds, 1),
                  exit=done.returncode, said=done.stderr[-300:] if done.returncode else "",
                  proof="not proved" if "not proved" in done.stdout else "proved")  # fmt: skip
        board.figure("without engine: layout and squashfs", seconds, "s")
        if made:
            stored = sum(p.stat().st_size for p in (folder / "out/oci/blobs/sha256").iterdir())
            board.figure("without engine: layout", stored, "bytes")


# ---- killed and full


def tiny(state: Path, dice: random.Random) -> tuple[Workplace, plan.BuildPlan]:
    """A state directory with a wheel of 30 MB and a root file system, and the plan of an image of them."""
    recipe = Bootstrap("bookworm", ("python3",))
    variant = Variant("tiny", "s", "3.11", (recipe,), (TorchSource("host-pip", TorchBuild.CPU),))
    workplace = Workplace(state, state / "lock.json", lambda _line: None)
    from standins import make_wheel

    made = make_wheel(
        state / "tmp", "big", "1.0", {f"big/{n}.py": dice.randbytes(400_000).hex() for n in range(40)}
    )
    data = made.read_bytes()
    wheel = Wheel(made.name, hashlib.sha256(data).hexdigest(), len(data))
    cached = workplace.wheels.path(wheel)
    cached.parent.mkdir(parents=True, exist_ok=True)
    made.replace(cached)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("./etc/passwd")
        tar.addfile(info)
    rootfs = workplace.rootfs.path(recipe, 1)
    rootfs.parent.mkdir(parents=True, exist_ok=True)
    rootfs.write_bytes(out.getvalue())
    base = PinnedBase("bootstrap", "bookworm", hashlib.sha256(out.getvalue()).hexdigest())
    resolved = Resolved("tiny", "", "host-pip", TorchBuild.CPU, "3.11", base, (wheel,))
    return workplace, plan.BuildPlan((plan.ImagePlan(variant, resolved, state / "context"),), 1)


def half_written(state: Path) -> list[str]:
    """Blobs and documents under a final name that aren't whole."""
    found = []
    for blob in (state / "layout/blobs/sha256").glob("*"):
        if hashlib.sha256(blob.read_bytes()).hexdigest() != blob.name:
            found.append(str(blob))
    for document in [*(state / "layers").glob("*.json"), *state.glob("layout/index.json")]:
        try:
            json.loads(document.read_text())
        except ValueError:
            found.append(str(document))
    return found


def forked(action: Callable[[], object]) -> int:
    """Start an action in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        action()
        code = 0
    except BaseException:
        code = 3
    finally:
        os._exit(code)


def kill_after(action: Callable[[], object], seconds: float) -> int:
    child = forked(action)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def trouble_bars(board: Board, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    clean = recovered = 0
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-killed-") as name:
        folder = Path(name)
        place, made = tiny(folder / "state", dice)

        def build() -> WrittenImage:
            place.sweep()
            with place.alone(), place.layers.in_use():
                image = pipeline.write(place, made, anew=True)["tiny"]
                pipeline.keep(place, {"tiny": image}, {"tiny": None})
                place.layers.copy(image, "tiny", folder / "out")
            return image

        begun = time.monotonic()
        whole = build()
        usual_s = time.monotonic() - begun
        n_builds = rounds * 2 // 5
        for _ in range(n_builds):
            kill_after(build, dice.uniform(0, usual_s))
            torn = half_written(place.state) + half_written_layout(folder / "out")
            clean += not torn
            recovered += build().digest == whole.digest and not list(place.state.rglob(".weir-*.partial"))
        n_full = rounds // 10
        for n in range(n_full):
            clean += full_disk_build(folder / f"full-{n}", dice)
            recovered += 1
        n_pushes = rounds - n_builds - n_full
        ended, through = killed_pushes(folder, place, whole, n_pushes, dice)
        clean += ended
        recovered += through
    tell(f"seed {seed}: {n_builds} builds killed, {n_full} on a full disk, {n_pushes} pushes killed or full")
    board.bar("nothing half-written", clean, rounds, "rounds", at_least=True, seed=seed)
    board.bar("the next run succeeds", recovered, rounds, "rounds", at_least=True)


def half_written_layout(path: Path) -> list[str]:
    if not path.exists():
        return []
    names = {p.name for p in (path / "blobs/sha256").iterdir()}
    [row] = json.loads((path / "index.json").read_text())["manifests"]
    manifest = json.loads((path / "blobs/sha256" / row["digest"][7:]).read_text())
    wanted = {
        row["digest"][7:],
        manifest["config"]["digest"][7:],
        *(each["digest"][7:] for each in manifest["layers"]),
    }
    return [str(path)] if names != wanted else []


def full_disk_build(folder: Path, dice: random.Random) -> int:
    """1 where a build on a disk of too few bytes left nothing under a final name that isn't whole."""
    folder.mkdir()
    size = dice.randrange(34, 44) << 20
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        place, made = tiny(folder / "state", dice)
        try:
            pipeline.write(place, made)
        except ToolError as error:
            said = error.message
        else:
            said = "it fitted"
        return int(not half_written(place.state) and ("no space left" in said or said == "it fitted"))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def killed_pushes(
    folder: Path, place: Workplace, image: WrittenImage, rounds: int, dice: random.Random
) -> tuple[int, int]:
    """Rounds after which the registry had the tag whole or not at all, and in which the next push worked.

    Every third registry has its storage on a disk that is full before the image is there.
    """
    ended = through = 0
    begun = time.monotonic()
    for n in range(rounds):
        store = folder / f"registry-{n}"
        store.mkdir()
        full = n % 3 == 2
        if full:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(store)], check=True)
        try:
            with registry(store) as host:
                name = parse_new_name(f"{host}/team/tiny:1")
                pushed = publish.Pushed(folder / f"pushed-{n}")
                quiet: Callable[[str], None] = [].append
                push = partial(publish.push, image, name, store=place.layers, pushed=pushed, progress=quiet)
                if full:
                    os.waitpid(forked(push), 0)
                else:
                    kill_after(push, dice.uniform(0, 1.5))
                ended += tag_is_whole(host, image)
                if full:
                    subprocess.run(["mount", "-o", "remount,size=200m", str(store)], check=True)
                push()
                through += tag_is_whole(host, image, must=True)
        finally:
            if full:
                subprocess.run(["umount", "-l", str(store)], check=False)
            shutil.rmtree(store, ignore_errors=True)
    tell(f"{rounds} pushes in {time.monotonic() - begun:.0f} s")
    return ended, through


def tag_is_whole(host: str, image: WrittenImage, *, must: bool = False) -> int:
    """1 where the tag names nothing (unless it `must`), or the image with all its blobs."""
    import requests

    answer = requests.get(
        f"http://{host}/v2/team/tiny/manifests/1", timeout=30, headers={"Accept": ", ".join(MANIFESTS)}
    )
    if answer.status_code == 404:
        return int(not must)
    digests = [image.config_digest, *(layer.digest for layer in image.layers)]
    heads = [requests.head(f"http://{host}/v2/team/tiny/blobs/{d}", timeout=30).status_code for d in digests]
    return int(answer.content == image.manifest and set(heads) == {200})


GROUPS: dict[str, Callable[[Board], None]] = {
    "digest": digest_bars,
    "readers": reader_bars,
    "push": push_bars,
    "squashfs": squashfs_bars,
    "conda": conda_bar,
    "pull": lambda board: pull_bars(board, write_cpu(usual()), usual().layers, registry),
    "without-engine": without_engine_bars,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, "trouble"], default=[*GROUPS, "trouble"])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of killed runs (default: 50)")
    few = "of the digest, six at least (default: 12)"
    parser.add_argument("--cases", type=int, default=12, choices=range(6, 13), metavar="N", help=few)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--make", metavar="STATE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        state = Path(args.make)
        print(write_cpu(Workplace(state, state / "lock.json", lambda _line: None)).digest)
        return 0
    board = Board(whole=args == parser.parse_args([]))
    for group in args.only:
        if group == "trouble":
            trouble_bars(board, args.rounds, args.seed)
        elif group == "digest":
            digest_bars(board, args.cases)
        else:
            GROUPS[group](board)
    board.waive("cuda variant", "needs an NVIDIA GPU: tests/device/run_cuda_variant.sh")
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
