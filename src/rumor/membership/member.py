"""What the coordinator knows of nodes and of the current epoch, and how it compares nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rumor.membership import limits
from rumor.membership.protocol import Message, Stage

MOST_NAMES = 8  # in one line
LONGEST_TEXT = 2**16  # characters of one value of a set-up
SHOWN = 200  # of these
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
    lineage: str = ""  # of the job that it was last a member of
    computing: bool = False
    stepping: int = -1  # the step() that it is in; -1 if it is in none
    step_seconds: float = 0.0  # the slowest of its recent steps; 0 before its first
    schedule: list[float | None] = field(default_factory=list)  # the state of its schedule
    average: int = -1  # step of the last global average that it has completed
    ready: Ready | None = None
    moved: int = 0  # pieces of state that it has sent or received
    failures: int = 0  # how often it could not come in
    drops: int = 0  # how often it was dropped because it kept others waiting
    dropped_at: float = 0.0
    retry_at: float = 0.0  # when it may come in

    @classmethod
    def of(cls, hello: Message, now: float, before: Member | None) -> Member:
        """Return the node that says hello. `before` is what was known of it, if it comes back."""
        names = ("uid", "name", "setup", "store", "min_nodes", "timeout", "drop_slow", "k")
        member = cls(**{name: hello[name] for name in names}, heard=now, progressed=now, lineage=hello.get("lineage") or "")
        if before is not None:
            member.drops, member.dropped_at, member.retry_at = before.drops, before.dropped_at, before.retry_at
        return member

    @property
    def silence(self) -> float:
        """How long it may be silent, in seconds."""
        return silence_of(self.step_seconds)

    @property
    def stuck_after(self) -> float:
        """How long it may take to notice that its epoch is broken, in seconds."""
        return max(limits.STUCK, self.silence)

    def pause(self, now: float) -> float:
        """Note that it was dropped because it kept others waiting. Returns for how many seconds it must stay out, longer each time."""
        self.drops = 1 if now - self.dropped_at > limits.FORGIVEN_AFTER else self.drops + 1
        seconds = 0.0 if self.drops == 1 else min(limits.DROPPED_FIRST * 2.0 ** (self.drops - 2), limits.DROPPED_MOST)
        self.dropped_at = now + seconds
        self.retry_at = now + seconds if seconds else 0.0
        return seconds


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
            here, there = _around_first_difference(str(theirs.get(what)), str(own.get(what)))
            return f"nodes disagree on the {what}: the others have {here}, this node has {there}"
    return None


def shortened(text: str) -> str:
    """Return a text that fits into a message, and differs if the text does: a model of thousands of tensors has a long description."""
    if len(text) <= LONGEST_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: LONGEST_TEXT - 200]} ... ({len(text):,} characters, sha256 {digest[:16]})"


def _around_first_difference(*texts: str) -> list[str]:
    """Cut long texts to where they begin to differ."""
    if max(map(len, texts)) <= SHOWN:
        return list(texts)
    at = next((i for i, chars in enumerate(zip(*texts, strict=False)) if len({*chars}) > 1), min(map(len, texts)))
    start = max(0, texts[0].rfind(", ", 0, at) + 2 if ", " in texts[0][:at] else at - SHOWN // 4)
    return [f"{'... ' * (start > 0)}{text[start : start + SHOWN]}{' ...' * (start + SHOWN < len(text))}" for text in texts]


def greeting(member: Member, nodes: Iterable[Member]) -> str:
    """Return the line that says that a node is here.

    One with the name of another is let in: it may take the place of a node whose host is gone, but whose silence was not noticed yet.
    """
    has_namesake = any(node.name == member.name for node in nodes if node is not member)
    note = ". Another node has the same name: both take part, but messages can't tell them apart" if has_namesake else ""
    return f"{member.name} is here{note}"


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def progress(node: Member) -> tuple[int, int]:
    assert node.ready is not None
    return node.ready.progress


def limit_of(node: Member, others: Iterable[Member]) -> float:
    """Return how long a member may take for a step while others wait for it, in seconds."""
    seconds, is_first = [other.step_seconds for other in others], node.step_seconds == 0.0
    slow = [other.drop_slow for other in (node, *others) if other.drop_slow is not None]
    if slow and seconds and not is_first:
        return max(limits.SLOW_LEAST, min(slow) * median(seconds))
    given = [other.timeout for other in (node, *others) if other.timeout is not None]
    if given:
        return max(given)
    slowest = limits.HUNG_STEPS * max([*seconds, node.step_seconds])
    return max(limits.FIRST_STEP if is_first else limits.HUNG_LEAST, min(slowest, limits.HUNG_MOST))


def silence_of(step_seconds: float) -> float:
    """Return how long a member with such steps may be silent, in seconds."""
    return max(limits.SILENCE, silence_of_long(step_seconds))


def silence_of_long(step_seconds: float) -> float:
    """Return how long it may be silent if its steps are long. It is less than SILENCE if they are short."""
    return min(limits.SILENCE_STEPS * step_seconds, limits.SILENCE_MOST)


def is_further(hello: Message, number: int, lineage: str, members: Iterable[Member]) -> bool:
    """Return whether a node that says hello has come further than the members of epoch `number`.

    If both began as one job, the later epoch counts. Else one of them has begun anew, at a coordinator that did not know the other yet,
    and the one with more steps counts: nobody should lose them.
    """
    if (hello.get("lineage") or "") == lineage:
        return bool(hello["epoch"] > number)
    return bool(hello["k"] > max([node.k for node in members], default=-1))


def is_past(other: Member, node: Member) -> bool:
    """Return whether a member has gone past the point where another one waits."""
    k = other.schedule[0] or 0
    is_between = node.ready is not None and node.ready.stage == "between"
    return k > node.k or (is_between and k == node.k and other.ready is not None and other.ready.stage == "before")


def listed(members: list[str]) -> str:
    """Name the members, or the first of them if there are many."""
    names = members if len(members) <= MOST_NAMES else [*members[:MOST_NAMES], "..."]
    return f"{len(members)} member{'s' * (len(members) > 1)}: {', '.join(names)}"
