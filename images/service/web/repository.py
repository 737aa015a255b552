"""The Open Inference Protocol's repository: which models there are, loading and unloading them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import RequestError, ServiceError, bad_request
from service.protocols.infer import VERSION
from service.web.service import Service


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
