"""JobState: all that a newcomer takes over from a member."""

from __future__ import annotations

from typing import Any

import torch

from rumor.averager.replica import Replica
from rumor.averager.sampler import MemberSampler


class JobState:
    """The model, its buffers, the optimizer's state, the method's state with the step count, and the places in the data.

    Args:
        replica: the model.
        optimizer: whose state is part of it, if any.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer | None):
        self._replica, self._optimizer = replica, optimizer
        self._samplers: list[MemberSampler] = []
        self._positions: list[int] = []  # of the samplers of the member whose state this node has taken over

    def of_method(self) -> dict[str, Any]:
        return self._replica.runner.shared_state()

    def of_job(self) -> dict[str, Any]:
        model = self._replica.model
        return {
            "model": [t.detach() for t in (*model.parameters(), *model.buffers())],
            "method": self.of_method(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "positions": [sampler.position for sampler in self._samplers],
        }

    def take_over_method(self, state: dict[str, Any]) -> None:
        self._replica.runner.take_over(state, is_own=False)

    def take_over(self, state: dict[str, Any]) -> None:
        replica = self._replica
        with torch.no_grad():
            for t, value in zip((*replica.model.parameters(), *replica.model.buffers()), state["model"], strict=True):
                t.copy_(value)
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        replica.check_tensors()
        self.take_over_method(state["method"])
        self._positions = state["positions"]
        for sampler, position in zip(self._samplers, self._positions, strict=False):
            sampler.position = position

    def add_sampler(self, sampler: MemberSampler) -> None:
        """Let newcomers go on with this sampler where the members are."""
        if len(self._samplers) < len(self._positions):
            sampler.position = self._positions[len(self._samplers)]
        self._samplers.append(sampler)
