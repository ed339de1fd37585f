"""The cost of a step of each method: seconds with and without overlap, bytes, hours of the run, transient stage.

A step of Gossip-PGA takes

    without overlap                    t_compute + (1 - 1/H) t_gossip + 1/H t_mean
    with full overlap (delay=1)        (1 - 1/H) max(t_compute, t_gossip) + 1/H max(t_compute, t_mean)

t_compute, t_gossip and t_mean are the seconds of computing, of a gossip step and of an all-reduce. Parallel, Local and Gossip SGD are the
cases H = 1, t_gossip = 0 and H = infinity. If a step of DDP was measured, Parallel SGD takes that time, since DDP has its own overlap.
With codes of a few bits, t_gossip and t_mean include the time to encode and decode. A whole step that was measured replaces the sum of
its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rumor.cost.network import TOPOLOGIES, Network, Workload, coded_bytes, degree, distinct, kind, method_text
from rumor.engines.engine import uses_all_reduce
from rumor.methods.gossip_pga import GossipPGA, gossip_pga, gossip_sgd, local_sgd
from rumor.schedule import check_whole
from rumor.theory import transient_stage
from rumor.topology import Topology

GLOBAL_SHARE = 0.10  # global averages may add this much to a gossip step; above it, a longer period is worth its longer transient stage


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one method on one topology.

    Attributes:
        method: "Parallel SGD", "Local SGD", "Gossip SGD", "Gossip-PGA", "Gossip-AGA" (one row for each end of its range) or "OSGP".
        topology: the topology in the spelling of the command line; None if the method does not gossip.
        H: steps from one global average to the next; None if there are no global averages.
        seconds: seconds of a step without overlap. For Parallel SGD, the time of DDP if that was measured.
        seconds_overlapped: seconds of a step with perfect overlap, where messages travel while the next step computes (delay=1; DDP's
            buckets for Parallel SGD). This is a lower bound.
        bytes: bytes that the busiest node sends in a step, on average. An all-reduce counts as a ring's, 2 (n - 1)/n of the model.
        hours: hours of the workload's steps, without overlap.
        transient_stage: order of the number of steps before the method is as good as Parallel SGD, if the nodes' data differ. Constants
            are left out: compare these numbers with each other, not with a number of steps. None if there is no theory.
        transient_stage_iid: the same if all nodes draw from the same data.
        note: a remark about these numbers.
        bits: the number of bits of a number in a message.
        delay: 1 if a message travels while the next step computes. There is such a row if its step was measured.
        is_elastic: whether the step was measured in an elastic group.
        is_measured: whether a whole step was measured. Otherwise `seconds` is the sum of its parts.
    """

    method: str
    topology: str | None
    H: int | None
    seconds: float
    seconds_overlapped: float
    bytes: float
    hours: float
    transient_stage: float | None
    transient_stage_iid: float | None
    note: str | None = None
    bits: int = 32
    delay: int = 0
    is_elastic: bool = False
    is_measured: bool = False

    @property
    def name(self) -> str:
        """The method, with its number of bits if its messages are codes."""
        extra = ((f"{self.bits} bits", self.bits != 32), ("delay=1", self.delay == 1), ("elastic", self.is_elastic))
        return ", ".join([self.method, *(text for text, is_so in extra if is_so)])

    @property
    def label(self) -> str:
        """The name in tables and pictures. Parallel SGD is run as DDP."""
        return self.name.replace("Parallel SGD", "DDP")

    @property
    def text(self) -> str:
        """Gossip-PGA as text that `rumor.method` reads; the label of other methods."""
        return method_text(self.topology, self.H or 1, self.bits, self.delay) if self.method == "Gossip-PGA" else self.label

    def stage(self, iid: bool = False) -> float:
        """The transient stage; infinite if there is no theory."""
        stage = self.transient_stage_iid if iid else self.transient_stage
        return math.inf if stage is None else stage


def period_for(compute: float, gossip: float, mean: float, share: float = GLOBAL_SHARE) -> int:
    """The smallest H at which global averages add at most `share` to a gossip step.

        H = ceil( (t_mean - t_gossip) / (share (t_compute + t_gossip)) ),  at least 1

    The paper uses 6 for both ResNet-50 and BERT-Large:

    >>> period_for(0.146, 0.150, 0.278), period_for(0.445, 0.5665, 1.4688)
    (5, 9)
    """
    step = compute + gossip
    if mean <= gossip:
        return 1
    return max(1, math.ceil((mean - gossip) / (share * step) - 1e-9)) if step > 0 else 2**31


def predict(
    n: int,
    workload: Workload,
    network: Network,
    *,
    H: int | None = None,
    H_init: int = 4,
    H_max: int = 64,
    topologies: Sequence[Topology] | None = None,
    bits: int = 32,
) -> list[Prediction]:
    """Predicts the cost of every method on every topology.

    Args:
        n: number of nodes.
        workload: the training job.
        network: a `Link`, or times that were `Measured`.
        H: the period of Gossip-PGA and Local SGD. None chooses it with `period_for` the topology that has the fastest gossip step, at
            least 2 (with 1 all rows would be Parallel SGD) and at most H_max.
        H_init: Gossip-AGA's shortest period.
        H_max: Gossip-AGA's longest period.
        topologies: the topologies to compare, each for n nodes; None means all of `TOPOLOGIES`. If some have the same matrices for n nodes
            (all of them, for 2 nodes), only the first one.
        bits: 16, 8 or 4 add Parallel SGD, Local SGD and Gossip-PGA with such codes, if the network has times for them.

    Gossip-PGA with another period, with delay=1, and in an elastic group has rows if these steps were measured.

    >>> from rumor.cost import Measured
    >>> work = Workload(25_500_000, 0.146, steps=18_768)
    >>> network = Measured(0.278, {"one-peer-exponential": 0.150})
    >>> for row in predict(32, work, network, H=6)[:4]:
    ...     print(f"{row.method}: {row.hours:.2f} hours")
    Parallel SGD: 2.21 hours
    Local SGD: 1.00 hours
    Gossip SGD: 1.54 hours
    Gossip-PGA: 1.65 hours
    """
    for name, value in (("n", n), ("H_init", H_init), ("H_max", H_max), *((("H", H),) if H is not None else ())):
        check_whole(name, value, 1)
    if H_max < H_init:
        raise ValueError(f"H_init={H_init} is above H_max={H_max}, the longest period allowed: raise H_max")
    times, coded = Times(n, workload, network), times_with(n, workload, network, bits)
    given = [TOPOLOGIES[name](n) for name in distinct(n)] if topologies is None else topologies
    for topology in given:
        if topology.n != n:
            raise ValueError(f"{topology} is for n={topology.n} nodes, but n={n} was given: build the topology for {n} nodes")
    if H is None:
        H = min(H_max, max([2, *(times.period(topology) for topology in sorted(given, key=times.gossip)[:1])]))
    both = [times, coded] if coded else [times]
    rows = [*(each.parallel() for each in both), *(each.row("Local SGD", local_sgd(n, H), H) for each in both)]
    for topology in given:
        rows.append(times.row("Gossip SGD", gossip_sgd(topology), None))
        rows.extend(row for each in both for row in each.gossip_pga(topology, H))
        rows.extend(times.row("Gossip-AGA", gossip_pga(topology, end), end) for end in (H_init, H_max))
        rows.append(times.row("OSGP", gossip_sgd(topology), None))
    return rows


class Times:
    """The times of one workload on one network, with messages of so many bits."""

    def __init__(self, n: int, workload: Workload, network: Network, bits: int = 32):
        self.n, self.workload, self.network, self.bits = n, workload, network, bits
        self.mean, self.mean_bytes = self._all_reduce(workload.summed_bytes)

    def _all_reduce(self, bytes: float) -> tuple[float, float]:
        """Returns the seconds of an all-reduce, and the bytes that a node sends."""
        if self.n == 1:
            return 0.0, 0.0
        if self.bits == 32:
            return self.network.all_reduce(self.n, bytes), 2 * (self.n - 1) / self.n * bytes
        seconds = self.network.coded_all_reduce(self.n, self.workload.parameters, self.bits)
        assert seconds is not None  # times_with() has asked
        return seconds, 2 * (self.n - 1) / self.n * coded_bytes(self.workload.parameters, self.bits)

    def gossip(self, topology: Topology) -> tuple[float, float]:
        """Returns the seconds of a gossip step, and the bytes that the busiest node sends."""
        if uses_all_reduce(topology, self.bits):
            return self.mean, self.mean_bytes
        if not topology.has_links:
            return 0.0, 0.0
        if self.bits == 32:
            return self.network.gossip(topology, self.workload.bytes), degree(topology) * self.workload.bytes
        seconds = self.network.coded_gossip(topology, self.workload.parameters, self.bits)
        assert seconds is not None
        return seconds, degree(topology) * coded_bytes(self.workload.parameters, self.bits)

    def period(self, topology: Topology) -> int:
        return period_for(self.workload.compute, self.gossip(topology)[0], self.mean)

    def parallel(self) -> Prediction:
        """Parallel SGD with DDP, which sends gradients in the precision of the parameters."""
        compute, (mean, sent) = self.workload.compute, self._all_reduce(self.workload.bytes)
        ddp = self.network.ddp(self.bits) if self.n > 1 else None
        seconds, overlapped = (compute + mean, max(compute, mean)) if ddp is None else (compute + ddp, compute + ddp)
        return Prediction(
            "Parallel SGD", None, 1, seconds, overlapped, sent, self._hours(seconds), 0.0, 0.0, bits=self.bits, is_measured=ddp is not None
        )

    def row(self, method: str, algorithm: GossipPGA, H: int | None) -> Prediction:
        compute, share = self.workload.compute, 0.0 if H is None else 1 / H  # share of the steps that are global
        gossip, sent = self.gossip(algorithm.topology)
        seconds = (1 - share) * (compute + gossip) + share * (compute + self.mean)
        overlapped = (1 - share) * max(compute, gossip) + share * max(compute, self.mean)
        measured = None
        if method == "Gossip-PGA" and H is not None:
            measured = self.network.step(method_text(kind(algorithm.topology), H, self.bits))
            seconds = max(self._from_timed(algorithm.topology, H, seconds), overlapped) if measured is None else measured
        has_neighbors, has_theory = method != "Local SGD", method != "OSGP"
        return Prediction(
            method,
            topology=kind(algorithm.topology) if has_neighbors else None,
            H=H,
            seconds=seconds,
            seconds_overlapped=min(seconds, overlapped),
            bytes=(1 - share) * sent + share * self.mean_bytes,
            hours=self._hours(seconds),
            transient_stage=transient_stage(algorithm) if has_theory else None,
            transient_stage_iid=transient_stage(algorithm, iid=True) if has_theory else None,
            note=self.network.note(algorithm.topology) if has_neighbors else None,
            bits=self.bits,
            is_measured=measured is not None,
        )

    def _from_timed(self, topology: Topology, H: int, otherwise: float) -> float:
        """Seconds of a step, from the whole step that was measured with another period, if there is one."""
        name, timed = self.network.timed(self.bits) or (None, H)
        whole = self.network.step(method_text(kind(topology), timed, self.bits)) if name == kind(topology) else None
        return otherwise if whole is None else whole + (1 / H - 1 / timed) * (self.mean - self.gossip(topology)[0])

    def gossip_pga(self, topology: Topology, H: int) -> list[Prediction]:
        """Gossip-PGA with period H, and those steps of it that were measured: with another period, with delay=1, in an elastic group."""
        rows = []
        name, timed = self.network.timed(self.bits) or (None, H)
        for period in dict.fromkeys((H, timed if name == kind(topology) else H)):
            plain = self.row("Gossip-PGA", gossip_pga(topology, period), period)
            rows += [plain] if period == H or plain.is_measured else []
            for delay, is_elastic in ((1, False), (0, True)):
                seconds = self.network.step(method_text(kind(topology), period, self.bits, delay), is_elastic)
                if seconds is not None:
                    row = replace(plain, seconds=seconds, hours=self._hours(seconds), delay=delay, is_elastic=is_elastic, is_measured=True)
                    rows.append(replace(row, seconds_overlapped=min(seconds, plain.seconds_overlapped)))
        return rows

    def _hours(self, seconds: float) -> float:
        return seconds * self.workload.steps / 3600


def times_with(n: int, workload: Workload, network: Network, bits: int) -> Times | None:
    """The times with codes of so many bits; None if there are no codes, or no times for them."""
    if bits == 32 or n == 1 or network.coded_all_reduce(n, workload.parameters, bits) is None:
        return None
    return Times(n, workload, network, bits)
