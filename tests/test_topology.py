"""Topologies: weights, spectra, and what is refused."""

from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch

import rumor
from tests import warm

BUILDERS = {
    "ring": rumor.ring,
    "grid": rumor.grid,
    "torus": rumor.torus,
    "exponential": rumor.exponential,
    "one_peer_exponential": rumor.one_peer_exponential,
    "base_graph": rumor.base_graph,
    "base_graph of 2 peers": partial(rumor.base_graph, peers=2),
    "complete": rumor.complete,
    "isolated": rumor.isolated,
    "path": lambda n: rumor.from_networkx(nx.path_graph(n)),
}
SIZES = [1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 16, 20]
each = pytest.mark.parametrize("name", BUILDERS)


@each
@pytest.mark.parametrize("n", SIZES)
def test_every_W_is_doubly_stochastic_and_told_consistently(name: str, n: int) -> None:
    topology = BUILDERS[name](n)
    assert topology.n == n
    for k in range(topology.period):
        W = topology.W(k)
        assert W.dtype == torch.float64
        assert W.shape == (n, n)
        assert (W >= 0).all()
        assert (W.sum(0) - 1).abs().max() < 1e-12
        assert (W.sum(1) - 1).abs().max() < 1e-12
        for i in range(n):
            hears, tells = topology.neighbors(i, k), topology.sends_to(i, k)
            assert i not in hears
            assert i not in tells
            assert hears == {j: W[i, j].item() for j in range(n) if j != i and W[i, j] > 0}
            assert tells == {j: W[j, i].item() for j in range(n) if j != i and W[j, i] > 0}
            assert topology.self_weight(i, k) == W[i, i].item()
        assert torch.equal(topology.W(k + topology.period), W)


@each
@pytest.mark.parametrize("n", SIZES)
def test_beta_and_contraction_are_norms_of_products(name: str, n: int) -> None:
    topology = BUILDERS[name](n)
    J = np.full((n, n), 1 / n)
    W = [topology.W(k).numpy() for k in range(3 * topology.period + 6)]

    def norm(start: int, length: int) -> float:
        product = np.eye(n)
        for k in range(start, start + length):
            product = W[k] @ product
        return float(np.linalg.norm(product - J, 2))

    p = topology.period
    assert topology.contraction(0) == 1
    for length in range(1, 6):
        assert topology.contraction(length) == pytest.approx(max(norm(k, length) for k in range(p)), abs=1e-12)
    whole = norm(0, p)
    assert topology.beta == pytest.approx(0.0 if whole < 1e-12 else whole ** (1 / p), abs=1e-10)
    if p == 1:
        assert all(topology.contraction(length) <= topology.beta**length + 1e-12 for length in range(1, 6))


@pytest.mark.parametrize(
    ("n", "ring", "grid", "torus", "exponential"),
    [(20, 0.96737, 0.91425, 0.72361, 0.66667), (50, 0.99474, 0.97848, 0.92361, 0.71429), (100, 0.99868, 0.97947, 0.92361, 0.75)],
)
def test_beta_of_the_papers_sizes(n: int, ring: float, grid: float, torus: float, exponential: float) -> None:
    found = [rumor.ring(n).beta, rumor.grid(n).beta, rumor.torus(n).beta, rumor.exponential(n).beta]
    assert found == pytest.approx([ring, grid, torus, exponential], abs=6e-6)


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_one_peer_exponential_averages_exactly_for_powers_of_two(n: int) -> None:
    topology = rumor.one_peer_exponential(n)
    assert topology.beta == 0
    assert topology.contraction(topology.period) == 0
    assert topology.contraction(topology.period - 1) == pytest.approx(1.0)
    product = torch.eye(n, dtype=torch.float64)
    for k in range(topology.period):
        product = topology.W(k) @ product
    assert torch.equal(product, torch.full((n, n), 1 / n, dtype=torch.float64))


@pytest.mark.parametrize("n", [20, 50, 100])
def test_one_peer_exponential_does_not_for_other_sizes(n: int) -> None:
    topology = rumor.one_peer_exponential(n)
    assert topology.contraction(topology.period) == pytest.approx(0.19, abs=0.01)


def test_base_graph_averages_exactly_for_every_n_with_few_peers() -> None:
    """One cycle, on all unit vectors at once. Small sizes reach every case: one group, several groups, groups of several parts."""
    for peers, n in [(peers, n) for peers in (1, 2, 3, 4) for n in (*range(1, 41), 50, 62, 93, 100, 125, 127)]:
        topology, product = rumor.base_graph(n, peers), torch.eye(n, dtype=torch.float64)
        for k in range(topology.period):
            W = topology.W(k)
            assert torch.equal(W, W.T), topology
            assert (W.sum(0) - 1).abs().max() < 1e-12, topology
            assert W.min() >= 0, topology
            assert ((W > 0).sum(1) - (W.diagonal() > 0).long()).max() <= peers, topology
            product = W @ product
        assert (product - 1 / n).abs().max() < 1e-12, topology
        assert topology.beta == 0, topology


def test_base_graph_has_the_period_of_the_paper() -> None:
    assert [rumor.base_graph(n).period for n in (1, 2, 5, 6, 20, 50)] == [1, 1, 5, 4, 7, 10]
    assert [rumor.base_graph(2**j).period for j in range(1, 11)] == [*range(1, 11)]
    assert [rumor.base_graph(27, peers).period for peers in (1, 2, 8, 26, 99)] == [9, 3, 2, 1, 1]
    bound = [2 * np.log(n) / np.log(peers + 1) + 2 for peers in (1, 2, 3, 4) for n in range(1, 200)]
    assert all(np.array([rumor.base_graph(n, peers).period for peers in (1, 2, 3, 4) for n in range(1, 200)]) <= bound)


def test_base_graph_is_exact_where_one_peer_exponential_is_not() -> None:
    """After as many steps as the cycle of base_graph has, from its start on. docs/algorithms.md has these figures."""
    for n, left in ((20, 0.18), (50, 0.16), (100, 0.18)):
        exact, other = rumor.base_graph(n), rumor.one_peer_exponential(n)
        assert exact.beta == 0
        assert other.contraction(exact.period) == pytest.approx(left, abs=0.005)


def test_base_graph_is_exact_from_any_step_on_after_two_cycles_but_one_step() -> None:
    for topology in (rumor.base_graph(20), rumor.base_graph(50, peers=2)):
        assert topology.contraction(topology.period) > 0.1, "the worst phase is not the start of the cycle"
        assert topology.contraction(2 * topology.period - 1) == 0
    assert rumor.base_graph(12, peers=2).contraction(rumor.base_graph(12, peers=2).period) == 0, "all factors are small: any phase does"


def test_base_graph_prints_its_peers_and_is_a_value() -> None:
    assert [repr(rumor.base_graph(50)), repr(rumor.base_graph(50, peers=2))] == ["base_graph(50)", "base_graph(50, peers=2)"]
    assert rumor.base_graph(50, peers=1) == rumor.base_graph(50)
    assert len({rumor.base_graph(50), rumor.base_graph(50, 2), rumor.base_graph(50, peers=2), rumor.base_graph(20)}) == 3


@pytest.mark.parametrize("peers", [0, -1, 2.0, "2", True])
def test_a_wrong_number_of_peers_is_refused(peers: object) -> None:
    with pytest.raises(ValueError, match=f"peers >= 1, a whole number.*got peers={peers!r}"):
        rumor.base_graph(8, peers)  # type: ignore[arg-type]


@pytest.mark.processes
def test_thousands_of_nodes_need_no_dense_matrix() -> None:
    """In a process that can't allocate one (800 MB for 10,000 nodes, 128 MB for 4,000), against closed forms where there are any."""
    script = """
import resource, math, rumor, networkx as nx, numpy.fft, numpy.linalg

def allow(more):
    used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + more * 2**20, resource.RLIM_INFINITY))

allow(500)
n = 10_000
ring = rumor.ring(n)
expected = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / n)
assert abs(ring.beta - expected) < 1e-12 and abs(ring.contraction(50) - expected**50) < 1e-9
torus = rumor.torus(n)
assert abs(torus.beta - (3 / 5 + 2 / 5 * math.cos(2 * math.pi / 100))) < 1e-9, torus.beta
assert abs(rumor.exponential(n).beta - (1 - 2 / 15)) < 1e-12
assert 0.999 < rumor.grid(n).beta < 1
assert rumor.complete(n).beta == 0 and rumor.isolated(n).beta == 1
peer = rumor.one_peer_exponential(n)
assert 0 < peer.beta < 1 and abs(peer.contraction(1) - 1) < 1e-6
exact = rumor.base_graph(n)
assert exact.period == 23 and exact.beta == 0 and abs(exact.contraction(1) - 1) < 1e-6
allow(80)
n = 4_000  # these two take long
path = rumor.grid(n, shape=(1, n))
assert abs(path.beta - (1 / 3 + 2 / 3 * math.cos(math.pi / n))) < 1e-6, path.beta
graph = rumor.from_networkx(nx.random_regular_graph(4, n, seed=0))
assert 0.8 < graph.beta < 0.95 and abs(graph.contraction(3) - graph.beta**3) < 1e-9
"""
    done = warm.run(["-c", script])
    assert done.returncode == 0, done.stderr


def test_large_norms_agree_with_dense_ones() -> None:
    """The sparse way (n > 256), on a matrix that is neither symmetric nor circulant, and on a cycle of such."""
    n, random = 300, np.random.default_rng(0)
    matrices = []
    for _ in range(2):
        shuffles = [np.eye(n)[random.permutation(n)] for _ in range(3)]
        matrices.append(0.4 * np.eye(n) + 0.2 * sum(shuffles))
    one, both = rumor.from_matrix(matrices[0]), rumor.from_matrices(matrices)
    J = np.full((n, n), 1 / n)
    assert one.beta == pytest.approx(np.linalg.norm(matrices[0] - J, 2), rel=1e-9)
    assert one.contraction(3) == pytest.approx(np.linalg.norm(np.linalg.matrix_power(matrices[0], 3) - J, 2), rel=1e-9)
    assert both.beta == pytest.approx(np.linalg.norm(matrices[1] @ matrices[0] - J, 2) ** 0.5, rel=1e-9)


def test_directed_graphs_hear_from_behind() -> None:
    """Node i hears from i - 2^j: what the equations say, and what a mirror image would get wrong."""
    assert set(rumor.exponential(8).neighbors(0)) == {7, 6, 4}
    assert set(rumor.exponential(8).sends_to(0)) == {1, 2, 4}
    assert [set(rumor.one_peer_exponential(8).neighbors(3, k)) for k in range(4)] == [{2}, {1}, {7}, {2}]


def test_nothing_about_a_topology_needs_torch_distributed() -> None:
    for n in (3, 8):
        assert not torch.distributed.is_initialized()
        assert rumor.exponential(n).neighbors(0)


def test_topologies_are_values() -> None:
    assert rumor.ring(8) == rumor.ring(8)
    assert rumor.ring(8) != rumor.ring(7)
    assert len({rumor.grid(6), rumor.grid(6), rumor.grid(6, shape=(1, 6))}) == 2
    W = rumor.ring(5).W()
    assert rumor.from_matrix(W) == rumor.from_matrix(W.numpy())
    assert rumor.from_matrix(W) != rumor.from_matrix(rumor.exponential(5).W())


def test_from_networkx_takes_any_connected_graph() -> None:
    graph = nx.MultiGraph([("a", "b"), ("a", "b"), ("b", "c"), ("c", "c")])  # a double edge and a loop
    topology = rumor.from_networkx(graph)
    expected = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    assert torch.allclose(topology.W(), expected, atol=1e-15)
    numbered = rumor.from_networkx(nx.Graph([(3, 0), (0, 1), (1, 2)]))
    assert set(numbered.neighbors(0)) == {1, 3}, "nodes that are called 0 to n-1 keep their numbers"


def test_from_digraph_is_column_stochastic_and_for_osgp_alone() -> None:
    digraph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    topology = rumor.from_digraph(digraph)
    expected = torch.tensor([[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]], dtype=torch.float64)
    assert torch.allclose(topology.W(), expected)
    assert rumor.osgp(topology).topology is topology
    with pytest.raises(ValueError, match="only osgp can use it"):
        rumor.gossip_pga(topology, 4)


PERMUTATION = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("matrices", "says"),
    [
        ([[[1.5, -0.5], [-0.5, 1.5]]], r"W_0\[0, 1\] = -0.5 in row 0 .*sums to 1.*negative"),
        ([[[0.5, 0.4], [0.5, 0.6]]], r"row 0 of W_0 sums to 0.9.*must sum to 1"),
        ([[[0.5, 0.5], [0.6, 0.4]]], r"column 0 of W_0 sums to 1.1.*must sum to 1"),
        ([[[float("nan"), 1.0], [1.0, 0.0]]], "nan"),
        ([[[0.5, 0.5]]], r"must be square.*\(1, 2\)"),
        ([[0.5, 0.5]], "must be square"),
        (["x"], "W_0 must be a square matrix of numbers: could not convert string to float: 'x'$"),
        ([], "at least one matrix"),
        ([np.eye(2) / 2 + 0.25, np.eye(3) / 2 + 1 / 6], "same size"),
        ([np.eye(3)], r"not connected: node \d \(row \d of W\) never hears.*isolated\(3\)"),
        ([PERMUTATION], "never mixes: like a permutation.*row sums to 1"),
        ([PERMUTATION, PERMUTATION], "never mixes"),
        ([np.kron([[0, 1], [1, 0]], np.full((2, 2), 0.5))], "never mixes"),  # two halves that swap: connected, of period 2
    ],
)
def test_matrices_that_cannot_work_are_refused(matrices: list, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rumor.from_matrices(matrices)


def test_a_cycle_may_connect_only_as_a_whole() -> None:
    half = 0.5
    pairs = [[[half, half, 0, 0], [half, half, 0, 0], [0, 0, half, half], [0, 0, half, half]]]
    pairs.append([[half, 0, 0, half], [0, half, half, 0], [0, half, half, 0], [half, 0, 0, half]])
    topology = rumor.from_matrices(pairs)
    assert topology.period == 2
    assert topology.beta == 0
    with pytest.raises(ValueError, match="not connected"):
        rumor.from_matrices(pairs[:1])


@pytest.mark.parametrize("n", [0, -1, 2.0, "8", True])
def test_a_wrong_n_is_refused(n: object) -> None:
    for build in (rumor.ring, rumor.grid, rumor.complete, rumor.one_peer_exponential, rumor.base_graph):
        with pytest.raises(ValueError, match="n >= 1"):
            build(n)  # type: ignore[operator]


def test_other_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \* columns"):
        rumor.grid(6, shape=(2, 2))
    with pytest.raises(ValueError, match="node 4 is not in ring"):
        rumor.ring(4).neighbors(4)
    with pytest.raises(ValueError, match="not connected"):
        rumor.from_networkx(nx.Graph([(0, 1), (2, 3)]))
    with pytest.raises(ValueError, match="from_digraph"):
        rumor.from_networkx(nx.DiGraph([(0, 1), (1, 0)]))
    with pytest.raises(ValueError, match="not connected"):
        rumor.from_digraph(nx.DiGraph([(0, 1), (1, 2)]))


@pytest.mark.parametrize(("topology", "steps"), [(rumor.ring(8), 4), (rumor.complete(5), 1), (rumor.one_peer_exponential(8), 3)])
def test_reach_is_the_time_in_which_word_gets_round(topology: rumor.Topology, steps: int) -> None:
    assert topology.reach == steps
    assert rumor.isolated(3).reach is None


def test_no_graph_without_links_mixes_worse_than_not_at_all():
    """Rounding must not lift beta above 1."""
    assert all(rumor.isolated(n).beta == 1 for n in range(2, 400))
