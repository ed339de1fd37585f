"""The consensus distance: a closed form of its steady state, the paper's bounds on it, and the descent lemmas that it enters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rumor.methods import Algorithm
from rumor.theory.constants import Mixing, Regime, check_nodes, check_period, check_topology, mixing
from rumor.topology import Topology
from rumor.topology.matrix import Array, Circulant

LONGEST = 100_000  # steps; a period is summed step by step
DENSE_UP_TO = 4096  # nodes; at this size, all eigenvalues of a dense matrix take a minute


def consensus_distance(topology: Topology, H: float, lr: float, sigma2: float, b2: float, mu: float = 0.0) -> float:
    """The expected consensus distance E 1/n sum_i ||x_i - x_bar||^2 of Gossip-PGA, averaged over a period:

        lr^2 1/H sum_{m<H} mean_j [ (n-1)/n sigma^2 sum_{l=1..m} z_j^(2l)
                                    + b^2 (sum_{l=1..m} z_j^l)^2 ]

    with z_j = lambda_j (1 - lr mu). lambda_j, j >= 2, are the eigenvalues of W without the first. The formula holds for small lr and
    one symmetric W. It solves the recursion (10) and is not a bound. It assumes that noise and heterogeneity are spread evenly over the
    eigenvectors of W, and that gradients are constant over a period except for the pull mu towards x_bar. On `isolated(n)` it gives
    Local SGD's lr^2 [(n-1)/n sigma^2 (H-1)/2 + b^2 (H-1)(2H-1)/6]; for H = infinity it gives Gossip SGD's steady state.

    Args:
        topology: a topology with one symmetric W.
        H: the period, or math.inf.
        lr: the step size gamma.
        sigma2: variance of a stochastic gradient, E||g_i - grad f_i||^2.
        b2: heterogeneity, 1/n sum_i ||grad f_i - grad f||^2.
        mu: mean curvature.

    >>> import rumor
    >>> nodes = rumor.isolated(4)
    >>> round(consensus_distance(nodes, H=3, lr=1.0, sigma2=1.0, b2=0.0), 9)
    0.75
    """
    check_topology(topology)
    check_period(H)
    if LONGEST < H < math.inf:
        raise ValueError(f"H={H} is longer than {LONGEST:,} steps: pass H=math.inf, the steady state is the same by then")
    if not (lr > 0 and sigma2 >= 0 and b2 >= 0 and 0 <= lr * mu < 1):
        raise ValueError(f"needs lr > 0, sigma2 >= 0, b2 >= 0 and 0 <= lr mu < 1, got lr={lr}, sigma2={sigma2}, b2={b2}, mu={mu}")
    if topology.n == 1:
        return 0.0
    z = _eigenvalues(topology) * (1 - lr * mu)  # [n - 1]
    squares, sums = _steady_state(z) if math.isinf(H) else _over_a_period(z, int(H))
    noise = sigma2 * (1 - 1 / topology.n) * squares if sigma2 else 0.0  # avoids 0 * inf where nothing keeps the nodes together
    return lr**2 * (noise + (b2 * sums if b2 else 0.0))


def _over_a_period(z: Array, H: int) -> tuple[float, float]:
    """The means over j and m < H of sum_{l=1..m} z_j^(2l) and of (sum_{l=1..m} z_j^l)^2."""
    power, squares, sums = np.ones_like(z), np.zeros_like(z), np.zeros_like(z)
    totals = np.zeros(2)
    for _ in range(1, H):
        power = power * z
        squares, sums = squares + power**2, sums + power
        totals += squares.mean(), (sums**2).mean()
    return float(totals[0] / H), float(totals[1] / H)


def _steady_state(z: Array) -> tuple[float, float]:
    """The same sums for m = infinity: the means over j of z_j^2 / (1 - z_j^2) and of (z_j / (1 - z_j))^2."""
    if np.abs(z).max() >= 1:
        return math.inf, math.inf
    return float((z**2 / (1 - z**2)).mean()), float(((z / (1 - z)) ** 2).mean())


def _eigenvalues(topology: Topology) -> Array:
    """The eigenvalues of W without the first, [n - 1]."""
    W = topology.matrix()
    if topology.period > 1 or not W.is_symmetric:
        what = f"a cycle of {topology.period} matrices" if topology.period > 1 else "not symmetric"
        raise ValueError(f"the closed form needs one symmetric W, but {topology} is {what}: use unified_consensus_bound instead")
    if isinstance(W, Circulant):
        return np.real(W.eigenvalues[1:])
    if topology.n > DENSE_UP_TO:
        raise ValueError(f"the eigenvalues of {topology} need a dense matrix, which is supported for at most n = {DENSE_UP_TO} nodes")
    return np.asarray(np.linalg.eigvalsh(topology.W().numpy())[:-1])  # ascending: the last belongs to the vector of ones


def unified_consensus_bound(
    algorithm: Algorithm | Mixing,
    *,
    lr: float,
    L: float,
    sigma2: float,
    b2: float,
    A: Sequence[float],
    B: Sequence[float],
    convex: bool = True,
    regime: Regime | None = None,
) -> float:
    """The bound of the unified consensus lemma (Lemma 4), the right-hand side of (25). It bounds A^(k+1) = E||X^(k+1) - X_bar^(k+1)||_F^2:

        6 D_beta gamma^2 beta^2 L^2 sum_l beta^(k-l) A^(l)
            +  12 n D_beta gamma^2 beta^2 L sum_l beta^(k-l) B^(l)
            +  2 n gamma^2 beta^2 C_beta (3 D_beta b^2 + sigma^2)

    The sums are over l = tau(k), ..., k, where tau(k) is the step of the last global average. Without convexity (Lemma 7, (65)) the
    B^(l) are squared gradients and their coefficient is 6 n D_beta gamma^2 beta^2. For (65) this is the version of the proof: the
    statement has beta^(2(k+1-l)) and H b^2 instead of beta^(k-l) and D_beta b^2.

    D_beta = min{H, 1/(1 - beta)} unites two lemmas, which hold for every network. `regime` asks for one of them: "sparse" for Lemma 2 (22),
    where global averages keep the nodes together and D_beta = H; "dense" for Lemma 3 (23), where gossip does and D_beta = 1/(1 - beta).
    (Lemma 2 is that of the proof: the statement has b^2 instead of H b^2.) With a `mean_mixing`, C_beta and D_beta are those of the longest
    period, because a mean says nothing about a single step.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, or a `Mixing`.
        lr: the step size gamma.
        L: smoothness of every f_i.
        sigma2: a bound on the variance of a stochastic gradient.
        b2: heterogeneity, at x* if convex.
        A: A^(tau(k)), ..., A^(k). They are sums over the nodes, n times the value of `consensus_distance`. A^(tau(k)) = 0.
        B: E f(x_bar^(l)) - f(x*) at the same steps; E||grad f(x_bar^(l))||^2 if not convex.
        convex: True for Lemma 4, False for Lemma 7.
        regime: None for Lemma 4; "sparse" for Lemma 2, "dense" for Lemma 3.

    >>> import rumor
    >>> known = {"lr": 0.1, "L": 1.0, "sigma2": 1.0, "A": [0.0], "B": [0.0]}
    >>> unified_consensus_bound(rumor.local_sgd(2, 4), b2=0.0, **known)
    0.16...
    >>> ring = rumor.gossip_pga(rumor.ring(20), H=4)  # 1/(1 - beta) = 31
    >>> def bound(regime):
    ...     return unified_consensus_bound(ring, b2=1.0, regime=regime, **known)
    >>> bound(None) == bound("sparse") < bound("dense")  # Lemma 2 is tighter
    True
    """
    m = mixing(algorithm).longest
    if not 1 <= len(A) == len(B) <= m.H:
        raise ValueError(
            f"A and B need one value for each step since the last global average, at most H = {m.H}: got {len(A)} and {len(B)} values"
        )
    c_1, c_2, c_3 = _constants(m, regime, lr, L, sigma2, b2, convex)
    fade = m.beta ** np.arange(len(A))[::-1]  # beta^(k-l)
    return c_1 * float(fade @ np.asarray(A, dtype=np.float64)) + c_2 * float(fade @ np.asarray(B, dtype=np.float64)) + c_3


def running_consensus_bound(
    algorithm: Algorithm | Mixing,
    *,
    lr: float,
    L: float,
    sigma2: float,
    b2: float,
    mean_B: float,
    convex: bool = True,
    regime: Regime | None = None,
) -> float:
    """The bound of the running consensus lemma (Lemma 5), the right-hand side of (26).

    It bounds 1/(T+1) sum_k E||X^(k) - X_bar^(k)||_F^2 if gamma <= 1/(4 L beta D_beta):

        2 c_2 D_beta mean_B + 2 c_3
        c_2 = 12 n beta^2 D_beta gamma^2 L
        c_3 = 2 n beta^2 gamma^2 C_beta (3 D_beta b^2 + sigma^2)

    mean_B is 1/(T+1) sum_k E f(x_bar^(k)) - f(x*). Without convexity (Lemma 8, (66)) mean_B is the mean of E||grad f(x_bar^(k))||^2
    and c_2 = 6 n beta^2 D_beta gamma^2. `regime` takes D_beta = H ("sparse") or 1/(1 - beta) ("dense"), as in `unified_consensus_bound`.
    """
    m = mixing(algorithm)
    D = m.D_of(regime)
    _, c_2, c_3 = _constants(m, regime, lr, L, sigma2, b2, convex)
    if 4 * L * m.beta * D * lr > 1:
        raise ValueError(f"the lemma needs lr <= 1/(4 L beta D_beta) = {1 / (4 * L * m.beta * D):.4g}, got lr={lr!r}")
    return 2 * c_2 * D * mean_B + 2 * c_3


def descent_bound(n: int, *, lr: float, L: float, sigma2: float, value: float, A: float, B: float, convex: bool = True) -> float:
    """The bound of the descent lemma (Lemma 1), the right-hand side of (20). It bounds E||x_bar^(k) - x*||^2 if gamma <= 1/(4 L):

        E||x_bar^(k-1) - x*||^2  -  gamma B^(k-1)
            +  3 L gamma / (2 n) A^(k-1)  +  gamma^2 sigma^2 / n

    Without convexity (Lemma 6, (64)) it bounds E f(x_bar^(k)):

        E f(x_bar^(k-1))  -  gamma / 4 B^(k-1)
            +  3 gamma L^2 / (4 n) A^(k-1)  +  gamma^2 L sigma^2 / (2 n)

    The paper's (64) has A^(k) in the place of A^(k-1), which is a slip: its proof ends with A^(k-1). Both lemmas hold for every W, because
    mixing keeps the mean.

    Args:
        n: nodes.
        lr: the step size gamma.
        L: smoothness of every f_i.
        sigma2: a bound on the variance of a stochastic gradient.
        value: E||x_bar^(k-1) - x*||^2; E f(x_bar^(k-1)) if not convex.
        A: A^(k-1) = E||X^(k-1) - X_bar^(k-1)||_F^2, a sum over the nodes.
        B: B^(k-1) = E f(x_bar^(k-1)) - f(x*); E||grad f(x_bar^(k-1))||^2 if not convex.
        convex: True for Lemma 1, False for Lemma 6.

    >>> known = {"lr": 0.1, "L": 1.0, "sigma2": 4.0}
    >>> bound = descent_bound(4, value=9.0, A=8.0, B=2.0, **known)
    >>> round(bound, 9)  # 9 - 0.2 + 0.3 + 0.01
    9.11
    >>> bound = descent_bound(4, value=9.0, A=8.0, B=2.0, convex=False, **known)
    >>> round(bound, 9)  # 9 - 0.05 + 0.15 + 0.005
    9.105
    """
    check_nodes(n)
    if not (lr > 0 and L > 0 and sigma2 >= 0 and A >= 0 and B >= 0):
        raise ValueError(f"needs lr > 0, L > 0, sigma2 >= 0, A >= 0 and B >= 0, got lr={lr}, L={L}, sigma2={sigma2}, A={A}, B={B}")
    if 4 * L * lr > 1:
        raise ValueError(f"the lemma needs lr <= 1/(4 L) = {1 / (4 * L):.4g}, got lr={lr!r}")
    if convex:
        return value - lr * B + 1.5 * L * lr / n * A + lr**2 * sigma2 / n
    return value - lr / 4 * B + 0.75 * lr * L**2 / n * A + lr**2 * L * sigma2 / (2 * n)


def _constants(m: Mixing, regime: Regime | None, lr: float, L: float, sigma2: float, b2: float, convex: bool) -> tuple[float, float, float]:
    """The constants c_1, c_2 and c_3 in the proofs of Lemmas 5 and 8."""
    if not (lr > 0 and L > 0 and sigma2 >= 0 and b2 >= 0):
        raise ValueError(f"needs lr > 0, L > 0, sigma2 >= 0 and b2 >= 0, got lr={lr}, L={L}, sigma2={sigma2}, b2={b2}")
    if m.beta == 0:
        return 0.0, 0.0, 0.0
    D, step = m.D_of(regime), (m.beta * lr) ** 2
    c_2 = 12 * m.n * D * step * L if convex else 6 * m.n * D * step
    return 6 * D * step * L**2, c_2, 2 * m.n * step * m.C * (3 * m.mean_D_of(regime) * b2 + sigma2)
