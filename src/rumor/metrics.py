"""Metrics: counters of a run, which cost nothing to leave on. Times are the host's; a GPU may be busy with something else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function


def span(name: str) -> AbstractContextManager[object]:
    """Name what happens inside in the trace of torch.profiler. Without a profiler it does nothing: `record_function` alone takes 5 us."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else _NOTHING


_NOTHING = nullcontext()


class Writer(Protocol):
    """The part of TensorBoard's SummaryWriter that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


@dataclass
class Metrics:
    """Counters of one node (of the average node, in a Simulator).

    Attributes:
        rounds: number of steps of each kind: "gossip", "global" or "none".
        bytes_sent: bytes that this node has sent; an all-reduce of b bytes counts as 2 (n - 1)/n b, as in a ring.
        seconds_computing: time from the end of one step() to the next: forward, backward, optimizer, and loading of data.
        seconds_packing: time in step() that was not spent waiting: packing, sending and mixing.
        seconds_waiting: time that the host waited for messages.
        waited_for: the part of it that gossip and join() waited for each node: a slow node stands out in the counters of all neighbours.
        membership_changes: how often the members of an elastic group have changed, this node's own start included.
        seconds_regrouping: time that this node spent waiting for other members, connecting to them, and handing over state.
        rescues: how often this node has taken the mean of the others because its own model was not finite (`rescue=`).
        consensus_distance: 1/n sum_i ||x_i - x_bar||^2 at the last call of consensus_distance(), None before the first.
        H: the current period, None if there is none.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    seconds_computing: float = 0.0
    seconds_packing: float = 0.0
    seconds_waiting: float = 0.0
    waited_for: dict[int, float] = field(default_factory=dict)
    membership_changes: int = 0
    seconds_regrouping: float = 0.0
    rescues: int = 0
    consensus_distance: float | None = None
    H: int | None = None
    _step: int | None = field(default=None, init=False, repr=False)  # the last step that has begun
    _since: float = field(default=0.0, init=False, repr=False)  # when computing began, moved later by the time of interruptions
    _waited: float = field(default=0.0, init=False, repr=False)  # seconds_waiting at that time

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count the time inside as packing, except for what is spent waiting."""
        began, waited = time.perf_counter(), self.seconds_waiting
        try:
            yield
        finally:
            took, waiting = time.perf_counter() - began, self.seconds_waiting - waited
            self.seconds_packing += took - waiting
            self._since += took - waiting  # step_begins() subtracts what was spent waiting

    def step_begins(self, k: int) -> None:
        """Count the time since the last step as computing, except for packing and waiting."""
        self._step = k
        now, idle = time.perf_counter(), self.seconds_waiting - self._waited
        if self._since:
            self.seconds_computing += now - self._since - idle
        self._since, self._waited = now, self.seconds_waiting

    def locate(self, doing: str) -> str:
        """Return `doing` with the step, for errors."""
        return doing if " at step " in doing or self._step is None else f"{doing} (in or after step {self._step})"

    def scalars(self) -> dict[str, float]:
        """Return what can be plotted over the steps, by name. Values that are None are left out."""
        names = ("consensus_distance", "H", "bytes_sent", "seconds_waiting")
        return {name: float(value) for name in names if (value := getattr(self, name)) is not None}

    def log_to(self, writer: Writer, step: int, loss: Tensor | float | None = None) -> None:
        """Write `scalars()`, and the loss, as rumor/... at `step`. Each rank may write to a folder of its own. Not a collective.

        `consensus_distance` is the value of the last averager.consensus_distance(). That is a collective: call it first, on every rank.

        Args:
            writer: TensorBoard's SummaryWriter, or any object with add_scalar(tag, value, step). For Weights & Biases:
                `wandb.log({f"rumor/{name}": value for name, value in averager.metrics.scalars().items()}, step=step)`.
            step: the step that the values belong to.
            loss: this rank's loss, if you want to write it as well.
        """
        of_loss = {} if loss is None else {"loss": loss.item() if isinstance(loss, Tensor) else loss}
        for name, value in {**of_loss, **self.scalars()}.items():
            writer.add_scalar(f"rumor/{name}", value, step)

    def as_dict(self) -> dict[str, Any]:
        """Return all counters as plain values, for JSON or a log of your own. `scalars()` returns the few that loggers show."""
        return {name: value for name, value in {**asdict(self), "rounds": dict(self.rounds)}.items() if not name.startswith("_")}
