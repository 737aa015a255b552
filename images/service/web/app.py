"""The HTTP side: routes, limits and health. Knows a `Classifier`, never torch."""

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import RequestError
from service.model.classifier import Classifier, Encoded, ModelInfo
from service.protocols import forms as protocol
from service.protocols.forms import Answer, Ask
from service.settings import Limits
from service.web.admission import RETRY_AFTER_S, Admission

MODEL = "finbert"
SERVER = {"name": "weir", "version": "1", "extensions": []}

log = logging.getLogger("service")

Parse = Callable[[dict[str, Any], Limits, ModelInfo], Ask]
Render = Callable[[ModelInfo, Ask, Answer], dict[str, Any]]


class Service:
    """The state behind the routes: the classifier once it is loaded and proven, and the admission to it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits.max_in_flight)
        self.classifier: Classifier | None = None
        self.worker = anyio.CapacityLimiter(1)  # one forward pass at a time has all the cores, or the GPU

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be admitted, load permitting."""
        return self.classifier is not None and not self.admission.draining

    def require(self) -> Classifier:
        """The classifier. Raises RequestError (503) while it is being loaded."""
        if self.classifier is None:
            raise RequestError(503, "the model is being loaded", retry_after_s=RETRY_AFTER_S)
        return self.classifier


def create_app(service: Service) -> Starlette:
    """The application over one Service."""
    predict = partial(
        _serve,
        service,
        protocol.parse_predict,
        lambda info, _ask, answer: protocol.render_predict(info, answer),
    )
    infer = partial(_serve, service, protocol.parse_infer, protocol.render_infer)

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if service.ready else 503)

    async def model(_request: Request) -> Response:
        return JSONResponse(protocol.render_model(service.require().info))

    routes = [
        Route("/v2", _constant(JSONResponse(SERVER))),
        Route("/v2/health/live", _constant(Response())),
        Route("/v2/health/ready", ready),
        Route(f"/v2/models/{MODEL}", model),
        Route(f"/v2/models/{MODEL}/ready", ready),
        Route(f"/v2/models/{MODEL}/infer", infer, methods=["POST"]),
        Route("/predict", predict, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={RequestError: _refused, HTTPException: _no_route, Exception: _broken},
    )


def _constant(response: Response) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_request: Request) -> Response:
        return response

    return endpoint


async def _serve(service: Service, parse: Parse, render: Render, request: Request) -> Response:
    """The steps of every inference: a body, a slot, a parsed request, the worker thread, an answer.

    The slot comes after the body, so that callers who send slowly hold none.
    """
    classifier = service.require()
    body = await _read_body(request, service.limits)
    arrived = time.perf_counter()
    with service.admission.slot():
        ask = parse(protocol.read_json(body), service.limits, classifier.info)
        answer = await anyio.to_thread.run_sync(
            partial(_answer, classifier, ask, arrived), limiter=service.worker, abandon_on_cancel=True
        )
    _log_answer(classifier.info, answer)
    return JSONResponse(render(classifier.info, ask, answer))


def _answer(classifier: Classifier, ask: Ask, arrived: float) -> Answer:
    """Runs in the worker thread. `arrived`: perf_counter's reading, in seconds, when the body was there."""
    started = time.perf_counter()
    rows = classifier.encode(ask.texts) if ask.texts else tuple(map(Encoded, ask.token_ids))
    encoded = time.perf_counter()
    probabilities = classifier.classify(rows)
    done = time.perf_counter()
    return Answer(
        rows, probabilities, wait_s=started - arrived, encode_s=encoded - started, inference_s=done - encoded
    )


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
    )


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, unless it is too large (413) or too slow (408). Keeps no more than the limit."""
    too_large = RequestError(413, f"the body is larger than {limits.max_body_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(limits.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, f"the body didn't arrive within {limits.body_timeout_s} s") from error
    except ClientDisconnect as error:
        raise RequestError(400, "the caller went away") from error
    return bytes(body)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


async def _refused(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    wait = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return _error(error.status, error.message, wait)


async def _no_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return _error(404, f"there is no {request.url.path[:200]}; the model is /v2/models/{MODEL}")
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _broken(_request: Request, error: Exception) -> Response:
    return _error(500, f"the service failed ({type(error).__name__}); its log says more")
