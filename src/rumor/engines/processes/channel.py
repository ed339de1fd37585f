"""Channel: the memory of one bucket: what it sends, what each neighbour sends, and the sum over all nodes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from rumor.engines.codes import Code, Parts
from rumor.engines.engine import Buffer, FiniteCheck, accumulator, sum_of_squares
from rumor.engines.owners import nbytes_of_shares
from rumor.engines.processes.alarm import Alarm
from rumor.engines.processes.gpu_staging import Staging
from rumor.engines.processes.message import Message, messages_in, room_for
from rumor.engines.processes.transport import Work


class Channel(Buffer):
    """A bucket's buffer between real processes.

    Attributes:
        tensor: what a method packs and mixes: the payload of `out`, or its twin on a GPU if there is `staging`.
        out: the message that goes out.
        tag: the tag of its messages.
        expected: receives that were posted ahead of their step, by sender.
        owed: neighbours that have posted a receive ahead for a message of this node.
        task: the last task that the copy thread was given for this bucket.
    """

    def __init__(
        self,
        d: int,
        dtype: torch.dtype,
        device: torch.device,
        tag: int,
        staging: Staging | None = None,
        messages: tuple[Message, Message] | None = None,
    ):
        self.tag, self.staging = tag, staging
        self._shape = (d, dtype, device, staging is not None)
        self.out = Message(*self._shape) if messages is None else messages[0]
        super().__init__(self.out.payload if staging is None else staging.packed)
        self._inbox: list[Message] = [] if messages is None else [messages[1]]
        self.expected: dict[int, tuple[Message, Work]] = {}
        self.owed: set[int] = set()
        self.task: Future[None] | None = None
        self.coded: dict[int, CodedChannel] = {}  # by the number of bits
        self.shares: dict[tuple[int, ...], Any] = {}  # coded_mean.Shares of averages whose first bucket this is, by bits and sizes
        self.memory: CodeMemory | None = None  # which its messages are in, if they share it with those of other buckets
        self._total: Message | None = None

    def inbox(self, count: int) -> list[Message]:
        """Return memory for `count` messages, apart from those that are expected."""
        free = list(self._inbox)
        for message, _ in self.expected.values():
            free.remove(message)
        while len(free) < count:
            free.append(Message(*self._shape))
            self._inbox.append(free[-1])
        return free[:count]

    def total(self, length: int) -> Message:
        """Return memory for a sum over all nodes, of this bucket and those that go with it. Its head has the dtype of the sum."""
        if self._total is None or len(self._total.payload) != length:
            _, dtype, device, pinned = self._shape
            self._total = Message(length, accumulator(dtype), device, pinned, head=accumulator(dtype))
        return self._total

    def prepare(self, check: FiniteCheck = sum_of_squares) -> None:
        """Start to copy the bucket to `out`, if it is on a GPU and `out` is not."""
        if self.staging is not None:
            self.staging.to_host(self.out.payload, check)

    def write_head(self, alarm: Alarm, node: int, k: int, scalars: Tensor | None, check: FiniteCheck = sum_of_squares) -> None:
        """Prepare `out` for sending."""
        alarm.write(self.out, check(self.out.payload) if self.staging is None else self.staging.size, node, k)
        if scalars is not None:
            self.out.scalars(scalars.numel()).copy_(scalars)

    def received(self, place: int, message: Message) -> Tensor:
        """Return the payload of a message that has arrived, on the device of `tensor`."""
        return message.payload if self.staging is None else self.staging.to_device(place, message.payload)


class CodeMemory:
    """Memory for all messages of some buckets, as codes: those of a gossip step, and, at another time, those of an average.

    Attributes:
        sizes: of the buckets.
        out: for messages that go out.
        inbox: for messages that come in, one from a neighbour for each bucket. More neighbours need more memory.
        messages: those of a gossip step, for each bucket one that goes out and one that comes in.
        channels: of the buckets.
    """

    def __init__(self, code: Code, sizes: Sequence[int], n: int, rank: int, device: torch.device, pinned: bool):
        self.sizes = sizes
        lengths, shares = [code.nbytes(d) for d in sizes], nbytes_of_shares(code, sizes, n)
        sent = max(room_for(lengths), room_for(shares))
        received = max(room_for(lengths), room_for([shares[rank]] * (n - 1)))
        self.out, self.inbox = (torch.zeros(r, dtype=torch.uint8, device=device, pin_memory=pinned) for r in (sent, received))
        self.messages = list(zip(messages_in(self.out, lengths), messages_in(self.inbox, lengths), strict=True))
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Scratch:
    """Memory that buckets share: each use has as much as the largest bucket needs, in the dtype for sums."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, like: Tensor, use: str) -> Tensor:
        """Return memory for as many numbers as `like` [d] has. It is valid until the next call for the same use."""
        kind = (use, accumulator(like.dtype), like.device)
        if kind not in self._memory or len(self._memory[kind]) < len(like):
            self._memory[kind] = torch.empty(len(like), dtype=kind[1], device=like.device)
        return self._memory[kind][: len(like)]


class CodedChannel(Channel):
    """A bucket's messages as codes.

    Args:
        tensor: the bucket [d].
        code: how its numbers become bytes.
        device: where its messages are.
        tag: that of its messages.
        staging: for codes, if the bucket is on a GPU and its messages are not.
        messages: memory for one that goes out and one that comes in.
    """

    def __init__(
        self,
        tensor: Tensor,
        code: Code,
        device: torch.device,
        tag: int,
        staging: Staging | None,
        messages: tuple[Message, Message] | None = None,
    ):
        super().__init__(code.nbytes(len(tensor)), torch.uint8, device, tag, staging, messages)
        self.own_code, self.tensor, self.code = code.places(self.tensor), tensor, code
        self._size = torch.zeros(())
        self._places: dict[Message, Parts] = {}

    def prepare(self, check: FiniteCheck = sum_of_squares) -> None:
        """Encode the bucket."""
        self._size = self.code.encode(self.tensor, self.own_code)
        super().prepare(lambda _: self._size)

    def write_head(self, alarm: Alarm, node: int, k: int, scalars: Tensor | None, check: FiniteCheck = sum_of_squares) -> None:
        super().write_head(alarm, node, k, scalars, lambda _: self._size)

    def places(self, message: Message, payload: Tensor) -> Parts:
        """Return where the parts of the code are in `payload`, which `received(message)` has returned."""
        if payload is not message.payload:  # a copy on a GPU
            return self.code.places(payload)
        if message not in self._places:
            self._places[message] = self.code.places(payload)
        return self._places[message]
