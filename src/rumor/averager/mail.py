"""Mail: sends the state of a job from one member to others, in pieces."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rumor.engines.processes.transport import Transport

PIECE = 2**26  # bytes of one message


class Mail:
    """Messages of tensors and plain values. Code in them is never run.

    Args:
        transport: connects the members.
        tag: of the messages.
        k: the step, for errors.
        moved: called after each piece.
    """

    def __init__(self, transport: Transport, tag: int, k: int, moved: Callable[[], None]):
        self._transport, self._tag, self._moved = transport, tag, moved
        self._doing = f"handing over the state at step {k}"

    def send(self, state: dict[str, Any], ranks: Sequence[int]) -> None:
        file = io.BytesIO()
        torch.save(state, file)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        for piece in (torch.tensor([len(data)]), *torch.split(data, PIECE)):
            works = self._transport.call(partial(self._transport.send, piece, ranks, self._tag), self._doing)
            self._transport.wait(works, self._doing)
            self._moved()
        self._transport.metrics.bytes_sent += len(data) * len(ranks)

    def receive(self) -> dict[str, Any]:
        """Receive what rank 0 sends."""
        size = torch.zeros(1, dtype=torch.int64)
        self._fill(size)
        data = torch.zeros(int(size), dtype=torch.uint8)
        for piece in torch.split(data, PIECE):
            self._fill(piece)
        state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().data), weights_only=True, map_location="cpu")
        return state

    def _fill(self, tensor: Tensor) -> None:
        work = self._transport.call(partial(self._transport.receive, tensor, 0, self._tag), self._doing)
        self._transport.wait([work], self._doing)
        self._moved()
