"""Liveness: finds out which peer is lost, so that errors can name it.

Each process listens at a port and never answers. The kernel accepts a connection while the process lives, and refuses it once the
process is dead. So a rank that has lost touch with the others can tell within a second whose process is gone, whose host does not
answer, or that all are there and one is too slow.
"""

from __future__ import annotations

import atexit
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

Address = tuple[str, int]
Addresses = Mapping[str, Address | None]  # by the name of the process, "node 3"

SECONDS = 1.0  # for a host or the store to answer
GONE = "its process is gone"
FIRST_LOST = "rumor/first lost"  # the key in the store
ENDING = 2.0  # seconds for a process to end after its connections have ended
HUNG_UP = ("closed by peer", "reset by peer", "Broken pipe")  # in errors of gloo
BACKLOG = 4096  # connections that may wait; kernels usually allow no more
_listener: socket.socket | None = None


class Store(Protocol):
    """What this module needs of a store of torch.distributed."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write `desired_value` if the key has `expected_value`, or is not there. Returns what is there now."""


def address() -> Address | None:
    """Return where this process listens, from the first call on; None if there is no free port."""
    global _listener
    if _listener is None:
        try:
            host = _own_host()
            _listener = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
        except OSError:
            return None
        _listener.setblocking(False)
        os.register_at_fork(after_in_child=_close)  # a data loader's worker may outlive this process
        atexit.register(_close)
    return _listener.getsockname()[0], _listener.getsockname()[1]


def by_name(of_nodes: Sequence[Sequence[Address | None]]) -> Addresses:
    """Return the addresses of all processes, by name.

    >>> list(by_name([[None], [None, None]]))
    ['node 0', 'local rank 0 of node 1', 'local rank 1 of node 1']
    """
    return {
        f"node {node}" if len(of_node) == 1 else f"local rank {rank} of node {node}": address_
        for node, of_node in enumerate(of_nodes)
        for rank, address_ in enumerate(of_node)
    }


def lost_processes(addresses: Addresses) -> dict[str, str]:
    """Return the names of processes that refuse a connection or do not answer, each with the reason. Takes SECONDS at most."""
    _drop_callers()
    found: dict[str, str] = {}
    own = address()
    with selectors.DefaultSelector() as selector:
        for name, address_ in addresses.items():
            if address_ is None or (
                _is_loopback(address_) and own is not None and not _is_loopback(own)
            ):  # of another host: it would lead to this one
                continue
            if refusal := _connect(name, address_, selector):
                found[name] = _reason(refusal)
        ends = time.monotonic() + SECONDS
        while selector.get_map() and (left := ends - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if refusal := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = _reason(refusal)
                selector.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            found[key.data] = _reason(errno.ETIMEDOUT)
            key.fileobj.close()
    return {name: found[name] for name in addresses if name in found}


def likely_reason(addresses: Addresses, error: Exception, store: Store | None = None) -> str:
    """Return why a rank has lost touch with the others, as far as it can tell.

    The kernel closes the connections of a dead process one by one, so its port may close later than the connection that failed.

    Args:
        addresses: of all processes.
        error: what the failed call raised.
        store: of the job, if there is one. In it the ranks write down who was lost first.
    """
    found, ends = lost_processes(addresses), time.monotonic() + ENDING
    while addresses and not found and any(words in str(error) for words in HUNG_UP) and time.monotonic() < ends:
        time.sleep(0.2)
        found = lost_processes(addresses)
    if found:
        text = f"{_in_words(found, _first_lost(list(found), store))}; the earliest error in the logs of all ranks is the cause"
        if GONE not in found.values():
            return text
        return f"{text}. If there is none, it was killed (out of memory?), or ended before this rank had called all that it calls"
    if not addresses:
        return "a peer has died before it built its Averager, or is slower than the time-out that init_process_group(timeout=...) sets"
    return (
        "no process is gone, so a peer is slower than the time-out that init_process_group(timeout=...) sets, or has not called step(), "
        "averaged(), finish(), consensus_distance() or rumor.save() as often as this rank"
    )


def _in_words(found: Mapping[str, str], first: str | None) -> str:
    if first is not None:
        later = [name for name in found if name != first]
        return f"{first} is lost ({found[first]})" + (f"; {', '.join(later)} ended after it, probably by the launcher" if later else "")
    lost = ", ".join(f"{name} is lost ({why})" for name, why in found.items())
    if len(found) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # it sends SIGTERM, which leaves no trace that others could see
        lost += "; one of them was lost first, and torchrun has ended others on the same host since"
    return lost


def _first_lost(found: Sequence[str], store: Store | None) -> str | None:
    """Return which process was lost first, if a rank has seen it as the only one.

    A launcher ends all processes soon after it has lost one. Ranks that look early write down the lost one; those that look later read it.
    """
    if len(found) == 1 and store is None:
        return found[0]
    answers: list[str] = []

    def ask() -> None:
        assert store is not None
        with suppress(Exception):  # the store may be lost, too, and this is only for the text of an error
            answers.append(store.compare_set(FIRST_LOST, "", found[0] if len(found) == 1 else "").decode())

    if store is not None:
        asking = threading.Thread(target=ask, daemon=True)  # a store that is lost may answer after minutes
        asking.start()
        asking.join(SECONDS)
    return answers[0] if answers and answers[0] in found else found[0] if len(found) == 1 else None


def _reason(refusal: int) -> str:
    return GONE if refusal in (errno.ECONNREFUSED, errno.ECONNRESET) else "its host does not answer"


def _connect(name: str, to: Address, selector: selectors.BaseSelector) -> int:
    """Start to connect. Returns the error number if the connection was refused at once, else 0."""
    caller = socket.socket(_family(to[0]))
    caller.setblocking(False)
    refusal = caller.connect_ex(to)
    if refusal not in (0, errno.EINPROGRESS):
        caller.close()
        return refusal
    selector.register(caller, selectors.EVENT_WRITE, name)
    return 0


def _own_host() -> str:
    """Return this host's address as the others see it: the one from which it reaches MASTER_ADDR. Loopback if that is not set."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, to = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(to)  # sends nothing: it only looks up the route
            return str(asking.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_loopback(address_: Address) -> bool:
    return address_[0].startswith("127.") or address_[0] == "::1"


def _drop_callers() -> None:
    """Accept and close the connections of others, which wait in a queue of BACKLOG that must not fill up."""
    if _listener is not None:
        with suppress(OSError):  # BlockingIOError: no connection is left
            while True:
                _listener.accept()[0].close()


def _close() -> None:
    global _listener
    if _listener is not None:
        _listener.close()
    _listener = None
