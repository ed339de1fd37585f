"""What comes of messages under way between real processes: gossip that is to be mixed, and the mean of all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rumor.channel import Channel, Message, Work
from rumor.engine import NO_SCALARS, Mixed, Pending, Pull, accumulator

if TYPE_CHECKING:
    from rumor.process_group import ProcessGroup


SUM_BYTES = 2**25  # an all-reduce has everyone wait for everyone, several times over: few and large ones cost least


def scaled(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """out <- factor x; `out` may be of a wider dtype, which the product is then taken in."""
    return torch.mul(x, factor, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(factor)


def gossiping(links: Links, k: int) -> str:
    return f"gossiping at step {k} with node {', '.join(str(node) for node, _, _ in links.receive)}"


@contextmanager
def unrecorded() -> Iterator[None]:
    """A gloo message that the profiler saw begin and that ends when profiling is over writes to memory that is no more (torch 2.13)."""
    if not torch._C._autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


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
    inbox: list[Message]
    works: list[Work]
    links: Links
    k: int
    scalars: int
    own: bool
    _pull: Pull | None = None

    def heard(self) -> Iterator[tuple[Message, Tensor, float, bool | Tensor]]:
        """Each neighbour's message, its payload, its weight, and whether it is finite, as far as the host knows that."""
        self.engine._arrive(self.channel, self.works, gossiping(self.links, self.k), [node for node, _, _ in self.links.receive])
        for place, (message, (node, _, w)) in enumerate(zip(self.inbox, self.links.receive, strict=True)):
            finite = self.engine._alarm.hear(message, node, self.k)
            yield message, self.channel.mixable(place, message) if finite is not False else self.channel.own, w, finite

    def arrived(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Payload, scalars and weight of each; what is not finite is replaced by this node's own."""
        own = self.channel.out
        for message, payload, w, finite in self.heard():
            if isinstance(finite, Tensor):
                theirs = torch.where(finite, message.scalars(self.scalars), own.scalars(self.scalars))
                yield torch.where(finite, payload, own.payload), theirs, w
            else:
                yield payload, (message if finite else own).scalars(self.scalars), w

    def wait(self) -> Mixed:
        x = self.channel.own
        mixed = _room_to_mix(self.engine._scratch, x)
        own = 0.0 if not self.own else self.links.own_32 if mixed.dtype == torch.float32 else self.links.own
        scaled(x, own, mixed) if self.own else mixed.zero_()
        scalars = self.channel.out.scalars(self.scalars) * own
        for payload, theirs, w in self.arrived():
            mixed.add_(payload, alpha=w)
            scalars += w * theirs
        return Mixed(mixed, scalars)

    def pull(self) -> Pull:
        """Towards the neighbours' average, with the weight that they have together: a pass or two less than by way of a buffer."""
        out = self.channel.own
        if self._pull is None and out.is_cuda and len(self.inbox) == 1:  # one pass, over any dtype, does it all
            ((_, payload, w, finite),) = self.heard()
            self._pull = Pull(payload, w, finite if isinstance(finite, Tensor) else None)
        elif out.dtype != accumulator(out.dtype):
            return super().pull()  # half precision: sum in float32
        elif self._pull is None:
            average, total = None, 0.0
            for payload, _, w in self.arrived():
                total += w
                room = None if average is out else average  # what was sent must stay as it is
                average = payload if average is None else torch.lerp(average, payload, w / total, out=room)
            self._pull = Pull(out if average is None else average, total)
        return self._pull


class Sum:
    """The mean of all nodes for a few buckets, side by side in one message, and scalars in its head."""

    def __init__(self, engine: ProcessGroup, channels: list[Channel], doing: str, scalars: Tensor | None):
        self.engine, self.channels, self.doing = engine, channels, doing
        self.works: list[Work] = []
        sizes = [len(channel.own) for channel in channels]
        self.message = channels[0].total(sum(sizes))
        self.parts = torch.split(self.message.payload, sizes)
        for channel, part in zip(channels, self.parts, strict=True):
            scaled(channel.out.payload, 1 / engine.n, part)
        self.message.write_shared_head(engine._alarm.is_known(), doing)
        self._count = 0 if scalars is None else scalars.numel()
        if scalars is not None:
            self.message.scalars(self._count).copy_(scalars)

    def arrive(self) -> Tensor:
        """Lets it arrive, and gives the mean of the scalars."""
        engine, total = self.engine, self.message
        engine._arrive(self.channels[0], self.works, self.doing)
        head = total.head.tolist()
        if not total.all_did_the_same(head, engine.n):
            raise RuntimeError(
                f"ranks are out of step: rank {engine.rank} was {self.doing}, another one was doing something else. Every rank must call "
                "step(), averaged(), finish() and consensus_distance() in the same order and equally often, also one with fewer batches: "
                "compare averager.metrics.rounds of all ranks to see who has skipped one"
            )
        if head[1] > 0:
            engine._settle_alarm(self.doing)
            for channel, part in zip(self.channels, self.parts, strict=True):
                part.copy_(channel.out.payload)  # this node keeps its own model ...
            total.head[1:2].zero_()  # ... also if it asks again
        return total.scalars(self._count).double() / engine.n if self._count else NO_SCALARS


@dataclass
class Mean(Pending):
    """One bucket's part of a sum."""

    total: Sum
    place: int

    def wait(self) -> Mixed:
        scalars = self.total.arrive()
        return Mixed(self.total.parts[self.place].to(self.total.channels[self.place].own.device, non_blocking=True), scalars)


def _room_to_mix(scratch: dict[tuple[torch.dtype, torch.device], Tensor], x: Tensor) -> Tensor:
    kind = (accumulator(x.dtype), x.device)
    if kind not in scratch or len(scratch[kind]) < len(x):
        scratch[kind] = torch.empty(len(x), dtype=kind[0], device=x.device)
    return scratch[kind][: len(x)]


def side_by_side(channels: Sequence[Channel]) -> Iterator[list[Channel]]:
    """Buckets that are summed in one message: neighbours of one dtype, up to SUM_BYTES, and no more than about half of all of them, so
    that one half can be mixed while the other travels."""
    half = sum(channel.own.nbytes for channel in channels) / 2
    some: list[Channel] = []
    for channel in channels:
        so_far, own = sum(c.own.nbytes for c in some), channel.own
        is_full = so_far + own.nbytes > SUM_BYTES or so_far >= half
        if some and (is_full or own.dtype != some[0].own.dtype or own.device != some[0].own.device):
            yield some
            some = []
        some.append(channel)
    if some:
        yield some
