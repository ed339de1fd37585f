"""LocalShard: the part of the model that one rank of a node exchanges with its counterparts on other nodes.

If the ranks of a node hold the same tensors (DDP), rank l of L exchanges the l-th of L equal ranges, and then the node gathers them: d
numbers leave the node, not L d. Of DTensors (FSDP2) each rank exchanges its own shard, and there is nothing to gather. Alarms are
shared likewise: only the rank whose part is not finite notices, and all of them must stop at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rumor.engines.processes.alarm import Alarm
from rumor.engines.processes.transport import Transport
from rumor.model.tensors import as_real, is_sharded

LINE = 64  # bytes: each range in a row starts at a multiple of it, whatever its dtype


class LocalShard:
    """The part of a node's tensors that this rank exchanges with other nodes, and how it gets the rest from the ranks of its node.

    Attributes:
        mine: views of what this rank exchanges.
    """

    def __init__(self, tensors: Sequence[Tensor], local: Transport | None):
        self.mine = [as_real(t) for t in tensors if local is None or is_sharded(t)]
        self._sharded = [is_sharded(t) for t in tensors]
        self._local = local
        self._row: _Row | None = None
        if local is None:
            return
        alike = [as_real(t) for t in tensors if not is_sharded(t)]
        self._replicated = [_Ranges([t for t in alike if t.dtype == dtype], local.n) for dtype in dict.fromkeys(t.dtype for t in alike)]
        for ranges in self._replicated:
            self.mine += ranges.pieces[local.rank]
        if tensors and not any(t.numel() for t in self.mine):
            self.mine.append(as_real(tensors[0]).new_zeros(1))  # losses and weights travel with the first bucket, so there must be one

    def is_gathered(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether FSDP has replaced some shards by whole tensors."""
        return any(was and not is_sharded(t) for was, t in zip(self._sharded, tensors, strict=True))

    def share(self, alarm: Alarm) -> None:
        """Give every rank of the node what each of them has, of the tensors and of alarms."""
        assert self._local is not None
        if self._row is None:
            self._row = _Row(self._replicated, self._local)
        self._row.fill(alarm)
        self._local.gather(self._row.all, "sharing its parts inside the node")
        self._row.take(alarm)


class _Ranges:
    """Tensors of one dtype, end to end, cut into L ranges of equal length: `pieces[l]` are views. The last may be shorter, or empty."""

    def __init__(self, tensors: Sequence[Tensor], L: int):
        self.dtype = tensors[0].dtype
        self.length = -(-sum(t.numel() for t in tensors) // L)
        self.pieces: list[list[Tensor]] = [[] for _ in range(L)]
        at = 0
        for rest in map(_flat_view, tensors):
            while rest.numel():
                piece = rest[: self.length - at % self.length]
                self.pieces[at // self.length].append(piece)
                rest, at = rest[piece.numel() :], at + piece.numel()


class _Row:
    """The messages inside a node: each rank has a row of bytes with what it knows of alarms, then its range of each dtype."""

    def __init__(self, ranges: Sequence[_Ranges], local: Transport):
        sizes = [s.length * s.dtype.itemsize for s in ranges]
        ends = [LINE]
        for size in sizes:
            ends.append(ends[-1] + -(-size // LINE) * LINE)
        self.all = torch.zeros(local.n, ends[-1], dtype=torch.uint8, device=local.device)
        self._heads = self.all[:, :16].view(torch.float64)
        self._rank = local.rank
        # for each dtype: pieces, and their places in the rows
        self._own: list[tuple[list[Tensor], list[Tensor]]] = []
        self._others: list[tuple[list[Tensor], list[Tensor]]] = []
        for s, start, size in zip(ranges, ends, sizes, strict=False):
            pieces: list[Tensor] = []
            slots: list[Tensor] = []
            for rank, row in enumerate(self.all[:, start : start + size].unbind()):
                lengths = [p.numel() for p in s.pieces[rank]]
                places = torch.split(row.view(s.dtype)[: sum(lengths)], lengths)
                if rank == local.rank:
                    self._own.append((s.pieces[rank], list(places)))
                else:
                    pieces += s.pieces[rank]
                    slots += places
            self._others.append((pieces, slots))

    def fill(self, alarm: Alarm) -> None:
        for pieces, slots in self._own:
            if pieces:
                torch._foreach_copy_(slots, pieces)
        alarm.tell(self._heads[self._rank])

    def take(self, alarm: Alarm) -> None:
        for pieces, slots in self._others:
            if pieces:
                torch._foreach_copy_(pieces, slots)
        alarm.merge(self._heads)


def _flat_view(t: Tensor) -> Tensor:
    """Return a flat view, in the order of memory."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    try:
        return t.permute(order).view(-1)
    except RuntimeError as error:
        raise ValueError(
            f"a tensor of shape {list(t.shape)} and strides {list(t.stride())} has gaps: make it contiguous() first"
        ) from error
