"""Gossip-PGA and Gossip-AGA (Algorithms 1 and 2 of the paper), and the methods that are special cases of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from rumor.engines import Buckets, Buffer, Engine, Lerp, Pending, gossip_all
from rumor.engines.codes import check_width
from rumor.engines.engine import accumulator
from rumor.methods.algorithm import Algorithm, Builder, InFlight, Nodes, State, Step, as_number, topology_or_builder
from rumor.schedule import Adaptive, Never, Periodic, Schedule, check_whole, schedule_of
from rumor.topology import Topology, complete, isolated


@dataclass(frozen=True, repr=False)
class GossipPGA(Algorithm):
    """Gossip over `topology` at every step, and a global average where `schedule` says so.

        delay = 0:  x^(k+1) = M_k x^(k+1/2)
        delay = 1:  x^(k+1) = x^(k+1/2) + (M_k - I) x^(k)

    `delay` = 0 is Algorithm 1; with `delay` = 1, x^(k) travels while step k computes.
    `average_rounds` = m replaces the all-reduce of a global average by m gossip steps, M_k = W_(k+m-1) ... W_k.

    With `bits` < 32, nodes send codes Q of differences to x_ref, the model that all nodes had after the last global average:

        gossip:  q_i = Q(x_i - x_ref)
                 x_i <- x_i + sum_j W[i, j] (q_j - q_i)
        global:  x_ref, x_i <- x_ref + mean_i Q(x_i - x_ref + e_i)
                 e_i <- what Q has left out

    A node subtracts what it has sent, so the mean of all nodes stays exact for any Q: what Q leaves out of a gossip step stays in x_i.
    No node needs a copy of its neighbour's model, so any graph will do, also one that changes at every step.
    """

    topology: Topology
    schedule: Schedule
    delay: int = 0
    average_rounds: int | None = None
    bits: int = field(default=32, repr=False)
    averages_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", topology_or_builder(self.topology))
        if self.delay not in (0, 1):
            raise ValueError(f"delay must be 0 or 1 (an older message diverges), got delay={self.delay!r}")
        if self.average_rounds is not None:
            check_whole("average_rounds", self.average_rounds, 1)
        self._check_bits()
        if isinstance(self.topology, Topology):
            self._check_topology()

    def __repr__(self) -> str:
        """Print the fields, with `bits` if there are fewer than 32."""
        shown = [f.name for f in fields(self) if f.repr or self.bits < 32]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _check_bits(self) -> None:
        check_width(self.bits)
        if self.bits < 16 and (self.average_rounds is not None or isinstance(self.schedule, Never)):
            raise ValueError(
                f"bits={self.bits} needs global averages by an all-reduce: such codes are for small differences to the last of them. Use "
                "bits=16 or 32 here, or gossip_pga(topology, H=...) without average_rounds"
            )

    def _check_topology(self) -> None:
        if self.topology.push_only:
            raise ValueError(f"{self.topology} is column stochastic: only osgp can use it; from_networkx(graph) gives symmetric weights")
        if self.average_rounds is not None and not self.topology.has_links:
            raise ValueError(f"average_rounds={self.average_rounds} on {self.topology}: without links, gossip can't average")

    @property
    def needs_loss(self) -> bool:
        return self.schedule.signal == "loss"

    @property
    def needs_lr(self) -> bool:
        return self.schedule.signal == "lr"

    def decide(self, state: State, loss: Tensor | None = None, lr: float | None = None) -> Step:
        if self.schedule.signal != "loss":
            loss = None
        elif loss is None:
            raise ValueError("Gossip-AGA adapts its period to the loss: call step(loss) with this step's loss")
        if self.schedule.signal == "lr":
            lr = as_number(lr, self.schedule)
        averages_always = state.schedule.H == 1 and self.delay == 0 and self.average_rounds is None
        return Step(state.schedule.k, self.kind(state), loss, lr, averages_always=averages_always)

    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        if self.delay == 0:
            state.in_flight = self.send(step, nodes, state)
            return self.receive(step, nodes, state)
        return self.receive_then_send(step, nodes, state)

    def receive_then_send(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        """Use the messages that were sent a step ago, then send those of the coming step, with the loss or learning rate of this one."""
        yield from self.receive(step, nodes, state)
        state.in_flight = self.send(self.decide(state, step.loss, step.lr), nodes, state)

    def start(self, nodes: Nodes) -> State:
        state = super().start(nodes)
        if self.bits < 32:
            model, opt = ([x.peek(b) for b in range(len(x))] for x in (nodes.x, nodes.state))
            # all nodes have the same model now; the optimizers' states may differ
            state.buckets["x_ref"] = [x.clone() for x in model] + [torch.zeros_like(m) for m in opt]
            if not isinstance(self.schedule, Never) and self.average_rounds is None:
                state.buckets["left_out"] = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (*model, *opt)]
            state.send_buffers = nodes.engine.allocate_codes(state.buckets["x_ref"], self.bits, keeps=self._keeps_sent)
        return state

    def send(self, step: Step, nodes: Nodes, state: State) -> InFlight | None:
        """Send the model, and the optimizer's state if it takes part; at a global average also the buffers and the schedule's signal."""
        if step.kind == "none":
            return None
        x, engine = nodes.mixed_in(step), nodes.engine
        model = (self._read(x, b) if self.bits == 32 else self._difference(x, b, state) for b in range(len(x)))
        if step.kind == "gossip":
            return InFlight(*gossip_all(engine, model, self.topology, step.k, self.bits))
        signal = self._signal(step, engine)
        if self.average_rounds is None:
            left_out = state.buckets.get("left_out", [])[: len(x)]
            flight = InFlight()
            flight.pending = engine.mean(_noted(model, flight.sent), step.k, signal, bits=self.bits, left_out=left_out)
            flight.signal = flight.pending[0] if signal is not None else None
        else:
            flight = InFlight(*gossip_all(engine, model, self.topology, step.k, self.bits), relayed=True)
            if signal is not None:  # averaged by all: by gossip each node would get another number, and another period
                flight.signal = engine.mean([torch.zeros_like(signal)], step.k, signal)[0]
        for tensors in (nodes.buffers, nodes.full_state):
            if len(tensors):
                read = [self._read(tensors, b) for b in range(len(tensors))]
                flight.buffers += engine.mean(read, step.k, finite_check=tensors.finite_check)
        return flight

    def _signal(self, step: Step, engine: Engine) -> Tensor | None:
        """Return what the schedule follows, [*nodes, 1] in float64. All nodes use its average, so they agree on the period."""
        if self.schedule.signal == "lr" and step.lr is not None:
            return engine.full(step.lr)
        return step.loss

    def _read(self, x: Buckets, b: int) -> Buffer:
        """Read what is to be sent. With delay=1 it is a copy: the next step changes model and buffers while messages travel."""
        return x.read(b) if self.delay == 0 else x.copy(b)

    def _difference(self, x: Buckets, b: int, state: State) -> Buffer:
        """Return x - x_ref in the dtype for sums: the code of a number in half precision need not be one."""
        buffer = state.send_buffers[b]
        x.difference(b, state.buckets["x_ref"][b], buffer.tensor)
        return buffer

    @property
    def _keeps_sent(self) -> bool:
        """Whether what was sent is needed again when messages arrive. If not, all buckets can be encoded from the same memory."""
        return self.delay == 1 or (self.bits < 32 and self.average_rounds is not None)

    def receive(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        """Mix what arrives into the model. The first delayed step has nothing to wait for: all nodes start alike, so M_0 x^(0) = x^(0)."""
        flight, signal = state.in_flight, None
        if flight is not None:
            signal = _one_number(flight.signal.wait().scalars) if flight.signal else None
            pending = self.relay(step, nodes, state, flight) if flight.relayed else flight.pending
            for b, message in enumerate(pending):
                self.write(step, nodes, b, message, flight, state)
                yield b
            for b, message in enumerate(flight.buffers):
                nodes.in_full.write(b, message.wait().x)
        state.in_flight = None  # only now: if a message reports a model that is not finite, the others are still in flight
        state.schedule = self.schedule.next(state.schedule, signal)

    def write(self, step: Step, nodes: Nodes, b: int, message: Pending, flight: InFlight, state: State) -> None:
        """Write what has arrived into bucket b: a mixed model, or a mixed difference to x_ref if messages are codes."""
        x = nodes.mixed_in(step)
        sent = flight.sent[b].tensor if self._keeps_sent else None
        if flight.relayed:  # lerp() would start from the relayed model, not from what was sent
            x.lerp(b, Lerp(message.wait().x, 1.0), sent)
        elif step.kind == "global":
            self.write_mean(step, x, b, message.wait().x, sent, state, is_model=b < len(nodes.x))
        elif (change := message.change()) is not None:
            x.add(b, change)
        else:
            message.mix_into(x, b, sent)

    def write_mean(self, step: Step, x: Buckets, b: int, mean: Tensor, sent: Tensor | None, state: State, is_model: bool = True) -> None:
        """Write a global average, or the average difference to x_ref."""
        x_ref = state.buckets["x_ref"][b] if self.bits < 32 else None
        if x_ref is not None:
            x_ref.add_(mean)
        if self.delay == 1:
            x.lerp(b, Lerp(mean, 1.0), sent)
            return
        after = mean if x_ref is None else x_ref
        if is_model:
            after = self.after_global_round(step, b, after, state)
        x.write(b, after)
        if x_ref is not None and after is not x_ref:
            x_ref.copy_(after)

    def after_global_round(self, step: Step, b: int, mean: Tensor, state: State) -> Tensor:
        """Return what all nodes have in bucket b after a global average that gave this mean."""
        return mean

    def relay(self, step: Step, nodes: Nodes, state: State, flight: InFlight) -> list[Pending]:
        """Run the remaining gossip steps of a global average by `average_rounds` of them; the first is in flight already."""
        pending, engine = flight.pending, nodes.engine
        for r in range(1, self.average_rounds or 1):
            if not state.relay_buffers:
                x = nodes.mixed_in(step)  # not what was sent: a saved state may hold that in another dtype
                state.relay_buffers = self._relay_buffers([x.peek(b) for b in range(len(flight.sent))], engine)
            sent_on = []
            for relay, message in zip(state.relay_buffers, pending, strict=True):
                relay.tensor.copy_(message.wait().x)
                sent_on.append(engine.gossip(relay, self.topology, step.k + r, bits=self.bits))
            pending = sent_on
        return pending

    def _relay_buffers(self, like: list[Tensor], engine: Engine) -> list[Buffer]:
        if self.bits < 32:
            return engine.allocate_codes(like, self.bits, keeps=True)
        return [engine.allocate(x.shape, x.dtype, x.device) for x in like]


def _noted(xs: Iterable[Buffer], into: list[Buffer]) -> Iterator[Buffer]:
    for x in xs:
        into.append(x)
        yield x


def _one_number(signal: Tensor) -> float:
    if signal.numel() != 1:  # losses: the learning rate is one number for all trials
        trials = signal.numel()
        raise ValueError(f"Gossip-AGA adapts its period to the loss, and {trials} trials have {trials} losses: run the trials one by one")
    return float(signal)


def parallel_sgd(n: int | None = None, *, bits: int = 32) -> GossipPGA:
    """Global average at every step (all weights are 1/n, and H = 1). Equal to DDP for SGD with or without momentum (not for Adam).

    Args:
        n: the number of nodes; if None, that of the Averager or the Simulator.
        bits: as in `gossip_pga`.
    """
    return GossipPGA(_sized(complete, n), Periodic(1), bits=bits)


def local_sgd(n: int | None = None, H: int | Schedule | None = None, *, bits: int = 32) -> GossipPGA:
    """No gossip, and a global average every H steps: W = I.

    Args:
        n: the number of nodes; if None, that of the Averager or the Simulator.
        H: the period, in steps, or a schedule. It is required: `local_sgd(H=6)` or `local_sgd(n, 6)`.
        bits: as in `gossip_pga`.
    """
    if H is None:
        raise ValueError(f"local_sgd needs the period H, in steps: local_sgd(H={6 if n is None else n}), or local_sgd(n, H) for n nodes")
    return GossipPGA(_sized(isolated, n), schedule_of(H), bits=bits)


def gossip_sgd(topology: Topology | Builder, *, delay: int = 0, average_rounds: int | None = None, bits: int = 32) -> GossipPGA:
    """Gossip alone: H = infinity. `bits` is 32 or 16: fewer need global averages."""
    return GossipPGA(topology_or_builder(topology), Never(), delay, average_rounds, bits)


def gossip_pga(
    topology: Topology | Builder, H: int | Schedule = 6, *, delay: int = 0, average_rounds: int | None = None, bits: int = 32
) -> GossipPGA:
    """Gossip-PGA (Algorithm 1): gossip, and a global average every H steps.

    Args:
        topology: who talks to whom, or a builder such as `rumor.ring` for as many nodes as there are.
        H: the period of global averages, in steps (6 in the paper's experiments); or a schedule, such as `rumor.LearningRate(3, 24)`,
            whose period changes.
        delay: 1 if messages travel while the next step computes.
        average_rounds: m replaces the all-reduce of a global average by m gossip steps.
        bits: 16, 8 or 4 make messages 2, 4 or 8 times smaller. Nodes then send differences to the last global average, and keep what
            the rounding leaves out. On a model in half precision, 16 bits make only global averages smaller.

    >>> import rumor
    >>> method = rumor.gossip_pga(rumor.ring, H=6)
    >>> method.bind(8) == rumor.gossip_pga(rumor.ring(8), H=6)
    True
    >>> rumor.gossip_pga(rumor.ring, H=rumor.LearningRate(3, 24)).schedule
    LearningRate(H_min=3, H_max=24, power=1.0)
    """
    return GossipPGA(topology_or_builder(topology), schedule_of(H), delay, average_rounds, bits)


def gossip_aga(
    topology: Topology | Builder,
    warmup: int,
    H_init: int = 4,
    H_max: int = 64,
    exponent: float = 1.0,
    *,
    delay: int = 0,
    average_rounds: int | None = None,
    bits: int = 32,
) -> GossipPGA:
    """Gossip-AGA (Algorithm 2): the period starts at H_init. After `warmup` steps (K_w) it grows as the loss falls, up to H_max.

    If the loss is not positive, or not finite on some node, the period stays as it is. `delay`, `average_rounds` and `bits` are as in
    `gossip_pga`.
    """
    return GossipPGA(topology_or_builder(topology), Adaptive(warmup, H_init, H_max, exponent), delay, average_rounds, bits)


def _sized(build: Builder, n: int | None) -> Topology:
    return topology_or_builder(build if n is None else build(n))  # type: ignore[no-any-return]
