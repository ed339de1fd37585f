"""What mixing must keep: the mean, equality after a global round, and convergence to consensus."""

from typing import Any

import networkx as nx
import pytest
import torch

import rumor
from rumor.engines import StackedBuckets, operators, stacked
from rumor.methods import Nodes, State
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, N, flat, lopsided, network

TOPOLOGIES = [
    *(build(n) for n in (2, 3, 5, 8) for build in (rumor.ring, rumor.grid, rumor.torus, rumor.exponential, rumor.one_peer_exponential)),
    *(rumor.base_graph(n, peers) for n in (3, 5, 8) for peers in (1, 2)),
    rumor.complete(4),
    rumor.ring(20),
    rumor.from_networkx(nx.star_graph(6)),
    rumor.from_matrices([rumor.ring(5).W(), rumor.exponential(5).W()]),
]


def consensus(algorithm: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
    """`steps` steps without gradients, from models that differ."""
    nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(x.shape[-2]))
    state = algorithm.start(nodes)
    for _ in range(steps):
        algorithm.step(nodes, state, None, 0.1)
    return x


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_thousand_steps_of_gossip_reach_consensus(topology: rumor.Topology, delay: int) -> None:
    x = torch.randn(topology.n, 3, dtype=torch.float64)
    mean = x.mean(dim=0)
    after = consensus(rumor.gossip_sgd(topology, delay=delay), x, 1000)
    assert (after - mean).abs().max() < 1e-9


class InPlace(operators.Gather):
    """Mixes in place, hidden from autograd, as the kernel on a GPU does."""

    in_place = True
    calls = 0

    def apply(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        InPlace.calls += out is x
        super().apply(x.clone(), out.data)
        return out


@pytest.mark.parametrize("state", [None, "always"])
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"average_rounds": 2}, {"bits": 16}], ids=str)
def test_gossip_in_place_changes_no_number(options: dict[str, Any], state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = torch.randn(7, N, 4, 5, dtype=torch.float64)

    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        sim = rumor.Simulator(torch.nn.Linear(5, 3).double(), rumor.gossip_pga(rumor.ring(N), H=3, **options))
        opt = torch.optim.SGD(sim.parameters(), lr=0.1, momentum=0.9)
        sim.average_state(opt, state)
        for x in batches:
            sim(lambda model, x: model(x).square().mean(), x).sum().backward()
            opt.step()
            opt.zero_grad()
            sim.step()
        return sim.X

    expected = trained()
    for name in ("Csr", "Gather"):
        monkeypatch.setattr(stacked, name, InPlace)
    InPlace.calls = 0
    assert (trained() - expected).abs().max() < 1e-14
    tensors = 2 if state is None else 4  # weight and bias, and their momentum
    keeps_sent = "delay" in options or "bits" in options
    assert InPlace.calls == (0 if keeps_sent else 5 * tensors)  # 7 steps, of which 2 are global


def test_a_backward_through_a_model_that_was_mixed_in_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Csr", "Gather"):
        monkeypatch.setattr(stacked, name, InPlace)
    sim = rumor.Simulator(torch.nn.Linear(5, 3), rumor.gossip_sgd(rumor.ring(N)))
    loss = sim(lambda model, x: model(x).tanh().square().mean() * model.weight.square().sum(), torch.randn(N, 4, 5)).sum()
    sim.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("topology", [rumor.ring(5), rumor.one_peer_exponential(8), lopsided()], ids=str)
def test_push_sum_reaches_consensus_on_the_mean(topology: rumor.Topology, delay: int) -> None:
    x = torch.randn(topology.n, 3, dtype=torch.float64)
    mean = x.mean(dim=0)
    assert (consensus(rumor.osgp(topology, delay=delay), x, 1000) - mean).abs().max() < 1e-9


@pytest.mark.parametrize("use_csr", [True, False])
def test_a_model_that_is_not_finite_reaches_only_its_neighbours(use_csr: bool) -> None:
    topology, x = rumor.grid(9), torch.zeros(9, 2)  # nodes have different degrees
    x[0] = torch.nan
    engine = rumor.Stacked(9)
    engine._use_csr = use_csr and engine._use_csr
    mixed = engine.gossip(x, topology, 0).wait().x
    assert {i for i in range(9) if mixed[i].isnan().any()} == {0, *topology.sends_to(0, 0)}


def mass(x: torch.Tensor, state: State) -> torch.Tensor:
    """The models as they will be once what is in flight has arrived, and what codes have left out of them so far."""
    flight = state.in_flight
    if flight is not None and not flight.relayed:
        x = x + flight.pending[0].wait().x - flight.sent[0].tensor
    return x + state.buckets["left_out"][0] if "left_out" in state.buckets else x


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not any(method in name for method in ("gp", "slowmo", "diloco"))])
def test_every_step_keeps_the_mean_of_the_nodes(name: str) -> None:
    """With codes, what a global round has left out counts as well (it is sent at the next one), and so does what is in flight."""
    algorithm, x = ALGORITHMS[name](), torch.randn(N, 6, dtype=torch.float64)
    nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(N))
    state = algorithm.start(nodes)
    loss = torch.ones(N, 1, dtype=torch.float64)
    for _ in range(30):
        x += torch.randn(N, 6, dtype=torch.float64)  # any local step
        mean = mass(x, state).mean(dim=0)
        algorithm.step(nodes, state, loss if algorithm.needs_loss else None, 0.1)
        assert (mass(x, state).mean(dim=0) - mean).abs().max() < 1e-12


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("topology", [rumor.one_peer_exponential(N), lopsided()], ids=str)
def test_push_sum_keeps_the_mean_of_nodes_and_messages_in_flight(topology: rumor.Topology, delay: int) -> None:
    algorithm, z = rumor.osgp(topology, delay=delay), torch.randn(N, 6, dtype=torch.float64)
    nodes = Nodes(StackedBuckets([z]), StackedBuckets([]), rumor.Stacked(N))
    state = algorithm.start(nodes)
    mass, seen = z.sum(dim=0), []
    for _ in range(30):
        gradient = torch.randn(N, 6, dtype=torch.float64)
        z -= gradient
        mass = mass - gradient.sum(dim=0)
        algorithm.step(nodes, state, None, None)
        flying = [message.wait() for message in state.in_flight.pending] if state.in_flight else []
        total = state.buckets["x"][0].sum(dim=0) + sum(mixed.x.sum(dim=0) for mixed in flying)
        weight = state.scalars["w"].sum() + sum(mixed.scalars.sum() for mixed in flying)
        assert (total - mass).abs().max() < 1e-12
        assert abs(weight - N) < 1e-12
        assert (z - state.buckets["x"][0] / state.scalars["w"]).abs().max() < 1e-12
        seen.append(state.scalars["w"].clone())
    algorithm.finish(nodes, state)
    assert (z - mass / N).abs().max() < 1e-12, "one ends with the mean of all mass"
    if topology.push_only:
        assert (seen[-1] - seen[-1].mean()).abs().max() > 0.05, "the weights must not be all alike here"


def after_a_global_round(rank: int, name: str) -> torch.Tensor:
    model = network(torch.float32)
    averager = rumor.Averager(model, ALGORITHMS[name]())
    models = []
    for _ in range(6):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))
        rounds = averager.metrics.rounds["global"]
        averager.step(1.0, lr=0.1)
        if averager.metrics.rounds["global"] > rounds:
            models.append(flat(model))
    return torch.stack(models)


AVERAGED = ["parallel_sgd", "local_sgd", "gossip_pga", "gossip_aga", "gossip_pga by learning rate", "slowmo", "diloco"]
IN_CODES = ["parallel_sgd 4 bits", "local_sgd 8 bits", "gossip_pga 16 bits", "gossip_aga 4 bits", "slowmo 4 bits", "diloco gossip 4 bits"]


@pytest.mark.parametrize("name", [*AVERAGED, *IN_CODES])
def test_after_a_global_round_all_nodes_are_bitwise_equal(four: Cluster, name: str) -> None:
    results = four.run(after_a_global_round, name)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_trials_are_independent(name: str) -> None:
    """A leading dimension gives what as many separate runs give; Gossip-AGA, whose trials would have periods of their own, refuses."""
    algorithm, start = ALGORITHMS[name](), torch.randn(2, 3, N, 5, dtype=torch.float64)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(N))
        state = algorithm.start(nodes)
        for _ in range(7):
            x.mul_(0.9).add_(0.1)
            algorithm.step(nodes, state, torch.ones(*x.shape[:-1], 1) if algorithm.needs_loss else None, 0.1)
        return x

    if algorithm.needs_loss:
        with pytest.raises(ValueError, match="run the trials one by one"):
            run(start)
    else:
        alone = torch.stack([torch.stack([run(start[a, b]) for b in range(3)]) for a in range(2)])
        assert (run(start) - alone).abs().max() < 1e-14


@pytest.mark.parametrize("topology", [rumor.exponential(7), rumor.one_peer_exponential(6), lopsided()], ids=str)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_columns", [2, 2**22])
def test_stacked_gossip_is_the_dense_product(
    topology: rumor.Topology, own: bool, dtype: torch.dtype, most_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "MOST_COLUMNS", most_columns)
    for csr in (True, False):
        engine = rumor.Stacked(topology.n)
        engine._use_csr = csr  # both ways, whichever this machine would take
        x = torch.randn(2, topology.n, 5).to(dtype)
        for k in range(3):
            W = topology.W(k)
            expected = (W if own else W - W.diag().diag()) @ x.double()
            mixed = engine.gossip(x, topology, k, own=own).wait().x
            assert mixed.dtype == torch.promote_types(dtype, torch.float32)
            assert (mixed - expected).abs().max() < (1e-14 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", [rumor.gossip_sgd, rumor.osgp])
@pytest.mark.parametrize("topology", [rumor.ring(5), rumor.grid(6), rumor.exponential(7)], ids=str)
def test_the_mean_does_not_drift_in_single_precision(topology: rumor.Topology, method: Any, delay: int) -> None:
    """In float32 three times 1/3 is not 1: weights that don't sum to 1 would move the mean by 3e-8 at every step, always the same way."""
    algorithm = method(topology, delay=delay)
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(topology.n, 2000)
    nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(topology.n))
    state = algorithm.start(nodes)
    moved = x.double().mean(dim=0)
    for _ in range(1000):
        change = torch.randn(x.shape, generator=generator) * 1e-3  # so that rounding is not at rest
        moved += change.double().mean(dim=0)
        x += change
        algorithm.step(nodes, state, None, None)
    algorithm.finish(nodes, state)
    # on some processors, the order of roundings alone moves it by 5e-6
    assert (x.double().mean(dim=0) - moved).mean().abs() < 1e-5  # 2.5e-5 or more on a ring with plainly rounded weights


def test_garbage_in_the_scratch_does_not_leak_into_the_next_step() -> None:
    engine, x = rumor.Stacked(4), torch.full((4, 3), float("nan"))
    engine.gossip(x, rumor.ring(4), 0).wait()
    assert torch.equal(engine.gossip(torch.ones(4, 3), rumor.ring(4), 0).wait().x.round(decimals=6), torch.ones(4, 3))


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes tensors \[\.\.\., 4, d\], got \[3, 5\]"):
        rumor.Stacked(4).gossip(torch.zeros(3, 5), rumor.ring(4), 0)
    with pytest.raises(ValueError, match="for n=5 nodes, but the engine has 4"):
        rumor.Stacked(4).gossip(torch.zeros(4, 5), rumor.ring(5), 0)
