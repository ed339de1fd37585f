"""Triton kernels that read, write and mix a bucket on a GPU in one pass, over all tensors that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rumor.engines.code_kernels import why_not_built

BLOCK = 4096  # elements for each program of a kernel
GRAIN = 8  # elements loaded at a time, if they start at a multiple of it

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonOnePass:
    """Contiguous pieces of one dtype and device, cut into blocks: the address of each, and its range in the packed bucket."""

    def __init__(self, pieces: Sequence[Tensor]):
        self._kind, self._wide = TYPES[pieces[0].dtype], tl.float64 if pieces[0].dtype == torch.float64 else tl.float32
        self._device = pieces[0].device
        blocks: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # by whether several elements can be loaded at a time
        at = 0
        for piece in pieces:
            for start in range(0, piece.numel(), BLOCK):
                address, offset, count = piece.data_ptr() + start * piece.element_size(), at + start, min(BLOCK, piece.numel() - start)
                blocks[not (address % 16 or offset % GRAIN or count % GRAIN)].append((address, offset, count))
            at += piece.numel()
        self._blocks = {aligned: torch.tensor(some, device=self._device).T.contiguous() for aligned, some in blocks.items() if some}
        self._weights: dict[float, Tensor] = {}  # float64 on the device: a number passed as an argument would be rounded to float32

    def lerp(self, end: Tensor, weight: float, sent: Tensor | None, finite: Tensor | None = None) -> None:
        """x <- x + weight (end - sent); `sent` is x itself if None. If `finite` [1], a bool, is false, x stays as it is."""
        if weight not in self._weights:
            self._weights[weight] = torch.full((1,), weight, dtype=torch.float64, device=self._device)
        start, flag = end if sent is None else sent, self._weights[weight] if finite is None else finite
        self._launch(_lerp, end, start, self._weights[weight], flag, finite is not None, sent is None, self._kind, self._wide)

    def read(self, flat: Tensor) -> None:
        """flat <- x."""
        self._launch(_copy, flat, True, self._kind)

    def write(self, flat: Tensor) -> None:
        """x <- flat."""
        self._launch(_copy, flat, False, self._kind)

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        with torch.cuda.device(self._device):  # Triton launches on the current device, which may be another one
            for aligned, blocks in self._blocks.items():
                kernel[(blocks.shape[1],)](*blocks, *arguments, aligned, GRAIN, BLOCK)


@cache
def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this machine can't build the kernels (a missing C compiler, say), or None if it can. Warns once."""
    if dtype not in TYPES:
        return f"there is no kernel for {dtype}"
    one = torch.zeros(1, device=device, dtype=dtype)
    return why_not_built(lambda: TritonOnePass([one]).write(torch.zeros_like(one)), "mixing")


# ---- kernels: each program works on one block -------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lerp(  # type: ignore[no-untyped-def]
    addresses,
    offsets,
    counts,
    end,
    sent,
    weight,
    finite,
    guarded: tl.constexpr,
    itself: tl.constexpr,
    kind: tl.constexpr,
    wide: tl.constexpr,
    aligned: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, at, i, here = _block(addresses, offsets, counts, kind, aligned, GRAIN, BLOCK)
    own = tl.load(x + i, mask=here).to(wide)
    start = own if itself else tl.load(sent + at + i, mask=here).to(wide)
    change = tl.load(end + at + i, mask=here).to(wide) - start
    if guarded:
        change = tl.where(tl.load(finite) != 0, change, 0.0)
    mixed = own + tl.load(weight).to(wide) * change
    tl.store(x + i, mixed.to(kind), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy(  # type: ignore[no-untyped-def]
    addresses,
    offsets,
    counts,
    packed,
    out: tl.constexpr,
    kind: tl.constexpr,
    aligned: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, at, i, here = _block(addresses, offsets, counts, kind, aligned, GRAIN, BLOCK)
    if out:
        tl.store(packed + at + i, tl.load(x + i, mask=here), mask=here)
    else:
        tl.store(x + i, tl.load(packed + at + i, mask=here).to(kind), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _block(  # type: ignore[no-untyped-def]
    addresses, offsets, counts, kind: tl.constexpr, aligned: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the start of a block in its tensor and in the packed bucket, and a mask of the elements that belong to it."""
    block = tl.program_id(0)
    x = tl.load(addresses + block).to(tl.pointer_type(kind))
    at = tl.load(offsets + block)
    count = tl.load(counts + block)
    if aligned:
        x = tl.multiple_of(x, 16)
        at = tl.multiple_of(at, GRAIN)
        count = tl.multiple_of(count, GRAIN)
    i = tl.arange(0, BLOCK)
    return x, at, i, i < count
