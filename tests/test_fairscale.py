"""A check by strangers' code: fairscale's SGP and SlowMo (Assran et al., 2019; Wang et al., 2020) train as `osgp(delay=0)` and `slowmo` do.

Both step the optimizer first and mix then, so trajectories are compared after every step, in float64. What fairscale needs for that:
its CUDA calls replaced (benchmarks/peers.py); its slow buffers made before the first step, as in the paper (left alone it makes them
after it, from models that already differ); and, as it keeps them in float32 by an assertion, turned to float64 once they are made.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import rumor
from tests.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from contestants import Contestant, WithRumor
from peers import WithFairscale, imported, replace_cuda_calls_of_fairscale

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="fairscale is not installed: pip install fairscale==0.4.13"
)

N, H, STEPS = 4, 3, 13
SLOW = {"momentum": 0.6, "slow_lr": 0.8}
# who pushes to whom: two each, but three, two, two and one arrive, so that push-sum's weights matter
PUSHES = {0: [1, 2], 1: [2, 0], 2: [3, 0], 3: [0, 1]}


class InFloat64(WithFairscale):
    def start_slowmo(self) -> None:
        self.model.float()
        super().start_slowmo()
        self.model.double()
        if self.ddp.slowmo:
            self.ddp.old_params = self.ddp.old_params.double()
            self.ddp.global_momentum_buffer = self.ddp.global_momentum_buffer.double()


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.float().double()  # so that float32, too, holds it exactly


def theirs(rank: int, name: str) -> Contestant:
    slow = {"slow_momentum": SLOW["momentum"], "slowmo_lr": SLOW["slow_lr"]}
    make: dict[str, Any] = {
        "SGP": lambda: InFloat64(network, H),
        "SGP, lopsided": lambda: InFloat64(network, H, **lopsided(rank)),
        "SGP+SlowMo": lambda: InFloat64(network, H, **slow),
        "Local SGD": lambda: InFloat64(network, H, base="localsgd"),
        "Local SGD+SlowMo": lambda: InFloat64(network, H, base="localsgd", **slow),
        "Local SGD+SlowMo, sharded": lambda: InFloat64(network, H, base="localsgd", slowmo_memory_efficient=True, **slow),
    }
    return make[name]()


def ours(name: str) -> Contestant:
    one_peer = rumor.one_peer_exponential(N)
    # at a global step fairscale's graph waits for the next gossip step, and Rumor's goes on: a cycle of H steps starts both anew
    waits = rumor.from_matrices([one_peer.W(k) for k in (0, 1, 0)])
    slow_local = rumor.slowmo(rumor.isolated(N), H, **SLOW)
    return WithRumor(
        network,
        {
            "SGP": rumor.osgp(one_peer, delay=0),
            "SGP, lopsided": rumor.osgp(rumor.from_digraph(nx.DiGraph(PUSHES)), delay=0),
            "SGP+SlowMo": rumor.slowmo(waits, H, **SLOW),
            "Local SGD": rumor.local_sgd(N, H),
            "Local SGD+SlowMo": slow_local,
            "Local SGD+SlowMo, sharded": slow_local,
        }[name],
    )


def lopsided(rank: int) -> dict[str, Any]:
    from fairscale.experimental.nn.data_parallel.gossip.graph_manager import GraphManager
    from fairscale.experimental.nn.data_parallel.gossip.mixing_manager import UniformMixing

    class Lopsided(GraphManager):
        def _make_graph(self) -> None:
            for source, destinations in PUSHES.items():
                self._add_peers(source, destinations)

        def is_regular_graph(self) -> bool:
            return False

        def is_bipartite_graph(self) -> bool:
            return False

        def is_passive(self, rank: int | None = None) -> bool:
            return False

        def is_dynamic_graph(self) -> bool:
            return False

    class OneMessageForEachPeer(UniformMixing):
        """If told that weights are uniform, fairscale sends one tensor to both peers and frees it when the first has it."""

        def is_uniform(self) -> bool:
            return False

    graph = Lopsided(rank, N, peers_per_itr=2)
    return {"graph": graph, "mixing": OneMessageForEachPeer(graph, torch.device("cpu"))}


def trajectory(contestant: Contestant, rank: int) -> Tensor:
    """[steps, d]: the model that one sees after every step. The learning rate changes on the way."""
    data = torch.Generator().manual_seed(1 + rank)
    seen = []
    for k in range(STEPS):
        contestant.set_lr(0.2 if k < 7 else 0.05)
        x, y = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
        contestant.step(x, y)
        z = nn.utils.parameters_to_vector(contestant.model.parameters()).detach()
        ddp = getattr(contestant, "ddp", None)
        seen.append(z / ddp.ps_weight if ddp is not None and ddp.sgp else z.clone())
    return torch.stack(seen)


def both(rank: int, name: str) -> tuple[Tensor, Tensor]:
    replace_cuda_calls_of_fairscale()
    imported("fairscale.experimental.nn.data_parallel")  # with its warnings, which are errors here, let be
    torch.set_default_dtype(torch.float64)  # or fairscale's weight of 1/3 would be a float32
    return trajectory(theirs(rank, name), rank), trajectory(ours(name), rank)


@pytest.fixture(scope="module")
def strangers() -> Iterator[Cluster]:
    """Processes of their own: others are not to see what is replaced."""
    cluster = Cluster(N)
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("name", ["SGP", "SGP, lopsided", "SGP+SlowMo", "Local SGD", "Local SGD+SlowMo", "Local SGD+SlowMo, sharded"])
def test_fairscale_and_rumor_take_the_same_steps(strangers: Cluster, name: str):
    per_rank = strangers.run(both, name)
    for a, b in per_rank:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    ends = torch.stack([b[-1] for _, b in per_rank])
    assert ends.std(dim=0).max() > 1e-4  # the last step is not a global one: nodes differ, and yet each follows its counterpart
