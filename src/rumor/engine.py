"""Engines: what carries models between nodes. An algorithm knows two collectives, `gossip` and `mean`, and nothing else.

Tensors are `[*nodes, d]`: `[d]` on a real process, `[..., n, d]` where all nodes are in one process (leading dimensions are
independent trials). A collective returns a `Pending` at once. As with any message under way, what was handed in must stay as it is
until `wait()` has returned; what `wait()` returns belongs to the engine, may be overwritten, and lasts until the next `wait()`.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rumor.matrix import Matrix
from rumor.metrics import Metrics
from rumor.topology import Topology


class Mixed(NamedTuple):
    """What a collective gives back: the mixed models, and the scalars that travelled with them, mixed alike."""

    x: Tensor  # [*nodes, d], or broadcastable to it
    scalars: Tensor  # [*nodes, s], float64


NO_SCALARS = torch.empty(0, dtype=torch.float64)


class Pull(NamedTuple):
    """Where messages pull the model that was sent: W x = x + weight (towards - x). At weight 1, `towards` is W x itself."""

    towards: Tensor  # [*nodes, d], or broadcastable to it
    weight: float
    finite: Tensor | None = None  # [1] on a device, where only that knows: if false, the model stays as it is

    def guarded(self, own: Tensor) -> Pull:
        """The same, with the guard applied: towards what the node itself has sent where the other's was not finite."""
        return self if self.finite is None else Pull(torch.where(self.finite, self.towards, own), self.weight)


class Pending(ABC):
    """Messages under way for one bucket."""

    @abstractmethod
    def wait(self) -> Mixed:
        """Lets them arrive and mixes them. May be called again."""

    def pull(self) -> Pull:
        """The same for the models alone, where an engine may know a shorter way. May be called again, in the place of wait()."""
        return Pull(self.wait().x, 1.0)


@dataclass
class Done(Pending):
    """A message that has arrived already."""

    result: Mixed
    weight: float = 1.0

    def wait(self) -> Mixed:
        return self.result

    def pull(self) -> Pull:
        return Pull(self.result.x, self.weight)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


Judge = Callable[[Tensor], Tensor]  # of a flat tensor: a number that is finite only if all of it is


def size(flat: Tensor) -> Tensor:
    """For models, in one quick pass: a sum of squares is finite only if its terms are; one that overflows is as bad a sign."""
    is_half = flat.dtype != accumulator(flat.dtype)
    return flat.sum(dtype=torch.float32) if is_half else torch.dot(flat, flat)


def largest(flat: Tensor) -> Tensor:
    """For buffers, which may be as large as numbers get (a mask)."""
    return torch.linalg.vector_norm(flat, torch.inf)  # type: ignore[no-any-return]


def all_finite(x: Buckets, judge: Judge) -> bool:
    return all(math.isfinite(judge(x.peek(b).reshape(-1))) for b in range(len(x)))


class Engine(Protocol):
    n: int
    device: torch.device  # where messages are, which may not be where the model is
    metrics: Metrics

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        """W_k x, of `x` and of `scalars` [*nodes, s]; without `own`, the neighbours' part alone: sum over j != i of W[i, j] x_j."""
        ...

    def mean(
        self, xs: Sequence[Tensor], k: int, scalars: Tensor | None = None, *, doing: str = "averaging globally", judge: Judge | None = size
    ) -> list[Pending]:
        """The average over all nodes, who must be doing the same; `scalars` are the first one's. `judge`: None if xs may be infinite."""
        ...

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """W[i, i], as [*nodes, 1] in float64: what a node keeps of what it pushes, where the rest is multiplied in `dtype`."""
        ...

    def full(self, value: float) -> Tensor:
        """The same number on every node: [*nodes, 1] in float64."""
        ...

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a bucket that this engine can send without copying it once more."""
        ...

    def expect(self, x: Tensor, topology: Topology, k: int) -> None:
        """The next message from the neighbours of step k may come before this node is there. `x`: what it will send of its own."""
        ...


class Buckets(Protocol):
    """A model as an algorithm sees it: a few tensors [*nodes, d_b], each of one dtype."""

    judge: Judge | None  # where it finds a tensor not finite, the alarm is raised; None: it may be

    def __len__(self) -> int: ...
    def read(self, b: int) -> Tensor: ...  # bucket b as it is now; what it returned before is overwritten
    def peek(self, b: int) -> Tensor: ...  # the same, for looking at: it disturbs nothing that is under way
    def write(self, b: int, value: Tensor) -> None: ...  # x_b <- value
    def pull(self, b: int, pull: Pull, sent: Tensor | None = None) -> None: ...

    # x_b <- x_b + weight (towards - sent), where x_b itself was sent if None; may overwrite `towards`


def rounded(weight: float) -> float:
    """The weight that arithmetic in float32 will use in its place."""
    return float(np.float32(weight))


def own_copy(x: Buckets) -> list[Tensor]:
    """All buckets as they are now, to keep, in the dtype that sums are taken in. For the start: it uses the buffers for sending."""
    buckets = (x.read(b) for b in range(len(x)))
    return [bucket.to(accumulator(bucket.dtype), copy=True) for bucket in buckets]


class Leaves:
    """Stacked tensors [..., n, d_b], read and written where they are.

    `keep`: read() hands out a copy, for messages that are still under way when the optimizer changes the tensor (delay=1).
    """

    def __init__(self, tensors: Sequence[Tensor], keep: bool = False):
        self.tensors = list(tensors)
        self.judge: Judge | None = size
        self._kept = [torch.empty_like(x) for x in self.tensors] if keep else None

    def __len__(self) -> int:
        return len(self.tensors)

    def read(self, b: int) -> Tensor:
        return self.tensors[b] if self._kept is None else self._kept[b].copy_(self.tensors[b])

    def peek(self, b: int) -> Tensor:
        return self.tensors[b]

    def write(self, b: int, value: Tensor) -> None:
        self.tensors[b].copy_(value)

    def pull(self, b: int, pull: Pull, sent: Tensor | None = None) -> None:
        assert pull.weight == 1  # Stacked's products are whole
        self.tensors[b].copy_(pull.towards) if sent is None else self.tensors[b].add_(pull.towards - sent)


class Stacked:
    """All n nodes in this process: x is `[..., n, d]`, and a gossip step is one sparse product, O(n degree d).

    >>> import rumor
    >>> Stacked(4).gossip(torch.eye(4), rumor.ring(4), k=0).wait().x[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """

    def __init__(self, n: int, device: torch.device | str = "cpu"):
        self.n = n
        self.device = torch.device(device)
        self.metrics = Metrics()
        # without MKL, torch has no product with a sparse matrix on a CPU
        self._use_csr = self.device.type == "cuda" or (self.device.type == "cpu" and torch._C.has_mkl)
        self._operators: dict[object, _Operator] = {}
        self._scratch: dict[object, Tensor] = {}

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        operator = self._operator(topology, k % topology.period, own, self._trials(x), x)
        self.metrics.bytes_sent += operator.links * x.shape[-1] * x.element_size() // self.n
        weights = None if scalars is None else self._operator(topology, k % topology.period, own, self._trials(scalars), scalars)
        return _Product(self, operator, x, weights, scalars)

    def mean(
        self, xs: Sequence[Tensor], k: int, scalars: Tensor | None = None, *, doing: str = "averaging globally", judge: Judge | None = size
    ) -> list[Pending]:
        for x in xs:
            self._trials(x)
            self.metrics.bytes_sent += 2 * (self.n - 1) * x.shape[-1] * x.element_size() // self.n
        return [_Mean(x, None if place else scalars) for place, x in enumerate(xs)]

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._operator(topology, k % topology.period, False, 1, self.full(0.0).to(dtype)).kept

    def full(self, value: float) -> Tensor:
        return torch.full((self.n, 1), value, dtype=torch.float64, device=self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def expect(self, x: Tensor, topology: Topology, k: int) -> None:
        """Nothing has to travel here."""

    def _trials(self, x: Tensor) -> int:
        if x.dim() < 2 or x.shape[-2] != self.n:
            raise ValueError(f"Stacked({self.n}) takes tensors [..., {self.n}, d], got {list(x.shape)}")
        return x.shape[:-2].numel()

    def _operator(self, topology: Topology, phase: int, own: bool, trials: int, x: Tensor) -> _Operator:
        key = (topology, phase, own, trials, x.dtype, x.device)
        if key not in self._operators:
            if topology.n != self.n:
                raise ValueError(f"{topology} is for n={topology.n} nodes, but the engine has {self.n}")
            build = _Csr if self._use_csr else _Gather
            self._operators[key] = build(topology.matrix(phase), own, trials, accumulator(x.dtype), x.device)
        return self._operators[key]

    def _room(self, x: Tensor) -> Tensor:
        key = (x.shape, accumulator(x.dtype), x.device)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros_like(x, dtype=accumulator(x.dtype), memory_format=torch.contiguous_format)
        return self._scratch[key]


class _Operator(ABC):
    """A mixing matrix made ready for tensors [..., n, d] of one dtype."""

    def __init__(self, W: Matrix, own: bool, trials: int, dtype: torch.dtype, device: torch.device):
        rows, columns, weights = (torch.from_numpy(part) for part in W.triplets())
        is_own = rows == columns
        self.links = int((~is_own).sum())
        # rounded weights must still sum to 1, or the mean would move, step by step: each node's own makes up for the others'
        rounding = torch.where(is_own, 0.0, weights - weights.to(dtype).double())
        lost = torch.zeros(W.n, dtype=torch.float64).index_add_(0, rows, rounding)
        # of what a node pushes, it keeps what the others don't get: W[i, i], and the rounding of their shares
        self.kept = torch.zeros(W.n, dtype=torch.float64).index_add_(0, columns, torch.where(is_own, weights, rounding))[:, None].to(device)
        used = torch.where(is_own, weights + lost[rows], weights).to(dtype)
        keep = slice(None) if own else ~is_own
        self.build(W.n, rows[keep], columns[keep], used[keep], trials, device)

    @abstractmethod
    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None: ...

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor) -> Tensor: ...


class _Csr(_Operator):
    """One copy of W for each trial along the diagonal of a sparse matrix, so that all trials are one product."""

    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None:
        starts = torch.searchsorted(rows, torch.arange(n))
        trial = torch.arange(trials)[:, None]
        pointers = torch.cat([(starts + trial * len(rows)).flatten(), torch.tensor([trials * len(rows)])])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")  # torch's notes on its CSR being new and unchecked
            self.W = torch.sparse_csr_tensor(
                pointers, (columns + trial * n).flatten(), weights.repeat(trials), (trials * n, trials * n), check_invariants=True
            ).to(device)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        rows = x.shape[:-1].numel(), x.shape[-1]  # [trials n, d]
        flat, room = x.reshape(rows).to(out.dtype), out.view(rows)
        torch.addmm(room, self.W, flat, beta=0, out=room)
        return out


class _Gather(_Operator):
    """Neighbour by neighbour, with rows padded to the largest degree: where torch has no sparse product."""

    def build(self, n: int, rows: Tensor, columns: Tensor, weights: Tensor, trials: int, device: torch.device) -> None:
        slot = torch.arange(len(rows)) - torch.searchsorted(rows, rows)
        degree = int(slot.max()) + 1 if len(slot) else 0
        self.columns = torch.zeros(degree, n, dtype=torch.int64)
        self.weights = torch.zeros(degree, n, 1, dtype=weights.dtype)
        self.columns[slot, rows], self.weights[slot, rows, 0] = columns, weights
        self.columns, self.weights = self.columns.to(device), self.weights.to(device)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out.zero_()
        for columns, weights in zip(self.columns, self.weights, strict=True):
            out.addcmul_(x.index_select(-2, columns).to(out.dtype), weights)
        return out


@dataclass
class _Product(Pending):
    engine: Stacked
    operator: _Operator
    x: Tensor
    weights: _Operator | None
    scalars: Tensor | None

    def wait(self) -> Mixed:
        mixed = self.operator.apply(self.x, self.engine._room(self.x))
        if self.scalars is None or self.weights is None:
            return Mixed(mixed, NO_SCALARS)
        return Mixed(mixed, self.weights.apply(self.scalars, torch.zeros_like(self.scalars)))


@dataclass
class _Mean(Pending):
    x: Tensor
    scalars: Tensor | None

    def wait(self) -> Mixed:
        mean = self.x.mean(dim=-2, keepdim=True, dtype=accumulator(self.x.dtype))  # [..., 1, d]
        return Mixed(mean, NO_SCALARS if self.scalars is None else self.scalars.mean(dim=-2, keepdim=True))
