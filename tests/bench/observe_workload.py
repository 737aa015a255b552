"""The workload of the service's keep-list: every endpoint, kind of request, batch shape and mistake.

Reads WEIR_URL, as `weir observe --workload` and `weir build --workload` set it. Exits with 1 for an answer of
another status than expected. `--each N` sends N requests of each kind (default: 3). Standard library alone.
"""

import concurrent.futures
import json
import os
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

URL = os.environ.get("WEIR_URL", "http://127.0.0.1:8000")
TEXTS = [
    "Profits rose.",
    "The outlook is bleak for the rest of the year, the board said.",
    "Nothing changed.",
]
Request = tuple[str, str, object, set[int]]  # method, path, body (bytes or JSON), expected statuses


def binary_infer() -> tuple[bytes, dict[str, str]]:
    """An inference request with binary tensors."""
    ids = [101, 2000, 2001, 102]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "input_ids",
                    "datatype": "INT64",
                    "shape": [1, 4],
                    "parameters": {"binary_data_size": 32},
                }
            ],
            "outputs": [{"name": "probabilities", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return head + struct.pack("<4q", *ids), {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }


def kinds(model: str) -> Iterator[Request]:
    """One of each kind of request."""
    yield "GET", "/", None, {200}
    yield "GET", "/metrics", None, {200}
    yield "GET", "/v2", None, {200, 404}
    yield "GET", "/v2/health/live", None, {200}
    yield "GET", "/v2/health/ready", None, {200}
    yield "GET", f"/v2/models/{model}", None, {200}
    yield "GET", f"/v2/models/{model}/ready", None, {200}
    yield "POST", "/v2/repository/index", {}, {200}
    yield "POST", f"/v2/repository/models/{model}/load", {}, {200, 403, 400}
    yield "POST", "/v2/repository/models/none/unload", {}, {400, 403, 404}
    for count in (1, 2, 3, 8, 32):  # batch shapes
        yield "POST", "/predict", {"texts": (TEXTS * 11)[:count]}, {200, 429}
        yield "POST", "/predict", {"token_ids": [[2, 5, 6, 3]] * count}, {200, 429}
        yield "POST", "/v1/embeddings", {"input": (TEXTS * 11)[:count], "model": model}, {200, 429}
    for length in (1, 100, 300, 2000):
        yield "POST", "/predict", {"texts": ["rose " * length]}, {200, 429}
    yield "POST", "/predict", {"texts": [["Profits rose.", "Did they?"]]}, {200}
    yield "POST", "/predict", {"texts": TEXTS, "model": model}, {200, 429}
    yield (
        "POST",
        "/v1/embeddings",
        {"input": "one text", "encoding_format": "base64", "model": model},
        {200, 400},
    )
    text = {"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS[:2]}
    yield "POST", f"/v2/models/{model}/infer", {"inputs": [text]}, {200, 429}
    ids = [
        {"name": name, "datatype": kind, "shape": [1, 4], "data": data}
        for name, kind, data in (
            ("input_ids", "INT64", [2, 5, 6, 3]),
            ("attention_mask", "INT64", [1, 1, 1, 1]),
            ("token_type_ids", "INT32", [0, 0, 0, 0]),
        )
    ]
    yield "POST", f"/v2/models/{model}/infer", {"inputs": ids}, {200, 400, 429}
    yield "POST", f"/v2/models/{model}/infer", b"binary", {200, 400, 429}
    # mistakes
    yield "POST", "/predict", b"{", {400}
    yield "POST", "/predict", b"\xff\xfe", {400}
    yield "POST", "/predict", {"texts": []}, {400}
    yield "POST", "/predict", {"texts": ["x"] * 500}, {400, 413}
    yield "POST", "/predict", {"texts": [3]}, {400}
    yield "POST", "/predict", b"x" * (2 << 20), {413}
    yield "POST", "/predict", {"texts": ["x"], "model": "none"}, {400, 404}
    yield "POST", "/v2/models/none/infer", {"inputs": []}, {400, 404}
    yield "POST", "/v1/embeddings", {"input": 3}, {400}
    yield "GET", "/none", None, {404}
    yield "PUT", "/predict", {"texts": ["x"]}, {405}


def ask(method: str, path: str, body: object) -> int:
    """The status of one answer; 413 for one that is cut off while its body is still sent."""
    data, headers = (None, {}) if body is None else (body, {})
    if body == b"binary":
        data, headers = binary_infer()
    elif data is not None and not isinstance(data, bytes):
        data, headers = json.dumps(data).encode(), {"Content-Type": "application/json"}
    assert data is None or isinstance(data, bytes)
    request = urllib.request.Request(URL + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code
    except (urllib.error.URLError, ConnectionError):
        if isinstance(body, bytes) and len(body) > 1 << 20:
            return 413
        raise


def half_requests() -> None:
    """Connections that break off, and what is no HTTP."""
    host, port = URL.removeprefix("http://").rstrip("/").rsplit(":", 1)
    for sent in (
        b"",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        b"\x16\x03\x01 no HTTP\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(sent)


def main() -> int:
    """Send all of it; 1 for an unexpected status."""
    each = int(sys.argv[sys.argv.index("--each") + 1]) if "--each" in sys.argv else 3
    with urllib.request.urlopen(f"{URL}/v2/repository/index", b"{}", timeout=60) as answer:
        model = json.load(answer)[0]["name"]
    faults: list[str] = []
    sent = 0

    def judged(request: Request) -> None:
        method, path, body, expected = request
        status = ask(method, path, body)
        if status not in expected:
            faults.append(f"{method} {path} {str(body)[:60]}: {status} not {sorted(expected)}")

    requests = list(kinds(model))
    begun = time.monotonic()
    for _ in range(each):
        half_requests()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            sent += len(requests)
            calls: list[Callable[[], None]] = [
                lambda request=request: judged(request) for request in requests
            ]
            list(pool.map(lambda call: call(), calls))
    for fault in sorted(set(faults)):
        print(fault)
    took_s = time.monotonic() - begun
    print(f"{sent} requests of {len(requests)} kinds in {took_s:.1f} s, {len(faults)} unexpected")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
