"""Alarm: how a model that is not finite is kept from spreading, and how all nodes get to know of it.

A receiver ignores a bucket whose head says that it is not finite, and mixes its own model in its place. It notes which node sent
the bucket and when, encoded as k * n + node, so that the minimum is the earliest. The heads of later messages carry this number on.
By the next global round, or when the news has had time to reach every node, every rank raises. A gossip step needs no other
collective for this. On a GPU it needs no synchronization either: the device reads the heads, and the host looks at what the
device noted a little earlier.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from rumor.engines.processes.message import Message, out_of_step


class Alarm:
    """The earliest alarm (k * n + node) that this node knows of; infinity if there is none.

    Attributes:
        names: of the nodes, for errors, if they have any.
    """

    names: Sequence[str] = ()

    def __init__(self, n: int):
        self.n = n
        self._lock = threading.Lock()  # the copy thread reads heads, too
        self.earliest = math.inf
        self.settled = math.inf  # an alarm that a global round has told all nodes of

    def write(self, message: Message, size: Tensor, node: int, k: int) -> None:
        """Fill in the head of this node's own message."""
        head = message.on_host
        assert head is not None
        head[:2] = size.item(), math.inf
        head[-1] = k
        self.hear(message, node, k)
        head[1] = self.earliest

    def hear(self, message: Message, node: int, k: int) -> bool | Tensor:
        """Return whether this bucket is finite. Notes the earliest alarm that it, or its head, tells of."""
        head = message.on_host
        assert head is not None
        if head[-1] != k:
            raise out_of_step(node, float(head[-1]), k)
        finite = math.isfinite(head[0])
        with self._lock:
            self.earliest = min(self.earliest, float(head[1]), math.inf if finite else k * self.n + node)
        return finite

    def is_known(self) -> Tensor:
        """Return 1 if there is an alarm, else 0."""
        return torch.tensor([float(self.earliest < math.inf)])

    def look(self) -> float:
        """Return the alarm as the host knows it, without a wait."""
        return self.earliest

    def as_tensor(self) -> Tensor:
        """Return the alarm, [1] in float64, for all nodes to compare."""
        return torch.tensor([self.earliest], dtype=torch.float64)

    def error(self, alarm: float) -> FloatingPointError:
        k, node = divmod(int(alarm), self.n)
        name = self.names[node] if self.names else node
        return FloatingPointError(
            f"the model of node {name} was not finite (NaN or Inf) when it was sent at step {k}; it did not spread, and all ranks "
            "stop here: go back to the last checkpoint, with a lower learning rate or clipped gradients"
        )

    # ---- in a node of several ranks: each receives a part of the model, so only one of them may notice

    def settle(self, alarm: Tensor) -> None:
        """Note that all nodes know of `alarm` [1], or at least those of their ranks that exchange the same part as this one."""
        self.earliest = self.settled = float(alarm)

    def tell(self, head: Tensor) -> None:
        """Write what this rank knows into `head` [2], for the other ranks of its node."""
        head.copy_(torch.tensor([self.earliest, self.settled], dtype=torch.float64))

    def merge(self, heads: Tensor) -> None:
        """Learn what the ranks of this node know, from their `heads` [L, 2]."""
        earliest, self.settled = heads.amin(dim=0).tolist()
        with self._lock:
            self.earliest = min(self.earliest, earliest)

    def wait_for_settled(self) -> float:
        return self.settled


class DeviceAlarm(Alarm):
    """The alarm on a GPU: the device notes it, and the host reads a copy that is made in the background."""

    def __init__(self, n: int, device: torch.device):
        super().__init__(n)
        self._both = torch.full((2,), math.inf, dtype=torch.float64, device=device)  # earliest, settled
        self._noted = self._both[:1]
        self._copy = torch.full((2,), math.inf, dtype=torch.float64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def write(self, message: Message, size: Tensor, node: int, k: int) -> None:
        # fill_ and copy_, because assigning a number to an element would wait for the device
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

    def as_tensor(self) -> Tensor:
        return self._noted.clone()

    def settle(self, alarm: Tensor) -> None:
        self._both.copy_(alarm.expand(2))

    def tell(self, head: Tensor) -> None:
        head.copy_(self._both)

    def merge(self, heads: Tensor) -> None:
        torch.amin(heads, dim=0, out=self._both)

    def wait_for_settled(self) -> float:
        return float(self._both[1])
