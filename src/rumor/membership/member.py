"""What the coordinator knows of nodes and of the current epoch, and how it compares nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rumor.membership.protocol import Stage

SLOW_LEAST = 1.0  # seconds that a member may take for a step in any case, with drop_slow
HUNG_LEAST, HUNG_STEPS = 60.0, 20.0  # a member hangs if it keeps others waiting for so many seconds, and so many of the slowest steps
STUCK = 5.0  # seconds for a member to notice that its epoch is broken
FAILURES, RETRY_AFTER = 3, 10.0  # how often a newcomer may fail to connect, and how many seconds it waits after the second time
MOST_NAMES = 8  # in one line
RANKS: dict[Stage, int] = {"join": -1, "between": 0, "finish": 0, "before": 1, "after": 2, "end": 2}


class Ready(NamedTuple):
    """A member waits for the next epoch at step k."""

    k: int
    stage: Stage
    is_connected: bool = True  # to the other members of its epoch

    @property
    def progress(self) -> tuple[int, int]:
        """How far the member has come: the larger, the further."""
        return (-1, 0) if self.stage == "join" else (self.k, RANKS[self.stage])


@dataclass
class Member:
    """What the coordinator knows of one node."""

    uid: str
    name: str
    setup: dict[str, str]
    store: list[str | int]
    min_nodes: int
    timeout: float | None
    drop_slow: float | None
    heard: float  # when it last gave a sign of life
    progressed: float  # when it last took a step
    k: int = 0
    computing: bool = False
    stepping: int = -1  # the step() that it is in; -1 if it is in none
    step_seconds: float = 0.0  # the slowest of its recent steps
    schedule: list[float | None] = field(default_factory=list)  # the state of its schedule
    average: int = -1  # step of the last global average that it has completed
    ready: Ready | None = None
    moved: int = 0  # pieces of state that it has sent or received
    failures: int = 0  # how often it could not come in
    retry_at: float = 0.0


@dataclass
class Epoch:
    """The current epoch.

    Attributes:
        number: its number.
        uids: the members that are still in it, in the order of their ranks.
        joining: those that take over the state.
        is_broken: whether members have been told that it is.
        absent: members that have yet to come back to a coordinator that was started again, and how long they may take.
    """

    number: int
    uids: list[str]
    joining: list[str] = field(default_factory=list)
    is_broken: bool = False
    absent: dict[str, float] = field(default_factory=dict)


def difference(theirs: dict[str, str], own: dict[str, str]) -> str | None:
    """Return in what the set-up of a node differs from that of the others."""
    for what in {**theirs, **own}:
        if theirs.get(what) != own.get(what):
            return f"nodes disagree on the {what}: the others have {theirs.get(what)}, this node has {own.get(what)}"
    return None


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def progress(node: Member) -> tuple[int, int]:
    assert node.ready is not None
    return node.ready.progress


def limit_of(node: Member, others: Iterable[Member]) -> float:
    """Return how long a member may take for a step while others wait for it, in seconds."""
    seconds = [other.step_seconds for other in others]
    limits = [other.drop_slow for other in (node, *others) if other.drop_slow is not None]
    if limits and seconds:
        return max(SLOW_LEAST, min(limits) * median(seconds))
    given = [other.timeout for other in (node, *others) if other.timeout is not None]
    return max(given) if given else max(HUNG_LEAST, HUNG_STEPS * max([*seconds, node.step_seconds]))


def listed(members: list[str]) -> str:
    """Name the members, or the first of them if there are many."""
    names = members if len(members) <= MOST_NAMES else [*members[:MOST_NAMES], "..."]
    return f"{len(members)} member{'s' * (len(members) > 1)}: {', '.join(names)}"
