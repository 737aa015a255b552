"""Before the routes: what asks for inference and can't be admitted is refused at its head, cheaply.

Under overload most requests are refused, on the CPUs that compute the others. The body of a refused request
isn't waited for, and a caller who reads its answer early needn't send it.
"""

import json
from typing import Any

from service.api.admission import Admission
from service.api.observed import App, Message, Receive, Send, route_of
from service.errors import RequestError

_GUARDED = ("/predict", "/v1/embeddings", "/v2/models/infer")


def error_document(path: str, status: int, message: str) -> dict[str, Any]:
    """The JSON of an error, in OpenAI's form where their clients ask."""
    if not path.startswith("/v1/"):
        return {"error": message}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def retry_header(error: RequestError) -> dict[str, str]:
    """When to come back, where that is known."""
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def turnstile(app: App, admission: Admission) -> App:
    """The application behind its admission."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        refusal = None
        if scope.get("method") == "POST" and route_of(scope["path"]) in _GUARDED:
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
