"""Small training problems and the one table of algorithms that drives the property tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import networkx as nx
import torch
from torch import Tensor, nn

import rumor

N = 4


def lopsided() -> rumor.Topology:
    """A directed graph of 4 nodes whose push-sum weights are not 1."""
    return rumor.from_digraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))


def uneven() -> rumor.Topology:
    """Neither symmetric nor of equal weights: doubly stochastic all the same."""
    permutations = [torch.eye(N, dtype=torch.float64)[list(p)] for p in ([0, 1, 2, 3], [1, 2, 3, 0], [2, 0, 3, 1])]
    return rumor.from_matrix(sum(w * P for w, P in zip((0.5, 0.375, 0.125), permutations, strict=True)))


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "parallel_sgd": lambda: rumor.parallel_sgd(N),
    "local_sgd": lambda: rumor.local_sgd(N, 3),
    "gossip_sgd": lambda: rumor.gossip_sgd(rumor.ring(N)),
    "gossip_sgd one-peer": lambda: rumor.gossip_sgd(rumor.one_peer_exponential(N)),
    "gossip_sgd uneven": lambda: rumor.gossip_sgd(uneven()),
    "gossip_sgd delayed": lambda: rumor.gossip_sgd(rumor.ring(N), delay=1),
    "gossip_pga": lambda: rumor.gossip_pga(rumor.ring(N), 3),
    "gossip_pga delayed": lambda: rumor.gossip_pga(rumor.exponential(N), 3, delay=1),
    "gossip_pga by gossip": lambda: rumor.gossip_pga(rumor.ring(N), 3, average_rounds=3),
    "gossip_pga by gossip delayed": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), 3, average_rounds=2, delay=1),
    "gossip_aga": lambda: rumor.gossip_aga(rumor.ring(N), warmup=9, H_init=2, H_max=8),
    "gossip_aga delayed": lambda: rumor.gossip_aga(rumor.one_peer_exponential(N), warmup=9, H_init=2, H_max=8, delay=1),
    "gossip_aga by gossip": lambda: rumor.gossip_aga(rumor.ring(N), warmup=9, H_init=2, H_max=8, average_rounds=2),
    "gossip_aga by gossip delayed": lambda: rumor.gossip_aga(rumor.ring(N), warmup=9, H_init=2, H_max=8, average_rounds=2, delay=1),
    "gossip_pga by learning rate": lambda: rumor.gossip_pga(rumor.ring(N), rumor.LearningRate(2, 8)),
    "gossip_pga by learning rate delayed": lambda: rumor.gossip_pga(rumor.exponential(N), rumor.LearningRate(1, 8, power=2), delay=1),
    "gossip_pga by learning rate by gossip": lambda: rumor.gossip_pga(rumor.ring(N), rumor.LearningRate(2, 8), average_rounds=2),
    "slowmo": lambda: rumor.slowmo(rumor.ring(N), 3, momentum=0.6, slow_lr=0.9),
    "slowmo by learning rate": lambda: rumor.slowmo(rumor.ring(N), rumor.LearningRate(2, 8), momentum=0.6),
    "diloco": lambda: rumor.diloco(N, 3),
    "parallel_sgd 4 bits": lambda: rumor.parallel_sgd(N, bits=4),
    "local_sgd 8 bits": lambda: rumor.local_sgd(N, 3, bits=8),
    "gossip_sgd 16 bits": lambda: rumor.gossip_sgd(uneven(), bits=16),
    "gossip_pga 16 bits": lambda: rumor.gossip_pga(rumor.ring(N), 3, bits=16),
    "gossip_pga 8 bits": lambda: rumor.gossip_pga(uneven(), 3, bits=8),
    "gossip_pga 4 bits": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), 3, bits=4),
    "gossip_pga 4 bits complete": lambda: rumor.gossip_pga(rumor.complete(N), 3, bits=4),
    "gossip_pga 4 bits delayed": lambda: rumor.gossip_pga(rumor.exponential(N), 3, delay=1, bits=4),
    "gossip_pga 16 bits by gossip": lambda: rumor.gossip_pga(rumor.ring(N), 3, average_rounds=3, bits=16),
    "gossip_pga 16 bits by gossip delayed": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), 3, average_rounds=2, delay=1, bits=16),
    "gossip_aga 4 bits": lambda: rumor.gossip_aga(rumor.ring(N), warmup=9, H_init=2, H_max=8, bits=4),
    "gossip_aga 8 bits delayed": lambda: rumor.gossip_aga(rumor.one_peer_exponential(N), warmup=9, H_init=2, H_max=8, delay=1, bits=8),
    "gossip_pga by learning rate 4 bits": lambda: rumor.gossip_pga(rumor.ring(N), rumor.LearningRate(2, 8, power=0.5), bits=4),
    "diloco gossip 4 bits": lambda: rumor.diloco(N, 3, 0.8, 0.5, topology=rumor.ring, bits=4),
    "slowmo 4 bits": lambda: rumor.slowmo(rumor.ring(N), 3, momentum=0.6, slow_lr=0.9, bits=4),
    "osgp": lambda: rumor.osgp(rumor.one_peer_exponential(N)),
    "osgp directed": lambda: rumor.osgp(lopsided()),
    "sgp directed": lambda: rumor.osgp(lopsided(), delay=0),
}

# On 5 nodes the base graph has weights other than 1/2, and steps in which a node rests. On 4 nodes it has neither.
FIVE_NODES: dict[str, Callable[[], Any]] = {
    "gossip_pga base graph by learning rate 4 bits": lambda: rumor.gossip_pga(
        rumor.base_graph(5), rumor.LearningRate(3, 24, power=0.5), bits=4
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.4
    return model


def batches(steps: int, n: int = N) -> tuple[Tensor, Tensor]:
    """[steps, n, 8, 5] inputs and [steps, n, 8] labels; heterogeneous: each node has inputs of its own mean and labels of its own."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(steps, n, 8, 5, generator=generator, dtype=torch.float64)
    x += torch.randn(n, 1, 5, generator=generator, dtype=torch.float64)
    y = (x[..., 0] > 0).long() + torch.arange(n)[:, None] % 2
    return x, y


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def decayed(optimizer: torch.optim.Optimizer, k: int) -> float:
    """The learning rate of step k, halved every 10 steps; set, and returned for methods that need it."""
    for group in optimizer.param_groups:
        group.setdefault("first_lr", group["lr"])
        group["lr"] = group["first_lr"] * 0.5 ** (k // 10)
    lr: float = optimizer.param_groups[0]["lr"]
    return lr


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_here(
    algorithm: Any, optimizer: str, steps: int, average_state: Literal["global", "always"] | None = None
) -> tuple[Tensor, Tensor, list[int | None]]:
    """On the stacked engine: iterates [steps, n, d], losses [steps, n] and the period after each step."""
    sim = rumor.Simulator(network(), algorithm)
    opt = OPTIMIZERS[optimizer](list(sim.parameters()))
    sim.average_state(opt, average_state)
    iterates, losses, periods = [], [], []
    for k, (x, y) in enumerate(zip(*batches(steps, sim.n), strict=True)):
        lr = decayed(opt, k)
        loss = sim(loss_fn, x, y)
        loss.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(loss, lr=lr)
        iterates.append(sim.X)
        losses.append(loss.detach())
        periods.append(sim.metrics.H)
    return torch.stack(iterates), torch.stack(losses), periods


def trained(
    model: nn.Module, averager: rumor.Averager, opt: torch.optim.Optimizer, rank: int, x: Tensor, y: Tensor, first: int = 0
) -> Iterator[Tensor]:
    """The training loop of one rank on batches [steps, ranks, ...], from step `first` on: its loss after each step."""
    for k in range(first, len(x)):
        lr = decayed(opt, k)
        loss = loss_fn(model, x[k, rank], y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss, lr=lr)
        yield loss.detach()


def train_there(rank: int, name: str, optimizer: str, steps: int) -> tuple[Tensor, Tensor, list[int | None]]:
    """One rank among real processes: its iterates [steps, d], losses [steps] and periods."""
    model = network()
    averager = rumor.Averager(model, ALGORITHMS[name]())
    opt = OPTIMIZERS[optimizer](model.parameters())
    iterates, losses, periods = [], [], []
    for loss in trained(model, averager, opt, rank, *batches(steps)):
        iterates.append(flat(model))
        losses.append(loss)
        periods.append(averager.metrics.H)
    return torch.stack(iterates), torch.stack(losses), periods
