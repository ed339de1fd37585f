"""JoinVote: asks all nodes whether they have another batch. The answers arrive while each node trains."""

from __future__ import annotations

import torch

from rumor.engines.processes.message import out_of_step
from rumor.engines.processes.transport import Transport, Work
from rumor.model.tensors import ordinary_tensors


class JoinVote:
    """A vote that is repeated for every batch. Each node sends a message to every other node.

    It is not a sum: if a rank were out of step, the sum would meet one of another length, and gloo would end the process. Each message
    carries its step, so such a rank is named. Votes do not touch alarms. Several votes may be in flight.
    """

    def __init__(self, transport: Transport):
        self._transport, self._tag = transport, transport.new_tag()
        self._doing = ""
        self._works: list[Work] = []
        with ordinary_tensors():
            self._answers = torch.zeros(
                transport.n, 2, dtype=torch.float64, device=transport.device
            )  # of each node: yes (1) or no (0), step

    def ask(self, yes: bool, k: int) -> None:
        """Send this node's answer at step k."""
        self._doing = f"asking whether every node has another batch at step {k}"
        with ordinary_tensors():
            self._answers[self._transport.rank] = torch.tensor([float(yes), float(k)])
            self._works = self._transport.exchange_rows(self._answers, self._tag, self._doing)
        self._transport.track(self._tag, self._works, self._answers)

    def is_unanimous(self) -> bool:
        """Wait for all answers, and return whether all are yes."""
        self._wait()
        answers = self._answers.tolist()
        k = answers[self._transport.rank][1]
        for node, (_, step) in enumerate(answers):
            if step != k:
                raise out_of_step(node, step, k)
        return all(yes for yes, _ in answers)

    def leave(self) -> None:
        """End the vote without waiting for the last answers. Some may never come, if a node has left the loop earlier."""
        self._transport.leave(self._tag, self._have_arrived)

    def _have_arrived(self) -> bool:
        """Return whether all nodes have sent their answer for the last step."""
        steps = self._answers[:, 1]
        return bool((steps == steps[self._transport.rank]).all())

    def _wait(self) -> None:
        transport = self._transport
        transport.wait(self._works, self._doing, [node for node in range(transport.n) if node != transport.rank], self._tag)
