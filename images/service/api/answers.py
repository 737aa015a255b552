"""From a checked request to its answer: the steps that every protocol shares."""

import asyncio
import logging
import time
from functools import partial

import anyio.to_thread

from service.api.requests import Answer, Ask
from service.api.service import Service, WhenGone
from service.batching.worker import Outcome
from service.errors import RequestError
from service.inference.classifier import Classifier, Encoded, ModelInfo, Text

_INLINE_CHARS = 4096  # tokenised at once in the event loop; more takes longer than a thread's start

log = logging.getLogger("service")


async def answered(
    service: Service,
    classifier: Classifier,
    ask: Ask,
    *,
    arrived: float,
    timeout_s: float | None,
    when_gone: WhenGone | None = None,
) -> Answer:
    """Encode, queue, and wait for the results, the deadline, or the caller's leaving. Raises RequestError.

    `arrived`: when (monotonic seconds) the request was whole. A protocol that cancels this when the caller
    leaves needs no `when_gone`. Either way what hasn't begun isn't computed.
    """
    begun = time.monotonic()
    rows = await _encode(classifier, ask.texts) if ask.texts else ask.encoded
    encoded = time.monotonic()
    compute = classifier.embed if ask.task == "embed" else classifier.classify
    job = service.worker.submit(
        compute,
        rows,
        lengths=[len(row.ids) for row in rows],
        group=(id(classifier), ask.task),
        deadline_s=float("inf") if timeout_s is None else arrived + timeout_s,
    )
    try:
        left_s = None if timeout_s is None else max(0.0, arrived + timeout_s - encoded)
        outcome = await _first(job.future, when_gone, left_s)
    except BaseException:  # this caller's, not the worker's: nobody waits for it any more
        service.worker.withdraw(job)
        raise
    if service.spans:
        service.spans.steps(outcome, begun_s=begun, encoded_s=encoded)
    answer = Answer(
        rows,
        outcome.results,
        wait_s=max(0.0, begun - arrived) + max(0.0, outcome.started_s - encoded),
        encode_s=encoded - begun,
        inference_s=outcome.compute_s,
    )
    asyncio.get_running_loop().call_soon(_log_answer, classifier.info, answer)  # the caller comes first
    return answer


async def _encode(classifier: Classifier, texts: tuple[Text, ...]) -> tuple[Encoded, ...]:
    n_chars = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)
    if n_chars <= _INLINE_CHARS:
        return classifier.encode(texts)
    return await anyio.to_thread.run_sync(classifier.encode, texts, abandon_on_cancel=True)


async def _first(
    future: "asyncio.Future[Outcome]",
    when_gone: WhenGone | None,
    left_s: float | None,
) -> Outcome:
    """The outcome. Raises RequestError where the deadline comes first (504), or the caller leaves (499)."""
    if when_gone:
        when_gone(partial(_end, future, 499, "the caller went away"))
    if left_s is None:
        return await future
    late = "the answer wasn't there before the deadline"
    timer = future.get_loop().call_later(left_s, _end, future, 504, late)
    try:
        return await future
    finally:
        timer.cancel()


def _end(future: "asyncio.Future[Outcome]", status: int, why: str) -> None:
    if not future.done():
        future.set_exception(RequestError(status, why))


def _log_answer(info: ModelInfo, answer: Answer) -> None:
    log.info(
        "predicted rows=%d tokens=%d weights=%s device=%s wait_s=%.4f encode_s=%.4f inference_s=%.4f",
        len(answer.rows),
        sum(len(row.ids) for row in answer.rows),
        info.weights,
        info.device,
        answer.wait_s,
        answer.encode_s,
        answer.inference_s,
        extra={"data": {"model": info.name}},
    )
