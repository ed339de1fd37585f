"""Every algorithm, step by step, against a numpy oracle that was written from the equations and shares no code with the package."""

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rumor
from tests.oracle import oracle

N, D, STEPS = 5, 4, 60
RING, PEER, BASE = rumor.ring(N), rumor.one_peer_exponential(N), rumor.base_graph(N)
LOPSIDED = rumor.from_digraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 3), (2, 0)]))
random = np.random.default_rng(5)
A = random.standard_normal((STEPS, N, 6, D)) + random.standard_normal((N, 1, D))
B = random.standard_normal((STEPS, N, 6)) + np.arange(N)[:, None]


def gradient(i: int, k: int, x: np.ndarray) -> tuple[float, np.ndarray]:
    residual = A[k, i] @ x - B[k, i]
    return float(residual @ residual) / 12, A[k, i].T @ residual / 6


def lr(k: int) -> float:
    return 0.1 * 0.5 ** (k // 20)


def warmed_up(k: int) -> float:
    """With a warm-up, for periods that follow it."""
    return lr(k) * min(1.0, (k + 1) / 8)


CASES = {
    "parallel_sgd": (rumor.parallel_sgd(N), {}),
    "local_sgd": (rumor.local_sgd(N, 4), {"H": 4}),
    "gossip_sgd": (rumor.gossip_sgd(RING), {}),
    "gossip_sgd directed": (rumor.gossip_sgd(rumor.exponential(N)), {}),
    "gossip_sgd one-peer": (rumor.gossip_sgd(PEER), {}),
    "gossip_sgd delayed": (rumor.gossip_sgd(RING, delay=1), {"delay": 1}),
    "gossip_pga": (rumor.gossip_pga(PEER, 4), {"H": 4}),
    "gossip_pga delayed": (rumor.gossip_pga(PEER, 4, delay=1), {"H": 4, "delay": 1}),
    "gossip_pga by gossip": (rumor.gossip_pga(PEER, 4, average_rounds=3), {"H": 4, "average_rounds": 3}),
    "gossip_pga by gossip delayed": (
        rumor.gossip_pga(PEER, 4, average_rounds=3, delay=1),
        {"H": 4, "average_rounds": 3, "delay": 1},
    ),
    "gossip_aga": (rumor.gossip_aga(RING, 12, H_init=2, H_max=9), {"warmup": 12, "H_init": 2, "H_max": 9}),
    "gossip_aga exponent": (
        rumor.gossip_aga(RING, 12, H_init=3, exponent=0.25),
        {"warmup": 12, "H_init": 3, "exponent": 0.25},
    ),
    "gossip_aga no warm-up": (rumor.gossip_aga(RING, 0, H_init=2), {"warmup": 0, "H_init": 2}),
    "gossip_aga delayed": (rumor.gossip_aga(PEER, 12, H_init=2, delay=1), {"warmup": 12, "H_init": 2, "delay": 1}),
    "gossip_aga H_init=1 delayed": (rumor.gossip_aga(RING, 3, H_init=1, delay=1), {"warmup": 3, "H_init": 1, "delay": 1}),
    "slowmo": (rumor.slowmo(RING, 4, momentum=0.6, slow_lr=0.8), {"H": 4, "momentum": 0.6, "slow_lr": 0.8}),
    "slowmo by learning rate": (
        rumor.slowmo(RING, rumor.LearningRate(3, 9), momentum=0.6),
        {"H_min": 3, "H_max": 9, "momentum": 0.6},
    ),
    "gossip_pga by learning rate": (rumor.gossip_pga(PEER, rumor.LearningRate(3, 9)), {"H_min": 3, "H_max": 9}),
    "gossip_pga by learning rate, power 2": (
        rumor.gossip_pga(RING, rumor.LearningRate(2, 20, power=2)),
        {"H_min": 2, "H_max": 20, "power": 2.0},
    ),
    "gossip_pga by learning rate delayed": (
        rumor.gossip_pga(PEER, rumor.LearningRate(1, 20, power=1.5), delay=1),
        {"H_min": 1, "H_max": 20, "power": 1.5, "delay": 1},
    ),
    "gossip_pga by learning rate by gossip delayed": (
        rumor.gossip_pga(RING, rumor.LearningRate(3, 9), average_rounds=2, delay=1),
        {"H_min": 3, "H_max": 9, "average_rounds": 2, "delay": 1},
    ),
    "gossip_pga by learning rate 4 bits": (
        rumor.gossip_pga(RING, rumor.LearningRate(3, 20), bits=4),
        {"H_min": 3, "H_max": 20, "bits": 4},
    ),
    "local_sgd by learning rate": (rumor.local_sgd(N, rumor.LearningRate(3, 20)), {"H_min": 3, "H_max": 20}),
    "diloco": (rumor.diloco(N, 4), {"H": 4}),
    "diloco gossip": (
        rumor.diloco(N, 4, 0.8, 0.5, topology=PEER),
        {"H": 4, "outer_lr": 0.8, "outer_momentum": 0.5},
    ),
    "diloco gossip 4 bits": (rumor.diloco(N, 4, topology=RING, bits=4), {"H": 4, "bits": 4}),
    "diloco by learning rate": (rumor.diloco(N, rumor.LearningRate(3, 9)), {"H_min": 3, "H_max": 9}),
    "parallel_sgd 4 bits": (rumor.parallel_sgd(N, bits=4), {"bits": 4}),
    "local_sgd 8 bits": (rumor.local_sgd(N, 4, bits=8), {"H": 4, "bits": 8}),
    "gossip_sgd 16 bits": (rumor.gossip_sgd(RING, bits=16), {"bits": 16}),
    "gossip_pga 4 bits": (rumor.gossip_pga(PEER, 4, bits=4), {"H": 4, "bits": 4}),
    "gossip_pga 8 bits": (rumor.gossip_pga(RING, 4, bits=8), {"H": 4, "bits": 8}),
    "gossip_pga 4 bits delayed": (rumor.gossip_pga(RING, 4, bits=4, delay=1), {"H": 4, "bits": 4, "delay": 1}),
    "gossip_pga 16 bits by gossip": (rumor.gossip_pga(RING, 4, bits=16, average_rounds=3), {"H": 4, "bits": 16, "average_rounds": 3}),
    "gossip_aga 4 bits": (rumor.gossip_aga(RING, 12, H_init=2, H_max=9, bits=4), {"warmup": 12, "H_init": 2, "H_max": 9, "bits": 4}),
    "slowmo 8 bits": (rumor.slowmo(RING, 4, momentum=0.6, slow_lr=0.8, bits=8), {"H": 4, "momentum": 0.6, "slow_lr": 0.8, "bits": 8}),
    "gossip_sgd base graph": (rumor.gossip_sgd(BASE), {}),
    "gossip_pga base graph delayed": (rumor.gossip_pga(BASE, 6, delay=1), {"H": 6, "delay": 1}),
    "gossip_pga base graph by gossip": (rumor.gossip_pga(BASE, 7, average_rounds=3), {"H": 7, "average_rounds": 3}),
    "gossip_pga base graph by learning rate 4 bits": (
        rumor.gossip_pga(BASE, rumor.LearningRate(3, 20), bits=4),
        {"H_min": 3, "H_max": 20, "bits": 4},
    ),
    "osgp": (rumor.osgp(PEER), {"delay": 1}),
    "osgp directed": (rumor.osgp(LOPSIDED), {"delay": 1}),
    "osgp directed without delay": (rumor.osgp(LOPSIDED, delay=0), {"delay": 0}),
}


class Point(nn.Module):
    def __init__(self, x0: Tensor):
        super().__init__()
        self.x = nn.Parameter(x0.clone())


def loss_fn(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return (a @ model.x - b).square().sum() / 12


@pytest.mark.parametrize("nesterov", [0.0, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_algorithm_equals_the_oracle(name: str, nesterov: float) -> None:
    algorithm, options = CASES[name]
    topology = algorithm.topology
    Ws = [topology.W(k).numpy() for k in range(topology.period)]
    x0 = np.linspace(-1, 1, D)
    rate = warmed_up if "H_min" in options else lr
    expected = oracle(name.split()[0], Ws, gradient, x0, rate, STEPS, nesterov=nesterov, **options)

    sim = rumor.Simulator(Point(torch.from_numpy(x0)), algorithm)
    opt = torch.optim.SGD(sim.parameters(), lr=1.0, momentum=nesterov, nesterov=nesterov > 0)
    for k in range(STEPS):
        opt.param_groups[0]["lr"] = rate(k)
        losses = sim(loss_fn, torch.from_numpy(A[k]), torch.from_numpy(B[k]))
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=rate(k))
        assert np.abs(losses.detach().numpy() - expected.losses[k]).max() < 1e-9
        assert np.abs(sim.X.numpy() - expected.X[k + 1]).max() < 1e-10, f"step {k}"
        assert expected.periods[k] == sim.metrics.H, f"step {k}"


def test_the_cases_exercise_what_they_claim() -> None:
    weights = oracle("osgp", [LOPSIDED.W().numpy()], gradient, np.zeros(D), lr, STEPS, delay=1).w
    assert np.abs(weights[-1] - weights[-1].mean()).max() > 0.05, "push-sum weights must differ between nodes"
    periods = oracle("gossip_aga", [RING.W().numpy()], gradient, np.linspace(-1, 1, D), lr, STEPS, **CASES["gossip_aga"][1]).periods
    assert len(set(periods)) > 1, "the period must adapt"
    options = CASES["gossip_pga by learning rate"][1]
    periods = oracle("gossip_pga", [RING.W().numpy()], gradient, np.zeros(D), warmed_up, STEPS, **options).periods
    assert set(periods) == {3, 6, 9}, "the period must follow the learning rate"
