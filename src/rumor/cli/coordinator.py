"""`rumor coordinator`: the server that says who the members of an elastic job are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from typing import Any

from rumor.membership.coordinator import Coordinator
from rumor.membership.protocol import PORT, Address, parse_address

DESCRIPTION = """Says who the members of a job are, as nodes come and go. Start one for each job, on a host that all nodes can reach, then
start `python train.py` on each node, with group=rumor.elastic("HOST:PORT"). It carries no models. If it dies, members go on with whom
they have; start it again at the same address, and they come back to it."""


def add_coordinator(commands: Any) -> None:
    parser = commands.add_parser("coordinator", help="let the nodes of a job come and go", description=DESCRIPTION)
    parser.add_argument("--bind", default=f"0.0.0.0:{PORT}", metavar="HOST:PORT", help="where to listen (default: %(default)s)")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that must be there for training to go on (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.min_nodes < 1:
        raise ValueError(f"--min-nodes must be at least 1, got {options.min_nodes}")
    coordinator = Coordinator(parse_address(options.bind), options.min_nodes, say)

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await coordinator.serve(_started)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve())
    return 0


def _started(address: Address) -> None:
    say(f"listening at {address}")


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stdout, flush=True)
