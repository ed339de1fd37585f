"""Every algorithm on 4 real processes and on the stacked engine: the same iterates, losses and periods."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import rumor
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, FIVE_NODES, OPTIMIZERS, N, batches, flat, network, train_here, train_there, trained

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


def train_and_resume(rank: int, name: str, stops: list[int]) -> tuple[Tensor, list[int | None]]:
    """One rank among 5 real processes, which goes on with new objects after each of `stops`: its iterates [steps, d] and periods."""
    state: dict[str, Any] | None = None
    iterates, periods, first = [], [], 0
    x, y = batches(STEPS, 5)
    for last in stops:
        model = network()
        averager = rumor.Averager(model, FIVE_NODES[name]())
        opt = OPTIMIZERS["nesterov"](model.parameters())
        if state is not None:
            for part, value in zip((model, opt, averager), state.values(), strict=True):
                part.load_state_dict(value)
        for _ in trained(model, averager, opt, rank, x[:last], y[:last], first):
            iterates.append(flat(model))
            periods.append(averager.metrics.H)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict(), "averager": averager.state_dict()})
        averager.finish()
        first = last
    return torch.stack(iterates), periods


@pytest.mark.parametrize("name", FIVE_NODES)
def test_five_processes_that_resume_agree_with_the_stacked_engine(five: Cluster, name: str) -> None:
    iterates, _, periods = train_here(FIVE_NODES[name](), "nesterov", STEPS)
    assert len(set(periods)) > 2
    stop = 13
    assert stop % FIVE_NODES[name]().topology.period
    for rank, (there, there_periods) in enumerate(five.run(train_and_resume, name, [stop, STEPS])):
        assert (there - iterates[:, rank]).abs().max() < 1e-9
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
