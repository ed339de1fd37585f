"""The workload and the network: how many seconds one gossip step and one all-reduce take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import nn

from rumor.engines.codes import BLOCK, CODES
from rumor.schedule import check_whole
from rumor.topology import Topology, base_graph, exponential, grid, one_peer_exponential, ring, torus

Builder = Callable[[int], Topology]
TOPOLOGIES: dict[str, Builder] = {
    "one-peer-exponential": one_peer_exponential,
    "ring": ring,
    "grid": grid,
    "torus": torus,
    "exponential": exponential,
    "base-graph": base_graph,
}
CODING = 3e-9  # seconds to encode, decode and mix a number: a guess for CPUs, if there is no probe


def check_number(name: str, value: float, unit: str, zero: bool = False) -> None:
    """Raises an error unless `value` is finite and positive (or zero, if that is allowed)."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        rule = "finite and not negative" if zero else "finite and positive"
        raise ValueError(f"{name} must be {rule}, in {unit}, got {name}={value:g}")


def kind(topology: Topology) -> str:
    """The name of the function that built the topology, in the spelling of files and of `TOPOLOGIES`.

    >>> kind(one_peer_exponential(8))
    'one-peer-exponential'
    """
    return topology.name.split("(")[0].replace("_", "-")


def in_python(name: str) -> str:
    """The name of a topology as Python spells it, for people to read and to paste.

    >>> in_python("one-peer-exponential")
    'one_peer_exponential'
    """
    return name.replace("-", "_")


@lru_cache(maxsize=256)
def degree(topology: Topology) -> float:
    """The number of messages that the busiest node sends or receives in a step, averaged over the cycle.

    >>> degree(ring(8)), degree(one_peer_exponential(8)), degree(grid(6))
    (2.0, 1.0, 3.0)
    """
    busiest = 0
    for k in range(topology.period):
        rows, columns, _ = topology.matrix(k).triplets()
        links = rows != columns
        busiest += max(int(np.bincount(side[links], minlength=1).max()) for side in (rows, columns))
    return busiest / topology.period


@lru_cache(maxsize=64)
def same_as(n: int) -> dict[str, str]:
    """By topology, the first one of `TOPOLOGIES` that has the same matrices for n nodes. For most of them, this is the topology itself.

    >>> same_as(4)["torus"], same_as(4)["ring"], set(same_as(2).values())
    ('grid', 'ring', {'one-peer-exponential'})
    """
    first: dict[tuple[bytes, ...], str] = {}
    return {name: first.setdefault(_matrices(build(n)), name) for name, build in TOPOLOGIES.items()}


def _matrices(topology: Topology) -> tuple[bytes, ...]:
    found = (topology.matrix(k).triplets() for k in range(topology.period))
    return tuple(rows.tobytes() + columns.tobytes() + np.round(weights, 12).tobytes() for rows, columns, weights in found)


def distinct(n: int) -> list[str]:
    """The topologies for n nodes. Of those that have the same matrices, the first one only, since noise alone would tell them apart.

    >>> distinct(2), distinct(3)
    (['one-peer-exponential'], ['one-peer-exponential', 'ring', 'grid', 'base-graph'])
    """
    return [name for name, first in same_as(n).items() if name == first]


@dataclass(frozen=True)
class Workload:
    """The training job: the size of the model, the compute time of a step, and the number of steps.

    Attributes:
        parameters: d, the number of parameters that are averaged.
        compute: seconds of a forward, backward and optimizer step.
        bytes_per_parameter: 4 for float32.
        steps: number of steps of the whole run.
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
        """Builds the workload of training `model`. It counts the parameters that require gradients, with their mean size in bytes.

        >>> Workload.of(nn.Linear(9, 1), compute=0.1).bytes
        40.0
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        count = sum(p.numel() for p in trained)
        if count == 0:
            raise ValueError(f"{type(model).__name__} has no parameters that require gradients, so there is nothing to average")
        return cls(count, compute, sum(p.numel() * p.element_size() for p in trained) / count, steps)

    @property
    def bytes(self) -> float:
        """Bytes of one copy of the parameters."""
        return self.parameters * self.bytes_per_parameter

    @property
    def summed_bytes(self) -> float:
        """Bytes of one copy in a global average, which sums in float32 or better."""
        return self.parameters * max(self.bytes_per_parameter, 4.0)


def coded_bytes(parameters: int, bits: int) -> float:
    """Bytes of so many numbers as codes of 16, 8 or 4 bits, with the scales of their blocks.

    >>> coded_bytes(1_000_000, 16), coded_bytes(1_000_000, 4)
    (2000000.0, 519531.25)
    """
    return parameters * CODES[bits].nbytes(BLOCK) / BLOCK


def method_text(topology: str | None, H: int, bits: int = 32, delay: int = 0) -> str:
    """Gossip-PGA, as text that `rumor.method` reads.

    >>> method_text("one-peer-exponential", 6, bits=4)
    'gossip_pga(one_peer_exponential, H=6, bits=4)'
    """
    options = "".join(f", {name}={value}" for name, value, usual in (("bits", bits, 32), ("delay", delay, 0)) if value != usual)
    return f"gossip_pga({in_python(topology or 'isolated')}, H={H}{options})"


_TIMED = re.compile(r"gossip_pga\((\w+), H=(\d+)(?:, bits=(\d+))?\)")  # what method_text writes, without delay


class Network(Protocol):
    """The times of a network that the time model needs."""

    def all_reduce(self, n: int, bytes: float) -> float:
        """Seconds of one all-reduce."""
        ...

    def gossip(self, topology: Topology, bytes: float) -> float:
        """Seconds of one gossip step."""
        ...

    def coded_all_reduce(self, n: int, parameters: int, bits: int) -> float | None:
        """Seconds of one global average of codes, including the work of encoding; None if that was not measured."""
        ...

    def coded_gossip(self, topology: Topology, parameters: int, bits: int) -> float | None:
        """Seconds of one gossip step of codes, including the work of encoding; None if that was not measured."""
        ...

    def ddp(self, bits: int = 32) -> float | None:
        """Seconds that DDP adds to the compute time of a step, after overlap; None if that was not measured.

        With fewer than 32 bits, it is DDP with `rumor.ddp_hook`.
        """
        ...

    def step(self, method: str, is_elastic: bool = False) -> float | None:
        """Seconds of a whole training step of a method, which is given as text; None if that was not measured."""
        ...

    def timed(self, bits: int) -> tuple[str, int] | None:
        """The topology and the period of Gossip-PGA with so many bits, if its whole step was measured."""
        ...

    def note(self, topology: Topology) -> str | None:
        """A remark for the reader about the time of a gossip step, or None."""
        ...


@dataclass(frozen=True)
class Link:
    """A network described by the bandwidth and latency of its links (the alpha-theta model):

        gossip      degree bytes / bandwidth + alpha
        all-reduce  2 (n - 1)/n bytes / bandwidth + 2 (n - 1) alpha

    Codes travel in the same way, as fewer bytes. Their global average has two messages to every node instead of a ring's steps. The time to
    encode and decode is added, once for gossip and twice for a global average.

    Attributes:
        bandwidth: bytes (not bits) per second that a node sends, and receives at the same time. 25 Gbit/s is 25e9 / 8.
        latency: alpha, seconds of an empty message.
        coding: seconds to encode, decode and mix one number.

    >>> link = Link(bandwidth=100e6, latency=1e-3)
    >>> round(link.gossip(ring(4), 1e8), 3), round(link.all_reduce(4, 1e8), 3)
    (2.001, 1.506)
    """

    bandwidth: float
    latency: float = 0.0
    coding: float = CODING

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, "bytes/s")
        check_number("latency", self.latency, "seconds", zero=True)
        check_number("coding", self.coding, "seconds", zero=True)

    def all_reduce(self, n: int, bytes: float) -> float:
        return 2 * (n - 1) / n * bytes / self.bandwidth + 2 * (n - 1) * self.latency

    def gossip(self, topology: Topology, bytes: float) -> float:
        messages = degree(topology)
        return messages * bytes / self.bandwidth + self.latency if messages else 0.0

    def coded_all_reduce(self, n: int, parameters: int, bits: int) -> float:
        sent = 2 * (n - 1) / n * coded_bytes(parameters, bits)
        return sent / self.bandwidth + 2 * self.latency + 2 * self.coding * parameters

    def coded_gossip(self, topology: Topology, parameters: int, bits: int) -> float:
        work = self.coding * parameters if topology.has_links else 0.0
        return self.gossip(topology, coded_bytes(parameters, bits)) + work

    def ddp(self, bits: int = 32) -> float | None:
        return None

    def step(self, method: str, is_elastic: bool = False) -> float | None:
        return None

    def timed(self, bits: int) -> tuple[str, int] | None:
        return None

    def note(self, topology: Topology) -> str | None:
        return None


@dataclass(frozen=True)
class Measured:
    """A network described by measured times. They must be measured with the planned model on the planned number of nodes.

    Attributes:
        all_reduce_seconds: seconds of one all-reduce.
        gossip_seconds: seconds of one gossip step, by topology ("ring", "one-peer-exponential", ...). The time of a missing topology is
            that of the measured one with the nearest degree, scaled by the degrees.
        ddp_seconds: seconds that DistributedDataParallel adds to the compute time of a step; None if it was not measured. DDP overlaps
            its all-reduce with the backward pass, so this is less than `all_reduce_seconds`. It is the real cost of Parallel SGD.
        coded_seconds: seconds of one gossip step with one peer, and of one global average, by the number of bits of their codes.
        coded_ddp_seconds: seconds that DDP with `rumor.ddp_hook` adds to the compute time of a step, by its number of bits.
        step_seconds: seconds of whole training steps, by the method as text ("gossip_pga(ring, H=6, bits=4)"). They replace sums of parts.
        elastic_seconds: the same in an elastic group.

    >>> seen = Measured(0.278, {"one-peer-exponential": 0.150})
    >>> seen.gossip(ring(32), bytes=102e6), seen.note(ring(32))
    (0.3, 'not measured, scaled by degree (2 against 1) from one_peer_exponential')
    """

    all_reduce_seconds: float
    gossip_seconds: Mapping[str, float]
    ddp_seconds: float | None = None
    coded_seconds: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    coded_ddp_seconds: Mapping[int, float] = field(default_factory=dict)
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    elastic_seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bits, seconds in self.coded_ddp_seconds.items():
            check_number(f"coded_ddp_seconds[{bits}]", seconds, "seconds", zero=True)
        for name, times in (("step_seconds", self.step_seconds), ("elastic_seconds", self.elastic_seconds)):
            for method, seconds in times.items():
                check_number(f"{name}[{method!r}]", seconds, "seconds")
        for bits, pair in self.coded_seconds.items():
            for seconds in pair:
                check_number(f"coded_seconds[{bits}]", seconds, "seconds")
        if self.ddp_seconds is not None:
            check_number("ddp_seconds", self.ddp_seconds, "seconds", zero=True)
        check_number("all_reduce_seconds", self.all_reduce_seconds, "seconds")
        if not self.gossip_seconds:
            raise ValueError("gossip_seconds must name at least one topology, as in {'one-peer-exponential': 0.150}, got none")
        for name, seconds in self.gossip_seconds.items():
            if name not in TOPOLOGIES:
                raise ValueError(f"gossip_seconds has a time for {name!r}, which is not a topology: choose from {', '.join(TOPOLOGIES)}")
            check_number(f"gossip_seconds[{name!r}]", seconds, "seconds")

    def all_reduce(self, n: int, bytes: float) -> float:
        return self.all_reduce_seconds if n > 1 else 0.0

    def coded_all_reduce(self, n: int, parameters: int, bits: int) -> float | None:
        return self.coded_seconds[bits][1] if bits in self.coded_seconds else None

    def coded_gossip(self, topology: Topology, parameters: int, bits: int) -> float | None:
        return self.coded_seconds[bits][0] * degree(topology) if bits in self.coded_seconds else None

    def ddp(self, bits: int = 32) -> float | None:
        return self.ddp_seconds if bits == 32 else self.coded_ddp_seconds.get(bits)

    def step(self, method: str, is_elastic: bool = False) -> float | None:
        return (self.elastic_seconds if is_elastic else self.step_seconds).get(method)

    def timed(self, bits: int) -> tuple[str, int] | None:
        for found in map(_TIMED.fullmatch, self.step_seconds):
            if found and int(found[3] or 32) == bits:
                return found[1].replace("_", "-"), int(found[2])
        return None

    def gossip(self, topology: Topology, bytes: float) -> float:
        if not topology.has_links:
            return 0.0
        name = self._nearest(topology)
        return self.gossip_seconds[name] * degree(topology) / degree(TOPOLOGIES[name](topology.n))

    def note(self, topology: Topology) -> str | None:
        name = self._nearest(topology)
        if name == kind(topology) or not topology.has_links:
            return None
        mine, measured = degree(topology), degree(TOPOLOGIES[name](topology.n))
        return f"not measured, scaled by degree ({mine:g} against {measured:g}) from {in_python(name)}"

    def _nearest(self, topology: Topology) -> str:
        if kind(topology) in self.gossip_seconds:
            return kind(topology)
        return min(self.gossip_seconds, key=lambda name: abs(degree(TOPOLOGIES[name](topology.n)) - degree(topology)))
