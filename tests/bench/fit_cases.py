"""Cases for `weir probe fit` against brute force, on a CPU and on a GPU, and how one is run."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from board import tell

from probes.cli.fit import MOST_TRIED, guided
from probes.core.codec import encode
from probes.core.errors import ModelUnknown
from probes.fit.answer import answer, by_trials, compared, cpu_constants
from probes.fit.forecast import libraries
from probes.fit.limits import CGROUP_LIMIT
from probes.fit.report import Axis, Cap, FitReport, Largest, Measured, Question, Taken, Trial
from probes.fit.search import Hint
from probes.fit.worker import SearchRequest, measure
from probes.placement.models.families import from_config
from probes.placement.planner.machine import Constants

MIB = 2**20
NEAR = 3  # sizes on each side of the largest that brute force tries
ALL_UP_TO = 8  # where the largest isn't more than this, brute force tries all from 1 on
BRUTE = Path(__file__).with_name("fit_brute.py")


def qwen(width: int, layers: int, *, heads: int = 8, vocabulary: int = 8000) -> dict[str, object]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": 11 * width // 4,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def gpt2(width: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
        "n_head": 8,
        "vocab_size": 8000,
        "torch_dtype": "float32",
    }


def bert(width: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "intermediate_size": 4 * width,
        "vocab_size": 8000,
        "torch_dtype": "float32",
    }


def opt(width: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "ffn_dim": 4 * width,
        "vocab_size": 8000,
        "max_position_embeddings": 512,
    }


def vit(width: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "vit",
        "architectures": ["ViTModel"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "intermediate_size": 4 * width,
        "image_size": 128,
        "patch_size": 8,
    }


@dataclass(frozen=True)
class Case:
    """One question to one model, with a budget. `tuned`: the rules were written with it in sight."""

    name: str
    config: Mapping[str, object]
    budget: int
    asked: Question
    axis: Axis = "batch"
    cap: Cap = "process"  # of a CPU's trials
    tuned: bool = False


@dataclass(frozen=True)
class Seen:
    """What was found of a case."""

    case: Case
    measured: Measured
    tried: tuple[int, ...]  # by brute force
    brute: tuple[int, ...]  # those of them that fit
    rules_bytes: int  # predicted at the largest size
    trace_bytes: int
    guess: int  # predicted
    seconds: float
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        largest = self.measured.largest
        fits = tuple(size for size in self.tried if size <= largest.fits)
        return largest.exact and largest.fits > 0 and self.brute == fits

    @property
    def errors(self) -> tuple[float, float]:
        """Of the rules and of the trace, against the measured peak; all of it where nothing was measured."""
        peak = self.measured.peak_bytes
        if not isinstance(peak, int):
            return 1.0, 1.0
        return self.rules_bytes / peak - 1, self.trace_bytes / peak - 1


def train(**changed: object) -> Question:
    given = {"model": "m", "task": "training", "precision": "fp32", "tokens": 128, **changed}
    return Question(**given)  # type: ignore[arg-type]


def run(case: Case, device: str, machine: Constants | None = None, *, limit_s: float = 110.0) -> Seen:
    """Search, predict and brute-force one case. `seconds` are those of what `weir probe fit` does."""
    began = time.monotonic()
    place = machine or cpu_constants()
    ask = SearchRequest(
        json.dumps(dict(case.config)),
        case.asked,
        device,  # type: ignore[arg-type]
        case.axis,
        case.budget,
        Hint(),
        most=MOST_TRIED,
        limit_s=limit_s,
        cap=case.cap,
    )

    def heard(trial: Trial) -> None:
        tell(f"{case.name}: {trial.size} {trial.verdict}, {trial.seconds:.1f} s {trial.said[:80]}")

    try:
        model = from_config(case.config, name=case.name, where=case.name)
        report = answer(model, case.asked, place, budget=case.budget)
    except ModelUnknown:
        report = by_trials(case.asked, place, case.budget, measure(ask, heard))
    else:
        measured = measure(guided(ask, report, model, place), heard)
        report = compared(report, model, place, measured)
    seconds = time.monotonic() - began
    return checked(case, device, report, seconds)


def checked(case: Case, device: str, report: FitReport, seconds: float) -> Seen:
    """What brute force says of an answer, and how far off its predictions are."""
    measured = report.measured
    assert isinstance(measured, Measured)
    tried = sizes(measured.largest.fits)
    brute = brute_force(case, device, tried, in_cgroup=measured.cap == CGROUP_LIMIT)
    predicted = report.predicted_largest_batch if case.axis == "batch" else report.predicted_largest_tokens
    assert isinstance(predicted, Largest)
    here, traced = report.predicted_at_largest, measured.at_size
    handles = here.workspace if isinstance(here, Taken) and here.workspace else libraries(case.asked)
    return Seen(
        case,
        measured,
        tried,
        brute,
        rules_bytes=here.allocated if isinstance(here, Taken) else 0,
        trace_bytes=traced.allocated - traced.workspace + handles if isinstance(traced, Taken) else 0,
        guess=predicted.fits,
        seconds=seconds,
    )


def sizes(largest: int) -> tuple[int, ...]:
    """What brute force tries: all near the largest, or all from 1 on; half of it and twice as much."""
    if largest <= ALL_UP_TO:
        return tuple(range(1, largest + NEAR + 1))
    near = range(largest - NEAR, largest + NEAR + 1)
    return tuple(sorted({1, largest // 2, *near, 2 * largest}))


def brute_force(case: Case, device: str, tried: tuple[int, ...], *, in_cgroup: bool) -> tuple[int, ...]:
    """Those of the sizes that fit, each tried in a process of its own."""
    job = {
        "config": dict(case.config),
        "question": encode(case.asked),
        "device": device,
        "budget": case.budget,
        "axis": case.axis,
        "sizes": tried,
        "in_cgroup": in_cgroup,
    }
    done = subprocess.run(
        [sys.executable, str(BRUTE)], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    sys.stderr.write("".join(line + "\n" for line in done.stderr.splitlines() if line.startswith("size ")))
    return tuple(json.loads(done.stdout.splitlines()[-1]))
