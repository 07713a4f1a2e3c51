"""`kvc status [SESSION]`: what a router knows of a session, or of its workers."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from kvc.errors import from_rpc_error
from kvc.v1 import router_pb2
from services.local_mesh.client import RouterClient
from services.local_mesh.options import EXIT_FAILED, Parser, add_router_arguments
from services.local_mesh.views import session_lines, workers_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    Answer = router_pb2.RouterServiceGetSessionStatusResponse | router_pb2.ListWorkersResponse

TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """`kvc status`."""
    parser = Parser(prog="kvc status", description="Shows a session as a router sees it; without a session, the router's workers.")
    parser.add_argument("session", nargs="?", default=None, help="session id")
    add_router_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        answer = asyncio.run(_ask(arguments.router, arguments.session))
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"kvc status: {from_rpc_error(error)}\n")
        return EXIT_FAILED
    if arguments.json:
        shown = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    elif isinstance(answer, router_pb2.ListWorkersResponse):
        Console().print(workers_table(answer))
    else:
        sys.stdout.write("\n".join(session_lines(arguments.session, answer)) + "\n")
    known = isinstance(answer, router_pb2.ListWorkersResponse) or answer.known
    return 0 if known else EXIT_FAILED


async def _ask(target: str, session: str | None) -> Answer:
    async with RouterClient(target) as client:
        if session is None:
            return await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=TIMEOUT_S)
        return await client.stub.GetSessionStatus(router_pb2.RouterServiceGetSessionStatusRequest(session_id=session), timeout=TIMEOUT_S)
