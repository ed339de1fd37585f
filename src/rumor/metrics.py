"""What a run has done so far: counters that cost nothing to leave on."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Metrics:
    """Counters of one node (of the average node, where all are in one process).

    Attributes:
        rounds: steps so far by what they did: "gossip", "global" or "none".
        bytes_sent: what this node put on the network; an all-reduce of b bytes counts as the ring's 2 (n - 1)/n b.
        seconds_waiting: time that the host stood still for messages.
        consensus_distance: 1/n sum_i ||x_i - x_bar||^2 when it was last asked for, and None before.
        H: the period in force, None where there is none.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    seconds_waiting: float = 0.0
    consensus_distance: float | None = None
    H: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rounds": dict(self.rounds)}
