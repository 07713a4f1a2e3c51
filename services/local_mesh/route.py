"""`kvc route SESSION --text ...`: which worker a router would ask for a prompt, without asking it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvc.errors import InvalidField
from kvc.v1 import router_pb2
from services.local_mesh import foreground
from services.local_mesh.client import answers_of, client_of
from services.local_mesh.options import EXIT_FAILED, Parser, add_router_arguments, text
from services.local_mesh.views import as_json, candidates_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """`kvc route`."""
    parser = Parser(prog="kvc route", description="Asks a router which worker it would ask for a prompt. Changes nothing.")
    parser.add_argument("session", type=text, help="session id")
    parser.add_argument("--text", type=text, default=None, help="the prompt; without it, it is read from standard input")
    parser.add_argument("--explain", action="store_true", help="every candidate with the parts of its score")
    add_router_arguments(parser)
    arguments = parser.parse_args(argv)

    def command() -> int:
        prompt = arguments.text if arguments.text is not None else _standard_input()
        response = foreground.run(_ask(arguments, prompt))
        chosen = response.HasField("worker")
        if arguments.json:
            if not arguments.explain:
                response.ClearField("candidates")
            sys.stdout.write(as_json(response))
        elif arguments.explain:
            console = foreground.output()
            console.print(candidates_table(response, width=console.width))
        else:
            sys.stdout.write((response.worker.worker_id if chosen else "no worker is eligible") + "\n")
        return 0 if chosen else EXIT_FAILED

    return foreground.guarded(parser.prog, command)


def _standard_input() -> str:
    """The prompt.

    Raises:
        InvalidField: it is no UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"byte {error.start} of standard input is no UTF-8", field="text") from None


async def _ask(arguments: argparse.Namespace, prompt: str) -> router_pb2.RouteResponse:
    request = router_pb2.RouteRequest(session_id=arguments.session, text=prompt)
    async with client_of(arguments) as client:
        with answers_of(arguments.router):
            return await client.stub.Route(request, timeout=TIMEOUT_S)
