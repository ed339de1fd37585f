"""Link: a member's connection to the coordinator, in a thread of its own. It comes back by itself when the coordinator does."""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rumor.membership import limits
from rumor.membership.member import silence_of, silence_of_long
from rumor.membership.offer import JobEndedError, Offer, Peer, RefusedError
from rumor.membership.protocol import LONGEST_LINE, Address, Message, Stage, decode, encode

log = logging.getLogger("rumor")


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
        self._peers: list[Peer] = []  # of the last epoch that was offered
        self._lineage = ""  # names the job of that epoch
        self._alive, self._counted_at = 0, -math.inf  # how many of them are alive, and when that was found out
        self._unreachable_since: float | None = None
        self._said_alone = self._said_lost = False
        self._was_dropped = False  # on this connection: then the coordinator may close it
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
            if self._socket is None and waited > limits.CONNECT_WITHIN:
                raise ConnectionError(problem)
            if self._socket is None and waited > limits.SAY_NO_COORDINATOR_AFTER and not said:
                said = True
                log.warning("rumor: %s. Trying for another %.0f s", problem, limits.CONNECT_WITHIN - waited)
            if self._socket is None:
                time.sleep(limits.RETRY)
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
            self._thread.join(2 * limits.BEAT)
        if self._socket is not None:
            self._socket.close()

    @property
    def is_in_touch(self) -> bool:
        """Whether the coordinator answers."""
        return self._unreachable_since is None

    # ---- what the main thread asks for -------------------------------------------------------------------------------------------

    def next_epoch(self, k: int, stage: Stage, is_connected: bool = False, meanwhile: Callable[[], object] = lambda: None) -> Offer:
        """Wait for the next epoch. Raises RefusedError or JobEndedError if this node may not take part in it.

        Args:
            k: number of steps taken.
            stage: where this node is.
            is_connected: whether its connections to the other members work.
            meanwhile: called now and then while it waits.
        """
        with self._changed:
            self._offer = None
            self.k = k
            self._ready = {"k": k, "stage": stage, "is_connected": is_connected, "stepping": self.stepping}
            self._ready |= {"schedule": list(self.schedule), "average": self.average}
            self._say("ready", **self._ready)
        began, said = time.monotonic(), False
        self._count_living_peers()
        while (offer := self._answer(k, stage, is_connected)) is None:
            self._count_living_peers()
            meanwhile()
            if not said and time.monotonic() - began > limits.SAY_SO_AFTER:
                said = True
                log.warning("rumor: step %d: %s", k, self._why_waiting())
        return offer

    def _answer(self, k: int, stage: Stage, is_connected: bool) -> Offer | None:
        """Wait a little for what the coordinator offers. Returns None if there is nothing yet."""
        with self._changed:
            if self._offer is None and self._refusal is None and not self._closed:
                if (alone := self._without_coordinator(k, stage, is_connected)) is not None:
                    self._ready = None
                    return alone
                self._changed.wait(limits.BEAT)
            if self._offer is None and self._refusal is not None:
                raise self._refusal
            if self._offer is None and self._closed:
                raise RuntimeError("this node has left the job: call step() before finish() or leave()")
            if self._offer is not None:
                self._ready = None
            return self._offer

    def _without_coordinator(self, k: int, stage: Stage, is_connected: bool) -> Offer | None:
        """Return what this node does if the coordinator has been gone for long; None if it waits.

        It must not have said on a living connection that it waits: an epoch might begin with it.
        """
        if self._welcomed:
            return None
        if stage in ("finish", "end") and self._is_out_of_touch(limits.END_WITHOUT):
            can_average = stage == "finish" and is_connected
            if can_average:
                log.warning("rumor: step %d: the coordinator is gone, so the members make their last average without it", k)
            elif stage == "finish":
                how = "ends with its own model, which is not the mean of all nodes"
                log.warning("rumor: step %d: a member is lost, and the coordinator is gone, so this node %s", k, how)
            return Offer(0, "", [], 0, is_same=can_average, is_over=not can_average)
        if stage == "after" and is_connected:  # others may have heard of an epoch, and try to connect
            return Offer(0, "", [], 0, is_same=True) if self._is_out_of_touch(limits.MEET_WITHIN + limits.ALONE_AFTER) else None
        if stage in ("between", "before", "after") and self._is_out_of_touch(self._alone_after) and self._alive >= self.needed:
            if not self._said_alone:
                self._said_alone = True
                log.warning(
                    "rumor: step %d: a member is lost, and there is no coordinator. Until it is back at %s, this node trains alone",
                    k,
                    self._coordinator,
                )
            return Offer(0, "", [], 0, is_alone=True)
        return None

    @property
    def _alone_after(self) -> float:
        return max(limits.ALONE_AFTER, silence_of_long(self.step_seconds))

    def _count_living_peers(self) -> None:
        """While there is no coordinator, see how many members of the last epoch are alive: their stores accept connections."""
        if self.is_in_touch or time.monotonic() - self._counted_at < limits.ALONE_AFTER:
            return
        self._alive = 1
        for peer in self._peers:
            if self._alive < self.needed and peer.uid != self._hello["uid"]:
                with suppress(OSError), socket.create_connection(peer.store, timeout=1.0):
                    self._alive += 1
        self._counted_at = time.monotonic()

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
            few = f", because {self._alive} of {self.needed} nodes (min_nodes) are alive" if 0 < self._alive < self.needed else ""
            return f"waiting for the coordinator at {self._coordinator} to come back{few}"
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
                time.sleep(limits.RETRY)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._coordinator, timeout=2.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        """Introduce this node, then send signs of life and hear what comes, until the connection ends."""
        with self._changed:
            epoch = self._epoch or (None, [])
            connection.sendall(
                encode("hello", **{**self._hello, "epoch": epoch[0], "members": epoch[1], "k": self.k, "lineage": self._lineage})
            )
            self._welcomed, self._was_dropped = True, False
            if self._ready is not None:
                self._say("ready", **self._ready)
        heard = now = time.monotonic()
        beats, unread, silence = 0.0, b"", silence_of(self.step_seconds)
        selector = selectors.DefaultSelector()
        selector.register(connection, selectors.EVENT_READ)
        while not self._closed and self._refusal is None:
            before, now = now, time.monotonic()
            if now - before > silence:  # as the coordinator knew it: the main thread may have counted the stop as a long step by now
                raise _StoppedError(f"this process did not run for {now - before:.0f} s")
            silence = silence_of(self.step_seconds)
            if now - beats >= limits.BEAT:
                beats = now
                self.beat()
            if now - heard > silence:
                raise OSError("it is silent")
            if not selector.select(limits.BEAT):
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
                if self._said_lost:  # else this node was gone, not the coordinator
                    log.warning("rumor: the coordinator at %s is back", self._coordinator)
                self._unreachable_since, self._said_alone, self._said_lost = None, False, False
                self._alive, self._counted_at = 0, -math.inf
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
                self._epoch, self._peers = (message["number"], [peer.uid for peer in peers]), peers
                self._lineage = message["lineage"]
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
                self._was_dropped = True
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
            if not self._closed and not self._said_lost:
                is_first, self._unreachable_since = self._unreachable_since is None, self._unreachable_since or time.monotonic()
                if isinstance(error, _StoppedError):
                    log.warning("rumor: %s. It asks the coordinator whether it is still a member", error)
                elif not (is_first and self._was_dropped):
                    self._said_lost = True
                    log.warning("rumor: lost the coordinator at %s (%s); members go on without it", self._coordinator, error)
            self.newcomers = 0
            self._changed.notify_all()


class _StoppedError(Exception):
    """This process was stopped for so long that the others may have gone on without it."""


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process: a data loader's worker may outlive its parent, which would then seem alive."""
    for link in list(_links):
        if link._socket is not None:
            link._socket.close()


os.register_at_fork(after_in_child=_close_in_child)
