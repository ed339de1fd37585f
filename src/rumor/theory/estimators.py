"""Estimators of sigma^2, b^2, L and F_0 from a model and a few batches of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from rumor.schedule import check_whole

LossFn = Callable[..., Tensor]
AT_LEAST = 5  # Lanczos steps: a start that is almost an eigenvector may stand still for a while


@dataclass(frozen=True)
class Estimate:
    """The constants of the paper's formulas at one point x, the model's.

    Attributes:
        n: nodes.
        sigma2: sigma^2, variance of a stochastic gradient at the size of batch that was given, averaged over nodes.
        b2: b^2 = 1/n sum_i ||grad f_i - grad f||^2.
        L: the largest |eigenvalue| of the nodes' Hessians.
        loss: f, the mean loss: F_0 if the least loss is 0.
    """

    n: int
    sigma2: float
    b2: float
    L: float
    loss: float


def estimate(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Sequence[Any]], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> Estimate:
    """Estimates sigma^2, b^2, L and the loss where the model stands, which is left as it was.

    With g_ik the gradient of batch k of node i, g_i its mean over K batches and g the mean of these:

        sigma^2 = 1/n sum_i 1/(K-1) sum_k ||g_ik - g_i||^2
        b^2     = 1/n sum_i ||g_i - g||^2  -  (1 - 1/n) sigma^2 / K,      at least 0: the second term is the noise's share in the first
        L       = max_i |largest eigenvalue of the Hessian of f_i|         (Lanczos, from Hessian-vector products)

    All hold at this x only. The theorems want bounds for all x, and a convex problem's b^2 at x*: estimate at the start and near the
    end, and take the larger. The Hessian of few samples has a larger top eigenvalue than that of f_i, so L comes out too large (twice,
    say) unless a node's batches hold many more samples than its Hessian has large eigenvalues. The model runs in the mode it is in; in
    training mode dropout counts as noise.

    Args:
        model: any module; parameters that don't require gradients count as constants.
        loss_fn: `loss_fn(model, *batch)` gives one number, as for `rumor.Simulator`.
        batches: `batches[i]` are K >= 2 batches of node i, of the size that training will use; a batch is a tuple of arguments.
        iterations: Hessian-vector products for L, at most, for each batch.
        tolerance: relative change at which L counts as found.
        seed: for all that is random.

    >>> model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> squared = lambda model, x, y: 0.5 * (model(x) - y).square().mean()
    >>> x, y = torch.full((4, 1), 3.0, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    >>> found = estimate(model, squared, [[(x, y), (x, y)], [(x, y), (x, y)]])
    >>> round(found.L, 9), found.sigma2, found.b2
    (9.0, 0.0, 0.0)
    """
    check_whole("iterations", iterations, 1)
    nodes = [list(node) for node in batches]
    for i, node in enumerate(nodes):
        if len(node) < 2:
            raise ValueError(f"a variance needs at least 2 batches of each node, node {i} has {len(node)}: batches[i] is a list of batches")
    if not nodes:
        raise ValueError("batches is empty: give a list of batches for each node")
    over_nodes = _Moments()
    losses: list[float] = []
    sigma2s: list[float] = []
    shares: list[float] = []  # of the noise in the square of a node's mean gradient
    Ls: list[float] = []
    with _undisturbed(model):
        problem = _Problem(model, loss_fn, seed)
        for node in nodes:
            over_batches = _Moments()
            for batch in node:
                loss, gradient = problem.gradient(batch, len(losses))
                losses.append(loss)
                over_batches.add(gradient)
            sigma2s.append(over_batches.squares / (len(node) - 1))
            shares.append(sigma2s[-1] / len(node))
            over_nodes.add(over_batches.mean)
            Ls.append(problem.smoothness(node, iterations, tolerance))
    n = len(nodes)
    b2 = over_nodes.squares / n - (1 - 1 / n) * float(np.mean(shares))
    return Estimate(n, float(np.mean(sigma2s)), max(b2, 0.0), max(Ls), float(np.mean(losses)))


def smoothness(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Any], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> float:
    """The largest |eigenvalue| of the Hessian of the mean loss over `batches`, where the model stands.

    With all batches of all nodes this is the smoothness of f, never above the L of `estimate`, which is that of the worst f_i.
    """
    if not len(batches):
        raise ValueError("batches is empty: give at least one batch")
    with _undisturbed(model):
        return _Problem(model, loss_fn, seed).smoothness(list(batches), iterations, tolerance)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """The caller's random numbers go on afterwards as if nothing had been drawn. Only plain attention has second derivatives."""
    with torch.random.fork_rng(devices=_gpus(model)), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def _seed(gpus: list[int], seed: int) -> None:
    """Seeds what `_undisturbed` restores, and no other device (torch.manual_seed would seed them all)."""
    torch.default_generator.manual_seed(seed)
    for i in gpus:
        torch.cuda.default_generators[i].manual_seed(seed)


class _Moments:
    """Mean of vectors and sum of squared distances to it, one vector at a time (Welford's way), in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), 0.0

    def add(self, x: Tensor) -> None:
        self.count += 1
        before = x - self.mean.to(x)
        self.mean = self.mean.to(x) + before / self.count
        self.squares += float(before @ (x - self.mean))


class _Problem:
    """Loss, gradient and Hessian-vector products of a model, in copies of its tensors: nothing of the model is written."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, seed: int):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires gradients: there is nothing to estimate")
        if any(p.is_complex() for p in trained.values()):
            raise ValueError("complex parameters: the estimates are of real ones; hold them as torch.view_as_real(...)")
        self.model, self.loss_fn, self.seed, self.gpus = _WithLoss(model), loss_fn, seed, _gpus(model)
        self.x = {f"model.{name}": p.detach().clone().requires_grad_() for name, p in trained.items()}
        self.buffers = {f"model.{name}": b for name, b in model.named_buffers()}

    def loss(self, batch: Any, which: int) -> Tensor:
        _seed(self.gpus, self.seed + which)  # each batch its own dropout, the same at each product
        arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
        lent = {**self.x, **{name: b.clone() for name, b in self.buffers.items()}}
        loss: Tensor = functional_call(self.model, lent, (self.loss_fn, arguments))
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(f"loss_fn must return a tensor that depends on the model's parameters, got {loss!r}")
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, got a tensor of shape {list(loss.shape)}")
        if not torch.isfinite(loss):
            raise ValueError(f"the loss of batch {which} is {loss.item()}: batches must not be empty, nor data infinite")
        return loss

    def gradient(self, batch: Any, which: int) -> tuple[float, Tensor]:
        """The loss, and its gradient [d] in float64."""
        loss = self.loss(batch, which)
        return float(loss.detach()), _flat(self._grad([loss], None, create_graph=False)).double()

    def hessian_vector(self, batches: Sequence[Any], v: Tensor) -> Tensor:
        """H v of the mean loss over `batches`, batch by batch to spare memory: [d] in float64."""
        pieces, product = self._like_x(v), torch.zeros_like(v)
        for which, batch in enumerate(batches):
            gradient = self._grad([self.loss(batch, which)], None, create_graph=True)
            bent = [(g, p) for g, p in zip(gradient, pieces, strict=True) if g.requires_grad]  # the others are constant in x
            if bent:
                product += _flat(self._grad([g for g, _ in bent], [p for _, p in bent], create_graph=False)).double()
        return product / len(batches)

    def smoothness(self, batches: Sequence[Any], iterations: int, tolerance: float) -> float:
        """The largest |eigenvalue| of the Hessian, by Lanczos: those of the tridiagonal matrix approach it from below."""
        first = next(iter(self.x.values()))
        generator = torch.Generator().manual_seed(self.seed)  # of its own: drawing v must not depend on the device
        v = torch.randn(sum(p.numel() for p in self.x.values()), generator=generator, dtype=torch.float64).to(first.device)
        v, previous = v / v.norm(), torch.zeros_like(v)
        diagonal: list[float] = []
        beside: list[float] = []
        found = 0.0
        for _ in range(min(iterations, len(v))):
            u = self.hessian_vector(batches, v)
            diagonal.append(float(v @ u))
            u = u - diagonal[-1] * v - (beside[-1] if beside else 0.0) * previous
            T = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
            last, found = found, float(np.abs(np.linalg.eigvalsh(T)).max())
            beside.append(float(u.norm()))
            settled = len(diagonal) >= AT_LEAST and abs(found - last) <= tolerance * found
            if settled or beside[-1] <= 1e-12 * found:
                break
            previous, v = v, u / beside[-1]
        return found

    def _grad(self, outputs: list[Tensor], weights: list[Tensor] | None, create_graph: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            outputs, list(self.x.values()), weights, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    def _like_x(self, v: Tensor) -> list[Tensor]:
        pieces = torch.split(v, [p.numel() for p in self.x.values()])
        return [piece.view(p.shape).to(p.dtype) for piece, p in zip(pieces, self.x.values(), strict=True)]


class _WithLoss(nn.Module):
    """The model and the loss as one module, so that `functional_call` lends the model its tensors while `loss_fn` runs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFn, batch: Sequence[Any]) -> Tensor:
        return loss_fn(self.model, *batch)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])
