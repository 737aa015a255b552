"""Observed runs, slim images and the least privilege, on the `cpu` image: `make bench-observe`, as root.

What is run, written down before the first run: the service with each dtype on random weights (each kind
of request once), with two mounted models and `model_control` (each kind 10 times), the probes' quick run,
and the proof of images; all of it twice. Left-out modules that are imported: twenty, evenly spaced in their
sorted list. Planted needs: `NEEDS`. The image is `cpu` of the last `make images` under a name of its own.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/docker")]

from board import RUNS, Board, tell  # noqa: E402
from test_compose import SHAPES, write_model  # noqa: E402

from buildtool.engine.client import Engine  # noqa: E402
from buildtool.engine.served import Started, served  # noqa: E402
from buildtool.keep.keep_list import read_keep_list  # noqa: E402
from buildtool.observe.fanotify import Fanotify  # noqa: E402
from buildtool.observe.runs import run_program  # noqa: E402

KEEP = ROOT / "images/cpu.keep"
WEIR = str(ROOT / ".venv/bin/weir")
WORKLOAD = f"{sys.executable} {ROOT}/tests/bench/observe_workload.py"
CAPS = ["NET_ADMIN", "SYS_TIME", "SYS_NICE", "SYS_ADMIN", "IPC_LOCK"]
# name -> user, what the service does, what it must be found to need: parts of grants in compose's words
NEEDS: dict[str, tuple[str, str, set[str]]] = {
    "chown": ("0", "open('/dev/shm/x','w');os.chown('/dev/shm/x',5,5)", {"CHOWN"}),
    "fowner": ("0", "os.chmod('/data/theirs',0o600)", {"FOWNER", ":/data"}),
    "dac-override": ("0", "open('/data/theirs').read()", {"DAC_OVERRIDE", ":/data"}),
    "setuid": ("0", "os.setuid(5)", {"SETUID"}),
    "setgid": ("0", "os.setgid(5)", {"SETGID"}),
    "kill": (
        "0",
        "p=os.fork();p or (os.setuid(5),time.sleep(9),os._exit(0));time.sleep(.5);os.kill(p,9);"
        "sys.exit(os.waitpid(p,0)[1]!=9)",
        {"KILL", "SETUID"},
    ),
    "net-raw": ("0", "socket.socket(2,3,1)", {"NET_RAW"}),
    "chroot": ("0", "os.chroot('/usr')", {"SYS_CHROOT"}),
    "mknod": ("0", "os.mknod('/dev/shm/n',0o20600,os.makedev(1,3))", {"MKNOD"}),
    "setpcap": ("0", "sys.exit(ctypes.CDLL(None).prctl(24,0,0,0,0)!=0)", {"SETPCAP"}),
    "net-admin": ("0", "socket.socket(2,2).setsockopt(1,33,1)", {"NET_ADMIN"}),
    "nice": ("0", "os.setpriority(0,0,-5)", {"SYS_NICE"}),
    "sys-admin": ("0", "socket.sethostname('other')", {"SYS_ADMIN"}),
    "ipc-lock": (
        "0",
        "import resource as r;r.setrlimit(r.RLIMIT_MEMLOCK,(4096,4096));import mmap;m=mmap.mmap(-1,1<<22);"
        "sys.exit(ctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(m)),1<<22)!=0)",
        {"IPC_LOCK"},
    ),
    "device": ("0", "os.close(os.open('/dev/fuse',os.O_RDWR))", {"/dev/fuse"}),
    "group": ("10001", "open('/data/group').read()", {"group_add: 4321", ":/data"}),
    "tmpfs": ("10001", "open('/scratch/x','w')", {"tmpfs: /scratch"}),
    "mount": ("10001", "open('/data/all').read()", {":/data"}),
    "writable": ("0", "open('/written','w')", {"read_only: false"}),
    "host-pids": ("10001", "sys.exit(os.getpid()==1)", {"pid: host"}),
}


def weir(*words: str, folder: Path) -> str:
    """What a command prints; the whole of it is shown where it fails."""
    done = subprocess.run([WEIR, *words], capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"weir {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def catalog_of(folder: Path, name: str) -> Path:
    """The catalog with `cpu` under a name of its own, and its locked inputs."""
    text = (ROOT / "images/variants.yaml").read_text()
    path = folder / "variants.yaml"
    path.write_text(
        text.replace("\n  cpu:\n", f"\n  {name}:\n").replace("default: [cpu, rocm]", f"default: [{name}]")
    )
    lock = json.loads((ROOT / "images/variants.lock.json").read_text())
    lock["variants"] = {name: {**lock["variants"]["cpu"], "variant": name}}
    (folder / "variants.lock.json").write_text(json.dumps(lock))
    return path


def profiles_of(folder: Path) -> tuple[Path, Path]:
    """Directories of profiles and of models."""
    profiles, models = folder / "profiles", folder / "models"
    profiles.mkdir()
    for name, lines in {
        "float32": "device: cpu\n",
        "bfloat16": "device: cpu\ndtype: bfloat16\n",
        "float16": "device: cpu\ndtype: float16\n",
        "control": "device: cpu\nmodel_control: true\n",
    }.items():
        (profiles / f"application-{name}.yaml").write_text(lines)
    for name in ("one", "two"):
        (models / name).mkdir(parents=True)
        write_model(models / name, SHAPES)
    for path in (folder, profiles, models, *profiles.iterdir()):
        path.chmod(0o755)
    return profiles, models


class Bench:
    """All parts, in order."""

    def __init__(self, board: Board, folder: Path, name: str) -> None:
        self.board, self.folder, self.name = board, folder, name
        self.ref = f"weir/{name}:latest"
        self.catalog = catalog_of(folder, name)
        self.profiles, self.models = profiles_of(folder)
        self.whole = self.build()

    def build(self, *more: str) -> tuple[str, int, int]:
        """Build; the digest, unpacked and stored bytes."""
        reports = self.folder / "reports"
        said = weir(
            "build",
            self.name,
            "--catalog",
            str(self.catalog),
            "--reports",
            str(reports),
            *more,
            folder=self.folder,
        )
        tell(said.splitlines()[-1])
        report = json.loads((reports / f"{self.name}.json").read_text())
        built = json.loads((reports / f"{self.name}.build.json").read_text())
        totals = report["totals"]
        return built["image"]["digest"], totals["unpacked_bytes"], totals["stored_bytes"]

    def random_weights(self) -> list[str]:
        """Options of the runs with random weights: one for each dtype."""
        profiles = [f"--env=APP_PROFILE={name}" for name in ("float32", "bfloat16", "float16")]
        return ["--env=WEIR_PROFILES_DIR=/profiles", *profiles, f"--volume={self.profiles}:/profiles:ro"]

    def mounted(self) -> list[str]:
        """Options of the run with mounted models."""
        named = [
            "--env=WEIR_PROFILES_DIR=/profiles",
            "--env=APP_PROFILE=control",
            "--env=WEIR_MODEL_DIR=/models",
        ]
        return [*named, f"--volume={self.profiles}:/profiles:ro", f"--volume={self.models}:/models:ro"]

    def observe(self, keep: Path) -> None:
        """All observed runs, merged into one list."""
        to = ["observe", "--keep", str(keep)]
        weir(*to, "--workload", f"{WORKLOAD} --each 1", *self.random_weights(), self.ref, folder=self.folder)
        weir(*to, "--workload", f"{WORKLOAD} --each 10", *self.mounted(), self.ref, folder=self.folder)
        weir(
            *to,
            self.ref,
            "--",
            "python3",
            "-m",
            "probes",
            "run",
            "--quick",
            "--out",
            "/tmp",
            folder=self.folder,
        )
        weir(*to, self.ref, "--", "python3", "-m", "probes", "--help", folder=self.folder)  # of each verb
        weir(*to, self.ref, "--", "python3", "-B", "/opt/weir/app/smoke.py", folder=self.folder)

    def lists(self) -> None:
        """Two keep-lists of the same runs."""
        one_path, other = RUNS / "cpu.keep", self.folder / "other.keep"
        one_path.unlink(missing_ok=True)
        for path in (one_path, other):
            tell(f"observing into {path.name}")
            self.observe(path)
        one, two = (read_keep_list(path).lines for path in (one_path, other))
        differing = sorted(one ^ two)
        self.board.bar(
            "files in one of two keep-lists of the same runs alone",
            len(differing),
            0,
            "files",
            named=differing[:20],
        )
        self.board.figure("files in the keep-list", len(one), "files")
        known = read_keep_list(KEEP).lines
        self.board.bar(
            "lines of images/cpu.keep that differ",
            len(known ^ one),
            0,
            "lines",
            named=sorted(known ^ one)[:20],
        )

    def strace(self) -> None:
        """What strace -f sees that fanotify misses, on the images' proof and on the service."""
        if not shutil.which("strace"):
            self.board.waive("files missed against strace -f", "strace isn't installed here")
            return
        env = (("WEIR_PROFILES_DIR", "/profiles"), ("APP_PROFILE", "control"), ("WEIR_MODEL_DIR", "/models"))
        volumes = (f"{self.profiles}:/profiles:ro", f"{self.models}:/models:ro")
        smoke = ("python3", "-B", "/opt/weir/app/smoke.py")
        files = image_files(self.ref)
        for name, how in (
            ("proof", Started(smoke, checks_health=False)),
            ("service", Started((), env, volumes)),
        ):
            traced, seen = self.traced(how)
            opened = {real(files, path) for path in traced} & files.keys()
            missed = sorted(opened - seen)
            self.board.bar(
                f"{name}: files that strace -f saw opened and the run didn't", len(missed), 0, "files",
                named=missed[:20], traced=len(opened), observed=len(seen),
            )  # fmt: skip

    def traced(self, how: Started) -> tuple[set[str], frozenset[str]]:
        """What strace and what fanotify saw of the same run."""
        log = self.folder / "strace.txt"
        with served(Engine(), self.ref, how) as container:
            watch = Fanotify(container.pid)
            words = ["strace", "-f", "-y", "-qq", "-e", "trace=open,openat,openat2,execve", "-o", str(log)]
            tracer = subprocess.Popen([*words, "-p", str(container.pid)])
            time.sleep(2)
            container.let_through()
            if not how.command:
                container.wait_until_ready()
                run_program(f"{WORKLOAD} --each 2", container.url, {}, tell)
                container.stop()
            container.exit_code()
            tracer.wait(60)
            return {*opened_by(log)}, watch.finish()

    def overhead(self, n: int = 10) -> None:
        """A service's start and 10 of each kind of request, watched and not, in turns, after one apart.

        The service itself is asked whether it is ready: an engine's health check runs once a second.
        """
        env = (("WEIR_PROFILES_DIR", "/profiles"), ("APP_PROFILE", "control"), ("WEIR_MODEL_DIR", "/models"))
        volumes = (f"{self.profiles}:/profiles:ro", f"{self.models}:/models:ro")
        how = Started((), env, volumes, checks_health=False)
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-1, 2 * n):
            is_watched = number % 4 in (1, 2)  # neither always first
            with served(Engine(), self.ref, how) as container:
                watch = Fanotify(container.pid) if is_watched else None
                url = container.url
                begun = time.monotonic()
                container.let_through()
                wait_until_it_answers(url)
                run_program(f"{WORKLOAD} --each 10", url, {}, lambda _line: None)
                if number >= 0:
                    took[is_watched].append(time.monotonic() - begun)
                container.stop()
                if watch:
                    watch.finish()
        ratio = statistics.median(took[True]) / statistics.median(took[False])
        rounded = {str(key): [round(value, 2) for value in values] for key, values in took.items()}
        self.board.bar("start and requests, watched over not", ratio, 1.10, "x", seconds_watched=rounded)

    def slim(self) -> None:
        """The slim image: its size, all of the workload on it, what was left out, and back."""
        whole, unpacked, stored = self.whole
        self.board.figure("whole CPU image, unpacked", unpacked / 1e6, "MB", stored_mb=round(stored / 1e6, 1))
        proof = ["--keep", str(KEEP), "--workload", f"{WORKLOAD} --each 1", *self.random_weights()]
        slim, unpacked, stored = self.build(*proof)
        self.board.bar("slim CPU image, unpacked", unpacked / 1e6, 500, "MB")
        self.board.bar("slim CPU image, stored", stored / 1e6, 140, "MB")
        again, _, _ = self.build("--keep", str(KEEP), "--no-cache")
        self.board.bar("other digests of the slim image, built anew", int(again != slim), 0, "digests")
        self.left_out()
        undone, _, _ = self.build("--undo")
        self.board.waive(
            "slim ROCm image of one card <= 1.0 GB",
            "what a card's runtime opens can't be observed without one",
        )
        self.board.waive("GPU code that runs load", "needs a card: tests/device/run_observe.sh")
        self.board.bar("undone: other digests than before", int(undone != whole), 0, "digests", digest=undone)

    def requests(self) -> None:
        """1,000 requests of every kind on the slim image, and the probes' quick run."""
        self.build("--keep", str(KEEP))
        tell("1,000 requests of every kind on the slim image")
        more = ["--workload", f"{WORKLOAD} --each 1000", *self.mounted(), self.ref]
        probes = [self.ref, "--", "python3", "-m", "probes", "run", "--quick", "--out", "/tmp"]
        said = ""
        for words in (more, probes):
            done = subprocess.run([WEIR, "observe", *words], capture_output=True, text=True, check=False)
            said += done.stderr
            if done.returncode and "weir: the " not in done.stderr:  # another failure than a missing file
                raise SystemExit(done.stderr)
        missing = sorted(set(re.findall(r"weir: the .*", said)))
        requests = re.findall(r"\d+ requests of \d+ kinds.*", said)
        self.board.bar(
            "missing files in 1,000 requests of every kind on it", len(missing), 0, "files",
            named=missing[:20], said=requests,
        )  # fmt: skip

    def left_out(self) -> None:
        """Twenty left-out modules are imported; each has to give the message, and no traceback."""
        script = "print(open('/opt/weir/left-out.txt').read())"  # the image has no `cat` any more
        listed = docker("run", "--rm", self.ref, "python3", "-c", script)
        paths = re.findall(r"^file \d+ /opt/weir/lib/(\S+)\.py$", listed, re.MULTILINE)
        names = [path.replace("/", ".").removesuffix(".__init__") for path in paths if "-" not in path]
        chosen = names[:: max(1, len(names) // 20)][:20]
        silent = []
        for name in chosen:
            # what is above a module may have been left out, too, or need what isn't there in any image
            script = f"import sys, importlib; sys.path_importer_cache; importlib.import_module({name!r})"
            done = subprocess.run(
                ["docker", "run", "--rm", self.ref, "python3", "-c", script],
                capture_output=True,
                text=True,
                check=False,
            )
            if "weir: the module" not in done.stderr or "Traceback" in done.stderr or not done.returncode:
                silent.append(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        self.board.bar(
            "left-out modules imported without the message alone", len(silent), 0, "modules", named=silent
        )

    def ablate(self) -> None:
        """Planted needs, each in a service with some thirty grants, and the service itself."""
        data = self.folder / "data"
        data.mkdir()
        (data / "all").write_text("x")
        (data / "all").chmod(0o644)
        for name, mode, owner, group in (("theirs", 0o000, 1000, 1000), ("group", 0o040, 0, 4321)):
            (data / name).write_text("x")
            os.chown(data / name, owner, group)
            (data / name).chmod(mode)
        (self.folder / "other").mkdir()
        with ThreadPoolExecutor(4) as pool:  # each waits for containers most of the time
            found = list(pool.map(lambda name: self.need(name, data), NEEDS))
        wrong = [f"{name}: {kept}" for name, kept, _, _ in found if not is_found(name, kept)]
        self.board.bar(
            "planted needs found, with nothing else", len(NEEDS) - len(wrong), len(NEEDS), "needs",
            at_least=True, wrong=wrong, starts=[starts for _, _, starts, _ in found],
        )  # fmt: skip
        needless = [f"{name}: {each}" for name, _, _, more in found for each in more]
        self.board.bar(
            "grants of printed files that aren't needed", len(needless), 0, "grants", named=needless
        )

    def need(self, name: str, data: Path) -> tuple[str, list[str], int, list[str]]:
        """What ablation keeps for one planted need, its starts, and what of that isn't needed after all."""
        user, does, _ = NEEDS[name]
        service = {
            "image": self.ref,
            "user": user,
            "command": ["python3", "-S", "-c", f"import os,sys,time,socket,ctypes;{does}"],
            "cap_add": CAPS,
            "devices": ["/dev/fuse", "/dev/net/tun"],
            "group_add": ["44", "4321"],
            "tmpfs": ["/scratch:mode=1777", "/var/tmp"],
            "pid": "host",
            "security_opt": ["seccomp=unconfined"],
            "volumes": [f"{data}:/data", f"{self.folder}/other:/other:ro"],
        }
        printed = self.ablated(name, service)
        kept = re.findall(r"^#   (.*)", printed, re.MULTILINE)
        tell(f"{name}: {kept}")
        starts = int(re.findall(r"ablate: (\d+) start", printed)[0])
        return name, kept, starts, self.needless(printed, name)

    def ablated(self, name: str, service: dict[str, Any], *more: str) -> str:
        """What `weir ablate` prints for a service."""
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({"services": {"s": service}}))
        printed = weir("ablate", *more, str(path), "s", folder=self.folder)
        return printed[printed.index("# weir ablate") :].split("\n[ ")[0]

    def needless(self, printed: str, name: str, workload: str = "") -> list[str]:
        """What can be left out of a printed file after all; it must pass as it is. Apart from weir's code."""
        document = yaml.safe_load(printed)
        if not self.passes(document, name, workload):
            return ["the file as it is fails"]
        service = document["services"]["s"]
        less: dict[str, dict[str, Any]] = {}
        for key in ("cap_add", "devices", "group_add", "volumes", "tmpfs", "security_opt"):
            for at, item in enumerate(service.get(key) or ()):
                if item != "no-new-privileges:true":
                    rest = [each for number, each in enumerate(service[key]) if number != at]
                    less[f"{key}: {item}"] = {**service, key: rest}
        for key in {"pid", "privileged"} & service.keys():
            less[key] = {each: value for each, value in service.items() if each != key}
        if not service.get("read_only"):
            less["writable root"] = {**service, "read_only": True}
        if "no-new-privileges:true" not in service.get("security_opt", ()):
            both = [*service.get("security_opt", ()), "no-new-privileges:true"]
            less["new privileges"] = {**service, "security_opt": both}
        return [
            left_out
            for left_out, each in less.items()
            if self.passes({**document, "services": {"s": each}}, name, workload)
        ]

    def passes(self, document: dict[str, Any], name: str, workload: str) -> bool:
        path = self.folder / f"tried-{name}.json"
        path.write_text(json.dumps(document))
        compose = ["docker", "compose", "-p", f"t-observe-tried-{name}", "-f", str(path)]
        up = (
            ["up", "-d", "--wait", "--wait-timeout", "300", "s"]
            if workload
            else ["up", "--exit-code-from", "s", "s"]
        )
        try:
            if subprocess.run([*compose, *up], capture_output=True, check=False).returncode:
                return False
            if not workload:
                return True
            place = subprocess.run(
                [*compose, "port", "s", "8000"], capture_output=True, text=True, check=True
            )
            env = {**os.environ, "WEIR_URL": f"http://{place.stdout.strip().replace('0.0.0.0', '127.0.0.1')}"}
            return not subprocess.run(workload.split(), capture_output=True, env=env, check=False).returncode
        finally:
            subprocess.run([*compose, "down", "-t", "5"], capture_output=True, check=False)

    def service(self) -> None:
        """The service in a container that asks for everything; what isn't needed of what is left."""
        service = {
            "image": self.ref,
            "privileged": True,
            "ports": ["8000"],
            "tmpfs": ["/tmp"],
            "group_add": ["44"],
            "environment": {
                "WEIR_PROFILES_DIR": "/profiles",
                "APP_PROFILE": "control",
                "WEIR_MODEL_DIR": "/models",
                "WEIR_WEIGHTS": "mounted",
            },
            "volumes": [f"{self.profiles}:/profiles", f"{self.models}:/models:ro", "/tmp:/host"],
            "healthcheck": {
                "test": ["CMD", "python3", "-m", "service.health"],
                "start_period": "60s",
                "start_interval": "1s",
                "interval": "5s",
            },
        }
        workload = f"{WORKLOAD} --each 1"
        printed = self.ablated("service", service, "--workload", workload, "--wait", "300")
        self.board.line(
            {"figure": "the least that the service needs", "unit": "compose file", "value": printed}
        )
        needless = self.needless(printed, "service", workload)
        self.board.bar(
            "grants of the service's file that aren't needed", len(needless), 0, "grants", named=needless
        )


def wait_until_it_answers(url: str, seconds: float = 120) -> None:
    """Ask a service whether it is ready, until it is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            if answer.status == HTTPStatus.OK:
                return
        time.sleep(0.02)
    raise SystemExit(f"{url} isn't ready after {seconds:.0f} s")


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout


def is_found(name: str, kept: list[str]) -> bool:
    """Whether a planted need was found, and nothing else."""
    expected = NEEDS[name][2]
    return len(kept) == len(expected) and all(any(part in line for line in kept) for part in expected)


def image_files(ref: str) -> dict[str, str]:
    """The image's files, and its links with their targets."""
    script = (
        "import os,json;r={}\nfor d,f,n in os.walk('/'):\n"
        " f[:]=[x for x in f if os.path.join(d,x) not in ('/proc','/sys','/dev')]\n"
        " for x in n:\n  p=os.path.join(d,x);r[p]=os.path.realpath(p)\nprint(json.dumps(r))"
    )
    return dict(json.loads(docker("run", "--rm", "--user", "0", ref, "python3", "-c", script)))


def opened_by(log: Path) -> Iterator[str]:
    """Every path that was opened or executed with success, by strace's log."""
    for line in log.read_text(errors="replace").splitlines():
        if match := re.search(r"(?:open(?:at2?)?\(|resumed>).*\) = \d+<(/[^>]*)>$", line):
            yield match[1]
        if match := re.search(r'execve\("([^"]+)".* = 0$', line):
            yield match[1]


def real(files: dict[str, str], path: str) -> str:
    return files.get(path, path)


def main() -> int:
    parts = ("lists", "strace", "overhead", "slim", "requests", "ablate", "service")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(parts), help="parts, with commas between them")
    missed = False
    for part in parser.parse_args().only.split(","):
        board = Board(f"observe-{part}", command="make bench-observe")
        with tempfile.TemporaryDirectory(prefix="bench-observe-", dir="/var/tmp") as folder:
            Path(folder).chmod(0o755)
            getattr(Bench(board, Path(folder), f"t-observe-{part}"), part)()
        missed |= bool(board.finish())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
