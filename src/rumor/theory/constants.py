"""C_beta and D_beta, and the numbers of an algorithm that the paper's formulas need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from numbers import Real
from typing import Literal

import numpy as np

from rumor.methods import Algorithm, GossipPGA
from rumor.methods.algorithm import topology_or_builder
from rumor.schedule import Adaptive, LearningRate, Never, Periodic, Schedule
from rumor.topology import Topology
from rumor.topology.matrix import Array, Circulant, dense
from rumor.topology.spectrum import distance_to_average

Regime = Literal["sparse", "dense"]

DENSE_UP_TO = 256  # nodes; up to here a dense product and its norm take milliseconds
SETTLED = 1e-8  # relative change at which a sum of contractions has converged
ROUNDING = 1e-13  # a product this close to the average counts as the average


def C_beta(beta: float, H: float) -> float:
    """C_beta = sum_{l=0}^{H-1} beta^l = (1 - beta^H) / (1 - beta) (Theorem 1).

    C_beta is H for beta = 1 (Local SGD) and 1/(1 - beta) for H = infinity (Gossip SGD).

    Args:
        beta: ||W - J||_2, between 0 and 1.
        H: the period, a whole number or math.inf.

    >>> C_beta(0.5, 3), C_beta(1, 16), C_beta(0.75, math.inf)
    (1.75, 16.0, 4.0)
    """
    _check(beta, H)
    if beta in (0, 1):
        return float(H) if beta == 1 else 1.0
    return -math.expm1(H * math.log(beta)) / (1 - beta)  # 1 - beta^H, without cancellation near beta = 1


def D_beta(beta: float, H: float) -> float:
    """D_beta = min{H, 1/(1 - beta)} (Theorem 1).

    >>> D_beta(0.5, 16), D_beta(1, 16), D_beta(0.75, math.inf)
    (2.0, 16.0, 4.0)
    """
    _check(beta, H)
    return min(float(H), _geometric_sum(beta))


def _geometric_sum(beta: float) -> float:
    """sum_{l=0}^{infinity} beta^l = 1/(1 - beta)."""
    return 1 / (1 - beta) if beta < 1 else math.inf


def _check(beta: float, H: float) -> None:
    check_beta(beta)
    check_period(H)


def check_beta(beta: float) -> None:
    if not isinstance(beta, Real) or not 0 <= beta <= 1:
        raise ValueError(f"beta = ||W - 11'/n||_2 must be between 0 and 1, got beta={beta!r}: `topology.beta` computes it")


def check_period(H: float) -> None:
    if isinstance(H, bool) or not isinstance(H, Real) or not H >= 1 or not (math.isinf(H) or float(H).is_integer()):
        raise ValueError(f"the period H must be a whole number >= 1, or math.inf for Gossip SGD, got H={H!r}{_one_period(H)}")


def _one_period(H: object) -> str:
    """What to pass instead of something that stands for several periods."""
    if isinstance(H, Schedule):
        try:
            longest = _longest_period(H)
        except ValueError:  # a schedule of one's own
            return ": pass its longest period (Corollary 1)"
        return f": pass its longest period, H={'math.inf' if math.isinf(longest) else longest} (Corollary 1)"
    if isinstance(H, Sequence) and not isinstance(H, str):
        return ": pass one period; mean_mixing(topology, periods) takes several"
    return ""


def check_topology(topology: Topology) -> None:
    found = topology_or_builder(topology)
    if not isinstance(found, Topology):
        raise ValueError(f"theory needs a graph of a known number of nodes, got the builder {found!r}: call it first, as in rumor.ring(20)")
    if found.push_only:
        raise ValueError(f"{found} is column stochastic, and the paper has theory of doubly stochastic W only: use from_networkx(graph)")


@dataclass(frozen=True)
class Mixing:
    """The numbers of an algorithm that the formulas need. `mixing(algorithm)` and `static_mixing(n, beta, H)` build it.

    Attributes:
        n: nodes.
        beta: ||W - J||_2, the share of the disagreement that is left after one gossip step; for a cycle, at its worst phase.
        H: the period, the longest one if there are several; math.inf without global averages.
        C: C_beta, the sum of these shares over the H steps of a period; from `mean_mixing`, the mean of the periods' C_beta.
        S: the same sum over infinitely many steps, 1/(1 - beta).
        parts: from `mean_mixing`, one pair for each length of a period: its share of all steps, and its `Mixing`. Empty for one period.
    """

    n: int
    beta: float
    H: float
    C: float
    S: float
    parts: tuple[tuple[float, Mixing], ...] = field(default=(), repr=False)

    @property
    def D(self) -> float:
        """D_beta = min{H, 1/(1 - beta)}."""
        return min(self.H, self.S)

    def D_of(self, regime: Regime | None) -> float:
        """D_beta in one regime: H if "sparse" (Lemma 2), 1/(1 - beta) if "dense" (Lemma 3). If that is infinite, the other one.

        Both lemmas hold for every network, so both forms are bounds everywhere. The general form (None) is the tighter one.
        """
        if regime is None:
            return self.D
        if regime not in ("sparse", "dense"):
            raise ValueError(f'regime must be "sparse" (1/(1 - beta) >= H), "dense" (1/(1 - beta) < H) or None for both, got {regime!r}')
        asked, other = (self.H, self.S) if regime == "sparse" else (self.S, self.H)
        return asked if asked < math.inf else other

    def mean_D_of(self, regime: Regime | None) -> float:
        """The D_beta that stands beside C_beta in C_beta D_beta b^2. For one period, it is `D_of`.

        From `mean_mixing`, it is the mean of the periods' C_beta D_beta, divided by C. It is not the mean of D_beta: long periods have
        the larger C_beta and the larger D_beta, so the mean of the products is above the product of the means.
        """
        if not self.parts:
            return self.D_of(regime)
        return math.fsum(share * part.C * part.D_of(regime) for share, part in self.parts) / self.C

    @property
    def longest(self) -> Mixing:
        """The `Mixing` of the longest period alone, which holds at every step."""
        return max((part for _, part in self.parts), key=lambda part: part.H, default=self)


def static_mixing(n: int, beta: float, H: float) -> Mixing:
    """Builds the `Mixing` of n nodes with one matrix W, beta = ||W - J||_2, and a global average every H steps.

    With H = 1 every step is global and W is not used. This is Parallel SGD, so beta is set to 0.

    >>> static_mixing(20, 0.5, 3)
    Mixing(n=20, beta=0.5, H=3, C=1.75, S=2.0)
    """
    check_nodes(n)
    _check(beta, H)
    beta = 0.0 if H == 1 else beta
    return Mixing(n, beta, H, C_beta(beta, H), _geometric_sum(beta))


def check_nodes(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, Real) or not float(n).is_integer() or n < 1:
        raise ValueError(f"n, the number of nodes, must be a whole number >= 1, got n={n!r}")


def mixing(algorithm: Algorithm | Mixing) -> Mixing:
    """Builds the `Mixing` of an algorithm. Parallel, Local and Gossip SGD are Gossip-PGA with W = J, W = I and H = infinity.

    A cycle of matrices has no useful single beta. Its numbers come from c(l) = `topology.contraction(l)`, the share of the disagreement
    that is left after l steps at the worst phase:

        C = sum_{l<H} c(l),    D = min{H, sum_l c(l)},    beta = c(1)

    If c(l) = beta^l, these are C_beta and D_beta. (The proof of Lemma 2 needs ||sum_l W^l g_l||^2 <= beta^2 D sum_l beta^(l-1) ||g_l||^2,
    and Cauchy-Schwarz proves it for any weights c(l) <= c(1) c(l-1).) A period that changes (Gossip-AGA,
    `rumor.LearningRate`) is treated as if it had its longest value all the time (Corollary 1). If you know the periods before the run,
    `mean_mixing` gives smaller numbers.

    >>> import rumor
    >>> mixing(rumor.local_sgd(8, H=4))
    Mixing(n=8, beta=1.0, H=4, C=4.0, S=inf)
    >>> mixing(rumor.gossip_sgd(rumor.one_peer_exponential(8)))
    Mixing(n=8, beta=1.0, H=inf, C=3.0, S=3.0)
    """
    if isinstance(algorithm, Mixing):
        return algorithm
    if not isinstance(algorithm, GossipPGA) or type(algorithm) is not GossipPGA:  # subclasses such as SlowMo mix differently
        raise ValueError(
            f"the paper has no theory of {algorithm!r}: it covers Parallel SGD, Local SGD, Gossip SGD, Gossip-PGA and Gossip-AGA only"
        )
    if not isinstance(algorithm.topology, Topology):
        raise ValueError(f"{algorithm!r} is not bound to a number of nodes: theory needs one, so pass algorithm.bind(n)")
    options = (("delay", algorithm.delay, 0), ("average_rounds", algorithm.average_rounds, None), ("bits", algorithm.bits, 32))
    for name, value, default in options:
        if value != default:
            raise ValueError(f"the paper has no theory of {name}={value}: build the same method with {name}={default}")
    return _mixing(algorithm.topology, _longest_period(algorithm.schedule))


def time_varying_mixing(topology: Topology, periods: Sequence[int]) -> Mixing:
    """Builds the `Mixing` for global averages after `periods` = H^(0), H^(1), ... steps.

    By Corollary 1 the bounds are those of the longest period, H_max. The corollary's C_beta sums up to H_max; the proof needs the sum up
    to H_max - 1, as everywhere else.

    >>> import rumor
    >>> ring = rumor.ring(20)
    >>> longest = mixing(rumor.gossip_pga(ring, H=16))
    >>> time_varying_mixing(ring, [4, 8, 16]) == longest
    True
    """
    check_topology(topology)
    return _mixing(topology, max(_checked_periods(periods)))


def mean_mixing(topology: Topology, periods: Sequence[int]) -> Mixing:
    """Builds the `Mixing` of a run whose global averages come after `periods` = H_1, H_2, ..., H_m steps, once or over and over.

    The paper's proof holds period by period, because the disagreement is 0 at the start of each. What the bounds sum over all steps is
    then a mean, with H_p steps of period p, T + 1 = H_1 + ... + H_m, C_p = C_beta(H_p) and D_p = D_beta(H_p):

        C    = sum_p H_p C_p / (T + 1)
        C D  = sum_p H_p C_p D_p / (T + 1)      (`mean_D_of`, which stands beside b^2)

    A period of one step has no gossip and counts as 0. The D_beta that limits the step size stays that of the longest period, because
    nothing is known about how the errors B^(k) are spread over the periods. So do the bounds of a single step
    (`unified_consensus_bound`). Equal periods give the numbers of `mixing`, and no sequence gives more than its longest period.

    The step size is constant, and the periods must not depend on the samples: for Gossip-AGA, use `mixing`. If a period is followed by a
    shorter one, the bounds hold at the end of the sequence and of each repetition, and not for every T.

    >>> import rumor
    >>> ring = rumor.ring(20)
    >>> run = mean_mixing(ring, [4] * 30 + [16] * 5)  # 120 steps, then 80
    >>> [round(x, 2) for x in (run.C, run.mean_D_of(None), run.D)]
    [7.33, 12.26, 16]
    >>> mean_mixing(ring, [16, 16]) == mixing(rumor.gossip_pga(ring, H=16))
    True
    """
    check_topology(topology)
    times = Counter(_checked_periods(periods))
    longest = _mixing(topology, max(times))
    if len(times) == 1:
        return longest
    if math.isinf(longest.H):
        raise ValueError("every period of mean_mixing must end, got periods with math.inf: use mixing(gossip_sgd(topology))")
    total = sum(H * often for H, often in times.items())
    parts = tuple((H * often / total, _mixing(topology, H)) for H, often in sorted(times.items()) if H > 1)
    return replace(longest, C=math.fsum(share * part.C for share, part in parts), parts=parts)


def _checked_periods(periods: Sequence[int]) -> list[int]:
    try:
        found = list(periods)
    except TypeError:
        raise ValueError(f"periods must be a list of periods, such as [4, 8, 16], got {periods!r}: list the periods of the run") from None
    if not found:
        raise ValueError("periods is empty: give at least one period, or use mixing(gossip_sgd(topology)) for no global averages")
    for H in found:
        check_period(H)
    return found


def _longest_period(schedule: object) -> float:
    if isinstance(schedule, Never):
        return math.inf
    if isinstance(schedule, Periodic):
        return schedule.H
    if isinstance(schedule, Adaptive | LearningRate):
        return schedule.H_max
    raise ValueError(f"the longest period of {schedule!r} is unknown: use time_varying_mixing(topology, periods)")


def _mixing(topology: Topology, H: float) -> Mixing:
    if H == 1:
        return static_mixing(topology.n, 0.0, 1)
    # A static W that is not symmetric may have norm 1 and still mix. Then beta says nothing, and the norms of its powers are needed.
    if topology.period == 1 and (topology.beta < 1 - ROUNDING or not topology.has_links):
        return static_mixing(topology.n, topology.beta, H)
    beta = min(topology.contraction(1), 1.0)  # rounding may push a norm of 1 above 1
    return Mixing(topology.n, beta, H, _sum_of_contractions(topology, H), _sum_of_contractions(topology, math.inf))


@lru_cache(maxsize=64)  # a plan asks for the same sums in many rows
def _sum_of_contractions(topology: Topology, H: float) -> float:
    """sum_{l<H} c(l). Once c shrinks by the same factor q over each cycle, the rest is summed as a geometric series."""
    p, last_guess = topology.period, math.inf
    terms: list[float] = []
    for l, c in enumerate(_contractions(topology)):  # noqa: E741 (the paper's letter)
        if l == H or c == 0:
            break
        terms.append(c)
        if len(terms) % p or len(terms) < 2 * p:
            continue
        last, before = sum(terms[-p:]), sum(terms[-2 * p : -p])
        q = last / before
        if q < 1:
            cycles, more = (math.inf, 0) if math.isinf(H) else divmod(int(H) - len(terms), p)
            guess: float = sum(terms) + last * q * (1 - q**cycles) / (1 - q) + sum(terms[-p:][:more]) * q ** (cycles + 1)
            if abs(guess - last_guess) <= SETTLED * guess:
                return guess
            last_guess = guess
    return math.fsum(terms)


def _contractions(topology: Topology) -> Iterator[float]:
    """Yields contraction(0), contraction(1), ... with one more factor each time (`topology.contraction(l)` multiplies l matrices)."""
    matrices = [topology.matrix(k) for k in range(topology.period)]
    circulants = [W for W in matrices if isinstance(W, Circulant)]
    if len(circulants) == len(matrices):
        eigenvalues = np.stack([W.eigenvalues[1:] for W in circulants])  # [period, n - 1]
        product = np.ones_like(eigenvalues)
        for l in count():  # noqa: E741
            yield float(np.abs(product).max(initial=0.0))
            product = product * np.roll(eigenvalues, -l, axis=0)  # row k: W_(k+l) times W_(k+l-1) ... W_k
    elif topology.n <= DENSE_UP_TO:
        Ws = np.stack([dense(W) for W in matrices])
        powers, left = Ws, np.ones(topology.period)
        yield float(topology.n > 1)
        for l in count(1):  # noqa: E741
            yield _largest_norm(left, lambda k: float(np.linalg.norm(powers[k] - 1 / topology.n, 2)))  # noqa: B023 (called at once)
            powers = np.roll(Ws, -l, axis=0) @ powers
    else:
        left = np.ones(topology.period)
        yield 1.0
        for l in count(1):  # noqa: E741
            yield _largest_norm(left, lambda k: distance_to_average([topology.matrix(k + s) for s in range(l)]))  # noqa: B023


def _largest_norm(left: Array, norm: Callable[[int], float]) -> float:
    """Returns max_k norm(k) over l steps, given `left`, bounds of it over l - 1 steps from each phase k on, which it updates.

    One more factor can't make the norm of a doubly stochastic product larger. So the bounds of k and k + 1 hold for l steps from k on,
    and most of the norms, which take long, need not be computed.
    """
    left[:] = np.minimum(left, np.roll(left, -1))
    largest = 0.0
    for k in np.argsort(-left, kind="stable").tolist():
        if left[k] <= largest + ROUNDING:
            break
        left[k] = norm(k)
        largest = max(largest, left[k])
    return largest if largest > ROUNDING else 0.0
