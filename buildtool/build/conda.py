"""A conda environment with an image's very versions, where containers aren't run: `weir build --conda`."""

import json
from collections.abc import Sequence
from pathlib import Path

from buildtool.core.errors import ConfigError
from buildtool.core.files import write_text
from buildtool.core.model import Resolved, TorchSource, Variant


def write_environment(variant: Variant, resolved: Resolved, target: Path) -> None:
    """Write `environment.yml`. Raises ConfigError where torch is none of the wheels, as `write_text` does."""
    write_text(target, environment_text(variant, resolved))


def require_wheel(variant: Variant, resolved: Resolved) -> None:
    """Raise ConfigError where torch comes with the base: an environment gets it as a wheel."""
    if resolved.torch_version is None:
        raise ConfigError(
            f"{variant.name}: its torch comes with Debian or a base image, and not as a wheel for conda",
            "choose a variant whose torch is a wheel, such as cpu",
        )


def environment_text(variant: Variant, resolved: Resolved) -> str:
    """The environment: Python by conda, every wheel by pip, in the versions of the lock, by name.

    JSON's texts are YAML's, so no text of a catalog can become YAML. Raises ConfigError.
    """
    require_wheel(variant, resolved)
    source = next(each for each in variant.torch if each.name == resolved.torch_source)
    lines = [
        f"# {variant.name}: the versions of the image, from the lock; made by `weir build --conda`",
        f"name: {json.dumps(f'weir-{variant.name}')}",
        "channels: [conda-forge]",
        "dependencies:",
        f"  - {json.dumps(f'python={resolved.python}')}",
        "  - pip",
        "  - pip:",
        *(f"      - {json.dumps(line)}" for line in pip_lines(source, resolved)),
    ]
    return "\n".join(lines) + "\n"


def pip_lines(source: TorchSource, resolved: Resolved) -> Sequence[str]:
    """What pip is asked for: an index where torch has one, then every wheel by its version."""
    index = [f"--extra-index-url={source.index}"] if source.index else []
    wheels = sorted(resolved.wheels, key=lambda wheel: wheel.distribution)
    return [*index, *(f"{wheel.distribution}=={wheel.version}" for wheel in wheels)]
