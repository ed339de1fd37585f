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
MIN_LANCZOS_STEPS = 5  # a start vector close to an eigenvector may not move for a few steps


@dataclass(frozen=True)
class Estimate:
    """The constants of the paper's formulas at one point x, the model's current parameters.

    Attributes:
        n: nodes.
        sigma2: sigma^2, variance of a stochastic gradient with the given batch size, averaged over nodes.
        b2: b^2 = 1/n sum_i ||grad f_i - grad f||^2.
        L: the largest |eigenvalue| of the nodes' Hessians.
        loss: f, the mean loss. It equals F_0 if the minimum of the loss is 0.
    """

    n: int
    sigma2: float
    b2: float
    L: float
    loss: float


def estimate(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Sequence[Any]], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> Estimate:
    """Estimates sigma^2, b^2, L and the loss at the model's current parameters. The model does not change.

    g_ik is the gradient of batch k of node i, g_i its mean over the K batches, and g the mean over all nodes:

        sigma^2 = 1/n sum_i 1/(K-1) sum_k ||g_ik - g_i||^2
        b^2     = 1/n sum_i ||g_i - g||^2  -  (1 - 1/n) sigma^2 / K
        L       = max_i |largest eigenvalue of the Hessian of f_i|

    The second term of b^2 removes the noise from the first; b^2 is at least 0. L is found by Lanczos, from Hessian-vector products.

    The estimates hold at this x only. The theorems need bounds for all x, and b^2 at x* for a convex problem: estimate at the start and
    near the end of training, and take the larger values. L may come out too large, by a factor of two for example, because the Hessian
    of a few samples has a larger top eigenvalue than that of f_i. To avoid this, give each node many more samples than its Hessian has
    large eigenvalues. The model runs in its current mode; in training mode dropout counts as noise.

    Args:
        model: any module; parameters that don't require gradients count as constants.
        loss_fn: `loss_fn(model, *batch)` returns one number, as for `rumor.Simulator`.
        batches: `batches[i]` holds K >= 2 batches of node i, in the batch size of the training; a batch is a tuple of arguments.
        iterations: the maximum number of Hessian-vector products for L, for each batch.
        tolerance: relative change at which L has converged.
        seed: seed of all random numbers.

    >>> model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> squared = lambda model, x, y: 0.5 * (model(x) - y).square().mean()
    >>> x = torch.full((4, 1), 3.0, dtype=torch.float64)
    >>> y = torch.zeros(4, 1, dtype=torch.float64)
    >>> found = estimate(model, squared, [[(x, y), (x, y)], [(x, y), (x, y)]])
    >>> round(found.L, 9), found.sigma2, found.b2
    (9.0, 0.0, 0.0)
    """
    check_whole("iterations", iterations, 1)
    nodes = [list(node) for node in batches]
    _check_batches(nodes)
    over_nodes = _Moments()
    losses: list[float] = []
    sigma2s: list[float] = []
    noise: list[float] = []  # sigma_i^2 / K, the part of ||g_i - g||^2 that is due to noise
    Ls: list[float] = []
    with _forked_rng(model):
        problem = _Problem(model, loss_fn, seed)
        for node in nodes:
            over_batches = _Moments()
            for batch in node:
                loss, gradient = problem.gradient(batch, len(losses))
                losses.append(loss)
                over_batches.add(gradient)
            sigma2s.append(over_batches.squares / (len(node) - 1))
            noise.append(sigma2s[-1] / len(node))
            over_nodes.add(over_batches.mean)
            Ls.append(problem.smoothness(node, iterations, tolerance))
    n = len(nodes)
    b2 = over_nodes.squares / n - (1 - 1 / n) * float(np.mean(noise))
    return Estimate(n, float(np.mean(sigma2s)), max(b2, 0.0), max(Ls), float(np.mean(losses)))


def _check_batches(nodes: list[list[Any]]) -> None:
    if not nodes:
        raise ValueError("batches is empty: give a list of batches for each node")
    for i, node in enumerate(nodes):
        if len(node) < 2:
            raise ValueError(
                f"a variance needs at least 2 batches of each node, node {i} has {len(node)}: pass a list of batches as batches[{i}]"
            )


def smoothness(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Any], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> float:
    """Estimates the largest |eigenvalue| of the Hessian of the mean loss over `batches`, at the model's current parameters.

    With all batches of all nodes this is the smoothness of f. It is at most the L of `estimate`, which is the smoothness of the worst f_i.
    """
    if not len(batches):
        raise ValueError("batches is empty: give at least one batch")
    with _forked_rng(model):
        return _Problem(model, loss_fn, seed).smoothness(list(batches), iterations, tolerance)


@contextmanager
def _forked_rng(model: nn.Module) -> Iterator[None]:
    """Restores the caller's random state at the end. Uses plain attention, the only kind with second derivatives."""
    with torch.random.fork_rng(devices=_gpus(model)), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def _seed(gpus: list[int], seed: int) -> None:
    """Seeds the generators that `_forked_rng` restores, and no others (torch.manual_seed would seed every device)."""
    torch.default_generator.manual_seed(seed)
    for i in gpus:
        torch.cuda.default_generators[i].manual_seed(seed)


class _Moments:
    """The running mean of vectors and the sum of squared distances to it (Welford's algorithm), in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), 0.0

    def add(self, x: Tensor) -> None:
        self.count += 1
        before = x - self.mean.to(x)
        self.mean = self.mean.to(x) + before / self.count
        self.squares += float(before @ (x - self.mean))


class _Problem:
    """Loss, gradient and Hessian-vector products of a model. It works on copies, so the model does not change."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, seed: int):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires gradients, so there is nothing to estimate: call model.requires_grad_()")
        if any(p.is_complex() for p in trained.values()):
            raise ValueError("the model has complex parameters, but the estimates need real ones: store them with torch.view_as_real(...)")
        self.model, self.loss_fn, self.seed, self.gpus = _WithLoss(model), loss_fn, seed, _gpus(model)
        self.x = {f"model.{name}": p.detach().clone().requires_grad_() for name, p in trained.items()}
        self.buffers = {f"model.{name}": b for name, b in model.named_buffers()}

    def loss(self, batch: Any, which: int) -> Tensor:
        _seed(self.gpus, self.seed + which)  # each batch has its own dropout, the same in every Hessian-vector product
        arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
        tensors = {**self.x, **{name: b.clone() for name, b in self.buffers.items()}}
        loss: Tensor = functional_call(self.model, tensors, (self.loss_fn, arguments))
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(f"loss_fn must return a tensor that depends on the model's parameters, got {loss!r}")
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, got a tensor of shape {list(loss.shape)}")
        if not torch.isfinite(loss):
            raise ValueError(f"the loss of batch {which} is {loss.item()}: check that the batch is not empty and its data is finite")
        return loss

    def gradient(self, batch: Any, which: int) -> tuple[float, Tensor]:
        """Returns the loss and its gradient, [d] in float64."""
        loss = self.loss(batch, which)
        return float(loss.detach()), _flat(self._grad([loss], None, create_graph=False)).double()

    def hessian_vector(self, batches: Sequence[Any], v: Tensor) -> Tensor:
        """Returns the Hessian of the mean loss over `batches` times v, [d] in float64. It takes one batch at a time to save memory."""
        pieces, product = self._like_x(v), torch.zeros_like(v)
        for which, batch in enumerate(batches):
            gradient = self._grad([self.loss(batch, which)], None, create_graph=True)
            curved = [(g, p) for g, p in zip(gradient, pieces, strict=True) if g.requires_grad]  # the others do not depend on x
            if curved:
                product += _flat(self._grad([g for g, _ in curved], [p for _, p in curved], create_graph=False)).double()
        return product / len(batches)

    def smoothness(self, batches: Sequence[Any], iterations: int, tolerance: float) -> float:
        """The largest |eigenvalue| of the Hessian by Lanczos. The eigenvalues of the tridiagonal matrix T approach it from below."""
        first = next(iter(self.x.values()))
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU, so that v does not depend on the device
        v = torch.randn(sum(p.numel() for p in self.x.values()), generator=generator, dtype=torch.float64).to(first.device)
        v, previous = v / v.norm(), torch.zeros_like(v)
        diagonal: list[float] = []
        off_diagonal: list[float] = []
        found = 0.0
        for _ in range(min(iterations, len(v))):
            u = self.hessian_vector(batches, v)
            diagonal.append(float(v @ u))
            u = u - diagonal[-1] * v - (off_diagonal[-1] if off_diagonal else 0.0) * previous
            T = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
            last, found = found, float(np.abs(np.linalg.eigvalsh(T)).max())
            off_diagonal.append(float(u.norm()))
            settled = len(diagonal) >= MIN_LANCZOS_STEPS and abs(found - last) <= tolerance * found
            if settled or off_diagonal[-1] <= 1e-12 * found:
                break
            previous, v = v, u / off_diagonal[-1]
        return found

    def _grad(self, outputs: list[Tensor], weights: list[Tensor] | None, create_graph: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            outputs, list(self.x.values()), weights, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    def _like_x(self, v: Tensor) -> list[Tensor]:
        pieces = torch.split(v, [p.numel() for p in self.x.values()])
        return [piece.view(p.shape).to(p.dtype) for piece, p in zip(pieces, self.x.values(), strict=True)]


class _WithLoss(nn.Module):
    """The model and the loss as one module, so that `functional_call` swaps the model's tensors while `loss_fn` runs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFn, batch: Sequence[Any]) -> Tensor:
        return loss_fn(self.model, *batch)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])
