"""A question to all nodes, whose answers arrive while each goes on: has everybody another batch?"""

from __future__ import annotations

import torch
from torch import Tensor

from rumor.channel import Work, out_of_step
from rumor.process_group import ProcessGroup
from rumor.run import ordinary_tensors

_left: list[tuple[Tensor, list[Work]]] = []  # votes that nobody waits for: gloo breaks the connection if memory that it will fill is freed


class Vote:
    """By a message to each node and one from each, not by a sum, which would meet one of another length where a rank is out of step (gloo
    then ends the process). Messages bear their step, and say so; they know nothing of alarms. Several votes may be under way."""

    def __init__(self, engine: ProcessGroup):
        self._engine, self._tag = engine, next(engine._tags)
        self._doing = ""
        self._works: list[Work] = []
        with ordinary_tensors():
            self._said = torch.zeros(engine.n, 2, dtype=torch.float64, device=engine.device)  # by each node: yes (1) or no (0), its step

    def ask(self, yes: bool, k: int) -> None:
        """Says this node's part, at step k."""
        self._doing = f"asking whether every node has another batch at step {k}"
        with ordinary_tensors():
            self._said[self._engine.rank] = torch.tensor([float(yes), float(k)])
            self._works = self._engine.post_to_all(self._said, self._tag, self._doing)

    def is_unanimous(self) -> bool:
        engine = self._engine
        engine._wait(self._works, self._doing, [node for node in range(engine.n) if node != engine.rank])
        said = self._said.tolist()
        k = said[engine.rank][1]
        for node, (_, step) in enumerate(said):
            if step != k:
                raise out_of_step(node, step, k)
        return all(yes for yes, _ in said)

    def leave(self) -> None:
        """The last answers are not wanted."""
        if self._works:
            _left.append((self._said, self._works))
