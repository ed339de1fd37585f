"""LAMB (You et al., 2020), for one model or for the stacked models of many nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam whose step has, for each tensor, the length of the tensor itself times lr:

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x
    x <- x - lr (||x|| / ||u||) u                                              (lr u where a norm is zero)

    `stacked`: tensors are [n, ...], one row a node, and norms are each node's own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        stacked: bool = False,
    ):
        if not (float(lr) >= 0 and all(0 <= b < 1 for b in betas) and eps > 0 and weight_decay >= 0):
            raise ValueError(f"Lamb needs lr, eps, weight_decay >= 0 and 0 <= betas < 1, got {lr=}, {betas=}, {eps=}, {weight_decay=}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "stacked": stacked})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in (p for p in group["params"] if p.grad is not None):
                self._step(x, group)
        return loss

    def _step(self, x: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2), g = self.state[x], group["betas"], x.grad
        assert g is not None
        if not state:
            # t is a tensor, so that a captured step can count
            state.update(t=torch.zeros((), dtype=torch.float64, device=x.device), m=torch.zeros_like(x), v=torch.zeros_like(x))
        t, m, v = state["t"], state["m"], state["v"]
        t += 1
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt_() + group["eps"])
        u.add_(x, alpha=group["weight_decay"])
        rows = [t.reshape(len(t) if group["stacked"] else 1, -1).norm(dim=1) for t in (x, u)]
        ratio = torch.where((rows[0] > 0) & (rows[1] > 0), rows[0] / rows[1], 1.0)
        scale = ratio.view(-1, *[1] * (x.dim() - 1)) if group["stacked"] else ratio.view([1] * x.dim())
        x.sub_(group["lr"] * scale * u)
