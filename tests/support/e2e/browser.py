"""A headless Chromium, driven over its DevTools protocol: pages as a user meets them."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0


class Page:
    """One page. Every expression is JavaScript."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.complaints: list[str] = []
        """What the browser has written to its console: errors of the script, and what the page's policy forbade."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        id_ = next(self._ids)
        await self._socket.send_json({"id": id_, "method": method, "params": parameters})
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == id_:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._noted(message)

    def _noted(self, message: dict[str, Any]) -> None:
        what = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(what["exceptionDetails"]))
            case "Log.entryAdded" if what["entry"]["level"] == "error":
                self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Return what an expression comes to, awaited if it is a promise."""
        got = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true; fail with the page's text if it never is."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not await self.value(expression):  # noqa: ASYNC110 - the page changes in the browser
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {expression}\n{await self.text()}\n{self.complaints}") from None

    async def text(self) -> str:
        """Return all text that is shown."""
        text: str = await self.value("document.body.innerText")
        return text

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}.get(key, 0)
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    async def looks(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Set the width in pixels and the colour scheme that the user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start Chromium with one empty page. Fails, and says how to install it, if there is none."""
    program = next((found for name in _CHROMIUM if (found := shutil.which(name))), None)
    assert program, "these tests need Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
        )
        process = await asyncio.create_subprocess_exec(
            *(program, *flags, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{await _port(process)}/json/list") as answer:
                    (target,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.terminate()
            await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    """Return the port of the DevTools, which Chromium writes to its log."""
    assert process.stderr is not None
    async with asyncio.timeout(_PATIENCE_S):
        async for line in process.stderr:
            if b"DevTools listening on" in line:
                return int(line.decode().split("127.0.0.1:")[1].split("/")[0])
    raise AssertionError("Chromium did not start")
