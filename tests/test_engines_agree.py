"""Every algorithm on 4 real processes and on the stacked engine: the same iterates, losses and periods."""

import pytest
import torch

from tests.cluster import Cluster
from tests.problems import ALGORITHMS, OPTIMIZERS, train_here, train_there

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
    for name in ("gossip_aga", "gossip_aga delayed", "gossip_aga by gossip"):
        assert len(set(train_here(ALGORITHMS[name](), "nesterov", STEPS)[2])) > 1
