"""CodedMean: an average over all nodes with codes, in the place of an all-reduce.

Each node owns a share of the blocks. It receives the codes of its share from all nodes, averages them, and sends its code of the mean to
all. So 2 (n - 1)/n codes of the model leave a node, and all nodes end with bitwise the same mean: the one that the owners have sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rumor.engines.codes import CODES, Parts
from rumor.engines.engine import NO_SCALARS, Buffer, Mixed, Pending
from rumor.engines.owners import nbytes_of_shares, owned_by_each
from rumor.engines.processes.alarm import Alarm
from rumor.engines.processes.channel import CodeMemory, Scratch
from rumor.engines.processes.message import Message, messages_in
from rumor.engines.processes.transport import Transport, Work


class Shares:
    """Who owns which blocks of some buckets, and the memory for their messages.

    Attributes:
        owned: what each node owns.
        out: messages with this node's codes, to each owner; later, those with each owner's code of the mean. An owner sends the mean once
            it has all of this node's code, so one can take the place of the other.
        inbox: messages with each node's codes of this node's share; its own is the one in `out`.
        places: for each bucket, which of its blocks belong to an owner, and the place of their code in `out`.
        received: what this node owns of each bucket, the place of the code of its mean, and those of all nodes' codes.
        tags: of the two exchanges.
        bytes_sent: bytes that this node sends in one average.

    Args:
        transport: sends messages to the other nodes.
        sizes: of the buckets.
        bits: of a number, as it travels.
        memory: for the messages.
    """

    def __init__(self, transport: Transport, sizes: Sequence[int], bits: int, memory: CodeMemory):
        self.code = CODES[bits]
        self.owned = owned_by_each(sizes, transport.n)
        self.tags = transport.new_tag(), transport.new_tag()
        rank, lengths = transport.rank, nbytes_of_shares(self.code, sizes, transport.n)
        self.out = messages_in(memory.out, lengths)
        self.inbox = messages_in(memory.inbox, [lengths[rank]] * (transport.n - 1))
        self.inbox.insert(rank, self.out[rank])
        to_others = [message for i, message in enumerate(self.out) if i != rank]
        self.bytes_sent = sum(message.whole.nbytes for message in to_others) + len(to_others) * self.out[rank].whole.nbytes
        self._find_places(len(sizes), rank)
        self._sizes = sizes
        self._whole: dict[torch.device, list[Parts]] = {}

    def _find_places(self, buckets: int, rank: int) -> None:
        """Find the codes in the messages once: views of them cost as much as to copy a small code."""
        self.places: list[list[tuple[slice, Parts]]] = [[] for _ in range(buckets)]
        for owner, share in enumerate(self.owned):
            for owned, place in zip(share, self._places(owner, self.out[owner]), strict=True):
                self.places[owned.bucket].append((owned.blocks, place))
        inbox = zip(*(self._places(rank, message) for message in self.inbox), strict=True)
        self.received = list(zip(self.owned[rank], self._places(rank, self.out[rank]), inbox, strict=True))

    def _places(self, owner: int, message: Message) -> list[Parts]:
        """Return the place in `message` of the code of each part of a bucket that `owner` owns."""
        lengths = [self.code.nbytes(owned.end - owned.start) for owned in self.owned[owner]]
        return [self.code.places(code) for code in torch.split(message.payload, lengths)]

    def whole(self, b: int, device: torch.device) -> Parts:
        """Return memory on the device of bucket b for its code in one piece. All buckets use the same memory."""
        if device not in self._whole:
            lengths = list(map(self.code.nbytes, self._sizes))
            memory = torch.empty(max(lengths), dtype=torch.uint8, device=device)
            self._whole[device] = [self.code.places(memory[:length]) for length in lengths]
        return self._whole[device][b]


class CodedMean:
    """One average of several buckets, and of scalars that travel in the heads of its messages.

    Args:
        transport: sends messages to the other nodes.
        alarm: whether a model was not finite.
        shares: the owners, and the memory for the messages.
        xs: the buckets. Each is encoded before the next is asked for.
        left_out: what earlier averages left out of each bucket (see `Engine.mean`).
        k: the step.
        doing: for errors.
        scalars: numbers of this node.
        scratch: memory for decoded codes.
        raises: False if the ranks of a node have to learn of an alarm before they raise.
        helper: a thread that does this node's part of the average while the node goes on, so that nobody waits until it calls
            `arrive`. If None, `arrive` does it.

    Attributes:
        is_alarmed: once it has arrived: whether some node's numbers were not finite.
    """

    def __init__(
        self,
        transport: Transport,
        alarm: Alarm,
        shares: Shares,
        xs: Iterable[Buffer],
        left_out: Sequence[Tensor],
        k: int,
        doing: str,
        scalars: Tensor | None,
        scratch: Scratch,
        raises: bool = True,
        helper: Executor | None = None,
    ):
        self.transport, self.alarm, self.shares, self._xs, self.left_out = transport, alarm, shares, xs, left_out
        self.k, self.doing, self.scalars, self.scratch, self.raises, self.helper = k, doing, scalars, scratch, raises, helper
        self._codes: list[Work] = []  # of the first exchange
        self._means: list[Work] = []  # of the second
        self._help: Future[None] | None = None
        self._mean_of_scalars: Tensor | None = None  # once the average has arrived
        self._first = torch.full((1,), math.inf, dtype=torch.float64)  # the earliest alarm in the messages
        self.is_alarmed = False

    def post(self) -> None:
        """Send the codes of `xs` + `left_out` to the owners. What the codes leave out stays in `left_out`."""
        sizes = []
        for b, (x, rest) in enumerate(zip(self._xs, self.left_out, strict=True)):
            code = self.shares.whole(b, rest.device)
            sizes.append(self.shares.code.encode(rest.add_(x.tensor), code, leave_rest=True))
            for blocks, out in self.shares.places[b]:
                for place, part in zip(out, code, strict=True):
                    place.copy_(part[blocks])
        self._xs = ()
        size = torch.stack(sizes).amax()
        for message in self.shares.out:
            self.alarm.write(message, size, self.transport.rank, self.k)  # of the whole model: every owner must know
            message.tell_news(self.transport.has_news)
            if self.scalars is not None:
                message.scalars(self.scalars.numel()).copy_(self.scalars)
        self._codes = self._exchange(self.shares.out, self.shares.inbox, self.shares.tags[0])
        if self.transport.sends_from_host:  # before the codes are here, so that owners need not wait to send
            self._means = self.transport.call(self._receive_means, self.doing)
            self.transport.track(self.shares.tags[1], self._means, self.shares)
        if self.helper is not None:
            self._help = self.helper.submit(self._average_and_send)
            # the helper waits for the codes, and a second wait() for them would be for other messages
            self.transport.track(self.shares.tags[0], [_Help(self._help)], self.shares)

    def _receive_means(self) -> list[Work]:
        return [self.transport.receive(self.shares.out[node].whole, peer, self.shares.tags[1]) for node, peer in self._peers()]

    def arrive(self) -> Tensor:
        """Wait for the average, and return that of the scalars. Every bucket calls it; only the first has to wait."""
        if self._mean_of_scalars is None:
            if self._help is None:
                self.transport.wait(self._codes, self.doing)
                self._average_and_send()
            else:
                with self.transport.waiting():
                    self._help.result()
            self.transport.wait([], self.doing, tag=self.shares.tags[0])
            for node, message in enumerate(self.shares.inbox):
                self.alarm.hear(message, node, self.k)
                self.transport.heard_news |= message.tells_news()
            self.transport.wait(self._means, self.doing, tag=self.shares.tags[1])
            self._mean_of_scalars = self._average_scalars()
            # what all nodes have heard alike: this node may know more by now, from what it has sent since
            self._first = torch.stack([message.head[1:2] for message in self.shares.inbox]).amin(dim=0)
            self.is_alarmed = float(self._first) < math.inf
        if self.is_alarmed:
            first = self._first
            if self.raises:
                raise self.alarm.error(float(first))
            self.alarm.settle(first)
        return self._mean_of_scalars

    @torch.no_grad()
    def _average_and_send(self) -> None:
        """Average this node's share once all codes of it are here, and send the mean to all. A helper counts no time as waiting."""
        while self._codes:
            self.transport.call(self._codes.pop(0).wait, self.doing)
        self._average_share()
        self._send_mean()

    def mean(self, place: int, out: Tensor | None = None) -> Tensor:
        """Return the mean of one bucket, in `out` or in shared memory. If some model was not finite, return zeros."""
        mean = self.scratch(self.left_out[place], "change") if out is None else out
        if self.is_alarmed:
            return mean.zero_()
        code = self.shares.whole(place, mean.device)
        for blocks, part in self.shares.places[place]:
            for rows, received in zip(code, part, strict=True):
                rows[blocks].copy_(received)
        return self.shares.code.decode(code, mean)

    def _average_share(self) -> None:
        """Average this node's share, and encode the mean. What its code leaves out counts n times: the next average divides it by n."""
        n, code = self.transport.n, self.shares.code
        use = "change" if self.helper is None else "share"  # a helper must not share memory with the node, which goes on meanwhile
        for owned, mean, received in self.shares.received:
            rest = self.left_out[owned.bucket][owned.start : owned.end]
            codes = [tuple(part.to(rest.device) for part in theirs) for theirs in received]
            total = code.weighted_sum(codes, [1 / n] * n, self.scratch(rest, use))
            code.encode(total, mean, leave_rest=True)
            rest.add_(total, alpha=n)

    def _average_scalars(self) -> Tensor:
        if self.scalars is None:
            return NO_SCALARS
        return torch.stack([message.scalars(self.scalars.numel()).clone() for message in self.shares.inbox]).mean(dim=0)

    def _send_mean(self) -> None:
        """Send this node's code of the mean to all others, whose codes of it have arrived or are on their way."""
        rank, n, tag = self.transport.rank, self.transport.n, self.shares.tags[1]
        if not self.transport.sends_from_host:  # NCCL needs receives together with sends
            self._means = self._exchange([self.shares.out[rank]] * n, self.shares.out, tag)
            return
        peers = [peer for _, peer in self._peers()]
        self._means += self.transport.call(lambda: self.transport.send(self.shares.out[rank].whole, peers, tag), self.doing)

    def _peers(self) -> list[tuple[int, int]]:
        """Return the numbers of the other nodes, and their global ranks."""
        return [(node, self.transport.global_rank(node)) for node in range(self.transport.n) if node != self.transport.rank]

    def _exchange(self, out: Sequence[Message], inbox: Sequence[Message], tag: int) -> list[Work]:
        outbox = [(out[node].whole, peer) for node, peer in self._peers()]
        expected = [(inbox[node].whole, peer) for node, peer in self._peers()]
        works: list[Work] = self.transport.call(lambda: self.transport.exchange(outbox, expected, tag), self.doing)
        self.transport.track(tag, works, self.shares)
        return works


class _Help(NamedTuple):
    """A helper's part of an average, to wait for like a message."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()


@dataclass
class CodedBucketMean(Pending):
    """One bucket's part of a CodedMean."""

    total: CodedMean
    place: int

    def arrive(self) -> None:
        self.total.arrive()

    def wait(self) -> Mixed:
        scalars = self.total.arrive()
        return Mixed(self.total.mean(self.place), scalars if self.place == 0 else NO_SCALARS)
