"""Norms that say how fast products of mixing matrices approach the global average J = 11'/n. No dense matrix is made if n is large.

W need not be symmetric, so the measure is the 2-norm ||W_(l-1) ... W_0 - J||, not an eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rumor.topology.matrix import Array, Circulant, Matrix, dense

DENSE_UP_TO = 256  # nodes; a dense norm takes milliseconds there
EIGENVALUES_UP_TO = 1_500  # nodes; all eigenvalues of a dense matrix take about a second there


def distance_to_average(matrices: Sequence[Matrix]) -> float:
    """Return ||W_(l-1) ... W_0 - J||_2 for `matrices` = [W_0, ..., W_(l-1)]."""
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


def moduli(matrices: Sequence[Matrix]) -> Array | None:
    """Return |eigenvalues| of the product W_(l-1) ... W_0, largest first; None if n is too large and a matrix is not circulant."""
    n = matrices[0].n
    if all(isinstance(W, Circulant) for W in matrices):
        found = np.prod([W.eigenvalues for W in matrices if isinstance(W, Circulant)], axis=0)
    elif n > EIGENVALUES_UP_TO:
        return None
    elif len(matrices) == 1 and matrices[0].is_symmetric:
        found = np.linalg.eigvalsh(dense(matrices[0]))
    else:
        found = np.linalg.eigvals(np.linalg.multi_dot([*map(dense, reversed(matrices)), np.eye(n)]))
    return np.sort(np.abs(found))[::-1]


def _zero_below(rounding: float, norm: float) -> float:
    """Return 0 for what is only rounding: a product that averages exactly must give 0, because beta takes roots of it."""
    return norm if norm > rounding else 0.0


def _norm_of_circulants(matrices: Sequence[Matrix]) -> float:
    """Use that circulants are normal and share their eigenvectors, the first of which is the ones vector."""
    eigenvalues = [W.eigenvalues[1:] for W in matrices if isinstance(W, Circulant)]
    return min(1.0, float(np.abs(np.prod(eigenvalues, axis=0)).max()))  # weights sum to 1; the FFT may round it up


def _gram(matrices: Sequence[Matrix], v: Array) -> Array:
    """Return A' A v for A = W_(l-1) ... W_0 - J."""
    mean = v.mean()
    for W in matrices:
        v = W.apply(v)
    v = v - mean
    mean = v.mean()
    for W in reversed(matrices):
        v = W.apply_transposed(v)
    return np.asarray(v - mean)


def _largest(operator: Callable[[Array], Array], n: int) -> float:
    """Return the largest |eigenvalue| of a symmetric operator, by Lanczos.

    There is no re-orthogonalisation: lost orthogonality repeats eigenvalues that have converged, but does not change the extreme one.
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
            a, b = np.array(diagonal), np.array(beside[:-1])
            last, found = found, max(_largest_of_tridiagonal(a, b), _largest_of_tridiagonal(-a, b))
            if exhausted or abs(found - last) <= 1e-13 * found:
                return found
            check_at = int(check_at * 1.5)
        previous, v = v, u / beside[-1]
    return found


def _largest_of_tridiagonal(a: Array, b: Array) -> float:
    """Return the largest eigenvalue of the symmetric tridiagonal matrix with diagonal `a` and off-diagonal `b`, by Sturm sequences.

    All eigenvalues are below s if and only if every pivot of T - s is negative; 64 values of s are tried at once.
    """
    squares = np.concatenate([[0.0], b**2])
    bound = float(np.abs(a).max() + 2 * np.abs(b).max(initial=0.0)) + 1e-300
    low, high = -bound, bound
    while high - low > 2e-16 * bound:
        shifts = np.linspace(low, high, 66)[1:-1]
        pivot, all_below = np.full(64, -1.0), np.ones(64, dtype=bool)
        for diagonal, square in zip(a, squares, strict=True):
            pivot = diagonal - shifts - square / pivot
            pivot[pivot == 0] = 1e-300
            all_below &= pivot < 0
        above = shifts[all_below]
        new_low = float(shifts[~all_below].max(initial=low))
        new_high = float(above.min(initial=high))
        if (new_low, new_high) == (low, high):
            break  # as close as floats can be
        low, high = new_low, new_high
    return (low + high) / 2
