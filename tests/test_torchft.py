"""A check by strangers' code: torchft's DiLoCo (Douillard et al., 2023) trains as `diloco` does.

torchft's own class takes the outer step, with torch's SGD as the outer optimizer. Its Manager, which finds out who takes part, is replaced
by one that averages over a fixed gloo group. Trajectories are compared after every step, in float64.
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from tests.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from contestants import Contestant, WithRumor
from peers import imported

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft==0.2.0")

N, STEPS = 4, 13


class FixedMembers:
    """What DiLoCo calls of torchft's Manager, if all ranks of the default group always take part."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.averages = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool) -> Any:
        """Average in place. torchft waits for what this returns."""
        assert not should_quantize
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor /= dist.get_world_size()
        return work

    def current_step(self) -> int:
        return self.averages

    def should_commit(self) -> bool:
        self.averages += 1
        return True

    def start_quorum(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(self, *functions: object) -> None: ...


class Theirs(Contestant):
    def __init__(self, H: int, outer_lr: float, outer_momentum: float):
        super().__init__(network)
        outer = torch.optim.SGD(self.model.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
        library = imported("torchft.local_sgd")
        logging.getLogger("torchft").setLevel(logging.ERROR)
        library.DiLoCo(FixedMembers(), [self.model], self.opt, outer, sync_every=H).__enter__()  # now the optimizer's step averages


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trajectory(contestant: Contestant, rank: int) -> Tensor:
    """[steps, d]: the model after every step. The learning rate changes on the way."""
    data = torch.Generator().manual_seed(1 + rank)
    seen = []
    for k in range(STEPS):
        contestant.set_lr(0.2 if k < 7 else 0.05)
        x, y = torch.randn(8, 6, generator=data).double(), torch.randint(3, (8,), generator=data)
        contestant.step(x, y)
        seen.append(nn.utils.parameters_to_vector(contestant.model.parameters()).detach().clone())
    return torch.stack(seen)


def both(rank: int, H: int, outer_lr: float, outer_momentum: float) -> tuple[Tensor, Tensor]:
    ours = WithRumor(network, rumor.diloco(N, H, outer_lr, outer_momentum))
    return trajectory(Theirs(H, outer_lr, outer_momentum), rank), trajectory(ours, rank)


@pytest.fixture(scope="module")
def strangers() -> Iterator[Cluster]:
    """Processes of their own: torchft changes how they log."""
    cluster = Cluster(N)
    yield cluster
    cluster.stop()


@pytest.mark.parametrize(("H", "outer_lr", "outer_momentum"), [(3, 0.7, 0.9), (1, 0.4, 0.5), (5, 1.2, 0.8), (3, 1.0, 0.0)])
def test_torchft_and_rumor_take_the_same_steps(strangers: Cluster, H: int, outer_lr: float, outer_momentum: float) -> None:
    per_rank = strangers.run(both, H, outer_lr, outer_momentum)
    for a, b in per_rank:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    ends = torch.stack([b[-1] for _, b in per_rank])
    assert H == 1 or ends.std(dim=0).max() > 1e-4  # the last step is not a global one: nodes differ, and yet each follows its counterpart
