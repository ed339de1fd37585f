"""DiLoCo: Local SGD whose global averages are steps of Nesterov's momentum (Douillard et al., 2023, arXiv 2311.08105)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rumor.methods.algorithm import Builder, State, Step, topology_or_builder
from rumor.methods.outer_momentum import OuterMomentum
from rumor.schedule import Schedule, schedule_of
from rumor.topology import Topology, isolated


@dataclass(frozen=True, repr=False)
class DiLoCo(OuterMomentum):
    """At a global average, with x_bar the average and x_prev the result of the last global average:

        d <- x_prev - x_bar
        u <- outer_momentum u + d
        x <- x_prev - outer_lr (d + outer_momentum u)
        x_prev <- x

    This is a step of `torch.optim.SGD(lr=outer_lr, momentum=outer_momentum, nesterov=True)` from x_prev, with d as the gradient. The
    inner optimizer keeps its own buffers. outer_momentum = 0 and outer_lr = 1 is Gossip-PGA, without links Local SGD.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.outer_momentum < 1 and 0 < self.outer_lr < math.inf):
            got = f"outer_momentum={self.outer_momentum}, outer_lr={self.outer_lr}"
            raise ValueError(f"diloco needs 0 <= outer_momentum < 1 and outer_lr > 0, got {got}")

    def after_global_round(self, step: Step, b: int, mean: Tensor, state: State) -> Tensor:
        u, x_prev = state.buckets["u"][b], state.buckets["x_prev"][b]
        u.mul_(self.outer_momentum).add_(x_prev).sub_(mean)
        return x_prev.lerp_(mean.to(x_prev.dtype), self.outer_lr).sub_(
            u, alpha=self.outer_lr * self.outer_momentum
        )  # lerp: x_prev - outer_lr d


def diloco(
    n: int | None = None,
    H: int | Schedule | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    *,
    topology: Topology | Builder | None = None,
    bits: int = 32,
) -> DiLoCo:
    """Local SGD with an outer step of Nesterov's momentum at each global average. It needs no learning rate.

    Args:
        n: the number of nodes; if None, that of the Averager or the Simulator.
        H: the period, in steps, or a schedule. It is required: `diloco(H=100)` or `diloco(n, 100)`.
        outer_lr: learning rate of the outer step.
        outer_momentum: its momentum.
        topology: a graph, or a builder, to gossip over between outer steps; if None, nodes do not gossip.
        bits: as in `gossip_pga`.

    >>> import rumor
    >>> method = rumor.diloco(8, H=100)
    >>> method.schedule, method.outer_lr, method.outer_momentum
    (Periodic(H=100), 0.7, 0.9)
    """
    if H is None:
        raise ValueError("diloco needs the period H, in steps: diloco(H=100), or diloco(n, H) for n nodes")
    links = topology_or_builder(isolated if topology is None else topology)
    method = DiLoCo(links, schedule_of(H), bits=bits, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return method if n is None else method.bind(n)
