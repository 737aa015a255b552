"""The HTTP side: routes, and the steps of every request. Knows a `Classifier`, never torch."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router

from service.api import infer as binary
from service.api import page
from service.api import service as repository
from service.api.admission import Admission
from service.api.infer import join_body, parameters_of, parse_infer, render_infer, render_model
from service.api.metrics import CONTENT_TYPE
from service.api.predict import parse_embeddings, parse_predict, render_embeddings, render_predict
from service.api.requests import Answer, InferRequest, read_json, timeout_of
from service.api.service import ON_DISCONNECT, Service, run_inference
from service.api.tracing import track_request
from service.errors import RequestError, bad_request
from service.inference.classifier import ModelInfo
from service.settings import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ROUTES = ("/predict", "/v1/embeddings", "/metrics", "/v2/health", "/v2/repository")


def route_of(path: str) -> str:
    """A path without what callers choose in it, so that metrics stay few."""
    for route in _ROUTES:
        if path == route or path.startswith(f"{route}/"):
            return route
    if path.startswith("/v2/models/"):
        return "/v2/models/infer" if path.endswith("/infer") else "/v2/models"
    return "/" if path == "/" else "other"


@lru_cache(maxsize=1)
def _date_header(second: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(second, usegmt=True).encode()


def with_telemetry(app: App, service: Service) -> App:
    """The application with ids in its log and answers, and counted."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        with track_request(route_of(scope["path"]), given, service.metrics, service.spans) as request:
            added = [(key.encode(), value.encode()) for key, value in request.headers]

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    request.status = message["status"]
                    message["headers"] = [_date_header(int(time.time())), *message["headers"], *added]
                    if service.admission.draining:  # else the next request would meet a closed connection
                        message["headers"].append((b"connection", b"close"))
                await send(message)

            await app(scope, receive, noting)

    return around


_INFERENCE_ROUTES = ("/predict", "/v1/embeddings", "/v2/models/infer")


def error_document(path: str, status: int, message: str) -> dict[str, Any]:
    """The JSON of an error, in OpenAI's form where their clients ask."""
    if not path.startswith("/v1/"):
        return {"error": message}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def retry_header(error: RequestError) -> dict[str, str]:
    """When to come back, where that is known."""
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def refuse_early(app: App, admission: Admission) -> App:
    """The application behind its admission."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        refusal = None
        if scope.get("method") == "POST" and route_of(scope["path"]) in _INFERENCE_ROUTES:
            refusal = admission.refusal()
        if refusal is None:
            await app(scope, receive, send)
            return
        body = json.dumps(error_document(scope["path"], refusal.status, refusal.message)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        pairs = [(a.encode(), b.encode()) for a, b in {**headers, **retry_header(refusal)}.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    return around


log = logging.getLogger("service")

SERVER = {"name": "weir", "version": "1", "extensions": ["binary_tensor_data", "model_repository"]}


@dataclass(frozen=True)
class Format:
    """One form of request and answer. `parameters`: where in the document a timeout may be."""

    parse: Callable[[dict[str, Any], Limits, ModelInfo, bytes], InferRequest]
    render: Callable[[ModelInfo, InferRequest, Answer], Response]
    parameters: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda document: document


def _infer_response(info: ModelInfo, ask: InferRequest, answer: Answer) -> Response:
    body, headers = join_body(*render_infer(info, ask, answer))
    return Response(body, headers=headers)


PREDICT = Format(
    lambda document, limits, info, _raw: parse_predict(document, limits, info),
    lambda info, _ask, answer: JSONResponse(render_predict(info, answer)),
)
INFER = Format(parse_infer, _infer_response, parameters_of)
EMBEDDINGS = Format(
    lambda document, limits, info, _raw: parse_embeddings(document, limits, info),
    lambda info, ask, answer: JSONResponse(render_embeddings(info, ask, answer)),
)


def create_app(service: Service) -> App:
    """The application over one Service."""
    shared = _SharedMetricsPage(service.metrics.text)
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
    return with_telemetry(refuse_early(_with_errors(router, service), service.admission), service)


@dataclass(frozen=True)
class _Inference:
    """One form as an application of its own: starlette's wrappers of functions take longer than this."""

    service: Service
    form: Format

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        response = await _handle_inference(self.service, self.form, Request(scope, receive))
        await response(scope, receive, send)


class _SharedMetricsPage:
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


async def _handle_inference(service: Service, form: Format, request: Request) -> Response:
    """The steps of every inference: a body, a slot, a parsed request, its batches, an answer.

    The slot comes after the body, so that callers who send slowly hold none; it may have gone meanwhile.
    """
    named = request.path_params.get("name", "")
    service.require(named)
    body = await _read_body(request, service.limits)
    arrived = time.monotonic()
    with service.admission.slot():
        text, raw = binary.split_body(body, request.headers.get(binary.BINARY_HEADER))
        document = read_json(text)
        classifier = service.require(named or _model_of(document))
        ask = form.parse(document, service.limits, classifier.info, raw)
        timeout_s = timeout_of(form.parameters(document), request.headers.get("x-timeout-ms"))
        answer = await run_inference(
            service,
            classifier,
            ask,
            arrived=arrived,
            timeout_s=timeout_s,
            when_gone=request.scope["state"].get(ON_DISCONNECT),
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


def _json_error(
    request: Request, status: int, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    said = error_document(request.url.path, status, message)
    return JSONResponse(said, status_code=status, headers=headers)


def _error_response(service: Service, request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _json_error(request, error.status, error.message, retry_header(error))
    if isinstance(error, HTTPException) and error.status_code == 404:
        names = ", ".join(f"/v2/models/{name}" for name in service.models.index())
        return _json_error(
            request, 404, f"there is no {request.url.path[:200]}; models: {names or 'none yet'}"
        )
    if isinstance(error, HTTPException):
        return _json_error(request, error.status_code, error.detail, dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return _json_error(request, 500, f"the service failed ({type(error).__name__}); its log says more")
