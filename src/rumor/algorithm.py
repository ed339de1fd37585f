"""Gossip-PGA and Gossip-AGA (Algorithms 1 and 2 of the paper), and the methods that are special cases of them.

All are one recursion on the stacked models X = [x_1 ... x_n]:

    x_i^(k+1/2) = the local optimizer's step of node i
    X^(k+1)     = M_k X^(k+1/2)        M_k = W_k (gossip)  or  J = 11'/n (global average)

What the round is (gossip, global, none) is decided once a step, on the host, from numbers that are equal on every node. The mixing is
then applied bucket by bucket, by whichever engine runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from rumor.engine import Buckets, Engine, Pending, Pull
from rumor.schedule import Adaptive, Never, Periodic, Schedule, ScheduleState, check_whole
from rumor.topology import Topology, complete, isolated

Round = Literal["gossip", "global", "none"]


@dataclass
class Flight:
    """Messages under way: what each bucket sent and what is to come of it; at a global round, float buffers and loss as well.

    `relayed`: what comes will be sent on (average_rounds).
    """

    sent: list[Tensor] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    buffers: list[Pending] = field(default_factory=list)
    loss: Pending | None = None  # whose scalars it is
    relayed: bool = False


@dataclass
class State:
    """All that an algorithm remembers between steps: plain numbers, tensors by name, and what is under way.

    Attributes:
        schedule: where the schedule stands; its k counts the steps.
        buckets: tensors that a method keeps for each bucket (SlowMo's u, push-sum's x).
        scalars: numbers that it keeps for each node, [*nodes, 1].
        flight: messages that the next step will use (delay=1).
        relays: room for what is passed on (average_rounds); not worth saving.
        expecting: the receives of the coming step are posted already.
    """

    schedule: ScheduleState
    buckets: dict[str, list[Tensor]] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    flight: Flight | None = None
    relays: list[Tensor] = field(default_factory=list)
    expecting: bool = False


class Algorithm(Protocol):
    """What the Averager and the Simulator need of a method. It is a value: all that changes is in the State."""

    @property
    def topology(self) -> Topology: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def delay(self) -> int: ...
    @property
    def needs_loss(self) -> bool: ...
    @property
    def needs_lr(self) -> bool: ...
    def start(self, x: Buckets, engine: Engine) -> State: ...
    def round(self, state: State) -> Round: ...
    def begin(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> Iterator[int]:
        """Sends, and gives back what mixes: bucket by bucket, telling the number of each that is in place. It must be run to its end."""
        ...

    def step(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> None: ...
    def share(self, x: Buckets, b: int, state: State) -> Tensor: ...  # what of bucket b this node brings to the mean of all
    def finish(self, x: Buckets, buffers: Buckets, state: State, engine: Engine) -> None: ...


class AtOnce:
    """The whole step of an algorithm that says how it begins."""

    def step(self: Algorithm, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> None:
        for _ in self.begin(x, buffers, state, engine, loss, lr):
            pass


@dataclass(frozen=True)
class GossipPGA(AtOnce):
    """Gossip over `topology` at every step, and a global average where `schedule` says so.

        delay = 0:  x^(k+1) = M_k x^(k+1/2)                                   (Algorithm 1)
        delay = 1:  x^(k+1) = x^(k+1/2) + (M_k - I) x^(k)                     (x^(k) travels while step k computes)

    `average_rounds` = m replaces the all-reduce of a global round by m gossip steps, M_k = W_(k+m-1) ... W_k.
    """

    topology: Topology
    schedule: Schedule
    delay: int = 0
    average_rounds: int | None = None

    def __post_init__(self) -> None:
        check_topology(self.topology)
        if self.topology.push_only:
            raise ValueError(f"{self.topology} is column stochastic: only osgp can use it; from_networkx(graph) gives symmetric weights")
        if self.delay not in (0, 1):
            raise ValueError(f"delay must be 0 or 1 (an older message diverges), got delay={self.delay!r}")
        if self.average_rounds is not None:
            check_whole("average_rounds", self.average_rounds, 1)
            if not self.topology.has_links:
                raise ValueError(f"average_rounds={self.average_rounds} on {self.topology}: without links, gossip can't average")

    @property
    def needs_loss(self) -> bool:
        return self.schedule.needs_loss

    @property
    def needs_lr(self) -> bool:
        return False

    def start(self, x: Buckets, engine: Engine) -> State:
        return State(self.schedule.start())

    def round(self, state: State) -> Round:
        if self.schedule.is_global(state.schedule):
            return "global"
        return "gossip" if self.topology.has_links else "none"

    def begin(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None) -> Iterator[int]:
        if self.delay == 0:
            state.flight = self.send(x, buffers, state, engine, loss)
            return self.receive(x, buffers, state, engine, lr)
        return self.receive_and_send(x, buffers, state, engine, loss, lr)

    def receive_and_send(
        self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None, lr: float | None
    ) -> Iterator[int]:
        yield from self.receive(x, buffers, state, engine, lr)
        state.flight = self.send(x, buffers, state, engine, loss)

    def send(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, loss: Tensor | None) -> Flight | None:
        """Posts the round that the state stands before; at a global one the loss travels with the first bucket."""
        k, kind = state.schedule.k, self.round(state)
        if kind == "none":
            return None
        flight = Flight(relayed=kind == "global" and self.average_rounds is not None)
        all_reduce = self.is_all_reduce(state, engine)
        if all_reduce:
            flight.sent = [x.read(b) for b in range(len(x))]
            flight.pending = engine.mean(flight.sent, k, loss)
        else:
            for b in range(len(x)):
                flight.sent.append(x.read(b))
                flight.pending.append(engine.gossip(flight.sent[b], self.topology, k))
        if kind == "global":
            flight.buffers = engine.mean([buffers.read(b) for b in range(len(buffers))], k, judge=buffers.judge)
        if kind == "global" and loss is not None:  # by gossip each node would have a loss, hence a period, of its own
            flight.loss = flight.pending[0] if all_reduce else engine.mean([torch.zeros_like(loss)], k, loss)[0]
        return flight

    def is_all_reduce(self, state: State, engine: Engine) -> bool:
        """Is the round that the state stands before one of everybody with everybody?

        W = J is, too, but between two nodes, for whom an exchange is as good and has less to set up.
        """
        global_at_once = self.round(state) == "global" and self.average_rounds is None
        return global_at_once or (self.topology.is_complete and engine.n > 2)

    def receive(self, x: Buckets, buffers: Buckets, state: State, engine: Engine, lr: float | None) -> Iterator[int]:
        """Applies the round that is under way (none at the first delayed step: all start alike, so M_0 x^(0) = x^(0))."""
        flight, kind, loss = state.flight, self.round(state), None
        if flight is not None:
            loss = _one_number(flight.loss.wait().scalars) if flight.loss else None
            pending = self.repeat(flight, state, engine) if flight.relayed else flight.pending
            for b, message in enumerate(pending):
                if self.delay == 1:  # what was relayed no longer is what was sent, so all of it counts
                    x.pull(b, Pull(message.wait().x, 1.0) if flight.relayed else message.pull(), flight.sent[b])
                elif kind == "global":
                    self.write_mean(x, b, message.wait().x, state, lr)
                else:
                    x.pull(b, message.pull())
                yield b
            for b, message in enumerate(flight.buffers):
                buffers.write(b, message.wait().x)
        state.flight = None  # only now: should a message tell of a model that is not finite, the others are still under way
        state.schedule = self.schedule.next(state.schedule, loss)
        is_next = self.round(state) == "gossip" and not self.is_all_reduce(state, engine)
        state.expecting = flight is not None and self.delay == 0 and is_next
        if flight is not None and state.expecting:
            for sent in flight.sent:
                engine.expect(sent, self.topology, state.schedule.k)

    def write_mean(self, x: Buckets, b: int, mean: Tensor, state: State, lr: float | None) -> None:
        x.write(b, mean)

    def repeat(self, flight: Flight, state: State, engine: Engine) -> list[Pending]:
        """What is left of a global average by `average_rounds` gossip steps: the first of them is under way already."""
        pending = flight.pending
        for r in range(1, self.average_rounds or 1):
            if not state.relays:
                state.relays = [engine.room(x.shape, x.dtype, x.device) for x in flight.sent]
            relayed = zip(state.relays, pending, strict=True)
            pending = [engine.gossip(relay.copy_(message.wait().x), self.topology, state.schedule.k + r) for relay, message in relayed]
        return pending

    def share(self, x: Buckets, b: int, state: State) -> Tensor:
        return x.peek(b)

    def finish(self, x: Buckets, buffers: Buckets, state: State, engine: Engine) -> None:
        """Waits for what is under way and drops it (it would not move the mean), then averages once more."""
        if state.expecting:  # a step that may never come: its messages are sent all the same, or their receives would wait for ever
            state.flight, state.expecting = self.send(x, buffers, state, engine, None), False
        wait_for(state.flight)
        state.flight = None
        average(x, engine, state.schedule.k)
        average(buffers, engine, state.schedule.k)


def check_algorithm(algorithm: object) -> None:
    if not hasattr(algorithm, "topology"):
        raise TypeError(f"algorithm must be what rumor.gossip_pga(...) and its like return, got {algorithm!r}")


def check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be what rumor.ring(n) and its like return, got {topology!r}")


def wait_for(flight: Flight | None, or_fail: bool = True) -> None:
    """Lets what is under way arrive. Unless it is to fail, a model that is not finite is no matter: it will not be used."""
    if flight is not None:
        for message in (*flight.pending, *flight.buffers, *([flight.loss] if flight.loss else [])):
            with nullcontext() if or_fail else suppress(FloatingPointError):
                message.wait()


def average(x: Buckets, engine: Engine, k: int) -> None:
    """x <- J x, once training is done."""
    pending = engine.mean([x.read(b) for b in range(len(x))], k, doing="in finish()", judge=x.judge)
    for b, message in enumerate(pending):
        x.write(b, message.wait().x)


def _one_number(loss: Tensor) -> float:
    if loss.numel() != 1:
        raise ValueError(
            f"Gossip-AGA adapts its period to the loss, and {loss.numel()} trials have {loss.numel()} losses: run the trials one by one"
        )
    return float(loss)


def parallel_sgd(n: int) -> GossipPGA:
    """A global average at every step: W = 11'/n and H = 1. Equal to DDP for SGD with or without momentum (not for Adam)."""
    return GossipPGA(complete(n), Periodic(1))


def local_sgd(n: int, H: int) -> GossipPGA:
    """No gossip, a global average every H steps: W = I."""
    return GossipPGA(isolated(n), Periodic(H))


def gossip_sgd(topology: Topology, *, delay: int = 0, average_rounds: int | None = None) -> GossipPGA:
    """Gossip alone: H = infinity."""
    return GossipPGA(topology, Never(), delay, average_rounds)


def gossip_pga(topology: Topology, H: int, *, delay: int = 0, average_rounds: int | None = None) -> GossipPGA:
    """Gossip-PGA (Algorithm 1): gossip, and a global average every H steps.

    >>> import rumor
    >>> rumor.gossip_pga(rumor.ring(8), H=6)
    GossipPGA(topology=ring(8), schedule=Periodic(H=6), delay=0, average_rounds=None)
    """
    return GossipPGA(topology, Periodic(H), delay, average_rounds)


def gossip_aga(
    topology: Topology,
    warmup: int,
    H_init: int = 4,
    H_max: int = 64,
    exponent: float = 1.0,
    *,
    delay: int = 0,
    average_rounds: int | None = None,
) -> GossipPGA:
    """Gossip-AGA (Algorithm 2): the period starts at H_init, after `warmup` steps (K_w) it grows as the loss falls, up to H_max.

    A loss that is not positive, or not finite on some node, changes nothing: then the period stays as it is.
    """
    return GossipPGA(topology, Adaptive(warmup, H_init, H_max, exponent), delay, average_rounds)
