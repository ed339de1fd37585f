"""Timer: times actions that all processes run at the same time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from rumor.engines.processes.process_group import ProcessGroup
from rumor.probe.results import Timing

WARM_UP = 3  # rounds that are not measured: the first ones open connections and allocate memory
SMALL_STEPS = 10  # steps in a sample of the tiny model: a single one is too short to be timed
WHOLE = 4  # training steps in a sample of whole steps, at least


class Contestant(NamedTuple):
    """A way to train: `make()` returns a context, and inside it, the training step. A sample has whole periods of such steps."""

    make: Callable[[], AbstractContextManager[Callable[[], object]]]
    period: int = 1


class Timer:
    """Times actions that all processes run at the same time. A sample is the time of the slowest process, from a common start.

    Attributes:
        timings: the results, by name: the median of the samples, with the fastest and the slowest one.
    """

    def __init__(self, engine: ProcessGroup, repeats: int, show: Callable[[str, Timing], object]):
        self.engine, self.repeats, self.show, self._k = engine, repeats, show, 0
        self.timings: dict[str, Timing] = {}

    def time(self, name: str, action: Callable[[], object], steps: int = 1) -> None:
        """Times one of `steps` calls in a row, `repeats` times."""
        for _ in range(WARM_UP * min(steps, SMALL_STEPS)):
            action()
        self.add(name, [self.sample(action, steps) for _ in range(self.repeats)])

    def add(self, name: str, samples: list[float]) -> None:
        """Adds this process's samples to the timings."""
        slowest = [max(of_ranks) for of_ranks in zip(*self._gather(samples), strict=True)]
        self.timings[name] = Timing(statistics.median(slowest), min(slowest), max(slowest))
        self.show(name, self.timings[name])

    def sample(self, action: Callable[[], object], steps: int, lead_in: int = 0) -> float:
        """Returns the seconds of one of `steps` calls, after `lead_in` that are not timed."""
        _wait_for_gpu()
        self._gather([0.0])  # all processes start together
        for _ in range(lead_in):
            action()
        began = time.perf_counter()
        for _ in range(steps):
            action()
        _wait_for_gpu()
        return (time.perf_counter() - began) / steps

    def _gather(self, mine: list[float]) -> list[list[float]]:
        """Returns the numbers of every rank. Each rank fills its own row of a table with n times its numbers; the mean is the table."""
        everyone = torch.zeros(self.engine.n, len(mine), dtype=torch.float64, device=self.engine.device)
        everyone[self.engine.rank] = self.engine.n * torch.tensor(mine, dtype=torch.float64)
        self._k += 1
        means: list[list[float]] = self.engine.mean([everyone.view(-1)], self._k)[0].wait().x.view(everyone.shape).tolist()
        return means


def in_turns(timer: Timer, contestants: Mapping[str, Contestant]) -> None:
    """Times a training step of each contestant, in turns. A sample has several steps, so a third of the samples will do.

    With delay=1, a message is in flight when the clock stops. One step that is not timed goes before, so one was in flight at the start.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(max(min(3, timer.repeats), timer.repeats // 3)):
        for name, (make, period) in contestants.items():
            with make() as step:
                for _ in range(WARM_UP - 1):
                    step()
                samples[name].append(timer.sample(step, period * math.ceil(WHOLE / period), lead_in=1))
    for name, found in samples.items():
        timer.add(name, found)


def _wait_for_gpu() -> None:
    """Waits until the GPU has finished its queued work. The model may be on a GPU with any backend."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
