"""Trains one node with one method after the other, and evaluates it from time to time. All methods start from the same model and see the
same data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rumor.averager import Averager
from rumor.demo.digits import Digits
from rumor.demo.methods import Method
from rumor.demo.processes import TIMEOUT
from rumor.engines.processes.process_group import joined

LR, LAST_LR = 0.1, 0.02  # the learning rate falls linearly, as in real trainings: with smaller steps the nodes come closer together
MOMENTUM, BATCH, WIDTH = 0.9, 32, 256
POINTS = 20  # points of a learning curve
AT_THE_END = 12  # final results are averages over this many steps, a multiple of the default H = 6


@dataclass(frozen=True)
class Point:
    """One node's evaluation after `step` steps. Seconds and bytes are those of the training, without the evaluation."""

    step: int
    mean_accuracy: float  # accuracy of the mean of all nodes on the test set
    own_accuracy: float
    squared_distance: float  # of this node's model to the mean
    bytes_sent: int
    seconds: float


def watched_steps(steps: int) -> set[int]:
    """The steps after which to evaluate: evenly spaced ones, and all of the last ones, since nodes drift between two global averages."""
    return set(range(steps, 0, -math.ceil(steps / POINTS))) | set(range(max(1, steps - AT_THE_END + 1), steps + 1))


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(dim=1) == y).float().mean())


class Node:
    """A model with its optimizer. DistributedDataParallel averages its gradients, or an Averager averages its parameters."""

    def __init__(self, method: Method, seed: int, steps: int):
        self.model = build_model(seed)
        self.averager = Averager(self.model, method.algorithm)  # with DDP it only measures, and step() is never called
        self.ddp = DistributedDataParallel(self.model, process_group=self.averager.engine.group) if method.with_ddp else None
        self.opt = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, LAST_LR / LR, steps)
        self.bytes_sent = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.cross_entropy((self.ddp or self.model)(x), y)
        self.opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.opt.step()
        if self.ddp is not None:
            n = self.averager.engine.n
            self.bytes_sent += 2 * (n - 1) * sum(p.nbytes for p in self.model.parameters()) // n  # as Metrics counts an all-reduce
        else:
            before = self.averager.metrics.bytes_sent
            self.averager.step(loss, lr=float(self.schedule.get_last_lr()[0]))
            self.bytes_sent += self.averager.metrics.bytes_sent - before  # the bytes of the evaluation do not count
        self.schedule.step()

    @torch.no_grad()
    def flat(self) -> Tensor:
        """A copy of the parameters in one row."""
        return torch.cat([p.reshape(-1) for p in self.model.parameters()])

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        return accuracy(self.model, x, y)


@dataclass(frozen=True)
class Training:
    """The job of one process: train with one method after the other, and evaluate after the `watched` steps.

    It sends (number of the method, Point).
    """

    rank: int
    n: int
    rendezvous: str  # a file that does not exist yet
    methods: Sequence[Method]
    digits: Digits
    steps: int
    watched: set[int]
    seed: int

    def __call__(self, send: Callable[[tuple[int, Point]], None]) -> None:
        with joined("gloo", TIMEOUT, init_method=f"file://{self.rendezvous}", rank=self.rank, world_size=self.n):
            for i, method in enumerate(self.methods):
                self._train(method, lambda point, i=i: send((i, point)))  # type: ignore[misc]

    def _train(self, method: Method, show: Callable[[Point], Any]) -> None:
        x, y, test_x, test_y = (torch.from_numpy(part) for part in self.digits)
        node = Node(method, self.seed, self.steps)
        draws = torch.Generator().manual_seed(1000 * self.seed + self.rank)
        seconds, began = 0.0, time.perf_counter()
        for step in range(1, self.steps + 1):
            batch = torch.randint(len(x), (BATCH,), generator=draws)
            node.step(x[batch], y[batch])
            if step in self.watched:
                seconds += time.perf_counter() - began
                own_accuracy, own = node.accuracy(test_x, test_y), node.flat()
                with node.averager.averaged():
                    mean_accuracy, distance = node.accuracy(test_x, test_y), float((own - node.flat()).square().sum())
                show(Point(step, mean_accuracy, own_accuracy, distance, node.bytes_sent, seconds))
                began = time.perf_counter()
        node.averager.finish()
