"""`kvc status [SESSION]`: what a router knows of a session, or of its workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvc.v1 import router_pb2
from services.local_mesh import foreground
from services.local_mesh.client import answers_of, client_of
from services.local_mesh.options import EXIT_FAILED, Parser, add_router_arguments, text
from services.local_mesh.views import as_json, session_lines, workers_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    Answer = router_pb2.RouterServiceGetSessionStatusResponse | router_pb2.ListWorkersResponse

TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """`kvc status`."""
    parser = Parser(prog="kvc status", description="Shows a session as a router sees it; without a session, the router's workers.")
    parser.add_argument("session", type=text, nargs="?", default=None, help="session id")
    add_router_arguments(parser)
    arguments = parser.parse_args(argv)

    def command() -> int:
        answer = foreground.run(_ask(arguments))
        if arguments.json:
            sys.stdout.write(as_json(answer))
        elif isinstance(answer, router_pb2.ListWorkersResponse):
            console = foreground.output()
            console.print(workers_table(answer, width=console.width))
        else:
            sys.stdout.write("\n".join(session_lines(arguments.session, answer)) + "\n")
        known = isinstance(answer, router_pb2.ListWorkersResponse) or answer.known
        return 0 if known else EXIT_FAILED

    return foreground.guarded(parser.prog, command)


async def _ask(arguments: argparse.Namespace) -> Answer:
    async with client_of(arguments) as client:
        with answers_of(arguments.router):
            if arguments.session is None:
                return await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=TIMEOUT_S)
            request = router_pb2.RouterServiceGetSessionStatusRequest(session_id=arguments.session)
            return await client.stub.GetSessionStatus(request, timeout=TIMEOUT_S)
