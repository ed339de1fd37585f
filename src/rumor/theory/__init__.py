"""The paper's formulas as plain functions, and estimators of the constants that they need.

The symbols and their names in the code:

    n                     nodes
    T                     iterations
    H                     the period of global averages; math.inf for Gossip SGD
    J                     the matrix whose entries are all 1/n
    W, beta               the mixing matrix, and ||W - J||_2
    C_beta                sum_{l<H} beta^l; `C` of a `Mixing`
    D_beta                min{H, 1/(1 - beta)}; `D` of a `Mixing`
    gamma                 the step size, `lr`
    sigma^2 (`sigma2`)    variance of a node's stochastic gradient
    b^2 (`b2`)            heterogeneity: 1/n sum_i ||grad f_i - grad f||^2
                          (for convex problems, at x*)
    L, mu                 smoothness and curvature
    F_0                   f(x_bar^(0)) minus the minimum of f
    alpha, theta          latency of a message, time to send one number
    d                     size of the model

A function with an argument `algorithm` takes a method such as `rumor.gossip_pga(...)`, or a `Mixing`. `rate`, `transient_stage` and
`transient_time` return orders of magnitude, without constants: compare these numbers with each other, not with measurements. The bounds
of the theorems and lemmas include their constants, and hold if the problem's constants are right:

    found = theory.estimate(model, loss_fn, batches)
    bound = theory.theorem_2(
        algorithm, L=found.L, sigma2=found.sigma2, b2=found.b2, F_0=found.loss)
    bound.step_size(T=10_000)
"""

from rumor.theory.consensus import consensus_distance, descent_bound, running_consensus_bound, unified_consensus_bound
from rumor.theory.constants import C_beta, D_beta, Mixing, mean_mixing, mixing, static_mixing, time_varying_mixing
from rumor.theory.estimators import Estimate, estimate, smoothness
from rumor.theory.rates import Guarantee, PeriodLimits, Rate, period_for_linear_speedup, period_limits, rate, theorem_1, theorem_2
from rumor.theory.transient import (
    Exponents,
    TransientTime,
    period_to_beat_local,
    scaling_exponents,
    transient_stage,
    transient_time,
    unstructured_transient_stage,
)

__all__ = [
    "C_beta",
    "D_beta",
    "Estimate",
    "Exponents",
    "Guarantee",
    "Mixing",
    "PeriodLimits",
    "Rate",
    "TransientTime",
    "consensus_distance",
    "descent_bound",
    "estimate",
    "mean_mixing",
    "mixing",
    "period_for_linear_speedup",
    "period_limits",
    "period_to_beat_local",
    "rate",
    "running_consensus_bound",
    "scaling_exponents",
    "smoothness",
    "static_mixing",
    "theorem_1",
    "theorem_2",
    "time_varying_mixing",
    "transient_stage",
    "transient_time",
    "unified_consensus_bound",
    "unstructured_transient_stage",
]
