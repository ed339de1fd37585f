"""Stochastic gradient push (SGP) and its overlapped form (OSGP): gossip over directed graphs (Assran et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.algorithm import AtOnce, Flight, Round, State, average, check_topology
from rumor.engine import Buckets, Engine, Pending, own_copy
from rumor.schedule import Never
from rumor.topology import Topology


@dataclass(frozen=True)
class PushSum(AtOnce):
    """Each node pushes shares of its model x and of a weight w (1 at first) along P, and trains on z = x / w, the model that you see:

        x_i^(k+1/2) = x_i^(k) + (opt(z_i^(k)) - z_i^(k))
        x_i^(k+1)   = p_ii x_i^(k+1/2) + sum over j != i of p_ij x_j^(k-delay+1/2)          and w likewise
        z_i^(k+1)   = x_i^(k+1) / w_i^(k+1)

    P need only be column stochastic (`from_digraph`). The sum over nodes and messages in flight moves by gradients alone. delay = 0 is
    SGP; with delay = 1 (OSGP) a message has a whole step to arrive.
    """

    topology: Topology
    delay: int = 1
    schedule = Never()
    needs_loss = False
    needs_lr = False

    def __post_init__(self) -> None:
        check_topology(self.topology)
        if self.delay not in (0, 1):
            raise ValueError(f"delay must be 0 (SGP) or 1 (OSGP), got delay={self.delay!r}")

    def start(self, x: Buckets, engine: Engine) -> State:
        state = State(self.schedule.start())
        state.buckets["x"] = own_copy(x)
        state.scalars["w"] = engine.full(1.0)
        return state

    def round(self, state: State) -> Round:
        return "gossip" if self.topology.has_links else "none"

    def begin(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> Iterator[int]:
        if self.delay == 0:
            state.flight = Flight(pending=[self.push(x, b, state, engine) for b in range(len(x))])
        return self.mix(x, state, engine)

    def mix(self, x: Buckets, state: State, engine: Engine) -> Iterator[int]:
        k, w, arriving = state.schedule.k, state.scalars["w"], state.flight
        w_next = engine.self_weight(self.topology, k) * w
        departing = Flight()
        for b in range(len(x)):
            arrived = arriving.pending[b].wait() if arriving else None
            if arrived is not None and b == 0:
                w_next = w_next + arrived.scalars
            if self.delay == 1:  # only now: it uses the buffers that the last message arrived in
                departing.pending.append(self.push(x, b, state, engine))
            numerator = state.buckets["x"][b]
            numerator.mul_(_like(engine.self_weight(self.topology, k, numerator.dtype), numerator))
            if arrived is not None:
                numerator.add_(arrived.x)
                x.write(b, torch.div(numerator, _like(w_next, numerator), out=arrived.x))
            yield b
        state.scalars["w"] = w_next
        state.flight = departing if self.delay == 1 else None
        state.schedule = self.schedule.next(state.schedule)

    def push(self, x: Buckets, b: int, state: State, engine: Engine) -> Pending:
        """x^(k+1/2) = x + (opt(z) - z) with z = x / w, and off it goes, with w beside the first bucket."""
        message, numerator, w = x.read(b), state.buckets["x"][b], state.scalars["w"]
        if message.dtype == numerator.dtype:  # opt(z) - z first: in float32 it is exact, where a factor 1 - 1/w would be rounded
            numerator.add_(message.addcdiv_(numerator, _like(w, numerator), value=-1))
        else:
            numerator.mul_(_like(1 - 1 / w, numerator)).add_(message)
        return engine.gossip(message.copy_(numerator), self.topology, state.schedule.k, w if b == 0 else None, own=False)

    def share(self, x: Buckets, b: int, state: State) -> Tensor:
        """The mass here and on its way here, x + (z now - x / w) + what is in flight: its mean over the nodes is the model's."""
        numerator, w = state.buckets["x"][b], state.scalars["w"]
        mass = x.peek(b).to(numerator) + numerator * _like(1 - 1 / w, numerator)
        return mass if state.flight is None else mass.add_(state.flight.pending[b].wait().x)

    def finish(self, x: Buckets, buffers: Buckets, state: State, engine: Engine) -> None:
        """Takes in what is in flight and averages; every weight is 1 again."""
        for b in range(len(x)):
            x.write(b, self.share(x, b, state))
        state.flight = None
        average(x, engine, state.schedule.k)
        average(buffers, engine, state.schedule.k)
        for b in range(len(x)):
            state.buckets["x"][b].copy_(x.read(b))
        state.scalars["w"] = engine.full(1.0)


def _like(scalar: Tensor, x: Tensor) -> Tensor:
    """Where x is and of its dtype; on a GPU the host need not wait for that."""
    return scalar.to(x, non_blocking=True)


def osgp(topology: Topology, delay: int = 1) -> PushSum:
    """Overlapped stochastic gradient push; delay=0 is SGP."""
    return PushSum(topology, delay)
