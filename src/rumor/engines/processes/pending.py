"""Messages in flight between real processes: gossip with neighbours, and sums over all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rumor.engines.engine import NO_SCALARS, Lerp, Mixed, Pending, accumulator, rounded
from rumor.engines.processes.alarm import Alarm
from rumor.engines.processes.channel import Channel, CodedChannel, Scratch
from rumor.engines.processes.message import Message, labels_agree
from rumor.engines.processes.transport import Transport, Work
from rumor.topology import Topology

SUM_BYTES = 2**25  # in an all-reduce all nodes wait for each other several times, so a few large ones are cheapest


class Links(NamedTuple):
    """The neighbours of this node at one step.

    Attributes:
        receive: (node, global rank, weight) of those that this node receives from.
        send: global ranks of those that it sends to.
        own: the node's own weight.
        own_32: the same, plus what the received weights lose when rounded to float32: a sum of weights other than 1 would make the mean
            drift, always in the same direction.
        kept_32: likewise for the shares that this node pushes.
    """

    receive: list[tuple[int, int, float]]
    send: list[int]
    own: float
    own_32: float
    kept_32: float

    def names(self) -> str:
        """Return the numbers of the nodes that this node receives from."""
        return ", ".join([str(node) for node, _, _ in self.receive])

    @classmethod
    def of(cls, topology: Topology, k: int, transport: Transport) -> Links:
        rank = transport.rank
        pulls, pushes, own = topology.neighbors(rank, k), topology.sends_to(rank, k), topology.self_weight(rank, k)
        lost = [sum(w - rounded(w) for w in weights) for weights in (pulls.values(), pushes.values())]
        receive = [(node, transport.global_rank(node), w) for node, w in pulls.items()]
        return cls(receive, [transport.global_rank(node) for node in pushes], own, own + lost[0], own + lost[1])


@dataclass
class Gossip(Pending):
    """The messages of one bucket to and from all neighbours, posted at once so that both directions of every link are busy."""

    transport: Transport
    alarm: Alarm
    channel: Channel
    links: Links
    k: int
    scalars: Tensor | None
    own: bool
    scratch: Scratch
    inbox: list[Message] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    _lerp: Lerp | None = None

    @property
    def doing(self) -> str:
        return f"gossiping at step {self.k} with node {self.links.names()}"

    @property
    def count(self) -> int:
        """Number of scalars."""
        return 0 if self.scalars is None else self.scalars.numel()

    def post(self) -> None:
        """Pack the head and post all messages."""
        self.channel.write_head(self.alarm, self.transport.rank, self.k, self.scalars)
        self.transport.call(self._post_from_host if self.transport.sends_from_host else self._post_together, self.doing)

    def _post_from_host(self) -> None:
        channel, links = self.channel, self.links
        post_receives(self.transport, channel, links)  # before the sends, or gloo asks the receiver first
        for _, peer, _ in links.receive:
            message, work = channel.expected.pop(peer)
            self.inbox.append(message)
            self.works.append(work)
        channel.owed.difference_update(links.send)
        self.works += self.transport.send(channel.out.whole, links.send, channel.tag)

    def _post_together(self) -> None:
        channel, links = self.channel, self.links
        self.inbox += channel.inbox(len(links.receive))
        inbox = [(message.whole, peer) for message, (_, peer, _) in zip(self.inbox, links.receive, strict=True)]
        self.works += self.transport.exchange([(channel.out.whole, peer) for peer in links.send], inbox, channel.tag)

    def _heard(self) -> Iterator[tuple[Message, Tensor, float, bool | Tensor]]:
        """Yield each neighbour's message, its payload, its weight, and whether it is finite, as far as the host knows."""
        wait_for_channel(self.transport, self.channel, self.works, self.doing, [node for node, _, _ in self.links.receive])
        for place, (message, (node, _, w)) in enumerate(zip(self.inbox, self.links.receive, strict=True)):
            finite = self.alarm.hear(message, node, self.k)
            yield message, self.channel.received(place, message) if finite is not False else self.channel.tensor, w, finite

    def _arrived(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield payload, scalars and weight of each. What is not finite is replaced by this node's own."""
        own, count = self.channel.out, self.count
        for message, payload, w, finite in self._heard():
            if isinstance(finite, Tensor):
                theirs = torch.where(finite, message.scalars(count), own.scalars(count))
                yield torch.where(finite, payload, self.channel.tensor), theirs, w
            else:
                yield payload, (message if finite else own).scalars(count), w

    def wait(self) -> Mixed:
        x = self.channel.tensor
        mixed = self.scratch(x, "mixed")
        own = 0.0 if not self.own else self.links.own_32 if mixed.dtype == torch.float32 else self.links.own
        if self.own:
            _scale(x, own, mixed)
        else:
            mixed.zero_()
        scalars = self.channel.out.scalars(self.count) * own
        for payload, theirs, w in self._arrived():
            mixed.add_(payload, alpha=w)
            scalars += w * theirs
        return Mixed(mixed, scalars)

    def lerp(self) -> Lerp:
        """Interpolate towards the neighbours' average, with their total weight: a pass or two less than through a buffer."""
        x = self.channel.tensor
        if self._lerp is None and x.is_cuda and len(self.links.receive) == 1:  # a kernel does it in one pass, for any dtype
            ((_, payload, w, finite),) = self._heard()
            self._lerp = Lerp(payload, w, finite if isinstance(finite, Tensor) else None)
        elif x.dtype != accumulator(x.dtype):
            return super().lerp()  # half precision: sum in float32
        elif self._lerp is None:
            average, total = None, 0.0
            for payload, _, w in self._arrived():
                total += w
                out = None if average is x else average  # what was sent must not change
                average = payload if average is None else torch.lerp(average, payload, w / total, out=out)
            self._lerp = Lerp(x if average is None else average, total)
        return self._lerp


class CodedGossip(Gossip):
    """The same for codes. A neighbour whose model is not finite is left out.

    Only change() is of use if buckets share the memory that they are encoded from (see `Engine.allocate_codes`).
    """

    channel: CodedChannel

    def wait(self) -> Mixed:
        return Mixed(self.change().add_(self.channel.tensor), NO_SCALARS)

    def lerp(self) -> Lerp:
        return Lerp(self.wait().x, 1.0)

    def change(self) -> Tensor:
        """Return sum_j W[i, j] (q_j - q_i), in shared memory."""
        channel, code = self.channel, self.channel.code
        like = self.scratch(channel.tensor, "change")
        heard = [(channel.places(message, payload), w, finite) for message, payload, w, finite in self._heard() if finite is not False]
        if any(isinstance(finite, Tensor) for _, _, finite in heard):  # only the device knows
            own, one = (self.scratch(like, use) for use in ("own", "one"))
            code.decode(channel.own_code, own)
            total = like.zero_()
            for theirs, w, finite in heard:
                change = code.decode(theirs, one).sub_(own)
                total.add_(change.masked_fill_(~torch.as_tensor(finite, device=own.device), 0.0), alpha=w)
            return total
        if not heard:
            return like.zero_()
        weights = [w for _, w, _ in heard]
        own_weights = _negated_sum(weights) if like.dtype == torch.float32 else [-sum(weights)]
        codes = [*(theirs for theirs, _, _ in heard), *(channel.own_code for _ in own_weights)]
        return code.weighted_sum(codes, [*weights, *own_weights], like)


def _negated_sum(weights: Sequence[float]) -> list[float]:
    """Return one or two float32 numbers that make the weights, rounded to float32, sum to exactly 0: else the mean would drift."""
    total = -sum(rounded(w) for w in weights)
    first = rounded(total)
    return [first, total - first] if total != first else [first]


def post_receives(transport: Transport, channel: Channel, links: Links, ahead: bool = False) -> None:
    """Post receives from all neighbours that none is posted for yet. With ahead=True, all neighbours do the same for the same step."""
    if ahead:
        channel.owed.update(links.send)
    peers = [peer for _, peer, _ in links.receive if peer not in channel.expected]
    for peer, message in zip(peers, channel.inbox(len(peers)), strict=True):
        channel.expected[peer] = (message, transport.receive(message.whole, peer, channel.tag))


def wait_for_channel(transport: Transport, channel: Channel, works: list[Work], doing: str, senders: Sequence[int] = ()) -> None:
    """Wait for the copy thread, which fills `works`, and then for these."""
    if (task := channel.task) is not None:
        channel.task = None
        with transport.waiting():
            task.result()
    transport.wait(works, doing, senders, channel.tag)


class AllReduce:
    """One all-reduce of several buckets, with scalars in its head. Each bucket is multiplied by 1/n first, so the sum is the mean."""

    def __init__(
        self, transport: Transport, alarm: Alarm, channels: list[Channel], doing: str, scalars: Tensor | None, raises: bool = True
    ):
        self.transport, self.alarm, self.channels, self.doing, self.raises = transport, alarm, channels, doing, raises
        self.works: list[Work] = []
        sizes = [len(channel.tensor) for channel in channels]
        self.message = channels[0].total(sum(sizes))
        self.parts = torch.split(self.message.payload, sizes)
        for channel, part in zip(channels, self.parts, strict=True):
            _scale(channel.out.payload, 1 / transport.n, part)
        self.message.write_sum_head(alarm.is_known(), doing, transport.n, transport.has_news)
        self._count = 0 if scalars is None else scalars.numel()
        if scalars is not None:
            self.message.scalars(self._count).copy_(scalars)

    def post(self) -> None:
        self.works += self.transport.sum(self.message.whole, self.doing)

    def arrive(self) -> Tensor:
        """Wait for the sum, and return the mean of the scalars. Every bucket of the sum calls it; only the first has to wait."""
        total, n = self.message, self.transport.n
        wait_for_channel(self.transport, self.channels[0], self.works, self.doing)
        head = total.head.tolist()
        if not labels_agree(head, n):
            raise RuntimeError(
                f"ranks are out of step: rank {self.transport.rank} was {self.doing}, another one was doing something else. Every rank "
                "must call step(), averaged(), finish(), consensus_distance() and rumor.save() in the same order and equally often, also "
                "one with fewer batches: compare averager.metrics.rounds of all ranks to see which one has skipped a call"
            )
        if head[-2] > 0:
            self.transport.heard_news = True
        if head[1] > 0:
            self._settle_alarm()
            for channel, part in zip(self.channels, self.parts, strict=True):
                part.copy_(channel.out.payload)  # this node keeps its own model ...
            total.head[1:2].zero_()  # ... also if it asks again
        return total.scalars(self._count).double() / n if self._count else NO_SCALARS

    def _settle_alarm(self) -> None:
        """Find out whose alarm was the first, now that all nodes are here."""
        first = self.alarm.as_tensor()
        self.transport.min(first, self.doing)
        if self.raises:
            raise self.alarm.error(float(first))
        self.alarm.settle(first)  # the other ranks of the node do not know yet: all raise once they have shared their parts


@dataclass
class BucketMean(Pending):
    """One bucket's part of an all-reduce."""

    total: AllReduce
    place: int

    def arrive(self) -> None:
        self.total.arrive()

    def wait(self) -> Mixed:
        scalars = self.total.arrive()
        return Mixed(self.total.parts[self.place].to(self.total.channels[self.place].tensor.device, non_blocking=True), scalars)


def sums_of(channels: Sequence[Channel]) -> list[list[Channel]]:
    """Group buckets that are summed in one message: adjacent ones of one dtype, up to SUM_BYTES.

    No group has more than about half of all bytes, so that one half can be mixed while the other travels.
    """
    half = sum([channel.tensor.nbytes for channel in channels]) / 2
    groups: list[list[Channel]] = []
    so_far = 0  # bytes in the last group
    for channel in channels:
        own = channel.tensor
        last = groups[-1][-1].tensor if groups else own
        is_full = so_far + own.nbytes > SUM_BYTES or so_far >= half
        if not groups or is_full or own.dtype != last.dtype or own.device != last.device:
            groups.append([])
            so_far = 0
        groups[-1].append(channel)
        so_far += own.nbytes
    return groups


def _scale(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """out <- factor x; `out` may have a wider dtype, which the product is then taken in."""
    return torch.mul(x, factor, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(factor)
