"""Images written by hand, from nothing, and loaded: whatever a hostile maker may put into one."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

# another time for each process: with the same one, images of two test runs would be the same image
CREATED = f"{datetime(2026, 1, 1) + timedelta(seconds=os.getpid()):%Y-%m-%dT%H:%M:%SZ}"
SHELL_FROM = "weir/cpu:latest"  # its shell and C library let a handmade image run something
SHELL_FILES = {
    "bin/sh": "/usr/bin/dash",
    "lib64/ld-linux-x86-64.so.2": "/lib64/ld-linux-x86-64.so.2",
    "lib/x86_64-linux-gnu/libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6",
}
# one file of code for each of two cards: by their names alone there is something to prune
KERNELS = {f"usr/lib/library/Kernels_{target}.co": target.encode() for target in ("gfx803", "gfx906")}


@dataclass(frozen=True)
class Handmade:
    """An image in the engine; `config` are the very bytes that were loaded."""

    name: str
    config: bytes


def load_image(name: str, run: Mapping[str, Any], files: Mapping[str, bytes], **top: object) -> Handmade:
    """Load an image with `run` as its configuration; `top` are more keys of the document around it."""
    layer = _tar({path: (data, 0o755) for path, data in files.items()})
    config = json.dumps({
        "architecture": "amd64",
        "os": "linux",
        "created": CREATED,
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created_by": "by hand"}],
        **top,
    }).encode()  # fmt: skip
    manifest = json.dumps({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    }).encode()  # fmt: skip
    row = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    row["annotations"] = {"io.containerd.image.name": f"docker.io/{name}"}
    paths = [f"blobs/sha256/{_digest(blob)[7:]}" for blob in (config, manifest, layer)]
    saved = [{"Config": paths[0], "RepoTags": [name], "Layers": [paths[2]]}]
    archive = _tar({
        "oci-layout": (b'{"imageLayoutVersion": "1.0.0"}', 0o644),
        "index.json": (json.dumps({"schemaVersion": 2, "manifests": [row]}).encode(), 0o644),
        "manifest.json": (json.dumps(saved).encode(), 0o644),
        **{path: (blob, 0o644) for path, blob in zip(paths, (config, manifest, layer), strict=True)},
    })  # fmt: skip
    subprocess.run(["docker", "load"], input=archive, check=True, capture_output=True)
    return Handmade(name, config)


@cache
def shell_files() -> dict[str, bytes]:
    """What `#!/bin/sh` needs in an image."""
    words = ["docker", "create", "--entrypoint", "true", SHELL_FROM]
    container = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    try:
        return {path: _copied(container, origin) for path, origin in SHELL_FILES.items()}
    finally:
        subprocess.run(["docker", "rm", container], check=True, capture_output=True)


def python_that_is(script: str) -> dict[str, bytes]:
    """The files of an image whose python3 is a shell script."""
    return {**KERNELS, **shell_files(), "usr/bin/python3": f"#!/bin/sh\n{script}\n".encode()}


def saved_config(ref: str) -> bytes:
    """The config's bytes as the engine gives them back."""
    done = subprocess.run(["docker", "save", ref], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        [row] = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        return tar.extractfile(row["Config"]).read()  # type: ignore[union-attr]


def _copied(container: str, path: str) -> bytes:
    done = subprocess.run(["docker", "cp", "-L", f"{container}:{path}", "-"], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        return tar.extractfile(tar.getmembers()[0]).read()  # type: ignore[union-attr]


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, (data, mode) in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
