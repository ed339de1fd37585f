"""DDP's layout: where the numbers of a parameter are in a bucket of DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rumor.model.tensors import as_real


def count(parameter: Tensor) -> int:
    """Number of real numbers of a parameter. DDP's buckets hold a complex one as two."""
    return as_real(parameter).numel()


def _order_of(real: Tensor) -> list[int]:
    """Return the order of dimensions in which DDP's buckets hold a gradient: that in memory, if the parameter has no gaps there."""
    shape, strides = real.shape, real.stride()
    has_gaps = real.numel() != 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return list(range(real.dim())) if has_gaps else sorted(range(real.dim()), key=lambda i: -strides[i])


def in_order_of(parameter: Tensor, state: Tensor) -> Tensor:
    """Return numbers that belong to a parameter's, such as an optimizer's state, in the order of DDP's buckets."""
    real = as_real(parameter)
    return as_real(state).reshape(real.shape).permute(_order_of(real)).reshape(-1)


def in_shape_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Return the part of a parameter in a bucket in the parameter's own shape: the reverse of `in_order_of`."""
    real = as_real(parameter)
    order = _order_of(real)
    return part.view([real.shape[i] for i in order]).permute([order.index(i) for i in range(real.dim())])


def parts_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each parameter in a bucket."""
    return list(torch.split(flat, list(map(count, parameters))))
