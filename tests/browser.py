"""A headless Chromium, driven over a pair of pipes: pages at a given width, their errors, and pictures of them.

    python -m tests.browser FOLDER site/index.html ...     # draws pages into FOLDER, at both widths of tests/test_site.py

The protocol is Chromium's own (--remote-debugging-pipe): messages are JSON and end with a zero byte, so no driver is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = (1280, 420)
OPTIONS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars --remote-debugging-pipe"
OPTIONS += " --disable-background-networking --disable-component-update --disable-sync"
DEADLINE = 60.0  # seconds for an answer


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One Chromium with one tab."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (there, self._out), (self._in, back) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{there} 4>&{back}'  # Chromium reads from 3 and writes to 4
        arguments = [str(chromium()), *OPTIONS.split(), f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(["bash", "-c", command, *arguments], pass_fds=(there, back), stderr=subprocess.DEVNULL)
        os.close(there)
        os.close(back)
        self._calls, self._rest, self._session, self.events = 0, b"", "", list[dict[str, Any]]()
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # Chromium ends when its pipe is closed
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": arguments} | ({"sessionId": self._session} if self._session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)
        raise AssertionError(f"Chromium ended at {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        ends = time.monotonic() + DEADLINE
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._in], [], [], max(0.0, ends - time.monotonic()))
                assert ready, f"no answer from Chromium within {DEADLINE:.0f} s"
                read = os.read(self._in, 1 << 16)
                if not read:
                    return
                self._rest += read
            message, _, self._rest = self._rest.partition(b"\0")
            yield json.loads(message)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.events.clear()
        loaded = self.call("Page.navigate", url=url)
        assert "errorText" not in loaded, (url, loaded)
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            for event in self._messages():
                self.events.append(event)
                if event.get("method") == "Page.loadEventFired":
                    return
            raise AssertionError(f"Chromium ended at {url}")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page. A promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Return the errors of this page so far: exceptions, console errors, files that are missing, and files from other hosts."""
        found = []
        for event in self.events:
            name, data = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                thrown = data["exceptionDetails"]
                found.append(thrown.get("exception", {}).get("description", thrown["text"]))
            elif name == "Runtime.consoleAPICalled" and data["type"] in ("error", "assert"):
                found.append(str([argument.get("value", argument.get("description")) for argument in data["args"]]))
            elif name == "Log.entryAdded" and data["entry"]["level"] == "error":
                found.append(f"{data['entry']['text']} {data['entry'].get('url', '')}")
            elif name == "Network.requestWillBeSent" and not data["request"]["url"].startswith(("file:", "data:", "blob:", "about:")):
                found.append(f"fetches {data['request']['url']}")
        return found

    def picture(self, path: Path, most: int = 30_000) -> None:
        """Write a picture of the whole page."""
        width, height = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for page in map(Path, sys.argv[2:]):
            for width in WIDTHS:
                browser.resize(width)
                browser.open(page.absolute().as_uri())
                browser.picture(folder / f"{page.absolute().parent.name}-{page.stem}-{width}.png")
