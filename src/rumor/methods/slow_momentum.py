"""SlowMo: Gossip-PGA with a slow, outer momentum at its global rounds (Wang et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.engines.engine import copy_all
from rumor.methods.algorithm import Builder, Nodes, State, Step, topology_or_builder
from rumor.methods.gossip_pga import GossipPGA
from rumor.schedule import Periodic
from rumor.topology import Topology


@dataclass(frozen=True, repr=False)
class SlowMo(GossipPGA):
    """At a global round, with x_bar the average, lr the current learning rate and x_prev the result of the last global round:

        u <- momentum u + (x_prev - x_bar) / lr
        x <- x_prev - slow_lr lr u
        x_prev <- x

    The optimizer keeps its own buffers. momentum = 0 and slow_lr = 1 is Gossip-PGA.
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

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        state.buckets["x_prev"] = copy_all(nodes.x)
        state.buckets["u"] = [torch.zeros_like(x_prev) for x_prev in state.buckets["x_prev"]]
        return state

    def decide(self, state: State, loss: Tensor | None = None, lr: float | None = None) -> Step:
        step = super().decide(state, loss, _as_number(lr))
        if step.kind == "global" and not (step.lr is not None and step.lr > 0):
            raise ValueError(
                f"SlowMo divides by the learning rate at a global round: it must be positive, got lr={lr} (read it before "
                "scheduler.step(), and let the schedule end above 0)"
            )
        return step

    def after_global_round(self, step: Step, b: int, mean: Tensor, state: State) -> Tensor:
        lr = step.lr
        assert lr is not None  # decide() has checked it
        u, x_prev = state.buckets["u"][b], state.buckets["x_prev"][b]
        u.mul_(self.momentum).add_(x_prev, alpha=1 / lr).sub_(mean, alpha=1 / lr)
        return x_prev.sub_(u, alpha=self.slow_lr * lr)


def _as_number(lr: object) -> float:
    """Return a learning rate as schedulers and optimizers have it (it may be a tensor) as a float."""
    try:
        number = float(lr)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        call = "step(loss, lr=scheduler.get_last_lr()[0]), before scheduler.step()"
        raise ValueError(f"SlowMo needs the current learning rate: call {call}; got lr={lr!r}")
    return number


def slowmo(topology: Topology | Builder, H: int, momentum: float = 0.5, slow_lr: float = 1.0, *, bits: int = 32) -> SlowMo:
    """Gossip-PGA with slow momentum. It needs the learning rate: call `averager.step(loss, lr=...)`.

    `bits` is as in `gossip_pga`.
    """
    return SlowMo(topology_or_builder(topology), Periodic(H), bits=bits, momentum=momentum, slow_lr=slow_lr)
