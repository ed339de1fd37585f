"""Codes: numbers as 16, 8 or 4 bits, for smaller messages.

A code of 8 or 4 bits works on blocks of 256 numbers. Each block has its own scale, so its error is relative to its own range:

    e     the exponent of the largest magnitude; v = 2^-e x is then below 2
    low   = min v,   step = (max v - low) / (2^bits - 1)
    code  = round((v - low) / step)                    nearest, ties to even
    q     = 2^e (code step + low)                      what the receiver uses, within about half a step of x (`low` is rounded, too)

With 4 bits, `low` and `step` travel in float16. The exponent keeps them accurate for blocks of any size, down to the smallest float32.
With 16 bits, numbers travel as bfloat16. Codes of float64 numbers are those of the nearest float32.

On a CPU, torch's own row-wise operators for embeddings (fbgemm's vector code) do the work; on a GPU, Triton kernels. The plain functions
in code_kernels.py define the result.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rumor.engines.code_kernels import BLOCK as BLOCK
from rumor.engines.code_kernels import kernels_on, triton_on

WIDTHS = (32, 16, 8, 4)  # 32: as they are
# On a CPU, so many blocks are encoded or decoded at a time. Fewer of them mean more calls. With more, the temporary tensors of torch's
# operators are so large that the system may map their memory anew every time, which takes longer than the work itself.
ENCODED, DECODED = 2048, 1024
SUMMED = 2**14  # codes of a block that are summed at a time: they are joined first, which takes memory

Parts = tuple[Tensor, ...]  # what encodes N blocks: tensors [N, bytes]


class Code(ABC):
    """How blocks of numbers become bytes, and back.

    Attributes:
        bits: for each number.
        widths: bytes of each part of a block.
    """

    bits: int
    widths: tuple[int, ...]

    @abstractmethod
    def pack(self, blocks: Tensor) -> tuple[Parts, Tensor]:
        """Encode blocks [N, 256] in float32. Returns the parts, and a number that is finite only if all of `blocks` is."""

    @abstractmethod
    def unpack(self, parts: Parts) -> Tensor:
        """Decode N blocks, [N, 256] in float32, or in bfloat16 if all numbers are."""

    def nbytes(self, d: int) -> int:
        """Number of bytes of d numbers."""
        return blocks_of(d) * sum(self.widths)

    def encode(self, x: Tensor, out: Parts, leave_rest: bool = False) -> Tensor:
        """Encode `x` [d] into `out`. Returns a number that is finite only if all of `x` is.

        With leave_rest=True, `x` becomes what the code leaves out: x - decode(encode(x)).
        """
        sizes = []
        for numbers, *places in _runs(ENCODED, x, out):
            parts, size = self._pack_run(numbers)
            self._store(parts, places, numbers if leave_rest else None)
            sizes.append(size)
        return sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax()

    def _pack_run(self, numbers: Tensor) -> tuple[Parts, Tensor]:
        """Do what `pack` does for one run of numbers."""
        return self.pack(as_blocks(numbers))

    def _store(self, parts: Parts, out: Sequence[Tensor], x: Tensor | None) -> None:
        """Copy `parts` to `out`, and subtract from `x` what they decode to."""
        for place, part in zip(out, parts, strict=True):
            place.copy_(part)
        if x is not None:
            for numbers, *some in _runs(DECODED, x, parts):
                numbers.sub_(self.unpack(tuple(some)).view(-1)[: numbers.numel()])

    def decode(self, code: Parts, out: Tensor) -> Tensor:
        """Decode into `out` [d], of any float dtype."""
        for numbers, *some in _runs(DECODED, out, code):
            numbers.copy_(self.unpack(tuple(some)).view(-1)[: numbers.numel()])
        return out

    def weighted_sum(self, codes: Sequence[Parts], weights: Sequence[float], out: Tensor) -> Tensor:
        """Return sum_j weights_j decode(codes_j), [d] in the dtype of `out`. It is in `out`, or where an operator of torch has put it."""
        out.zero_()
        for numbers, *parts in _runs(DECODED, out, [part for code in codes for part in code]):
            for code, weight in zip(self._grouped(parts), weights, strict=True):
                numbers.add_(self.unpack(code).view(-1)[: numbers.numel()], alpha=weight)
        return out

    def _grouped(self, parts: Sequence[Tensor]) -> list[Parts]:
        """Return the parts of several codes, end to end, by code."""
        count = len(self.widths)
        return [tuple(parts[i : i + count]) for i in range(0, len(parts), count)]

    def round_trip(self, x: Tensor) -> Tensor:
        """x <- decode(encode(x)), for every row of x [..., d]."""
        if (kernels := triton_on(x.device)) is not None and x.is_contiguous():
            kernels.round_trip(x, self.bits)
            return x
        return x.copy_(self.unpack(self.pack(as_blocks(x))[0]).view(*x.shape[:-1], -1)[..., : x.shape[-1]])

    def places(self, code: Tensor) -> Parts:
        """Return where the parts are in the bytes of a message."""
        count, at, places = code.numel() // sum(self.widths), 0, []
        for width in self.widths:
            places.append(code[at : at + count * width].view(count, width))
            at += count * width
        return tuple(places)


class BFloat16(Code):
    """The nearest bfloat16."""

    bits = 16
    widths = (2 * BLOCK,)

    def pack(self, blocks: Tensor) -> tuple[Parts, Tensor]:
        rounded = blocks.bfloat16()  # which may overflow
        return (rounded.view(torch.uint8),), _magnitudes(rounded).amax().float()

    def unpack(self, parts: Parts) -> Tensor:
        return parts[0].view(torch.bfloat16)

    def round_trip(self, x: Tensor) -> Tensor:
        return x.copy_(x.float().bfloat16())


class Levels(Code):
    """2^bits levels for each block."""

    @abstractmethod
    def code_of(self, scaled: Tensor, extremes: Tensor, powers: Tensor) -> Parts:
        """Encode blocks [N, 256] that are divided by `powers` [N, 1], 2^e; `extremes` [N, 2] are their smallest and largest numbers."""

    @abstractmethod
    def sum_rows(self, codes: Sequence[Parts], weights: Tensor) -> Tensor:
        """Return sum_j weights_j decode(codes_j) as blocks [N, 256] in float32, on a CPU."""

    def pack(self, blocks: Tensor) -> tuple[Parts, Tensor]:
        if (kernels := triton_on(blocks.device)) is not None:
            *parts, sizes = kernels.pack(blocks, self.bits)
            return tuple(parts[: len(self.widths)]), sizes.amax()
        extremes = _extremes(blocks)
        powers, size = _powers(extremes)
        factors = powers.reciprocal()
        return self.code_of(blocks * factors, extremes.mul_(factors), powers), size

    def _pack_run(self, numbers: Tensor) -> tuple[Parts, Tensor]:
        """On a CPU, use memory that is there already, and copy nothing but the last block, to fill it up."""
        if numbers.device.type != "cpu":
            return super()._pack_run(numbers)
        missing, whole = -numbers.numel() % BLOCK, numbers.numel() // BLOCK
        if missing:
            blocks, last = as_blocks(numbers[: whole * BLOCK]), as_blocks(numbers[whole * BLOCK :])
            extremes = torch.cat([_extremes(blocks), _extremes(last)])
        else:
            blocks = as_blocks(numbers)
            extremes = _extremes(blocks)
        powers, size = _powers(extremes)
        factors, scaled = powers.reciprocal(), _of_thread.blocks[: len(powers)]
        torch.mul(blocks, factors[:whole], out=scaled[:whole])
        if missing:
            torch.mul(last, factors[whole:], out=scaled[whole:])
        return self.code_of(scaled, extremes.mul_(factors), powers), size

    def weighted_sum(self, codes: Sequence[Parts], weights: Sequence[float], out: Tensor) -> Tensor:
        if out.device.type != "cpu" or out.dtype != torch.float32:
            return super().weighted_sum(codes, weights, out)
        at_once, factors = max(1, SUMMED // len(codes)), _as_tensor(tuple(weights))
        if len(codes[0][0]) <= at_once:
            return self.sum_rows(codes, factors).view(-1)[: out.numel()]
        for numbers, *parts in _runs(at_once, out, [part for code in codes for part in code]):
            numbers.copy_(self.sum_rows(self._grouped(parts), factors).view(-1)[: numbers.numel()])
        return out


class Levels8(Levels):
    """256 levels for each block; low and step in float32."""

    bits = 8
    widths = (BLOCK + 8,)

    def code_of(self, scaled: Tensor, extremes: Tensor, powers: Tensor) -> Parts:
        code = kernels_on(scaled).pack8(scaled)
        code.view(torch.float32)[:, BLOCK // 4 :].mul_(powers)
        return (code,)

    def unpack(self, parts: Parts) -> Tensor:
        (code,) = parts
        kernels = triton_on(code.device)
        return kernels_on(code).unpack8(code) if kernels is None else kernels.unpack(code, None, self.bits)

    def sum_rows(self, codes: Sequence[Parts], weights: Tensor) -> Tensor:
        rows = [code for (code,) in codes]
        return _sum_rows(torch.ops.quantized.embedding_bag_byte_rowwise_offsets, rows, weights.repeat(len(rows[0])))


class Levels4(Levels):
    """16 levels for each block; low and step in float16, and the exponent as one byte."""

    bits = 4
    widths = (BLOCK // 2 + 4, 1)

    def code_of(self, scaled: Tensor, extremes: Tensor, powers: Tensor) -> Parts:
        return kernels_on(scaled).pack4(scaled, extremes), powers.view(torch.int32) >> 23  # one byte in a message

    def unpack(self, parts: Parts) -> Tensor:
        code, exponents = parts
        if (kernels := triton_on(code.device)) is not None:
            return kernels.unpack(code, exponents, self.bits)
        return kernels_on(code).unpack4(code).mul_(_power(exponents))

    def sum_rows(self, codes: Sequence[Parts], weights: Tensor) -> Tensor:
        scales = _power(torch.cat([exponents for _, exponents in codes], dim=1)).mul_(weights)
        return _sum_rows(torch.ops.quantized.embedding_bag_4bit_rowwise_offsets, [code for code, _ in codes], scales)


CODES: dict[int, Code] = {code.bits: code for code in (BFloat16(), Levels8(), Levels4())}


def check_width(bits: object) -> None:
    """Refuse a number of bits that no code has."""
    if type(bits) is not int or bits not in WIDTHS:
        raise ValueError(f"bits must be 32, 16, 8 or 4, got bits={bits!r}")


def blocks_of(d: int) -> int:
    """Number of blocks of d numbers."""
    return -(-d // BLOCK)


class _OfThread(threading.local):
    """Memory for the scaled blocks of one run, and for the codes of a sum, end to end. DDP's hook encodes in several threads."""

    def __init__(self) -> None:
        self.blocks = torch.empty(ENCODED, BLOCK, dtype=torch.float32, device="cpu")
        self._rows = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, count: int, width: int) -> Tensor:
        """Return memory for so many rows of codes. It is valid until the next call."""
        if len(self._rows) < count * width:
            self._rows = torch.empty(count * width, dtype=torch.uint8, device="cpu")
        return self._rows[: count * width].view(count, width)


_of_thread = _OfThread()


def _runs(blocks: int, x: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut numbers x [d] and the parts of their code into runs of so many blocks. A GPU takes all at once."""
    count = len(parts[0])
    if count <= blocks or x.device.type != "cpu":
        yield x, *parts
        return
    for start in range(0, count, blocks):
        end = start + blocks
        yield x[start * BLOCK : end * BLOCK], *(part[start:end] for part in parts)


@lru_cache(maxsize=64)
def _as_tensor(weights: tuple[float, ...]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float32, device="cpu")


def _sum_rows(embedding_bag: Callable[..., Tensor], codes: list[Tensor], scales: Tensor) -> Tensor:
    """Return sum_j scales_j decode(codes_j), [N, 256], from J codes [N, bytes] and scales [N, J]: each block is a bag of J embeddings."""
    count, blocks = len(codes), len(codes[0])
    rows, starts = _bags(count, blocks)
    joined = torch.cat(codes, out=_of_thread.rows(count * blocks, codes[0].shape[1]))
    return embedding_bag(joined, rows, starts, False, 0, False, scales.view(-1))


@lru_cache(maxsize=64)
def _bags(count: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each bag, end to end, and where each bag begins."""
    rows = torch.arange(blocks, dtype=torch.int32)[:, None] + torch.arange(count, dtype=torch.int32) * blocks
    return rows.flatten(), torch.arange(0, count * blocks, count, dtype=torch.int32)


def as_blocks(x: Tensor) -> Tensor:
    """Return the numbers of x [..., d] in float32 as blocks [N, 256]; each row ends with a block of its own, filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.float().reshape(-1, BLOCK)


def _magnitudes(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block, [N, 1]. NaN if it holds one."""
    return torch.maximum(blocks.amax(dim=1, keepdim=True), -blocks.amin(dim=1, keepdim=True))


def _extremes(blocks: Tensor) -> Tensor:
    """Return the smallest and the largest number of each block, [N, 2]. NaN if it holds one."""
    return torch.cat([blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)], dim=1)


def _powers(extremes: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^e of each block, [N, 1], and a number that is finite only if all `extremes` are.

    e is the exponent of the largest magnitude as float32 stores it, within -126 and 126, so that 2^e and 2^-e are not denormal. If a
    number of a block is not finite, its 2^e is NaN, and so is all that its code decodes to.
    """
    powers = extremes.abs().amax(dim=1, keepdim=True)
    bits = powers.view(torch.int32).bitwise_and_(0xFF << 23)  # the exponent's: `powers` are powers of 2 now, infinite if not finite before
    size, nan_or_zero = powers.amax(), powers - powers
    bits.clamp_(1 << 23, 253 << 23)
    return powers.add_(nan_or_zero), size


def _power(exponents: Tensor) -> Tensor:
    """Return 2^e for e + 127, exactly."""
    return (exponents.int() << 23).view(torch.float32)
