"""Kernels that encode and decode blocks of numbers (codes.py): the definition, torch's operators on a CPU, and Triton on a GPU."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256  # numbers


class Kernels(ABC):
    """Encodes and decodes blocks of numbers below 4, in the layout of torch's row-wise operators: codes, then step, then low."""

    pack8: Callable[[Tensor], Tensor]  # [N, 256] float32 -> [N, 264]
    unpack8: Callable[[Tensor], Tensor]
    # blocks and their extremes -> [N, 132]; the first number of two is in the lower half of a byte
    pack4: Callable[[Tensor, Tensor], Tensor]
    unpack4: Callable[[Tensor], Tensor]


class Plain(Kernels):
    """The definition, in plain torch."""

    @staticmethod
    def pack8(blocks: Tensor) -> Tensor:
        low = blocks.amin(dim=1, keepdim=True)
        spread = blocks.amax(dim=1, keepdim=True) - low
        codes = ((blocks - low) * (255 / (spread + 1e-8))).round_().clamp_(0, 255).to(torch.uint8)
        return torch.cat([codes, torch.cat([spread / 255, low], dim=1).view(torch.uint8)], dim=1)

    @staticmethod
    def unpack8(code: Tensor) -> Tensor:
        scales = code[:, BLOCK:].contiguous().view(torch.float32)  # step, low
        return code[:, :BLOCK].float() * scales[:, :1] + scales[:, 1:]

    @staticmethod
    def pack4(blocks: Tensor, extremes: Tensor) -> Tensor:
        lowest, highest = extremes[:, :1], extremes[:, 1:]
        low = lowest.half()
        step = ((highest - low.float()) / 15).half()
        step = torch.where(step == 0, 1.0, step)  # all numbers are `low`
        codes = ((blocks - low.float()) * (1 / step.float())).round_().clamp_(0, 15).to(torch.uint8)
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        return torch.cat([pairs, torch.cat([step, low], dim=1).view(torch.uint8)], dim=1)

    @staticmethod
    def unpack4(code: Tensor) -> Tensor:
        scales = code[:, BLOCK // 2 :].contiguous().view(torch.float16).float()  # step, low
        pairs = code[:, : BLOCK // 2]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).view(-1, BLOCK)
        return codes.float() * scales[:, :1] + scales[:, 1:]


class Rowwise(Kernels):
    """torch's operators for embedding tables, on a CPU."""

    pack8 = staticmethod(torch.ops.quantized.embedding_bag_byte_prepack)
    unpack8 = staticmethod(torch.ops.quantized.embedding_bag_byte_unpack)
    pack4 = staticmethod(
        torch.ops.quantized.embedding_bag_4bit_prepack_with_rowwise_min_max
        if hasattr(torch.ops.quantized, "embedding_bag_4bit_prepack_with_rowwise_min_max")
        else lambda blocks, _: torch.ops.quantized.embedding_bag_4bit_prepack(blocks)  # older versions of torch
    )
    unpack4 = staticmethod(torch.ops.quantized.embedding_bag_4bit_unpack)


def kernels_on(x: Tensor) -> type[Kernels]:
    return Rowwise if x.device.type == "cpu" else Plain


class TritonCodes(Protocol):
    """The functions of triton_codes.py."""

    def round_trip(self, x: Tensor, bits: int) -> None: ...
    def pack(self, blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def unpack(self, code: Tensor, exponents: Tensor | None, bits: int) -> Tensor: ...


@cache
def triton_on(device: torch.device) -> TritonCodes | None:
    """Return the Triton kernels, if there are any for this device and they can be built. Warns once if they can't."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from rumor.engines import triton_codes

    return triton_codes if why_not_built(lambda: triton_codes.round_trip(torch.zeros(1, device=device), 4), "codes") is None else None


def why_not_built(run: Callable[[], object], what: str) -> str | None:
    """Run a Triton kernel. If it can't be built (without a C compiler, say), warn, and return the reason. `what` is then slower."""
    try:
        run()
    except Exception as error:  # Triton and the compiler behind it raise all sorts of errors
        reason = str(error).strip().split("\n")[-1] or type(error).__name__
        warnings.warn(f"Triton can't build its kernels here ({reason}): {what} will take several passes over memory", stacklevel=3)
        return reason
    return None
