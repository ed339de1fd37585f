"""Staging: buckets on a GPU whose messages travel from host memory (gloo).

Copies run on streams of their own, and a thread sends what has been copied. So the host need not wait to send, and what has arrived is
copied back while the device still computes. The host still waits for what is to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from rumor.engines.engine import FiniteCheck


class CopyThread:
    """The streams that copies are made on, and a thread that waits for them instead of the host, in the order of the calls."""

    def __init__(self, device: torch.device):
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rumor-copy")

    def after(self, event: torch.cuda.Event, do: Callable[[], None]) -> Future[None]:
        """Call `do` on the thread once the device has reached `event`."""

        def wait_and_do() -> None:
            event.synchronize()
            do()

        return self._thread.submit(wait_and_do)


class Staging:
    """The device's side of one bucket: memory that the model is packed into, and memory that received models are copied to."""

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, thread: CopyThread):
        self.packed = torch.empty(d, dtype=dtype, device=device)
        self.thread = thread
        self.size = torch.zeros(1, dtype=torch.float64, pin_memory=True)  # of what was packed: finite only if all of it is
        # `blocking`: a thread that waits for it sleeps
        self.copied, self.landed, self._free = (torch.cuda.Event(blocking=True) for _ in range(3))  # type: ignore[no-untyped-call]
        self._landing: list[Tensor] = []

    def to_host(self, payload: Tensor, check: FiniteCheck) -> None:
        """Start to copy what is packed into `payload`, pinned memory. Once `copied` is reached, that is done and `_landing` is free."""
        stream, now = self.thread.to_host, torch.cuda.current_stream(self.packed.device)
        self._free.record(now)  # by then, what had landed before has been used
        stream.wait_event(self._free)
        with torch.cuda.stream(stream):
            payload.copy_(self.packed, non_blocking=True)
            self.size.copy_(check(self.packed).reshape(1), non_blocking=True)
            stream.wait_event(self.landed)  # else the next message might arrive over one that is still being copied
            self.copied.record(stream)

    def to_device(self, place: int, payload: Tensor) -> Tensor:
        """Return a copy of what has arrived in pinned memory, for the current stream to use from now on."""
        stream, now = self.thread.to_device, torch.cuda.current_stream(self.packed.device)
        stream.wait_event(self._free)
        with torch.cuda.stream(stream):
            while len(self._landing) <= place:  # allocated here, so that no other stream still uses this memory
                self._landing.append(torch.empty_like(self.packed))
            self._landing[place].copy_(payload, non_blocking=True)
            self.landed.record(stream)
        now.wait_event(self.landed)
        return self._landing[place]
