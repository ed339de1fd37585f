"""Schedules: which steps average globally. A new schedule goes here: it implements `Schedule`.

`start()` returns the state, `is_global(state)` says whether the coming step is a global one, and `next(state, loss)` returns the state
after it. The state is an explicit value of plain numbers that are equal on every node: all nodes must always agree on the next round, or
they would wait for each other forever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ScheduleState(NamedTuple):
    """The state before step k: C steps since the last global round, the current period H, and the mean F_init of `samples` losses."""

    k: int = 0
    C: int = 0
    H: int | None = None
    F_init: float = 0.0
    samples: int = 0


class Schedule(Protocol):
    """Decides which steps average globally."""

    @property
    def needs_loss(self) -> bool: ...
    def start(self) -> ScheduleState: ...
    def is_global(self, state: ScheduleState) -> bool: ...
    def next(self, state: ScheduleState, loss: float | None = None) -> ScheduleState: ...
    def resumed(self, state: ScheduleState) -> ScheduleState: ...  # goes on from a run that may have had another schedule


def check_whole(name: str, value: int, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {name}={value!r}")


def _tick(state: ScheduleState, is_global: bool) -> ScheduleState:
    return state._replace(k=state.k + 1, C=0 if is_global else state.C + 1)


@dataclass(frozen=True)
class Never:
    """No global rounds: H = infinity, plain Gossip SGD."""

    needs_loss = False

    def start(self) -> ScheduleState:
        return ScheduleState()

    def is_global(self, state: ScheduleState) -> bool:
        return False

    def next(self, state: ScheduleState, loss: float | None = None) -> ScheduleState:
        return _tick(state, False)

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return self.start()._replace(k=state.k)


@dataclass(frozen=True)
class Periodic:
    """A global round every H steps: step k is global if mod(k + 1, H) = 0 (Algorithm 1).

    >>> schedule = Periodic(3); state = schedule.start(); pattern = []
    >>> for k in range(6):
    ...     pattern.append(schedule.is_global(state)); state = schedule.next(state)
    >>> pattern
    [False, False, True, False, False, True]
    """

    H: int
    needs_loss = False

    def __post_init__(self) -> None:
        check_whole("H", self.H, 1)

    def start(self) -> ScheduleState:
        return ScheduleState(H=self.H)

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == self.H

    def next(self, state: ScheduleState, loss: float | None = None) -> ScheduleState:
        return _tick(state, self.is_global(state))

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return self.start()._replace(k=state.k, C=min(state.C, self.H - 1))


@dataclass(frozen=True)
class Adaptive:
    """Gossip-AGA's period (Algorithm 2): H = ceil((F_init / F_k)^exponent H_init), kept within 1 and H_max.

    F_k is the loss of step k, averaged over all nodes at a global round; F_init is its mean over the global rounds of the first
    `warmup` steps (K_w in the paper), of at least one round. A loss that is not finite and positive changes nothing.
    """

    warmup: int
    H_init: int = 4
    H_max: int = 64
    exponent: float = 1.0
    needs_loss = True

    def __post_init__(self) -> None:
        check_whole("warmup", self.warmup, 0)
        check_whole("H_init", self.H_init, 1)
        check_whole("H_max", self.H_max, 1)
        if self.H_max < self.H_init:
            raise ValueError(f"H_init={self.H_init} is above H_max={self.H_max}, the longest period allowed: raise H_max")
        if not (math.isfinite(self.exponent) and self.exponent > 0):
            raise ValueError(f"exponent must be positive (the paper uses 1, its theory 1/4), got exponent={self.exponent!r}")

    def start(self) -> ScheduleState:
        return ScheduleState(H=self.H_init)

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == state.H

    def next(self, state: ScheduleState, loss: float | None = None) -> ScheduleState:
        is_global = self.is_global(state)
        after = _tick(state, is_global)
        if not is_global or loss is None or not (math.isfinite(loss) and loss > 0):
            return after
        if state.k < self.warmup or state.samples == 0:
            samples = state.samples + 1
            return after._replace(samples=samples, F_init=state.F_init + (loss - state.F_init) / samples)
        log_ratio = self.exponent * (math.log(state.F_init) - math.log(loss))  # a quotient could overflow
        # the 1e-9 keeps rounding from turning a ratio of exactly 1 (or 2, ...) into two different periods
        H = math.ceil(math.exp(min(log_ratio, 700.0)) * self.H_init - 1e-9) if log_ratio < math.log(self.H_max) else self.H_max
        return after._replace(H=min(max(H, 1), self.H_max))

    def resumed(self, state: ScheduleState) -> ScheduleState:
        H = (
            min(state.H or self.H_init, self.H_max) if state.samples else self.H_init
        )  # no sample: it was another schedule, or had just started
        return state._replace(H=H, C=min(state.C, H - 1))
