"""Which of the service's modules may touch what: torch, yaml and HTTP have one door each."""

from pathlib import Path

import pytest
import service
from architecture import imports

HERE = Path(service.__file__).parent
MODULES = sorted(HERE.rglob("*.py"))
# package -> the modules that may import it; whatever else isn't the standard library's or ours is refused
DOORS = {
    "torch": {"allowance", "bert", "captured", "compiled", "inference", "mounted", "placed"},
    "probes": {"checkpoint", "mounted", "placed"},
    "tokenizers": {"tokenizer"},
    "yaml": {"profile"},
    "starlette": {"app", "repository"},
    "prometheus_client": {"metrics"},
    "huggingface_hub": {"hub"},
    "opentelemetry": {"spans"},
    "grpc": {"endpoint", "server"},
    "google": {"messages"},
    "uvicorn": {"acceptor", "connection", "server"},
    "h11": {"connection"},
    "anyio": {"answering", "endpoint", "server"},
    "threading": {"allowance", "own_thread", "worker"},
    "asyncio": {
        "acceptor",
        "admission",
        "answering",
        "app",
        "cli",
        "connection",
        "endpoint",
        "log",
        "models",
        "own_thread",
        "server",
        "worker",
    },
}
# values in, decisions out: these touch no clock, thread, file or socket
PURE = {
    "asks",
    "batcher",
    "binary",
    "buckets",
    "door",
    "embeddings",
    "infer",
    "messages",
    "predict",
    "pulse",
    "speed",
    "translate",
}
ACTING = {"anyio", "asyncio", "logging", "os", "pathlib", "random", "socket", "threading", "time"}
# the torch side, which only `server` reaches, and only when it loads
TORCH_SIDE = {
    "service.inference.placement",
    "service.inference.bert",
    "service.inference.captured",
    "service.inference.compiled",
    "service.inference.inference",
    "service.inference.mounted",
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_opens_only_its_own_doors(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in {"buildtool", "docker", "numpy", "transformers", "httpx2"}
        assert path.stem in DOORS.get(top, {path.stem}), f"{path.name} imports {name}: only {DOORS[top]} may"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_torch_is_reached_only_when_a_model_is_loaded(path: Path) -> None:
    if path.stem not in DOORS["torch"]:
        assert not imports(path, top_level=True) & TORCH_SIDE


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem in PURE], ids=lambda path: path.stem)
def test_decisions_are_made_from_values(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & ACTING
