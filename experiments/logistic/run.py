"""Many methods at once on one problem, all on the same samples, by the core's algorithms on its stacked engine.

X is [methods, trials, n, d]. The gradient step is one for all methods; the mixing is each method's own `step` on its part of X.
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
from rumor.algorithm import Algorithm, State
from rumor.engine import Leaves

STEPS = 10_000
LR, HALVED_EVERY = 0.2, 1_000
GAP_EVERY = 10  # records between two values of the objective: it costs more than the steps do

Progress = Callable[[int], object]  # is told how many steps were done
NO_BUFFERS = Leaves([])


@dataclass(frozen=True, eq=False)
class Result:
    """What a method did, every EVERY steps: means over the nodes, one column a trial."""

    node_error: Tensor  # [records, trials], 1/n sum_i ||x_i - x*||^2
    mean_error: Tensor  # [records, trials], ||xbar - x*||^2: what one average at this step would leave
    gap: Tensor  # [records / GAP_EVERY, trials], f(xbar) - f*
    global_rounds: float  # their share of all steps


@dataclass
class _Method:
    """One algorithm on its part of X; Gossip-AGA's trials each have a period, hence a state, of their own."""

    algorithm: Algorithm
    engine: rumor.Stacked
    parts: list[tuple[Leaves, State]]
    global_rounds: int = 0

    def step(self, loss: Tensor | None) -> None:
        for trial, (leaves, state) in enumerate(self.parts):
            self.global_rounds += self.algorithm.round(state) == "global"
            own = loss[trial, :, None] if self.algorithm.needs_loss and loss is not None else None
            self.algorithm.step(leaves, NO_BUFFERS, state, self.engine, own, None)


class Walk:
    """All nodes of all trials of all methods, taken step by step."""

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
        """x_i <- x_i - lr grad F_i(x_i; sample), then each method's mixing. sample: [trials, n], one row number for each node."""
        rows = self.problem.all_rows.index_select(0, (sample + self.first_row).flatten()).view(self.X.shape[1:])
        # the sum over d as a product: torch sums short rows slowly
        margin = torch.mul(self.X, rows, out=self._product).view(-1, len(self._ones)) @ self._ones  # [methods trials n]
        pull = torch.sigmoid(-margin).mul_(lr).view(*self.X.shape[:-1], 1)  # minus the gradient is sigmoid(-margin) rows
        losses = softplus(-margin).view(self.X.shape[:-1]) if self.needs_loss else None
        if self.problem.l2:
            self.X.mul_(1 - self.problem.l2 * lr)
        self.X.addcmul_(pull, rows)
        for m, method in enumerate(self.methods):
            method.step(losses[m] if losses is not None else None)

    def walk(self, k: int, samples: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """Steps k, k + 1, ...; returns node errors [records, methods, trials] and mean models [records, methods, trials, d]."""
        errors, means = [], []
        for j in range(len(samples)):
            if (k + j) % EVERY == 0:
                errors.append((self.X - self.problem.minimizer).square_().sum((-2, -1)) / self.problem.n)
                means.append(self.X.mean(-2))
            self.step(samples[j], lr[j])
        return torch.stack(errors), torch.stack(means)


def _method(algorithm: Algorithm, engine: rumor.Stacked, X: Tensor) -> _Method:
    parts = list(X) if algorithm.needs_loss else [X]
    buckets = [Leaves([part]) for part in parts]
    return _Method(algorithm, engine, [(leaves, algorithm.start(leaves, engine)) for leaves in buckets])


class _Replay:
    """`walk` over one block of steps as a CUDA graph: on a GPU the arithmetic is nothing, and starting it step by step is all.

    The block is a whole number of every period, of the schedules, the topologies and the records, so each block repeats the last one.
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
    """[steps]: LR, halved every HALVED_EVERY steps."""
    return LR * 0.5 ** (torch.arange(steps) // HALVED_EVERY).double()


def block_length(algorithms: Sequence[Algorithm]) -> int:
    periods = [EVERY]
    for algorithm in algorithms:
        periods += [algorithm.topology.period, getattr(algorithm.schedule, "H", 1)]  # type: ignore[attr-defined]
    return math.lcm(*periods)


def run(
    problem: Problem, algorithms: Sequence[Algorithm], trials: int, steps: int = STEPS, seed: int = 0, progress: Progress = lambda _: None
) -> list[Result]:
    """All algorithms on the same samples: batch 1, drawn with replacement, `seed` alone decides which."""
    device = problem.rows.device
    draw = torch.Generator(device).manual_seed(seed)
    n, M = problem.rows.shape[:2]
    samples = torch.randint(M, (steps, trials, n), generator=draw, dtype=torch.int16, device=device)
    lr = learning_rates(steps).to(device)
    walk = Walk(problem, algorithms, trials)
    replay, recorded, k = None, [], 0
    graphed = device.type == "cuda" and not walk.needs_loss
    block = block_length(algorithms) if graphed else 10 * EVERY  # the bar moves once a block
    while k < steps:
        # with graphs, what does not fill a block goes first, step by step: it also warms up what a graph can't
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
    return 1 / schedule.H if isinstance(schedule, rumor.Periodic) else 0.0  # a replayed graph counts nothing
