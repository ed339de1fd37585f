"""What SlowMo and DiLoCo share: an outer optimizer with momentum that steps at global averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rumor.engines.engine import copy_all
from rumor.methods.algorithm import Nodes, State
from rumor.methods.gossip_pga import GossipPGA


@dataclass(frozen=True, repr=False)
class OuterMomentum(GossipPGA):
    """Gossip-PGA whose nodes go on from an outer step instead of the average. A subclass takes it in `after_global_round`.

    It keeps x_prev, the model that all nodes had after the last global average, and u, the momentum.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__.lower()
        if self.delay:
            raise ValueError(f"{name} takes no delay: its outer step needs the average of the models as they are")
        if self.average_rounds is not None:
            raise ValueError(f"{name} takes no average_rounds: its outer step needs an average that is the same on all nodes")

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        state.buckets["x_prev"] = copy_all(nodes.x)
        state.buckets["u"] = [torch.zeros_like(x_prev) for x_prev in state.buckets["x_prev"]]
        return state
