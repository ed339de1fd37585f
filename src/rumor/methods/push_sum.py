"""Stochastic gradient push (SGP) and its overlapped form (OSGP): gossip over directed graphs (Assran et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.engines import Pending
from rumor.engines.codes import check_width
from rumor.engines.engine import copy_all
from rumor.methods.algorithm import Algorithm, Builder, InFlight, Nodes, State, Step, average, topology_or_builder
from rumor.schedule import Never
from rumor.topology import Topology


@dataclass(frozen=True)
class PushSum(Algorithm):
    """Each node pushes shares of its model x and of a weight w (1 at first) along P, and trains on z = x / w, the model that you see:

        x_i^(k+1/2) = x_i^(k) + (opt(z_i^(k)) - z_i^(k))
        x_i^(k+1)   = p_ii x_i^(k+1/2) + sum_{j != i} p_ij x_j^(k-delay+1/2)
        w_i^(k+1)   likewise
        z_i^(k+1)   = x_i^(k+1) / w_i^(k+1)

    P need only be column stochastic (`from_digraph`). The sum over nodes and messages in flight changes by gradients alone. delay = 0 is
    SGP; with delay = 1 (OSGP) a message has a whole step to arrive.
    """

    topology: Topology
    delay: int = 1
    schedule = Never()

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", topology_or_builder(self.topology))
        if self.delay not in (0, 1):
            raise ValueError(f"delay must be 0 (SGP) or 1 (OSGP), got delay={self.delay!r}")

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        state.buckets["x"] = copy_all(nodes.x)
        state.scalars["w"] = nodes.engine.full(1.0)
        return state

    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        if self.delay == 0:
            state.in_flight = InFlight(pending=[self.push(step, nodes, b, state) for b in range(len(nodes.x))])
        return self.receive(step, nodes, state)

    def receive(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        x, engine = nodes.x, nodes.engine
        arriving, departing = state.in_flight, InFlight()
        w_next = engine.self_weight(self.topology, step.k) * state.scalars["w"]
        for b in range(len(x)):
            arrived = arriving.pending[b].wait() if arriving else None
            if arrived is not None and b == 0:
                w_next = w_next + arrived.scalars
            if self.delay == 1:  # only now: it uses the buffers that the last message arrived in
                departing.pending.append(self.push(step, nodes, b, state))
            numerator = state.buckets["x"][b]
            numerator.mul_(_like(engine.self_weight(self.topology, step.k, numerator.dtype), numerator))
            if arrived is not None:
                numerator.add_(arrived.x)
                x.write(b, torch.div(numerator, _like(w_next, numerator), out=arrived.x))
            yield b
        state.scalars["w"] = w_next
        state.in_flight = departing if self.delay == 1 else None
        state.schedule = self.schedule.next(state.schedule)

    def push(self, step: Step, nodes: Nodes, b: int, state: State) -> Pending:
        """Send x^(k+1/2) = x + (opt(z) - z) with z = x / w, and w with the first bucket."""
        buffer, numerator, w = nodes.x.copy(b), state.buckets["x"][b], state.scalars["w"]
        message = buffer.tensor
        if message.dtype == numerator.dtype:  # opt(z) - z first: in float32 it is exact, while a factor 1 - 1/w would be rounded
            numerator.add_(message.addcdiv_(numerator, _like(w, numerator), value=-1))
        else:
            numerator.mul_(_like(1 - 1 / w, numerator)).add_(message)
        message.copy_(numerator)
        return nodes.engine.gossip(buffer, self.topology, step.k, w if b == 0 else None, own=False)

    def share(self, nodes: Nodes, b: int, state: State) -> Tensor:
        """Return the mass here and on its way here, x + (z now - x / w) + what is in flight: its mean over the nodes is the model's."""
        numerator, w = state.buckets["x"][b], state.scalars["w"]
        mass = nodes.x.peek(b).to(numerator) + numerator * _like(1 - 1 / w, numerator)
        return mass if state.in_flight is None else mass.add_(state.in_flight.pending[b].wait().x)

    def finish(self, nodes: Nodes, state: State) -> None:
        """Add what is in flight to the models, and average. Every weight is 1 again."""
        x, buffers, engine = nodes.x, nodes.buffers, nodes.engine
        for b in range(len(x)):
            x.write(b, self.share(nodes, b, state))
        state.in_flight = None
        average([x, buffers], engine, state.schedule.k)
        state.buckets["x"] = copy_all(x)
        state.scalars["w"] = engine.full(1.0)


def _like(scalar: Tensor, x: Tensor) -> Tensor:
    """Return the scalar with the device and dtype of x. On a GPU, the host need not wait for that."""
    return scalar.to(x, non_blocking=True)


def osgp(topology: Topology | Builder, delay: int = 1, *, bits: int = 32) -> PushSum:
    """Overlapped stochastic gradient push; delay=0 is SGP. `bits` can only be 32, because nodes have no reference in common."""
    check_width(bits)
    if bits < 32:
        raise ValueError(
            f"osgp has no bits={bits}: codes are for differences to a model that all nodes had, and it has no global averages. Use "
            f"gossip_pga(topology, H=..., delay=1, bits={bits})"
        )
    return PushSum(topology_or_builder(topology), delay)
