"""Every algorithm on 4 real processes and on the stacked engine: the same iterates, losses and periods."""

import pytest
import torch

import rumor
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, OPTIMIZERS, N, network, train_here, train_there

STEPS = 42


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_real_processes_and_stacked_engine_agree(four: Cluster, name: str, optimizer: str) -> None:
    iterates, losses, periods = train_here(ALGORITHMS[name](), optimizer, STEPS)
    assert torch.isfinite(iterates).all()
    assert (iterates[-1] - iterates[0]).abs().max() > 1e-2, "the run must go somewhere for agreement to mean anything"
    for rank, (there, there_losses, there_periods) in enumerate(four.run(train_there, name, optimizer, STEPS)):
        assert (there - iterates[:, rank]).abs().max() < 1e-9
        assert (there_losses - losses[:, rank]).abs().max() < 1e-9
        assert there_periods == periods


def test_the_adaptive_runs_do_adapt() -> None:
    """Otherwise equal periods above would show nothing."""
    for name in ALGORITHMS:
        if "aga" in name or "by learning rate" in name:
            assert len(set(train_here(ALGORITHMS[name](), "nesterov", STEPS)[2])) > 1, name


def periods_of(rank: int, lrs: list[list[float]], name: str) -> list[int | None]:
    """The period after each step, if this rank is given the learning rates lrs[rank]."""
    averager = rumor.Averager(network(), ALGORITHMS[name]())
    periods = []
    for lr in lrs[rank]:
        averager.step(lr=lr)
        periods.append(averager.metrics.H)
    averager.finish()
    return periods


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith("gossip_pga by learning rate")])
def test_nodes_with_different_learning_rates_agree_on_the_period(four: Cluster, name: str) -> None:
    """All use the mean. Alone, rank 3 would stay at its first period, and every other rank would have another one."""
    lrs = [[0.1 * 0.8 ** (k * (3 - rank)) for k in range(24)] for rank in range(N)]
    lrs[1][20] = float("nan")
    found = four.run(periods_of, lrs, name)
    assert all(periods == found[0] for periods in found), found
    assert len(set(found[0])) > 1
