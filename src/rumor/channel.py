"""Messages: a bucket with a head of a few numbers in front, and the alarm that heads carry from node to node.

The alarm. A model that is not finite must not spread: receivers put their own model in the place of a bucket whose head says that it is
not finite, and note which node sent it and when, as a number k n + node that is the smaller the earlier. Heads carry it on. By the next
global round, or when word of it has had time to reach everyone, every rank raises. All of it costs a gossip step no further collective,
and on a GPU no synchronisation: there the head is read by the device, and the host looks at what the device noted a little earlier.
"""

from __future__ import annotations

import math
import threading
import zlib
from typing import Protocol

import torch
from torch import Tensor

from rumor.engine import Judge, accumulator, size
from rumor.staging import Staging

HEAD = 8  # numbers in front of a bucket: [sum of squares, alarm, scalars ..., step]; 64 bytes of float64 keep what follows aligned


class Work(Protocol):
    """A message or a sum that was posted."""

    def wait(self) -> object: ...


class Message:
    """One stretch of memory: head, then payload. Between two nodes the head is float64 whatever the bucket is, since bytes just travel."""

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, pinned: bool = False, head: torch.dtype = torch.float64):
        in_front = HEAD * head.itemsize // dtype.itemsize
        self.whole = torch.zeros(in_front + d, dtype=dtype, device=device, pin_memory=pinned)
        self.head = self.whole[:in_front].view(head)
        self.payload = self.whole[in_front:]
        # the same memory, for the host to read and write without the cost of a tensor operation
        self.on_host = self.head.numpy() if device.type == "cpu" else None

    def scalars(self, count: int) -> Tensor:
        return self.head[2 : 2 + count]

    def write_shared_head(self, alarmed: Tensor, doing: str) -> None:
        """The head of a sum over all nodes: [label, alarmed, scalars ..., label squared], the label being one of what is done."""
        label = zlib.crc32(doing.encode()) % 251  # squares and sums of as many as 256 of them are exact in float32
        self.head.zero_()
        self.head[:1].fill_(label)
        self.head[1:2].copy_(alarmed)
        self.head[-1:].fill_(label**2)

    @staticmethod
    def all_did_the_same(head: list[float], n: int) -> bool:
        """Of a sum over n nodes: their labels do not vary if and only if the mean of the squares is the square of the mean."""
        return abs(n * head[-1] - head[0] ** 2) <= 1e-6 * head[0] ** 2


class Channel:
    """The buffers of one bucket: what goes out, what each neighbour sends, and what all of them sum up.

    `own` is what a node has to send, as the algorithm packs and mixes it: `out`'s payload, or its twin on a GPU where there is `staging`.
    """

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, tag: int, staging: Staging | None = None):
        self.tag, self.staging = tag, staging
        self._shape = (d, dtype, device, staging is not None)
        self.out = Message(*self._shape)
        self.own = self.out.payload if staging is None else staging.packed
        self._inbox: list[Message] = []
        self.expected: dict[int, tuple[Message, Work]] = {}  # receives that were posted ahead of their step, by sender
        self._total: Message | None = None

    def inbox(self, count: int) -> list[Message]:
        """Room for so many messages, apart from what is expected."""
        taken = [message for message, _ in self.expected.values()]
        free = [message for message in self._inbox if message not in taken]
        while len(free) < count:
            free.append(Message(*self._shape))
            self._inbox.append(free[-1])
        return free[:count]

    def total(self, length: int) -> Message:
        """Room for a sum over all nodes, of this bucket and those that go with it, whose head is summed too: it has the payload's dtype."""
        if self._total is None or len(self._total.payload) != length:
            _, dtype, device, pinned = self._shape
            self._total = Message(length, accumulator(dtype), device, pinned, head=accumulator(dtype))
        return self._total

    def come_to_host(self, judge: Judge = size) -> None:
        """Where the bucket is on a GPU and `out` is not: starts to copy it."""
        if self.staging is not None:
            self.staging.to_host(self.out.payload, judge)

    def wait_for_host(self) -> None:
        if self.staging is not None:
            self.staging.copied.synchronize()

    def write_head(self, alarm: Alarm, node: int, k: int, scalars: Tensor | None, judge: Judge = size) -> None:
        """Makes `out` ready to go."""
        alarm.write(self.out, judge(self.out.payload) if self.staging is None else self.staging.size, node, k)
        if scalars is not None:
            self.out.scalars(scalars.numel()).copy_(scalars)

    def mixable(self, place: int, message: Message) -> Tensor:
        """The payload of one of the messages that have arrived, where `own` is."""
        return message.payload if self.staging is None else self.staging.to_device(place, message.payload)


def out_of_step(node: int, there: float, here: float) -> RuntimeError:
    return RuntimeError(
        f"nodes are out of step: node {node} sent its message of step {there:.0f} where this node is at step {here:.0f}. Every rank must "
        "call step() equally often, also one with fewer batches, and go on from a checkpoint of the same step"
    )


class Alarm:
    """The earliest k n + node of a model that was not finite, as far as this node knows; infinity if there was none."""

    def __init__(self, n: int):
        self.n = n
        self._lock = threading.Lock()  # a courier hears, too
        self.earliest = math.inf
        self.settled = math.inf  # one that a global round has told all nodes of

    def write(self, message: Message, size: Tensor, node: int, k: int) -> None:
        """Fills in the head of this node's own message."""
        head = message.on_host
        assert head is not None
        head[:2] = size.item(), math.inf
        head[-1] = k
        self.hear(message, node, k)
        head[1] = self.earliest

    def hear(self, message: Message, node: int, k: int) -> bool | Tensor:
        """Is this bucket finite? Notes the earliest alarm that it or its head tells of."""
        head = message.on_host
        assert head is not None
        if head[-1] != k:
            raise out_of_step(node, float(head[-1]), k)
        finite = math.isfinite(head[0])
        with self._lock:
            self.earliest = min(self.earliest, float(head[1]), math.inf if finite else k * self.n + node)
        return finite

    def is_known(self) -> Tensor:
        """1 where there is an alarm, else 0."""
        return torch.tensor([float(self.earliest < math.inf)])

    def look(self) -> float:
        """The alarm as the host knows it, without a wait."""
        return self.earliest

    def settle(self) -> Tensor:
        """The alarm as it stands, [1] in float64, for all nodes to compare."""
        return torch.tensor([self.earliest], dtype=torch.float64)

    def error(self, alarm: float) -> FloatingPointError:
        k, node = divmod(int(alarm), self.n)
        return FloatingPointError(
            f"the model of node {node} was not finite (NaN or Inf) when it was sent at step {k}; it was kept from spreading, and all ranks "
            "stop here: go back to the last checkpoint, with a lower learning rate or clipped gradients"
        )

    # ---- inside a node of several ranks, each of which hears of its own part of the model alone

    def is_settled(self, alarm: Tensor) -> None:
        """All nodes know of `alarm` [1], at least those of their ranks that exchange the same part as this one."""
        self.earliest = self.settled = float(alarm)

    def tell(self, head: Tensor) -> None:
        """Writes down what this rank knows, in `head` [2], for the other ranks of its node ..."""
        head.copy_(torch.tensor([self.earliest, self.settled], dtype=torch.float64))

    def merge(self, heads: Tensor) -> None:
        """... and learns what all of them know, itself among them, from `heads` [L, 2]."""
        earliest, self.settled = heads.amin(dim=0).tolist()
        with self._lock:
            self.earliest = min(self.earliest, earliest)

    def wait_for_settled(self) -> float:
        return self.settled


class DeviceAlarm(Alarm):
    """The same on a GPU: noted by the device, and copied to the host behind its back."""

    def __init__(self, n: int, device: torch.device):
        super().__init__(n)
        self._both = torch.full((2,), math.inf, dtype=torch.float64, device=device)  # earliest, settled
        self._noted = self._both[:1]
        self._copy = torch.full((2,), math.inf, dtype=torch.float64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def write(self, message: Message, size: Tensor, node: int, k: int) -> None:
        # fill_ and copy_: to assign a number to an element would wait for the device
        message.head[:1].copy_(size)
        message.head[1:2].fill_(math.inf)
        self.hear(message, node, k)
        message.head[1:2].copy_(self._noted)

    def hear(self, message: Message, node: int, k: int) -> bool | Tensor:
        finite = message.head[:1].isfinite()
        heard = message.head[1:2]
        torch.minimum(self._noted, torch.where(finite, heard, heard.clamp(max=k * self.n + node)), out=self._noted)
        return finite

    def is_known(self) -> Tensor:
        return (self._noted < math.inf).double()

    def look(self) -> float:
        if self._copied.query():  # type: ignore[no-untyped-call]
            self.earliest, self.settled = self._copy.tolist()
            self._copy.copy_(self._both, non_blocking=True)
            self._copied.record()
        return self.earliest

    def settle(self) -> Tensor:
        return self._noted.clone()

    def is_settled(self, alarm: Tensor) -> None:
        self._both.copy_(alarm.expand(2))

    def tell(self, head: Tensor) -> None:
        head.copy_(self._both)

    def merge(self, heads: Tensor) -> None:
        torch.amin(heads, dim=0, out=self._both)

    def wait_for_settled(self) -> float:
        return float(self._both[1])
