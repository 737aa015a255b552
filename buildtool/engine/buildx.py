"""BuildKit, by `docker buildx bake`: runs a plan and shows its progress as it comes."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from buildtool.core.command import CommandFailed, relay, run, run_streaming
from buildtool.core.errors import BuildFailed, EngineUnavailable, EnvironmentMissing, ToolError
from buildtool.core.files import scratch
from buildtool.core.progress import Progress
from buildtool.engine.client import Engine
from buildtool.engine.connection import INSTALL, endpoint_here
from probes.core.codec import Json
from probes.core.invocation import host_command
from probes.core.quoting import bake_text

# BuildKit's plain progress: the lines that matter to a person
IMPORTANT_LINE = re.compile(
    r"^#\d+ (\[(?!.*internal).*|.*\bDONE [1-9].*|.*(exporting|unpacking|naming).*done.*|ERROR.*|\d+\.\d+ .*)"
)
# BuildKit's message when somebody removes images at the same time: the layer that it was about to build on is
# collected between its look-up and its use. The next build doesn't find it and makes it again.
TRANSIENT_FAULT = re.compile(r"parent snapshot \S+ does not exist")
VERSION = re.compile(r"v?(\d+)\.(\d+)")
MINIMUM = (0, 11)  # named contexts, `-f -` and the metadata file as we use them


def require_buildx() -> str:
    """The plugin's version. Raises EnvironmentMissing when it's missing or too old."""
    hint = f"install the plugin `docker-buildx`; {INSTALL}"
    try:
        output = run(["docker", "buildx", "version"]).stdout
    except (CommandFailed, EnvironmentMissing) as error:
        raise EnvironmentMissing("the docker CLI has no working `buildx` plugin", hint) from error
    match = VERSION.search(output)
    if not match or (int(match[1]), int(match[2])) < MINIMUM:
        raise EnvironmentMissing(f"buildx is too old: {output.strip()} (0.11 or newer is needed)", hint)
    return match[0]


def bake_plan(
    plan: dict[str, Any], *, engine: Engine, progress: Progress, no_cache: bool = False, verbose: bool = False
) -> dict[str, str]:
    """Build a plan. Returns the manifest digests by target.

    With `verbose`, `progress` gets every line of BuildKit's, else those that match IMPORTANT_LINE. Raises
    BuildFailed with the failed step's output, EngineUnavailable when the engine went away,
    EnvironmentMissing when the disk is full.
    """
    with scratch() as folder:
        metadata = folder / "metadata.json"
        # the builder inside the engine that the CLI talks to: another one would keep its images elsewhere
        command = ["docker", "buildx", "bake", f"--builder={endpoint_here().builder}", "-f", "-"]
        command += ["--progress=plain", f"--metadata-file={metadata}"]
        command += ["--no-cache"] if no_cache else []
        lines = relay(progress, lambda line: line if IMPORTANT_LINE.match(line) else None, verbose=verbose)
        _run_bake(command, render_plan(plan), engine=engine, progress=progress, lines=lines)
        data = json.loads(metadata.read_text(encoding="utf-8"))
    digests = {name: str(data[name]["containerimage.digest"]) for name in plan["target"]}
    for name, digest in digests.items():
        if engine.inspect(digest) is None:
            raise BuildFailed(
                f"the image {name} was built as {digest}, and the engine doesn't have it",
                "build into the engine itself: see `docker context ls` and `docker buildx ls`",
            )
    return digests


def _run_bake(
    command: Sequence[str], plan: str, *, engine: Engine, progress: Progress, lines: Progress
) -> None:
    """Run bake, once more after a transient fault; `lines` gets its output. Raises as `bake_plan` does."""
    for is_last in (False, True):
        try:
            run_streaming(
                command,
                progress=lines,
                stdin=plan,
                env={**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_BAKE_ENTITLEMENTS_FS": "0"},
            )
        except CommandFailed as error:
            fault = TRANSIENT_FAULT.search(error.tail)
            if is_last or not fault:
                raise _build_error(error, engine) from error
            progress(f"the engine lost a layer while it built ({fault[0]}); building once more")
        else:
            return


def _build_error(error: CommandFailed, engine: Engine) -> ToolError:
    """The error for a failed build: the disk, the engine, or a step."""
    if "no space left" in error.tail.lower():
        return EnvironmentMissing(
            f"the disk filled up during the build:\n{error.tail}", "docker system df; docker builder prune"
        )
    try:
        engine.info()
    except ToolError:
        return EngineUnavailable(
            "the engine stopped during the build; no image was made",
            "start it and run the same command again",
        )
    lines = [line for line in error.tail.splitlines() if line.strip()]
    return BuildFailed(
        "the build failed:\n" + "\n".join(lines[-12:]),
        f"see every line of it: {host_command()} build VARIANT --verbose",
    )


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as the JSON that bake reads, in which no text is a template."""
    return json.dumps(literal(plan), indent=2, sort_keys=True)


def literal(value: Json) -> Json:
    """The value with all its texts, keys too, quoted against bake's interpolation."""
    match value:
        case dict():
            return {bake_text(key): literal(item) for key, item in value.items()}
        case list():
            return [literal(item) for item in value]
        case str():
            return bake_text(value)
        case _:
            return value
