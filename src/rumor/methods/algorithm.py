"""The interface of a method: what the Averager and the Simulator need to run it.

Every method is one recursion on the stacked models X = [x_1 ... x_n]:

    x_i^(k+1/2) = the local optimizer's step of node i
    X^(k+1)     = M_k X^(k+1/2)        M_k = W_k (gossip),  J = 11'/n (global average)  or  I (nothing)

A step goes in one direction: decide, send, receive, write. What it does is decided once, on the host, from numbers that are equal on
every node. Then models are sent, received and written bucket by bucket, by whichever engine runs the method.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from rumor.engines import NO_BUCKETS, Buckets, Buffer, Engine, JoinedBuckets, Pending
from rumor.schedule import Schedule, ScheduleState
from rumor.topology import Topology

Kind = Literal["gossip", "global", "none"]
# when the optimizer's state is mixed: at every step, at global averages, or at global averages except while every step is one
WhenMixed = Literal["always", "global", "global, H > 1"]
Builder = Callable[[int], Topology]  # rumor.ring and the like: the topology for n nodes
Self = TypeVar("Self", bound="Algorithm")


class Step(NamedTuple):
    """One step, as decided before anything is sent.

    Attributes:
        k: the number of the step, from 0.
        kind: "gossip", "global" (average over all nodes) or "none".
        loss: the loss of this step, [*nodes, 1] in float64, if the method needs it.
        lr: the learning rate, if the method needs it.
        averages_always: whether every step averages the models of all nodes (H = 1), as long as the period does not change.
    """

    k: int
    kind: Kind
    loss: Tensor | None = None
    lr: float | None = None
    averages_always: bool = False


class Nodes(NamedTuple):
    """The nodes that this process has: one, or all n on the stacked engine.

    Attributes:
        x: the model.
        buffers: its float buffers, which global averages include.
        engine: connects the nodes.
        state: the optimizer's state that is mixed like the model; no buckets if there is none.
        state_mixed: when `state` is mixed.
        full_state: the optimizer's state that global averages include without codes, as they do with buffers.
    """

    x: Buckets
    buffers: Buckets
    engine: Engine
    state: Buckets = NO_BUCKETS
    state_mixed: WhenMixed = "global"
    full_state: Buckets = NO_BUCKETS

    @property
    def in_full(self) -> Buckets:
        """What global averages include without codes: the buffers, then `full_state`."""
        return JoinedBuckets(self.buffers, self.full_state) if len(self.full_state) else self.buffers

    @property
    def with_state(self) -> Buckets:
        """The model, then `state`."""
        return JoinedBuckets(self.x, self.state) if len(self.state) else self.x

    def mixed_in(self, step: Step) -> Buckets:
        """Return what a step mixes: the model, then the optimizer's state if it takes part."""
        at_global = self.state_mixed == "global" or not step.averages_always
        return self.with_state if self.state_mixed == "always" or (step.kind == "global" and at_global) else self.x


@dataclass
class InFlight:
    """Messages in flight.

    Attributes:
        sent: the buckets that were sent.
        pending: what will come of them, by bucket.
        buffers: the averages of the float buffers, at a global average.
        signal: the message whose scalars are the average of what the schedule follows (the loss, the learning rate), at a global average.
        relayed: whether received models are sent on (average_rounds).
    """

    sent: list[Buffer] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    buffers: list[Pending] = field(default_factory=list)
    signal: Pending | None = None
    relayed: bool = False


@dataclass
class State:
    """Everything that a method remembers between steps. `state_dict()` saves all of it except for the buffers.

    Attributes:
        schedule: the state of the schedule; its k counts the steps.
        buckets: tensors that a method keeps for each bucket (SlowMo's u, push-sum's x).
        scalars: numbers that it keeps for each node, [*nodes, 1].
        in_flight: messages that the coming step will use (delay=1).
        send_buffers: memory for sending that the method has allocated. A method that extends another one adds its own at the end.
        relay_buffers: memory for sending on what was received.
    """

    schedule: ScheduleState
    buckets: dict[str, list[Tensor]] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    in_flight: InFlight | None = None
    send_buffers: list[Buffer] = field(default_factory=list)
    relay_buffers: list[Buffer] = field(default_factory=list)

    def forget_left_out(self) -> None:
        """Forget what codes have left out of the last global average, because that average was dropped."""
        for rest in self.buckets.get("left_out", ()):
            rest.zero_()


class Algorithm(ABC):
    """A method. It is a value (a frozen dataclass): everything that changes is in the State.

    Attributes:
        topology: the topology, or, until `bind(n)`, a function that builds it for n nodes.
        schedule: which steps average globally.
        delay: 1 if a message travels during the next step.
        bits: how many of them a number travels with in a gossip step: 32, 16, 8 or 4.
        averages_state: whether the method can average the optimizer's state beside the model.
    """

    topology: Topology
    schedule: Schedule
    delay: int = 0
    bits: int = 32
    averages_state: ClassVar[bool] = False

    @property
    def needs_loss(self) -> bool:
        """Whether `step(loss)` must be given the loss."""
        return False

    @property
    def needs_lr(self) -> bool:
        """Whether `step(loss, lr=...)` must be given the learning rate."""
        return False

    def bind(self: Self, n: int) -> Self:
        """Return this method for n nodes: builds the topology if it is a builder, and checks its size if it is not.

        >>> import rumor
        >>> rumor.gossip_sgd(rumor.ring).bind(8).topology
        ring(8)
        """
        if not isinstance(self.topology, Topology):
            topology = topology_or_builder(self.topology)(n)
            if not isinstance(topology, Topology):
                raise TypeError(f"{self.topology!r} must build a rumor.Topology for n nodes, but returned {topology!r}")
            bound: Self = replace(self, topology=topology)
            return bound.bind(n)
        if self.topology.n != n:
            raise ValueError(f"this topology is for n={self.topology.n} nodes, but the group has {n}: {_how_to_fit(self.topology, n)}")
        return self

    def start(self, nodes: Nodes) -> State:
        """Return the state before the first step. All nodes have the same model then."""
        return State(self.schedule.start())

    def kind(self, state: State) -> Kind:
        """Return what the coming step does. It may depend only on numbers that are equal on every node."""
        if self.schedule.is_global(state.schedule):
            return "global"
        return "gossip" if self.topology.has_links else "none"

    def decide(self, state: State, loss: Tensor | None = None, lr: float | None = None) -> Step:
        """Decide the coming step. A method that needs the learning rate overrides this, and raises ValueError if it was not given."""
        if not self.needs_loss:
            loss = None
        elif loss is None:
            raise ValueError(f"{type(self).__name__} needs the loss: call step(loss) with this step's loss")
        return Step(state.schedule.k, self.kind(state), loss, lr)

    @abstractmethod
    def begin(self, step: Step, nodes: Nodes, state: State) -> Iterator[int]:
        """Send what this step sends, and return an iterator that receives and writes.

        The iterator yields the number of each bucket that has been written, and must be run to its end. It then advances `state.schedule`.
        """

    def step(self, nodes: Nodes, state: State, loss: Tensor | None = None, lr: float | None = None) -> Step:
        """Run one whole step, and return what it was."""
        step = self.decide(state, loss, lr)
        for _ in self.begin(step, nodes, state):
            pass
        return step

    def share(self, nodes: Nodes, b: int, state: State) -> Tensor:
        """Return what this node contributes to the mean of all models, for bucket b."""
        return nodes.x.peek(b)

    def finish(self, nodes: Nodes, state: State) -> None:
        """Wait for what is in flight and drop it (it would not change the mean), then average once more."""
        wait_for(state.in_flight)
        if state.in_flight is not None and self.kind(state) == "global":
            state.forget_left_out()
        state.in_flight = None
        average([nodes.x, nodes.buffers, nodes.state, nodes.full_state], nodes.engine, state.schedule.k)


class _NamedBuilder:
    """A builder that prints well in an unbound method: `ring`, and not `<function ring at 0x...>`.

    With options, given by `functools.partial`, it prints as `partial(base_graph, peers=2)`. Equal options make equal builders.
    """

    def __init__(self, build: Builder):
        self._build = build
        self._key: tuple[Any, ...] = (build,)
        self._name = getattr(build, "__name__", repr(build))
        if isinstance(build, partial):
            options = [*map(repr, build.args), *(f"{name}={value!r}" for name, value in build.keywords.items())]
            self._key = (build.func, *options)
            self._name = f"partial({', '.join([repr(_NamedBuilder(build.func)), *options])})"

    def __call__(self, n: int) -> Topology:
        return self._build(n)

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NamedBuilder) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def topology_or_builder(given: Any) -> Any:
    """Check what a method was given as its topology."""
    if isinstance(given, Topology | _NamedBuilder):
        return given
    is_model = isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module))
    if callable(given) and not is_model:
        return _NamedBuilder(given)
    raise TypeError(f"topology must be what rumor.ring(n) and its like return, or a builder such as rumor.ring, got {_in_one_line(given)}")


def describe(algorithm: Algorithm) -> str:
    """Return what ranks and checkpoints compare: the repr, without the addresses of functions, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(algorithm))


def as_number(lr: object, needed_by: object) -> float:
    """Return a learning rate as schedulers and optimizers have it (it may be a tensor) as a float."""
    try:
        return float(lr)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for a tensor of several numbers
        how = "call step(loss, lr=scheduler.get_last_lr()[0]), before scheduler.step(); an Averager with optimizer=opt reads it there"
        raise ValueError(f"{needed_by} needs the current learning rate: {how}; got lr={lr!r}") from None


def check_algorithm(algorithm: object) -> None:
    if not isinstance(algorithm, Algorithm):
        from_text = f": to read it from text, use rumor.method({algorithm!r})" if isinstance(algorithm, str) else ""
        raise TypeError(f"algorithm must be what rumor.gossip_pga(...) and its like return, got {_in_one_line(algorithm)}{from_text}")


def _in_one_line(given: object) -> str:
    """Return how a wrong argument prints, or only its type if that takes many lines, as models and optimizers do."""
    return type(given).__name__ if isinstance(given, nn.Module) or "\n" in repr(given) else repr(given)


def _how_to_fit(topology: Topology, n: int) -> str:
    how = topology.name.split("(")[0]
    if how == "isolated":
        return "use local_sgd(H=...) or diloco(H=...), which fit any number of nodes"
    if how == "complete":
        return f"use parallel_sgd(), which fits any number of nodes, or complete({n})"
    if "<" in topology.name:
        return f"build it for {n} nodes"
    if peers := re.search(r", (peers=\d+)", topology.name):
        builder = f"functools.partial(rumor.{how}, {peers[1]})"
        return f"build it with {how}({n}, {peers[1]}), or pass {builder}, which fits any number of nodes"
    return f"build it with {how}({n}), or pass rumor.{how} itself, which fits any number of nodes"


def wait_for(in_flight: InFlight | None, or_fail: bool = True) -> None:
    """Wait for all messages. With or_fail=False, ignore models that are not finite, because nobody will use them."""
    if in_flight is not None:
        for message in (*in_flight.pending, *in_flight.buffers, *([in_flight.signal] if in_flight.signal else [])):
            with nullcontext() if or_fail else suppress(FloatingPointError):
                message.wait()


def average(parts: Sequence[Buckets], engine: Engine, k: int) -> None:
    """x <- J x for each part, at the end of training. Nothing is written until all has arrived."""
    parts = [x for x in parts if len(x)]
    averages = [engine.mean([x.read(b) for b in range(len(x))], k, doing="in finish()", finite_check=x.finite_check) for x in parts]
    for pending in averages:
        for message in pending:
            message.arrive()
    for x, pending in zip(parts, averages, strict=True):
        for b, message in enumerate(pending):
            x.write(b, message.wait().x)
