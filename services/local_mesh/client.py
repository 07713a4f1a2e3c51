"""A client of the router for replays and commands: one Dispatch a turn, the reply put together again."""

from __future__ import annotations

import os
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from kvc import wire
from kvc.core.types import Mode
from kvc.errors import Unavailable, from_rpc_error
from kvc.evaluation.ports import TurnResult
from kvc.runtime.channel import channel
from kvc.v1 import router_pb2, router_pb2_grpc
from services.local_mesh.options import CREDENTIAL_VARIABLE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

_EXECUTORS = {pb: executor.value for executor, pb in wire.EXECUTOR_TO_PB.items()}


class RouterClient:
    """kvc.evaluation.ports.MeshClient over gRPC. Use as an async context manager."""

    def __init__(self, target: str, *, timeout_s: float = 600.0, tls_ca: Path | None = None, token: str | None = None) -> None:
        """Connects on first use.

        Args:
            target: host:port of the router.
            timeout_s: deadline of a turn.
            tls_ca: the router's authority; None = no TLS.
            token: bearer token.
        """
        self._timeout_s = timeout_s
        self._channel = channel(target, tls_ca=tls_ca, token=token)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        """Nothing to open."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def turn(self, session_id: str, packed_prompt: bytes, max_new_tokens: int, *, request_id: str, last: bool) -> TurnResult:
        """One turn, to its end.

        Raises:
            KvcError: the router's typed error.
        """
        request = router_pb2.DispatchRequest(
            request_id=request_id,
            session_id=session_id,
            packed_input_ids=packed_prompt,
            max_new_tokens=max_new_tokens,
            close_session=last,
        )
        output = array("I")
        finished: router_pb2.Finished | None = None
        try:
            async for response in self.stub.Dispatch(request, timeout=self._timeout_s):
                if response.HasField("chunk"):
                    output.extend(response.chunk.output_ids)
                elif response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        if finished is None:
            return TurnResult(ok=False, error="the stream ended early", output=output.tobytes())
        return _result(finished, output.tobytes())


def _result(finished: router_pb2.Finished, output: bytes) -> TurnResult:
    decision = finished.decision
    return TurnResult(
        ok=True,
        mode=wire.MODE_FROM_PB.get(decision.mode, Mode.FALLBACK).value,
        worker=decision.decode.worker_id,
        executor=_EXECUTORS.get(decision.executor, ""),
        output=output,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        ttft_s=finished.engine_ttft_s,
        latency_s=finished.engine_latency_s,
        mesh_s=finished.mesh_s,
        queued_s=decision.queued_s,
        probes=len(decision.probes),
        finish_reason=finished.finish_reason,
    )


def client_of(arguments: argparse.Namespace) -> RouterClient:
    """The client that the arguments of a command ask for (`add_router_arguments`).

    Raises:
        ConfigError: the authority's file cannot be used.
    """
    return RouterClient(arguments.router, tls_ca=arguments.tls_ca, token=os.environ.get(CREDENTIAL_VARIABLE))


@contextmanager
def answers_of(target: str) -> Iterator[None]:
    """Errors of calls to the router at `target` as people read them.

    Raises:
        Unavailable: nobody answers there.
        KvcError: the router's typed error.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE and typed.reason == Unavailable.reason:
            raise Unavailable(f"no router answers at {target}: `kvc up` starts one, --router names another") from None
        raise typed from None
