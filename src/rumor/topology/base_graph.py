"""The Base-(k+1) graph of Takezawa et al. (NeurIPS 2023): few peers a step, and an exact average after one cycle for every n.

Nodes are 0 to n-1, and each step of the cycle is a list of links. `most` = peers + 1 is the largest group that averages in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from rumor.topology.builders import check_size
from rumor.topology.matrix import Array, Indices, Sparse
from rumor.topology.topology import Topology


class Links(NamedTuple):
    """Pairs of nodes that exchange models, with the weight of each pair."""

    i: Indices
    j: Indices
    w: Array


NO_LINKS = Links(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))


def base_graph(n: int, peers: int = 1) -> Topology:
    """A cycle of W_0 ... W_(p-1), each with at most `peers` messages a node, that is an exact average for every n: W_(p-1) ... W_0 = J.

    J is the matrix whose entries are all 1/n. This is the Base-(k+1) graph of Takezawa et al., "Beyond Exponential Graph" (NeurIPS 2023),
    with k = `peers`. All W are symmetric. The cycle has at most 2 log_(peers+1)(n) + 2 steps, and only log_(peers+1)(n) if n is a power of
    peers + 1.

    The average is exact if you start at the beginning of a cycle. If you start anywhere, take 2 p - 1 steps: they contain a whole cycle.

    >>> import rumor
    >>> graph = rumor.base_graph(6)
    >>> graph.period, graph.beta, [graph.neighbors(0, k) for k in range(2)]
    (4, 0.0, [{1: 0.5}, {2: 0.6666666666666666}])
    >>> [rumor.base_graph(50, peers).period for peers in (1, 2, 3, 4)]
    [10, 7, 6, 3]
    """
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
        raise ValueError(f"base_graph needs peers >= 1, a whole number of nodes that each node talks to at a step, got peers={peers!r}")
    steps = _shortest(check_size(n), min(peers + 1, n)) or [[NO_LINKS]]  # the steps of a single node do nothing
    name = f"base_graph({n})" if peers == 1 else f"base_graph({n}, peers={peers})"
    return Topology(name, [Sparse.symmetric(n, *_joined(links)) for links in steps])


def _shortest(n: int, most: int) -> list[list[Links]]:
    """Return the shorter of two cycles for n = p q, where p has all the factors up to `most`: the simple one for n, and one in two parts.

    In the first part, p groups of q nodes average inside, by simple cycles in parallel. In the second part, nodes with the same place in
    their groups average.
    """
    q = n
    for factor in range(2, most + 1):
        while q % factor == 0:
            q //= factor
    p = n // q
    inside = [[_copied(links, 1, q * np.arange(p)) for links in step] for step in _simple(q, most)]
    across = [[_copied(links, q, np.arange(q))] for links in _hypercube(np.arange(p), most)]
    return min([*inside, *across], _simple(n, most), key=len)


def _simple(n: int, most: int) -> list[list[Links]]:
    """Return the cycle of the simple base graph.

    Write n in base `most`: n = sum_l a_l most^(p_l), p_1 > p_2 > ... Group V_l has a_l parts of most^(p_l) nodes.

    1. All groups average inside, each in parallel to the others. The first takes longest, m steps.
    2. At step m + l (counted from 1), each node of the later groups exchanges with a node of its own in each part of V_l, with weight
       |part| / (|V_l| + |V_(l+1)| + ...). The mean of each part is then the mean of all, and so is the mean of the later groups.
    3. The parts of V_l average inside, while the later groups go on with 2. The last group needs no such step: 1 made its nodes equal,
       so each of them holds the mean of all after its last exchange.
    """
    if _sides(n, most) is not None:
        return [[links] for links in _hypercube(np.arange(n), most)]
    groups = _groups(n, most)
    m = len(_hypercube(groups[0].ravel(), most))
    steps: list[list[Links]] = [[] for _ in range(m + 1 + len(_hypercube(groups[0][0], most)))]

    def put(at: int, cycle: Sequence[Links]) -> None:
        for step, links in zip(steps[at:], cycle, strict=False):
            step.append(links)

    for group in groups:
        put(0, _hypercube(group.ravel(), most))
    for l, group in enumerate(groups[:-1]):  # noqa: E741 (the paper's letter)
        later = np.concatenate([other.ravel() for other in groups[l + 1 :]])
        weights = np.full(len(later), group.shape[1] / (group.size + len(later)))
        for part in group:  # has more nodes than `later`: most^(p_l) is more than all lower digits together
            put(m + l, [Links(part[: len(later)], later, weights)])
            put(m + l + 1, _hypercube(part, most))
    return steps


def _groups(n: int, most: int) -> list[Indices]:
    """Return the nodes by the digits of n in base `most`, highest first: [digit, power of `most`] for each digit that is not 0."""
    groups: list[Indices] = []
    power = 1
    while n:
        n, digit = divmod(n, most)
        if digit:
            groups.append(np.arange(digit * power, dtype=np.int64).reshape(digit, power))
        power *= most
    groups.reverse()
    starts = np.cumsum([0, *(group.size for group in groups[:-1])])
    return [group + start for group, start in zip(groups, starts, strict=True)]


def _hypercube(nodes: Indices, most: int) -> list[Links]:
    """Arrange `nodes` in a box with sides up to `most`, and average along one axis after the other: an exact average of all of them."""
    sides = _sides(len(nodes), most)
    assert sides is not None  # callers pass only sizes with small factors
    box = nodes.reshape(sides)
    steps = []
    for axis, side in enumerate(sides):
        lines = np.moveaxis(box, axis, -1).reshape(-1, side)
        a, b = np.triu_indices(side, 1)
        i, j = lines[:, a].ravel(), lines[:, b].ravel()
        steps.append(Links(i, j, np.full(len(i), 1 / side)))
    return steps


@cache
def _sides(size: int, most: int) -> tuple[int, ...] | None:
    """Return the fewest numbers from 2 to `most` with the product `size`; None if a prime factor of it is larger than `most`."""
    if size <= most:
        return (size,) if size > 1 else ()
    rests = {side: _sides(size // side, most) for side in range(2, most + 1) if size % side == 0}
    return min(((side, *rest) for side, rest in rests.items() if rest is not None), key=len, default=None)


def _copied(links: Links, stride: int, starts: Indices) -> Links:
    """Return copies of `links`, in which node v stands for node start + stride v."""
    i, j = (np.add.outer(starts, stride * ends).ravel() for ends in links[:2])
    return Links(i, j, np.tile(links.w, len(starts)))


def _joined(links: Sequence[Links]) -> Links:
    return Links(*(np.concatenate(parts) for parts in zip(*links, strict=True)))
