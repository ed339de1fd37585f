"""Owners: which node averages which blocks, when an average travels as codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rumor.engines.codes import BLOCK, Code, blocks_of


class Owned(NamedTuple):
    """Numbers `start` to `end` of bucket `bucket`: whole blocks, except for the last one of a bucket."""

    bucket: int
    start: int
    end: int

    @property
    def blocks(self) -> slice:
        """Which blocks of the bucket these are."""
        return slice(self.start // BLOCK, blocks_of(self.end))


def owned_by_each(sizes: Sequence[int], n: int) -> list[list[Owned]]:
    """Share out the blocks of buckets of these sizes among n nodes, evenly and in order. Returns what each node owns.

    >>> owned_by_each([600, 100], 2)
    [[Owned(bucket=0, start=0, end=512)], [Owned(bucket=0, start=512, end=600), Owned(bucket=1, start=0, end=100)]]
    """
    counts = [blocks_of(d) for d in sizes]
    first = [0, *accumulate(counts)]  # block of each bucket
    shares: list[list[Owned]] = []
    for i in range(n):
        lowest, highest = (first[-1] * j // n for j in (i, i + 1))
        shares.append([])
        for b, d in enumerate(sizes):
            start, end = max(lowest, first[b]) - first[b], min(highest, first[b + 1]) - first[b]
            if start < end:
                shares[i].append(Owned(b, start * BLOCK, min(end * BLOCK, d)))
    return shares


def nbytes_of_shares(code: Code, sizes: Sequence[int], n: int) -> list[int]:
    """Return the bytes of a code of what each of n nodes owns of buckets of these sizes."""
    return [sum(code.nbytes(end - start) for _, start, end in share) for share in owned_by_each(sizes, n)]
