"""Who is gone? Each process keeps a door: a port that it listens at and never answers.

The kernel lets a caller in for as long as the process lives, and turns it away once it is dead, so that a rank that has lost touch with
the others can tell in a moment whose process is gone, whose host is cut off, and that all are there, one of them too slow.
"""

from __future__ import annotations

import atexit
import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

Address = tuple[str, int]
Doors = Mapping[str, Address | None]  # by whose they are

SECONDS = 1.0  # that a host has to answer
ENDING = 2.0  # seconds that a process has to end after its connections have
HUNG_UP = ("closed by peer", "reset by peer", "Broken pipe")  # says gloo
MOST_CALLERS = 4096  # as many as a kernel lets wait, usually
_door: socket.socket | None = None


def address() -> Address | None:
    """Of this process's door, opened the first time; None where no port can be had."""
    global _door
    if _door is None:
        try:
            host = _own_host()
            _door = socket.create_server((host, 0), family=_family(host), backlog=MOST_CALLERS)
        except OSError:
            return None
        _door.setblocking(False)
        os.register_at_fork(after_in_child=_close)  # a data loader's worker may outlive the process
        atexit.register(_close)
    return _door.getsockname()[0], _door.getsockname()[1]


def by_name(of_nodes: Sequence[Sequence[Address | None]]) -> Doors:
    """
    >>> list(by_name([[None], [None, None]]))
    ['node 0', 'local rank 0 of node 1', 'local rank 1 of node 1']
    """
    return {
        f"node {node}" if len(of_node) == 1 else f"local rank {rank} of node {node}": door
        for node, of_node in enumerate(of_nodes)
        for rank, door in enumerate(of_node)
    }


def gone(doors: Doors) -> dict[str, str]:
    """What is known of those who do not open, after SECONDS at most."""
    _let_callers_go()
    found: dict[str, str] = {}
    own = address()
    with selectors.DefaultSelector() as knocking:
        for name, door in doors.items():
            if door is None or (_is_loopback(door) and own is not None and not _is_loopback(own)):  # of another host, then: it leads to us
                continue
            if refusal := _knock(name, door, knocking):
                found[name] = _reason(refusal)
        ends = time.monotonic() + SECONDS
        while knocking.get_map() and (left := ends - time.monotonic()) > 0:
            for key, _ in knocking.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if refusal := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = _reason(refusal)
                knocking.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(knocking.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            found[key.data] = _reason(errno.ETIMEDOUT)
            key.fileobj.close()
    return {name: found[name] for name in doors if name in found}


def likely_reason(doors: Doors, error: Exception) -> str:
    """Why a rank has lost touch with the others, as far as doors can tell.

    The kernel closes what a dead process had open one by one, so that its door may close after the connection whose end is the error.
    """
    found, ends = gone(doors), time.monotonic() + ENDING
    while doors and not found and any(words in str(error) for words in HUNG_UP) and time.monotonic() < ends:
        time.sleep(0.2)
        found = gone(doors)
    if found:
        return ", ".join(f"{name} is lost ({why})" for name, why in found.items()) + " (the earliest error in the logs of all is the cause)"
    if not doors:
        return "a peer has died before it has built its Averager, or is slower than the time-out that init_process_group(timeout=...) sets"
    return (
        "no process is gone, so a peer is slower than the time-out that init_process_group(timeout=...) sets, or has not called step(), "
        "averaged() or finish() as often as this rank"
    )


def _reason(refusal: int) -> str:
    return "its process is gone" if refusal in (errno.ECONNREFUSED, errno.ECONNRESET) else "its host does not answer"


def _knock(name: str, door: Address, knocking: selectors.BaseSelector) -> int:
    """The error with which it was turned away at once, if it was."""
    caller = socket.socket(_family(door[0]))
    caller.setblocking(False)
    refusal = caller.connect_ex(door)
    if refusal not in (0, errno.EINPROGRESS):
        caller.close()
        return refusal
    knocking.register(caller, selectors.EVENT_WRITE, name)
    return 0


def _own_host() -> str:
    """This host's address as the others see it: the one that it reaches the first of them from. Loopback, where there is none to ask."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, to = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(to)  # sends nothing: it only finds the way
            return str(asking.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_loopback(door: Address) -> bool:
    return door[0].startswith("127.") or door[0] == "::1"


def _let_callers_go() -> None:
    """Those who have knocked wait in a queue of MOST_CALLERS, which must not fill up."""
    if _door is not None:
        with suppress(OSError):  # BlockingIOError: nobody is left
            while True:
                _door.accept()[0].close()


def _close() -> None:
    global _door
    if _door is not None:
        _door.close()
    _door = None
