"""Properties of a module's tensors: which are averaged, and which part of them this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Record no history, and make tensors that later steps can use, even if the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_averaged(buffer: Tensor) -> bool:
    """Return whether a buffer is averaged: floats are, while integers (counts, masks) stay each node's own."""
    return buffer.is_floating_point() or buffer.is_complex()


def is_sharded(t: Tensor) -> bool:
    """Return whether it is a DTensor, of which this rank holds a part."""
    return hasattr(t, "device_mesh")


def local_part(t: Tensor) -> Tensor:
    """Return the part that this rank holds, in place: the shard of a DTensor, else the tensor itself."""
    if not is_sharded(t):
        return t
    with torch.no_grad():  # else it would be a view with a history
        shard: Tensor = t.to_local()  # type: ignore[attr-defined]
        return shard


def as_real(t: Tensor) -> Tensor:
    """Return the part that this rank holds, without its autograd history; complex numbers as pairs of real ones."""
    return torch.view_as_real(local_part(t).detach()) if t.is_complex() else local_part(t).detach()
