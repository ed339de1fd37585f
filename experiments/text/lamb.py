"""LAMB (You et al., 2020) as BERT is trained with it, for one model or for the stacked models of many nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam, but the step of each weight tensor has the length lr times the norm of the tensor:

    g <- g min(1, max_norm / ||all gradients of the model||)
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x
    x <- x - lr (||x|| / ||u||) u                                              (lr u if a norm is zero)

    A tensor without weight decay (biases, norms) takes the step lr u: its trust ratio is 1, as in NVIDIA's implementation, on which the
    paper's BERT runs. Biases begin at zero, and a step in proportion to their norm would keep them there. `always_adapt` scales these
    steps too, and `max_norm=None` leaves the gradients as they are.

    With `stacked`, tensors are [n, ...] with one row per node, and each node has its own norms. With `compiled`, torch.compile fuses the
    step; then pass lr as a tensor, because each new float would be compiled again.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_norm: float | None = 1.0,
        always_adapt: bool = False,
        stacked: bool = False,
        compiled: bool = False,
    ):
        if not (float(lr) >= 0 and all(0 <= b < 1 for b in betas) and eps > 0 and weight_decay >= 0):
            raise ValueError(f"Lamb needs lr, eps, weight_decay >= 0 and 0 <= betas < 1, got {lr=}, {betas=}, {eps=}, {weight_decay=}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"Lamb needs max_norm > 0, or None for no clipping, got {max_norm=}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._max_norm, self._always_adapt, self._stacked = max_norm, always_adapt, stacked
        self._shrink, self._advance = (torch.compile(f, dynamic=False, fullgraph=True) if compiled else f for f in (_shrink, _advance))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [x.grad for group in self.param_groups for x in group["params"] if x.grad is not None]
        if self._max_norm is not None and gradients:
            self._shrink(gradients, self._max_norm, self._stacked)
        for group in self.param_groups:
            trained = [(x, x.grad, *self._state(x)) for x in group["params"] if x.grad is not None]
            adapt = self._always_adapt or group["weight_decay"] > 0
            self._advance(trained, group["lr"], group["betas"], group["eps"], group["weight_decay"], adapt, self._stacked)
        return loss

    def _state(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state[x]
        if not state:
            # t is a tensor, so that a step in a CUDA graph can count
            state.update(t=torch.zeros((), device=x.device), m=torch.zeros_like(x), v=torch.zeros_like(x))
        return state["t"], state["m"], state["v"]


def _shrink(gradients: list[Tensor], max_norm: float, stacked: bool) -> None:
    """Clips the gradients of each node to `max_norm`, all tensors together."""
    norm = torch.stack([_norms(g, stacked) for g in gradients]).norm(dim=0)  # [n], or [1] for one model
    scale = (max_norm / norm).clamp(max=1.0)  # a norm of zero gives inf, hence 1
    for g in gradients:
        g.mul_(_spread(scale, g, stacked))


def _advance(
    trained: list[tuple[Tensor, ...]],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adapt: bool,
    stacked: bool,
) -> None:
    """Steps all tensors of a group. `trained` holds x, its gradient, t, m and v for each."""
    b1, b2 = betas
    for x, g, t, m, v in trained:
        t += 1
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        u = (m / _one_minus_power(b1, t, x.dtype)) / ((v / _one_minus_power(b2, t, x.dtype)).sqrt_() + eps)
        u.add_(x, alpha=weight_decay)
        if adapt:
            norms = [_norms(y, stacked) for y in (x, u)]
            u.mul_(_spread(torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0), x, stacked))
        x.sub_(lr * u)


def _norms(x: Tensor, stacked: bool) -> Tensor:
    """The norm of each node's row [n], or of the whole tensor [1]."""
    return x.reshape(len(x) if stacked else 1, -1).norm(dim=1)


def _spread(scale: Tensor, x: Tensor, stacked: bool) -> Tensor:
    """Reshapes one number per node so that it multiplies each node's row of x."""
    return scale.view(-1, *[1] * (x.dim() - 1)) if stacked else scale.view([1] * x.dim())


def _one_minus_power(b: float, t: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - b^t, accurate in float32, too. A compiled step computes it for every element, so float64 would be slow."""
    return -torch.expm1(t.to(torch.promote_types(dtype, torch.float32)) * (math.log(b) if b > 0 else -math.inf))
