"""What the coordinator offers a node: a place among the members of the next epoch, or a reason why there is none."""

from __future__ import annotations

from typing import Any, NamedTuple

from rumor.membership.protocol import Address


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
        is_alone: whether there is no coordinator, so that this node does without the others for now.
    """

    number: int
    token: str
    members: list[Peer]
    holders: int
    is_at_end: bool = False
    is_same: bool = False
    is_over: bool = False
    passed: list[Any] | None = None
    is_alone: bool = False


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
