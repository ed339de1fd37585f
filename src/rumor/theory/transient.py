"""Transient stages, in iterations and in communication time, and how they scale with n."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rumor.methods import Algorithm
from rumor.schedule import Never, Periodic
from rumor.theory.constants import Mixing, Regime, check_nodes, check_period, mixing
from rumor.topology import Topology

SIZES = (1024, 1600, 2500, 4900)  # squares, so that grids are square and sqrt(n) is whole; smaller grids give lower exponents


def transient_stage(algorithm: Algorithm | Mixing, iid: bool = False, regime: Regime | None = None) -> float:
    """The order of the number of iterations until linear speed-up, that is until the term with n T dominates the rate.

        iid:      T >= max{ n^3 beta^4 C_beta^2, n beta^2 D_beta^2 }
        non-iid:  T >= max{ n^3 beta^4 C_beta^2, n^3 beta^4 C_beta^2 D_beta^2,
                            n beta^2 D_beta^2 }

    These are (86) and (87). With C_beta = D_beta = 1/(1 - beta) they are (84) and (85) of Gossip SGD. With beta = 1 and C_beta = D_beta
    = H they are (88) and (89) of Local SGD. Parallel SGD has no transient stage (beta = 0). Tables 2 and 3 keep the largest term,
    assuming n beta > 1.

    This is an order of magnitude, without constants, sigma, b, L and F_0. Use it to rank algorithms, not to predict an iteration count.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, or a `Mixing`.
        iid: whether all nodes draw from the same distribution (b = 0).
        regime: None for the general form with D_beta = min{H, 1/(1 - beta)}; "sparse" uses D_beta = H, "dense" 1/(1 - beta).

    >>> import rumor
    >>> ring = rumor.ring(20)
    >>> gossip, local = rumor.gossip_sgd(ring), rumor.local_sgd(20, H=16)
    >>> both = rumor.gossip_pga(ring, H=16)
    >>> [f"{transient_stage(method):.1e}" for method in (gossip, both, local)]
    ['6.2e+09', '2.9e+08', '5.2e+08']
    """
    m = mixing(algorithm)
    D = m.D_of(regime)
    if m.beta == 0:
        return 0.0
    noise = m.n**3 * m.beta**4 * m.C**2
    return max(noise, 0.0 if iid else noise * m.mean_D_of(regime) ** 2, m.n * m.beta**2 * D**2)


def unstructured_transient_stage(n: int, H: float) -> float:
    """n^3 H^4, the transient stage of Gossip-PGA by the general analysis of changing topologies (section 3.4; non-convex, non-iid).

    This analysis ignores that gossip helps within a period and that H may exceed 1/(1 - beta). So it gives Local SGD's stage for any W.
    """
    check_nodes(n)
    check_period(H)
    return n**3 * float(H) ** 4


def period_to_beat_local(algorithm: Algorithm | Mixing) -> float:
    """beta^4 C_beta^2. If H is larger, Gossip-PGA's transient time is below that of Local SGD with the same H (section 3.5).

    The times are n^3 H C_beta^2 beta^4 (H theta d + n alpha) and n^3 H^3 (theta d + n alpha) (non-iid, 1/(1 - beta) >= H). The condition
    comes from the part with theta; the part with alpha is always smaller, since beta^2 C_beta < H. Both methods have one period, so a
    method with an adaptive period or `rumor.LearningRate` is refused.

    >>> import rumor
    >>> graphs = [rumor.exponential(20), rumor.grid(20), rumor.ring(20)]
    >>> methods = [rumor.gossip_pga(graph, H=16) for graph in graphs]
    >>> [round(period_to_beat_local(method), 1) for method in methods]
    [1.8, 55.1, 139.5]
    """
    m = mixing(algorithm)
    _check_one_period("period_to_beat_local", algorithm)
    return m.beta**4 * m.C**2


@dataclass(frozen=True)
class TransientTime:
    """The communication time of the transient stage.

    Attributes:
        iterations: the transient stage.
        bandwidth: the part that grows with theta d.
        latency: the part that grows with alpha.
    """

    iterations: float
    bandwidth: float
    latency: float

    @property
    def total(self) -> float:
        return self.bandwidth + self.latency


def transient_time(algorithm: Algorithm, alpha: float = 1.0, theta: float = 1.0, d: float = 1.0, iid: bool = False) -> TransientTime:
    """The transient stage times the communication per iteration, as the paper counts it for Tables 5 and 12 to 14 (section 3.4):

        |N_i| theta d + alpha       a gossip step
        (2 theta d + n alpha) / H   an all-reduce, spread over its period

    |N_i| is the largest of all nodes and includes the node itself: 3 on a ring, 5 on a grid. This is an order of magnitude, like the
    stage. To plan a run, use `rumor.cost`, which counts what is sent: a node does not send to itself, and a ring all-reduce has 2 (n -
    1) rounds.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, with one period or none.
        alpha: latency of a message.
        theta: time to send one number.
        d: numbers in the model.
        iid: as in `transient_stage`.
    """
    if isinstance(algorithm, Mixing):
        raise ValueError(f"transient_time counts messages, for which {algorithm} has no graph: pass a method such as rumor.gossip_pga(...)")
    m, iterations = mixing(algorithm), transient_stage(algorithm, iid)
    _check_one_period("transient_time", algorithm)
    gossips = algorithm.topology.has_links and m.H > 1
    numbers = (_largest_neighborhood(algorithm.topology) if gossips else 0) + 2 / m.H
    messages = (1 if gossips else 0) + m.n / m.H
    if messages == 0:  # isolated nodes that never average: the stage is infinite, but nothing is sent
        return TransientTime(iterations, 0.0, 0.0)
    return TransientTime(iterations, iterations * numbers * theta * d, iterations * messages * alpha)


def _check_one_period(needed_by: str, algorithm: Algorithm | Mixing) -> None:
    """Raise ValueError if the period changes: Corollary 1 bounds the transient stage, but not how many global averages it has."""
    if isinstance(algorithm, Mixing):
        changes, given = bool(algorithm.parts), "a mean_mixing"
    else:
        changes, given = not isinstance(algorithm.schedule, Periodic | Never), repr(algorithm.schedule)
    if changes:
        raise ValueError(f"{needed_by} counts global averages, which the paper does for one period, got {given}: use a whole number as H")


def _largest_neighborhood(topology: Topology) -> int:
    """max_i |N_i|, including the node itself."""
    rows = (topology.matrix(k).triplets()[0] for k in range(topology.period))
    return max(int(np.bincount(nodes).max()) for nodes in rows)


@dataclass(frozen=True)
class Exponents:
    """The exponents e in O(n^e) of the transient stage and of the two parts of its communication time."""

    iterations: float
    bandwidth: float
    latency: float


def scaling_exponents(build: Callable[[int], Algorithm], sizes: Sequence[int] = SIZES, iid: bool = False) -> Exponents:
    """The exponents of Tables 5 and 12 to 14, computed numerically as slopes of log(transient time) over log n.

    Args:
        build: builds the algorithm for n nodes, for example `lambda n: rumor.gossip_pga(rumor.ring(n), math.isqrt(n))`.
        sizes: at least two numbers of nodes; below n = 1,000 the slopes are not yet those of the limit.
        iid: as in `transient_stage`.

    >>> import rumor
    >>> def method(n):
    ...     return rumor.gossip_pga(rumor.ring(n), H=math.isqrt(n))
    >>> found = scaling_exponents(method)
    >>> [round(x, 1) for x in (found.iterations, found.bandwidth, found.latency)]
    [5.0, 5.0, 5.5]
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a slope needs at least two different sizes, got sizes={list(sizes)}")
    times = [transient_time(build(n), iid=iid) for n in sizes]
    if not all(0 < time.iterations < math.inf for time in times):
        raise ValueError("there is no exponent: the transient stage is 0 (Parallel SGD) or infinite (no communication) at some size")
    logs = np.log([[time.iterations, time.bandwidth, time.latency] for time in times])
    slopes = np.polyfit(np.log(sizes), logs, 1)[0]
    return Exponents(*slopes.tolist())
