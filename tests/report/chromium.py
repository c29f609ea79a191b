"""A headless Chromium, spoken to over its debugging pipe: no driver, no port, no network.

Source: https://chromedevtools.github.io/devtools-protocol, --remote-debugging-pipe.
"""

import base64
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
--disable-background-networking --disable-component-update --disable-sync --disable-extensions
--hide-scrollbars --remote-debugging-pipe""".split()

#: Seconds that one answer may take; the machine may be busy.
PATIENCE = 120


def program() -> str:
    """Chromium's path. Skips the test where there is none; in CI, fails it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail("CI has no Chromium: .ci/run installs it")
    if found is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    return found


class Chromium:
    """One page of a browser, and all that happened in it. Use as a context manager."""

    def __init__(self, profile: Path):
        """Start it.

        Args:     profile: an empty folder for what it writes.
        """
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in), os.close(theirs_out)
        start = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'  # the numbers that it expects
        command = ["bash", "-c", start, "", program(), *FLAGS, f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        env = os.environ | {"HOME": str(profile)}
        self._process = subprocess.Popen(command, pass_fds=theirs, env=env, **quiet)
        for fd in theirs:
            os.close(fd)
        self._selector, self._left, self._id = selectors.DefaultSelector(), b"", 0
        self._selector.register(self._in, selectors.EVENT_READ)
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something; what is answered. Events that come meanwhile are kept."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self._id:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready = self._selector.select(max(until - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            got = os.read(self._in, 1 << 20)
            assert got, f"Chromium has ended: {self._process.poll()}"
            self._left += got
        first, _, self._left = self._left.partition(b"\0")
        return json.loads(first)

    def open(
        self,
        page: Path,
        width: int,
        height: int = 900,
        *,
        dark: bool = False,
        fragment: str = "",
    ) -> None:
        """Show a file in a window of some size; a narrow one is a phone's.

        Args:     fragment: what follows the file in its address, from # on.
        """
        size = {"width": width, "height": height, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() + fragment)
        until = time.monotonic() + PATIENCE
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next(until))

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """The pointer, to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of the window."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def complaints(self) -> list[str]:
        """What the console was told: errors, warnings, refusals by the page's policy."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in names]

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait(30)
        for fd in (self._in, self._out):
            os.close(fd)
