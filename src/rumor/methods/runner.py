"""Runner: one method at work on one engine. The Averager and the Simulator share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rumor.engines import NO_BUCKETS, Buckets, Buffer, Engine, Pending
from rumor.engines.engine import all_finite, largest_magnitude, uses_all_reduce
from rumor.methods.algorithm import Algorithm, Nodes, Step, WhenMixed, describe, wait_for
from rumor.methods.saved_state import check_format, read_state, saved_state
from rumor.metrics import span
from rumor.schedule import ScheduleState


class Runner:
    """Runs `algorithm` on the model `x` and the float `buffers` of the nodes that `engine` has here.

    `state`, which is mixed when `state_mixed` says, and `full_state` are the parts of the optimizer's state that are averaged: see `Nodes`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        x: Buckets,
        buffers: Buckets,
        state: Buckets = NO_BUCKETS,
        state_mixed: WhenMixed = "global",
        full_state: Buckets = NO_BUCKETS,
    ):
        self.algorithm, self.engine, self.metrics = algorithm, engine, engine.metrics
        # BatchNorm's buffers must stay finite; a mask is infinite by design
        buffers.finite_check = largest_magnitude if all_finite(buffers, largest_magnitude) else None
        if len(full_state):
            full_state.finite_check = largest_magnitude  # squares of squares would overflow
        self.nodes = Nodes(x, buffers, engine, state, state_mixed, full_state)
        self.state = algorithm.start(self.nodes)
        self.metrics.H = self.state.schedule.H
        self._step: Step | None = None  # the step under way
        self._mixing: Iterator[int] = iter(())  # what is left of it
        self._written = 0  # buckets of it that are written
        self._sent: Sequence[Buffer] = ()

    @property
    def k(self) -> int:
        """Number of steps taken."""
        return self.state.schedule.k

    @property
    def steps_begun(self) -> int:
        """Number of steps taken, plus one if a step is under way."""
        return self.k + self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    @property
    def is_next_global(self) -> bool:
        """Whether the coming step is a global average."""
        return self.algorithm.kind(self.state) == "global"

    def decide(self, loss: Tensor | None, lr: float | None) -> Step:
        return self.algorithm.decide(self.state, loss, lr)

    def begin(self, step: Step, at_once: bool = False) -> None:
        """Send what this step sends. It ends with settle().

        `at_once`: a method with delay=1 does without the delay in this step, because what it sent a step ago was lost. The next step then
        has nothing to receive, like the first step of a job; what it sends arrives in the step after it.
        """
        self.metrics.step_begins(step.k)
        algorithm: Any = replace(self.algorithm, delay=0) if at_once and self.algorithm.delay else self.algorithm  # type: ignore[type-var]
        with span(f"rumor::{step.kind}"), self.metrics.at_work():
            self._mixing = algorithm.begin(step, self.nodes, self.state)
        self._step, self._written = step, 0
        self._sent = self.state.in_flight.sent if self.state.in_flight is not None else ()

    def arrive(self) -> None:
        """Wait for the averages that the step under way needs, before it changes the model: if one is lost, the model is as it was."""
        flight = self.state.in_flight
        if flight is not None:
            for message in (*flight.pending, *flight.buffers, *([flight.signal] if flight.signal else [])):
                message.arrive()

    def settle(self, buckets: int | None = None) -> Step | None:
        """Receive and write the first `buckets` buckets of the step under way (all if None). Returns the step if this ended it."""
        step, self._step = self._step, None  # if it fails here, the step is over
        if step is None:
            return None
        if buckets is not None and buckets <= self._written:
            self._step = step
            return None
        with span(f"rumor::{step.kind}"), self.metrics.at_work():
            for b in self._mixing:
                self._written = b + 1
                if self._written == buckets:
                    self._step = step
                    return None
            self._post_receives()
        self.metrics.rounds[step.kind] += 1
        self.metrics.H = self.state.schedule.H
        return step

    def _post_receives(self) -> None:
        """Prepare for the messages of the next step, if it gossips what this one has sent."""
        algorithm, topology = self.algorithm, self.algorithm.topology
        sends_messages = algorithm.delay == 0 and not uses_all_reduce(topology, algorithm.bits)
        if self._sent and sends_messages and algorithm.kind(self.state) == "gossip":
            will_be_sent = self._sent[: len(self.nodes.mixed_in(Step(self.k, "gossip")))]
            self.engine.post_receives(will_be_sent, topology, self.state.schedule.k, algorithm.bits)

    def step(self, loss: Tensor | None, lr: float | None) -> Step:
        step = self.decide(loss, lr)
        self.begin(step)
        self.settle()
        return step

    def finish(self) -> None:
        with span("rumor::finish"):
            self.engine.complete_receives(self.k)
            self.algorithm.finish(self.nodes, self.state)

    def mean(self) -> tuple[list[Pending], list[Pending]]:
        """Average the model and the buffers over all nodes. What is in flight and the method's state stay as they are."""
        doing = "in averaged()"
        x, buffers, engine = self.nodes.x, self.nodes.buffers, self.engine
        with span("rumor::mean"):
            shares = [self.algorithm.share(self.nodes, b, self.state) for b in range(len(x))]
            model = engine.mean(shares, self.k, doing=doing)
            own = [buffers.peek(b) for b in range(len(buffers))]
            return model, engine.mean(own, self.k, doing=doing, finite_check=buffers.finite_check)

    def show_mean(self) -> None:
        """Replace the model and the buffers by the mean over all nodes."""
        for tensors, means in zip(self.nodes[:2], self.mean(), strict=True):
            for b, message in enumerate(means):
                tensors.write(b, message.wait().x)

    def consensus_distance(self) -> float:
        """1/n sum_i ||x_i - x_bar||^2."""
        doing = "in consensus_distance()"
        x, engine = self.nodes.x, self.engine
        squares: Tensor | None = None  # [*nodes, 1]
        for b in range(len(x)):
            own = x.peek(b)
            mean = engine.mean([own], self.k, doing=doing)[0].wait().x
            square = (own.to(mean) - mean).square_().sum(dim=-1, keepdim=True, dtype=torch.float64)
            squares = square if squares is None else squares + square.to(squares)
        assert squares is not None
        distance = engine.mean([torch.zeros_like(squares)], self.k, squares, doing=doing)[0].wait().scalars
        self.metrics.consensus_distance = float(distance)
        return self.metrics.consensus_distance

    # ---- state -------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and tensors, for `torch.load(..., weights_only=True)`. Waits for what is in flight, and includes it."""
        counters = {"rounds": dict(self.metrics.rounds), "bytes_sent": self.metrics.bytes_sent}
        return {"algorithm": describe(self.algorithm), **saved_state(self.state, self.nodes), **counters}

    def check_state(self, saved: dict[str, Any]) -> None:
        """Raise ValueError unless `saved` is a state of this method."""
        check_format(saved, describe(self.algorithm))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.check_state(saved)
        restore = read_state(saved, self.state, self.nodes)
        self.abandon()  # its buffers are about to be used again
        restore()
        self.metrics.rounds.clear()
        self.metrics.rounds.update(saved["rounds"])
        self.metrics.bytes_sent = saved["bytes_sent"]
        self.metrics.H = self.state.schedule.H

    def restart(self, schedule: dict[str, Any] | None = None) -> None:
        """Start again from models that are equal on all nodes. The schedule goes on (from `schedule`, if given)."""
        self.abandon()
        now = self.algorithm.schedule.resumed(self.state.schedule if schedule is None else ScheduleState(**schedule))
        buffers, self.state = self.state.send_buffers, self.algorithm.start(self.nodes)
        self.state.send_buffers = buffers or self.state.send_buffers  # neighbours may have posted receives for what they send
        self.state.schedule = now
        self.metrics.H = now.H

    def abandon(self) -> None:
        """Wait for what is in flight, and do not use it."""
        self._step = None
        wait_for(self.state.in_flight, or_fail=False)
        self.state.in_flight = None

    # ---- members that come and go --------------------------------------------------------------------------------------------------

    def drop_step(self) -> None:
        """Forget the step under way, whose messages are lost. The model and the method's state are as they were before it."""
        self.drop_in_flight()
        self.state.forget_left_out()

    def step_alone(self, theirs: ScheduleState | None = None) -> None:
        """Take a step without the others. If they have made a global average of it, `theirs` is their schedule, some steps later."""
        self.drop_in_flight()
        now = self.algorithm.schedule.next(self.state.schedule)
        self.state.schedule = now if theirs is None else theirs._replace(k=now.k, C=theirs.C - (theirs.k - now.k))
        self.metrics.rounds["none"] += 1

    def shared_state(self) -> dict[str, Any]:
        """Return the method's state without messages in flight. All members have the same, except for what codes left out."""
        self.drop_in_flight()
        return saved_state(self.state, self.nodes)

    def take_over(self, saved: dict[str, Any], is_own: bool) -> None:
        """Go on from the state of another runner: this node's own before the members changed, or that of another member."""
        read_state(saved, self.state, self.nodes)()
        if not is_own:
            self.state.forget_left_out()
        self.metrics.H = self.state.schedule.H

    def drop_in_flight(self) -> None:
        """Forget the step and the messages that are under way."""
        self._step, self._mixing, self._sent = None, iter(()), ()
        if self.algorithm.delay and self.is_next_global:  # this node's part of that average was sent a step ago
            self.state.forget_left_out()
        self.state.in_flight = None

    # ---- models that are not finite ----------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether the model and the buffers of this node are finite."""
        x, buffers, state, full_state = self.nodes.x, self.nodes.buffers, self.nodes.state, self.nodes.full_state
        return all(all_finite(t, t.finite_check) for t in (x, buffers, state, full_state) if t.finite_check is not None)

    def take_mean_of(self, counts: bool) -> int:
        """Replace all models by the mean of those nodes for which `counts` is true, and restart. Returns the number of these nodes."""
        doing = "replacing a model that is not finite"
        engine = self.engine
        share = engine.mean([engine.full(float(counts))], self.k, doing=doing, finite_check=None)[0].wait().x.clone()
        count = round(float(share) * engine.n)
        for tensors in self.nodes[:2] if count else ():
            contributed = [tensors.copy(b) for b in range(len(tensors))]
            if not counts:
                for buffer in contributed:
                    buffer.tensor.zero_()
            for b, message in enumerate(engine.mean(contributed, self.k, doing=doing, finite_check=None)):
                tensors.write(b, message.wait().x * (engine.n / count))
        self.restart()
        return count
