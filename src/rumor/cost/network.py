"""What is trained, over which network: the seconds of one gossip step and of one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import nn

from rumor.schedule import check_whole
from rumor.topology import Topology, exponential, grid, one_peer_exponential, ring, torus

TOPOLOGIES = {"one-peer-exponential": one_peer_exponential, "ring": ring, "grid": grid, "torus": torus, "exponential": exponential}


def check_number(name: str, value: float, unit: str, zero: bool = False) -> None:
    """Raises unless `value` is finite and positive (or zero, if that is allowed)."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        rule = "finite and not negative" if zero else "finite and positive"
        raise ValueError(f"{name} must be {rule}, in {unit}, got {name}={value:g}")


def kind(topology: Topology) -> str:
    """The name of the function that built it, as the command line writes it.

    >>> kind(one_peer_exponential(8))
    'one-peer-exponential'
    """
    return topology.name.split("(")[0].replace("_", "-")


@lru_cache(maxsize=256)
def degree(topology: Topology) -> float:
    """Messages that the busiest node sends or hears in a step, averaged over the cycle.

    >>> degree(ring(8)), degree(one_peer_exponential(8)), degree(grid(6))
    (2.0, 1.0, 3.0)
    """
    busiest = 0
    for k in range(topology.period):
        rows, columns, _ = topology.matrix(k).triplets()
        links = rows != columns
        busiest += max(int(np.bincount(side[links], minlength=1).max()) for side in (rows, columns))
    return busiest / topology.period


@dataclass(frozen=True)
class Workload:
    """What is trained: d parameters, the seconds that a step computes, and for how many steps.

    Attributes:
        parameters: d, those that are averaged.
        compute: seconds of a forward, backward and optimizer step.
        bytes_per_parameter: 4 for float32.
        steps: of the whole run.
    """

    parameters: int
    compute: float
    bytes_per_parameter: float = 4.0
    steps: int = 10_000

    def __post_init__(self) -> None:
        check_whole("parameters", self.parameters, 1)
        check_whole("steps", self.steps, 1)
        check_number("compute", self.compute, "seconds a step", zero=True)
        check_number("bytes_per_parameter", self.bytes_per_parameter, "bytes")

    @classmethod
    def of(cls, model: nn.Module, compute: float, steps: int = 10_000) -> Workload:
        """That of training `model`: the parameters that train, and their mean size.

        >>> Workload.of(nn.Linear(9, 1), compute=0.1).bytes
        40.0
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        count = sum(p.numel() for p in trained)
        if count == 0:
            raise ValueError(f"{type(model).__name__} has no parameters that train: there is nothing to average")
        return cls(count, compute, sum(p.numel() * p.element_size() for p in trained) / count, steps)

    @property
    def bytes(self) -> float:
        """Of one copy of the parameters, d b."""
        return self.parameters * self.bytes_per_parameter

    @property
    def summed_bytes(self) -> float:
        """Of one copy in a global round, which sums in float32 or better."""
        return self.parameters * max(self.bytes_per_parameter, 4.0)


class Network(Protocol):
    """What the time model needs to know of a network."""

    def all_reduce(self, n: int, bytes: float) -> float: ...  # seconds
    def gossip(self, topology: Topology, bytes: float) -> float: ...  # seconds of one step
    def ddp(self) -> float | None: ...  # seconds that DDP adds to a step, less what it overlaps, if that was measured
    def note(self, topology: Topology) -> str | None: ...  # what a reader should know of that last figure


@dataclass(frozen=True)
class Link:
    """A network by its links, the alpha-theta model:

        gossip      degree bytes / bandwidth + alpha
        all-reduce  2 (n - 1)/n bytes / bandwidth + 2 (n - 1) alpha

    Attributes:
        bandwidth: bytes (not bits) a second that a node sends, and hears at the same time. 25 Gbit/s are 25e9 / 8.
        latency: alpha, seconds of a message without content.

    >>> link = Link(bandwidth=100e6, latency=1e-3)
    >>> round(link.gossip(ring(4), 1e8), 3), round(link.all_reduce(4, 1e8), 3)
    (2.001, 1.506)
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, "bytes/s")
        check_number("latency", self.latency, "seconds", zero=True)

    def all_reduce(self, n: int, bytes: float) -> float:
        return 2 * (n - 1) / n * bytes / self.bandwidth + 2 * (n - 1) * self.latency

    def gossip(self, topology: Topology, bytes: float) -> float:
        messages = degree(topology)
        return messages * bytes / self.bandwidth + self.latency if messages else 0.0

    def ddp(self) -> float | None:
        return None

    def note(self, topology: Topology) -> str | None:
        return None


@dataclass(frozen=True)
class Measured:
    """A network by times that were measured with the model itself, so on as many nodes and for as many bytes as are planned for.

    Attributes:
        all_reduce_seconds: of one all-reduce.
        gossip_seconds: of one gossip step, by topology ("ring", "one-peer-exponential", ...). For one that is missing, the measured
            one of the nearest degree is scaled by the degrees.
        ddp_seconds: that DistributedDataParallel adds to a step of computing. It overlaps its all-reduce with the backward pass, so this
            is less than `all_reduce_seconds`, and what Parallel SGD really costs; None where it was not measured.

    >>> seen = Measured(0.278, {"one-peer-exponential": 0.150})
    >>> seen.gossip(ring(32), bytes=102e6), seen.note(ring(32))
    (0.3, 'not measured: one-peer-exponential scaled by degree, 2 against 1')
    """

    all_reduce_seconds: float
    gossip_seconds: Mapping[str, float]
    ddp_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.ddp_seconds is not None:
            check_number("ddp_seconds", self.ddp_seconds, "seconds", zero=True)
        check_number("all_reduce_seconds", self.all_reduce_seconds, "seconds")
        if not self.gossip_seconds:
            raise ValueError("gossip_seconds must name at least one topology, as in {'one-peer-exponential': 0.150}, got none")
        for name, seconds in self.gossip_seconds.items():
            if name not in TOPOLOGIES:
                raise ValueError(f"gossip_seconds has a time for {name!r}, which is none of {', '.join(TOPOLOGIES)}")
            check_number(f"gossip_seconds[{name!r}]", seconds, "seconds")

    def all_reduce(self, n: int, bytes: float) -> float:
        return self.all_reduce_seconds if n > 1 else 0.0

    def ddp(self) -> float | None:
        return self.ddp_seconds

    def gossip(self, topology: Topology, bytes: float) -> float:
        if not topology.has_links:
            return 0.0
        name = self._nearest(topology)
        return self.gossip_seconds[name] * degree(topology) / degree(TOPOLOGIES[name](topology.n))

    def note(self, topology: Topology) -> str | None:
        name = self._nearest(topology)
        if name == kind(topology) or not topology.has_links:
            return None
        return f"not measured: {name} scaled by degree, {degree(topology):g} against {degree(TOPOLOGIES[name](topology.n)):g}"

    def _nearest(self, topology: Topology) -> str:
        if kind(topology) in self.gossip_seconds:
            return kind(topology)
        return min(self.gossip_seconds, key=lambda name: abs(degree(TOPOLOGIES[name](topology.n)) - degree(topology)))
