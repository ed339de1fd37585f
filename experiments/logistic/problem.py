"""Logistic regression on n nodes: f = 1/n sum_i f_i,  f_i(x) = 1/M sum_m ln(1 + exp(-y h'x)) + l2/2 ||x||^2.

Only the products a = y h are stored (`rows`, [n, M, d]). The loss is softplus(-a'x), and its gradient -sigmoid(-a'x) a.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

VARIANCE = 10.0  # of the features N(0, 10 I). The 10 is a variance: as a standard deviation, even Parallel SGD would be unstable at first
SUBSET = 4_000  # samples for the small, non-quadratic part of the objective


@dataclass(frozen=True, eq=False)
class Problem:
    """The objective of all nodes, and its minimum."""

    name: str
    rows: Tensor  # [n, M, d], each row y h
    l2: float = 0.0

    @property
    def n(self) -> int:
        return self.rows.shape[0]

    @property
    def d(self) -> int:
        return self.rows.shape[2]

    @cached_property
    def all_rows(self) -> Tensor:
        return self.rows.flatten(0, 1)  # [n M, d]

    def to(self, device: str) -> Problem:
        return Problem(self.name, self.rows.to(device), self.l2)

    @cached_property
    def minimizer(self) -> Tensor:
        """x*, found by Newton's method: first on some of the rows, then on all of them."""
        x = torch.zeros(self.d, dtype=self.rows.dtype, device=self.rows.device)
        part = self.rows[:, : max(1, self.rows.shape[1] // 20)].flatten(0, 1)
        for rows in (part, self.all_rows):
            for _ in range(50):
                gradient, hessian = self._derivatives(rows, x)
                step = torch.linalg.solve(hessian, gradient)
                if float(step.norm()) > 1.0:  # far from the minimum a full step may overshoot
                    step /= step.norm()
                x = x - step
                if float(step.norm()) < 1e-7:  # the error of a Newton step is its length squared
                    break
            else:
                raise ArithmeticError(f"{self.name}: Newton's method found no minimum; separable data has one only with l2 > 0")
        return x

    @cached_property
    def hessian(self) -> Tensor:
        return self._derivatives(self.all_rows, self.minimizer)[1]

    def _derivatives(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient [d] and Hessian [d, d] of the mean loss over `rows`, including the l2 term."""
        p = torch.sigmoid(-(rows @ x))  # [N]
        identity = torch.eye(self.d, dtype=x.dtype, device=x.device)
        gradient = -(p @ rows) / len(rows) + self.l2 * x
        return gradient, (rows * (p * (1 - p))[:, None]).mT @ rows / len(rows) + self.l2 * identity

    def gap(self, x: Tensor) -> Tensor:
        """Computes f(x) - f* for points [..., d].

        The quadratic part, 1/2 e'He with e = x - x*, uses all rows. The rest is of third order in e. If there are many rows, it is
        averaged over SUBSET of them, the same number from each node. This makes an error of about 1 % if e is large, and none if e is
        small.
        """
        e = (x - self.minimizer).reshape(-1, self.d)  # [points, d]
        few = self._few_rows
        margin = few @ self.minimizer  # [N]
        gradient, hessian = self._derivatives(few, self.minimizer)
        at_most = max(1, 1_000_000 // len(few))  # points at a time, so that the products stay in the cache
        losses = [softplus(-(part @ few.mT + margin)).mean(-1) for part in e.split(at_most)]
        ridge = self.l2 * (e @ self.minimizer + e.square().sum(-1) / 2)
        of_few = torch.cat(losses) - softplus(-margin).mean() + ridge
        beyond_quadratic = of_few - e @ gradient - ((e @ hessian) * e).sum(-1) / 2
        return (((e @ self.hessian) * e).sum(-1) / 2 + beyond_quadratic).reshape(x.shape[:-1])

    @cached_property
    def _few_rows(self) -> Tensor:
        return self.all_rows if len(self.all_rows) <= 50_000 else self.rows[:, : SUBSET // self.n].flatten(0, 1)


def synthetic(n: int, iid: bool, seed: int = 0, M: int = 8000, d: int = 10) -> Problem:
    """Builds the problem of the paper's section 5.1.

    Features are N(0, 10 I). Labels come from a logistic model with a random unit vector, the same for all nodes (iid) or one per node.
    """
    draw = torch.Generator().manual_seed(10_000 * seed + 10 * n + int(iid))
    truth = torch.randn(1 if iid else n, d, 1, generator=draw, dtype=torch.float64)
    truth = normalize(truth, dim=1).expand(n, d, 1)
    h = torch.randn(n, M, d, generator=draw, dtype=torch.float64) * VARIANCE**0.5
    uniform = torch.rand(n, M, 1, generator=draw, dtype=torch.float64)
    y = torch.where(uniform <= torch.sigmoid(h @ truth), 1.0, -1.0)
    return Problem(f"{'iid' if iid else 'non-iid'}, n = {n}, data {seed}", h.mul_(y))


def from_libsvm(path: Path, n: int, split: str, l2: float, seed: int = 0) -> Problem:
    """Reads a LIBSVM file and distributes its samples to n nodes.

    `split` is "iid" (shuffled) or "label" (sorted by label, then cut, so that most nodes see one class). Samples are dropped until their
    number is a multiple of n.
    """
    from sklearn.datasets import load_svmlight_file

    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        features, labels = load_svmlight_file(file)
    h, classes = torch.from_numpy(features.toarray()), sorted(set(labels))
    if len(classes) != 2 or len(labels) < n or not torch.isfinite(h).all():
        raise ValueError(
            f"{path}: {n} nodes need at least {n} samples, finite features and two labels; it has {len(labels)} samples, labels {classes}"
        )
    y = torch.from_numpy(labels == classes[1]).double() * 2 - 1  # works for labels 0/1, -1/+1 and 1/2
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[: len(y) // n * n]
    if split == "label":
        order = order[torch.argsort(y[order], stable=True)]
    elif split != "iid":
        raise ValueError(f"split must be 'iid' or 'label', got {split!r}")
    rows = (h * y[:, None])[order]
    return Problem(f"{path.name.split('.')[0]}, by {split}, n = {n}", rows.reshape(n, -1, rows.shape[1]), l2)
