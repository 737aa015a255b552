"""A headless Chromium, driven over the DevTools protocol through two pipes: no port, no driver program.

Messages are JSON, each ended by a zero byte: we write to the browser's descriptor 3 and read from its 4
(`--remote-debugging-pipe`).
"""

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 180.0  # for one answer; a browser's first start on a busy machine takes several


class BrowserFailed(Exception):
    """The browser didn't start, ended, refused a command or stayed silent."""


class Browser:
    """A browser with a new profile. Close it, or use it as a context manager."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._log = Path(self._profile.name, "browser.log")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the shell puts the pipes where the browser looks for them
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [program, *FLAGS, f"--user-data-dir={self._profile.name}/profile", "about:blank"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command, "browser", *arguments],
                pass_fds=(to_browser, from_browser),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove its profile."""
        os.close(self._write)  # it ends by itself when nobody can command it
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def send(self, method: str, session: str = "", **params: object) -> dict:
        """One command and its result. Raises BrowserFailed."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                break
            self.events.append(answer)
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait_for(self, method: str, session: str) -> None:
        """Until an event has come, now or before. Raises BrowserFailed."""
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                why = "ended" if ready else f"said nothing for {PATIENCE_S:.0f} s"
                raise BrowserFailed(f"the browser {why}:\n{self._log.read_text(errors='replace')[-2000:]}")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """A new tab of that size, loaded to the end; it knows what it asked for and complained about.

        Raises BrowserFailed when there is no such page.
        """
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.scheme(dark=dark)
        failed = page.send("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserFailed(f"{url}: {failed}")
        self.wait_for("Page.loadEventFired", session)
        page.settle()
        return page


@dataclass
class Page:
    """One tab."""

    browser: Browser
    session: str
    own: tuple[str, ...] = field(default=("about:", "data:"))  # what isn't fetched from anywhere

    def send(self, method: str, **params: object) -> dict:
        """One command to this tab and its result."""
        return self.browser.send(method, self.session, **params)

    def resize(self, width: int, height: int) -> None:
        """Another width and height, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, *, dark: bool) -> None:
        """Another colour scheme."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def close(self) -> None:
        """Close the tab, whose events are forgotten: what it asked for isn't known any more."""
        self.send("Page.close")
        events = self.browser.events
        events[:] = [event for event in events if event.get("sessionId") != self.session]

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression, awaited if it is a promise. Raises BrowserFailed."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserFailed(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def settle(self) -> None:
        """Until what was changed has been laid out and painted."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def boxes(self, selector: str) -> list[tuple[float, float]]:
        """Width and height of every element that is displayed."""
        inner = "e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height]"
        shown = "e => e.checkVisibility()"
        found = self.evaluate(f"[...document.querySelectorAll({selector!r})].filter({shown}).map({inner})")
        return [(width, height) for width, height in found]  # type: ignore[attr-defined]

    def text(self, selector: str) -> str:
        """What the first such element shows."""
        return str(self.evaluate(f"document.querySelector({selector!r}).innerText"))

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        self.settle()
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**size, "scale": 1}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))

    def requests(self) -> list[str]:
        """Every address that was asked for, the page's own left out."""
        sent = [e["params"]["request"]["url"] for e in self._events("Network.requestWillBeSent")]
        return [url for url in sent[1:] if not url.startswith(self.own)]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, what the browser logged."""
        said = [
            str(e["params"]["args"])
            for e in self._events("Runtime.consoleAPICalled")
            if e["params"]["type"] in ("error", "warning", "assert")
        ]
        thrown = [str(e["params"]["exceptionDetails"]) for e in self._events("Runtime.exceptionThrown")]
        logged = [str(e["params"]["entry"]) for e in self._events("Log.entryAdded")]
        return [*said, *thrown, *logged]

    def _events(self, method: str) -> list[dict]:
        self.evaluate("0")  # whatever was on its way has arrived behind the answer
        return [
            e for e in self.browser.events if e.get("method") == method and e["sessionId"] == self.session
        ]
