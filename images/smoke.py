"""Runs inside a fresh container of every image: reports its facts, as one JSON line.

Standard library and torch; with the argument `--service` only what depends on our own code, without torch.
The builder judges them (buildtool/engine/proof.py).
"""

import json
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path


def torch_facts() -> dict[str, object]:
    """Version and build of torch, and whether a matrix product comes out right."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        left = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        product = (left @ left.T).tolist()
    return {
        "version": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "product_ok": product == [[5.0, 14.0], [14.0, 50.0]],
    }


def rocminfo_facts() -> dict[str, object]:
    """Whether rocminfo is installed and starts; without a card it prints a message and exits non-zero."""
    import re
    import shutil
    import subprocess

    program = shutil.which("rocminfo")
    if not program:
        return {"present": False}
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)  # it colours even a pipe
    return {"present": True, "exit_code": done.returncode, "said": said.strip()[:200]}


def service_is_here() -> bool:
    """Whether the service can be found. Raises SyntaxError where this Python can't read a file of it."""
    for path in Path("/opt/weir/app/service").rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    return find_spec("service") is not None


def main(*words: str) -> None:
    """Print the facts."""
    facts = {
        "python": platform.python_version(),
        "uid": os.getuid(),
        "service": service_is_here(),
        "probes": find_spec("probes") is not None,
    }
    if "--service" not in words:
        facts |= {"torch": torch_facts(), "rocminfo": rocminfo_facts()}
    print("SMOKE " + json.dumps(facts))


main(*sys.argv[1:])
