"""What goes into every image beside wheels: the service, its profiles, the probes, the smoke test."""

import shutil
from pathlib import Path

from buildtool.core.shipped import IMAGES, PROBES

APP = "opt/weir/app"
# what goes into every image -> where, below APP
PAYLOAD = {
    IMAGES / "service": "service",
    IMAGES / "profiles": "profiles",
    PROBES: "probes",
    IMAGES / "smoke.py": "smoke.py",
}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "py.typed", ".*", "*~")  # bytecode, what editors leave


def payload_files() -> dict[str, bytes]:
    """Every file by its path in an image, without a leading slash. Raises OSError."""
    files: dict[str, bytes] = {}
    for origin, name in PAYLOAD.items():
        if origin.is_file():
            files[f"{APP}/{name}"] = origin.read_bytes()
        elif origin.is_dir():
            _gather(origin, f"{APP}/{name}", files)
    return files


def _gather(folder: Path, place: str, files: dict[str, bytes]) -> None:
    names = sorted(path.name for path in folder.iterdir())
    for name in sorted(set(names) - LEFT_OUT(str(folder), names)):
        path = folder / name
        if path.is_dir():
            _gather(path, f"{place}/{name}", files)
        else:
            files[f"{place}/{name}"] = path.read_bytes()
