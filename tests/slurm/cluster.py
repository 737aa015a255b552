"""A Slurm of several nodes on this machine, without root's services, munge or ports that others use.

Debian's slurm-wlm; all daemons are children of this process's own directory and end with `Cluster.stop`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_PORT = 26_900
PATIENCE_S = 180.0  # the longest wait for a state; this machine may be busy

sys.path.insert(0, str(ROOT / "tests" / "docker"))

from debian_packages import apt_get  # noqa: E402

CONFIGURATION = """\
ClusterName=weir-tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=5
MinJobAge=3600
InactiveLimit=0
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=65536 Gres=gpu:mi50:2
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}]
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class Cluster:
    """Running daemons, and what tests ask of them."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = nodes
        self.rendezvous = 0  # the first of a thousand ports for jobs: another cluster here has others
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        host = socket.gethostname().split(".")[0]
        port = _free_ports(self.nodes + 1)
        self.rendezvous = 33_000 + 1000 * ((port - FIRST_PORT) // (self.nodes + 1) % 25)
        (self.folder / "state").mkdir()
        text = CONFIGURATION.format(
            host=host,
            user="root" if os.geteuid() == 0 else os.environ["USER"],
            port=port,
            folder=self.folder,
            nodes=self.nodes,
            first=port + 1,
            last=port + self.nodes,
        )
        (self.folder / "slurm.conf").write_text(text)
        cards = []
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir()
            for number in range(2):
                (self.folder / f"{name}-card{number}").touch()
            cards.append(f"NodeName={name} Name=gpu Type=mi50 File={self.folder}/{name}-card[0-1]")
        (self.folder / "gres.conf").write_text("\n".join(cards) + "\n")
        self._run(program("slurmctld"), "-c")
        for name in self.names:
            self.start_node(name)
        self.wait(lambda: self.idle() == self.nodes, "the nodes to be idle")

    @property
    def names(self) -> list[str]:
        return [f"n{number + 1}" for number in range(self.nodes)]

    def start_node(self, name: str) -> None:
        self._run(program("slurmd"), "-N", name)

    def idle(self) -> int:
        """Nodes that are up and free."""
        return (
            self._run("sinfo", "--noheader", "--Node", "--partition=usual", "--format=%T")
            .split()
            .count("idle")
        )

    def ask(self, *words: str) -> str:
        """What one of Slurm's programs prints."""
        return self._run(*words)

    def job(self, job_id: str) -> dict[str, str]:
        """All that Slurm knows of a job."""
        words = self._run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Until it holds. Raises TimeoutError, with the end of the controller's log."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                log = (self.folder / "slurmctld.log").read_text()[-2000:]
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; {log}")
            time.sleep(0.1)

    def processes(self, name: str) -> list[int]:
        """A node's daemon, its step daemons and all that these started."""
        own = {f"SLURMD_NODENAME={name}", f"SLURM_CONF={self.environment['SLURM_CONF']}"}
        found = {int((self.folder / f"{name}.pid").read_text())}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if own <= set((place / "environ").read_text(errors="replace").split("\0")):
                    parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                    found |= {int(place.name), parent} if _is_step(parent) else {int(place.name)}
        return sorted(found)

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self._run("scancel", "--full", f"--user={os.geteuid()}")
        for name in self.names:
            with contextlib.suppress(FileNotFoundError):  # it never started
                for pid in self.processes(name):
                    _signal(pid, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            _signal(int((self.folder / "slurmctld.pid").read_text()), signal.SIGKILL)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
        return done.stdout


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_step(pid: int) -> bool:
    return "slurmstepd" in Path(f"/proc/{pid}/comm").read_text()


def _free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody listens on."""
    for first in range(FIRST_PORT, 32_000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError("no free ports")


def program(name: str) -> str:
    """A daemon, which stands in a folder that a user's PATH lacks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or name


def install() -> None:
    """Debian's Slurm, as root, unless it is here. Raises OSError, which says what to type."""
    if shutil.which("sbatch") and Path(program("slurmctld")).is_absolute():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise OSError("no Slurm here; as root: apt-get install slurm-wlm (or your distribution's package)")
    for step in (("update",), ("install", "--yes", "--no-install-recommends", "slurm-wlm")):
        done = apt_get(*step)
        if done.returncode:
            raise OSError(f"apt-get {' '.join(step)} failed; run it by hand:\n{done.stderr[-1500:]}")


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Cluster]:
    """A cluster for this block; it ends with the block, also by SIGTERM."""
    install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cluster = Cluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
