"""The engines by name."""

from collections.abc import Mapping
from typing import Final

from buildtool.launch.engine import Engine
from buildtool.launch.job import EngineName
from buildtool.launch.kubernetes import JOB, JOBSET, TRAINJOB
from buildtool.launch.local import LOCAL
from buildtool.launch.skypilot import SKYPILOT
from buildtool.launch.slurm import SLURM

ENGINES: Final[Mapping[EngineName, Engine]] = {
    "local": LOCAL,
    "slurm": SLURM,
    "skypilot": SKYPILOT,
    "trainjob": TRAINJOB,
    "jobset": JOBSET,
    "job": JOB,
}
