"""Mixing matrices as the stacked engine applies them: as a sparse product, as a sum over neighbours, or in one pass over a GPU's memory."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from rumor.topology.matrix import Matrix

MOST_COLUMNS = 2**22  # of one sparse product: on a GPU the result was wrong, without an error, for 11 million


class Operator(ABC):
    """A mixing matrix, prepared for tensors [..., n, d] of one dtype. `in_place`: whether apply(x, x) works."""

    in_place = False

    def __init__(self, W: Matrix, own: bool, trials: int, dtype: torch.dtype, device: torch.device):
        rows, columns, weights = (torch.from_numpy(part) for part in W.triplets())
        is_own = rows == columns
        self.links = int((~is_own).sum())
        # rounded weights must still sum to 1, or the mean would drift: each node's own weight makes up for the rounding of the others
        rounding = torch.where(is_own, 0.0, weights - weights.to(dtype).double())
        lost = torch.zeros(W.n, dtype=torch.float64).index_add_(0, rows, rounding)
        # a node keeps what it does not push: W[i, i], and the rounding of the shares that it pushes
        self.kept = torch.zeros(W.n, dtype=torch.float64).index_add_(0, columns, torch.where(is_own, weights, rounding))[:, None].to(device)
        used = torch.where(is_own, weights + lost[rows], weights).to(dtype)
        keep = slice(None) if own else ~is_own
        self.build(W.n, rows[keep], columns[keep], used[keep], trials, device)

    @abstractmethod
    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None: ...

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor) -> Tensor: ...


class Csr(Operator):
    """A block-diagonal sparse matrix with one copy of W for each trial, so that all trials are one product."""

    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None:
        starts = torch.searchsorted(rows, torch.arange(n))
        trial = torch.arange(trials)[:, None]
        pointers = torch.cat([(starts + trial * len(rows)).flatten(), torch.tensor([trials * len(rows)])])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")  # torch warns that its CSR format is in beta
            self.W = torch.sparse_csr_tensor(
                pointers, (columns + trial * n).flatten(), weights.repeat(trials), (trials * n, trials * n), check_invariants=True
            ).to(device)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        rows = x.shape[:-1].numel(), x.shape[-1]  # [trials n, d]
        flat, flat_out = x.reshape(rows).to(out.dtype), out.view(rows)
        for some, some_out in zip(*(torch.split(both, MOST_COLUMNS, dim=1) for both in (flat, flat_out)), strict=True):
            torch.addmm(some_out, self.W, some, beta=0, out=some_out)
        return out


class Gather(Operator):
    """A sum over neighbours, with rows padded to the largest degree. Used where torch has no sparse product."""

    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None:
        slot = torch.arange(len(rows)) - torch.searchsorted(rows, rows)
        degree = int(slot.max()) + 1 if len(slot) else 0
        self.columns = torch.arange(n).repeat(degree, 1)  # the padding is a node's own row: 0 times that of another may be NaN
        self.weights = torch.zeros(degree, n, 1, dtype=weights.dtype)
        self.columns[slot, rows], self.weights[slot, rows, 0] = columns, weights
        self.columns, self.weights = self.columns.to(device), self.weights.to(device)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out.zero_()
        for columns, weights in zip(self.columns, self.weights, strict=True):
            out.addcmul_(x.index_select(-2, columns).to(out.dtype), weights)
        return out


class Fused(Gather):
    """The same sum in one pass over a GPU's memory, also in place."""

    in_place = True
    MOST_NODES, MOST_WEIGHTS = 256, 32  # a program holds some columns of all nodes, and reads them once for each weight of a row

    @classmethod
    def fits(cls, W: Matrix, x: Tensor) -> bool:
        has_kernel = x.is_cuda and x.is_floating_point()
        return has_kernel and W.n <= cls.MOST_NODES and int(np.bincount(W.triplets()[0]).max()) <= cls.MOST_WEIGHTS

    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None:
        super().build(n, rows, columns, weights, trials, device)
        self.columns, self.weights = self.columns.T.contiguous(), self.weights[..., 0].T.contiguous()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        from rumor.engines import triton_gossip

        triton_gossip.mix(x.contiguous(), self.columns, self.weights, out)
        return out


def has_triton(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from rumor.engines import triton_gossip

    return triton_gossip.why_not(device) is None
