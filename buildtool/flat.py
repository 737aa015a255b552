"""An image remade from one root file system: its Dockerfile and bake file, from the engine's record. Pure."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from buildtool.errors import DataError
from buildtool.plan import LABEL, image_output

_NS_PER_MS = 1_000_000
_DURATIONS = {
    "Interval": "interval",
    "Timeout": "timeout",
    "StartPeriod": "start-period",
    "StartInterval": "start-interval",
}


def flat_plan(
    record: Mapping[str, Any], context: str, tag: str, *, targets: str, zstd: bool
) -> dict[str, Any]:
    """The bake file that makes an image of `context`/rootfs.tar, configured as `record` (docker inspect) is.

    Raises DataError for a configuration that a Dockerfile can't say.
    """
    config = record["Config"]
    labels = {**(config.get("Labels") or {}), f"{LABEL}.gpu-targets": targets, f"{LABEL}.pruned": "yes"}
    target = {
        "context": context,
        "dockerfile-inline": "\n".join(_lines(config)) + "\n",
        "args": {"SOURCE_DATE_EPOCH": str(created(record))},
        "labels": labels,
        "platforms": ["/".join((record["Os"], record["Architecture"]))],
        "tags": [tag],
        "attest": ["type=provenance,disabled=true"],
        **({"output": [image_output()]} if zstd else {}),
    }
    return {"group": {"default": {"targets": ["pruned"]}}, "target": {"pruned": target}}


def created(record: Mapping[str, Any]) -> int:
    """When an image was made, seconds since 1970; 0 where it doesn't say."""
    text = str(record.get("Created") or "1970-01-01T00:00:00Z")
    return max(0, int(datetime.fromisoformat(text[:19] + "+00:00").timestamp()))


def _lines(config: Mapping[str, Any]) -> Iterator[str]:
    yield "FROM scratch"
    yield "ADD rootfs.tar /"
    for pair in config.get("Env") or ():
        name, _, value = pair.partition("=")
        yield f"ENV {name}={_quoted(name, value)}"
    if config.get("WorkingDir") not in (None, "", "/"):
        yield f"WORKDIR {_quoted('WORKDIR', config['WorkingDir'])}"
    if config.get("User"):
        yield f"USER {config['User']}"
    for port in config.get("ExposedPorts") or ():
        yield f"EXPOSE {port}"
    if config.get("Volumes"):
        yield f"VOLUME {json.dumps(sorted(config['Volumes']))}"
    if config.get("StopSignal"):
        yield f"STOPSIGNAL {config['StopSignal']}"
    if config.get("Shell"):
        yield f"SHELL {json.dumps(config['Shell'])}"
    yield from _health(config.get("Healthcheck") or {})
    for word in ("Entrypoint", "Cmd"):
        if config.get(word):
            yield f"{word.upper()} {json.dumps(config[word])}"
    for trigger in config.get("OnBuild") or ():
        yield f"ONBUILD {trigger}"


def _health(check: Mapping[str, Any]) -> Iterator[str]:
    test = check.get("Test") or []
    if not test:
        return
    if test[0] == "NONE":
        yield "HEALTHCHECK NONE"
        return
    flags = [f"--{flag}={check[key] // _NS_PER_MS}ms" for key, flag in _DURATIONS.items() if check.get(key)]
    flags += [f"--retries={check['Retries']}"] if check.get("Retries") else []
    said = test[1] if test[0] == "CMD-SHELL" else json.dumps(test[1:])
    yield " ".join(["HEALTHCHECK", *flags, "CMD", said])


def _quoted(name: str, value: str) -> str:
    if "\n" in value or "\r" in value:
        raise DataError(f"the image's {name} holds a line break, which a Dockerfile can't say")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'
