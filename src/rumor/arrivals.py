"""What comes of messages under way between real processes: gossip that is to be mixed, and the mean of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from rumor.channel import Channel
from rumor.engine import NO_SCALARS, Buckets, Mixed, Pending, accumulator

if TYPE_CHECKING:
    from rumor.process_group import ProcessGroup


class Work(Protocol):
    """A message or a sum that was posted."""

    def wait(self) -> object: ...


def scaled(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """out <- factor x; `out` may be of a wider dtype, which the product is then taken in."""
    return torch.mul(x, factor, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(factor)


def gossiping(links: Links, k: int) -> str:
    return f"gossiping at step {k} with node {', '.join(str(node) for node, _, _ in links.receive)}"


class Links(NamedTuple):
    """Whom this rank hears from (node, global rank, weight), whom it sends to (global ranks), and its own weight.

    `own_32` makes up for the rounding to float32 of the weights that it hears with, `kept_32` for that of the shares that it pushes: a sum
    of weights that is off 1 would move the mean, step by step, always the same way.
    """

    receive: list[tuple[int, int, float]]
    send: list[int]
    own: float
    own_32: float
    kept_32: float


@dataclass
class Gossip(Pending):
    engine: ProcessGroup
    channel: Channel
    works: list[Work]
    links: Links
    k: int
    scalars: int
    own: bool

    def arrived(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Payload, scalars and weight of each neighbour's message; what is not finite is replaced by this node's own."""
        engine, own = self.engine, self.channel.out
        engine._arrive(self.channel, self.works, gossiping(self.links, self.k))
        for message, (node, _, w) in zip(self.channel.inbox(len(self.links.receive)), self.links.receive, strict=True):
            finite = engine._alarm.hear(message, node, self.k)
            if isinstance(finite, Tensor):
                payload = torch.where(finite, message.payload, own.payload)
                yield payload, torch.where(finite, message.scalars(self.scalars), own.scalars(self.scalars)), w
            else:
                taken = message if finite else own
                yield taken.payload, taken.scalars(self.scalars), w

    def wait(self) -> Mixed:
        out = self.channel.out
        mixed = self.engine._room_to_mix(len(out.payload), out.payload.dtype, out.payload.device)
        own = 0.0 if not self.own else self.links.own_32 if mixed.dtype == torch.float32 else self.links.own
        scaled(out.payload, own, mixed) if self.own else mixed.zero_()
        scalars = out.scalars(self.scalars) * own
        for payload, theirs, w in self.arrived():
            mixed.add_(payload, alpha=w)
            scalars += w * theirs
        return Mixed(mixed, scalars)

    def write_to(self, x: Buckets, b: int) -> None:
        """W x = x + (1 - w_ii) (the neighbours' average - x), straight into the parameters: one pass less than by way of a buffer."""
        if self.channel.out.payload.dtype != accumulator(self.channel.out.payload.dtype):
            return super().write_to(x, b)  # half precision: sum in float32 first
        average, total = None, 0.0
        for payload, _, w in self.arrived():
            total += w
            average = payload if average is None else torch.lerp(average, payload, w / total, out=average)
        if average is not None:
            x.lerp(b, average, total)


@dataclass
class Mean(Pending):
    engine: ProcessGroup
    channel: Channel
    works: list[Work]
    doing: str
    scalars: int

    def wait(self) -> Mixed:
        engine, total = self.engine, self.channel.total()
        engine._arrive(self.channel, self.works, self.doing)
        head = total.head.tolist()
        if not total.all_did_the_same(head, engine.n):
            raise RuntimeError(
                f"ranks are out of step: rank {engine.rank} was {self.doing}, another one was doing something else. Every rank must call "
                "step(), averaged(), finish() and consensus_distance() in the same order and equally often, also one with fewer batches"
            )
        if head[1] > 0:
            engine._settle_alarm(self.doing)
            total.payload.copy_(self.channel.out.payload)  # this node keeps its own model ...
            total.head[1:2].zero_()  # ... also if it asks again
        return Mixed(total.payload, total.scalars(self.scalars).double() / engine.n if self.scalars else NO_SCALARS)
