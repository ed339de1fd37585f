"""Convolutions of all nodes at once, where each node has its own weights. Under `torch.func.vmap` they run as one kernel.

cuDNN would run a grouped convolution. Channels come last: x [B, H, W, C] and w [O, K, K, C] for one node. On a GPU with Triton the three
products (y, and the gradients of x and w) are implicit matrix products in tiles, with a grid of tiles for every node. Elsewhere torch's own
convolution runs node by node.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def convolution(x: Tensor, w: Tensor, padding: int) -> Tensor:
    """A convolution with stride 1 of x [B, H, W, C] and w [O, K, K, C]. Under vmap it runs for every node."""
    result: Tensor = _one(x, w, padding)
    return result


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and find_spec("triton") is not None


def _out(size: int, kernel: int, padding: int) -> int:
    return size + 2 * padding - kernel + 1


# ---- all nodes: x [n, B, H, W, C], w [n, O, K, K, C] ------------------------------------------------------------------------------------


@torch.library.custom_op("rumor_images::forward", mutates_args=())
def _forward(x: Tensor, w: Tensor, padding: int) -> Tensor:
    x, w = x.contiguous(), w.contiguous()
    if _has_kernels(x):
        from images import kernels

        return kernels.forward(x, w, padding)
    return _node_by_node(x, w, padding)


@_forward.register_fake
def _(x: Tensor, w: Tensor, padding: int) -> Tensor:
    n, batch, height, width, _ = x.shape
    return x.new_empty(n, batch, _out(height, w.shape[2], padding), _out(width, w.shape[2], padding), w.shape[1])


@torch.library.custom_op("rumor_images::gradient_of_x", mutates_args=())
def _gradient_of_x(g: Tensor, w: Tensor, padding: int) -> Tensor:
    """The gradient of x: a convolution of g with the flipped weights, with input and output channels swapped."""
    g, w = g.contiguous(), w.contiguous()
    wider = w.shape[2] - 1 - padding
    if _has_kernels(g):
        from images import kernels

        return kernels.forward(g, w, wider, turned=True)
    return _node_by_node(g, w.flip(2, 3).permute(0, 4, 2, 3, 1), wider)


@_gradient_of_x.register_fake
def _(g: Tensor, w: Tensor, padding: int) -> Tensor:
    n, batch, height, width, _ = g.shape
    size, wider = w.shape[2], w.shape[2] - 1 - padding
    return g.new_empty(n, batch, _out(height, size, wider), _out(width, size, wider), w.shape[4])


@torch.library.custom_op("rumor_images::gradient_of_w", mutates_args=())
def _gradient_of_w(x: Tensor, g: Tensor, size: int, padding: int) -> Tensor:
    x, g = x.contiguous(), g.contiguous()
    if _has_kernels(x):
        from images import kernels

        return kernels.gradient_of_w(x, g, size, padding)
    shape = (g.shape[4], x.shape[4], size, size)
    rows = [torch.nn.grad.conv2d_weight(_nchw(a), shape, _nchw(b), padding=padding) for a, b in zip(x, g, strict=True)]
    return torch.stack([row.permute(0, 2, 3, 1) for row in rows]).contiguous()


@_gradient_of_w.register_fake
def _(x: Tensor, g: Tensor, size: int, padding: int) -> Tensor:
    return x.new_empty(x.shape[0], g.shape[4], size, size, x.shape[4])


def _nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _node_by_node(x: Tensor, w: Tensor, padding: int) -> Tensor:
    rows = [functional.conv2d(_nchw(a), _nchw(b), padding=padding).permute(0, 2, 3, 1) for a, b in zip(x, w, strict=True)]
    return torch.stack(rows).contiguous()


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, w, ctx.padding = inputs
    ctx.save_for_backward(x, w)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    of_x = _gradient_of_x(g, w, ctx.padding) if ctx.needs_input_grad[0] else None
    of_w = _gradient_of_w(x, g, w.shape[2], ctx.padding) if ctx.needs_input_grad[1] else None
    return of_x, of_w, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- one node: vmap turns these into the operators above --------------------------------------------------------------------------------


@torch.library.custom_op("rumor_images::convolution", mutates_args=())
def _one(x: Tensor, w: Tensor, padding: int) -> Tensor:
    return _forward(x[None], w[None], padding)[0].clone()


@_one.register_fake
def _(x: Tensor, w: Tensor, padding: int) -> Tensor:
    return x.new_empty(x.shape[0], _out(x.shape[1], w.shape[1], padding), _out(x.shape[2], w.shape[1], padding), w.shape[0])


@_one.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None, None], x: Tensor, w: Tensor, padding: int) -> tuple[Tensor, int]:
    both = [t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip((x, w), in_dims, strict=False)]
    return _forward(*both, padding), 0


def _gradients_of_one(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    of_x = _gradient_of_x(g[None], w[None], ctx.padding)[0] if ctx.needs_input_grad[0] else None
    of_w = _gradient_of_w(x[None], g[None], w.shape[1], ctx.padding)[0] if ctx.needs_input_grad[1] else None
    return of_x, of_w, None


_one.register_autograd(_gradients_of_one, setup_context=_save)
