"""Schedules: which steps average globally. A new schedule goes here: it implements `Schedule`.

`start()` returns the state, `is_global(state)` says whether the coming step is a global one, and `next(state, signal)` returns the state
after it. The signal is the number that a schedule follows, such as the loss: it travels inside each global average, so that all nodes get
the same. The state is an explicit value of plain numbers that are equal on every node: all nodes must always agree on the next round, or
they would wait for each other forever.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeGuard

Signal = Literal["loss", "lr"]


class ScheduleState(NamedTuple):
    """The state of a schedule before step k.

    Attributes:
        k: number of steps taken.
        C: steps since the last global average.
        H: the current period, None if there is none.
        F_init: the mean of `samples` losses (Adaptive).
        samples: number of losses in that mean.
        lr_max: the largest learning rate of a global average so far, 0 before the first (LearningRate).
    """

    k: int = 0
    C: int = 0
    H: int | None = None
    F_init: float = 0.0
    samples: int = 0
    lr_max: float = 0.0


class Schedule(ABC):
    """Decides which steps average globally. `signal` names the number that it follows, None if the steps alone decide."""

    signal: ClassVar[Signal | None] = None

    @property
    def needs_loss(self) -> bool:
        """Whether it follows the loss."""
        return self.signal == "loss"

    @abstractmethod
    def start(self) -> ScheduleState: ...

    @abstractmethod
    def is_global(self, state: ScheduleState) -> bool: ...

    @abstractmethod
    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState: ...

    @abstractmethod
    def resumed(self, state: ScheduleState) -> ScheduleState:
        """Return the state to go on from, after a run that may have had another schedule."""


def schedule_of(H: object) -> Schedule:
    """Return the schedule that a method's `H` stands for: a period in steps, or a schedule itself."""
    if isinstance(H, Schedule):
        return H
    if isinstance(H, bool) or not isinstance(H, int):
        raise ValueError(f"H must be a whole number >= 1, or a schedule such as rumor.LearningRate(3, 24), got H={H!r}")
    return Periodic(H)


def check_whole(name: str, value: int, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {name}={value!r}")


def _tick(state: ScheduleState, is_global: bool) -> ScheduleState:
    return state._replace(k=state.k + 1, C=0 if is_global else state.C + 1)


def _is_usable(signal: float | None) -> TypeGuard[float]:
    return signal is not None and math.isfinite(signal) and signal > 0


def _scaled(H: int, log_factor: float, H_max: int, whole: Callable[[float], int]) -> int:
    """Return whole(H exp(log_factor)), kept within 1 and H_max. It takes the logarithm because the factor itself could overflow."""
    if log_factor >= math.log(H_max):
        return H_max
    return min(max(whole(H * math.exp(min(log_factor, 700.0))), 1), H_max)


# the 1e-9 keeps rounding from turning a factor of exactly 1 (or 2, ...) into two different periods
def _rounded_up(period: float) -> int:
    return math.ceil(period - 1e-9)


def _nearest(period: float) -> int:
    return math.floor(period + 0.5 + 1e-9)


@dataclass(frozen=True)
class Never(Schedule):
    """No global averages: H = infinity, plain Gossip SGD."""

    def start(self) -> ScheduleState:
        return ScheduleState()

    def is_global(self, state: ScheduleState) -> bool:
        return False

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        return _tick(state, False)

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return self.start()._replace(k=state.k)


@dataclass(frozen=True)
class Periodic(Schedule):
    """A global average every H steps: step k is global if mod(k + 1, H) = 0 (Algorithm 1).

    >>> schedule = Periodic(3); state = schedule.start(); pattern = []
    >>> for k in range(6):
    ...     pattern.append(schedule.is_global(state)); state = schedule.next(state)
    >>> pattern
    [False, False, True, False, False, True]
    """

    H: int

    def __post_init__(self) -> None:
        check_whole("H", self.H, 1)

    def start(self) -> ScheduleState:
        return ScheduleState(H=self.H)

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == self.H

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        return _tick(state, self.is_global(state))

    def resumed(self, state: ScheduleState) -> ScheduleState:
        return self.start()._replace(k=state.k, C=min(state.C, self.H - 1))


@dataclass(frozen=True)
class Adaptive(Schedule):
    """Gossip-AGA's period (Algorithm 2): H = ceil((F_init / F_k)^exponent H_init), kept within 1 and H_max.

    F_k is the loss of step k, averaged over all nodes at a global average; F_init is its mean over the global averages of the first
    `warmup` steps (K_w in the paper), of at least one round. A loss that is not finite and positive changes nothing.
    """

    warmup: int
    H_init: int = 4
    H_max: int = 64
    exponent: float = 1.0
    signal = "loss"

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

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        is_global = self.is_global(state)
        after = _tick(state, is_global)
        if not is_global or not _is_usable(signal):
            return after
        if state.k < self.warmup or state.samples == 0:
            samples = state.samples + 1
            return after._replace(samples=samples, F_init=state.F_init + (signal - state.F_init) / samples)
        log_factor = self.exponent * (math.log(state.F_init) - math.log(signal))
        return after._replace(H=_scaled(self.H_init, log_factor, self.H_max, _rounded_up))

    def resumed(self, state: ScheduleState) -> ScheduleState:
        H = (
            min(state.H or self.H_init, self.H_max) if state.samples else self.H_init
        )  # no sample: it was another schedule, or had just started
        return state._replace(H=H, C=min(state.C, H - 1))


@dataclass(frozen=True)
class LearningRate(Schedule):
    """A period that grows as the learning rate falls: H is H_min (lr_max / lr)^power, rounded, and kept within H_min and H_max.

    lr is the learning rate of step k, averaged over all nodes at a global average; lr_max is the largest of them so far. So H = H_min while
    the learning rate warms up. H is rounded to the nearest number, so that H_min = 1 lasts until the learning rate has clearly fallen. A
    learning rate that is not finite and positive changes nothing. power = 2 is the Quadratic Synchronization Rule (Gu et al., "A Quadratic
    Synchronization Rule for Distributed Deep Learning", ICLR 2024).

    >>> schedule = LearningRate(H_min=2, H_max=16)
    >>> state, periods = schedule.start(), []
    >>> for lr in (0.1, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1):
    ...     state = schedule.next(state, lr); periods.append(state.H)
    >>> periods
    [2, 2, 2, 4, 4, 4, 4, 4]
    """

    H_min: int
    H_max: int
    power: float = 1.0
    signal = "lr"

    def __post_init__(self) -> None:
        check_whole("H_min", self.H_min, 1)
        check_whole("H_max", self.H_max, 1)
        if self.H_max < self.H_min:
            raise ValueError(f"H_min={self.H_min} is above H_max={self.H_max}, the longest period allowed: raise H_max")
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"power must be positive (2 is the Quadratic Synchronization Rule), got power={self.power!r}")

    def start(self) -> ScheduleState:
        return ScheduleState(H=self.H_min)

    def is_global(self, state: ScheduleState) -> bool:
        return state.C + 1 == state.H

    def next(self, state: ScheduleState, signal: float | None = None) -> ScheduleState:
        is_global = self.is_global(state)
        after = _tick(state, is_global)
        if not is_global or not _is_usable(signal):
            return after
        lr_max = max(state.lr_max, signal)
        log_factor = self.power * (math.log(lr_max) - math.log(signal))
        return after._replace(H=_scaled(self.H_min, log_factor, self.H_max, _nearest), lr_max=lr_max)

    def resumed(self, state: ScheduleState) -> ScheduleState:
        H = min(max(state.H or self.H_min, self.H_min), self.H_max) if state.lr_max else self.H_min  # no lr_max: see Adaptive
        return state._replace(H=H, C=min(state.C, H - 1))
