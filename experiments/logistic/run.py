"""Runs many methods at once on one problem and the same samples, with Rumor's algorithms on its stacked engine.

X is [methods, trials, n, d]. All methods share one gradient step. Then each method mixes its own part of X.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

import rumor
from logistic.problem import Problem
from logistic.transient import EVERY
from rumor.engines import StackedBuckets
from rumor.methods import Algorithm, Nodes, State

STEPS = 10_000
LR, HALVED_EVERY = 0.2, 1_000
GAP_EVERY = 10  # records between two values of the objective, which costs more than the steps

Progress = Callable[[int], object]  # called with the number of steps done


@dataclass(frozen=True, eq=False)
class Result:
    """The errors of one method, recorded every EVERY steps: means over the nodes, with one column per trial."""

    node_error: Tensor  # [records, trials], 1/n sum_i ||x_i - x*||^2
    mean_error: Tensor  # [records, trials], ||xbar - x*||^2: the error if all nodes averaged at this step
    gap: Tensor  # [records / GAP_EVERY, trials], f(xbar) - f*
    global_rounds: float  # the share of steps that are global


@dataclass
class _Method:
    """One algorithm on its part of X. With Gossip-AGA each trial has its own period, and so its own state."""

    algorithm: Algorithm
    parts: list[tuple[Nodes, State]]
    global_rounds: int = 0

    def step(self, loss: Tensor | None) -> None:
        for trial, (nodes, state) in enumerate(self.parts):
            own = loss[trial, :, None] if self.algorithm.needs_loss and loss is not None else None
            self.global_rounds += self.algorithm.step(nodes, state, own).kind == "global"


class Walk:
    """All nodes of all trials of all methods, which take their steps together."""

    def __init__(self, problem: Problem, algorithms: Sequence[Algorithm], trials: int):
        n, d, device = problem.n, problem.d, problem.rows.device
        self.problem = problem
        self.X = torch.zeros(len(algorithms), trials, n, d, dtype=torch.float64, device=device)
        self.first_row = (torch.arange(n, device=device) * problem.rows.shape[1]).to(torch.int32)
        engine = rumor.Stacked(n, device)
        self.methods = [_method(algorithm, engine, X) for algorithm, X in zip(algorithms, self.X, strict=True)]
        self.needs_loss = any(algorithm.needs_loss for algorithm in algorithms)
        self._product = torch.empty_like(self.X)
        self._ones = torch.ones(d, dtype=torch.float64, device=device)

    def step(self, sample: Tensor, lr: Tensor) -> None:
        """Computes x_i <- x_i - lr grad F_i(x_i; sample), then mixes. sample: [trials, n], one row number for each node."""
        rows = self.problem.all_rows.index_select(0, (sample + self.first_row).flatten()).view(self.X.shape[1:])
        # A product with ones is faster than torch's sum over short rows.
        margin = torch.mul(self.X, rows, out=self._product).view(-1, len(self._ones)) @ self._ones  # [methods trials n]
        pull = torch.sigmoid(-margin).mul_(lr).view(*self.X.shape[:-1], 1)  # minus the gradient is sigmoid(-margin) rows
        losses = softplus(-margin).view(self.X.shape[:-1]) if self.needs_loss else None
        if self.problem.l2:
            self.X.mul_(1 - self.problem.l2 * lr)
        self.X.addcmul_(pull, rows)
        for m, method in enumerate(self.methods):
            method.step(losses[m] if losses is not None else None)

    def walk(self, k: int, samples: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """Takes steps k, k + 1, ... Returns node errors [records, methods, trials] and mean models [records, methods, trials, d]."""
        errors, means = [], []
        for j in range(len(samples)):
            if (k + j) % EVERY == 0:
                errors.append((self.X - self.problem.minimizer).square_().sum((-2, -1)) / self.problem.n)
                means.append(self.X.mean(-2))
            self.step(samples[j], lr[j])
        return torch.stack(errors), torch.stack(means)


def _method(algorithm: Algorithm, engine: rumor.Stacked, X: Tensor) -> _Method:
    parts = list(X) if algorithm.needs_loss else [X]
    nodes = [Nodes(StackedBuckets([part]), StackedBuckets([]), engine) for part in parts]
    return _Method(algorithm, [(some, algorithm.start(some)) for some in nodes])


class _Replay:
    """`walk` over one block of steps as a CUDA graph. On a GPU the arithmetic is fast, and launching it step by step is slow.

    The block length is a multiple of every period (of schedules, topologies and records), so every block does the same.
    """

    def __init__(self, walk: Walk, k: int, samples: Tensor, lr: Tensor):
        self.samples, self.lr = samples.clone(), lr.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.errors, self.means = walk.walk(k, self.samples, self.lr)

    def __call__(self, samples: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        self.samples.copy_(samples)
        self.lr.copy_(lr)
        self.graph.replay()
        return self.errors.clone(), self.means.clone()


def learning_rates(steps: int) -> Tensor:
    """Returns the learning rates [steps]: LR, halved every HALVED_EVERY steps."""
    return LR * 0.5 ** (torch.arange(steps) // HALVED_EVERY).double()


def block_length(algorithms: Sequence[Algorithm]) -> int:
    periods = [EVERY]
    for algorithm in algorithms:
        periods += [algorithm.topology.period, getattr(algorithm.schedule, "H", 1)]  # type: ignore[attr-defined]
    return math.lcm(*periods)


def run(
    problem: Problem, algorithms: Sequence[Algorithm], trials: int, steps: int = STEPS, seed: int = 0, progress: Progress = lambda _: None
) -> list[Result]:
    """Runs all algorithms on the same samples. The batch size is 1; samples are drawn with replacement and depend on `seed` only."""
    device = problem.rows.device
    draw = torch.Generator(device).manual_seed(seed)
    n, M = problem.rows.shape[:2]
    samples = torch.randint(M, (steps, trials, n), generator=draw, dtype=torch.int16, device=device)
    lr = learning_rates(steps).to(device)
    walk = Walk(problem, algorithms, trials)
    replay, recorded, k = None, [], 0
    graphed = device.type == "cuda" and not walk.needs_loss
    block = block_length(algorithms) if graphed else 10 * EVERY  # the bar moves after each block
    while k < steps:
        # With graphs, the steps that do not fill a block run first, without a graph. They also do the warm-up that a graph needs.
        length = (steps % block or block) if graphed and k == 0 else min(block, steps - k)
        part = slice(k, k + length)
        if graphed and k > 0:
            replay = replay or _Replay(walk, k, samples[part], lr[part])
        recorded.append(replay(samples[part], lr[part]) if replay else walk.walk(k, samples[part], lr[part]))
        k += length
        progress(length)
    errors, means = (torch.cat(parts) for parts in zip(*recorded, strict=True))
    return [_result(problem, errors[:, m], means[:, m], method, steps) for m, method in enumerate(walk.methods)]


def _result(problem: Problem, errors: Tensor, means: Tensor, method: _Method, steps: int) -> Result:
    return Result(
        errors.cpu(),
        (means - problem.minimizer).square().sum(-1).cpu(),
        problem.gap(means[::GAP_EVERY]).cpu(),
        _global_rounds(method, steps),
    )


def _global_rounds(method: _Method, steps: int) -> float:
    schedule = method.algorithm.schedule  # type: ignore[attr-defined]
    if isinstance(schedule, rumor.Adaptive):
        return method.global_rounds / (steps * len(method.parts))
    return 1 / schedule.H if isinstance(schedule, rumor.Periodic) else 0.0  # computed, because a replayed graph does not count
