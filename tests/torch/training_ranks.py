"""Starts ranks of training as forks of one process that has imported torch, so that a run takes a second.

As a program: reads a line of JSON for each run, forks its ranks, and answers with their exit codes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


class Ranks:
    """The process that forks. `run` starts the ranks of one run and waits for them."""

    def __enter__(self):
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def run(
        self, out, *words, world=1, plant=None, model="training_cases:model", data="training_cases:samples"
    ):
        """Exit codes of the ranks, and what they printed. `plant`: a fault of training_cases."""
        out.mkdir(parents=True, exist_ok=True)
        argv = [
            model,
            *(("--data", data) if data else ()),
            *map(str, words),
            "--out",
            str(out),
            "--device",
            "cpu",
        ]
        job = {"argv": argv, "world": world, "plant": json.dumps(plant or {}), "log": str(out / "log.txt")}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        return codes, (out / "log.txt").read_text()


def ranks_of(out):
    """The ranks' reports, those that there are."""
    paths = sorted(out.glob("rank-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _fork(job, rank, port):
    pid = os.fork()
    if pid:
        return pid
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"WORLD_SIZE": str(job["world"]), "WEIR_PLANT": job["plant"]})
    from probes.training import worker

    code = 99
    try:
        code = worker.main(job["argv"])
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pids):
    """Exit codes; a rank that is still there long after the others is killed, as a launcher does."""
    codes, until, ended = {}, time.monotonic() + LIMIT_S, None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if any(codes.values()) and ended is None:
            ended = now
        if now > until or (ended is not None and now > ended + 3):
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _serve():
    import torch._dynamo  # which every optimizer imports
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import probes.training.checkpoint
    import probes.training.worker

    assert torch.distributed.is_available()
    assert probes.training.checkpoint.NAME
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        port = _free_port()
        print(json.dumps(_wait([_fork(job, rank, port) for rank in range(job["world"])])), flush=True)


if __name__ == "__main__":
    _serve()
