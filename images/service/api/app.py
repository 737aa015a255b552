"""The HTTP side: routes, and the steps of every request. Knows a `Classifier`, never torch."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router

from service.api import infer as binary
from service.api import page
from service.api import service as repository
from service.api.answers import answered
from service.api.embeddings import parse_embeddings, render_embeddings
from service.api.infer import joined, parameters_of, parse_infer, render_infer, render_model
from service.api.metrics import CONTENT_TYPE
from service.api.observed import App, Message, Receive, Send, observed
from service.api.overload import error_document, retry_header, turnstile
from service.api.predict import parse_predict, render_predict
from service.api.requests import Answer, Ask, read_json, timeout_of
from service.api.service import WHEN_GONE, Service
from service.errors import RequestError, bad_request
from service.inference.classifier import ModelInfo
from service.settings import Limits

log = logging.getLogger("service")

SERVER = {"name": "weir", "version": "1", "extensions": ["binary_tensor_data", "model_repository"]}


@dataclass(frozen=True)
class Form:
    """One form of request and answer. `parameters`: where in the document a timeout may be."""

    parse: Callable[[dict[str, Any], Limits, ModelInfo, bytes], Ask]
    render: Callable[[ModelInfo, Ask, Answer], Response]
    parameters: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda document: document


def _infer_response(info: ModelInfo, ask: Ask, answer: Answer) -> Response:
    body, headers = joined(*render_infer(info, ask, answer))
    return Response(body, headers=headers)


PREDICT = Form(
    lambda document, limits, info, _raw: parse_predict(document, limits, info),
    lambda info, _ask, answer: JSONResponse(render_predict(info, answer)),
)
INFER = Form(parse_infer, _infer_response, parameters_of)
EMBEDDINGS = Form(
    lambda document, limits, info, _raw: parse_embeddings(document, limits, info),
    lambda info, ask, answer: JSONResponse(render_embeddings(info, ask, answer)),
)


def create_app(service: Service) -> App:
    """The application over one Service."""
    shared = _SharedPage(service.metrics.text)
    predict, infer, embeddings = (_Inference(service, form) for form in (PREDICT, INFER, EMBEDDINGS))

    async def live(_request: Request) -> Response:
        return Response(status_code=200 if service.live else 503)

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if service.ready else 503)

    async def model_ready(request: Request) -> Response:
        name = request.path_params["name"]
        return Response(status_code=200 if service.ready and service.models.is_ready(name) else 503)

    async def model(request: Request) -> Response:
        return JSONResponse(render_model(service.models.require(request.path_params["name"]).info))

    async def metrics(_request: Request) -> Response:
        return Response(await shared.page(), headers={"Content-Type": CONTENT_TYPE})

    named = "/v2/models/{name}"
    both = (named, named + "/versions/1")
    routes = [  # tried in this order: first what is asked most often
        Route("/predict", predict, methods=["POST"]),
        *(Route(f"{base}/infer", infer, methods=["POST"]) for base in both),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/metrics", metrics),
        *(route for base in both for route in (Route(base, model), Route(f"{base}/ready", model_ready))),
        *repository.routes(service),
        Route("/v2", _constant(JSONResponse(SERVER))),
        Route("/", _constant(HTMLResponse(page.HTML, headers=page.HEADERS))),
    ]
    router = Router(
        routes, redirect_slashes=False
    )  # a redirect would name the scheme and host of a proxy's inside
    return observed(turnstile(_with_errors(router, service), service.admission), service)


@dataclass(frozen=True)
class _Inference:
    """One form as an application of its own: starlette's wrappers of functions take longer than this."""

    service: Service
    form: Form

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        response = await _serve(self.service, self.form, Request(scope, receive))
        await response(scope, receive, send)


class _SharedPage:
    """A page whose making takes milliseconds of the event loop, and at most a tenth of its time."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._awaited: asyncio.Future[bytes] | None = None
        self._rests_until_s = 0.0  # of the event loop's clock

    async def page(self) -> bytes:
        """The page as it is after the call, or soon; all who wait for it share one."""
        if self._awaited is None:
            loop = asyncio.get_running_loop()
            self._awaited = loop.create_future()
            loop.call_at(self._rests_until_s, self._settle, loop, self._awaited)
        return await asyncio.shield(self._awaited)  # the others' as well

    def _settle(self, loop: asyncio.AbstractEventLoop, awaited: "asyncio.Future[bytes]") -> None:
        self._awaited = None
        begun_s = loop.time()
        try:
            awaited.set_result(self._make())
        except Exception as error:  # whatever it is, the callers have to hear of it
            awaited.set_exception(error)
        self._rests_until_s = loop.time() + 9 * (loop.time() - begun_s)


def _with_errors(router: Router, service: Service) -> App:
    """The routes, with an answer for whatever they raise before one has begun."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        scope["app"] = router  # so that it raises what it refuses
        try:
            await router(scope, receive, noting)
        except Exception as error:
            if begun:
                raise
            await _error_response(service, Request(scope), error)(scope, receive, send)

    return around


def _constant(response: Response) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_request: Request) -> Response:
        return response

    return endpoint


async def _serve(service: Service, form: Form, request: Request) -> Response:
    """The steps of every inference: a body, a slot, a parsed request, its batches, an answer.

    The slot comes after the body, so that callers who send slowly hold none; it may have gone meanwhile.
    """
    named = request.path_params.get("name", "")
    service.require(named)
    body = await _read_body(request, service.limits)
    arrived = time.monotonic()
    with service.admission.slot():
        text, raw = binary.split(body, request.headers.get(binary.HEADER))
        document = read_json(text)
        classifier = service.require(named or _model_of(document))
        ask = form.parse(document, service.limits, classifier.info, raw)
        timeout_s = timeout_of(form.parameters(document), request.headers.get("x-timeout-ms"))
        answer = await answered(
            service,
            classifier,
            ask,
            arrived=arrived,
            timeout_s=timeout_s,
            when_gone=request.scope["state"].get(WHEN_GONE),
        )
    return form.render(classifier.info, ask, answer)


def _model_of(document: Mapping[str, Any]) -> str:
    name = document.get("model", "")
    if not isinstance(name, str):
        raise bad_request("model must be a string")
    return name


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, unless it is too large (413) or too slow (408). Keeps no more than the limit."""
    too_large = RequestError(413, f"the body is larger than {limits.max_body_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestError(400, "the caller went away")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, f"the body didn't arrive within {limits.body_timeout_s} s") from error
    return bytes(body)


def _error(
    request: Request, status: int, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    said = error_document(request.url.path, status, message)
    return JSONResponse(said, status_code=status, headers=headers)


def _error_response(service: Service, request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _error(request, error.status, error.message, retry_header(error))
    if isinstance(error, HTTPException) and error.status_code == 404:
        names = ", ".join(f"/v2/models/{name}" for name in service.models.index())
        return _error(request, 404, f"there is no {request.url.path[:200]}; models: {names or 'none yet'}")
    if isinstance(error, HTTPException):
        return _error(request, error.status_code, error.detail, dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return _error(request, 500, f"the service failed ({type(error).__name__}); its log says more")
