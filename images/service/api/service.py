"""The state behind the routes: models, admission, the worker, metrics. Knows no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.api.admission import Admission
from service.api.infer import VERSION
from service.api.metrics import Metrics
from service.batching.batcher import Batcher, Policy
from service.batching.health import Pulse
from service.batching.worker import Done, Worker
from service.errors import ModelUnreadable, RequestError, ServiceError, bad_request
from service.inference.classifier import Classifier
from service.models import DEFAULT, Load, Models, names_in
from service.settings import Limits

if TYPE_CHECKING:
    from service.api.spans import Spans


WhenGone = Callable[[Callable[[], None]], None]  # has a function called when a request's caller leaves

WHEN_GONE = "weir.when_gone"  # a WhenGone, in the `state` of each request's scope


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
        self.pulse = Pulse(limits.canary_s, limits.stall_s)
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

    def _count(self, done: Done) -> None:
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
