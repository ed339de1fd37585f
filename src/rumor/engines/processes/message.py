"""Message: how a message lies in memory: a head of a few numbers, then a bucket.

`FlatBuckets.read` (model/buckets.py) packs the bucket, `Channel.write_head` fills in the head of a message to a neighbour, and
`Message.write_sum_head` that of a sum over all nodes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

# A head is [size, alarm, scalars ..., news, step]: `size` is finite only if the payload is, alarm.py explains the second number, and
# `Transport.has_news` the last but one. On GPUs the step is left out, because the host would have to wait for the device to compare it.
HEAD = 8  # numbers; 64 bytes of float64 keep the payload aligned
MOST_SCALARS = HEAD - 4
EXACT_IN_FLOAT32 = 2**24  # whole numbers up to here


class Message:
    """One block of memory: head, then payload. The head is float64 whatever the dtype of the bucket is, except for a sum's.

    `memory`, if given, is where it lies.
    """

    def __init__(
        self,
        d: int,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
        head: torch.dtype = torch.float64,
        memory: Tensor | None = None,
    ):
        in_front = HEAD * head.itemsize // dtype.itemsize
        self.whole = torch.zeros(in_front + d, dtype=dtype, device=device, pin_memory=pinned) if memory is None else memory
        self.head = self.whole[:in_front].view(head)
        self.payload = self.whole[in_front:]
        # the same memory, which the host can read and write without the cost of a tensor operation
        self.on_host = self.head.numpy() if device.type == "cpu" else None

    def scalars(self, count: int) -> Tensor:
        """Return the place of `count` scalars in the head."""
        if count > MOST_SCALARS:
            raise ValueError(f"a message carries at most {MOST_SCALARS} scalars, got {count}: put more of them into a bucket")
        return self.head[2 : 2 + count]

    def tell_news(self, news: bool) -> None:
        if self.on_host is not None:  # on GPUs nobody has news: members that come and go talk through host memory
            self.on_host[-2] = news

    def tells_news(self) -> bool:
        return self.on_host is not None and bool(self.on_host[-2])

    def write_sum_head(self, alarmed: Tensor, doing: str, n: int, news: bool = False) -> None:
        """Fill in the head of a sum over n nodes: [label, alarmed, scalars ..., news, label squared]; the label stands for what is done."""
        # a label so small that squares and sums over n nodes are exact in float32
        label = zlib.crc32(doing.encode()) % min(251, 1 + math.isqrt((EXACT_IN_FLOAT32 - 1) // n))
        self.head.zero_()
        self.head[:1].fill_(label)
        self.head[1:2].copy_(alarmed)
        if news:
            self.head[-2:-1].fill_(1.0)
        self.head[-1:].fill_(label**2)


def room_for(lengths: Sequence[int]) -> int:
    """Return the bytes of memory that messages of so many bytes need, side by side."""
    return sum(_aligned(length) for length in lengths)


def messages_in(memory: Tensor, lengths: Sequence[int]) -> list[Message]:
    """Return messages of so many bytes, side by side in `memory`."""
    starts = [0, *accumulate(map(_aligned, lengths))]
    places = [memory[start : start + HEAD * 8 + length] for start, length in zip(starts, lengths, strict=False)]
    return [Message(length, memory.dtype, memory.device, memory=place) for place, length in zip(places, lengths, strict=True)]


def _aligned(length: int) -> int:
    """Return the bytes of a message with a payload of so many bytes, and of the gap to the next message."""
    return -(-length // 64) * 64 + HEAD * 8


def labels_agree(head: list[float], n: int) -> bool:
    """Return whether all n nodes had the same label, from the head of their sum.

    Labels are all the same if and only if their variance is 0, so n times the sum of squares is the square of the sum. Both are whole
    numbers, exactly.
    """
    return abs(n * head[-1] - head[0] ** 2) < 0.5


def out_of_step(node: int, there: float, here: float) -> RuntimeError:
    return RuntimeError(
        f"nodes are out of step: node {node} sent its message of step {there:.0f}, but this node is at step {here:.0f}. Every rank must "
        "call step() equally often, also one with fewer batches, and go on from a checkpoint of the same step"
    )
