"""The interface between methods and engines.

An engine carries models between nodes. A method knows its two collectives, `gossip` and `mean`, and nothing else about it. `Stacked`
(stacked.py) has all n nodes in one process, `ProcessGroup` (processes/) is one node among real processes.

Tensors are `[*nodes, d]`: `[d]` on a real process, `[..., n, d]` on the stacked engine, whose leading dimensions are independent trials.
A collective returns a `Pending` at once. What was handed in must not change until `wait()` has returned. What `wait()` returns
belongs to the engine: the caller may overwrite it, and it is valid until the next `wait()`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rumor.engines.codes import check_width
from rumor.metrics import Metrics
from rumor.topology import Topology

NO_SCALARS = torch.empty(0, dtype=torch.float64)


class Mixed(NamedTuple):
    """The result of a collective: the mixed models, and the scalars that travelled with them, mixed with the same weights."""

    x: Tensor  # [*nodes, d], or broadcastable to it
    scalars: Tensor  # [*nodes, s], float64


class Lerp(NamedTuple):
    """A mixed model as a linear interpolation from the model x that was sent: W x = x + weight (end - x), as in `torch.lerp`.

    At weight 1, `end` is W x itself.
    """

    end: Tensor  # [*nodes, d], or broadcastable to it
    weight: float
    finite: Tensor | None = None  # [1] on a device, if only the device knows: where it is false, the model stays as it is

    def guarded(self, own: Tensor) -> Lerp:
        """Return the same without `finite`: where the received model is not finite, `end` is the node's own model."""
        return self if self.finite is None else Lerp(torch.where(self.finite, self.end, own), self.weight)


class Pending(ABC):
    """Messages in flight for one bucket."""

    @abstractmethod
    def wait(self) -> Mixed:
        """Wait for the messages and mix them. May be called again."""

    def arrive(self) -> None:  # noqa: B027 (a hook: an engine may leave all of it to wait())
        """Wait for an average, without a change to any model. May be called again. wait() does it, too."""

    def lerp(self) -> Lerp:
        """Return the same without scalars. An engine may have a faster way. May be called again, instead of wait()."""
        return Lerp(self.wait().x, 1.0)

    def change(self) -> Tensor | None:
        """Return W x - x of a gossip step whose messages have less than 32 bits, else None. May be called again, instead of wait()."""
        return None

    def mix_into(self, x: Buckets, b: int, sent: Tensor | None = None) -> None:
        """x_b <- x_b + W x - x, where the x that was sent is `sent`, or x_b itself if None. Call it once, and instead of wait().

        An engine that was lent x_b itself may change it in place.
        """
        x.lerp(b, self.lerp(), sent)


@dataclass
class Arrived(Pending):
    """A message that has arrived already."""

    result: Mixed
    weight: float = 1.0
    difference: Tensor | None = None

    def wait(self) -> Mixed:
        return self.result

    def lerp(self) -> Lerp:
        return Lerp(self.result.x, self.weight)

    def change(self) -> Tensor | None:
        return self.difference


@dataclass(eq=False)
class Buffer:
    """Memory that an engine can send without another copy. `Engine.allocate` returns one, and it is freed with its owner."""

    tensor: Tensor  # [*nodes, d]


def tensor_of(x: Buffer | Tensor) -> Tensor:
    return x.tensor if isinstance(x, Buffer) else x


FiniteCheck = Callable[[Tensor], Tensor]  # takes a flat tensor, returns a number that is finite only if all of the tensor is


def sum_of_squares(flat: Tensor) -> Tensor:
    """Check a model in one fast pass: the sum is finite only if its terms are. A sum that overflows counts as not finite, too."""
    is_half = flat.dtype.itemsize < 4
    return flat.sum(dtype=torch.float32) if is_half else torch.dot(flat, flat)


def largest_magnitude(flat: Tensor) -> Tensor:
    """Check buffers, which may hold the largest numbers that a float can be (a mask)."""
    lowest, highest = torch.aminmax(flat)  # a norm takes many times as long on a CPU
    return torch.maximum(highest, -lowest)


class Engine(Protocol):
    """Carries models between `n` nodes."""

    n: int
    device: torch.device  # where messages are, which may not be where the model is
    metrics: Metrics

    def gossip(
        self, x: Buffer | Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True, bits: int = 32
    ) -> Pending:
        """Mix `x` and `scalars` [*nodes, s] with W_k.

        Args:
            x: the model of this node, or something like it.
            topology: whose W_k to use.
            k: the step.
            scalars: numbers that travel with it.
            own: False for the neighbours' part alone: sum over j != i of W[i, j] x_j.
            bits: how many of them each number of `x` travels with (codes.py). Below 32, the result is x_i + sum_j W[i, j] (q_j - q_i),
                with the numbers q as they travelled: a node subtracts what it has sent, which keeps the mean of all nodes exactly.
                It takes no `scalars` then, and no own=False.
        """
        ...

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
        """Average over all nodes.

        Args:
            xs: one tensor for each bucket. Below 32 bits, each is encoded before the next is asked for.
            k: the step.
            scalars: numbers [*nodes, s] that travel with the first bucket.
            doing: what this node is doing. All nodes must be doing the same at step k; errors quote it.
            finite_check: None if `xs` may hold values that are not finite.
            bits: how many of them each number travels with (codes.py). All nodes get bitwise the same result at any number of bits.
            left_out: below 32 bits, what earlier averages left out of each bucket, in the dtype for sums. It is added to what is sent.
                Once `wait()` has returned, it is what this average has left out: the mean of `xs` and of `left_out` together is kept.
        """
        ...

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return W[i, i] as [*nodes, 1] in float64: the share that a node keeps, if the shares that it pushes are rounded to `dtype`."""
        ...

    def full(self, value: float) -> Tensor:
        """Return the same number for every node: [*nodes, 1] in float64."""
        ...

    def allocate(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Return memory for a bucket that this engine can send without another copy."""
        ...

    def allocate_codes(self, like: Sequence[Tensor], bits: int, keeps: bool) -> list[Buffer]:
        """Return memory for buckets that are sent with so many bits only: tensors with the shapes of `like`, in the dtype for sums.

        Messages of gossip steps and averages share memory here, so wait for one collective before the next is called. With keeps=False,
        so may the tensors: fill each just before it is handed in, and of a gossip step take nothing but the `change()`.
        """
        ...

    def post_receives(self, buffers: Sequence[Buffer], topology: Topology, k: int, bits: int = 32) -> None:
        """Prepare for step k, which will gossip these buffers, so that neighbours who get there first need not wait to send."""
        ...

    def complete_receives(self, k: int) -> None:
        """Undo post_receives(): exchange the messages that nodes have prepared for and will not send otherwise."""
        ...


class Buckets(Protocol):
    """A model as a method sees it: a few tensors [*nodes, d_b], each of one dtype.

    Who owns what: `read` lends memory that the caller must not change, except by `Pending.mix_into`; it may be the parameters themselves,
    so it is valid until the model changes. `peek` returns that same tensor only if changing it changes the model. `copy` gives memory that
    the caller may change, and that is valid until the next `copy` or `read` of the same bucket. Both can be handed to the engine.
    `difference` fills memory of the caller's. `write`, `lerp` and `add` change the model in place and never keep what they are given.
    """

    finite_check: FiniteCheck | None  # how to tell whether a bucket is finite; None if it need not be

    def __len__(self) -> int: ...

    def read(self, b: int) -> Buffer:
        """Lend bucket b as it is now, to be sent and waited for before the model changes."""
        ...

    def copy(self, b: int) -> Buffer:
        """Copy bucket b as it is now."""
        ...

    def difference(self, b: int, minus: Tensor, out: Tensor) -> None:
        """out <- x_b - minus, in the dtype of `out`."""
        ...

    def peek(self, b: int) -> Tensor:
        """Return the values of bucket b to look at. Unlike `read`, this never touches memory that may be in flight."""
        ...

    def write(self, b: int, value: Tensor) -> None:
        """x_b <- value, where `value` may have any float dtype."""
        ...

    def lerp(self, b: int, lerp: Lerp, sent: Tensor | None = None) -> None:
        """x_b <- x_b + weight (end - sent); `sent` is x_b itself if None. May overwrite `lerp.end`, never `sent`."""
        ...

    def add(self, b: int, change: Tensor) -> None:
        """x_b <- x_b + change, where `change` may have any float dtype."""
        ...


class JoinedBuckets:
    """Several Buckets end to end, as one. Without any, it is a model of no buckets."""

    def __init__(self, *parts: Buckets):
        self.finite_check: FiniteCheck | None = sum_of_squares
        self._places = [(part, b) for part in parts for b in range(len(part))]

    def __len__(self) -> int:
        return len(self._places)

    def read(self, b: int) -> Buffer:
        part, own = self._places[b]
        return part.read(own)

    def copy(self, b: int) -> Buffer:
        part, own = self._places[b]
        return part.copy(own)

    def difference(self, b: int, minus: Tensor, out: Tensor) -> None:
        part, own = self._places[b]
        part.difference(own, minus, out)

    def peek(self, b: int) -> Tensor:
        part, own = self._places[b]
        return part.peek(own)

    def write(self, b: int, value: Tensor) -> None:
        part, own = self._places[b]
        part.write(own, value)

    def lerp(self, b: int, lerp: Lerp, sent: Tensor | None = None) -> None:
        part, own = self._places[b]
        part.lerp(own, lerp, sent)

    def add(self, b: int, change: Tensor) -> None:
        part, own = self._places[b]
        part.add(own, change)


NO_BUCKETS = JoinedBuckets()


def all_finite(x: Buckets, check: FiniteCheck) -> bool:
    return all(math.isfinite(check(x.peek(b).reshape(-1))) for b in range(len(x)))


def uses_all_reduce(topology: Topology, bits: int = 32) -> bool:
    """Return whether a gossip step on this topology is run as an all-reduce: W = 11'/n, if there are more than two nodes.

    Two nodes exchange their models instead: that sends as much and has less to set up. So do nodes that send codes, because what an
    all-reduce rounds a second time would be lost in a gossip step.
    """
    return topology.is_complete and topology.n > 2 and bits == 32


def gossip_all(engine: Engine, xs: Iterable[Buffer], topology: Topology, k: int, bits: int = 32) -> tuple[list[Buffer], list[Pending]]:
    """Gossip all buckets of a model. Each is sent before the next is read from `xs`. Returns what was sent, and what will come of it."""
    if uses_all_reduce(topology, bits):
        sent = list(xs)
        return sent, engine.mean(sent, k)
    sent, pending = [], []
    for x in xs:
        sent.append(x)
        pending.append(engine.gossip(x, topology, k, bits=bits))
    return sent, pending


def check_gossip(bits: int, scalars: Tensor | None, own: bool) -> None:
    """Refuse what a gossip step can't do with codes, which mix changes."""
    check_width(bits)
    if bits < 32 and (scalars is not None or not own):
        given = "scalars" if scalars is not None else "own=False"
        raise ValueError(f"gossip with bits={bits} takes no {given}: it mixes changes of the model alone. Use bits=32 for {given}")


def check_mean(bits: int, xs: Iterable[object], left_out: Sequence[Tensor]) -> None:
    """Refuse an average with codes that has no memory for what they leave out."""
    check_width(bits)
    if bits < 32 and isinstance(xs, Sequence) and len(left_out) != len(xs):
        raise ValueError(f"an average with bits={bits} needs left_out=, a tensor for each of {len(xs)} buckets (zeros at first)")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def rounded(weight: float) -> float:
    """Return the weight that float32 arithmetic uses for it."""
    return float(np.float32(weight))


def copy_all(x: Buckets) -> list[Tensor]:
    """Copy all buckets, in the dtype for sums."""
    tensors = (x.peek(b) for b in range(len(x)))
    return [tensor.to(accumulator(tensor.dtype), copy=True) for tensor in tensors]
