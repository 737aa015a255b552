"""The HTTP side: routes, and the steps of every request. Knows a `Classifier`, never torch."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from service.errors import RequestError, bad_request
from service.model.classifier import ModelInfo
from service.protocols import binary
from service.protocols.asks import Answer, Ask, read_json, timeout_of
from service.protocols.embeddings import parse_embeddings, render_embeddings
from service.protocols.infer import parameters_of, parse_infer
from service.protocols.inferanswers import joined, render_infer, render_model
from service.protocols.predict import parse_predict, render_predict
from service.settings import Limits
from service.web import page, repository
from service.web.answering import answered
from service.web.metrics import CONTENT_TYPE
from service.web.observed import App, observed
from service.web.service import Service
from service.web.turnstile import error_document, retry_header, turnstile

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
    predict, infer, embeddings = (partial(_serve, service, form) for form in (PREDICT, INFER, EMBEDDINGS))

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
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    named = "/v2/models/{name}"
    routes = [
        Route("/", _constant(HTMLResponse(page.HTML, headers=page.HEADERS))),
        Route("/metrics", metrics),
        Route("/v2", _constant(JSONResponse(SERVER))),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        *(
            route
            for base in (named, named + "/versions/1")
            for route in (
                Route(base, model),
                Route(f"{base}/ready", model_ready),
                Route(f"{base}/infer", infer, methods=["POST"]),
            )
        ),
        *repository.routes(service),
        Route("/predict", predict, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: _refused,
            HTTPException: partial(_no_route, service),
            Exception: _broken,
        },
    )
    return observed(turnstile(app, service.admission), service)


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
            service, classifier, ask, arrived=arrived, timeout_s=timeout_s, gone=partial(_until_gone, request)
        )
    return form.render(classifier.info, ask, answer)


def _model_of(document: Mapping[str, Any]) -> str:
    name = document.get("model", "")
    if not isinstance(name, str):
        raise bad_request("model must be a string")
    return name


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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


def _error(
    request: Request, status: int, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    said = error_document(request.url.path, status, message)
    return JSONResponse(said, status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    return _error(request, error.status, error.message, retry_header(error))


async def _no_route(service: Service, request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        names = ", ".join(f"/v2/models/{name}" for name in service.models.index())
        return _error(request, 404, f"there is no {request.url.path[:200]}; models: {names or 'none yet'}")
    return _error(request, error.status_code, error.detail, dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    return _error(request, 500, f"the service failed ({type(error).__name__}); its log says more")
