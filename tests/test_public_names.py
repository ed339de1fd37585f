"""The exported names, and what they take: users and checks outside this repo call them."""

import inspect

import pytest

import rumor


def test_names() -> None:
    named = "ring grid torus exponential one_peer_exponential base_graph complete isolated"
    topologies = f"{named} from_networkx from_matrix from_matrices from_digraph"
    methods = "parallel_sgd local_sgd gossip_sgd gossip_pga gossip_aga slowmo diloco osgp method"
    others = "Averager Simulator Stacked ProcessGroup Never Periodic Adaptive LearningRate theory elastic"
    wanted = f"{topologies} {methods} {others}".split()
    assert set(wanted) <= set(rumor.__all__)
    assert all(hasattr(rumor, name) for name in rumor.__all__)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (rumor.grid, "n shape=None"),
        (rumor.torus, "n shape=None"),
        (rumor.base_graph, "n peers=1"),
        (rumor.parallel_sgd, "n=None bits=32"),
        (rumor.local_sgd, "n=None H=None bits=32"),
        (rumor.gossip_sgd, "topology delay=0 average_rounds=None bits=32"),
        (rumor.gossip_pga, "topology H=6 delay=0 average_rounds=None bits=32"),
        (rumor.gossip_aga, "topology warmup H_init=4 H_max=64 exponent=1.0 delay=0 average_rounds=None bits=32"),
        (rumor.slowmo, "topology H momentum=0.5 slow_lr=1.0 bits=32"),
        (rumor.diloco, "n=None H=None outer_lr=0.7 outer_momentum=0.9 topology=None bits=32"),
        (rumor.osgp, "topology delay=1 bits=32"),
        (rumor.method, "text"),
        (rumor.elastic, "coordinator name=None min_nodes=1 timeout=None drop_slow=None job=None"),
        (rumor.LearningRate, "H_min H_max power=1.0"),
        (rumor.cost.Workload, "parameters compute bytes_per_parameter=4.0 steps=10000"),
        (rumor.cost.Link, "bandwidth latency=0.0 coding=3e-09"),
        (
            rumor.cost.Measured,
            "all_reduce_seconds gossip_seconds ddp_seconds=None coded_seconds=<factory> coded_ddp_seconds=<factory> step_seconds=<factory> "
            "elastic_seconds=<factory>",
        ),
        (rumor.cost.predict, "n workload network H=None H_init=4 H_max=64 topologies=None bits=32"),
        (rumor.cost.recommend, "n workload network H=None max_period=None iid=False bits=4"),
        (rumor.save, "folder averager position=None keep=2 others"),
        (rumor.load, "folder averager step=None from_mean=False others"),
        (rumor.Averager, "model algorithm group=None local_group=None lazy=False rescue=None optimizer=None average_state=None"),
        (rumor.Averager.step, "self loss=None lr=None"),
        (rumor.Simulator, "model algorithm n=None vmap=True"),
        (rumor.Simulator.step, "self losses=None lr=None"),
        (rumor.theory.C_beta, "beta H"),
        (rumor.theory.D_beta, "beta H"),
        (rumor.theory.mean_mixing, "topology periods"),
        (rumor.theory.transient_stage, "algorithm iid=False regime=None"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signatures(function: object, parameters: str) -> None:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    assert " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found) == parameters
