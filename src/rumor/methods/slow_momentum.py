"""SlowMo: Gossip-PGA with a slow, outer momentum at its global averages (Wang et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rumor.methods.algorithm import Builder, State, Step, as_number, topology_or_builder
from rumor.methods.outer_momentum import OuterMomentum
from rumor.schedule import Schedule, schedule_of
from rumor.topology import Topology


@dataclass(frozen=True, repr=False)
class SlowMo(OuterMomentum):
    """At a global average, with x_bar the average, lr the current learning rate and x_prev the result of the last global average:

        u <- momentum u + (x_prev - x_bar) / lr
        x <- x_prev - slow_lr lr u
        x_prev <- x

    The optimizer keeps its own buffers. momentum = 0 and slow_lr = 1 is Gossip-PGA.
    """

    momentum: float = 0.5
    slow_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.momentum < 1 and self.slow_lr > 0):
            raise ValueError(f"slowmo needs 0 <= momentum < 1 and slow_lr > 0, got momentum={self.momentum}, slow_lr={self.slow_lr}")

    @property
    def needs_lr(self) -> bool:
        return True

    def decide(self, state: State, loss: Tensor | None = None, lr: float | None = None) -> Step:
        number = as_number(lr, "SlowMo")
        step = super().decide(state, loss, number)
        if not math.isfinite(number) or (step.kind == "global" and number <= 0):
            raise ValueError(
                f"SlowMo divides by the learning rate at a global average: it must be positive, got lr={lr} (read it before "
                "scheduler.step(), and let the schedule end above 0)"
            )
        return step

    def after_global_round(self, step: Step, b: int, mean: Tensor, state: State) -> Tensor:
        lr = step.lr
        assert lr is not None  # decide() has checked it
        u, x_prev = state.buckets["u"][b], state.buckets["x_prev"][b]
        u.mul_(self.momentum).add_(x_prev, alpha=1 / lr).sub_(mean, alpha=1 / lr)
        return x_prev.sub_(u, alpha=self.slow_lr * lr)


def slowmo(topology: Topology | Builder, H: int | Schedule, momentum: float = 0.5, slow_lr: float = 1.0, *, bits: int = 32) -> SlowMo:
    """Gossip-PGA with slow momentum. It needs the learning rate: call `averager.step(loss, lr=...)`.

    `H` and `bits` are as in `gossip_pga`.
    """
    return SlowMo(topology_or_builder(topology), schedule_of(H), bits=bits, momentum=momentum, slow_lr=slow_lr)
