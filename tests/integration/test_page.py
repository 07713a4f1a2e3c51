"""The page at `/` in a real browser, over a mesh at work."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvc.runtime.server import ServerConfig
from services.router.config import RouterConfig
from services.router.main import running_router
from tests.support.browser import Page, browser
from tests.support.live_mesh import LiveMesh, live_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PICTURE = Path(__file__).parents[2] / "docs/images/page.png"
MAX_PICTURE_BYTES = 200_000
WIDTH, HEIGHT = 1160, 1010
WAIT_S = 30.0
SECRET = "not-on-any-page"
CONTRASTS = """
(() => {
  const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => rgb(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
  };
  return [...document.querySelectorAll("body *")].filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => e.offsetParent && !["SCRIPT", "STYLE"].includes(e.tagName)).map((e) => {
      const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.innerText];
    });
})()
"""
UNNAMED = """
[...document.querySelectorAll("[role=img]")].filter((e) => !e.getAttribute("aria-label")).length
  + [...document.querySelectorAll("thead th, tbody th")].filter((e) => !e.scope).length
  + [...document.querySelectorAll("input")].filter((e) => !e.labels.length).length
"""


class Sessions:
    """Agents that talk over HTTP."""

    def __init__(self, live: LiveMesh) -> None:
        self.live = live
        self.url = f"{live.mesh.http_url}/v1/chat/completions"

    async def turn(self, messages: list[dict[str, str]], tokens: int) -> str:
        async with self.live.http.post(self.url, json={"model": "m", "messages": messages, "max_tokens": tokens}) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["message"]["content"])

    async def talk(self, number: int, turns: int) -> None:
        messages = [{"role": "user", "content": f"{SECRET} {number} " * (150 + 60 * number)}]
        for _ in range(turns):
            said = await self.turn(messages, 30)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then? " * 40}]

    async def refused(self) -> None:
        async with self.live.http.post(self.url, json={"messages": [{"role": "user", "content": "x" * 200_000}]}) as response:
            assert response.status == 413

    @asynccontextmanager
    async def streaming(self, count: int) -> AsyncIterator[None]:
        """Turns that are under way."""
        replies: list[aiohttp.ClientResponse] = []
        for number in range(count):
            body = {"messages": [{"role": "user", "content": f"stream {number} " * 900}], "max_tokens": 8_000, "stream": True}
            reply = await self.live.http.post(self.url, json=body)
            await reply.content.readany()
            replies.append(reply)
        try:
            yield
        finally:
            for reply in replies:
                reply.close()


async def state(live: LiveMesh) -> dict[str, Any]:
    async with live.http.get(f"{live.mesh.http_url}/kvc/state") as response:
        known: dict[str, Any] = await response.json()
        return known


async def shown(page: Page, *words: str) -> None:
    """Waits until the page says all of these."""

    async def check() -> None:
        text = await page.text("body")
        assert [word for word in words if word not in text] == []

    await eventually(check, WAIT_S, poll_s=0.1)


async def take_picture(page: Page, sessions: Sessions) -> None:
    """Writes the documentation's screenshot, while agents talk."""
    await page.scheme("light")
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(sessions.talk(number, 40))

        async def check() -> None:
            rate = await page.text("#tiles > div:nth-child(5) dd")
            assert rate[0].isdigit() and float(rate) > 3  # noqa: PT018 - a dash is no number

        await eventually(check, WAIT_S)
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_bytes(await page.screenshot())


async def test_the_page_shows_the_mesh_at_work(rewrite: bool) -> None:  # noqa: FBT001 - a fixture
    """Workers, KV, modes, first tokens and refusals, live; readable by day and by night; nothing from elsewhere, no prompt."""
    async with live_mesh("1P3D", time_scale=20.0, kv_tokens=60_000) as live, browser() as page:
        sessions = Sessions(live)
        await asyncio.gather(*(sessions.talk(number, 5) for number in range(12)))
        await sessions.refused()
        await page.size(WIDTH, HEIGHT)
        async with sessions.streaming(5):
            await page.open(f"{live.mesh.http_url}/")
            await shown(page, "live", "kvc/reference", "d0", "d1", "d2", "p0", "ready", "exceeds-capacity")
            known = await state(live)
            assert await page.value("document.querySelectorAll('#workers tr').length") == len(known["workers"]) == 4
            await shown(page, f"In flight\n{known['in_flight']}", f"Sessions\n{known['sessions']}")
            assert known["in_flight"] == 5
            assert await page.value("document.querySelectorAll('#workers .bar i.held').length") >= 1
            for scheme in ("light", "dark"):
                await page.scheme(scheme)
                contrasts = await page.value(CONTRASTS)
                assert len(contrasts) > 40
                assert [one for one in contrasts if one[0] < 4.5] == [], scheme
            if rewrite:
                await take_picture(page, sessions)
        await shown(page, "In flight\n0")
        known = await state(live)
        turns = sum(sum(ends.values()) for ends in known["turns"].values())
        assert turns >= 65
        await shown(page, f"Turns\n{turns}")
        assert await page.value(UNNAMED) == 0
        assert SECRET not in str(await page.value("document.documentElement.outerHTML"))
        assert SECRET not in str(await state(live))
        await live.mesh.kill_worker("d2")
        await shown(page, "unhealthy")
        assert {address.startswith((live.mesh.http_url, "data:")) for address in page.addresses} == {True}
        assert page.problems == []
        router = live.mesh.router
        assert router is not None
        router.kill()
        await shown(page, "no answer from the router")


async def test_a_router_with_a_token_shows_numbers_only_to_who_has_it() -> None:
    config = replace(RouterConfig(), server=ServerConfig(auth_token=SECRET))
    async with running_router(config) as running, browser() as page, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{running.http_port}"
        async with http.get(f"{url}/kvc/state") as response:
            assert response.status == 401
        await page.open(f"{url}/")
        await shown(page, "asks for its token", "needs a token")
        await page.value("document.getElementById('token').value = 'wrong'; document.querySelector('#ask button').click()")
        await shown(page, "needs a token")
        await page.value(f"document.getElementById('token').value = {SECRET!r}; document.querySelector('#ask button').click()")
        await shown(page, "live", "no worker yet")
        assert await page.value("document.getElementById('ask').hidden") is True


def test_the_picture_in_the_documentation() -> None:
    data = PICTURE.read_bytes()
    assert len(data) < MAX_PICTURE_BYTES
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20]) == (WIDTH,)


@pytest.mark.parametrize("path", ["/", "/kvc/state"])
async def test_the_page_is_there_before_any_worker(path: str) -> None:
    async with running_router(RouterConfig()) as running, aiohttp.request("GET", f"http://127.0.0.1:{running.http_port}{path}") as response:
        assert response.status == 200
