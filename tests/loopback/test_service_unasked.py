"""What isn't asked for isn't imported: gRPC, OpenTelemetry, the hub's library."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_plain_service_imports_none_of_the_extras() -> None:
    program = (
        "import sys, service.server, service.api.app\n"
        "print([name for name in ('grpc', 'google.protobuf', 'opentelemetry', 'huggingface_hub', 'torch')"
        " if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "images")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
