"""Brute force beside the search of `weir probe fit`: given sizes, each in a fork of its own.

`python tests/bench/fit_brute.py` reads a job from stdin (config, question, device, budget, axis, sizes,
in_cgroup) and writes the sizes that fit. It shares a trial with the search and none of the search itself.
"""

import json
import sys
from contextlib import nullcontext, redirect_stdout

from probes.core.codec import decode
from probes.fit import limits
from probes.fit import trial as trial_module
from probes.fit.forecast import with_size
from probes.fit.report import Question
from probes.fit.worker import ForkAnswer, preload, run_in_fork

PATIENCE_S = 120.0


def main() -> int:
    job = json.load(sys.stdin)
    preload()
    asked = decode(Question, job["question"], "question")
    if job["device"] == "cpu":
        trial_module.warm(job["config"], asked)
    below = limits.parent() if job["in_cgroup"] else None
    fitting = []
    with redirect_stdout(sys.stderr):
        for size in job["sizes"]:
            question = with_size(asked, job["axis"], size)
            made = (
                limits.group(below, job["budget"], size)
                if isinstance(below, limits.Parent)
                else nullcontext(None)
            )
            with made as group:

                def work(
                    question: Question = question, size: int = size, group: limits.Group | None = group
                ) -> ForkAnswer:
                    trial = trial_module.run(
                        job["config"],
                        question,
                        job["device"],
                        budget=job["budget"],
                        size=size,
                        group=group,
                    )
                    return ForkAnswer(trial=trial)

                ended = run_in_fork(work, PATIENCE_S)
                killed = group is not None and group.kills() > 0
            trial = ended.answer.trial if ended.answer else None
            if trial is None and not killed:
                print(f"size {size}: no answer, exit code {ended.code}", ended.answer)
            elif trial is not None and trial.verdict == "fits":
                fitting.append(size)
            elif trial is not None and trial.verdict == "crashed":
                print(f"size {size}: {trial.said}")
    print(json.dumps(fitting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
