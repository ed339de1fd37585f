"""Topology: which nodes exchange models at step k, and with what weights.

A topology is a value: you can build one without a process group. It holds one mixing matrix W, or a cycle of them, of which step k uses
one. Row i of W says how node i mixes what it receives: x_i <- sum_j W[i, j] x_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from rumor.topology import spectrum
from rumor.topology.connectivity import steps_to_reach_all
from rumor.topology.matrix import Circulant, Matrix, dense


class Topology:
    """A mixing matrix W, or a cycle of them; built by `ring(n)`, `grid(n)`, `from_matrix(W)` and their like.

    Attributes:
        n: number of nodes.
        period: number of matrices in the cycle (1 if static).
        push_only: True if W is column stochastic only (`from_digraph`): only `osgp` can use it.

    >>> import rumor
    >>> rumor.ring(4).neighbors(0)
    {1: 0.3333333333333333, 3: 0.3333333333333333}
    """

    def __init__(self, name: str, matrices: Sequence[Matrix], push_only: bool = False):
        self.name = name
        self.n = matrices[0].n
        self.period = len(matrices)
        self.push_only = push_only
        self._matrices = tuple(matrices)
        self._found: dict[int, float] = {}  # contraction(l), as far as computed

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def matrix(self, k: int = 0) -> Matrix:
        """Return the mixing matrix of step k in its sparse form."""
        return self._matrices[k % self.period]

    def W(self, k: int = 0) -> Tensor:
        """Return the mixing matrix of step k as a dense tensor `[n, n]`, float64."""
        return torch.from_numpy(dense(self.matrix(k)))

    def neighbors(self, i: int, k: int = 0) -> dict[int, float]:
        """Return {j: W[i, j]} of the nodes that node i receives from at step k, without itself."""
        return {j: w for j, w in sorted(self.matrix(k).row(self._node(i)).items()) if j != i}

    def sends_to(self, i: int, k: int = 0) -> dict[int, float]:
        """Return {j: W[j, i]} of the nodes that node i sends to at step k, without itself."""
        return {j: w for j, w in sorted(self.matrix(k).column(self._node(i)).items()) if j != i}

    def self_weight(self, i: int, k: int = 0) -> float:
        """Return W[i, i] at step k."""
        return self.matrix(k).row(self._node(i)).get(i, 0.0)

    @cached_property
    def has_links(self) -> bool:
        """False if W = I: a gossip step then does nothing."""
        return any(any(i != j for j in W.row(i)) for W in self._matrices for i in range(W.n))

    @cached_property
    def is_complete(self) -> bool:
        """True if all weights are 1/n: one gossip step is then the global average."""
        W = self._matrices[0]
        return self.period == 1 and isinstance(W, Circulant) and len(W.weights) == W.n and len(set(W.weights.values())) == 1

    @cached_property
    def beta(self) -> float:
        """`||W - J||_2`, with J the matrix whose entries are all 1/n; for a cycle of p matrices, `||W_(p-1) ... W_0 - J||_2 ** (1/p)`.

        >>> import rumor
        >>> round(rumor.ring(20).beta, 5), rumor.one_peer_exponential(16).beta
        (0.96737, 0.0)
        """
        return float(spectrum.distance_to_average(self._matrices) ** (1 / self.period))

    def contraction(self, l: int) -> float:  # noqa: E741 (the paper's letter)
        """Return how much of the disagreement l steps leave: max over the phases k of ||W_(k+l-1) ... W_k - J||_2.

        J is the matrix whose entries are all 1/n.

        It is 1 for l = 0, and at most beta**l for a static W. The theory's C and D are sums of it.

        >>> import rumor
        >>> [rumor.one_peer_exponential(8).contraction(l) for l in (0, 1, 2, 3)]
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
        """Number of steps after which news from any node, sent at any phase, has reached all nodes; None if it never does."""
        return steps_to_reach_all(self._matrices) if self.has_links or self.n == 1 else None

    def _node(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise ValueError(f"node {i} is not in {self}, whose nodes are 0 to {self.n - 1}")
        return i
