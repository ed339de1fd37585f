"""experiments/networks/methods.py: quasi-global momentum, Scaffold and gradient tracking, on the public extension points."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rumor
from rumor.methods import GossipPGA
from tests.cluster import Cluster
from tests.problems import N, batches, flat, loss_fn, network, trained

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from networks.methods import GradientTracking, QuasiGlobalMomentum, Scaffold  # noqa: E402

METHODS: dict[str, Callable[[], GossipPGA]] = {
    "quasi-global momentum": lambda: QuasiGlobalMomentum(rumor.ring(N), rumor.Periodic(3), momentum=0.8),
    "quasi-global momentum, 4 bits": lambda: QuasiGlobalMomentum(rumor.one_peer_exponential(N), rumor.Periodic(3), bits=4),
    "quasi-global momentum by learning rate": lambda: QuasiGlobalMomentum(rumor.ring(N), rumor.LearningRate(2, 8)),
    "scaffold": lambda: Scaffold(rumor.ring(N), rumor.Periodic(3)),
    "scaffold, 4 bits": lambda: Scaffold(rumor.one_peer_exponential(N), rumor.Periodic(3), bits=4),
    "scaffold without gossip": lambda: Scaffold(rumor.isolated(N), rumor.Periodic(3)),
    "gradient tracking": lambda: GradientTracking(rumor.ring(N), rumor.Periodic(3)),
    "gradient tracking, 4 bits": lambda: GradientTracking(rumor.one_peer_exponential(N), rumor.Periodic(3), bits=4),
}
STEPS = 24


def iterates_there(rank: int, name: str) -> Tensor:
    model = network()
    averager = rumor.Averager(model, METHODS[name]())
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    found = torch.stack([flat(model) for _ in trained(model, averager, opt, rank, *batches(STEPS))])
    averager.finish()
    return found


@pytest.mark.parametrize("name", METHODS)
def test_real_processes_and_the_simulator_agree(four: Cluster, name: str) -> None:
    sim = rumor.Simulator(network(), METHODS[name]())
    opt, here = torch.optim.SGD(sim.parameters(), lr=0.05), []
    for k, (x, y) in enumerate(zip(*batches(STEPS), strict=True)):
        opt.param_groups[0]["lr"] = lr = 0.05 * 0.5 ** (k // 10)
        losses = sim(loss_fn, x, y)
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=lr)
        here.append(sim.X)
    iterates = torch.stack(here)  # [steps, n, d]
    assert (iterates[-1] - iterates[0]).abs().max() > 1e-2
    for rank, there in enumerate(four.run(iterates_there, name)):
        assert (there - iterates[:, rank]).abs().max() < 1e-9


# ---- a problem whose nodes disagree: node i minimises curvature_i / 2 (x - target_i)^2 -----------------------------------------------

CURVATURE = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None]
TARGET = torch.tensor([3.0, -2.0, 1.0, 5.0], dtype=torch.float64)[:, None]
BEST = float((CURVATURE * TARGET).sum() / CURVATURE.sum())


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def path_of(algorithm: GossipPGA, steps: int, lr: float = 0.05) -> Tensor:
    """The models of all nodes before each step, [steps, n]."""
    sim = rumor.Simulator(Number(), algorithm)
    opt, path = torch.optim.SGD(sim.parameters(), lr=lr), []
    for _ in range(steps):
        path.append(sim.X[:, 0])
        losses = sim(lambda model, c, t: (c / 2 * (model.x - t).square()).sum(), CURVATURE, TARGET)
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=lr)
    return torch.stack(path)


def test_quasi_global_momentum_is_its_equation() -> None:
    steps, lr, beta = 10, 0.05, 0.8
    J = torch.full((N, N), 1 / N, dtype=torch.float64)
    ring = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.float64) / 3
    x = m = torch.zeros(N, 1, dtype=torch.float64)
    for k, found in enumerate(path_of(QuasiGlobalMomentum(rumor.ring(N), rumor.Periodic(3), momentum=beta), steps, lr)):
        torch.testing.assert_close(found, x[:, 0], rtol=0, atol=1e-12)
        g = CURVATURE * (x - TARGET)
        after = (J if (k + 1) % 3 == 0 else ring) @ (x - lr * (g + beta * (beta * m + g)))
        x, m = after, beta * m + (1 - beta) * (x - after) / lr


@pytest.mark.parametrize(
    ("plain", "method"),
    [
        (rumor.local_sgd(N, 8), Scaffold(rumor.isolated(N), rumor.Periodic(8))),
        (rumor.gossip_pga(rumor.ring(N), 8), Scaffold(rumor.ring(N), rumor.Periodic(8))),
        (rumor.gossip_sgd(rumor.ring(N)), GradientTracking(rumor.ring(N), rumor.Never())),
    ],
    ids=["scaffold without gossip", "scaffold", "gradient tracking"],
)
def test_corrections_remove_the_bias_of_uneven_data(plain: GossipPGA, method: GossipPGA) -> None:
    """With a constant step, nodes that differ pull the plain method away from the best model; the corrected one gets there."""
    away = {name: float((path_of(one, 801)[-1].mean() - BEST).abs()) for name, one in (("plain", plain), ("corrected", method))}
    assert away["plain"] > 0.01
    assert away["corrected"] < 1e-6


def test_the_learning_rate_is_asked_for() -> None:
    sim = rumor.Simulator(Number(), METHODS["scaffold"]())
    with pytest.raises(ValueError, match=r"Scaffold divides by the learning rate: call step\(loss, lr=...\) with lr > 0, got lr=None"):
        sim.step()


def test_momentum_and_scaffold_send_no_more_than_gossip_pga() -> None:
    sent = {}
    for name, algorithm in {"plain": rumor.gossip_pga(rumor.ring(N), 3), **{name: make() for name, make in METHODS.items()}}.items():
        sim = rumor.Simulator(network(), algorithm)
        for _ in range(6):
            sim.step(torch.zeros(N), lr=0.1)
        sent[name] = sim.metrics.bytes_sent
    assert sent["quasi-global momentum"] == sent["scaffold"] == sent["plain"]
    assert sent["gradient tracking"] == 2 * sent["plain"]
