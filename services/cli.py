"""`kvc`: one command for everything. Subcommands are imported when they are called, so `kvc --help` costs nothing."""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Command(NamedTuple):
    """Where a subcommand lives, and what it does."""

    module: str
    help: str
    function: str = "main"


COMMANDS: dict[str, Command] = {
    "up": Command("services.local_mesh.up", "start a whole mesh on this machine, with a live table of its workers"),
    "demo": Command("services.local_mesh.demo", "an agentic workload on kvc and on round-robin P/D disaggregation, side by side"),
    "replay": Command("services.local_mesh.replay", "replay a trace on a local mesh and check every reply"),
    "generate-trace": Command("services.local_mesh.traces", "write a synthetic agent trace"),
    "route": Command("services.local_mesh.route", "ask a router where a prompt would go; --explain shows every score"),
    "status": Command("services.local_mesh.status", "what a router knows of a session; without one, of its workers"),
    "router": Command("services.router.main", "run a router"),
    "agent": Command("services.admission_agent.main", "run an admission agent beside an engine"),
    "engine": Command("kvc.engine.reference.main", "run a reference engine: an SGLang worker without a model", "run"),
}
EXIT_USAGE = 2
# Sockets are polled by the thread that waits for completions. gRPC's default hands each event over to a pool of other threads: a message
# there and back then costs a third more CPU on both sides, and two thread switches more until it is answered.
GRPC_EXPERIMENTS = "-event_engine_poller_for_python"
KNOWS_EXPERIMENT = "1.81."
"""The grpcio that was measured. A later one may not know the name any more, and would say so on stderr, which is for JSON."""


def prepare_grpc() -> None:
    """Settings of gRPC's core, which reads them once, when it is imported. What the user has set stays. Mutates the environment."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # below, it writes what is no JSON to stderr
    if metadata.version("grpcio").startswith(KNOWS_EXPERIMENT):
        os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: arguments without the program name; None: those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong arguments or settings.
    """
    prepare_grpc()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"kvc {version()}\n")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        sys.stderr.write(f"kvc: no such command: {arguments[0][:64]!r} (see kvc --help)\n")
        return EXIT_USAGE
    run: Callable[[Sequence[str]], int] = getattr(import_module(command.module), command.function)
    return run(arguments[1:])


def version() -> str:
    """The installed version; of a source tree that is not installed there is none."""
    try:
        return metadata.version("kvc-mesh")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def usage() -> str:
    """The help text."""
    width = max(len(name) for name in COMMANDS)
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"usage: kvc COMMAND [options]\n\n{rows}\n\nkvc COMMAND --help shows a command's options; --version the version.\n"


if __name__ == "__main__":
    sys.exit(main())
