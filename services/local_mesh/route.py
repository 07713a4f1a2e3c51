"""`kvc route SESSION`: where a prompt would go; with --explain, every candidate's score."""

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
from services.local_mesh.views import candidates_table

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """`kvc route`."""
    parser = Parser(prog="kvc route", description="Asks a router which worker it would ask for a prompt. Changes nothing.")
    parser.add_argument("session", help="session id")
    parser.add_argument("--text", default=None, help="the prompt; without it, it is read from standard input")
    parser.add_argument("--explain", action="store_true", help="every candidate with the parts of its score")
    add_router_arguments(parser)
    arguments = parser.parse_args(argv)
    text = arguments.text if arguments.text is not None else sys.stdin.read()
    try:
        response = asyncio.run(_ask(arguments.router, arguments.session, text))
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"kvc route: {from_rpc_error(error)}\n")
        return EXIT_FAILED
    if arguments.json:
        if not arguments.explain:
            response.ClearField("candidates")
        shown = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    elif arguments.explain:
        Console().print(candidates_table(response))
    else:
        sys.stdout.write((response.worker.worker_id if response.HasField("worker") else "no worker is eligible") + "\n")
    return 0 if response.HasField("worker") else EXIT_FAILED


async def _ask(target: str, session: str, text: str) -> router_pb2.RouteResponse:
    async with RouterClient(target) as client:
        return await client.stub.Route(router_pb2.RouteRequest(session_id=session, text=text), timeout=TIMEOUT_S)
