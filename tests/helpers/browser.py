"""A headless Chromium on two pipes: open a file, set a screen, ask the page. Nothing is installed or downloaded."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * 0.0.0.0",  # a page that asks the network for anything fails its test
)


def find() -> str | None:
    """The browser on this machine, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with one page; ``messages`` are the console's errors and warnings so far."""

    def __init__(self, seconds: float = 60.0) -> None:
        path = find()
        assert path is not None
        self._profile = tempfile.mkdtemp(prefix="rlk-browser-")
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        command = ["bash", "-c", shell, "-", str(read_end), str(write_end), path, *ARGUMENTS]
        self._child = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._seconds, self._number, self._buffer = seconds, 0, b""
        self._session = ""
        self.messages: list[str] = []

    def __enter__(self) -> Browser:
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path, width: int, height: int, theme: str = "light", media: str = "") -> None:
        """Shows ``path`` on a screen of this size, in ``light`` or ``dark``, and waits until its script has run."""
        self.screen(width, height, theme, media)
        self._call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + self._seconds
        while not self.ask("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < end, f"{path.name} did not load"
            time.sleep(0.05)

    def screen(self, width: int, height: int, theme: str, media: str = "") -> None:
        """Size in CSS pixels, colour scheme, and ``print`` or the screen's own medium."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One key, down and up."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        body: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            body["sessionId"] = self._session
        os.write(self._write, json.dumps(body).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while True:
            message = self._next(end)
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._note(message)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        fields = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.messages.append(f"{fields['entry']['level']}: {fields['entry']['text']}")
        elif message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(fields["exceptionDetails"])[:500])
        elif message.get("method") == "Runtime.consoleAPICalled" and fields["type"] in ("error", "warning", "assert"):
            self.messages.append(json.dumps(fields["args"])[:500])
