"""Three methods for uneven data, written on the public extension points. docs/extending.md explains them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rumor.engines import Pending
from rumor.methods import GossipPGA, Nodes, State, Step


@dataclass(frozen=True, repr=False)
class FollowsLr(GossipPGA):
    """Gossip-PGA that remembers the model after each step.

    It needs the learning rate to tell what the optimizer's step was.
    """

    @property
    def needs_lr(self) -> bool:
        return True

    def decide(
        self,
        state: State,
        loss: Tensor | None = None,
        lr: float | None = None,
    ) -> Step:
        if lr is None or not lr > 0:
            why = f"{type(self).__name__} divides by the learning rate"
            fix = "call step(loss, lr=...) with lr > 0"
            raise ValueError(f"{why}: {fix}, got lr={lr!r}")
        return super().decide(state, loss, lr)

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        self.add_buckets(state, nodes, "last")
        for b, last in enumerate(state.buckets["last"]):
            last.copy_(nodes.x.peek(b))
        return state

    def add_buckets(self, state: State, nodes: Nodes, *names: str) -> None:
        """Add zeros like the model to the state."""
        model = [nodes.x.peek(b) for b in range(len(nodes.x))]
        for name in names:
            state.buckets[name] = [torch.zeros_like(x) for x in model]


@dataclass(frozen=True, repr=False)
class QuasiGlobalMomentum(FollowsLr):
    """Momentum of what all nodes did together.

    It is the momentum of how a node's model changes over a whole step,
    mixing included. x_i^(k+1/2) is Nesterov's step:

        x_i^(k+1/2) = x_i^(k) - lr (g_i + momentum (momentum m_i + g_i))
        m_i <- momentum m_i + (1 - momentum) (x_i^(k) - x_i^(k+1)) / lr

    Use it with SGD without momentum, whose step is -lr g_i. It sends
    nothing more than Gossip-PGA.
    Lin et al., "Quasi-Global Momentum" (ICML 2021), QG-DSGDm-N.
    """

    momentum: float = 0.9

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        self.add_buckets(state, nodes, "m")
        return state

    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        for b, m in enumerate(state.buckets["m"]):
            change = nodes.x.peek(b) - state.buckets["last"][b]
            along = step.lr * self.momentum**2 * m
            nodes.x.add(b, self.momentum * change - along)
        received = super().begin(step, nodes, state)
        return self.remember(received, step, nodes, state)

    def remember(
        self,
        received: Iterator[int],
        step: Step,
        nodes: Nodes,
        state: State,
    ) -> Iterator[int]:
        yield from received
        for b, m in enumerate(state.buckets["m"]):
            x, last = nodes.x.peek(b), state.buckets["last"][b]
            m.lerp_((last - x) / step.lr, 1 - self.momentum)
            last.copy_(x)


@dataclass(frozen=True, repr=False)
class Scaffold(FollowsLr):
    """Gradient tracking at global averages.

    Each node corrects its steps by what separates it from the mean of all.
    d_i is the optimizer's direction, and its mean over the steps since the
    last global average:

        x_i^(k+1/2) = x_i^(k) - lr (d_i + c_i)
        at a global average:  c_i <- mean_j d_j - d_i

    Gossip keeps the mean, so a node knows mean_j d_j from the change of the
    mean model. It sends nothing more than Gossip-PGA.
    Karimireddy et al., "SCAFFOLD" (ICML 2020), with gossip between its
    rounds.
    """

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        # mean: the model after the last global average
        # moved and lr: the sums of lr d_i and of lr since then
        self.add_buckets(state, nodes, "c", "moved", "mean")
        state.scalars["lr"] = nodes.engine.full(0.0)
        for b, mean in enumerate(state.buckets["mean"]):
            mean.copy_(nodes.x.peek(b))
        return state

    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        state.scalars["lr"] += step.lr
        for b, c in enumerate(state.buckets["c"]):
            change = state.buckets["last"][b] - nodes.x.peek(b)
            state.buckets["moved"][b] += change
            nodes.x.add(b, -step.lr * c)
        received = super().begin(step, nodes, state)
        return self.remember(received, step, nodes, state)

    def remember(
        self,
        received: Iterator[int],
        step: Step,
        nodes: Nodes,
        state: State,
    ) -> Iterator[int]:
        yield from received
        lr = state.scalars["lr"]
        for b, c in enumerate(state.buckets["c"]):
            x = nodes.x.peek(b)
            if step.kind == "global":
                mean = state.buckets["mean"][b]
                moved = state.buckets["moved"][b]
                c.copy_((mean - x - moved) / lr)
                mean.copy_(x)
                moved.zero_()
            state.buckets["last"][b].copy_(x)
        if step.kind == "global":
            lr.zero_()


@dataclass(frozen=True, repr=False)
class GradientTracking(FollowsLr):
    """Each node follows y_i, an estimate of the mean direction of all nodes, which is mixed like the model.

        y_i <- y_i + d_i^(k) - d_i^(k-1),   x_i^(k+1/2) = x_i^(k) - lr y_i,   then X <- M_k X and Y <- M_k Y

    d_i is the optimizer's direction: the gradient, or the momentum. It sends twice as much as Gossip-PGA.
    Di Lorenzo and Scutari, "NEXT" (2016); Koloskova et al., "An Improved Analysis of Gradient Tracking" (NeurIPS 2021).
    """

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        self.add_buckets(state, nodes, "y", "d", "y_left_out")
        # those of Gossip-PGA come first
        state.send_buffers += [nodes.engine.allocate(y.shape, y.dtype, y.device) for y in state.buckets["y"]]
        return state

    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        out = state.send_buffers[-len(state.buckets["y"]) :]
        for b, (y, d, last) in enumerate(zip(*(state.buckets[name] for name in ("y", "d", "last")), strict=True)):
            now = (last - nodes.x.peek(b)) / step.lr
            y += now - d
            d.copy_(now)
            nodes.x.write(b, last - step.lr * y)
            out[b].tensor.copy_(y)
        received = super().begin(step, nodes, state)
        if step.kind == "global":
            pending = nodes.engine.mean(out, step.k, bits=self.bits, left_out=state.buckets["y_left_out"])
        else:
            pending = [nodes.engine.gossip(y, self.topology, step.k, bits=self.bits) for y in out]
        return self.remember(received, pending, nodes, state)

    def remember(self, received: Iterator[int], pending: list[Pending], nodes: Nodes, state: State) -> Iterator[int]:
        yield from received
        for b, (y, last) in enumerate(zip(state.buckets["y"], state.buckets["last"], strict=True)):
            y.copy_(pending[b].wait().x)
            last.copy_(nodes.x.peek(b))
