"""Who may use the front door: tokens as each client library sends them, TLS, and `kvc up` that says where it is."""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import anthropic
import openai
import pytest

from kvc.runtime.server import ServerConfig
from services.router.config import RouterConfig
from services.router.main import running_router
from tests.support.certificates import make_certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "a-token"
MESSAGES = [{"role": "user", "content": "hi"}]
START_S = 60.0


@asynccontextmanager
async def door(**server: Any) -> AsyncIterator[str]:
    """host:port of a front door without workers."""
    async with running_router(replace(RouterConfig(), server=ServerConfig(**server))) as running:
        yield f"127.0.0.1:{running.http_port}"


async def test_openais_client_sends_the_token() -> None:
    async with door(auth_token=TOKEN) as address:
        url = f"http://{address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            assert (await client.models.list()).data == []
            with pytest.raises(openai.InternalServerError, match="no worker"):
                await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]  # plain dictionaries
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="token"):
                await client.models.list()


async def test_anthropics_client_sends_the_token() -> None:
    async with door(auth_token=TOKEN) as address:
        url = f"http://{address}"
        credentials: list[dict[str, Any]] = [{"api_key": TOKEN}, {"auth_token": TOKEN}]
        for credential in credentials:
            async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **credential) as client:
                with pytest.raises(anthropic.APIStatusError, match="no worker") as caught:
                    await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)  # type: ignore[arg-type]  # plain dictionaries
                assert caught.value.status_code == 503
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="token"):
                await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)  # type: ignore[arg-type]  # plain dictionaries


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}"), ("x-api-key", "another")],
        [("x-api-key", f"Bearer {TOKEN}")],
    ],
)
async def test_anything_else_is_no_token(headers: list[tuple[str, str]]) -> None:
    async with door(auth_token=TOKEN) as address, aiohttp.ClientSession() as http:
        for path in ("/v1/models", "/metrics", "/kvc/state", "/nowhere"):
            async with http.get(f"http://{address}{path}", headers=headers) as response:
                assert response.status == 401
                assert TOKEN not in await response.text()
        for path in ("/health", "/"):
            async with http.get(f"http://{address}{path}", headers=headers) as response:
                assert response.status == 200


async def test_over_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    trusting = ssl.create_default_context(cafile=made.authority)
    async with door(tls_cert=made.certificate, tls_key=made.key) as address, aiohttp.ClientSession() as http:
        async with http.get(f"https://{address}/health", ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"https://{address}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{address}/health")
        client = openai.AsyncOpenAI(
            base_url=f"https://{address}/v1", api_key="none", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(verify=trusting)
        )
        async with client:
            assert (await client.models.list()).data == []


async def test_kvc_up_says_where_clients_connect() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--topology", "0P1D", "--port", "0", "--http-port", "0", "--time-scale", "20"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            while (
                found := re.search(r"OpenAI base URL (\S+), Anthropic base URL (\S+),", (await process.stdout.readline()).decode())
            ) is None:
                assert process.returncode is None
        async with openai.AsyncOpenAI(base_url=found[1], api_key="none") as client:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)  # type: ignore[arg-type]  # plain dictionaries
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3
        async with anthropic.AsyncAnthropic(base_url=found[2], api_key="none") as other:
            said = await other.messages.create(model="m", messages=MESSAGES, max_tokens=3)  # type: ignore[arg-type]  # plain dictionaries
            assert said.usage.output_tokens == 3
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_kvc_up_on_an_http_port_that_is_taken_says_so() -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "up", "--topology", "0P1D", "--port", "0", "--http-port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, problem = await process.communicate()
    assert process.returncode == 1
    assert out == b"starting 0P1D ...\n"
    assert f"http.port: cannot listen on 127.0.0.1:{port}" in problem.decode().splitlines()[-1]
