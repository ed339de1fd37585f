"""Connectivity: whether a cycle of mixing matrices connects all nodes, whether it mixes, and in how many steps news reaches all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rumor.topology.matrix import Circulant, Indices, Matrix, dense

Bools = NDArray[np.bool_]


def check_mixing(matrices: Sequence[Matrix]) -> None:
    """Raise ValueError unless the products of the cycle converge to a matrix of equal rows.

    They do if and only if the product of one cycle is primitive: its graph is strongly connected, and the lengths of its loops have no
    common divisor. If all diagonals are positive, the first is enough, and follows from the union of the graphs.
    """
    n = matrices[0].n
    rows = np.concatenate([W.triplets()[0] for W in matrices])
    columns = np.concatenate([W.triplets()[1] for W in matrices])
    for hears, speaks in ((rows, columns), (columns, rows)):
        level = _levels(n, speaks, hears)
        for i in np.flatnonzero(level < 0):
            first, second = (i, 0) if hears is rows else (0, i)
            raise ValueError(
                f"not connected{' over its cycle' if len(matrices) > 1 else ''}: node {first} (row {first} of W) never hears from node "
                f"{second}, directly or through others, but every node must reach every other (isolated({n}) is the one without links)"
            )
    if all(W.row(i).get(i, 0.0) > 0 for W in matrices for i in range(n)):
        return
    product = np.eye(n, dtype=bool)
    for W in matrices:
        product = (dense(W) > 0).astype(np.float32) @ product.astype(np.float32) > 0
    hears, speaks = (np.asarray(part, dtype=np.int64) for part in np.nonzero(product))
    level = _levels(n, speaks, hears)
    loops = math.gcd(*(level[speaks] + 1 - level[hears]).tolist()) if (level >= 0).all() else 0
    if loops != 1:
        raise ValueError(
            "connected, but it never mixes: like a permutation, it passes models on without averaging them, so the norm "
            "||W - 11'/n|| of its products stays 1 though each row sums to 1: give every node some weight on itself"
        )


def _levels(n: int, tails: Indices, heads: Indices) -> Indices:
    """Return the number of steps from node 0 to each node along tails -> heads; -1 if it can't be reached."""
    level = np.full(n, -1, dtype=np.int64)
    level[0] = 0
    for step in range(1, n + 1):
        new = heads[level[tails] == step - 1]
        new = new[level[new] < 0]
        if not len(new):
            break
        level[new] = step
    return level


def steps_to_reach_all(matrices: Sequence[Matrix]) -> int:
    """Return the number of steps after which what any node sent, from any phase on, has reached all nodes."""
    n = matrices[0].n
    starts = 1 if all(isinstance(W, Circulant) for W in matrices) else n  # all nodes of a circulant are alike
    if starts * n > 1_000_000:
        return n * len(matrices)  # each cycle tells at least one more node
    return max(_spread(matrices, phase, np.eye(n, starts, dtype=bool)) for phase in range(len(matrices)))


def _spread(matrices: Sequence[Matrix], phase: int, knows: Bools) -> int:
    """Return the number of steps until `knows` [n, sources], what each node has heard of, is all true."""
    steps = 0
    while not knows.all():
        rows, columns, _ = matrices[(phase + steps) % len(matrices)].triplets()
        heard = np.zeros_like(knows)
        np.logical_or.at(heard, rows, knows[columns])
        knows = knows | heard
        steps += 1
    return steps
