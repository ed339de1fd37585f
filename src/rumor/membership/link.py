"""Link: a member's connection to the coordinator, in a thread of its own. It comes back by itself when the coordinator does."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rumor.membership.protocol import BEAT, LONGEST_LINE, SILENCE, Address, Message, Stage, decode, encode

CONNECT_WITHIN = 60.0  # seconds for the first connection to a coordinator that may start later than its members
SAY_NO_COORDINATOR_AFTER = 3.0  # seconds of these
RETRY = 0.3  # seconds between two attempts
END_WITHOUT = 30.0  # seconds that a node waits for a lost coordinator before it ends without it
SAY_SO_AFTER = 10.0  # seconds of waiting

log = logging.getLogger("rumor")


class Peer(NamedTuple):
    """A member of an epoch."""

    uid: str
    name: str
    store: Address
    average: int  # step of the last global average that it has completed


class Offer(NamedTuple):
    """The next epoch.

    Attributes:
        number: of the epoch.
        token: makes its name unique, also if a coordinator was started again.
        members: all members, by rank.
        holders: the first so many of them have the job's state; the others take it over from rank 0. Holders that have not completed
            the last global average of rank 0 take over the method's state alone.
        is_at_end: whether the holders have made their last average.
        is_same: whether nothing has changed.
        passed: the schedule of a member that has completed the global average that this one waits for, if there is one.
        is_over: whether the job has ended, for this node at least.
    """

    number: int
    token: str
    members: list[Peer]
    holders: int
    is_at_end: bool = False
    is_same: bool = False
    is_over: bool = False
    passed: list[Any] | None = None


class RefusedError(RuntimeError):
    """The coordinator does not let this node take part in the job, for example because its model is another one."""

    __module__ = "rumor"


class JobEndedError(SystemExit):
    """The job had ended before this node came. If nobody catches it, the process ends with exit code 0.

    So nobody evaluates or saves a model that was not trained, and a supervisor does not start the node again.
    """

    __module__ = "rumor"

    def __init__(self, k: int):
        super().__init__(0)
        self.k = k

    def __str__(self) -> str:
        return f"the job has ended at step {self.k}, so there is nothing to do for this node. A new job needs a new coordinator"


class Link:
    """Keeps in touch with the coordinator.

    Args:
        coordinator: its address.
        hello: what this node says of itself.
        on_lost: called in the thread when the current epoch is broken, with the reason.
    """

    def __init__(self, coordinator: Address, hello: Message, on_lost: Callable[[str], None]):
        self._coordinator, self._hello, self._on_lost = coordinator, hello, on_lost
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._welcomed = self._closed = False
        self._refusal: RefusedError | JobEndedError | None = None
        self._ready: Message | None = None  # what this node waits for
        self._offer: Offer | None = None
        self._epoch: tuple[int, list[str]] | None = None
        self._unreachable_since: float | None = None
        self.newcomers, self.here, self.needed = 0, 1, 1
        self.k, self.computing, self.step_seconds = 0, True, 0.0
        self.stepping = -1  # the step() that this node is in, if any
        self.schedule: Sequence[Any] = ()
        self.average = -1
        self.moved = 0  # pieces of state that have been sent or received: a sign of progress
        self._lost_number = 0  # of the last epoch that the coordinator has called broken
        self._last_loss = ""
        self.host = ""  # this host's address, as the coordinator sees it
        _links.add(self)
        self._thread = threading.Thread(target=self._run, name="rumor-link", daemon=True)

    def connect(self) -> None:
        """Find this host's address, then say hello. Raises ConnectionError if there is no coordinator."""
        began, said, problem = time.monotonic(), False, ""
        while self._socket is None:
            try:
                self._socket = self._connected()
            except OSError as error:
                problem = self._no_coordinator(error)
            waited = time.monotonic() - began
            if self._socket is None and waited > CONNECT_WITHIN:
                raise ConnectionError(problem)
            if self._socket is None and waited > SAY_NO_COORDINATOR_AFTER and not said:
                said = True
                log.warning("rumor: %s. Trying for another %.0f s", problem, CONNECT_WITHIN - waited)
            if self._socket is None:
                time.sleep(RETRY)
        self.host = str(self._socket.getsockname()[0])

    def _no_coordinator(self, error: OSError) -> str:
        host, port = self._coordinator
        if isinstance(error, socket.gaierror):
            return f"no coordinator at {self._coordinator}: this machine does not know the host {host!r}. Check the name, or use an address"
        start = f"start one on that host with `rumor coordinator --bind 0.0.0.0:{port}`, and check that no firewall closes the port"
        return f"no coordinator at {self._coordinator} ({error}): {start}"

    def start(self, store: Address) -> None:
        self._hello["store"] = list(store)
        self._thread.start()

    def close(self, why: str = "has left") -> None:
        """Leave. The coordinator prints why, after the name of this node."""
        with self._changed:
            self._closed = True
            self._say("bye", why=why)
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)
        if self._socket is not None:
            self._socket.close()

    @property
    def is_in_touch(self) -> bool:
        """Whether the coordinator answers."""
        return self._unreachable_since is None

    # ---- what the main thread asks for -------------------------------------------------------------------------------------------

    def next_epoch(self, k: int, stage: Stage, is_connected: bool = False) -> Offer:
        """Wait for the next epoch. Raises RefusedError or JobEndedError if this node may not take part in it.

        Args:
            k: number of steps taken.
            stage: where this node is.
            is_connected: whether its connections to the other members work.
        """
        with self._changed:
            self._offer = None
            self.k = k
            self._ready = {"k": k, "stage": stage, "is_connected": is_connected, "stepping": self.stepping}
            self._ready |= {"schedule": list(self.schedule), "average": self.average}
            self._say("ready", **self._ready)
            began, said = time.monotonic(), False
            while self._offer is None:
                if self._refusal is not None:
                    raise self._refusal
                if self._closed:
                    raise RuntimeError("this node has left the job: call step() before finish() or leave()")
                self._changed.wait(BEAT)
                if stage in ("finish", "end") and self._is_out_of_touch(END_WITHOUT):
                    log.warning("rumor: step %d: the coordinator is gone, so this node ends without it", k)
                    can_average = stage == "finish" and is_connected
                    return Offer(0, "", [], 0, is_same=can_average, is_over=not can_average)
                if not said and time.monotonic() - began > SAY_SO_AFTER:
                    said = True
                    log.warning("rumor: step %d: %s", k, self._why_waiting())
            self._ready = None
            return self._offer

    def failed(self, offer: Offer) -> None:
        """Tell the coordinator that this node could not connect to the others."""
        with self._changed:
            self._say("failed", epoch=offer.number)

    def _is_out_of_touch(self, seconds: float) -> bool:
        since = self._unreachable_since
        return since is not None and time.monotonic() - since > seconds

    def beat(self) -> None:
        """Give a sign of life."""
        with self._changed:
            values = {"k": self.k, "computing": self.computing, "step_seconds": self.step_seconds, "moved": self.moved}
            self._say("beat", **values, stepping=self.stepping, schedule=list(self.schedule))

    def is_lost(self, offer: Offer) -> bool:
        """Whether the epoch that was offered is broken already."""
        return self._lost_number >= offer.number

    def _why_waiting(self) -> str:
        if not self.is_in_touch:
            return f"waiting for the coordinator at {self._coordinator} to come back"
        if self.here < self.needed:
            lost = f". The last loss: {self._last_loss}" if self._last_loss else ""
            return f"waiting for nodes: {self.here} here, {self.needed} needed (min_nodes){lost}"
        return "waiting for the other members to reach a global average"

    # ---- the thread --------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed and self._refusal is None:
            try:
                if self._socket is None:
                    self._socket = self._connected()
                self._serve(self._socket)
            except Exception as error:  # whatever it is, the next connection may be better
                self._lose_touch(error)
                time.sleep(RETRY)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._coordinator, timeout=2.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        """Introduce this node, then send signs of life and hear what comes, until the connection ends."""
        with self._changed:
            epoch = self._epoch or (None, [])
            connection.sendall(encode("hello", **{**self._hello, "epoch": epoch[0], "members": epoch[1], "k": self.k}))
            self._welcomed = True
            if self._ready is not None:
                self._say("ready", **self._ready)
        heard = now = time.monotonic()
        beats, unread = 0.0, b""
        selector = selectors.DefaultSelector()
        selector.register(connection, selectors.EVENT_READ)
        while not self._closed and self._refusal is None:
            before, now = now, time.monotonic()
            if now - before > SILENCE:
                raise _StoppedError(f"this process did not run for {now - before:.0f} s")
            if now - beats >= BEAT:
                beats = now
                self.beat()
            if now - heard > SILENCE:
                raise OSError("it is silent")
            if not selector.select(BEAT):
                continue
            received = connection.recv(2**16)
            if not received:
                raise OSError("the connection has ended")
            heard = time.monotonic()
            *lines, unread = (unread + received).split(b"\n")
            if len(unread) > LONGEST_LINE:
                raise ValueError("a line is too long")
            for line in lines:
                self._hear(decode(line))

    def _say(self, kind: str, **values: object) -> None:
        """Send a message if there is a connection. What matters is said again on the next one."""
        if self._socket is not None and self._welcomed:
            with suppress(OSError):  # the thread notices
                self._socket.sendall(encode(kind, **values))

    def _hear(self, message: Message) -> None:
        kind, broken = message["kind"], None
        with self._changed:
            if kind == "welcome":
                if self._unreachable_since is not None:
                    log.warning("rumor: the coordinator at %s is back", self._coordinator)
                self._unreachable_since = None
            elif kind == "refused":
                self._refusal = RefusedError(message["why"])
            elif kind == "ended":
                self._refusal = JobEndedError(message["k"])
                log.warning("rumor: %s", self._refusal)
            elif kind == "news":
                self.newcomers, self.here, self.needed = message["newcomers"], message["here"], message["needed"]
            elif kind == "epoch":
                peers = [Peer(peer["uid"], peer["name"], Address(*peer["store"]), peer["average"]) for peer in message["members"]]
                self._offer = Offer(message["number"], message["token"], peers, message["holders"], message["at_end"])
                self._epoch = message["number"], [peer.uid for peer in peers]
                self._lost_number = min(self._lost_number, message["number"] - 1)  # a new coordinator begins anew
            elif kind == "passed":
                self._offer = Offer(0, "", [], 0, passed=message["schedule"])
            elif kind in ("same", "over", "alone"):
                self._offer = Offer(0, "", [], 0, is_same=kind == "same", is_over=kind != "same")
                self._closed |= kind != "same"
                if kind == "alone":
                    log.warning("rumor: finish() at step %d, but the others go on: this node ends with its own model", message["k"])
            elif kind == "lost":
                self._lost_number = max(self._lost_number, message["epoch"])
                if self._epoch is not None and message["epoch"] == self._epoch[0]:
                    broken = self._last_loss = message["why"]
            elif kind == "dropped" and self._epoch is not None:
                self._lost_number = max(self._lost_number, self._epoch[0])
                self._epoch, broken = None, f"this node is no longer a member: {message['why']}. It will take over their model"
            self._changed.notify_all()
        if broken is not None:
            self._on_lost(broken)

    def _lose_touch(self, error: Exception) -> None:
        with self._changed:
            if self._socket is not None:
                self._socket.close()
            self._socket, self._welcomed = None, False
            if self._unreachable_since is None and not self._closed:
                self._unreachable_since = time.monotonic()
                if isinstance(error, _StoppedError):
                    log.warning("rumor: %s. It asks the coordinator whether it is still a member", error)
                else:
                    log.warning("rumor: lost the coordinator at %s (%s); members go on without it", self._coordinator, error)
            self.newcomers = 0


class _StoppedError(Exception):
    """This process was stopped for so long that the others may have gone on without it."""


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process: a data loader's worker may outlive its parent, which would then seem alive."""
    for link in list(_links):
        if link._socket is not None:
            link._socket.close()


os.register_at_fork(after_in_child=_close_in_child)
