"""SlowMo: Gossip-PGA with a slow, outer momentum at its global rounds (Wang et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.algorithm import GossipPGA, State
from rumor.engine import Buckets, Engine, own_copy
from rumor.schedule import Periodic
from rumor.topology import Topology


@dataclass(frozen=True)
class SlowMo(GossipPGA):
    """At a global round, with x_bar the average, lr the current learning rate and x_prev the outcome of the last global round:

        u <- momentum u + (x_prev - x_bar) / lr
        x <- x_prev - slow_lr lr u
        x_prev <- x

    The optimizer's own buffers are kept. momentum = 0 and slow_lr = 1 is Gossip-PGA.
    """

    momentum: float = 0.5
    slow_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay:
            raise ValueError("slowmo takes no delay: its slow step needs the average of the models as they are")
        if not (0 <= self.momentum < 1 and self.slow_lr > 0):
            raise ValueError(f"slowmo needs 0 <= momentum < 1 and slow_lr > 0, got momentum={self.momentum}, slow_lr={self.slow_lr}")

    @property
    def needs_lr(self) -> bool:
        return True

    def start(self, x: Buckets, engine: Engine) -> State:
        state = super().start(x, engine)
        state.buckets["x_prev"] = own_copy(x)
        state.buckets["u"] = [torch.zeros_like(x_prev) for x_prev in state.buckets["x_prev"]]
        return state

    def begin(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> Iterator[int]:
        if self.round(state) == "global" and not (lr is not None and lr > 0):
            raise ValueError(
                f"SlowMo divides by the learning rate at a global round: it must be positive, got lr={lr} (read it before "
                "scheduler.step(), and let the schedule end above 0)"
            )
        return super().begin(x, buffers, state, engine, loss, lr)

    def write_mean(self, x: Buckets, b: int, mean: Tensor, state: State, lr: float | None) -> None:
        assert lr is not None  # step() has seen to it
        u, x_prev = state.buckets["u"][b], state.buckets["x_prev"][b]
        u.mul_(self.momentum).add_(x_prev, alpha=1 / lr).sub_(mean, alpha=1 / lr)
        x_prev.sub_(u, alpha=self.slow_lr * lr)
        x.write(b, x_prev)


def slowmo(topology: Topology, H: int, momentum: float = 0.5, slow_lr: float = 1.0) -> SlowMo:
    """Gossip-PGA with slow momentum; `averager.step(loss, lr=...)` must then be told the learning rate."""
    return SlowMo(topology, Periodic(H), momentum=momentum, slow_lr=slow_lr)
