"""How much a node sends in a run."""

from __future__ import annotations

import rumor
from networks.runs import TRACKING, Run
from rumor.cost.network import coded_bytes


def bytes_per_step(run: Run, global_share: float) -> float:
    """Return the bytes that the average node sends for each parameter, per step. Buffers of the model are left out.

    An all-reduce counts as a ring's, 2 (n - 1)/n messages.

    >>> [round(bytes_per_step(Run("Parallel SGD", "complete", bits=bits), 1.0), 2) for bits in (32, 16, 4)]
    [7.75, 3.88, 1.01]
    >>> round(bytes_per_step(Run("Gossip-PGA", H=6), 1 / 6), 2)
    4.62
    """
    n, graph = run.nodes, run.graph
    number = 4.0 if run.bits == 32 else coded_bytes(1, run.bits)
    tracked = 1 if run.method == TRACKING else 0
    messages = 0.0 if graph.is_complete else _messages(graph)  # complete: every step is global
    gossip = messages * (1 + tracked + (run.state == "always"))
    all_reduce = 2 * (n - 1) / n * (1 + tracked + (run.state is not None))
    return number * ((1 - global_share) * gossip + global_share * all_reduce)


def share_of_parallel(run: Run, global_share: float) -> float:
    """Return the same as a share of what Parallel SGD sends with float32."""
    return bytes_per_step(run, global_share) / bytes_per_step(Run("Parallel SGD", "complete", nodes=run.nodes), 1.0)


def _messages(graph: rumor.Topology) -> float:
    """Return the messages of the average node in the average gossip step."""
    links = 0
    for k in range(graph.period):
        rows, columns, _ = graph.matrix(k).triplets()
        links += int((rows != columns).sum())
    return links / graph.period / graph.n
