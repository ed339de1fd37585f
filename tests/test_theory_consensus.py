"""The consensus distance of real runs: at the closed form, and below the paper's lemmas and theorem."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import rumor
from rumor import theory
from rumor.engines import StackedBuckets
from rumor.methods import Nodes
from rumor.schedule import Schedule, ScheduleState


def run(algorithm: rumor.GossipPGA, X: Tensor, steps: int, lr: float, gradient: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """X^(0), X^(1), ..., each [trials, n, d], in place: look at them, don't keep them."""
    nodes = Nodes(StackedBuckets([X]), StackedBuckets([]), rumor.Stacked(X.shape[-2]))
    state = algorithm.start(nodes)
    for _ in range(steps):
        yield X
        X.sub_(gradient(X), alpha=lr)
        algorithm.step(nodes, state)
    yield X


def disagreement(X: Tensor) -> float:
    """||X - X_bar||_F^2, averaged over trials."""
    return float((X - X.mean(dim=-2, keepdim=True)).square().sum(dim=(-2, -1)).mean())


# ---- the closed form -----------------------------------------------------------------------------------------------------------------


def measured_distance(topology: rumor.Topology, H: float, mu: float, lr: float, sigma2: float, b2: float) -> float:
    """f_i(x) = mu/2 ||x||^2 + a_i'x with isotropic a_i, and isotropic noise."""
    n, d, generator = topology.n, 400, torch.Generator().manual_seed(3)
    a = torch.randn(n, d, generator=generator, dtype=torch.float64)
    a -= a.mean(dim=0)
    a *= math.sqrt(b2 / a.square().sum(dim=1).mean())

    def gradient(X: Tensor) -> Tensor:
        return mu * X + a + torch.randn(X.shape, generator=generator, dtype=X.dtype) * math.sqrt(sigma2 / d)

    algorithm = rumor.gossip_sgd(topology) if math.isinf(H) else rumor.gossip_pga(topology, int(H))
    warmup, steps = (300, 900) if math.isinf(H) else (0, 20 * int(H))
    X = torch.zeros(2, n, d, dtype=torch.float64)
    distances = [disagreement(X) / n for X in run(algorithm, X, steps - 1, lr, gradient)]
    return float(np.mean(distances[warmup:]))


@pytest.mark.parametrize(("sigma2", "b2"), [(1.0, 0.0), (0.0, 1.0), (2.0, 0.5)], ids=["noise", "heterogeneity", "both"])
@pytest.mark.parametrize(
    ("topology", "H"),
    [(rumor.ring(20), 16), (rumor.grid(20), 16), (rumor.isolated(20), 16), (rumor.torus(9), 5), (rumor.ring(8), math.inf)],
    ids=str,
)
def test_the_closed_form_is_what_a_run_measures(topology: rumor.Topology, H: float, sigma2: float, b2: float) -> None:
    lr, mu = 0.02, 0.5
    expected = theory.consensus_distance(topology, H, lr, sigma2, b2, mu)
    assert measured_distance(topology, H, mu, lr, sigma2, b2) == pytest.approx(expected, rel=0.06)


def test_closed_form_of_local_sgd_and_of_gossip_sgd() -> None:
    local = theory.consensus_distance(rumor.isolated(20), 16, lr=0.1, sigma2=2.0, b2=3.0)
    assert local == pytest.approx(0.01 * (19 / 20 * 2 * 15 / 2 + 3 * 15 * 31 / 6))
    ring = rumor.ring(6)
    gossip = theory.consensus_distance(ring, math.inf, lr=0.1, sigma2=2.0, b2=3.0)
    assert theory.consensus_distance(ring, 20_000, lr=0.1, sigma2=2.0, b2=3.0) == pytest.approx(gossip, rel=1e-2)
    assert theory.consensus_distance(rumor.isolated(20), math.inf, lr=0.1, sigma2=0.0, b2=1.0) == math.inf
    assert theory.consensus_distance(rumor.complete(20), 16, lr=0.1, sigma2=2.0, b2=3.0) == 0
    assert theory.consensus_distance(ring, 1, lr=0.1, sigma2=2.0, b2=3.0) == 0
    assert theory.consensus_distance(rumor.ring(1), 4, lr=0.1, sigma2=2.0, b2=3.0) == 0


def test_the_closed_form_reads_the_same_off_a_dense_matrix() -> None:
    ring, same = rumor.ring(20), rumor.from_matrix(rumor.ring(20).W())
    assert theory.consensus_distance(same, 16, 0.1, 1.0, 1.0) == pytest.approx(theory.consensus_distance(ring, 16, 0.1, 1.0, 1.0))


def test_the_closed_form_needs_one_symmetric_matrix() -> None:
    with pytest.raises(ValueError, match="not symmetric"):
        theory.consensus_distance(rumor.exponential(8), 4, 0.1, 1.0, 1.0)
    with pytest.raises(ValueError, match="a cycle of 3 matrices"):
        theory.consensus_distance(rumor.one_peer_exponential(8), 4, 0.1, 1.0, 1.0)
    with pytest.raises(ValueError, match="at most n = 4096"):
        theory.consensus_distance(rumor.grid(6400), 4, 0.1, 1.0, 1.0)
    with pytest.raises(ValueError, match="lr=-1"):
        theory.consensus_distance(rumor.ring(8), 4, -1.0, 1.0, 1.0)


# ---- the lemmas and Theorem 1, on logistic regression --------------------------------------------------------------------------------


class Logistic:
    """f_i(x) = mean_m ln(1 + exp(-y h'x)), with n different solutions, and all that the lemmas ask for, exactly."""

    def __init__(self, n: int, d: int = 6, M: int = 60):
        generator = np.random.default_rng(0)
        own = generator.standard_normal((n, d)) * 0.5 + generator.standard_normal(d)
        h = generator.standard_normal((n, M, d)) * math.sqrt(2)
        y = np.where(generator.random((n, M)) < 1 / (1 + np.exp(-np.einsum("nmd,nd->nm", h, own))), 1.0, -1.0)
        self.z = torch.from_numpy(h * y[..., None])  # [n, M, d]: the loss is ln(1 + exp(-z'x))
        self.n, self.d, self.M = n, d, M
        self.L = max(np.linalg.eigvalsh(hi.T @ hi / M / 4)[-1] for hi in h)
        x = np.zeros(d)
        flat = self.z.reshape(-1, d).numpy()
        for _ in range(30):  # Newton
            s = 1 / (1 + np.exp(flat @ x))
            x = x + np.linalg.solve((flat * (s * (1 - s))[:, None]).T @ flat, flat.T @ s)
        self.x_star = torch.from_numpy(x)
        self.least = float(self.f(self.x_star))
        self.b2 = float(self.gradients(self.x_star.expand(n, d)).mean(dim=-2).square().sum(dim=-1).mean())
        self.generator = torch.Generator().manual_seed(0)
        self.sigma2 = 0.0  # the largest variance that any node has met

    def f(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-(self.z.reshape(-1, self.d) @ x.unsqueeze(-1)).squeeze(-1)).mean(dim=-1)

    def gradients(self, X: Tensor) -> Tensor:
        """Of every sample: [..., n, M, d]."""
        return -torch.sigmoid(-(self.z @ X.unsqueeze(-1))) * self.z

    def sample(self, X: Tensor) -> Tensor:
        """A stochastic gradient for each node, of one sample."""
        every = self.gradients(X)
        variance = (every - every.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)
        self.sigma2 = max(self.sigma2, float(variance.max()))
        pick = torch.randint(self.M, (*X.shape[:-1], 1, 1), generator=self.generator).expand(*X.shape[:-1], 1, self.d)
        return every.gather(-2, pick).squeeze(-2)


@dataclass(frozen=True)
class Listed(Schedule):
    """Global averages after the listed periods, over and over. The state's `samples` counts the periods so far."""

    periods: tuple[int, ...]

    def start(self) -> ScheduleState:
        return ScheduleState(H=self.periods[0])

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == state.H

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        if not self.is_global(state):
            return state._replace(k=state.k + 1, C=state.C + 1)
        done = state.samples + 1
        return state._replace(k=state.k + 1, C=0, H=self.periods[done % len(self.periods)], samples=done)

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return state


@pytest.mark.parametrize(
    "algorithm",
    [
        rumor.gossip_pga(rumor.ring(12), 8),
        rumor.gossip_pga(rumor.ring(12), Listed((2, 5, 1, 8, 16))),
        rumor.gossip_pga(rumor.base_graph(12), Listed((2,) * 12 + (8,))),
        rumor.gossip_pga(rumor.exponential(12), 8),
        rumor.gossip_pga(rumor.one_peer_exponential(12), 16),
        rumor.local_sgd(12, 8),
        rumor.gossip_sgd(rumor.grid(12)),
    ],
    ids=str,
)
def test_runs_stay_below_the_lemmas_and_theorem_1(algorithm: rumor.GossipPGA) -> None:
    problem, T, trials = Logistic(12), 160, 24
    schedule = algorithm.schedule
    m = theory.mean_mixing(algorithm.topology, schedule.periods) if isinstance(schedule, Listed) else theory.mixing(algorithm)
    lr = theory.theorem_1(m, L=problem.L, sigma2=0.0, b2=0.0, distance2=1.0).lr_max
    X = torch.zeros(trials, 12, problem.d, dtype=torch.float64)
    A, B, distances = [], [], []
    for X in run(algorithm, X, T, lr, problem.sample):  # noqa: B020
        A.append(disagreement(X))
        distances.append(float((X.mean(dim=-2) - problem.x_star).square().sum(dim=-1).mean()))
        B.append(float(problem.f(X.mean(dim=-2)).mean()) - problem.least)
    constants = {"lr": lr, "L": problem.L, "sigma2": problem.sigma2, "b2": problem.b2}
    state = schedule.start()
    for k in range(T):
        tau = k - state.C
        state = schedule.next(state)
        for regime, lemma in ((None, 4), ("sparse", 2), ("dense", 3)):
            bound = theory.unified_consensus_bound(m, A=A[tau : k + 1], B=B[tau : k + 1], regime=regime, **constants)
            assert A[k + 1] <= bound, f"Lemma {lemma} at k = {k}"
        bound = theory.descent_bound(12, lr=lr, L=problem.L, sigma2=problem.sigma2, value=distances[k], A=A[k], B=B[k])
        assert distances[k + 1] <= bound, f"Lemma 1 at k = {k}"
    assert np.mean(A) <= theory.running_consensus_bound(m, mean_B=float(np.mean(B)), **constants), "Lemma 5"
    distance2 = float(problem.x_star.square().sum())
    theorem = theory.theorem_1(m, L=problem.L, sigma2=problem.sigma2, b2=problem.b2, distance2=distance2)
    assert np.mean(B) <= theorem.bound(T, lr), "Theorem 1"


def test_a_run_without_convexity_stays_below_lemma_6() -> None:
    """f_i(x) = sum of cos(x - a_i), which is smooth with L = 1, with noise, on the expected value over many trials."""
    n, d, lr, sigma, trials, generator = 4, 3, 0.25, 0.5, 4_000, torch.Generator().manual_seed(0)
    a = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X = torch.randn(1, 1, d, generator=generator, dtype=torch.float64).repeat(trials, n, 1)
    values, A, B = [], [], []

    def gradient(X: Tensor) -> Tensor:
        return -torch.sin(X - a) + sigma / math.sqrt(d) * torch.randn(X.shape, generator=generator, dtype=X.dtype)

    for X in run(rumor.gossip_pga(rumor.ring(n), 3), X, 20, lr, gradient):  # noqa: B020
        mean = X.mean(dim=-2, keepdim=True)
        values.append(float(torch.cos(mean - a).sum(dim=-1).mean()))
        A.append(disagreement(X))
        B.append(float(torch.sin(mean - a).mean(dim=-2).square().sum(dim=-1).mean()))
    for k in range(20):
        assert values[k + 1] <= theory.descent_bound(n, lr=lr, L=1.0, sigma2=sigma**2, value=values[k], A=A[k], B=B[k], convex=False)


def test_lemma_6_is_near_where_noise_alone_moves_the_mean() -> None:
    """f(x) = L/2 x^2 at its minimum, one step: the expected value is exactly gamma^2 L sigma^2 / (2 n)."""
    n, lr, L, sigma2 = 5, 0.1, 2.0, 3.0
    bound = theory.descent_bound(n, lr=lr, L=L, sigma2=sigma2, value=0.0, A=0.0, B=0.0, convex=False)
    assert bound == pytest.approx(L / 2 * lr**2 * sigma2 / n)
    assert theory.descent_bound(n, lr=lr, L=L, sigma2=sigma2, value=0.0, A=0.0, B=0.0) == pytest.approx(lr**2 * sigma2 / n)


def test_lemmas_2_and_3_have_their_own_coefficients() -> None:
    m = theory.static_mixing(10, 0.5, 3)  # C = 1.75, 1/(1 - beta) = 2, H = 3
    constants = {"lr": 0.1, "L": 3.0, "sigma2": 5.0, "b2": 7.0}
    step = 0.0025  # (beta gamma)^2
    for regime, D in (("sparse", 3), ("dense", 2)):
        found = theory.unified_consensus_bound(m, A=[0.0, 4.0], B=[6.0, 2.0], regime=regime, **constants)
        expected = 6 * D * step * 9 * 4 + 12 * 10 * D * step * 3 * (0.5 * 6 + 2) + 2 * 10 * step * 1.75 * (3 * D * 7 + 5)
        assert found == pytest.approx(expected), regime
    constants["lr"] = 0.05
    found = theory.running_consensus_bound(m, mean_B=8.0, regime="sparse", **constants)
    c_2, c_3 = 12 * 10 * 3 * step / 4 * 3, 2 * 10 * step / 4 * 1.75 * (3 * 3 * 7 + 5)
    assert found == pytest.approx(2 * c_2 * 3 * 8 + 2 * c_3)
    with pytest.raises(ValueError, match='regime must be "sparse"'):
        theory.unified_consensus_bound(m, A=[0.0], B=[0.0], regime="large", **constants)  # type: ignore[arg-type]


def test_the_descent_lemmas_refuse_what_they_do_not_hold_for() -> None:
    good = {"lr": 0.1, "L": 1.0, "sigma2": 1.0, "value": 1.0, "A": 1.0, "B": 1.0}
    with pytest.raises(ValueError, match=r"lr <= 1/\(4 L\) = 0.25, got lr=0.3"):
        theory.descent_bound(4, **{**good, "lr": 0.3})
    with pytest.raises(ValueError, match=r"got lr=0\.1, L=1\.0, sigma2=-1"):
        theory.descent_bound(4, **{**good, "sigma2": -1})
    with pytest.raises(ValueError, match="number of nodes"):
        theory.descent_bound(0, **good)


@pytest.mark.parametrize(("sigma2", "b2", "within"), [(1.0, 0.0, 2.5), (0.0, 1.0, 8.5)], ids=["noise", "heterogeneity"])
def test_lemma_4_is_near_where_nodes_differ_along_the_slowest_direction(sigma2: float, b2: float, within: float) -> None:
    """Its constants are 2 for noise and 6 for heterogeneity: a run along the slowest eigenvector of W comes about that near."""
    n, d, H, lr, mu, generator = 30, 200, 8, 0.1, 1e-3, torch.Generator().manual_seed(0)
    slowest = torch.cos(2 * math.pi * torch.arange(n, dtype=torch.float64) / n)[:, None] * math.sqrt(2)  # [n, 1]

    def gradient(X: Tensor) -> Tensor:
        noise = torch.randn(4, 1, d, generator=generator, dtype=torch.float64) * math.sqrt(sigma2 / d)
        return mu * X + slowest * (math.sqrt(b2 / d) + noise)

    algorithm = rumor.gossip_pga(rumor.ring(n), H)
    A = [disagreement(X) for X in run(algorithm, torch.zeros(4, n, d, dtype=torch.float64), H - 1, lr, gradient)]
    bound = theory.unified_consensus_bound(algorithm, lr=lr, L=mu, sigma2=sigma2, b2=b2, A=A[:-1], B=[0.0] * (H - 1))
    assert A[-1] < bound < within * A[-1]


def test_the_lemmas_without_convexity_have_gradients_for_values() -> None:
    m = theory.static_mixing(10, 0.5, 3)  # C = 1.75, D = 2
    constants = {"lr": 0.1, "L": 3.0, "sigma2": 5.0, "b2": 7.0}
    c_1, c_3 = 6 * 2 * 0.0025 * 9, 2 * 10 * 0.0025 * 1.75 * (3 * 2 * 7 + 5)
    for convex, c_2 in ((True, 12 * 10 * 2 * 0.0025 * 3), (False, 6 * 10 * 2 * 0.0025)):
        found = theory.unified_consensus_bound(m, A=[0.0, 4.0], B=[6.0, 2.0], convex=convex, **constants)
        assert found == pytest.approx(c_1 * 4 + c_2 * (3 + 2) + c_3)
    constants["lr"] = 0.05  # 1/(4 L beta D) = 1/12
    c_2, c_3 = 6 * 10 * 2 * 0.000625, c_3 / 4
    assert theory.running_consensus_bound(m, mean_B=8.0, convex=False, **constants) == pytest.approx(2 * c_2 * 2 * 8 + 2 * c_3)


def test_the_lemmas_refuse_what_they_do_not_hold_for() -> None:
    m, constants = theory.static_mixing(10, 0.5, 3), {"L": 3.0, "sigma2": 5.0, "b2": 7.0}
    with pytest.raises(ValueError, match="at most H = 3: got 4 and 4"):
        theory.unified_consensus_bound(m, lr=0.1, A=[0.0] * 4, B=[0.0] * 4, **constants)
    with pytest.raises(ValueError, match="got 1 and 2"):
        theory.unified_consensus_bound(m, lr=0.1, A=[0.0], B=[0.0] * 2, **constants)
    with pytest.raises(ValueError, match=r"lr <= .* = 0.08333, got lr=0.1"):
        theory.running_consensus_bound(m, lr=0.1, mean_B=1.0, **constants)
    with pytest.raises(ValueError, match="lr > 0"):
        theory.running_consensus_bound(m, lr=0.0, mean_B=1.0, **constants)
