"""`rumor.elastic`: a group whose members come and go."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from rumor.membership.protocol import Address, parse_address


@dataclass(frozen=True)
class ElasticGroup:
    """A group whose members come and go. `rumor.elastic` returns one; hand it to `rumor.Averager(..., group=...)`.

    Attributes:
        coordinator: address of the coordinator.
        name: of this node, in messages.
        min_nodes: how many nodes there must be.
        timeout: seconds that others wait for a member that does not call step(); None for 60, or 10 of the slowest steps if longer.
        drop_slow: how many times slower than the others a member may be; None if it may be slow.
        job: name of the job, which must be the same on all nodes.
    """

    coordinator: Address
    name: str
    min_nodes: int = 1
    timeout: float | None = None
    drop_slow: float | None = None
    job: str | None = None


def elastic(
    coordinator: str,
    name: str | None = None,
    min_nodes: int = 1,
    timeout: float | None = None,
    *,
    drop_slow: float | None = None,
    job: str | None = None,
) -> ElasticGroup:
    """Let members come and go: nodes that die, hang or leave do not stop the others, and newcomers take over the job's state.

    Start a coordinator first (`rumor coordinator`), then a plain `python train.py` on each host, in any order. Members change at global
    averages. A lost node is noticed by its closed connection, a silent one after 5 seconds (30 if steps are long). Call other collectives
    (`averaged`, `rumor.save`) at the top of the loop, depending on `averager.steps` alone: that is where newcomers begin. Let the learning
    rate depend on `averager.steps`, too: a newcomer takes over the optimizer, but no scheduler.

    Args:
        coordinator: HOST:PORT of the coordinator.
        name: name of this node in messages; its host and process id if None. It identifies nobody: a node that starts again may use its
            old name. Two living nodes of the same name both take part, and the coordinator says so.
        min_nodes: training begins, and goes on after a loss, with at least so many nodes. With fewer, those that are here wait. If nodes
            and the coordinator give different numbers, the largest counts.
        timeout: seconds that others wait for a member that is alive but does not call step(), before they go on without it. None: 60
            seconds, or 10 of the slowest recent steps if that is longer, at most 30 minutes; 5 minutes for a node's first step.
        drop_slow: go on without a member whose step takes this many times as long as the others' (1 second at least). It comes back at
            once, but stays out longer each time that it is dropped again. None: wait for it.
        job: a name of the job. The coordinator refuses nodes that name another one. Without names, a second job with the same model and
            method would join the first.

    A node that comes after the job has ended gets `rumor.JobEndedError`, which ends its process with exit code 0. One that does not fit
    the job gets `rumor.RefusedError`.

    >>> import rumor
    >>> group = rumor.elastic("node0:29510", name="alice")
    >>> group.coordinator, group.name, group.min_nodes
    (Address(host='node0', port=29510), 'alice', 1)
    """
    if isinstance(min_nodes, bool) or not isinstance(min_nodes, int) or min_nodes < 1:
        raise ValueError(f"min_nodes must be a whole number >= 1, got min_nodes={min_nodes!r}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout is in seconds and must be above 0, got timeout={timeout!r}")
    if drop_slow is not None and drop_slow <= 1:
        raise ValueError(f"drop_slow is how many times slower a member may be, and must be above 1, got drop_slow={drop_slow!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f'name must be a string, got {name!r}. A port is part of the address: rumor.elastic("node0:29510")')
    name = name or f"{socket.gethostname()}:{os.getpid()}"
    return ElasticGroup(parse_address(coordinator), name, min_nodes, timeout, drop_slow, job)
