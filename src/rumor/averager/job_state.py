"""JobState: all that a newcomer takes over from a member."""

from __future__ import annotations

from typing import Any

import torch

from rumor.averager.mail import Mail
from rumor.averager.replica import Replica
from rumor.membership.offer import Offer


class JobState:
    """The model, its buffers, the optimizer's state, the method's state with the step count, and the places in the data.

    Args:
        replica: the model.
        optimizer: whose state is part of it, if any.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer | None):
        self._replica, self._optimizer = replica, optimizer

    def of_method(self) -> dict[str, Any]:
        return self._replica.runner.shared_state()

    def of_job(self) -> dict[str, Any]:
        model = self._replica.model
        return {
            "model": [t.detach() for t in (*model.parameters(), *model.buffers())],
            "method": self.of_method(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "positions": self._replica.samplers.positions,
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
        replica.samplers.restore(state["positions"])

    def hand_over(self, offer: Offer, rank: int, mail: Mail) -> bool:
        """Rank 0 sends the job's state to those that have none, and the method's state to those that have missed its last average.

        Returns whether this rank has taken over the job's state.
        """
        everyone = range(len(offer.members))
        new = [one for one in everyone if one >= offer.holders]
        stale = [one for one in everyone if one < offer.holders and offer.members[one].average < offer.members[0].average]
        if rank == 0:
            for ranks, state in ((stale, self.of_method), (new, self.of_job)):
                if ranks:
                    mail.send(state(), ranks)
        elif rank in stale:
            self.take_over_method(mail.receive())
        elif rank in new:
            self.take_over(mail.receive())
        return rank in new
