"""A node's link to a coordinator that is gone."""

from __future__ import annotations

import socket
import time

import pytest

from rumor.membership import limits
from rumor.membership.link import Link
from rumor.membership.offer import Peer
from rumor.membership.protocol import Address

GONE = Address("127.0.0.1", 9)


def link_without_coordinator(peer: socket.socket) -> Link:
    """A link whose coordinator has been gone for long. Its epoch had two members, and two are needed."""
    link = Link(GONE, {"uid": "a"}, lambda why: None)
    link._unreachable_since, link.needed = time.monotonic() - 100, 2
    link._peers = [Peer("a", "a", GONE, -1), Peer("b", "b", Address(*peer.getsockname()), -1)]
    return link


def test_a_node_that_is_alone_takes_its_steps_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        link = link_without_coordinator(peer)
        monkeypatch.setattr(link._changed, "wait", lambda _: pytest.fail("it waits"))
        for k in range(3):
            assert link.next_epoch(k, "before").is_alone


def test_min_nodes_counts_at_every_average_without_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ALONE_AFTER", 0.0)  # the living are counted as often
    monkeypatch.setattr(limits, "BEAT", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as peer:
        link = link_without_coordinator(peer)
        assert link.next_epoch(0, "before").is_alone
    link._count_living_peers()
    assert link._answer(1, "before", is_connected=False) is None
    assert "1 of 2 nodes (min_nodes) are alive" in link._why_waiting()
