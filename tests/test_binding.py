"""Methods that do not know n: a builder in the place of a topology, bound by whoever runs it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rumor
from tests.cluster import Cluster
from tests.problems import N, flat, network

PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "parallel_sgd": (rumor.parallel_sgd, lambda: rumor.parallel_sgd(N)),
    "local_sgd": (lambda: rumor.local_sgd(H=3), lambda: rumor.local_sgd(N, 3)),
    "gossip_sgd": (lambda: rumor.gossip_sgd(rumor.ring), lambda: rumor.gossip_sgd(rumor.ring(N))),
    "gossip_pga": (
        lambda: rumor.gossip_pga(rumor.one_peer_exponential, H=3, delay=1),
        lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), H=3, delay=1),
    ),
    "gossip_aga": (lambda: rumor.gossip_aga(rumor.exponential, 6), lambda: rumor.gossip_aga(rumor.exponential(N), 6)),
    "slowmo": (lambda: rumor.slowmo(rumor.ring, 3), lambda: rumor.slowmo(rumor.ring(N), 3)),
    "by learning rate": (
        lambda: rumor.local_sgd(H=rumor.LearningRate(3, 24)),
        lambda: rumor.local_sgd(N, rumor.LearningRate(3, 24, 1.0)),
    ),
    "diloco": (lambda: rumor.diloco(H=3), lambda: rumor.diloco(N, 3)),
    "diloco gossip": (lambda: rumor.diloco(H=3, topology=rumor.ring), lambda: rumor.diloco(N, 3, topology=rumor.ring(N))),
    "osgp": (lambda: rumor.osgp(rumor.ring), lambda: rumor.osgp(rumor.ring(N))),
    "peers": (
        lambda: rumor.gossip_pga(partial(rumor.base_graph, peers=2), 3),
        lambda: rumor.gossip_pga(rumor.base_graph(N, peers=2), 3),
    ),
    "a shape": (
        lambda: rumor.gossip_pga(partial(rumor.grid, shape=(2, 2)), 3),
        lambda: rumor.gossip_pga(rumor.grid(N, shape=(2, 2)), 3),
    ),
    "a function": (
        lambda: rumor.gossip_pga(lambda n: rumor.from_matrix(rumor.ring(n).W()), 3),
        lambda: rumor.gossip_pga(rumor.from_matrix(rumor.ring(N).W()), 3),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_bound_is_what_it_would_have_been(name: str) -> None:
    builder, known = PAIRS[name]
    bound = builder().bind(N)
    assert bound == known()
    assert repr(bound) == repr(known())
    assert bound.bind(N) is bound


def test_an_unbound_method_prints_the_name_of_its_builder() -> None:
    assert repr(rumor.gossip_pga(rumor.ring, H=6)) == "GossipPGA(topology=ring, schedule=Periodic(H=6), delay=0, average_rounds=None)"
    schedule = "LearningRate(H_min=3, H_max=24, power=2.0)"
    by_lr = rumor.gossip_pga(rumor.ring, H=rumor.LearningRate(3, 24, power=2.0))
    assert repr(by_lr) == f"GossipPGA(topology=ring, schedule={schedule}, delay=0, average_rounds=None)"
    fields = "topology=isolated, schedule=Periodic(H=6), delay=0, average_rounds=None, outer_lr=0.7, outer_momentum=0.9"
    assert repr(rumor.diloco(H=6)) == f"DiLoCo({fields})"
    assert rumor.gossip_pga(rumor.ring, H=6) == rumor.gossip_pga(rumor.ring, H=6)
    assert rumor.gossip_pga(rumor.ring, H=6) != rumor.gossip_pga(rumor.torus, H=6)


def test_an_unbound_method_prints_and_compares_the_options_of_its_builder() -> None:
    two, same, three = (rumor.gossip_sgd(partial(rumor.base_graph, peers=peers)) for peers in (2, 2, 3))
    assert "topology=partial(base_graph, peers=2)," in repr(two)
    assert two == same
    assert len({two.topology, same.topology, three.topology}) == 2


def trained(rank: int, name: str, which: int, folder: str | None = None) -> Tensor:
    model = network()
    averager = rumor.Averager(model, PAIRS[name][which]())
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * (rank + 1)
        averager.step(1.0, lr=0.1)
    if folder is not None:
        rumor.save(folder, averager)
        other = rumor.Averager(network(), PAIRS[name][1 - which]())  # what is bound is compared: it fits
        assert rumor.load(folder, other) == 5
    averager.finish()
    return flat(model)


@pytest.mark.parametrize("name", ["gossip_pga", "local_sgd", "diloco"])
def test_the_averager_binds_to_its_group(four: Cluster, name: str, tmp_path: Path) -> None:
    by_builder, by_topology = four.run(trained, name, 0, str(tmp_path)), four.run(trained, name, 1)
    for one, other in zip(by_builder, by_topology, strict=True):
        assert torch.equal(one, other)


def some_with_a_builder(rank: int) -> str:
    topology = rumor.ring if rank % 2 else rumor.ring(N)
    return repr(rumor.Averager(network(), rumor.gossip_sgd(topology)))  # type: ignore[arg-type]


def test_ranks_compare_what_is_bound(four: Cluster) -> None:
    assert all("topology=ring(4)" in text for text in four.run(some_with_a_builder))


def test_the_simulator_binds_to_n() -> None:
    sim = rumor.Simulator(network(), rumor.gossip_pga(rumor.ring, H=6), n=32)
    assert sim.n == 32
    assert "topology=ring(32)" in repr(sim)
    sim.restart(rumor.local_sgd(H=2))
    assert "isolated(32)" in repr(sim)
    assert rumor.Simulator(network(), rumor.gossip_pga(rumor.ring(5), H=6), n=5).n == 5


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: rumor.Simulator(network(), rumor.parallel_sgd()), r"fits any number of nodes, so the Simulator must be told: .*n=32"),
        (lambda: rumor.Simulator(network(), rumor.gossip_sgd(rumor.ring(4)), n=5), r"ring\(4\) is for n=4 nodes, got n=5: leave out n"),
        (
            lambda: rumor.gossip_sgd(rumor.ring(4)).bind(5),
            r"for n=4 nodes, but the group has 5: build it with ring\(5\), or pass rumor.ring",
        ),
        (
            lambda: rumor.gossip_sgd(rumor.base_graph(4, peers=2)).bind(5),
            r"build it with base_graph\(5, peers=2\), or pass functools.partial\(rumor.base_graph, peers=2\), which fits any number",
        ),
        (lambda: rumor.local_sgd(4, 2).bind(5), r"use local_sgd\(H=...\)"),
        (lambda: rumor.diloco(4, 2).bind(5), r"or diloco\(H=...\), which fit any number of nodes"),
        (lambda: rumor.diloco(6), r"diloco needs the period H, in steps: diloco\(H=100\)"),
        (lambda: rumor.diloco(5, 2, topology=rumor.ring(4)), r"for n=4 nodes, but the group has 5"),
        (lambda: rumor.parallel_sgd(4).bind(5), r"use parallel_sgd\(\)"),
        (lambda: rumor.gossip_sgd(lambda n: n).bind(5), r"must build a rumor.Topology for n nodes, but returned 5"),
        (lambda: rumor.gossip_sgd("ring"), r"or a builder such as rumor.ring, got 'ring'"),
        (lambda: rumor.local_sgd(6), r"local_sgd needs the period H, in steps: local_sgd\(H=6\)"),
        (lambda: rumor.gossip_pga(rumor.isolated, 4, average_rounds=2).bind(4), "without links, gossip can't average"),
        (lambda: rumor.gossip_pga(rumor.ring, 4, delay=2), "delay must be 0 or 1"),
        (lambda: rumor.theory.mixing(rumor.gossip_pga(rumor.ring, H=6)), r"not bound to a number of nodes.*bind\(n\)"),
    ],
)
def test_what_cannot_be_bound_is_refused(build: Callable[[], object], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        build()
