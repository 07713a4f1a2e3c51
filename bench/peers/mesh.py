"""Starts what is measured: four always-admitting agents over the mock engine's ports, and `kvc router` with default settings."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

MOCK_PORTS = (33001, 33002, 33003, 33004)
AGENT_OFFSET = 800


def main() -> int:
    """`python -m bench.peers.mesh --port P [--admission off] [--pd] [-- more router arguments]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admission", default="stream")
    parser.add_argument("--pd", action="store_true", help="the first worker prefills for the others")
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    children = []
    argv = [sys.executable, "-m", "services.cli", "router", "--http-port", str(arguments.port), "--http-admission", arguments.admission]
    for index, mock in enumerate(MOCK_PORTS):
        port = arguments.port + AGENT_OFFSET + index
        role = "prefill" if arguments.pd and index == 0 else "decode"
        agent = ["--port", str(port), "--worker-id", f"w{index}", "--role", role, "--url", f"http://127.0.0.1:{mock}"]
        children.append(subprocess.Popen([sys.executable, "-m", "bench.peers.always", *agent]))
        argv += ["--agent", f"127.0.0.1:{port}"]
    if arguments.pd:
        # Every prompt goes to both halves, as peers do it: a short append would stay on the decode worker.
        argv += ["--params-executor", "prefill"]
    children.append(subprocess.Popen(argv + arguments.rest))

    def stop(*_: object) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    code = children[-1].wait()
    stop()
    return code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())
