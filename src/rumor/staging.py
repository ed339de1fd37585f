"""Buckets on a GPU whose messages travel from host memory (gloo): copied on streams of their own, sent by a thread of their own.

So the host need not wait to send: it hands the message to the thread, which sends it when the device has got as far as copying it, and
what has arrived is copied back while the device still computes. It still waits for what is to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Courier:
    """The streams that copies are made on, and the thread that waits for them in the host's place, in the order in which it was asked."""

    def __init__(self, device: torch.device):
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rumor-courier")

    def once(self, event: torch.cuda.Event, do: Callable[[], None]) -> Future[None]:
        def wait_and_do() -> None:
            event.synchronize()
            do()

        return self._thread.submit(wait_and_do)


class Staging:
    """The device's side of one bucket: what it sends is packed here, and what arrives lands here."""

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, courier: Courier):
        self.packed = torch.empty(d, dtype=dtype, device=device)
        self.courier = courier
        self.size = torch.zeros(1, dtype=torch.float64, pin_memory=True)  # of what was packed: finite only if all of it is
        # `blocking`: whoever waits for it sleeps
        self.copied, self.landed, self._free = (torch.cuda.Event(blocking=True) for _ in range(3))  # type: ignore[no-untyped-call]
        self._landing: list[Tensor] = []

    def to_host(self, payload: Tensor, judge: Callable[[Tensor], Tensor]) -> None:
        """Starts to copy what is packed into `payload`, pinned memory. `copied` tells when that is done, and what landed is free again."""
        down, now = self.courier.down, torch.cuda.current_stream(self.packed.device)
        self._free.record(now)  # what had landed before has been used by then
        down.wait_event(self._free)
        with torch.cuda.stream(down):
            payload.copy_(self.packed, non_blocking=True)
            self.size.copy_(judge(self.packed).reshape(1), non_blocking=True)
            down.wait_event(self.landed)  # or the next message might arrive over one that is still being copied
            self.copied.record(down)

    def to_device(self, place: int, payload: Tensor) -> Tensor:
        """A copy of what has arrived in pinned memory, for the current stream to use from now on."""
        up, now = self.courier.up, torch.cuda.current_stream(self.packed.device)
        up.wait_event(self._free)
        with torch.cuda.stream(up):
            while len(self._landing) <= place:  # of memory that no other stream still uses
                self._landing.append(torch.empty_like(self.packed))
            self._landing[place].copy_(payload, non_blocking=True)
            self.landed.record(up)
        now.wait_event(self.landed)
        return self._landing[place]
