"""Run: one algorithm at work on one engine. What the Averager and the Simulator have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rumor.algorithm import Algorithm, Flight, Round, wait_for
from rumor.engine import NO_SCALARS, Buckets, Done, Engine, Mixed, Pending, accumulator, all_finite, largest
from rumor.schedule import ScheduleState

FORMAT = 2  # of the state


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """No history is recorded, and what is made inside is fit for later steps, also where the caller evaluates in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Run:
    """The model `x` and the float `buffers` of the nodes that `engine` has here, and the state of `algorithm` on them."""

    def __init__(self, algorithm: Algorithm, engine: Engine, x: Buckets, buffers: Buckets):
        self.algorithm, self.engine, self.x, self.buffers = algorithm, engine, x, buffers
        buffers.judge = largest if all_finite(buffers, largest) else None  # BatchNorm's must stay so; a mask is infinite by design
        self.state = algorithm.start(x, engine)
        self.metrics = engine.metrics
        self.metrics.H = self.state.schedule.H
        self._mixing: Iterator[int] | None = None  # the rest of a step that has begun
        self._in_place = 0  # buckets of that step

    @property
    def k(self) -> int:
        """Steps so far."""
        return self.state.schedule.k

    @property
    def begun(self) -> int:
        """Steps so far, with one that is under way."""
        return self.k + self.is_under_way

    def round(self) -> Round:
        """What the coming step will do."""
        return self.algorithm.round(self.state)

    def begin(self, loss: Tensor | None, lr: float | None) -> None:
        """Sends what this step sends. It ends with settle()."""
        if self.algorithm.needs_loss and loss is None:
            raise ValueError("Gossip-AGA adapts its period to the loss: call step(loss) with this step's loss")
        if self.algorithm.needs_lr:
            lr = _as_number(lr)
        self._kind = self.round()
        self.metrics.step_begins(self.k)
        with record_function(f"rumor::{self._kind}"), self.metrics.at_work():
            loss = loss if self.algorithm.needs_loss else None
            self._mixing = self.algorithm.begin(self.x, self.buffers, self.state, self.engine, loss, lr)
        self._in_place = 0

    @property
    def is_under_way(self) -> bool:
        """Has a step begun that has not ended?"""
        return self._mixing is not None

    def settle(self, buckets: int | None = None) -> bool:
        """Mixes the first `buckets` buckets of the step that has begun, all that is left of it if None. Was that the step's end?"""
        if self._mixing is None or (buckets is not None and buckets <= self._in_place):
            return False
        mixing, self._mixing = self._mixing, None  # a step that fails here is over
        with record_function(f"rumor::{self._kind}"), self.metrics.at_work():
            for b in mixing:
                self._in_place = b + 1
                if self._in_place == buckets:
                    self._mixing = mixing
                    return False
        self.metrics.rounds[self._kind] += 1
        self.metrics.H = self.state.schedule.H
        return True

    def step(self, loss: Tensor | None, lr: float | None) -> None:
        self.begin(loss, lr)
        self.settle()

    def finish(self) -> None:
        with record_function("rumor::finish"):
            self.algorithm.finish(self.x, self.buffers, self.state, self.engine)

    def mean(self) -> tuple[list[Pending], list[Pending]]:
        """The mean of all nodes, of the model and of the buffers; what is under way and the algorithm's state stay as they are."""
        doing = "in averaged()"
        with record_function("rumor::mean"):
            shares = [self.algorithm.share(self.x, b, self.state) for b in range(len(self.x))]
            model = self.engine.mean(shares, self.k, doing=doing)
            return model, self.engine.mean(_shapes(self.buffers), self.k, doing=doing, judge=self.buffers.judge)

    def show_mean(self) -> None:
        """The model becomes the mean of all nodes', buffers included."""
        for tensors, means in zip((self.x, self.buffers), self.mean(), strict=True):
            for b, message in enumerate(means):
                tensors.write(b, message.wait().x)

    def consensus_distance(self) -> float:
        """1/n sum_i ||x_i - x_bar||^2."""
        squares: Tensor | None = None  # [*nodes, 1]
        for b in range(len(self.x)):
            own = self.x.peek(b)
            mean = self.engine.mean([own], self.k, doing="in consensus_distance()")[0].wait().x
            square = (own.to(mean) - mean).square_().sum(dim=-1, keepdim=True, dtype=torch.float64)
            squares = square if squares is None else squares + square.to(squares)
        assert squares is not None
        distance = self.engine.mean([torch.zeros_like(squares)], self.k, squares, doing="in consensus_distance()")[0].wait().scalars
        self.metrics.consensus_distance = float(distance)
        return self.metrics.consensus_distance

    # ---- state -------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, for `torch.load(..., weights_only=True)`. Waits for what is under way, and includes it."""
        state = self.state
        return {
            "format": FORMAT,
            "algorithm": repr(self.algorithm),
            "schedule": state.schedule._asdict(),
            "buckets": {name: _joined(tensors) for name, tensors in state.buckets.items()},
            "scalars": {name: tensor.clone() for name, tensor in state.scalars.items()},
            "flight": None if state.flight is None else self._saved(state.flight),
            "rounds": dict(self.metrics.rounds),
            "bytes_sent": self.metrics.bytes_sent,
        }

    def check_state(self, saved: dict[str, Any]) -> None:
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError("this is not a state of Rumor's (or one of another version): load what state_dict() returned")
        if saved["algorithm"] != repr(self.algorithm):
            raise ValueError(f"this state is of {saved['algorithm']}, but the algorithm here is {self.algorithm!r}")

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.check_state(saved)
        state = self.state
        # all that can be refused comes before the first change
        buckets = {name: _cut_like(saved["buckets"][name], tensors) for name, tensors in state.buckets.items()}
        flight = None if saved["flight"] is None else self._restored(saved["flight"])
        self.abandon()  # its buffers are about to be used again
        for name, tensors in state.buckets.items():
            for tensor, value in zip(tensors, buckets[name], strict=True):
                tensor.copy_(value)
        state.scalars = {name: saved["scalars"][name].to(tensor, copy=True) for name, tensor in state.scalars.items()}
        state.schedule, state.flight = ScheduleState(**saved["schedule"]), flight
        self.metrics.rounds.clear()
        self.metrics.rounds.update(saved["rounds"])
        self.metrics.bytes_sent = saved["bytes_sent"]
        self.metrics.H = state.schedule.H

    def start_anew(self, schedule: dict[str, Any] | None = None) -> None:
        """With all nodes' models alike: nothing is under way, and the schedule goes on (from `schedule`, if given)."""
        self.abandon()
        now = self.algorithm.schedule.resumed(self.state.schedule if schedule is None else ScheduleState(**schedule))
        self.state = self.algorithm.start(self.x, self.engine)
        self.state.schedule = now
        self.metrics.H = now.H

    def abandon(self) -> None:
        """What is under way arrives, and is not used."""
        self._mixing = None
        wait_for(self.state.flight, or_fail=False)
        self.state.flight, self.state.expecting = None, False

    def is_finite(self) -> bool:
        """As the others judge it."""
        return all(all_finite(tensors, tensors.judge) for tensors in (self.x, self.buffers) if tensors.judge is not None)

    def take_mean_of(self, counts: bool) -> int:
        """All nodes take the mean of the models of those that count, and go on from there. How many do?"""
        doing = "replacing a model that is not finite"
        share = self.engine.mean([self.engine.full(float(counts))], self.k, doing=doing, judge=None)[0].wait().x.clone()
        count = round(float(share) * self.engine.n)
        for tensors in (self.x, self.buffers) if count else ():
            brought = [tensors.read(b) if counts else tensors.read(b).zero_() for b in range(len(tensors))]
            for b, message in enumerate(self.engine.mean(brought, self.k, doing=doing, judge=None)):
                tensors.write(b, message.wait().x * (self.engine.n / count))
        self.start_anew()
        return count

    def _saved(self, flight: Flight) -> dict[str, Any]:
        pulls = bool(flight.sent) and not flight.relayed
        return {
            "sent": _joined(flight.sent) if flight.sent else None,
            "relayed": flight.relayed,
            "pending": _pulls(flight.pending, _shapes(self.x), flight.sent) if pulls else _results(flight.pending, _shapes(self.x)),
            "buffers": _results(flight.buffers, _shapes(self.buffers)) if flight.buffers else None,
            "loss": flight.loss.wait().scalars.clone() if flight.loss else None,
        }

    def _restored(self, saved: dict[str, Any]) -> Flight:
        x, buffers = _shapes(self.x), _shapes(self.buffers)
        return Flight(
            sent=[] if saved["sent"] is None else [part.to(like.dtype) for part, like in zip(_cut_like(saved["sent"], x), x, strict=True)],
            pending=_arrived(saved["pending"], x),
            buffers=_arrived(saved["buffers"], buffers) if saved["buffers"] is not None else [],
            loss=None if saved["loss"] is None else Done(Mixed(saved["loss"], saved["loss"])),
            relayed=saved["relayed"],
        )


def _as_number(lr: object) -> float:
    """A learning rate as schedulers and optimizers have it, a tensor included."""
    try:
        number = float(lr)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        call = "step(loss, lr=scheduler.get_last_lr()[0]), before scheduler.step()"
        raise ValueError(f"SlowMo needs the current learning rate: call {call}; got lr={lr!r}")
    return number


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor, so that a state does not depend on how the model was cut into buckets."""
    return torch.cat([t.reshape(-1) for t in tensors])


def _cut_like(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [t.numel() for t in tensors]
    if joined.numel() != sum(sizes):
        raise ValueError(f"this state is of a model with {joined.numel()} numbers, but the model here has {sum(sizes)}")
    return [part.view(t.shape).to(t.device) for part, t in zip(torch.split(joined, sizes), tensors, strict=True)]


def _shapes(x: Buckets) -> list[Tensor]:
    """The buckets as they are now: what has their shapes, dtypes and devices."""
    return [x.peek(b) for b in range(len(x))]


def _results(pending: Sequence[Pending], like: Sequence[Tensor]) -> dict[str, Any]:
    """What wait() gives, to be restored as such."""
    parts, scalars = [], []
    for message, shaped in zip(pending, like, strict=True):
        mixed = message.wait()
        parts.append(mixed.x.expand(shaped.shape).clone())  # a mean may be one row for all nodes
        scalars.append(mixed.scalars.clone())
    return {"x": _joined(parts), "scalars": scalars, "weights": [1.0] * len(parts)}


def _pulls(pending: Sequence[Pending], like: Sequence[Tensor], sent: Sequence[Tensor]) -> dict[str, Any]:
    """What pull() gives."""
    parts, weights = [], []
    for message, shaped, own in zip(pending, like, sent, strict=True):
        towards, weight, _ = message.pull().guarded(own)
        parts.append(towards.expand(shaped.shape).clone())
        weights.append(weight)
    return {"x": _joined(parts), "scalars": [NO_SCALARS] * len(parts), "weights": weights}


def _arrived(saved: dict[str, Any], like: Sequence[Tensor]) -> list[Pending]:
    parts = zip(_cut_like(saved["x"], like), saved["scalars"], saved["weights"], like, strict=True)
    return [Done(Mixed(x.to(accumulator(t.dtype), copy=True), scalars.to(t.device)), weight) for x, scalars, weight, t in parts]
