"""A module's tensors as a few flat buckets, each of one dtype: what is packed, sent, mixed and written back together.

Tensors are read and written in place and never rebound, so optimizers, `torch.compile` and views of them keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

PIECES = 8  # messages posted at once keep both directions of a link busy ...
BUCKET_BYTES = 2**22  # ... and a bucket should stay in the cache between packing and sending, mixing and writing
SMALLEST_BYTES = 2**18  # a message below this size is all latency

Room = Callable[[torch.Size, torch.dtype, torch.device], Tensor]


def as_real(t: Tensor) -> Tensor:
    """The tensor without its autograd history; complex numbers as pairs of real ones."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t.detach()


class Flat:
    """Tensors of one process as buckets [d_b]. `room` makes the buffer that a bucket is packed into."""

    def __init__(self, tensors: Iterable[Tensor], room: Room):
        self._given = list(tensors)
        self._addresses = [t.data_ptr() for t in self._given]
        self._buckets = [_Bucket(pieces, room) for pieces in _cut([as_real(t) for t in self._given])]

    def __len__(self) -> int:
        return len(self._buckets)

    def read(self, b: int) -> Tensor:
        bucket = self._buckets[b]
        torch._foreach_copy_(bucket.slots, bucket.pieces)
        return bucket.packed

    def peek(self, b: int) -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in self._buckets[b].pieces])

    def write(self, b: int, value: Tensor) -> None:
        bucket = self._buckets[b]
        torch._foreach_copy_(bucket.pieces, bucket.views(value))

    def add(self, b: int, plus: Tensor, minus: Tensor) -> None:
        bucket = self._buckets[b]
        change = plus.sub_(minus).to(bucket.pieces[0].device)
        torch._foreach_add_(bucket.pieces, bucket.views(change))

    def lerp(self, b: int, other: Tensor, weight: float) -> None:
        bucket = self._buckets[b]
        torch._foreach_lerp_(bucket.pieces, bucket.views(other.to(bucket.pieces[0].device)), weight)

    def check_not_moved(self) -> None:
        """Buckets hold views: a tensor whose memory was exchanged would be averaged no more, and silently."""
        for t, address in zip(self._given, self._addresses, strict=True):
            if t.data_ptr() != address:
                raise RuntimeError(
                    f"a tensor of shape {list(t.shape)} has moved in memory since the Averager was built (model.to(), .half(), or an "
                    "assignment to .data): move the model first, then build the Averager"
                )


class _Bucket:
    """Pieces of one dtype and device, side by side in one buffer."""

    def __init__(self, pieces: Sequence[Tensor], room: Room):
        self.pieces = list(pieces)
        self.sizes = [p.numel() for p in pieces]
        # flat pieces need no reshaping on the way back, which is most of them
        self.shapes = [None if p.dim() == 1 else p.shape for p in pieces]
        self.packed = room(torch.Size([sum(self.sizes)]), pieces[0].dtype, pieces[0].device)
        self.slots = self.views(self.packed)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = zip(torch.split(flat, self.sizes), self.shapes, strict=True)
        return [part if shape is None else part.view(shape) for part, shape in parts]


def _cut(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Buckets: pieces of one dtype and device, filled to the limit; contiguous tensors are cut where a bucket ends."""
    buckets: list[list[Tensor]] = []
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind and t.numel()]
        limit = _bucket_size(sum(t.numel() for t in alike), kind[0].itemsize)
        room = 0
        for t in alike:
            rest = t.view(-1) if t.is_contiguous() else t
            while rest.numel():
                if room <= 0:
                    buckets.append([])
                    room = limit
                piece, rest = (rest[:room], rest[room:]) if rest.dim() == 1 and t.is_contiguous() else (rest, rest[:0])
                buckets[-1].append(piece)
                room -= piece.numel()
    return buckets


def _bucket_size(total: int, itemsize: int) -> int:
    """Elements in a bucket: a few buckets at least, none too large for the cache, none so small that it is all latency."""
    return max(min(-(-total // PIECES), BUCKET_BYTES // itemsize), SMALLEST_BYTES // itemsize)
