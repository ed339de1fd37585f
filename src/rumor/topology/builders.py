"""Builders of topologies: named graphs, networkx graphs, and mixing matrices of your own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rumor.topology.connectivity import check_mixing
from rumor.topology.matrix import Circulant, Matrix, Sparse
from rumor.topology.topology import Topology

TOLERANCE = 1e-12  # of the sums of rows and columns


def check_size(n: int) -> int:
    """Return n, or raise ValueError unless it is a whole number >= 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a topology needs n >= 1 nodes, a whole number, got n={n!r}")
    return n


def _circulant(name: str, n: int, *phases: dict[int, float]) -> Topology:
    return Topology(f"{name}({n})", [Circulant(n, weights) for weights in phases])


def isolated(n: int) -> Topology:
    """W = I: no node talks to another (for Local SGD)."""
    return _circulant("isolated", check_size(n), {0: 1.0})


def complete(n: int) -> Topology:
    """Every node talks to every other, with all weights 1/n: a step is the global average."""
    return _circulant("complete", check_size(n), dict.fromkeys(range(n), 1 / n))


def ring(n: int) -> Topology:
    """A circle, with weight 1/3 for both neighbours and for the node itself (1/2 if n = 2)."""
    around = {o % check_size(n) for o in (-1, 0, 1)}
    return _circulant("ring", n, dict.fromkeys(around, 1 / len(around)))


def exponential(n: int) -> Topology:
    """Static and directed: node i receives from i - 2^j mod n, j = 0 ... ceil(log2 n) - 1, with equal weights."""
    hops = [0, *_hops(check_size(n))]
    return _circulant("exponential", n, dict.fromkeys(hops, 1 / len(hops)))


def one_peer_exponential(n: int) -> Topology:
    """One message a step: W_k = (I + P^(2^(k mod tau))) / 2, tau = ceil(log2 n). tau steps are an exact average if n = 2^tau."""
    return _circulant("one_peer_exponential", check_size(n), *({0: 0.5, hop: 0.5} for hop in _hops(n)), *([{0: 1.0}] if n == 1 else []))


def _hops(n: int) -> list[int]:
    return [2**j for j in range((n - 1).bit_length())]  # (n - 1).bit_length() = ceil(log2 n), without rounding


def grid(n: int, shape: tuple[int, int] | None = None) -> Topology:
    """A rectangle with Metropolis-Hastings weights. `shape` (rows, columns) defaults to the closest factors of n: a line if prime."""
    rows, columns = _shape(n, shape)
    at = np.arange(n).reshape(rows, columns)
    edges = [*zip(at[:, :-1].flat, at[:, 1:].flat, strict=True), *zip(at[:-1].flat, at[1:].flat, strict=True)]
    return Topology(f"grid({n}, shape=({rows}, {columns}))", [_metropolis_hastings(n, edges)])


def torus(n: int, shape: tuple[int, int] | None = None) -> Topology:
    """A grid whose ends meet. All weights are 1/5 if the four neighbours differ, else 1/(1 + neighbours)."""
    rows, columns = _shape(n, shape)
    at = np.arange(n).reshape(rows, columns)
    edges = [*zip(at.flat, np.roll(at, 1, axis=1).flat, strict=True), *zip(at.flat, np.roll(at, 1, axis=0).flat, strict=True)]
    return Topology(f"torus({n}, shape=({rows}, {columns}))", [_metropolis_hastings(n, edges)])


def _shape(n: int, shape: tuple[int, int] | None) -> tuple[int, int]:
    if shape is None:
        rows = next(r for r in range(math.isqrt(check_size(n)), 0, -1) if n % r == 0)
        return rows, n // rows
    if not isinstance(shape, Sequence) or len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != check_size(n):
        raise ValueError(f"shape={shape!r} must be (rows, columns) with rows * columns = n = {n}")
    return shape[0], shape[1]


def _metropolis_hastings(n: int, edges: Sequence[tuple[Any, Any]]) -> Sparse:
    """Return symmetric weights w_ij = 1 / (1 + max(degree_i, degree_j)); each node keeps the rest. Drops loops and double edges."""
    links = sorted({(int(min(e)), int(max(e))) for e in edges if e[0] != e[1]})
    i, j = np.array(links, dtype=np.int64).reshape(-1, 2).T
    degree = np.bincount(np.concatenate([i, j]), minlength=n)
    w = 1 / (1 + np.maximum(degree[i], degree[j]))
    return Sparse.symmetric(n, i, j, w)


def from_networkx(graph: Any) -> Topology:
    """Use any connected undirected networkx graph, with Metropolis-Hastings weights (the graph's own weights are ignored).

    Nodes that are named 0 to n-1 keep their numbers; others are numbered in the order of `graph.nodes`.
    """
    number = _numbers(graph)
    if graph.is_directed():
        raise ValueError("from_networkx takes an undirected graph: use from_digraph(graph) with osgp, or graph.to_undirected()")
    edges = [(number[u], number[v]) for u, v in graph.edges()]
    return _named("from_networkx", [_metropolis_hastings(check_size(len(number)), edges)])


def from_digraph(digraph: Any) -> Topology:
    """Use a strongly connected networkx graph, in which each node pushes equal shares to itself and along its edges.

    Columns sum to 1, but rows need not. Push-sum (`osgp`) corrects for that, and no other method can use it.
    """
    number = _numbers(digraph)
    n = check_size(len(number))
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
    """Use your own doubly stochastic W: x_i <- sum_j W[i, j] x_j."""
    return _named("from_matrix", [_doubly_stochastic(W, "W")])


def from_matrices(Ws: Sequence[Any]) -> Topology:
    """Use a cycle of doubly stochastic matrices: step k uses `Ws[k % len(Ws)]`. All nodes must be connected by the cycle as a whole."""
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
    try:
        W = np.array(given.detach().cpu().numpy() if isinstance(given, Tensor) else given, dtype=np.float64)
    except (TypeError, ValueError) as error:  # text, rows of different lengths, a graph
        raise ValueError(f"{name} must be a square matrix of numbers: {error}") from None
    if W.ndim != 2 or W.shape[0] != W.shape[1] or len(W) == 0:
        how = ": from_matrices takes a list, also of one matrix" if W.ndim == 1 else ""
        raise ValueError(f"{name} must be square, one row and one column for each node, got shape {W.shape}{how}")
    for i, j in np.argwhere(~(W >= 0)):
        raise ValueError(f"{name}[{i}, {j}] = {W[i, j]:g} in row {i} (which sums to {W[i].sum():.15g}): no weight may be negative")
    for what, sums in (("row", W.sum(axis=1)), ("column", W.sum(axis=0))):
        for i in np.flatnonzero(~(np.abs(sums - 1) <= TOLERANCE)):
            raise ValueError(
                f"{what} {i} of {name} sums to {sums[i]:.15g}: every row and column of a doubly stochastic matrix must sum to 1 "
                f"(to {TOLERANCE:g}; build it in float64)"
            )
    return Sparse.from_dense(W)
