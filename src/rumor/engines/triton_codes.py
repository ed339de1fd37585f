"""Triton kernels for codes of 8 and 4 bits (codes.py defines them): each program works on one block of 256 numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small float32 rounds it to a whole number, ties to even


def round_trip(x: Tensor, bits: int) -> None:
    """x <- decode(encode(x)), for every row of a contiguous tensor [..., d]."""
    d = x.shape[-1]
    rows, blocks = x.numel() // d, triton.cdiv(d, BLOCK)
    with torch.cuda.device(x.device):
        _round_trip[(rows * blocks,)](x, d, blocks, bits, BLOCK)


def pack(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode blocks [N, 256]. Returns codes with step and low, exponents [N, 1] (as bytes), and the sum of the magnitudes [N]."""
    count, device = len(blocks), blocks.device
    code = torch.empty(count, BLOCK * bits // 8 + (4 if bits == 4 else 8), dtype=torch.uint8, device=device)
    exponents = torch.empty(count, 1, dtype=torch.uint8, device=device)
    sizes = torch.empty(count, dtype=torch.float32, device=device)
    scales = code.view(torch.float16 if bits == 4 else torch.float32)
    with torch.cuda.device(device):
        _pack[(count,)](blocks, code, scales, exponents, sizes, code.shape[1], scales.shape[1], bits, BLOCK)
    return code, exponents, sizes


def unpack(code: Tensor, exponents: Tensor | None, bits: int) -> Tensor:
    """Decode blocks [N, 256]. With 8 bits, step and low include the exponent."""
    blocks = torch.empty(len(code), BLOCK, dtype=torch.float32, device=code.device)
    scales = code.view(torch.float16 if bits == 4 else torch.float32)
    with torch.cuda.device(code.device):
        _unpack[(len(code),)](blocks, code, scales, code if exponents is None else exponents, code.shape[1], scales.shape[1], bits, BLOCK)
    return blocks


# ---- kernels -----------------------------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _levels(x, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of a block, its step, low and exponent. `low` is NaN if a number of the block is not finite."""
    highest, lowest = tl.max(x, 0), tl.min(x, 0)
    magnitude = tl.maximum(highest, -lowest)
    exponent = magnitude.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    v, highest, lowest = x * scale, highest * scale, lowest * scale
    if bits == 4:
        low = lowest.to(tl.float16).to(tl.float32)
        step = tl.div_rn(highest - low, 15.0).to(tl.float16).to(tl.float32)
        step = tl.where(step == 0.0, 1.0, step)
        inverse, most = tl.div_rn(1.0, step), 15.0
    else:
        low = lowest
        step = tl.div_rn(highest - low, 255.0)
        inverse, most = tl.div_rn(255.0, (highest - low) + 1e-8), 255.0
    code = ((v - low) * inverse + TO_NEAREST) - TO_NEAREST
    low = tl.where(tl.sum(x - x, 0) == 0.0, low, float("nan"))  # a maximum need not be NaN where one number is
    return tl.minimum(tl.maximum(code, 0.0), most), step, low, exponent


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _round_trip(x, d, blocks, bits: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    i = block * BLOCK + tl.arange(0, BLOCK)
    here = x + row * d + i
    value = tl.load(here, mask=i < d, other=0.0)
    code, step, low, exponent = _levels(value.to(tl.float32), bits)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    q = (code * step + low) * power if bits == 4 else code * (step * power) + low * power
    tl.store(here, q.to(value.dtype), mask=i < d)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pack(x, out, scales, exponents, sizes, width, scales_width, bits: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + program * BLOCK + i)
    code, step, low, exponent = _levels(value, bits)
    code = code.to(tl.int32)
    row = scales + program * scales_width
    if bits == 4:
        first, second = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
        tl.store(out + program * width + tl.arange(0, BLOCK // 2), (first | (second << 4)).to(tl.uint8))
        tl.store(row + BLOCK // 4, step.to(tl.float16))
        tl.store(row + BLOCK // 4 + 1, low.to(tl.float16))
    else:
        power = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(out + program * width + i, code.to(tl.uint8))
        tl.store(row + BLOCK // 4, step * power)
        tl.store(row + BLOCK // 4 + 1, low * power)
    tl.store(exponents + program, exponent.to(tl.uint8))
    tl.store(sizes + program, tl.sum(tl.abs(value), 0))  # NaN if there is one in the block, which a maximum need not be


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unpack(out, code, scales, exponents, width, scales_width, bits: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    row = scales + program * scales_width + BLOCK // 4
    step, low = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32)
    if bits == 4:
        pair = tl.load(code + program * width + i // 2).to(tl.int32)
        level = ((pair >> (4 * (i % 2))) & 15).to(tl.float32)
        power = (tl.load(exponents + program).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        q = (level * step + low) * power
    else:
        q = tl.load(code + program * width + i).to(tl.int32).to(tl.float32) * step + low
    tl.store(out + program * BLOCK + i, q)
