"""The paper's formulas: limits, orders and exponents, against numbers that were found without them."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

import rumor
from rumor import theory
from rumor.schedule import Schedule, ScheduleState
from rumor.theory.constants import _contractions
from tests.problems import lopsided

GRAPHS: dict[str, Callable[[int], rumor.Topology]] = {"ring": rumor.ring, "grid": rumor.grid, "exponential": rumor.exponential}


# ---- C_beta, D_beta and what an algorithm is to the theory ---------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.967, 1 - 1e-9])
@pytest.mark.parametrize("H", [1, 2, 16, 300])
def test_C_is_the_sum_and_D_the_smaller_of_the_two(beta: float, H: int) -> None:
    assert theory.C_beta(beta, H) == pytest.approx(math.fsum(beta**k for k in range(H)), rel=1e-6)
    assert theory.D_beta(beta, H) == pytest.approx(min(H, 1 / (1 - beta)))
    assert theory.C_beta(beta, H) <= theory.D_beta(beta, H) * (1 + 1e-9)


def test_limits_of_C_and_D() -> None:
    assert theory.C_beta(1, 16) == theory.D_beta(1, 16) == 16  # Local SGD
    assert theory.C_beta(0.9, math.inf) == theory.D_beta(0.9, math.inf) == pytest.approx(10)  # Gossip SGD
    assert theory.C_beta(0.9, 10_000) == pytest.approx(10)
    assert theory.C_beta(0, 16) == theory.D_beta(0, 16) == 1
    assert theory.C_beta(1, math.inf) == theory.D_beta(1, math.inf) == math.inf


@pytest.mark.parametrize(("beta", "H"), [(-0.1, 4), (1.1, 4), (math.nan, 4), (0.5, 0), (0.5, 2.5), (0.5, -1), (0.5, math.nan), (0.5, True)])
def test_what_is_no_beta_or_no_period_is_refused(beta: float, H: float) -> None:
    for formula in (theory.C_beta, theory.D_beta):
        with pytest.raises(ValueError, match="must be"):
            formula(beta, H)


def test_every_method_is_gossip_pga_to_the_theory() -> None:
    ring = rumor.ring(20)
    assert theory.mixing(rumor.parallel_sgd(20)).beta == 0
    assert theory.mixing(rumor.gossip_pga(ring, 1)) == theory.mixing(rumor.local_sgd(20, 1)) == theory.mixing(rumor.parallel_sgd(20))
    local = theory.mixing(rumor.local_sgd(20, 16))
    assert (local.n, local.beta, local.H, local.C, local.D) == (20, 1, 16, 16, 16)
    gossip = theory.mixing(rumor.gossip_sgd(ring))
    assert math.inf == gossip.H
    assert gossip.C == gossip.D == pytest.approx(1 / (1 - 0.96737), rel=2e-4)
    assert theory.mixing(theory.mixing(rumor.gossip_pga(ring, 16))) == theory.static_mixing(20, ring.beta, 16)


def test_corollary_1_counts_with_the_longest_period() -> None:
    ring = rumor.ring(20)
    longest = theory.mixing(rumor.gossip_pga(ring, 64))
    assert theory.mixing(rumor.gossip_aga(ring, warmup=100, H_init=4, H_max=64)) == longest
    assert theory.mixing(rumor.gossip_pga(ring, H=rumor.LearningRate(4, 64))) == longest
    assert theory.time_varying_mixing(ring, [4, 7, 64, 32]) == longest
    assert pytest.approx(sum(ring.beta**k for k in range(64))) == longest.C  # up to H_max - 1


def brute_force_sum(topology: rumor.Topology, H: int) -> float:
    """sum_{l<H} of the worst phase's norm of l steps, from dense products."""
    n, p = topology.n, topology.period
    Ws, total = [topology.W(k).numpy() for k in range(p)], 0.0
    products = [np.eye(n)] * p
    for length in range(H):
        worst = max(np.linalg.norm(P - 1 / n, 2) for P in products)
        if worst < 1e-13:
            break
        total += worst
        products = [Ws[(k + length) % p] @ P for k, P in enumerate(products)]
    return total


def alternating_pairs(n: int) -> rumor.Topology:
    """A ring on which each node averages with its left neighbour, then with its right one."""
    both = [np.eye(n), np.eye(n)]
    for i in range(n):
        pair = [i, (i + 1) % n]
        both[i % 2][np.ix_(pair, pair)] = 0.5
    return rumor.from_matrices(both)


def one_way() -> rumor.Topology:
    """Not normal: its norm is 1, but its square mixes."""
    return rumor.from_matrix([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]] @ np.eye(4)[[0, 2, 1, 3]])


CYCLES = {
    "one-peer 16": rumor.one_peer_exponential(16),
    "one-peer 20": rumor.one_peer_exponential(20),
    "base graph 20": rumor.base_graph(20),
    "base graph 50, 2 peers": rumor.base_graph(50, peers=2),
    "pairs": alternating_pairs(12),
    "norm 1": one_way(),
}


@pytest.mark.parametrize("name", CYCLES)
def test_contractions_are_those_of_the_topology(name: str) -> None:
    found = list(itertools.islice(_contractions(CYCLES[name]), 9))
    assert found == pytest.approx([CYCLES[name].contraction(steps) for steps in range(9)], abs=1e-9)


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("H", [2, 5, 16, 22, 64, 1000])
def test_a_cycle_counts_with_the_norms_of_its_products(name: str, H: int) -> None:
    m = theory.mixing(rumor.gossip_pga(CYCLES[name], H))
    assert m.beta == pytest.approx(1)  # one step alone may leave everything
    assert pytest.approx(brute_force_sum(CYCLES[name], H), rel=1e-6) == m.C
    everything = brute_force_sum(CYCLES[name], 1500)
    assert pytest.approx(everything, rel=1e-6) == m.S
    assert pytest.approx(min(H, everything), rel=1e-6) == m.D


def test_one_peer_gossip_that_averages_exactly_needs_no_global_average() -> None:
    assert theory.mixing(rumor.gossip_sgd(rumor.one_peer_exponential(1024))).C == 10
    assert theory.mixing(rumor.gossip_pga(rumor.one_peer_exponential(1024), 64)).D == 10


def test_contractions_of_a_large_cycle_are_those_of_the_topology() -> None:
    """Above 256 nodes products are not dense, and most norms are only bounded."""
    topology = rumor.base_graph(301, peers=4)
    steps = range(2 * topology.period)
    found = list(itertools.islice(_contractions(topology), len(steps)))
    assert found == pytest.approx([topology.contraction(step) for step in steps], abs=1e-9)
    assert found[topology.period] > 0
    assert found[-1] == 0


def test_base_graph_has_the_transient_stage_of_its_contractions() -> None:
    base = rumor.base_graph(20)
    for H in (4, 6, 16):
        C = sum(base.contraction(steps) for steps in range(H))
        D = min(H, sum(base.contraction(steps) for steps in range(2 * base.period)))
        assert theory.transient_stage(rumor.gossip_pga(base, H)) == pytest.approx(20**3 * C**2 * D**2)
    assert theory.transient_stage(rumor.gossip_sgd(base)) == theory.transient_stage(rumor.gossip_pga(base, 64)), "13 steps are exact"
    other = theory.transient_stage(rumor.gossip_pga(rumor.one_peer_exponential(16), 6))
    assert theory.transient_stage(rumor.gossip_pga(rumor.base_graph(16), 6)) == pytest.approx(other), "n is a power of two"


def test_ten_thousand_nodes_are_quick() -> None:
    for topology in (rumor.ring(10_000), rumor.grid(10_000), rumor.exponential(10_000), rumor.one_peer_exponential(10_000)):
        m = theory.mixing(rumor.gossip_pga(topology, 64))
        assert 1 < m.C <= m.D <= 64


# ---- a run of several periods --------------------------------------------------------------------------------------------------------


def brute_force_mean(topology: rumor.Topology, periods: list[int]) -> tuple[float, float]:
    """The means over all steps of C_beta, and of C_beta D_beta. A period of one step has no gossip and counts as 0."""
    S = brute_force_sum(topology, 1500)
    C = {H: brute_force_sum(topology, H) if H > 1 else 0.0 for H in periods}
    steps = [H for H in periods for _ in range(H)]
    return float(np.mean([C[H] for H in steps])), float(np.mean([C[H] * min(H, S) for H in steps]))


def linear_consensus(topology: rumor.Topology, periods: list[int]) -> tuple[float, float]:
    """The exact mean over all steps of 1/n E||X - X_bar||_F^2 for noise of variance 1, and of the largest ||X - X_bar||_F^2 for a constant
    gradient of norm 1. The step size is 1, and nothing but the matrices of the run pulls the nodes together.
    """
    n = topology.n
    J, identity = np.ones((n, n)) / n, np.eye(n)
    ends = set(np.cumsum(periods) - 1)
    covariance, response = np.zeros((n, n)), np.zeros((n, n))
    noise, drift = [], []
    for k in range(sum(periods)):
        noise.append(float(np.trace(covariance)) / n)
        drift.append(float(np.linalg.norm(response, 2)) ** 2)
        V = (J if k in ends else topology.W(k).numpy()) - J
        covariance, response = V @ (covariance + identity) @ V.T, V @ (response + identity)
    return float(np.mean(noise)), float(np.mean(drift))


SEQUENCES = {
    "growing": [2, 3, 3, 7, 16],
    "falling": [16, 7, 3, 1, 2],
    "one long": [2] * 160 + [80],
    "mostly one": [1] * 60 + [40],
}
RUNS = {
    "ring 8": rumor.ring(8),
    "ring 12": rumor.ring(12),
    "isolated": rumor.isolated(4),
    "base graph 5": rumor.base_graph(5),
    "one-peer 6": rumor.one_peer_exponential(6),
    "norm 1": one_way(),
}


@pytest.mark.parametrize("periods", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("name", RUNS)
def test_mean_mixing_is_the_mean_over_all_steps_and_bounds_linear_consensus(name: str, periods: list[int]) -> None:
    topology = RUNS[name]
    m = theory.mean_mixing(topology, periods)
    C, CD = brute_force_mean(topology, periods)
    assert [m.C, m.C * m.mean_D_of(None)] == pytest.approx([C, CD], rel=1e-6)
    noise, drift = linear_consensus(topology, periods)
    assert noise <= m.beta**2 * m.C * (1 + 1e-9)
    assert drift <= m.beta**2 * m.C * m.mean_D_of(None) * (1 + 1e-9)


def test_other_means_would_be_no_bounds() -> None:
    """The mean over periods instead of steps, and the product of two means: both are below what linear consensus reaches."""
    periods = SEQUENCES["one long"]
    noise, drift = linear_consensus(rumor.isolated(4), periods)
    assert noise > np.mean(periods), "C_beta = H on isolated nodes"
    over_steps = np.average(periods, weights=periods)
    assert drift > over_steps**2, "C_beta = D_beta = H"


@pytest.mark.parametrize("name", RUNS)
def test_mean_mixing_lies_between_its_periods(name: str) -> None:
    topology = RUNS[name]
    assert theory.mean_mixing(topology, [1] * 3) == theory.mixing(rumor.parallel_sgd(topology.n))
    assert theory.mean_mixing(topology, [6] * 3) == theory.mixing(rumor.gossip_pga(topology, 6))
    for periods in SEQUENCES.values():
        m, longest = theory.mean_mixing(topology, periods), theory.time_varying_mixing(topology, periods)
        assert (m.beta, m.H, m.D, m.longest) == (longest.beta, longest.H, longest.D, longest)
        assert m.C <= longest.C * (1 + 1e-12)
        for regime in (None, "sparse", "dense"):
            assert m.mean_D_of(regime) <= longest.D_of(regime) * (1 + 1e-12)  # type: ignore[arg-type]
            assert theory.transient_stage(m, regime=regime) <= theory.transient_stage(longest, regime=regime) * (1 + 1e-12)  # type: ignore[arg-type]
        assert m == theory.mean_mixing(topology, [*reversed(periods)] * 2), "neither order nor repetition counts"


def test_every_formula_takes_the_mean_where_steps_are_summed_and_the_longest_period_elsewhere() -> None:
    ring, known = rumor.ring(20), {"L": 2.0, "sigma2": 3.0, "b2": 5.0}
    m, longest = theory.mean_mixing(ring, [4] * 12 + [16]), theory.mixing(rumor.gossip_pga(ring, 16))
    C, CD = brute_force_mean(ring, [4] * 12 + [16])
    for theorem, constant, first in ((theory.theorem_1, 12 * 2, "distance2"), (theory.theorem_2, 24 * 4, "F_0")):
        bound, worst = (theorem(x, **known, **{first: 7.0}) for x in (m, longest))  # type: ignore[arg-type, operator]
        assert bound.r_2 == pytest.approx(constant * ring.beta**2 * (3 * C + 3 * 5 * CD))
        assert (bound.r_0, bound.r_1, bound.lr_max) == (worst.r_0, worst.r_1, worst.lr_max)
    rate, worst_rate = theory.rate(m, 1000), theory.rate(longest, 1000)
    assert rate.noise**3 == pytest.approx(ring.beta**2 * C / 1e6)
    assert rate.heterogeneity**3 == pytest.approx(ring.beta**2 * CD / 1e6)
    assert rate.higher_order == worst_rate.higher_order
    assert theory.transient_stage(m) == pytest.approx(20**3 * ring.beta**4 * CD**2)
    run = {**known, "lr": 0.002, "mean_B": 1.0}
    difference = theory.running_consensus_bound(longest, **run) - theory.running_consensus_bound(m, **run)
    lost = longest.C * (3 * longest.D * 5 + 3) - (3 * 5 * CD + 3 * C)
    assert difference == pytest.approx(4 * 20 * (ring.beta * 0.002) ** 2 * lost)
    step = {**known, "lr": 0.002, "A": [0.0] * 9, "B": [1.0] * 9}
    assert theory.unified_consensus_bound(m, **step) == theory.unified_consensus_bound(longest, **step)  # type: ignore[arg-type]


# ---- what is refused -----------------------------------------------------------------------------------------------------------------

FOLLOWS, ADAPTS = rumor.LearningRate(3, 24), rumor.Adaptive(10, H_max=32)


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (lambda: theory.C_beta(0.9, FOLLOWS), r"got H=LearningRate\(.*\): pass its longest period, H=24 \(Corollary 1\)"),
        (lambda: theory.D_beta(0.9, ADAPTS), r"got H=Adaptive\(.*\): pass its longest period, H=32"),
        (lambda: theory.static_mixing(8, 0.9, FOLLOWS), r"got H=LearningRate\(.*\): pass its longest period, H=24"),
        (lambda: theory.consensus_distance(rumor.ring(8), FOLLOWS, 0.1, 1.0, 1.0), "pass its longest period, H=24"),
        (lambda: theory.unstructured_transient_stage(8, FOLLOWS), r"got H=LearningRate\(.*: pass its longest period, H=24"),
        (lambda: theory.C_beta(0.9, rumor.Never()), r"pass its longest period, H=math.inf"),
        (lambda: theory.C_beta(0.9, TwiceAsLong()), r"got H=.*TwiceAsLong.*: pass its longest period \(Corollary 1\)"),
        (lambda: theory.C_beta(0.9, [4, 8]), r"got H=\[4, 8\]: pass one period; mean_mixing\(topology, periods\) takes several"),
        (lambda: theory.C_beta(0.9, "6"), "must be a whole number >= 1, or math.inf for Gossip SGD, got H='6'$"),
        (lambda: theory.C_beta(rumor.ring(8), 6), r"between 0 and 1, got beta=ring\(8\): `topology.beta` computes it"),
        (lambda: theory.static_mixing(rumor.ring(8), 0.9, 6), r"n, the number of nodes, must be a whole number >= 1, got n=ring\(8\)"),
        (lambda: theory.time_varying_mixing(rumor.base_graph, [4]), r"got the builder base_graph: call it first, as in rumor.ring\(20\)"),
        (lambda: theory.mean_mixing(rumor.base_graph, [4]), "theory needs a graph of a known number of nodes, got the builder base_graph"),
        (lambda: theory.consensus_distance(rumor.ring, 4, 0.1, 1.0, 1.0), "got the builder ring: call it first"),
        (lambda: theory.time_varying_mixing(lopsided(), [4]), "is column stochastic, and the paper has theory of doubly stochastic W only"),
        (lambda: theory.time_varying_mixing(rumor.ring(8), FOLLOWS), r"such as \[4, 8, 16\], got LearningRate\(.*\): list the periods"),
        (lambda: theory.mean_mixing(rumor.ring(8), 6), r"periods must be a list of periods, such as \[4, 8, 16\], got 6"),
        (lambda: theory.mean_mixing(rumor.ring(8), []), "periods is empty: give at least one period"),
        (lambda: theory.mean_mixing(rumor.ring(8), [4, 2.5]), "got H=2.5"),
        (lambda: theory.mean_mixing(rumor.ring(8), [4, math.inf]), "must end, got periods with math.inf: use mixing"),
        (
            lambda: theory.transient_time(rumor.gossip_pga(rumor.ring(8), FOLLOWS)),
            r"transient_time counts global averages, which the paper does for one period, got LearningRate\(.*\): use a whole number as H",
        ),
        (lambda: theory.period_to_beat_local(rumor.gossip_aga(rumor.ring(8), 10)), r"one period, got Adaptive\(.*\): use a whole number"),
        (lambda: theory.period_to_beat_local(theory.mean_mixing(rumor.ring(8), [4, 8])), "got a mean_mixing: use a whole number"),
        (lambda: theory.transient_time(theory.static_mixing(8, 0.9, 4)), r"for which Mixing\(.*\) has no graph: pass a method such as"),
    ],
)
def test_what_theory_can_not_answer_is_refused_in_one_line(formula: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        formula()
    assert "\n" not in str(error.value)


def test_what_is_no_topology_is_refused() -> None:
    for wrong in (20, "ring", rumor.gossip_pga(rumor.ring(20))):
        with pytest.raises(TypeError, match=r"topology must be what rumor.ring\(n\) and its like return"):
            theory.time_varying_mixing(wrong, [4])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "algorithm",
    [
        rumor.slowmo(rumor.ring(4), 4),
        rumor.diloco(4, 4),
        rumor.osgp(rumor.ring(4)),
        rumor.gossip_pga(rumor.ring(4), 4, delay=1),
        rumor.gossip_pga(rumor.ring(4), 4, average_rounds=2),
        rumor.gossip_pga(rumor.ring(4), 4, bits=4),
        "gossip",
    ],
    ids=str,
)
def test_what_the_paper_does_not_treat_is_refused(algorithm: object) -> None:
    with pytest.raises(ValueError, match="the paper has no theory of"):
        theory.transient_stage(algorithm)  # type: ignore[arg-type]


class TwiceAsLong(Schedule):
    """A schedule of one's own, whose longest period theory can't know: 2, 4, 8, ... steps."""

    def start(self) -> ScheduleState:
        return ScheduleState(H=2)

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == state.H

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        return (
            state._replace(k=state.k + 1, C=0, H=2 * (state.H or 1))
            if self.is_global(state)
            else state._replace(k=state.k + 1, C=state.C + 1)
        )

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return state


def test_a_schedule_of_ones_own_is_refused_with_the_way_out() -> None:
    ring = rumor.ring(20)
    with pytest.raises(ValueError, match=r"longest period of .*TwiceAsLong.* is unknown: use time_varying_mixing\(topology, periods\)"):
        theory.mixing(rumor.gossip_pga(ring, H=TwiceAsLong()))
    assert theory.time_varying_mixing(ring, [2, 4, 8]) == theory.mixing(rumor.gossip_pga(ring, 8))


# ---- transient stages and times ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "gossip", "pga", "local"), [(20, 6.2e9, 2.9e8, 5.2e8), (50, 1.6e14, 7.4e9, 8.2e9), (100, 3.3e17, 6.4e10, 6.6e10)]
)
def test_transient_stages_on_the_ring(n: int, gossip: float, pga: float, local: float) -> None:
    ring = rumor.ring(n)
    found = [theory.transient_stage(a) for a in (rumor.gossip_sgd(ring), rumor.gossip_pga(ring, 16), rumor.local_sgd(n, 16))]
    assert found == pytest.approx([gossip, pga, local], rel=0.02)
    assert theory.transient_stage(rumor.parallel_sgd(n)) == 0


@pytest.mark.parametrize("iid", [True, False])
@pytest.mark.parametrize("name", ["gossip", "pga", "local"])
def test_the_transient_stage_is_where_the_rates_largest_extra_term_meets_sgds(name: str, iid: bool) -> None:
    grid = rumor.grid(30)
    algorithm = {"gossip": rumor.gossip_sgd(grid), "pga": rumor.gossip_pga(grid, 9), "local": rumor.local_sgd(30, 9)}[name]
    rate = theory.rate(algorithm, T=theory.transient_stage(algorithm, iid), b2=0.0 if iid else 1.0)
    assert max(rate.noise, rate.heterogeneity, rate.higher_order) == pytest.approx(rate.sgd)


@pytest.mark.parametrize("iid", [True, False])
def test_limits_of_gossip_pga(iid: bool) -> None:
    ring = rumor.ring(12)
    gossip, local = theory.transient_stage(rumor.gossip_sgd(ring), iid), theory.transient_stage(rumor.local_sgd(12, 8), iid)
    assert theory.transient_stage(rumor.gossip_pga(ring, 10**6), iid) == pytest.approx(gossip)
    assert theory.transient_stage(rumor.gossip_pga(rumor.isolated(12), 8), iid) == local == 12**3 * 8 ** (2 if iid else 4)
    assert theory.transient_stage(theory.static_mixing(12, 1 - 1e-12, 8), iid) == pytest.approx(local)
    assert theory.transient_stage(rumor.gossip_pga(rumor.complete(12), 8), iid) == 0
    for H in (2, 8, 64):
        local = theory.transient_stage(rumor.local_sgd(12, H), iid)
        assert theory.transient_stage(rumor.gossip_pga(ring, H), iid) < min(gossip, local)


def test_regimes_are_the_rows_of_table_2() -> None:
    beta, n = 0.9, 10  # 1/(1 - beta) = 10
    sparse, dense = theory.static_mixing(n, beta, 4), theory.static_mixing(n, beta, 50)
    C = (1 - 0.9**4) / 0.1
    assert theory.transient_stage(sparse) == theory.transient_stage(sparse, regime="sparse")
    assert theory.transient_stage(sparse, regime="sparse") == pytest.approx(n**3 * beta**4 * C**2 * 16)
    assert theory.transient_stage(dense) == theory.transient_stage(dense, regime="dense")
    assert theory.transient_stage(dense, regime="dense") == pytest.approx(n**3 * beta**4 * ((1 - 0.9**50) / 0.1) ** 2 * 100)
    for regime in ("sparse", "dense"):  # Gossip SGD's and Local SGD's columns are the same in both rows
        assert theory.transient_stage(theory.static_mixing(n, beta, math.inf), regime=regime) == pytest.approx(n**3 * beta**4 * 1e4)
        assert theory.transient_stage(theory.static_mixing(n, 1, 4), regime=regime) == n**3 * 4**4
    with pytest.raises(ValueError, match=r'"sparse".*"dense"'):
        theory.transient_stage(sparse, regime="large")  # type: ignore[arg-type]


def test_a_well_connected_network_is_limited_by_the_term_with_1_over_T() -> None:
    m = theory.static_mixing(n=2, beta=0.1, H=4)  # n beta < 1: where the tables' one term is not the largest
    assert theory.transient_stage(m, iid=True) == pytest.approx(2 * 0.01 / 0.81)


def test_the_unstructured_stage_is_looser_and_would_blame_long_periods() -> None:
    grid = rumor.grid(16)
    for H in (4, 16, 256):
        assert theory.unstructured_transient_stage(16, H) > theory.transient_stage(rumor.gossip_pga(grid, H))
    assert theory.unstructured_transient_stage(16, 256) > theory.transient_stage(rumor.gossip_sgd(grid))
    assert theory.unstructured_transient_stage(3, 2) == 27 * 16


@pytest.mark.parametrize(
    ("graph", "iid", "gossip", "pga", "latency"),
    [("grid", False, 7, 5, 5.5), ("grid", True, 5, 4, 4.5), ("ring", False, 11, 5, 5.5), ("ring", True, 7, 4, 4.5)],
)
def test_exponents_of_tables_5_and_12_to_14(graph: str, iid: bool, gossip: float, pga: float, latency: float) -> None:
    build = GRAPHS[graph]
    of_gossip = theory.scaling_exponents(lambda n: rumor.gossip_sgd(build(n)), iid=iid)
    of_pga = theory.scaling_exponents(lambda n: rumor.gossip_pga(build(n), math.isqrt(n)), iid=iid)
    assert [of_gossip.iterations, of_gossip.bandwidth, of_gossip.latency] == pytest.approx([gossip] * 3, abs=0.04)
    assert [of_pga.iterations, of_pga.bandwidth, of_pga.latency] == pytest.approx([pga, pga, latency], abs=0.04)


def test_a_slope_needs_sizes_and_a_transient_stage() -> None:
    with pytest.raises(ValueError, match="at least two different sizes"):
        theory.scaling_exponents(lambda n: rumor.gossip_sgd(rumor.ring(n)), sizes=[1024, 1024])
    with pytest.raises(ValueError, match="no exponent"):
        theory.scaling_exponents(rumor.parallel_sgd)


def test_transient_time_counts_neighborhoods_as_the_paper_does() -> None:
    alpha, theta, d = 3.0, 0.1, 1000.0
    for build, neighborhood in ((rumor.ring, 3), (rumor.grid, 5), (rumor.one_peer_exponential, 2)):
        algorithm = rumor.gossip_pga(build(16), 4)
        time = theory.transient_time(algorithm, alpha, theta, d)
        assert time.iterations == theory.transient_stage(algorithm)
        assert time.bandwidth / time.iterations == pytest.approx(neighborhood * 100 + 2 * 100 / 4)
        assert time.latency / time.iterations == pytest.approx(3 + 16 * 3 / 4)
        assert time.total == time.bandwidth + time.latency
    local = theory.transient_time(rumor.local_sgd(16, 4), alpha, theta, d)
    assert local.total == pytest.approx(16**3 * 4**3 * (2 * 100 + 16 * 3))  # the paper's n^3 H^3 (theta d + n alpha)
    assert theory.transient_time(rumor.parallel_sgd(16)).total == 0


@pytest.mark.parametrize(("graph", "thresholds"), [("ring", (139, 232, 250)), ("grid", (55, 171, 174)), ("exponential", (1.8, 3.2, 5.0))])
def test_the_period_that_beats_local_sgd_depends_on_the_graph(graph: str, thresholds: tuple[float, ...]) -> None:
    found = [theory.period_to_beat_local(rumor.gossip_pga(GRAPHS[graph](n), 16)) for n in (20, 50, 100)]
    assert found == pytest.approx(thresholds, rel=0.02)
    assert all((threshold < 16) == (graph == "exponential") for threshold in found)
