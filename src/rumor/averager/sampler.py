"""MemberSampler: divides a data set among the members of a job as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch


class MemberSampler:
    """An endless stream of the numbers of items, for `torch.utils.data.DataLoader(..., sampler=...)`.

    All members walk through the same shuffled orders, one an epoch of the data. At each draw they take the next n numbers, one each. A
    newcomer goes on where the others are. If members change, a few items may be drawn twice, or be left out of an epoch.

    Args:
        data: the data set, or its size.
        place: tells this member's rank and the number of members.
        seed: of the orders; the same on all members.

    Attributes:
        position: how many numbers all members together have drawn.
    """

    def __init__(self, data: Sized | int, place: Callable[[], tuple[int, int]], seed: int = 0):
        self._size = data if isinstance(data, int) else len(data)
        if self._size < 1:
            raise ValueError("share_of() needs a data set with at least one item")
        self._place, self._seed = place, seed
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[int]:
        while True:
            rank, n = self._place()
            start = self.position + -self.position % n
            at, self.position = start + rank, start + n
            yield self._item(at)

    def _item(self, at: int) -> int:
        epoch, place = divmod(at, self._size)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(self._size, generator=generator).tolist()
        return self._order[1][place]


class Samplers:
    """The samplers of one Averager, in the order in which they were made. Newcomers and checkpoints take over their positions."""

    def __init__(self) -> None:
        self._samplers: list[MemberSampler] = []
        self._positions: list[int] = []  # for samplers that are made after they were taken over

    def add(self, sampler: MemberSampler) -> MemberSampler:
        if len(self._samplers) < len(self._positions):
            sampler.position = self._positions[len(self._samplers)]
        self._samplers.append(sampler)
        return sampler

    @property
    def positions(self) -> list[int]:
        made = [sampler.position for sampler in self._samplers]
        return made + self._positions[len(made) :]

    def restore(self, positions: list[int]) -> None:
        self._positions = list(positions)
        for sampler, position in zip(self._samplers, self._positions, strict=False):
            sampler.position = position
