"""The stacked engine: all n nodes in one process, as rows of one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.engines.codes import CODES
from rumor.engines.engine import (
    NO_SCALARS,
    Arrived,
    Buckets,
    Buffer,
    FiniteCheck,
    Lerp,
    Mixed,
    Pending,
    accumulator,
    check_gossip,
    check_mean,
    sum_of_squares,
    tensor_of,
)
from rumor.engines.operators import Csr, Fused, Gather, Operator, has_triton
from rumor.engines.stacked_codes import coded_means
from rumor.metrics import Metrics
from rumor.topology import Topology


class StackedBuckets:
    """Stacked tensors [..., n, d_b] as buckets: read and written where they are."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.finite_check: FiniteCheck | None = sum_of_squares
        self.rebind(tensors)
        self._copies: list[Buffer | None] = [None] * len(self._live)

    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Use other tensors of the same shapes from now on."""
        self._live = [Buffer(x) for x in tensors]

    def __len__(self) -> int:
        return len(self._live)

    def read(self, b: int) -> Buffer:
        return self._live[b]

    def copy(self, b: int) -> Buffer:
        live, copy = self._live[b].tensor, self._copies[b]
        if copy is None:
            copy = self._copies[b] = Buffer(torch.empty_like(live))
        copy.tensor.copy_(live)
        return copy

    def difference(self, b: int, minus: Tensor, out: Tensor) -> None:
        out.copy_(self._live[b].tensor).sub_(minus)

    def peek(self, b: int) -> Tensor:
        return self._live[b].tensor

    def write(self, b: int, value: Tensor) -> None:
        self._live[b].tensor.copy_(value)

    def add(self, b: int, change: Tensor) -> None:
        self._live[b].tensor.add_(change)

    def lerp(self, b: int, lerp: Lerp, sent: Tensor | None = None) -> None:
        x = self._live[b].tensor
        end, weight, _ = lerp.guarded(x if sent is None else sent)
        if sent is not None:
            x.add_(end - sent, alpha=weight)
        elif weight == 1:
            x.copy_(end)
        else:
            x.lerp_(end.to(x.dtype).expand_as(x), weight)


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their dtype, in the order of the first of each. Those without numbers are left out."""
    tensors = [x for x in tensors if x.numel()]
    return [[x for x in tensors if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in tensors)]


class PackedBuckets:
    """Stacked tensors [..., n, d_b] as one bucket [..., n, d] for each dtype.

    So blocks of codes are cut as in the buckets of real processes, however many those are.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.finite_check: FiniteCheck | None = sum_of_squares
        self.rebind(tensors)
        self._copies: list[Buffer | None] = [None] * len(self)

    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Use other tensors of the same shapes and dtypes from now on."""
        self._alike = alike(tensors)

    def __len__(self) -> int:
        return len(self._alike)

    def read(self, b: int) -> Buffer:
        copy = self._copies[b]
        if copy is None:
            copy = self._copies[b] = Buffer(self.peek(b))
        else:
            torch.cat(self._alike[b], dim=-1, out=copy.tensor)
        return copy

    def copy(self, b: int) -> Buffer:
        return self.read(b)

    def difference(self, b: int, minus: Tensor, out: Tensor) -> None:
        for x, part in self._with_parts(b, out):
            part.copy_(x)
        out.sub_(minus)

    def peek(self, b: int) -> Tensor:
        return torch.cat(self._alike[b], dim=-1)

    def write(self, b: int, value: Tensor) -> None:
        for x, part in self._with_parts(b, value):
            x.copy_(part)

    def _with_parts(self, b: int, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of a bucket with its part of `packed`."""
        alike = self._alike[b]
        return zip(alike, torch.split(packed, [x.shape[-1] for x in alike], dim=-1), strict=True)

    def lerp(self, b: int, lerp: Lerp, sent: Tensor | None = None) -> None:
        own = self.peek(b) if sent is None else sent
        end, weight, _ = lerp.guarded(own)
        self.add(b, (end - own).mul_(weight))

    def add(self, b: int, change: Tensor) -> None:
        for x, part in self._with_parts(b, change):
            x.add_(part)


class Stacked:
    """The engine that has all n nodes in this process.

    Models are `[..., n, d]`, and a gossip step is one product with a sparse matrix, O(n degree d).

    >>> import rumor
    >>> Stacked(4).gossip(torch.eye(4), rumor.ring(4), k=0).wait().x[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """

    def __init__(self, n: int, device: torch.device | str = "cpu"):
        self.n = n
        self.device = torch.device(device)
        self.metrics = Metrics()
        # without MKL, torch has no sparse product on a CPU
        self._use_csr = self.device.type == "cuda" or (self.device.type == "cpu" and torch._C.has_mkl)
        self._use_triton = has_triton(self.device)
        self._operators: dict[object, Operator] = {}
        self._scratch: dict[object, Tensor] = {}

    def gossip(
        self, x: Buffer | Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True, bits: int = 32
    ) -> Pending:
        check_gossip(bits, scalars, own)
        x = tensor_of(x)
        operator = self._operator(topology, k % topology.period, own, self._trials(x), x)
        self.metrics.bytes_sent += operator.links * _nbytes(x, bits) // self.n
        if bits < 32:
            q = CODES[bits].round_trip(x.clone())
            change = operator.apply(q, self._scratch_like(x)) - q
            return Arrived(Mixed(x + change, NO_SCALARS), difference=change)
        weights = None if scalars is None else self._operator(topology, k % topology.period, own, self._trials(scalars), scalars)
        return _Product(self, operator, x, weights, scalars)

    def mean(
        self,
        xs: Iterable[Buffer | Tensor],
        k: int,
        scalars: Tensor | None = None,
        *,
        doing: str = "averaging globally",
        finite_check: FiniteCheck | None = sum_of_squares,
        bits: int = 32,
        left_out: Sequence[Tensor] = (),
    ) -> list[Pending]:
        check_mean(bits, xs, left_out)
        tensors = [tensor_of(x) for x in xs]
        for x in tensors:
            self._trials(x)
            self.metrics.bytes_sent += 2 * (self.n - 1) * _nbytes(x, bits) // self.n
        if bits == 32 or self.n == 1:  # one node alone sends nothing, so it need not round
            return [_Mean(x, None if place else scalars) for place, x in enumerate(tensors)]
        mean_of_scalars = NO_SCALARS if scalars is None else scalars.mean(dim=-2, keepdim=True)
        means = coded_means(tensors, left_out, bits)
        return [Arrived(Mixed(mean, NO_SCALARS if place else mean_of_scalars)) for place, mean in enumerate(means)]

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._operator(topology, k % topology.period, False, 1, self.full(0.0).to(dtype)).kept

    def full(self, value: float) -> Tensor:
        return torch.full((self.n, 1), value, dtype=torch.float64, device=self.device)

    def allocate(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Buffer:
        return Buffer(torch.empty(shape, dtype=dtype, device=device))

    def allocate_codes(self, like: Sequence[Tensor], bits: int, keeps: bool) -> list[Buffer]:
        return [Buffer(torch.empty_like(x, dtype=accumulator(x.dtype), memory_format=torch.contiguous_format)) for x in like]

    def post_receives(self, buffers: Sequence[Buffer], topology: Topology, k: int, bits: int = 32) -> None:
        """Do nothing: all nodes are here."""

    def complete_receives(self, k: int) -> None:
        """Do nothing: all nodes are here."""

    def _trials(self, x: Tensor) -> int:
        if x.dim() < 2 or x.shape[-2] != self.n:
            raise ValueError(f"Stacked({self.n}) takes tensors [..., {self.n}, d], got {list(x.shape)}")
        return x.shape[:-2].numel()

    def _operator(self, topology: Topology, phase: int, own: bool, trials: int, x: Tensor) -> Operator:
        key = (topology, phase, own, trials, x.dtype, x.device)
        if key not in self._operators:
            if topology.n != self.n:
                raise ValueError(f"{topology} is for n={topology.n} nodes, but the engine has {self.n}")
            W = topology.matrix(phase)
            build = Fused if self._use_triton and Fused.fits(W, x) else Csr if self._use_csr else Gather
            self._operators[key] = build(W, own, trials, accumulator(x.dtype), x.device)
        return self._operators[key]

    def _scratch_like(self, x: Tensor) -> Tensor:
        key = (x.shape, accumulator(x.dtype), x.device)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros_like(x, dtype=accumulator(x.dtype), memory_format=torch.contiguous_format)
        return self._scratch[key]


@dataclass
class _Product(Pending):
    engine: Stacked
    operator: Operator
    x: Tensor
    weights: Operator | None
    scalars: Tensor | None

    def wait(self) -> Mixed:
        mixed = self.operator.apply(self.x, self.engine._scratch_like(self.x))
        if self.scalars is None or self.weights is None:
            return Mixed(mixed, NO_SCALARS)
        scalars = torch.zeros_like(self.scalars, memory_format=torch.contiguous_format)
        return Mixed(mixed, self.weights.apply(self.scalars, scalars))

    def mix_into(self, x: Buckets, b: int, sent: Tensor | None = None) -> None:
        if self.operator.in_place and sent is None and x.peek(b) is self.x and self.x.is_contiguous():
            self.operator.apply(self.x, self.x)
            torch.autograd.graph.increment_version(self.x)  # torch has not seen it: a backward through the old model must fail
        else:
            super().mix_into(x, b, sent)


@dataclass
class _Mean(Pending):
    x: Tensor
    scalars: Tensor | None

    def wait(self) -> Mixed:
        mean = self.x.mean(dim=-2, keepdim=True, dtype=accumulator(self.x.dtype))  # [..., 1, d]
        return Mixed(mean, NO_SCALARS if self.scalars is None else self.scalars.mean(dim=-2, keepdim=True))


def _nbytes(x: Tensor, bits: int) -> int:
    """Number of bytes of one node's message."""
    return x.shape[-1] * x.element_size() if bits == 32 else CODES[bits].nbytes(x.shape[-1])
