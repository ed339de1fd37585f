"""FlatBuckets: the tensors of one process as a few flat buckets, each packed, sent, mixed and written back as a whole.

Tensors are read and written in place and never rebound, so optimizers, `torch.compile` and views of them keep working.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from rumor.engines import Buffer, Lerp
from rumor.engines.codes import BLOCK
from rumor.engines.engine import FiniteCheck, accumulator, sum_of_squares
from rumor.metrics import span
from rumor.model.tensors import as_real

ALIGNED = 16  # elements: buckets are cut at multiples of it, so that GPUs can load several at a time; with codes, at whole blocks
PIECES = 4  # messages posted at once keep both directions of a link busy ...
BUCKET_BYTES = 2**22  # ... and a bucket should stay in a CPU's cache from packing to sending, and from mixing to writing
SMALLEST_BYTES = 2**18  # below this size, as it is sent, latency dominates a message ...
SMALLEST_BYTES_ON_GPU = 2**26  # ... and launching the kernel dominates a pass over a GPU's memory

Allocate = Callable[[torch.Size, torch.dtype, torch.device], Buffer]


class FlatBuckets:
    """Tensors of one process as buckets [d_b].

    Args:
        tensors: the tensors.
        allocate: makes the buffer that a bucket is packed into.
        bits: how many of them a number is sent with. Below 32, all blocks of codes but the last are whole, so that they are the same
            however a model is cut into buckets; and buffers are allocated only once they are used: differences are packed elsewhere.
    """

    def __init__(self, tensors: Sequence[Tensor], allocate: Allocate, bits: int = 32):
        self._bits = bits
        self._buckets = [_Bucket(pieces, allocate) for pieces in _cut([as_real(t) for t in tensors], bits)]
        if bits == 32:
            for bucket in self._buckets:
                bucket.allocate()
        self.finite_check: FiniteCheck | None = sum_of_squares

    def __len__(self) -> int:
        return len(self._buckets)

    def read(self, b: int) -> Buffer:
        bucket = self._buckets[b]
        buffer = bucket.allocate()
        with span("rumor::pack"):
            bucket.pack(buffer.tensor)
        return buffer

    def copy(self, b: int) -> Buffer:
        return self.read(b)  # the packed buffer is a copy already

    def difference(self, b: int, minus: Tensor, out: Tensor) -> None:
        bucket = self._buckets[b]
        with span("rumor::pack"):
            if bucket.one_pass is None and out.dtype == minus.dtype:
                for slot, piece, part in zip(bucket.slots(out), bucket.pieces, bucket.views(minus), strict=True):
                    torch.sub(piece, part, out=slot)
            else:
                bucket.pack(out)
                out.sub_(minus)

    def peek(self, b: int) -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in self._buckets[b].pieces])

    def write(self, b: int, value: Tensor) -> None:
        bucket = self._buckets[b]
        with span("rumor::mix"):
            value = value.to(bucket.pieces[0].device)
            if bucket.one_pass is None:
                torch._foreach_copy_(bucket.pieces, bucket.views(value))
            else:
                bucket.one_pass.write(value)

    def lerp(self, b: int, lerp: Lerp, sent: Tensor | None = None) -> None:
        if sent is None and lerp.weight == 1 and lerp.finite is None:
            return self.write(b, lerp.end)
        bucket = self._buckets[b]
        with span("rumor::mix"):
            device = bucket.pieces[0].device
            end, sent = lerp.end.to(device), None if sent is None else sent.to(device)
            if bucket.one_pass is not None:
                return bucket.one_pass.lerp(end, lerp.weight, sent, lerp.finite)
            if lerp.finite is not None:
                end = lerp._replace(end=end).guarded(self.peek(b) if sent is None else sent).end
            if sent is None:
                torch._foreach_lerp_(bucket.pieces, bucket.views(end), lerp.weight)
            else:
                in_place = end.dtype == accumulator(end.dtype) and end is not sent
                change = end.sub_(sent) if in_place else end.to(accumulator(end.dtype), copy=True).sub_(sent)
                torch._foreach_add_(bucket.pieces, bucket.views(change), alpha=lerp.weight)

    def add(self, b: int, change: Tensor) -> None:
        bucket = self._buckets[b]
        with span("rumor::mix"):
            torch._foreach_add_(bucket.pieces, bucket.views(change.to(bucket.pieces[0].device)))

    def buckets_of(self, tensors: Sequence[Tensor]) -> int:
        """Return how many of the first buckets are needed to hold all of these tensors."""
        pieces = sorted((piece.data_ptr(), b) for b, bucket in enumerate(self._buckets) for piece in bucket.pieces)
        found = 0
        for t in tensors:
            first, last = (bisect_left(pieces, (t.data_ptr() + past, 0)) for past in (0, t.nbytes))
            found = max([found, *(b + 1 for _, b in pieces[first:last])])
        return found

    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Use other tensors of the same shapes and dtypes from now on."""
        cut = _cut([as_real(t) for t in tensors], self._bits)
        if [[(p.shape, p.dtype) for p in pieces] for pieces in cut] != [[(p.shape, p.dtype) for p in b.pieces] for b in self._buckets]:
            raise RuntimeError("a buffer has changed its shape or dtype since the Averager was built: build the Averager after that")
        for bucket, pieces in zip(self._buckets, cut, strict=True):
            bucket.hold(pieces)


class OnePass(Protocol):
    """Reads, writes and mixes all pieces of a bucket in one pass over memory."""

    def read(self, flat: Tensor) -> None: ...
    def write(self, flat: Tensor) -> None: ...
    def lerp(self, end: Tensor, weight: float, sent: Tensor | None, finite: Tensor | None) -> None: ...


class _Bucket:
    """Pieces of one dtype and device, side by side in one buffer."""

    def __init__(self, pieces: Sequence[Tensor], allocate: Allocate):
        self.hold(pieces)
        self.sizes = [p.numel() for p in pieces]
        # most pieces are flat, and need no reshaping on the way back
        self.shapes = [None if p.dim() == 1 else p.shape for p in pieces]
        self._allocate, self._buffer = allocate, None  # type: tuple[Allocate, Buffer | None]
        self._packed: Tensor | None = None
        self._slots: list[Tensor] = []

    def allocate(self) -> Buffer:
        if self._buffer is None:
            self._buffer = self._allocate(torch.Size([sum(self.sizes)]), self.pieces[0].dtype, self.pieces[0].device)
        return self._buffer

    def pack(self, out: Tensor) -> None:
        """Copy the pieces to `out`, which may have a wider dtype."""
        if self.one_pass is None:
            torch._foreach_copy_(self.slots(out), self.pieces)
        else:
            self.one_pass.read(out)

    def slots(self, out: Tensor) -> list[Tensor]:
        """Return the places of the pieces in `out`. It is usually the same memory, so they are kept."""
        if self._packed is not out:
            self._packed, self._slots = out, self.views(out)
        return self._slots

    def hold(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = list(pieces)
        self.one_pass = _one_pass(pieces)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = zip(torch.split_with_sizes(flat, self.sizes), self.shapes, strict=True)  # torch.split is the same in Python
        return [part if shape is None else part.view(shape) for part, shape in parts]


def _one_pass(pieces: Sequence[Tensor]) -> OnePass | None:
    """Return kernels that work on all pieces in one pass, if there are any for this device and dtype."""
    if pieces[0].device.type != "cuda" or find_spec("triton") is None or not all(piece.is_contiguous() for piece in pieces):
        return None
    from rumor.model.triton_kernels import TritonOnePass, why_not

    return TritonOnePass(pieces) if why_not(pieces[0].device, pieces[0].dtype) is None else None


def _cut(tensors: Sequence[Tensor], bits: int) -> list[list[Tensor]]:
    """Cut tensors into buckets of one dtype and device, each filled to the limit. Tensors are split where a bucket ends."""
    buckets: list[list[Tensor]] = []
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind and t.numel()]
        limit = _bucket_size(sum(t.numel() for t in alike), *kind, bits)
        left = 0
        for t in alike:
            rest = [t.view(-1) if t.is_contiguous() else t]
            while rest:
                if left == 0:
                    buckets.append([])
                    left = limit
                piece, *rest = rest
                now, later = ([piece], []) if piece.numel() <= left else _divided(piece, left)
                buckets[-1] += now
                left -= sum(part.numel() for part in now)
                rest = later + rest
    return buckets


def _divided(t: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of the first `count` numbers of `t`, in the order of its indices, and views of the others. `t` has any strides."""
    rows, more = divmod(count, t[0].numel())
    first, others = [t[:rows]], [t[rows:]]
    if more:
        start, end = _divided(t[rows], more)
        first, others = [*first, *start], [*end, t[rows + 1 :]]
    return [part for part in first if part.numel()], [part for part in others if part.numel()]


def _bucket_size(total: int, dtype: torch.dtype, device: torch.device, bits: int) -> int:
    """Return the size of a bucket, in elements: neither too large for the cache nor so small that latency dominates."""
    if device.type == "cuda":
        size = max(-(-total // PIECES), SMALLEST_BYTES_ON_GPU // dtype.itemsize)
    else:
        smallest = SMALLEST_BYTES // dtype.itemsize if bits == 32 else SMALLEST_BYTES * 8 // bits
        size = max(min(-(-total // PIECES), BUCKET_BYTES // dtype.itemsize), smallest)
    aligned = ALIGNED if bits == 32 else BLOCK
    return -(-size // aligned) * aligned
