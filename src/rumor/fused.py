"""One pass over a bucket on a GPU, whatever tensors it is spread over: x <- x + weight (towards - sent). Needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers that one program of the kernel works on
ALIGNED = 16  # bytes, for wide loads

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Spread:
    """Contiguous pieces of one dtype and device, cut into blocks: where each begins, and which stretch of a packed bucket is its own."""

    def __init__(self, pieces: Sequence[Tensor]):
        self._dtype, device = pieces[0].dtype, pieces[0].device
        addresses, offsets, counts = [], [], []
        at = 0
        for piece in pieces:
            for start in range(0, piece.numel(), BLOCK):
                addresses.append(piece.data_ptr() + start * piece.element_size())
                offsets.append(at + start)
                counts.append(min(BLOCK, piece.numel() - start))
            at += piece.numel()
        self._aligned = not any(address % ALIGNED for address in addresses) and not any(offset % ALIGNED for offset in offsets)
        self._blocks = torch.tensor([addresses, offsets, counts], dtype=torch.int64, device=device)
        self._weights: dict[float, Tensor] = {}  # in float64 on the device: as an argument, a number would be rounded to float32

    def pull(self, towards: Tensor, weight: float, sent: Tensor | None) -> None:
        if weight not in self._weights:
            self._weights[weight] = torch.full((1,), weight, dtype=torch.float64, device=self._blocks.device)
        wide = tl.float64 if self._dtype == torch.float64 else tl.float32
        aligned = self._aligned and not any(t.data_ptr() % ALIGNED for t in (towards, *([] if sent is None else [sent])))
        _pull[(self._blocks.shape[1],)](
            self._blocks[0],
            self._blocks[1],
            self._blocks[2],
            towards,
            towards if sent is None else sent,
            self._weights[weight],
            itself=sent is None,
            kind=TYPES[self._dtype],
            wide=wide,
            aligned=aligned,
            BLOCK=BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pull(  # type: ignore[no-untyped-def]
    addresses,
    offsets,
    counts,
    towards,
    sent,
    weight,
    itself: tl.constexpr,
    kind: tl.constexpr,
    wide: tl.constexpr,
    aligned: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    x = tl.load(addresses + block).to(tl.pointer_type(kind))
    at = tl.load(offsets + block)
    if aligned:
        x = tl.multiple_of(x, 16)
        at = tl.multiple_of(at, 16)
    i = tl.arange(0, BLOCK)
    here = i < tl.load(counts + block)
    own = tl.load(x + i, mask=here).to(wide)
    gone = own if itself else tl.load(sent + at + i, mask=here).to(wide)
    change = tl.load(towards + at + i, mask=here).to(wide) - gone
    mixed = own + tl.load(weight).to(wide) * change
    tl.store(x + i, mixed.to(kind), mask=here)
