"""A module's tensors as a few flat buckets, each of one dtype: what is packed, sent, mixed and written back together.

Tensors are read and written in place and never rebound, so optimizers, `torch.compile` and views of them keep working.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rumor.engine import Judge, Pull, accumulator, size

if TYPE_CHECKING:
    from rumor.fused import Spread

ALIGNED = 16  # elements: buckets are cut at multiples of it, so that GPUs can load several at a time
PIECES = 4  # messages posted at once keep both directions of a link busy ...
BUCKET_BYTES = 2**22  # ... and a bucket should stay in a CPU's cache between packing and sending, mixing and writing
SMALLEST_BYTES = 2**18  # a message below this size is all latency ...
SMALLEST_BYTES_ON_GPU = 2**26  # ... and a pass over less of a GPU's memory is all launching

Room = Callable[[torch.Size, torch.dtype, torch.device], Tensor]


def is_sharded(t: Tensor) -> bool:
    """Is it a DTensor, of which this rank has a part?"""
    return hasattr(t, "device_mesh")


def held(t: Tensor) -> Tensor:
    """What this rank has of it, in place: of a DTensor its shard."""
    if not is_sharded(t):
        return t
    with torch.no_grad():  # else it would be a view of it, with a history
        shard: Tensor = t.to_local()  # type: ignore[attr-defined]
        return shard


def as_real(t: Tensor) -> Tensor:
    """What this rank has of the tensor, without its autograd history; complex numbers as pairs of real ones."""
    return torch.view_as_real(held(t).detach()) if t.is_complex() else held(t).detach()


class Places:
    """Where a module keeps its parameters or buffers, to notice when one has been put in another's place. Shared ones count once."""

    def __init__(self, module: nn.Module, registry: str, wanted: Callable[[Tensor], bool]):
        self._module, self._registry, self._wanted = module, registry, wanted
        self._places = [(registered, name) for registered, name, _ in self._walk()]
        self.remember()

    def _walk(self) -> Iterator[tuple[dict[str, Tensor | None], str, str]]:
        """Where each of them is, and what the module calls it."""
        seen: set[int] = set()
        for prefix, owner in self._module.named_modules():
            tensors: dict[str, Tensor | None] = getattr(owner, self._registry)
            for name, t in tensors.items():
                if t is not None and self._wanted(t) and id(t) not in seen:
                    seen.add(id(t))
                    yield tensors, name, f"{prefix}.{name}".lstrip(".")

    def _now(self) -> list[Tensor | None]:
        return [registered.get(name) for registered, name in self._places]

    def tensors(self) -> list[Tensor]:
        """Those that are there now, in the order of `module.parameters()`."""
        return [t for t in self._now() if t is not None]

    def are_gone(self) -> bool:
        """Are there fewer than there were?"""
        return any(t is None for t in self._now())

    def others(self) -> list[str]:
        """Names of those that the module has by now elsewhere."""
        known = {id(t) for t in self.tensors()}
        return [name for registered, key, name in self._walk() if id(registered[key]) not in known]

    def remember(self) -> None:
        self._were_at = self._whereabouts()

    def have_changed(self) -> bool:
        """Has a tensor, or its memory, been replaced? Views of the old one would be averaged to no effect, and silently."""
        return self._were_at != self._whereabouts()

    def _whereabouts(self) -> list[tuple[int, int]]:
        return [(id(t), 0 if t is None else held(t).data_ptr()) for t in self._now()]


class Flat:
    """Tensors of one process as buckets [d_b]. `room` makes the buffer that a bucket is packed into."""

    def __init__(self, tensors: Sequence[Tensor], room: Room):
        self._buckets = [_Bucket(pieces, room) for pieces in _cut([as_real(t) for t in tensors])]
        self.judge: Judge | None = size

    def __len__(self) -> int:
        return len(self._buckets)

    def read(self, b: int) -> Tensor:
        bucket = self._buckets[b]
        with record_function("rumor::pack"):
            torch._foreach_copy_(bucket.slots, bucket.pieces) if bucket.spread is None else bucket.spread.read(bucket.packed)
        return bucket.packed

    def peek(self, b: int) -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in self._buckets[b].pieces])

    def write(self, b: int, value: Tensor) -> None:
        bucket = self._buckets[b]
        with record_function("rumor::mix"):
            value = value.to(bucket.pieces[0].device)
            torch._foreach_copy_(bucket.pieces, bucket.views(value)) if bucket.spread is None else bucket.spread.write(value)

    def pull(self, b: int, pull: Pull, sent: Tensor | None = None) -> None:
        if sent is None and pull.weight == 1 and pull.finite is None:
            return self.write(b, pull.towards)
        bucket = self._buckets[b]
        with record_function("rumor::mix"):
            device = bucket.pieces[0].device
            towards, gone = pull.towards.to(device), None if sent is None else sent.to(device)
            if bucket.spread is not None:
                return bucket.spread.pull(towards, pull.weight, gone, pull.finite)
            towards = pull._replace(towards=towards).guarded(bucket.packed if gone is None else gone).towards
            if gone is None:
                torch._foreach_lerp_(bucket.pieces, bucket.views(towards), pull.weight)
            else:
                change = towards.sub_(gone) if towards.dtype == accumulator(towards.dtype) else towards.float().sub_(gone)
                torch._foreach_add_(bucket.pieces, bucket.views(change), alpha=pull.weight)

    def buckets_of(self, tensors: Sequence[Tensor]) -> int:
        """How many of the first buckets hold all of these."""
        pieces = sorted((piece.data_ptr(), b) for b, bucket in enumerate(self._buckets) for piece in bucket.pieces)
        found = 0
        for t in tensors:
            first, last = (bisect_left(pieces, (t.data_ptr() + past, 0)) for past in (0, t.nbytes))
            found = max([found, *(b + 1 for _, b in pieces[first:last])])
        return found

    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Goes on with other tensors of the same shapes and dtypes."""
        cut = _cut([as_real(t) for t in tensors])
        if [[(p.shape, p.dtype) for p in pieces] for pieces in cut] != [[(p.shape, p.dtype) for p in b.pieces] for b in self._buckets]:
            raise RuntimeError("a buffer has changed its shape or dtype since the Averager was built: build the Averager after that")
        for bucket, pieces in zip(self._buckets, cut, strict=True):
            bucket.hold(pieces)


class _Bucket:
    """Pieces of one dtype and device, side by side in one buffer."""

    def __init__(self, pieces: Sequence[Tensor], room: Room):
        self.hold(pieces)
        self.sizes = [p.numel() for p in pieces]
        # flat pieces need no reshaping on the way back, which is most of them
        self.shapes = [None if p.dim() == 1 else p.shape for p in pieces]
        self.packed = room(torch.Size([sum(self.sizes)]), pieces[0].dtype, pieces[0].device)
        self.slots = self.views(self.packed)

    def hold(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = list(pieces)
        self.spread = _spread(pieces)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = zip(torch.split(flat, self.sizes), self.shapes, strict=True)
        return [part if shape is None else part.view(shape) for part, shape in parts]


def _spread(pieces: Sequence[Tensor]) -> Spread | None:
    """What works on all of them in one pass, where there is such a thing."""
    if pieces[0].device.type != "cuda" or find_spec("triton") is None or not all(piece.is_contiguous() for piece in pieces):
        return None
    from rumor.fused import Spread, why_not

    return Spread(pieces) if why_not(pieces[0].device, pieces[0].dtype) is None else None


def _cut(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Buckets: pieces of one dtype and device, filled to the limit; contiguous tensors are cut where a bucket ends."""
    buckets: list[list[Tensor]] = []
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind and t.numel()]
        limit = _bucket_size(sum(t.numel() for t in alike), *kind)
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


def _bucket_size(total: int, dtype: torch.dtype, device: torch.device) -> int:
    """Elements in a bucket: a few buckets at least, none too large for the cache, none so small that it is all latency."""
    share = -(-total // (PIECES * ALIGNED)) * ALIGNED
    if device.type == "cuda":
        return max(share, SMALLEST_BYTES_ON_GPU // dtype.itemsize)
    return max(min(share, BUCKET_BYTES // dtype.itemsize), SMALLEST_BYTES // dtype.itemsize)
