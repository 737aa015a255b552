"""What HTTP and gRPC share: one process's state (`Service`), the steps from a checked request to its answer
(`run_inference`), and the control of models (`load_model`, `unload_model`). Knows no torch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from service.api.admission import Admission
from service.api.metrics import Metrics
from service.api.requests import Answer, InferRequest
from service.batching.batcher import Batcher, Policy
from service.batching.health import DeviceHealth
from service.batching.worker import ComputedBatch, Outcome, Worker
from service.errors import ModelUnreadable, RequestError, ServiceError, bad_request
from service.inference.classifier import Classifier, Encoded, ModelInfo, Text
from service.models import DEFAULT, Load, Models, names_in
from service.settings import Limits

if TYPE_CHECKING:
    from service.api.spans import Spans

OnDisconnect = Callable[[Callable[[], None]], None]  # registers what is called when the caller leaves
ON_DISCONNECT = "weir.on_disconnect"  # an OnDisconnect, in the `state` of each HTTP request's scope
_INLINE_CHARS = 4096  # are tokenized in the event loop; more takes longer than starting a thread

log = logging.getLogger("service")


async def _no_loader(name: str) -> Classifier:
    raise ModelUnreadable(f"nothing can load {name}")


class Service:
    """One process's state. Used from the event loop's thread, except for `_prove`."""

    def __init__(
        self,
        limits: Limits,
        *,
        load: Load = _no_loader,
        model_dir: Path = Path("/models"),
        model_control: bool = False,
        hub: bool = False,
    ) -> None:
        """`model_control`: callers may load and unload models. `hub`: the default model comes from a hub."""
        self.limits = limits
        self.model_dir = model_dir
        self.model_control = model_control
        self.hub = hub
        self.spans: Spans | None = None  # None: no OpenTelemetry
        self.models = Models(load)
        policy = Policy(
            limits.max_batch_tokens,
            limits.max_wait_ms / 1000,
            limits.max_queue_tokens,
            min_load_share=limits.min_load_share,
        )
        self.health = DeviceHealth(limits.canary_s, limits.stall_s)
        self.worker = Worker(
            Batcher(policy),
            self.health,
            canary=self._prove,
            on_batch=self._count_batch,
        )
        self.admission = Admission(
            limits.max_in_flight, self.worker.note_refusal, load_share=lambda: self.worker.load_share
        )
        self.metrics = Metrics(
            waiting=self.worker.waiting,
            in_flight=lambda: self.admission.in_flight,
            ready=lambda: self.ready,
            memory=self._memory,
            counts=lambda: {model.info.name: model.counts() for model in self.models.loaded},
        )

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be admitted, load permitting."""
        return self.models.ready and not self.admission.draining and self.health.state == "well"

    @property
    def live(self) -> bool:
        """Whether the service can still become ready; if not, only a new process can."""
        return self.health.state != "lost"

    def require(self, name: str = "") -> Classifier:
        """Return a model. Raises RequestError: 404, or 503 while it is loaded or its device is checked."""
        classifier = self.models.require(name)
        if self.health.state != "well":
            raise RequestError(503, f"the device is being checked: {self.health.reason}", retry_after_s=2)
        return classifier

    async def load_models(self) -> None:
        """Load all models of the directory and forget all others. Raises ServiceError."""
        await self.models.load_all(names_in(self.model_dir, hub=self.hub))

    def put(self, classifier: Classifier) -> None:
        """Serve a loaded classifier as the default model."""
        self.models.put(DEFAULT, classifier)

    def _count_batch(self, computed: ComputedBatch) -> None:
        self.metrics.batch_computed(computed)

    def _prove(self) -> None:
        """Run every model's canary. Called in the worker's thread."""
        for classifier in self.models.loaded:
            classifier.prove()

    def _memory(self) -> Mapping[str, int]:
        """Bytes of memory: the process's and the device's, and the sum of what the models pinned."""
        readings = [classifier.memory() for classifier in self.models.loaded]
        if not readings:
            return {}
        own = "pinned_by_placement"
        pinned = {own: sum(reading.get(own, 0) for reading in readings)} if own in readings[0] else {}
        return {**readings[0], **pinned}


async def run_inference(
    service: Service,
    classifier: Classifier,
    request: InferRequest,
    *,
    arrived_s: float,
    timeout_s: float | None,
    on_disconnect: OnDisconnect | None = None,
) -> Answer:
    """Tokenize, queue, and wait for the results. The caller holds a slot of `service.admission`.

    Raises RequestError: 429 where the queue is full, 504 at the deadline, 499 when the caller has left.
    `arrived_s`: when (monotonic seconds) the request was whole; `timeout_s` counts from then. gRPC needs no
    `on_disconnect`: it cancels this coroutine. Either way, rows that haven't begun aren't computed.
    """
    begun_s = time.monotonic()
    rows = await _encode(classifier, request.texts) if request.texts else request.encoded
    encoded_s = time.monotonic()
    compute = classifier.embed if request.task == "embed" else classifier.classify
    job = service.worker.submit(
        compute,
        rows,
        lengths=[len(row.ids) for row in rows],
        group=(id(classifier), request.task),
        deadline_s=float("inf") if timeout_s is None else arrived_s + timeout_s,
    )
    try:
        left_s = None if timeout_s is None else max(0.0, arrived_s + timeout_s - encoded_s)
        outcome = await _outcome_in_time(job.future, on_disconnect, left_s)
    except BaseException:
        service.worker.withdraw(job)
        raise
    if service.spans:
        service.spans.steps(outcome, begun_s=begun_s, encoded_s=encoded_s)
    answer = Answer(
        rows,
        outcome.results,
        wait_s=max(0.0, begun_s - arrived_s) + max(0.0, outcome.started_s - encoded_s),
        encode_s=encoded_s - begun_s,
        inference_s=outcome.compute_s,
    )
    asyncio.get_running_loop().call_soon(_log_answer, classifier.info, answer)  # after the answer is sent
    return answer


async def _encode(classifier: Classifier, texts: tuple[Text, ...]) -> tuple[Encoded, ...]:
    n_chars = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)
    if n_chars <= _INLINE_CHARS:
        return classifier.encode(texts)
    return await anyio.to_thread.run_sync(classifier.encode, texts, abandon_on_cancel=True)


async def _outcome_in_time(
    future: "asyncio.Future[Outcome]", on_disconnect: OnDisconnect | None, left_s: float | None
) -> Outcome:
    if on_disconnect:
        on_disconnect(partial(_set_error, future, 499, "the caller went away"))
    if left_s is None:
        return await future
    message = "the answer wasn't there before the deadline"
    timer = future.get_loop().call_later(left_s, _set_error, future, 504, message)
    try:
        return await future
    finally:
        timer.cancel()


def _set_error(future: "asyncio.Future[Outcome]", status: int, message: str) -> None:
    if not future.done():
        future.set_exception(RequestError(status, message))


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


async def load_model(service: Service, name: str) -> None:
    """Load a model for a caller. Raises RequestError: 403, or 400 with the reason why it can't be loaded."""
    _check_model_control(service)
    try:
        await service.models.load(name)
    except ServiceError as error:
        raise bad_request(str(error)) from error


def unload_model(service: Service, name: str) -> None:
    """Unload a model for a caller. Raises RequestError (403, 404)."""
    _check_model_control(service)
    service.models.unload(name)


def _check_model_control(service: Service) -> None:
    if not service.model_control:
        raise RequestError(
            403,
            "callers may not load models here; write `model_control: true` into the profile, or send SIGHUP",
        )
