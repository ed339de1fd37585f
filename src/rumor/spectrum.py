"""How fast products of mixing matrices approach the global average J = 11'/n: norms, without a dense matrix where n is large.

W need not be symmetric, so the measure is the 2-norm ||W_(l-1) ... W_0 - J||, not an eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rumor.matrix import Array, Circulant, Matrix, dense

DENSE_UP_TO = 256  # nodes; a dense norm takes milliseconds there


def distance_to_average(matrices: Sequence[Matrix]) -> float:
    """||W_(l-1) ... W_0 - J||_2 for `matrices` = [W_0, ..., W_(l-1)]."""
    n = matrices[0].n
    if n == 1:
        return 0.0
    if all(isinstance(W, Circulant) for W in matrices):
        return _norm_of_circulants(matrices)
    if n <= DENSE_UP_TO:
        product = dense(matrices[0])
        for W in matrices[1:]:
            product = dense(W) @ product
        return _zero_below(1e-13, float(np.linalg.norm(product - 1 / n, 2)))
    if len(matrices) == 1 and matrices[0].is_symmetric:
        return _zero_below(1e-13, _largest(lambda v: matrices[0].apply(v) - v.mean(), n))
    return _zero_below(1e-7, float(np.sqrt(_largest(lambda v: _gram(matrices, v), n))))  # a root halves the digits


def _zero_below(rounding: float, norm: float) -> float:
    """A product that averages exactly must give 0, since beta takes roots of it."""
    return norm if norm > rounding else 0.0


def _norm_of_circulants(matrices: Sequence[Matrix]) -> float:
    """Circulants are normal and share their eigenvectors, the first of which is the ones vector."""
    eigenvalues = [W.eigenvalues[1:] for W in matrices if isinstance(W, Circulant)]
    return float(np.abs(np.prod(eigenvalues, axis=0)).max())


def _gram(matrices: Sequence[Matrix], v: Array) -> Array:
    """A' A v for A = W_(l-1) ... W_0 - J."""
    mean = v.mean()
    for W in matrices:
        v = W.apply(v)
    v = v - mean
    mean = v.mean()
    for W in reversed(matrices):
        v = W.apply_transposed(v)
    return np.asarray(v - mean)


def _largest(operator: Callable[[Array], Array], n: int) -> float:
    """The largest |eigenvalue| of a symmetric operator, by Lanczos.

    Without re-orthogonalisation: lost orthogonality repeats eigenvalues that have converged, it does not spoil the extreme one.
    """
    v = np.random.default_rng(0).standard_normal(n)
    v /= np.linalg.norm(v)
    previous = np.zeros(n)
    diagonal: list[float] = []
    beside: list[float] = []
    found, check_at = 0.0, 32
    for step in range(1, 4 * n + 33):
        u = operator(v)
        diagonal.append(float(v @ u))
        u -= diagonal[-1] * v + (beside[-1] if beside else 0.0) * previous
        beside.append(float(np.linalg.norm(u)))
        exhausted = beside[-1] < 1e-14
        if exhausted or step == check_at:
            off = beside[:-1]
            ritz = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
            last, found = found, float(np.abs(ritz).max())
            if exhausted or abs(found - last) <= 1e-13 * found:
                return found
            check_at = int(check_at * 1.5)
        previous, v = v, u / beside[-1]
    return found
