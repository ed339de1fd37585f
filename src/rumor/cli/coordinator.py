"""`rumor coordinator`: the server that says who the members of an elastic job are."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import socket
import sys
import time
from typing import Any

from rumor.cli.units import seconds
from rumor.membership.coordinator import Coordinator
from rumor.membership.protocol import PORT, Address, parse_address

DESCRIPTION = """Says who the members of a job are, as nodes come and go. Start one for each job, on a host that all nodes can reach, then
start `python train.py` on each node, with group=rumor.elastic("HOST:PORT"). It carries no models. If it dies, members go on with whom
they have; start it again at the same address, and they come back to it."""


def add_coordinator(commands: Any) -> None:
    parser = commands.add_parser("coordinator", help="let the nodes of a job come and go", description=DESCRIPTION)
    parser.add_argument("--bind", default=f"0.0.0.0:{PORT}", metavar="HOST:PORT", help="where to listen (default: %(default)s)")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that must be there for training to go on (default: %(default)s)")
    parser.add_argument(
        "--exit-after", type=seconds, metavar="TIME", help="exit so long after the job has ended (60s, say; by default it stays)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.min_nodes < 1:
        raise ValueError(f"--min-nodes must be at least 1, got {options.min_nodes}")
    bind = parse_address(options.bind)
    coordinator, listening = Coordinator(bind, options.min_nodes, say, options.exit_after), asyncio.Event()

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await coordinator.serve(started)

    def started(address: Address) -> None:
        listening.set()
        say(f"listening at {address}")

    try:
        asyncio.run(serve())
    except asyncio.CancelledError:
        pass
    except OSError as error:
        if listening.is_set():
            raise
        raise ValueError(f"can't listen at {bind}: {_why_not(error, bind)}") from None
    return 0


def _why_not(error: OSError, bind: Address) -> str:
    """Return why the coordinator can't listen, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"port {bind.port} is in use, perhaps by another coordinator. Stop it, or give another port with --bind HOST:PORT"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{bind.host!r} is no address of this host. --bind takes HOST:PORT; 0.0.0.0:{bind.port} listens at all its addresses"
    return os.strerror(error.errno) if error.errno else str(error)


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stdout, flush=True)
