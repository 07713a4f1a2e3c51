"""A follower that reads a real WatchResidency stream in the background."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvc.v1 import admission_pb2, admission_pb2_grpc
from tests.support.follower_model import FollowerModel
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


WAIT_S = 20.0


class Watch:
    """A follower that reads for as long as the block lasts."""

    def __init__(self, stub: admission_pb2_grpc.AdmissionServiceAsyncStub) -> None:
        self.model = FollowerModel()
        self.error: grpc.aio.AioRpcError | None = None
        self._call = stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="test"))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.model.apply(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Watch]:
        task = asyncio.create_task(self._read())
        try:
            await until(lambda: bool(self.model.snapshots or self.error), WAIT_S, "the snapshot")
            yield self
        finally:
            self._call.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError("the stream broke its rules") from task.exception()
