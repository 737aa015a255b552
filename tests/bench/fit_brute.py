"""Brute force beside the search of `weir probe fit`: every size from 1 on, each in a fork of its own.

`python tests/bench/fit_brute.py` reads a job from stdin (config, question, device, budget, axis, last) and
writes the sizes that fit. It shares a trial with the search and none of the search itself.
"""

import json
import sys
from contextlib import redirect_stdout

from probes.fit.measured import onetrial
from probes.fit.measured.nursery import Answer, forked, preload
from probes.fit.predicted.forecast import with_size
from probes.fit.question import Question
from probes.shared.codec import decode

PATIENCE_S = 120.0


def main() -> int:
    job = json.load(sys.stdin)
    preload()
    asked = decode(Question, job["question"], "question")
    fitting = []
    with redirect_stdout(sys.stderr):
        for size in range(1, job["last"] + 1):
            question = with_size(asked, job["axis"], size)

            def work(question: Question = question, size: int = size) -> Answer:
                trial = onetrial.run(job["config"], question, job["device"], budget=job["budget"], size=size)
                return Answer(trial=trial)

            ended = forked(work, PATIENCE_S)
            trial = ended.answer.trial if ended.answer else None
            if trial is None:
                print(f"size {size}: no answer, signal {ended.signal}", ended.answer)
            elif trial.verdict == "fits":
                fitting.append(size)
            elif trial.verdict == "crashed":
                print(f"size {size}: {trial.said}")
    print(json.dumps(fitting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
