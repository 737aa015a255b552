"""The state behind the routes: models, admission, the worker, metrics. Knows no torch."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.api.admission import Admission
from service.api.infer import VERSION
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


OnDisconnect = Callable[[Callable[[], None]], None]  # has a function called when a request's caller leaves

ON_DISCONNECT = "weir.when_gone"  # a WhenGone, in the `state` of each request's scope


async def _no_loader(name: str) -> Classifier:
    raise ModelUnreadable(f"nothing can load {name}")


class Service:
    """One process's state. Used from the event loop's thread, but for `_prove`."""

    def __init__(
        self,
        limits: Limits,
        *,
        load: Load = _no_loader,
        model_dir: Path = Path("/models"),
        model_control: bool = False,
        hub: bool = False,
    ) -> None:
        """`hub`: the default model comes from a hub."""
        self.limits = limits
        self.model_dir = model_dir
        self.model_control = model_control
        self.hub = hub
        self.spans: Spans | None = None  # no OpenTelemetry
        self.models = Models(load)
        policy = Policy(limits.max_batch_tokens, limits.max_wait_ms / 1000, limits.max_queue_tokens)
        self.pulse = DeviceHealth(limits.canary_s, limits.stall_s)
        self.worker = Worker(Batcher(policy), self.pulse, canary=self._prove, on_batch=self._count)
        self.admission = Admission(limits.max_in_flight, self.worker.refused, room=lambda: self.worker.room)
        self.metrics = Metrics(
            waiting=self.worker.waiting,
            in_flight=lambda: self.admission.in_flight,
            ready=lambda: self.ready,
            memory=self._memory,
            counts=lambda: {each.info.name: each.counts() for each in self.models.loaded},
        )

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be admitted, load permitting."""
        return self.models.ready and not self.admission.draining and self.pulse.state == "well"

    @property
    def live(self) -> bool:
        """Whether waiting can still help; if not, only a new process can."""
        return self.pulse.state != "lost"

    def require(self, name: str = "") -> Classifier:
        """The model. Raises RequestError: 404, or 503 while it is loaded or its device is checked."""
        classifier = self.models.require(name)
        if self.pulse.state != "well":
            raise RequestError(503, f"the device is being checked: {self.pulse.reason}", retry_after_s=2)
        return classifier

    async def load_models(self) -> None:
        """Load all models that there are now, and forget all others. Raises ServiceError."""
        await self.models.load_all(names_in(self.model_dir, hub=self.hub))

    def put(self, classifier: Classifier) -> None:
        """Serve a classifier that is loaded already, as the default model."""
        self.models.put(DEFAULT, classifier)

    def _count(self, done: ComputedBatch) -> None:
        self.metrics.batch(done)

    def _prove(self) -> None:
        """In the worker's thread."""
        for classifier in self.models.loaded:
            classifier.prove()

    def _memory(self) -> Mapping[str, int]:
        """The process's and the device's, which all models share, and the sum of what each has pinned."""
        each = [classifier.memory() for classifier in self.models.loaded]
        if not each:
            return {}
        own = "pinned_by_placement"
        return {**each[0], **({own: sum(one.get(own, 0) for one in each)} if own in each[0] else {})}


def routes(service: Service) -> list[Route]:
    """The routes over one Service."""

    async def index(_request: Request) -> Response:
        return JSONResponse(
            [
                {"name": name, "version": VERSION, "state": entry.state, "reason": entry.reason}
                for name, entry in service.models.index().items()
            ]
        )

    async def load(request: Request) -> Response:
        await load_model(service, request.path_params["name"])
        return JSONResponse({})

    async def unload(request: Request) -> Response:
        unload_model(service, request.path_params["name"])
        return JSONResponse({})

    async def openai_models(_request: Request) -> Response:
        models = [{"id": name, "object": "model", "owned_by": "weir"} for name in service.models.index()]
        return JSONResponse({"object": "list", "data": models})

    return [
        Route("/v2/repository/index", index, methods=["POST", "GET"]),
        Route("/v2/repository/models/{name}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{name}/unload", unload, methods=["POST"]),
        Route("/v1/models", openai_models),
    ]


async def load_model(service: Service, name: str) -> None:
    """What a caller asks for. Raises RequestError: 403, or 400 with the reason why it can't be loaded."""
    _check_control(service)
    try:
        await service.models.load(name)
    except ServiceError as error:
        raise bad_request(str(error)) from error


def unload_model(service: Service, name: str) -> None:
    """What a caller asks for. Raises RequestError (403, 404)."""
    _check_control(service)
    service.models.unload(name)


def _check_control(service: Service) -> None:
    if not service.model_control:
        raise RequestError(
            403,
            "callers may not load models here; write `model_control: true` into the profile, or send SIGHUP",
        )


_INLINE_CHARS = 4096  # tokenised at once in the event loop; more takes longer than a thread's start

log = logging.getLogger("service")


async def run_inference(
    service: Service,
    classifier: Classifier,
    ask: InferRequest,
    *,
    arrived: float,
    timeout_s: float | None,
    when_gone: OnDisconnect | None = None,
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
        outcome = await _await_outcome(job.future, when_gone, left_s)
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


async def _await_outcome(
    future: "asyncio.Future[Outcome]",
    when_gone: OnDisconnect | None,
    left_s: float | None,
) -> Outcome:
    """The outcome. Raises RequestError where the deadline comes first (504), or the caller leaves (499)."""
    if when_gone:
        when_gone(partial(_fail, future, 499, "the caller went away"))
    if left_s is None:
        return await future
    late = "the answer wasn't there before the deadline"
    timer = future.get_loop().call_later(left_s, _fail, future, 504, late)
    try:
        return await future
    finally:
        timer.cancel()


def _fail(future: "asyncio.Future[Outcome]", status: int, why: str) -> None:
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
