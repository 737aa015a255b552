"""Cases for `weir probe fit` against brute force, on a CPU and on a GPU, and how one is run."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from board import tell

from probes.fit.answering.answer import answer, on_cpu
from probes.fit.measured.runs import Ask, measure
from probes.fit.question import Axis, Measured, Question
from probes.placement.models.reading import from_config
from probes.placement.planner.constants import Constants
from probes.shared.codec import encode

MIB = 2**20
BEYOND = 3  # sizes that brute force tries beyond the largest
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


@dataclass(frozen=True)
class Case:
    """One question to one model, with a budget. `tuned`: the rules were written with it in sight."""

    name: str
    config: Mapping[str, object]
    budget: int
    asked: Question
    axis: Axis = "batch"
    tuned: bool = False


@dataclass(frozen=True)
class Seen:
    """What was found of a case."""

    case: Case
    measured: Measured
    brute: tuple[int, ...]  # sizes that fit, of all from 1 to a few beyond the largest
    rules_bytes: int  # predicted at the largest size
    trace_bytes: int
    guess: int  # predicted
    seconds: float
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        largest = self.measured.largest
        fits = tuple(range(1, largest.fits + 1))
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
    """Search, predict and brute-force one case."""
    began = time.monotonic()
    place = machine or on_cpu()
    model = from_config(case.config, name=case.name, where=case.name)
    report = answer(model, case.asked, place, budget=case.budget)
    found = report.predicted_largest_batch if case.axis == "batch" else report.predicted_largest_tokens
    ask = Ask(
        case.config,
        case.asked,
        device,  # type: ignore[arg-type]
        case.axis,
        case.budget,
        guess=max(found.fits, 1),
        most=10**4,
        limit_s=limit_s,
    )
    measured = measure(
        ask, lambda trial: tell(f"{case.name}: {trial.size} {trial.verdict} {trial.said[:80]}")
    )
    seconds = time.monotonic() - began
    brute = brute_force(case, device, measured.largest.fits + BEYOND)
    rules, trace = predictions(case, place, measured)
    return Seen(case, measured, brute, rules, trace, found.fits, seconds)


def predictions(case: Case, place: Constants, measured: Measured) -> tuple[int, int]:
    """Bytes that torch's allocator hands out at the largest size, by rules and by the trace."""
    from probes.fit.predicted.forecast import forecast, place_of, with_size
    from probes.fit.question import Taken

    model = from_config(case.config, name=case.name, where=case.name)
    asked = with_size(case.asked, case.axis, max(measured.largest.fits, 1))
    where = place_of(place, model, asked)
    rules = forecast(model, asked, where).taken.allocated
    handles = where.workspace * (2 if asked.task == "training" else 1)
    traced = measured.at_size.allocated + handles if isinstance(measured.at_size, Taken) else 0
    return rules, traced


def brute_force(case: Case, device: str, last: int) -> tuple[int, ...]:
    """Every size from 1 to `last`, each in a process of its own."""
    job = {
        "config": dict(case.config),
        "question": encode(case.asked),
        "device": device,
        "budget": case.budget,
        "axis": case.axis,
        "last": last,
    }
    done = subprocess.run(
        [sys.executable, str(BRUTE)], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    sys.stderr.write("".join(line + "\n" for line in done.stderr.splitlines() if line.startswith("size ")))
    return tuple(json.loads(done.stdout.splitlines()[-1]))
