"""A mixing matrix of n nodes, stored so that n = 10,000 stays cheap.

There are two forms: a `Circulant` keeps one row (every node does the same, shifted), a `Sparse` keeps its non-zeros. Row i says what
node i receives, column j where the model of node j goes. Only `dense()` makes a dense matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Matrix(Protocol):
    """The interface of a mixing matrix."""

    n: int

    def row(self, i: int) -> dict[int, float]: ...  # {j: W[i, j]}, zeros left out
    def column(self, j: int) -> dict[int, float]: ...  # {i: W[i, j]}
    def apply(self, v: Array) -> Array: ...  # W v
    def apply_transposed(self, v: Array) -> Array: ...  # W' v
    def triplets(self) -> tuple[Indices, Indices, Array]: ...  # rows, columns and weights of all non-zeros, row by row
    @property
    def is_symmetric(self) -> bool: ...
    def key(self) -> bytes: ...  # equal for equal matrices


class Circulant:
    """W[i, (i - o) mod n] = weights[o]: node i receives from the node `o` places before it."""

    def __init__(self, n: int, weights: Mapping[int, float]):
        self.n = n
        self.weights = {o % n: float(w) for o, w in sorted(weights.items())}
        if len(self.weights) != len(weights):
            raise ValueError(f"two of the offsets {sorted(weights)} are the same node mod {n}")

    def row(self, i: int) -> dict[int, float]:
        return {(i - o) % self.n: w for o, w in self.weights.items()}

    def column(self, j: int) -> dict[int, float]:
        return {(j + o) % self.n: w for o, w in self.weights.items()}

    @cached_property
    def eigenvalues(self) -> NDArray[np.complex128]:
        """Fourier transform of the first column. What is zero up to rounding becomes zero, because beta takes roots of products."""
        first_column = np.zeros(self.n)
        first_column[list(self.weights)] = list(self.weights.values())
        values = np.fft.fft(first_column)
        values[np.abs(values) < 1e-14] = 0
        return values

    def apply(self, v: Array) -> Array:
        return np.real(np.fft.ifft(np.fft.fft(v) * self.eigenvalues))

    def apply_transposed(self, v: Array) -> Array:
        return np.real(np.fft.ifft(np.fft.fft(v) * self.eigenvalues.conj()))

    def triplets(self) -> tuple[Indices, Indices, Array]:
        rows = np.arange(self.n, dtype=np.int64)[:, None]
        columns = (rows - np.array(list(self.weights), dtype=np.int64)) % self.n  # [n, degree]
        order = np.argsort(columns, axis=1)
        weights = np.array(list(self.weights.values()))[order]
        return np.repeat(rows, columns.shape[1]), np.take_along_axis(columns, order, axis=1).ravel(), weights.ravel()

    @property
    def is_symmetric(self) -> bool:
        return all(self.weights.get(-o % self.n) == w for o, w in self.weights.items())

    def key(self) -> bytes:
        return repr((self.n, sorted(self.weights.items()))).encode()


class Sparse:
    """The non-zeros of any square matrix."""

    def __init__(self, n: int, rows: Any, columns: Any, weights: Any):
        self.n = n
        order = np.lexsort((columns, rows))
        self.rows = np.asarray(rows, dtype=np.int64)[order]
        self.columns = np.asarray(columns, dtype=np.int64)[order]
        self.weights = np.asarray(weights, dtype=np.float64)[order]

    @classmethod
    def from_dense(cls, W: Array) -> Sparse:
        rows, columns = np.nonzero(W)
        return cls(len(W), rows, columns, W[rows, columns])

    @classmethod
    def symmetric(cls, n: int, i: Indices, j: Indices, w: Array) -> Sparse:
        """W of the links i - j, each with its weight in both directions. Every node keeps the rest of its weight 1."""
        kept = 1 - np.bincount(i, w, minlength=n) - np.bincount(j, w, minlength=n)
        nodes = np.arange(n)
        return cls(n, np.concatenate([i, j, nodes]), np.concatenate([j, i, nodes]), np.concatenate([w, w, kept]))

    @cached_property
    def _by_row(self) -> Indices:
        return np.searchsorted(self.rows, np.arange(self.n + 1))

    @cached_property
    def _transposed(self) -> Sparse:
        return Sparse(self.n, self.columns, self.rows, self.weights)

    def row(self, i: int) -> dict[int, float]:
        a, b = self._by_row[i], self._by_row[i + 1]
        return dict(zip(self.columns[a:b].tolist(), self.weights[a:b].tolist(), strict=True))

    def column(self, j: int) -> dict[int, float]:
        return self._transposed.row(j)

    def apply(self, v: Array) -> Array:
        return np.asarray(np.bincount(self.rows, self.weights * v[self.columns], minlength=self.n), dtype=np.float64)

    def apply_transposed(self, v: Array) -> Array:
        return self._transposed.apply(v)

    def triplets(self) -> tuple[Indices, Indices, Array]:
        return self.rows, self.columns, self.weights

    @cached_property
    def is_symmetric(self) -> bool:
        other = self._transposed
        same_places = np.array_equal(self.rows, other.rows) and np.array_equal(self.columns, other.columns)
        return same_places and bool(np.allclose(self.weights, other.weights, rtol=0, atol=1e-15))

    def key(self) -> bytes:
        return b"".join(part.tobytes() for part in (np.array(self.n), self.rows, self.columns, self.weights))


def dense(matrix: Matrix) -> Array:
    W = np.zeros((matrix.n, matrix.n))
    rows, columns, weights = matrix.triplets()
    W[rows, columns] = weights
    return W
