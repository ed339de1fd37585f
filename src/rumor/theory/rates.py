"""Convergence rates, the step sizes and bounds of Theorems 1 and 2, and the periods that keep linear speed-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rumor.methods import Algorithm
from rumor.theory.constants import Mixing, Regime, check_beta, check_nodes, mixing

Limit = Literal["drift", "noise", "lr_max"]  # what limits a step size


@dataclass(frozen=True)
class Rate:
    """The terms of a convergence rate, as orders of magnitude.

    Attributes:
        sgd: sigma / sqrt(n T), Parallel SGD's rate. While it dominates, the speed-up is linear.
        noise: the cost of gradient noise, because the nodes' models differ.
        heterogeneity: the cost of different data on the nodes.
        higher_order: the term that shrinks as 1/T.
    """

    sgd: float
    noise: float
    heterogeneity: float
    higher_order: float

    @property
    def overhead(self) -> float:
        """The rate without Parallel SGD's term: the "extra overhead" of (2)."""
        return self.noise + self.heterogeneity + self.higher_order

    @property
    def total(self) -> float:
        return self.sgd + self.overhead


def rate(
    algorithm: Algorithm | Mixing, T: float, sigma2: float = 1.0, b2: float = 1.0, F_0: float = 1.0, regime: Regime | None = None
) -> Rate:
    """The rate after T iterations without constants, for convex (7) and non-convex (8) problems:

        sigma F_0^(1/2) / (n T)^(1/2)
            +  C_beta^(1/3) beta^(2/3) (sigma^(2/3) + D_beta^(1/3) b^(2/3))
                   F_0^(2/3) / T^(2/3)
            +  beta D_beta F_0 / T

    It is the rate of f(x_hat) - f(x*) (Theorem 1) or of the mean of ||grad f(x_bar)||^2 (Theorem 2). F_0 = 1 gives (2) and Tables 4
    and 6; other values include the initial value, as in section 4. Gossip SGD has C_beta = D_beta = 1/(1 - beta). Local SGD has beta = 1
    and C_beta = D_beta = H. Parallel SGD has beta = 0. Table 6 writes H for Gossip-PGA's D_beta: `regime="sparse"`.

    >>> import rumor
    >>> rate(rumor.parallel_sgd(4), T=100)
    Rate(sgd=0.05, noise=0.0, heterogeneity=0.0, higher_order=0.0)
    """
    _check_positive("T", T)
    _check_not_negative(sigma2=sigma2, b2=b2, F_0=F_0)
    m = mixing(algorithm)
    sgd = math.sqrt(sigma2 * F_0 / (m.n * T))
    if m.beta == 0:
        return Rate(sgd, 0.0, 0.0, 0.0)
    D = m.D_of(regime)
    drift = (m.C * m.beta**2 * F_0**2 / T**2) ** (1 / 3)  # C^(1/3) beta^(2/3) (F_0 / T)^(2/3)
    noise = drift * sigma2 ** (1 / 3) if sigma2 else 0.0  # avoids inf * 0 where nothing is ever averaged
    heterogeneity = drift * (m.mean_D_of(regime) * b2) ** (1 / 3) if b2 else 0.0
    return Rate(sgd, noise, heterogeneity, m.beta * D * F_0 / T)


@dataclass(frozen=True)
class Guarantee:
    """A theorem applied to one problem: the constants of the bound r_0 / ((T + 1) gamma) + r_1 gamma + r_2 gamma^2 (58), gamma <= lr_max.

    `theorem_1` and `theorem_2` build it. Unlike `rate`, the bound includes its constants.
    """

    r_0: float
    r_1: float
    r_2: float
    lr_max: float

    def step_size(self, T: int) -> float:
        """The step size for T + 1 iterations, min{ lr_max, (r_0 / (r_1 (T + 1)))^(1/2), (r_0 / (r_2 (T + 1)))^(1/3) } (6)."""
        _check_positive("T", T)
        return min(self.lr_max, *self._step_sizes(T))

    def bound(self, T: int, lr: float | None = None) -> float:
        """The bound (58) after T + 1 iterations with step size `lr`; None means `step_size(T)`."""
        _check_positive("T", T)
        lr = self.step_size(T) if lr is None else lr
        if not 0 < lr <= self.lr_max:
            raise ValueError(f"the bound holds for step sizes 0 < lr <= lr_max = {self.lr_max:.4g}, got lr={lr!r}")
        return self.r_0 / ((T + 1) * lr) + self.r_1 * lr + self.r_2 * lr**2

    def limited_by(self, T: int) -> Limit:
        """What limits `step_size(T)`: "drift" for (r_0 / (r_2 (T + 1)))^(1/3), "noise" for (r_0 / (r_1 (T + 1)))^(1/2), or "lr_max"."""
        lr, by_noise = self.step_size(T), self._step_sizes(T)[0]
        return "lr_max" if lr == self.lr_max else "noise" if lr == by_noise else "drift"

    def case_bound(self, T: int) -> float:
        """The bound after T + 1 iterations with `step_size(T)`, without the step size, for the case that `limited_by(T)` names:

            drift   2 r_2^(1/3) (r_0 / (T+1))^(2/3)  +    (r_0 r_1 / (T+1))^(1/2)
            noise     r_2^(1/3) (r_0 / (T+1))^(2/3)  +  2 (r_0 r_1 / (T+1))^(1/2)
            lr_max    r_2^(1/3) (r_0 / (T+1))^(2/3)  +    (r_0 r_1 / (T+1))^(1/2)
                      +  r_0 / (lr_max (T+1))

        These are (59), (60) and (61).

        `bound(T)` <= `case_bound(T)` <= `closed_bound(T)`. The paper writes 12 beta L D_beta for 1 / lr_max.

        >>> problem = Guarantee(r_0=1.0, r_1=1.0, r_2=0.0, lr_max=1.0)
        >>> problem.limited_by(T=99)
        'noise'
        >>> round(problem.case_bound(T=99), 9)  # 2 (1 / 100)^(1/2)
        0.2
        """
        limit = self.limited_by(T)
        start, noise, drift = self._closed_terms(T)
        times = {"drift": (0, 1, 2), "noise": (0, 2, 1), "lr_max": (1, 1, 1)}[limit]
        return sum(k * term for k, term in zip(times, (start, noise, drift), strict=True))

    def closed_bound(self, T: int) -> float:
        """The bound of the theorem in closed form, which covers all cases of `case_bound`:

            r_0 / (lr_max (T + 1))  +  2 (r_0 r_1 / (T + 1))^(1/2)
                +  2 r_2^(1/3) (r_0 / (T + 1))^(2/3)

        This is (62). Without constants it is `rate` (63). It decreases with T, and shows which T is enough.

        >>> problem = Guarantee(r_0=1.0, r_1=1.0, r_2=8.0, lr_max=0.1)
        >>> round(problem.closed_bound(T=999), 9)  # 0.01 + 2 * 0.0316 + 4 * 0.01
        0.113245553
        """
        start, noise, drift = self._closed_terms(T)
        return start + 2 * noise + 2 * drift

    def _step_sizes(self, T: int) -> tuple[float, float]:
        """Returns (r_0 / (r_1 (T + 1)))^(1/2) and (r_0 / (r_2 (T + 1)))^(1/3)."""
        start = self.r_0 / (T + 1)
        return math.sqrt(start / self.r_1) if self.r_1 else math.inf, (start / self.r_2) ** (1 / 3) if self.r_2 else math.inf

    def _closed_terms(self, T: int) -> tuple[float, float, float]:
        """Returns r_0 / (lr_max (T + 1)), (r_0 r_1 / (T + 1))^(1/2) and r_2^(1/3) (r_0 / (T + 1))^(2/3)."""
        _check_positive("T", T)
        start = self.r_0 / (T + 1)
        return start / self.lr_max, math.sqrt(start * self.r_1), float((self.r_2 * start**2) ** (1 / 3))


def theorem_1(algorithm: Algorithm | Mixing, *, L: float, sigma2: float, b2: float, distance2: float) -> Guarantee:
    """Theorem 1, for convex f_i: a bound on `1/(T + 1) sum_k f(x_bar^(k)) - f(x*)`, and so on `f(x_hat) - f(x*)`.

        r_0 = 2 ||x_bar^(0) - x*||^2,  r_1 = 2 sigma^2 / n
        r_2 = 12 L beta^2 C_beta sigma^2 + 36 L beta^2 C_beta D_beta b^2
        gamma = min{ 1/(4 L), 1/(12 beta L D_beta),
                     (r_0 / (r_1 (T + 1)))^(1/2), (r_0 / (r_2 (T + 1)))^(1/3) }

    These are (57) and, for gamma, (6). r_2 is from the appendix. 1/(4 L) is from the descent lemma (20); without it gamma would have no
    limit as beta goes to 0.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, or a `Mixing`.
        L: smoothness of every f_i.
        sigma2: sigma^2, a bound on the variance of a stochastic gradient.
        b2: b^2 = 1/n sum_i ||grad f_i(x*)||^2.
        distance2: ||x_bar^(0) - x*||^2.

    >>> import rumor
    >>> method = rumor.gossip_pga(rumor.ring(20), H=16)
    >>> bound = theorem_1(method, L=2.5, sigma2=20.0, b2=1.0, distance2=1.0)
    >>> bound.step_size(T=10_000)
    0.0020...
    """
    m = mixing(algorithm)
    _check_positive("distance2", distance2)
    lr_max, drift = _lr_max_and_drift(m, L, sigma2, b2)
    return Guarantee(2 * distance2, 2 * sigma2 / m.n, 12 * L * drift, lr_max)


def theorem_2(algorithm: Algorithm | Mixing, *, L: float, sigma2: float, b2: float, F_0: float) -> Guarantee:
    """Theorem 2, for any smooth f_i: a bound on 1/(T + 1) sum_k ||grad f(x_bar^(k))||^2. By Corollary 1 it covers Gossip-AGA, too.

        r_0 = 8 F_0,  r_1 = 4 L sigma^2 / n
        r_2 = 24 L^2 beta^2 C_beta sigma^2 + 72 L^2 beta^2 C_beta D_beta b^2

    gamma is as in Theorem 1. The constants, (83), are from the end of the proof (the text has r_0 = 4 F_0).

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, or a `Mixing`.
        L: smoothness of every f_i.
        sigma2: sigma^2, a bound on the variance of a stochastic gradient.
        b2: a bound on 1/n sum_i ||grad f_i(x) - grad f(x)||^2 for all x.
        F_0: f(x_bar^(0)) minus the minimum of f.
    """
    m = mixing(algorithm)
    _check_positive("F_0", F_0)
    lr_max, drift = _lr_max_and_drift(m, L, sigma2, b2)
    return Guarantee(8 * F_0, 4 * L * sigma2 / m.n, 24 * L**2 * drift, lr_max)


def _lr_max_and_drift(m: Mixing, L: float, sigma2: float, b2: float) -> tuple[float, float]:
    """Returns min{1/(4 L), 1/(12 beta L D_beta)} and beta^2 C_beta (sigma^2 + 3 D_beta b^2)."""
    _check_positive("L", L)
    _check_not_negative(sigma2=sigma2, b2=b2)
    if m.beta == 0:
        return 1 / (4 * L), 0.0
    if math.isinf(m.D):
        raise ValueError("there is no guarantee for nodes that neither gossip nor average: use a finite period H or a connected topology")
    return 1 / max(4 * L, 12 * m.beta * L * m.D), m.beta**2 * m.C * (sigma2 + 3 * m.mean_D_of(None) * b2)


@dataclass(frozen=True)
class PeriodLimits:
    """For each term of the rate, the longest period at which it is at most Parallel SGD's sigma F_0^(1/2) / (n T)^(1/2).

    Attributes:
        heterogeneity: for the term with b; this is the paper's H.
        noise: for the other term with T^(2/3).
        higher_order: for the term with 1/T.
    """

    heterogeneity: float
    noise: float
    higher_order: float


def period_limits(n: int, beta: float, T: float, sigma2: float, b2: float, F_0: float = 1.0) -> PeriodLimits:
    """The periods that guarantee linear speed-up over T iterations (section 4), for each term, with C_beta, D_beta <= H:

        heterogeneity  H = sigma^(3/2) T^(1/4) / (beta b F_0^(1/4) n^(3/4))
        noise          H = sigma T^(1/2) / (beta^2 F_0^(1/2) n^(3/2))
        higher order   H = sigma T^(1/2) / (beta F_0^(1/2) n^(1/2))

    The paper gives the first one only. The other two terms may dominate; for iid data (b = 0), the first one is no limit at all.

    Args:
        n: nodes.
        beta: `topology.beta`; for a cycle `topology.contraction(1)`.
        T: iterations.
        sigma2: sigma^2.
        b2: b^2.
        F_0: f(x_bar^(0)) minus the minimum of f.
    """
    check_nodes(n)
    _check_positive("T", T)
    _check_positive("F_0", F_0)
    _check_not_negative(sigma2=sigma2, b2=b2)
    check_beta(beta)
    scale = sigma2 * T / F_0
    return PeriodLimits(
        heterogeneity=_ratio((scale * sigma2**2) ** 0.25, beta * math.sqrt(b2) * n**0.75),
        noise=_ratio(math.sqrt(scale), beta**2 * n**1.5),
        higher_order=_ratio(math.sqrt(scale), beta * math.sqrt(n)),
    )


def period_for_linear_speedup(n: int, beta: float, T: float, sigma2: float, b2: float, F_0: float = 1.0) -> float:
    """The longest period H that guarantees linear speed-up over T iterations, up to constants: the smallest of `period_limits`.

    Round it down. Below 1, only averaging at every step is safe. It grows with T: for a long enough run any H works.

    >>> period_for_linear_speedup(n=10, beta=0.9, T=1e6, sigma2=1.0, b2=0.0)
    39.04...
    """
    limits = period_limits(n, beta, T, sigma2, b2, F_0)
    return min(limits.heterogeneity, limits.noise, limits.higher_order)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {name}={value!r}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {name}={value!r}")
