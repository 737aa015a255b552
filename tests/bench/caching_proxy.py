"""An HTTP proxy on loopback that keeps what it fetched, so that all bootstraps see the same mirror."""

import contextlib
import hashlib
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from buildtool.core.files import locked, replacing


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, folder: Path) -> None:
        self._folder = folder
        super().__init__(*args)

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            kept = self._brought()
        except urllib.error.HTTPError as error:
            self.send_error(error.code)
            return
        except OSError as error:
            self.send_error(502, str(error))
            return
        with kept.open("rb") as file:
            self.send_response(200)
            self.send_header("Content-Length", str(kept.stat().st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)

    def _brought(self) -> Path:
        """The file of this address, fetched once."""
        kept = self._folder / hashlib.sha256(self.path.encode()).hexdigest()
        with locked(kept.with_suffix(".lock"), lambda: None):
            if not kept.exists():
                with (
                    urllib.request.urlopen(self.path) as answer,
                    replacing(kept) as partial,
                    partial.open("wb") as file,
                ):
                    shutil.copyfileobj(answer, file)
        return kept


@contextlib.contextmanager
def caching_proxy(folder: Path) -> Iterator[str]:
    """A proxy that keeps its files in `folder`; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, folder=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
