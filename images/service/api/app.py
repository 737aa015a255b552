"""The ASGI application: routes, the steps of an inference over HTTP, errors as JSON, and the middleware.

A request passes `with_telemetry` (ids, metrics, spans), `refuse_early` (429 and 503 before its body is read)
and `_with_errors`, and then reaches its route. Knows a `Classifier`, never torch.
"""

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

from service.api import page
from service.api.admission import Admission
from service.api.infer import (
    BINARY_HEADER,
    VERSION,
    join_body,
    parameters_of,
    parse_infer,
    render_infer,
    render_model,
    split_body,
)
from service.api.metrics import CONTENT_TYPE
from service.api.predict import parse_embeddings, parse_predict, render_embeddings, render_predict
from service.api.requests import Answer, InferRequest, read_json, timeout_of
from service.api.service import ON_DISCONNECT, Service, load_model, run_inference, unload_model
from service.api.tracing import track_request
from service.errors import RequestError, bad_request
from service.inference.classifier import ModelInfo
from service.settings import Limits

SERVER = {"name": "weir", "version": "1", "extensions": ["binary_tensor_data", "model_repository"]}
_PREFIXES = ("/predict", "/v1/embeddings", "/metrics", "/v2/health", "/v2/repository")
_INFERENCE_ROUTES = ("/predict", "/v1/embeddings", "/v2/models/infer")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger("service")


def create_app(service: Service) -> App:
    """Return the application over one Service."""
    metrics_page = _SharedMetricsPage(service.metrics.text)
    predict, infer, embeddings = (_Inference(service, format_) for format_ in (PREDICT, INFER, EMBEDDINGS))

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
        return Response(await metrics_page.text(), headers={"Content-Type": CONTENT_TYPE})

    model_path = "/v2/models/{name}"
    model_paths = (model_path, f"{model_path}/versions/{VERSION}")
    routes = [  # tried in this order, the most frequent first
        Route("/predict", predict, methods=["POST"]),
        *(Route(f"{path}/infer", infer, methods=["POST"]) for path in model_paths),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/metrics", metrics),
        *(
            route
            for path in model_paths
            for route in (Route(path, model), Route(f"{path}/ready", model_ready))
        ),
        *_repository_routes(service),
        Route("/v2", _constant(JSONResponse(SERVER))),
        Route("/", _constant(HTMLResponse(page.HTML, headers=page.HEADERS))),
    ]
    router = Router(
        routes, redirect_slashes=False
    )  # a redirect would show a proxy's internal scheme and host
    return with_telemetry(refuse_early(_with_errors(router, service), service.admission), service)


def _repository_routes(service: Service) -> list[Route]:
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


def _constant(response: Response) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_request: Request) -> Response:
        return response

    return endpoint


class _SharedMetricsPage:
    """The text of /metrics. Making one takes milliseconds; all take at most a tenth of the event loop."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._awaited: asyncio.Future[bytes] | None = None
        self._rests_until_s = 0.0  # on the event loop's clock

    async def text(self) -> bytes:
        """Return the text, made after this call. All callers who wait share one."""
        if self._awaited is None:
            loop = asyncio.get_running_loop()
            self._awaited = loop.create_future()
            loop.call_at(self._rests_until_s, self._settle, loop, self._awaited)
        return await asyncio.shield(self._awaited)  # others wait for the future, too

    def _settle(self, loop: asyncio.AbstractEventLoop, awaited: "asyncio.Future[bytes]") -> None:
        self._awaited = None
        begun_s = loop.time()
        try:
            awaited.set_result(self._make())
        except Exception as error:
            awaited.set_exception(error)
        self._rests_until_s = loop.time() + 9 * (loop.time() - begun_s)


# ---- inference ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One format of request and answer. `parameters`: the part of a document that may hold a timeout."""

    parse: Callable[[dict[str, Any], Limits, ModelInfo, bytes], InferRequest]
    render: Callable[[ModelInfo, InferRequest, Answer], Response]
    parameters: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda document: document


def _infer_response(info: ModelInfo, request: InferRequest, answer: Answer) -> Response:
    body, headers = join_body(*render_infer(info, request, answer))
    return Response(body, headers=headers)


PREDICT = Format(
    lambda document, limits, info, _binary: parse_predict(document, limits, info),
    lambda info, _request, answer: JSONResponse(render_predict(info, answer)),
)
INFER = Format(parse_infer, _infer_response, parameters_of)
EMBEDDINGS = Format(
    lambda document, limits, info, _binary: parse_embeddings(document, limits, info),
    lambda info, request, answer: JSONResponse(render_embeddings(info, request, answer)),
)


@dataclass(frozen=True)
class _Inference:
    """The endpoint of one format. An ASGI application: starlette's wrapper of functions takes longer."""

    service: Service
    format: Format

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        """Read the body, take a slot, parse, compute and render. Raises RequestError.

        The slot comes after the body, so that callers who send slowly hold none; all may be taken by then.
        """
        service = self.service
        path_name = request.path_params.get("name", "")
        service.require(path_name)
        body = await _read_body(request, service.limits)
        arrived_s = time.monotonic()
        with service.admission.slot():
            text, binary = split_body(body, request.headers.get(BINARY_HEADER))
            document = read_json(text)
            classifier = service.require(path_name or _model_name(document))
            infer_request = self.format.parse(document, service.limits, classifier.info, binary)
            timeout_s = timeout_of(self.format.parameters(document), request.headers.get("x-timeout-ms"))
            answer = await run_inference(
                service,
                classifier,
                infer_request,
                arrived_s=arrived_s,
                timeout_s=timeout_s,
                on_disconnect=request.scope["state"].get(ON_DISCONNECT),
            )
        return self.format.render(classifier.info, infer_request, answer)


def _model_name(document: Mapping[str, Any]) -> str:
    name = document.get("model", "")
    if not isinstance(name, str):
        raise bad_request("model must be a string")
    return name


async def _read_body(request: Request, limits: Limits) -> bytes:
    """Return the whole body. Raises RequestError: 413 if it is too large, 408 if too slow.

    Never holds more than the limit and one message.
    """
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


# ---- errors ---------------------------------------------------------------------------------------------


def _with_errors(router: Router, service: Service) -> App:
    """Answer what the routes raise with an error document, unless an answer has begun."""

    async def middleware(scope: Message, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        scope["app"] = router  # then starlette raises a 404 or 405 instead of answering it
        try:
            await router(scope, receive, send_and_note)
        except Exception as error:
            if has_begun:
                raise
            await _error_response(service, Request(scope), error)(scope, receive, send)

    return middleware


def _error_response(service: Service, request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, RequestError):
        status, message, headers = error.status, error.message, _retry_header(error)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        names = ", ".join(f"/v2/models/{name}" for name in service.models.index())
        status, message = 404, f"there is no {request.url.path[:200]}; models: {names or 'none yet'}"
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, dict(error.headers or {})
    else:
        log.error("a request failed", exc_info=error)
        status, message = 500, f"the service failed ({type(error).__name__}); its log says more"
    return JSONResponse(_error_document(request.url.path, status, message), status, headers)


def _error_document(path: str, status: int, message: str) -> dict[str, Any]:
    """The JSON of an error, in OpenAI's form under the paths of their clients."""
    if not path.startswith("/v1/"):
        return {"error": message}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _retry_header(error: RequestError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


# ---- middleware -----------------------------------------------------------------------------------------


def refuse_early(app: App, admission: Admission) -> App:
    """Refuse inference that can't be admitted (429, 503) when its head has arrived.

    Under overload most requests are refused, on the CPUs that compute the others. So the body of a refused
    request isn't waited for, and a caller who reads the answer early needn't send it.
    """

    async def middleware(scope: Message, receive: Receive, send: Send) -> None:
        refusal = None
        if scope.get("method") == "POST" and route_of(scope["path"]) in _INFERENCE_ROUTES:
            refusal = admission.refusal()
        if refusal is None:
            await app(scope, receive, send)
            return
        body = json.dumps(_error_document(scope["path"], refusal.status, refusal.message)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        raw_headers = [
            (name.encode(), value.encode()) for name, value in {**headers, **_retry_header(refusal)}.items()
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": raw_headers})
        await send({"type": "http.response.body", "body": body})

    return middleware


def with_telemetry(app: App, service: Service) -> App:
    """Give each request its ids, in its log lines and its answer, and count and time it."""

    async def middleware(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        with track_request(route_of(scope["path"]), headers, service.metrics, service.spans) as request:
            ids = [(key.encode(), value.encode()) for key, value in request.headers]

            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    request.status = message["status"]
                    message["headers"] = [_date_header(int(time.time())), *message["headers"], *ids]
                    if service.admission.draining:  # else the next request would meet a closed connection
                        message["headers"].append((b"connection", b"close"))
                await send(message)

            await app(scope, receive, send_with_headers)

    return middleware


def route_of(path: str) -> str:
    """The route of a path, without what callers choose in it: metrics have one series for each."""
    for prefix in _PREFIXES:
        if path == prefix or path.startswith(f"{prefix}/"):
            return prefix
    if path.startswith("/v2/models/"):
        return "/v2/models/infer" if path.endswith("/infer") else "/v2/models"
    return "/" if path == "/" else "other"


@lru_cache(maxsize=1)
def _date_header(second: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(second, usegmt=True).encode()
