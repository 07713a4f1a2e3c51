"""A headless Chromium, driven over its DevTools websocket."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_S = 60.0
ANSWER_S = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str:
    """Path of the browser.

    Raises:
        AssertionError: there is none; says what to install.
    """
    found = next((path for path in map(shutil.which, NAMES) if path is not None), None)
    assert found is not None, "missing: Chromium on PATH (Debian: apt-get install chromium; `make test` as root installs it)"
    return found


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.addresses: list[str] = []
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its answer; events that come meanwhile are noted."""
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._asked:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.addresses.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    async def open(self, url: str) -> None:
        """Goes to an address."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(await self.value(f"document.querySelector({selector!r}).innerText"))

    async def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def size(self, width: int, height: int) -> None:
        """The window, in CSS pixels."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser with one tab and a profile of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvc-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            executable(),
            *FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await eventually(lambda: _port(Path(folder)), START_S)
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tab = next(one for one in await answer.json() if one["type"] == "page")
                async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _port(folder: Path) -> int:
    told = folder / "DevToolsActivePort"
    lines = told.read_text().splitlines() if told.exists() else []
    assert len(lines) > 1, "the browser does not listen yet"
    return int(lines[0])
