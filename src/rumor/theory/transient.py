"""Transient stages, in iterations and in communication time, and how they scale with n."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rumor.algorithm import Algorithm
from rumor.theory.constants import Mixing, Regime, check_nodes, check_period, mixing
from rumor.topology import Topology

SIZES = (1024, 1600, 2500, 4900)  # squares, for square grids and a whole sqrt(n); smaller grids give lower exponents


def transient_stage(algorithm: Algorithm | Mixing, iid: bool = False, regime: Regime | None = None) -> float:
    """The order of the number of iterations until the term with n T dominates the rate, that is until linear speed-up.

        iid:      T >= max{ n^3 beta^4 C_beta^2, n beta^2 D_beta^2 }                                         (86)
        non-iid:  T >= max{ n^3 beta^4 C_beta^2, n^3 beta^4 C_beta^2 D_beta^2, n beta^2 D_beta^2 }           (87)

    These are (84), (85) of Gossip SGD with C_beta = D_beta = 1/(1 - beta), and (88), (89) of Local SGD with beta = 1 and
    C_beta = D_beta = H; Parallel SGD has none (beta = 0). Tables 2 and 3 keep the largest term, by n beta > 1.

    This is an order: constants, sigma, b, L and F_0 are left out. It ranks algorithms; it never predicts a measured iteration.

    Args:
        algorithm: what `rumor.gossip_pga(...)` and its like return, or a `Mixing`.
        iid: whether all nodes draw from the same distribution (b = 0).
        regime: None for the general form with D_beta = min{H, 1/(1 - beta)}; "sparse" puts D_beta = H, "dense" 1/(1 - beta).

    >>> import rumor
    >>> ring = rumor.ring(20)
    >>> [f"{transient_stage(a):.1e}" for a in (rumor.gossip_sgd(ring), rumor.gossip_pga(ring, 16), rumor.local_sgd(20, 16))]
    ['6.2e+09', '2.9e+08', '5.2e+08']
    """
    m = mixing(algorithm)
    D = m.D_of(regime)
    if m.beta == 0:
        return 0.0
    noise = m.n**3 * m.beta**4 * m.C**2
    return max(noise, 0.0 if iid else noise * D**2, m.n * m.beta**2 * D**2)


def unstructured_transient_stage(n: int, H: float) -> float:
    """n^3 H^4: what the analysis of any changing topology says of Gossip-PGA (non-convex, non-iid; remark in section 3.4).

    It knows neither that gossip helps within a period nor that H may exceed 1/(1 - beta), so it is Local SGD's stage, whatever W.
    """
    check_nodes(n)
    check_period(H)
    return n**3 * float(H) ** 4


def period_to_beat_local(algorithm: Algorithm | Mixing) -> float:
    """beta^4 C_beta^2: Gossip-PGA's transient time is below that of Local SGD with the same H if H exceeds it (section 3.5).

    The times are n^3 H C_beta^2 beta^4 (H theta d + n alpha) and n^3 H^3 (theta d + n alpha) (non-iid, 1/(1 - beta) >= H). The condition
    is that of the part with theta; the part with alpha is always smaller, since beta^2 C_beta < H.

    >>> import rumor
    >>> [round(period_to_beat_local(rumor.gossip_pga(graph(20), 16)), 1) for graph in (rumor.exponential, rumor.grid, rumor.ring)]
    [1.8, 55.1, 139.5]
    """
    m = mixing(algorithm)
    return m.beta**4 * m.C**2


@dataclass(frozen=True)
class TransientTime:
    """Communication during the transient stage.

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
    """Transient stage times communication per iteration, as the paper counts it for Tables 5 and 12 to 14 (section 3.4):

        |N_i| theta d + alpha       a gossip step (|N_i| counts the node itself: 3 on a ring, 5 on a grid; the largest of all nodes)
        (2 theta d + n alpha) / H   an all-reduce, spread over its period

    An order, like the stage. To plan a run, count what is sent instead: a node does not send to itself, and a ring all-reduce has
    2 (n - 1) rounds.

    Args:
        algorithm: what `rumor.gossip_pga(...)` and its like return.
        alpha: latency of a message.
        theta: time to send one number.
        d: numbers in the model.
        iid: as in `transient_stage`.
    """
    m, iterations = mixing(algorithm), transient_stage(algorithm, iid)
    gossips = algorithm.topology.has_links and m.H > 1
    numbers = (_largest_neighborhood(algorithm.topology) if gossips else 0) + 2 / m.H
    messages = (1 if gossips else 0) + m.n / m.H
    if messages == 0:  # isolated nodes that never average: for ever, but at no cost
        return TransientTime(iterations, 0.0, 0.0)
    return TransientTime(iterations, iterations * numbers * theta * d, iterations * messages * alpha)


def _largest_neighborhood(topology: Topology) -> int:
    """max_i |N_i|, the node itself included."""
    rows = (topology.matrix(k).triplets()[0] for k in range(topology.period))
    return max(int(np.bincount(nodes).max()) for nodes in rows)


@dataclass(frozen=True)
class Exponents:
    """e in O(n^e), of the transient stage and of the two parts of its communication time."""

    iterations: float
    bandwidth: float
    latency: float


def scaling_exponents(build: Callable[[int], Algorithm], sizes: Sequence[int] = SIZES, iid: bool = False) -> Exponents:
    """The exponents of Tables 5 and 12 to 14, found numerically: slopes of log(transient time) over log n.

    Args:
        build: the algorithm for n nodes, such as `lambda n: rumor.gossip_pga(rumor.ring(n), math.isqrt(n))`.
        sizes: at least two numbers of nodes; below n = 1,000 slopes are not yet those of the limit.
        iid: as in `transient_stage`.

    >>> import rumor
    >>> found = scaling_exponents(lambda n: rumor.gossip_pga(rumor.ring(n), math.isqrt(n)))
    >>> round(found.iterations, 1), round(found.bandwidth, 1), round(found.latency, 1)
    (5.0, 5.0, 5.5)
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a slope needs at least two different sizes, got sizes={list(sizes)}")
    times = [transient_time(build(n), iid=iid) for n in sizes]
    if not all(0 < time.iterations < math.inf for time in times):
        raise ValueError("no exponent: the transient stage is 0 (Parallel SGD) or infinite (no communication) at some size")
    logs = np.log([[time.iterations, time.bandwidth, time.latency] for time in times])
    slopes = np.polyfit(np.log(sizes), logs, 1)[0]
    return Exponents(*slopes.tolist())
