"""Topologies: who talks to whom at step k, and with what weight.

A topology is a value: building one needs no process group. It holds one mixing matrix W, or a cycle of them that step k walks
through. Row i of W says what node i makes of what it hears, x_i <- sum_j W[i, j] x_j.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rumor import spectrum
from rumor.connectivity import check_mixing, steps_to_reach_all
from rumor.matrix import Circulant, Matrix, Sparse, dense

TOLERANCE = 1e-12  # of the sums of rows and columns


class Topology:
    """A mixing matrix W, or a cycle of them; built by `ring(n)`, `grid(n)`, `from_matrix(W)` and their like.

    Attributes:
        n: number of nodes.
        period: number of matrices in the cycle (1 if static).
        push_only: column stochastic only (`from_digraph`): for `osgp`, and for nothing else.

    >>> ring(4).neighbors(0)
    {1: 0.3333333333333333, 3: 0.3333333333333333}
    """

    def __init__(self, name: str, matrices: Sequence[Matrix], push_only: bool = False):
        self.name = name
        self.n = matrices[0].n
        self.period = len(matrices)
        self.push_only = push_only
        self._matrices = tuple(matrices)
        self._found: dict[int, float] = {}  # contraction(l), once computed

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def matrix(self, k: int = 0) -> Matrix:
        """The mixing matrix of step k, in its sparse form."""
        return self._matrices[k % self.period]

    def W(self, k: int = 0) -> Tensor:
        """The mixing matrix of step k, dense: `[n, n]`, float64."""
        return torch.from_numpy(dense(self.matrix(k)))

    def neighbors(self, i: int, k: int = 0) -> dict[int, float]:
        """{j: W[i, j]} for those that node i receives from at step k, itself left out."""
        return {j: w for j, w in sorted(self.matrix(k).row(self._node(i)).items()) if j != i}

    def sends_to(self, i: int, k: int = 0) -> dict[int, float]:
        """{j: W[j, i]} for those that node i sends to at step k, itself left out."""
        return {j: w for j, w in sorted(self.matrix(k).column(self._node(i)).items()) if j != i}

    def self_weight(self, i: int, k: int = 0) -> float:
        """W[i, i] at step k."""
        return self.matrix(k).row(self._node(i)).get(i, 0.0)

    @cached_property
    def has_links(self) -> bool:
        """False where W = I: a gossip step is then no step at all."""
        return any(any(i != j for j in W.row(i)) for W in self._matrices for i in range(W.n))

    @cached_property
    def is_complete(self) -> bool:
        """True where W = 11'/n: one gossip step is the global average."""
        W = self._matrices[0]
        return self.period == 1 and isinstance(W, Circulant) and len(W.weights) == W.n and len(set(W.weights.values())) == 1

    @cached_property
    def beta(self) -> float:
        """`||W - 11'/n||_2`; of a cycle of p, `||W_(p-1) ... W_0 - 11'/n||_2 ** (1/p)`.

        >>> round(ring(20).beta, 5), one_peer_exponential(16).beta
        (0.96737, 0.0)
        """
        return float(spectrum.distance_to_average(self._matrices) ** (1 / self.period))

    def contraction(self, l: int) -> float:  # noqa: E741 (the paper's letter)
        """max over the phases k of ||W_(k+l-1) ... W_k - 11'/n||_2: what l steps leave of the disagreement.

        1 for l = 0 and at most beta**l for a static W; the theory's C and D are sums of it.

        >>> [one_peer_exponential(8).contraction(l) for l in (0, 1, 2, 3)]
        [1.0, 1.0, 1.0, 0.0]
        """
        if l < 0:
            raise ValueError(f"contraction(l) is of l >= 0 steps, got l={l}")
        if l not in self._found:
            self._found[l] = self._contraction(l)
        return self._found[l]

    def _contraction(self, l: int) -> float:  # noqa: E741
        if l == 0:
            return 1.0
        if self.period == 1 and self._matrices[0].is_symmetric and not self.push_only:
            return self.contraction(1) ** l if l > 1 else spectrum.distance_to_average(self._matrices)
        phases = range(self.period)
        return max(spectrum.distance_to_average([self.matrix(k + s) for s in range(l)]) for k in phases)

    @cached_property
    def reach(self) -> int | None:
        """Steps after which word from any node, sent at any phase, is with all of them; None where it never is."""
        return steps_to_reach_all(self._matrices) if self.has_links or self.n == 1 else None

    def _node(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise ValueError(f"node {i} is not in {self}, whose nodes are 0 to {self.n - 1}")
        return i


def _size(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a topology needs n >= 1 nodes, a whole number, got n={n!r}")
    return n


def _circulant(name: str, n: int, *phases: dict[int, float]) -> Topology:
    return Topology(f"{name}({n})", [Circulant(n, weights) for weights in phases])


def isolated(n: int) -> Topology:
    """W = I: no one talks to anyone (Local SGD's)."""
    return _circulant("isolated", _size(n), {0: 1.0})


def complete(n: int) -> Topology:
    """W = 11'/n: everyone talks to everyone."""
    return _circulant("complete", _size(n), dict.fromkeys(range(n), 1 / n))


def ring(n: int) -> Topology:
    """A circle; weight 1/3 on both neighbours and on oneself (1/2 if n = 2)."""
    around = {o % _size(n) for o in (-1, 0, 1)}
    return _circulant("ring", n, dict.fromkeys(around, 1 / len(around)))


def exponential(n: int) -> Topology:
    """Static and directed: node i hears from i - 2^j mod n, j = 0 ... ceil(log2 n) - 1, equal weights."""
    hops = [0, *_hops(_size(n))]
    return _circulant("exponential", n, dict.fromkeys(hops, 1 / len(hops)))


def one_peer_exponential(n: int) -> Topology:
    """W_k = (I + P^(2^(k mod tau))) / 2, tau = ceil(log2 n): one message a step, and exact after tau steps if n = 2^tau."""
    return _circulant("one_peer_exponential", _size(n), *({0: 0.5, hop: 0.5} for hop in _hops(n)), *([{0: 1.0}] if n == 1 else []))


def _hops(n: int) -> list[int]:
    return [2**j for j in range((n - 1).bit_length())]  # (n - 1).bit_length() = ceil(log2 n), without rounding


def grid(n: int, shape: tuple[int, int] | None = None) -> Topology:
    """A rectangle of rows and columns, Metropolis-Hastings weights. `shape` is that of the closest factors of n: a line if n is prime."""
    rows, columns = _shape(n, shape)
    at = np.arange(n).reshape(rows, columns)
    edges = [*zip(at[:, :-1].flat, at[:, 1:].flat, strict=True), *zip(at[:-1].flat, at[1:].flat, strict=True)]
    return Topology(f"grid({n}, shape=({rows}, {columns}))", [_metropolis_hastings(n, edges)])


def torus(n: int, shape: tuple[int, int] | None = None) -> Topology:
    """A grid whose ends meet; all weights 1/5 where the four neighbours differ, 1/(1 + neighbours) elsewhere."""
    rows, columns = _shape(n, shape)
    at = np.arange(n).reshape(rows, columns)
    edges = [*zip(at.flat, np.roll(at, 1, axis=1).flat, strict=True), *zip(at.flat, np.roll(at, 1, axis=0).flat, strict=True)]
    return Topology(f"torus({n}, shape=({rows}, {columns}))", [_metropolis_hastings(n, edges)])


def _shape(n: int, shape: tuple[int, int] | None) -> tuple[int, int]:
    if shape is None:
        rows = next(r for r in range(math.isqrt(_size(n)), 0, -1) if n % r == 0)
        return rows, n // rows
    if not isinstance(shape, Sequence) or len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != _size(n):
        raise ValueError(f"shape={shape!r} must be (rows, columns) with rows * columns = n = {n}")
    return shape[0], shape[1]


def _metropolis_hastings(n: int, edges: Sequence[tuple[Any, Any]]) -> Sparse:
    """w_ij = 1 / (1 + max(degree_i, degree_j)); symmetric, and each node keeps the rest. Loops and double edges are dropped."""
    links = sorted({(int(min(e)), int(max(e))) for e in edges if e[0] != e[1]})
    i, j = np.array(links, dtype=np.int64).reshape(-1, 2).T
    degree = np.bincount(np.concatenate([i, j]), minlength=n)
    w = 1 / (1 + np.maximum(degree[i], degree[j]))
    kept = 1 - np.bincount(i, w, minlength=n) - np.bincount(j, w, minlength=n)
    nodes = np.arange(n)
    return Sparse(n, np.concatenate([i, j, nodes]), np.concatenate([j, i, nodes]), np.concatenate([w, w, kept]))


def from_networkx(graph: Any) -> Topology:
    """Any connected undirected networkx graph, with Metropolis-Hastings weights (the graph's own are not used).

    Nodes that are called 0 to n-1 keep their numbers; others are numbered in the order of `graph.nodes`.
    """
    number = _numbers(graph)
    if graph.is_directed():
        raise ValueError("from_networkx takes an undirected graph: use from_digraph(graph) with osgp, or graph.to_undirected()")
    edges = [(number[u], number[v]) for u, v in graph.edges()]
    return _named("from_networkx", [_metropolis_hastings(_size(len(number)), edges)])


def from_digraph(digraph: Any) -> Topology:
    """A strongly connected networkx graph in which each node pushes equal shares to itself and along its edges.

    Column stochastic, rows need not sum to 1: this is what push-sum (`osgp`) corrects, and no other method can take it.
    """
    number = _numbers(digraph)
    n = _size(len(number))
    directed = {(number[u], number[v]) for u, v in digraph.edges() if u != v}
    if not digraph.is_directed():
        directed |= {(v, u) for u, v in directed}
    pushes = np.array(sorted(directed | {(i, i) for i in range(n)})).reshape(-1, 2)
    share = 1 / np.bincount(pushes[:, 0], minlength=n)
    return _named("from_digraph", [Sparse(n, pushes[:, 1], pushes[:, 0], share[pushes[:, 0]])], push_only=True)


def _numbers(graph: Any) -> dict[Any, int]:
    if not hasattr(graph, "is_directed"):
        raise TypeError(f"a networkx graph is needed, got {type(graph).__name__}")
    nodes = list(graph.nodes)
    return {v: v if set(nodes) == set(range(len(nodes))) else i for i, v in enumerate(nodes)}


def from_matrix(W: Any) -> Topology:
    """Your own doubly stochastic W: x_i <- sum_j W[i, j] x_j."""
    return _named("from_matrix", [_doubly_stochastic(W, "W")])


def from_matrices(Ws: Sequence[Any]) -> Topology:
    """A cycle of doubly stochastic matrices: step k uses `Ws[k % len(Ws)]`. Only together do they need to connect all nodes."""
    matrices = [_doubly_stochastic(W, f"W_{k}") for k, W in enumerate(Ws)]
    if not matrices:
        raise ValueError("from_matrices needs at least one matrix, got an empty list")
    if len({W.n for W in matrices}) > 1:
        raise ValueError(f"all matrices of a cycle must have the same size, got n = {[W.n for W in matrices]}")
    return _named("from_matrices", matrices)


def _named(kind: str, matrices: Sequence[Matrix], push_only: bool = False) -> Topology:
    check_mixing(matrices)
    digest = hashlib.sha1(b"".join(W.key() for W in matrices), usedforsecurity=False).hexdigest()[:10]
    return Topology(f"{kind}(<n={matrices[0].n}, {digest}>)", matrices, push_only)


def _doubly_stochastic(given: Any, name: str) -> Sparse:
    W = np.array(given.detach().cpu().numpy() if isinstance(given, Tensor) else given, dtype=np.float64)
    if W.ndim != 2 or W.shape[0] != W.shape[1] or len(W) == 0:
        raise ValueError(f"{name} must be square, one row and one column for each node, got shape {W.shape}")
    for i, j in np.argwhere(~(W >= 0)):
        raise ValueError(f"{name}[{i}, {j}] = {W[i, j]:g} in row {i} (which sums to {W[i].sum():.15g}): no weight may be negative")
    for what, sums in (("row", W.sum(axis=1)), ("column", W.sum(axis=0))):
        for i in np.flatnonzero(~(np.abs(sums - 1) <= TOLERANCE)):
            raise ValueError(
                f"{what} {i} of {name} sums to {sums[i]:.15g}: every row and column of a doubly stochastic matrix must sum to 1 "
                f"(to {TOLERANCE:g}; build it in float64)"
            )
    return Sparse.from_dense(W)
