"""The paper's reductions, exactly: which method is a special case of which."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rumor
from tests.cluster import Cluster
from tests.problems import OPTIMIZERS, N, batches, flat, loss_fn, network, train_here

STEPS = 25
RING = rumor.ring(N)


def same(one: Any, other: Any, optimizer: str = "nesterov", tolerance: float = 0.0) -> None:
    first, second = train_here(one, optimizer, STEPS), train_here(other, optimizer, STEPS)
    assert (first[0] - second[0]).abs().max() <= tolerance
    assert (first[1] - second[1]).abs().max() <= tolerance


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_identity_W_is_local_sgd(optimizer: str) -> None:
    same(rumor.gossip_pga(rumor.isolated(N), 4), rumor.local_sgd(N, 4), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_period_1_is_parallel_sgd(optimizer: str) -> None:
    same(rumor.gossip_pga(RING, 1), rumor.parallel_sgd(N), optimizer)
    same(rumor.local_sgd(N, 1), rumor.parallel_sgd(N), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_complete_W_is_parallel_sgd(optimizer: str) -> None:
    same(rumor.gossip_pga(rumor.complete(N), 4), rumor.parallel_sgd(N), optimizer)
    same(rumor.gossip_sgd(rumor.complete(N)), rumor.parallel_sgd(N), optimizer)
    same(rumor.gossip_sgd(rumor.from_matrix(rumor.complete(N).W())), rumor.parallel_sgd(N), optimizer, 1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("delay", [0, 1])
def test_infinite_period_is_gossip_sgd(optimizer: str, delay: int) -> None:
    same(rumor.gossip_pga(RING, 10**9, delay=delay), rumor.gossip_sgd(RING, delay=delay), optimizer)


def test_slowmo_without_momentum_is_gossip_pga() -> None:
    same(rumor.slowmo(RING, 4, momentum=0.0, slow_lr=1.0), rumor.gossip_pga(RING, 4), tolerance=1e-13)


def test_diloco_without_momentum_is_local_sgd_or_gossip_pga() -> None:
    same(rumor.diloco(N, 4, outer_lr=1.0, outer_momentum=0.0), rumor.local_sgd(N, 4))
    same(rumor.diloco(N, 4, outer_lr=1.0, outer_momentum=0.0, topology=RING), rumor.gossip_pga(RING, 4))


def test_a_schedule_as_H_is_the_method_of_that_schedule() -> None:
    assert rumor.gossip_pga(RING, H=rumor.Adaptive(9, 2, 8)) == rumor.gossip_aga(RING, 9, 2, 8)
    assert rumor.gossip_pga(RING, H=rumor.Periodic(4)) == rumor.gossip_pga(RING, 4)
    assert rumor.gossip_pga(RING, H=rumor.Never()) == rumor.gossip_sgd(RING)


def test_a_period_of_one_length_does_not_follow_the_learning_rate() -> None:
    same(rumor.gossip_pga(RING, H=rumor.LearningRate(4, 4)), rumor.gossip_pga(RING, 4))


def test_sgp_on_doubly_stochastic_W_is_gossip_sgd() -> None:
    same(rumor.osgp(RING, delay=0), rumor.gossip_sgd(RING), tolerance=1e-12)


def test_aga_that_never_leaves_its_warm_up_is_gossip_pga() -> None:
    same(rumor.gossip_aga(RING, warmup=10**9, H_init=4), rumor.gossip_pga(RING, 4))


def test_averaging_by_enough_gossip_is_averaging() -> None:
    peer = rumor.one_peer_exponential(N)
    same(rumor.gossip_pga(peer, 4, average_rounds=2), rumor.gossip_pga(peer, 4), tolerance=1e-12)


def test_one_peer_exponential_averages_16_nodes_exactly_in_4_steps() -> None:
    x = torch.randn(3, 16, 7, dtype=torch.float64)
    mean = x.mean(dim=-2, keepdim=True).expand_as(x).clone()
    engine, topology = rumor.Stacked(16), rumor.one_peer_exponential(16)
    for k in range(4):
        x = engine.gossip(x, topology, k).wait().x.clone()
    assert (x - mean).abs().max() < 1e-15


def ddp_against_parallel_sgd(rank: int, algorithm: rumor.GossipPGA) -> float:
    """The largest difference between an Averager's run and the same run in DistributedDataParallel."""
    ours, theirs = network(), network()
    averager, wrapped = rumor.Averager(ours, algorithm), DistributedDataParallel(theirs)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for m in (ours, theirs)]
    x, y = batches(40)
    worst = 0.0
    for k in range(40):
        for model, opt in zip((ours, wrapped), opts, strict=True):
            opt.zero_grad()
            loss_fn(model, x[k, rank], y[k, rank]).backward()
            opt.step()
        averager.step()
        worst = max(worst, (flat(ours) - flat(theirs)).abs().max().item())
    dist.barrier()
    return worst


@pytest.mark.parametrize("algorithm", [rumor.parallel_sgd(N), rumor.gossip_pga(RING, 1), rumor.gossip_sgd(rumor.complete(N))], ids=str)
def test_parallel_sgd_equals_real_ddp(four: Cluster, algorithm: rumor.GossipPGA) -> None:
    assert max(four.run(ddp_against_parallel_sgd, algorithm)) < 1e-12
