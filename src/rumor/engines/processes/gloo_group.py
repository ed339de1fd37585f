"""GlooGroup: the process group of one epoch of members. Each epoch has its own, outside of torch's registry of groups.

Any thread can break it up, which wakes those that wait for messages. Its memory is freed in a thread of its own, because gloo may take a
while to end.
"""

from __future__ import annotations

import atexit
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

from rumor.membership import limits
from rumor.membership.protocol import Address

LAST_RESORT = 600.0  # seconds to wait for a message, if neither its sender nor the coordinator can be asked
ENDING = 5.0  # seconds for gloo's threads to end, when the process does
LOOKS_EVERY = 0.5  # seconds
NO_MESSAGE = 2**31 - 1  # a tag that no message has


class GlooGroup:
    """A group of `n` members.

    Args:
        store: where member 0 tells the others how to reach it.
        name: of the epoch; no other epoch has it.
        rank: of this member.
        n: number of members.
        host: address of this host, as others see it.
    """

    def __init__(self, store: Address, name: str, rank: int, n: int, host: str):
        self.n, self.rank = n, rank
        self._lock, self.is_broken = threading.Lock(), False
        within = datetime.timedelta(seconds=limits.MEET_WITHIN)
        shared = PrefixStore(name, TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=within))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        device = ProcessGroupGloo.create_device(interface=interface) if interface else ProcessGroupGloo.create_device(hostname=host)
        options._devices, options._timeout, options._threads = [device], within, 2
        self.group = ProcessGroup(shared, rank, n)
        self.group._set_default_backend(ProcessGroup.BackendType.GLOO)
        backend = ProcessGroupGloo(shared, rank, n, options)
        backend._set_default_timeout(datetime.timedelta(seconds=LAST_RESORT))
        self.group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        _living.add(self)

    def break_up(self) -> None:
        """Close all connections. Those that wait for messages here, or for messages of this member elsewhere, get an error.

        gloo closes the connections of a group when a wait in it times out. So wait for a message that nobody sends.
        """
        with self._lock:
            if self.is_broken:
                return
            self.is_broken = True
            for peer in range(self.n):
                if peer != self.rank:  # a connection that has ended fails at once, and does not count as a time-out
                    with suppress(RuntimeError):
                        self.group.recv([torch.zeros(1)], peer, NO_MESSAGE).wait(datetime.timedelta(milliseconds=1))

    def dispose(self, memory: object = None) -> None:
        """Free this group in the background. `memory` is what its messages read or fill, and is freed after it."""
        _living.discard(self)
        held = [self.group, memory]
        del self.group
        thread = threading.Thread(target=held.clear, name="rumor-dispose", daemon=True)
        _ending[:] = [*(one for one in _ending if one.is_alive()), thread]
        thread.start()


class BreakableSum:
    """A sum over all members. Who waits for it looks now and then whether the group is broken: gloo itself may miss that."""

    def __init__(self, work: Work, group: GlooGroup):
        self._work, self._group = work, group

    def wait(self) -> object:
        while True:
            try:
                return self._work.wait(datetime.timedelta(seconds=LOOKS_EVERY))
            except RuntimeError as error:
                if "timed out" not in str(error).lower() or self._group.is_broken:
                    raise


_living: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
_PROCESS = os.getpid()
_ending: list[threading.Thread] = []  # that free groups


@atexit.register
def _end_all() -> None:
    """Let no message keep a process from ending. If gloo's threads were still at work then, they would abort it."""
    if os.getpid() != _PROCESS:  # a fork shares the connections, and must not end them
        return
    for group in list(_living):
        group.break_up()
        group.dispose()
    ends = time.monotonic() + ENDING
    for thread in _ending:
        thread.join(max(0.0, ends - time.monotonic()))


def connect(make: Callable[[], GlooGroup], is_lost: Callable[[], bool]) -> GlooGroup | None:
    """Connect to the members of an epoch, in a thread: if one of them dies meanwhile (`is_lost`), this does not wait for it.

    Returns None if it has failed.
    """
    made: list[GlooGroup] = []
    lock, done = threading.Lock(), threading.Event()
    given_up = False

    def run() -> None:
        with suppress(RuntimeError, OSError):
            group = make()
            with lock:
                if not given_up:
                    made.append(group)
                    done.set()
                    return
            group.break_up()
            group.dispose()
        done.set()

    threading.Thread(target=run, name="rumor-connect", daemon=True).start()
    while not done.wait(0.02):
        if is_lost():
            with lock:
                given_up = not made
            break
    return made[0] if made else None


def store_server() -> TCPStore:
    """Return a store in this process, through which members of an epoch find each other if this one is the first of them."""
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
