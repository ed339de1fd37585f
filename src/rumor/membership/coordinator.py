"""The coordinator: a small server that says who the members of a job are. `rumor coordinator` runs it.

It carries no models and needs no torch. If it dies, members go on with whom they have. If it is started again, they come back to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rumor.membership import limits
from rumor.membership.member import RANKS
from rumor.membership.protocol import LONGEST_LINE, Address, Message, decode, encode
from rumor.membership.roster import Log, Roster

TICK = 0.2  # seconds


@dataclass
class _Connection:
    writer: asyncio.StreamWriter
    uid: str | None = None

    def send(self, kind: str, values: Message) -> None:
        if not self.writer.is_closing():  # else the reader notices that the connection has ended
            self.writer.write(encode(kind, **values))


class Coordinator:
    """Serves one job.

    Args:
        bind: where to listen. Port 0 takes a free one, which `address` tells.
        min_nodes: how many nodes there must be for training to begin, and to go on after a loss.
        log: prints one line.
        exit_after: stop so many seconds after the job has ended and its nodes are gone. If None, stay, and tell late nodes that it has.
    """

    def __init__(self, bind: Address, min_nodes: int = 1, log: Log = print, exit_after: float | None = None):
        self._bind, self._log, self._exit_after = bind, log, exit_after
        self._connections: dict[str, _Connection] = {}  # by uid
        self.roster = Roster(self._send, log, min_nodes)
        self.address = bind
        self._is_stopping = False

    async def serve(self, started: Callable[[Address], object] = lambda _: None) -> None:
        """Run until cancelled, or until the job has ended, if `exit_after` is given."""
        server = await asyncio.start_server(self._serve_one, self._bind.host, self._bind.port, limit=LONGEST_LINE)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = Address(host, port)
        started(self.address)
        last_needed = time.monotonic()
        try:
            while self._exit_after is None or time.monotonic() - last_needed < self._exit_after:
                self.roster.tick(time.monotonic())
                self._close_lost()
                if self.roster.over_at is None or self.roster.nodes:
                    last_needed = time.monotonic()
                await asyncio.sleep(TICK)
        finally:
            self._stop()
            server.close()

    def _stop(self) -> None:
        """Close all connections. Members go on without a coordinator."""
        self._is_stopping = True
        if here := len(self.roster.nodes):
            self._log(
                f"stopped. {here} node{'s go' if here > 1 else ' goes'} on without it, and will come back if it is started again here"
            )
        for connection in self._connections.values():
            connection.writer.close()

    def _send(self, uid: str, kind: str, values: Message) -> None:
        if (connection := self._connections.get(uid)) is not None:
            connection.send(kind, values)
            if kind in ("alone", "over", "ended", "refused"):
                connection.writer.close()

    def _close_lost(self) -> None:
        """Close the connections of nodes that are no longer here. If they come back to life, they say hello again."""
        for uid in [uid for uid in self._connections if uid not in self.roster.nodes]:
            self._connections.pop(uid).writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, why = _Connection(writer), "is lost: its connection has ended"
        try:
            hello = decode(await asyncio.wait_for(reader.readline(), limits.HELLO_WITHIN))
            if not self._greet(connection, hello):
                return
            while line := await reader.readline():
                message = decode(line)
                if message["kind"] == "bye":
                    why = str(message["why"])
                    break
                if self._connections.get(connection.uid or "") is not connection:
                    break  # it was dropped for its silence, or came back on another connection
                self._hear(connection.uid or "", message)
        except (ValueError, KeyError, TypeError) as error:  # garbage, or a line that is too long
            self._log(f"closed a connection from {_peer(writer)}: {error}")
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            if connection.uid is not None and self._connections.get(connection.uid) is connection and not self._is_stopping:
                del self._connections[connection.uid]
                self.roster.gone(connection.uid, why, time.monotonic())
            writer.close()

    def _greet(self, connection: _Connection, hello: Message) -> bool:
        if hello["kind"] != "hello" or not _is_complete(hello):
            raise ValueError("it does not say hello as a member does")
        uid = str(hello["uid"])
        before, self._connections[uid] = self._connections.get(uid), connection
        if before is not None:
            before.writer.close()
        if self.roster.hello(hello, time.monotonic()):
            connection.uid = uid
            return True
        del self._connections[uid]
        return False

    def _hear(self, uid: str, message: Message) -> None:
        now, roster = time.monotonic(), self.roster
        if uid not in roster.nodes or not _is_sound(message):
            return
        if message["kind"] == "beat":
            roster.beat(uid, message, now)
        elif message["kind"] == "ready":
            roster.ready(uid, message, now)
        elif message["kind"] == "failed":
            roster.failed(uid, message["epoch"], now)


def _is_complete(hello: Message) -> bool:
    """Return whether a hello has all that the roster reads, of the right types."""
    types: dict[str, Any] = {"uid": str, "name": str, "setup": dict, "store": list, "min_nodes": int, "k": int, "members": list}
    numbers = all(hello.get(name) is None or isinstance(hello[name], int | float) for name in ("timeout", "drop_slow", "epoch"))
    return all(isinstance(hello.get(name), type_) for name, type_ in types.items()) and numbers


def _is_sound(message: Message) -> bool:
    """Return whether the values that the roster reads have the right types."""
    types: dict[str, Any] = {"k": int, "computing": bool, "step_seconds": int | float, "moved": int, "schedule": list, "average": int}
    types |= {"stage": str, "epoch": int, "stepping": int, "is_connected": bool}
    needed = {
        "beat": ("k", "computing", "stepping", "step_seconds", "moved", "schedule"),
        "ready": ("k", "stage", "is_connected", "stepping", "schedule", "average"),
    }
    names = needed.get(message["kind"], ("epoch",))
    return all(isinstance(message.get(name), types[name]) for name in names) and message.get("stage", "join") in RANKS


def _peer(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "somewhere"
