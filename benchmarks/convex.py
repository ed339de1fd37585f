"""The cost of figure 1 of the logistic-regression study (3 sizes x 3 methods x 50 trials x 10,000 steps), compared in one run with

- the bytes that must move: a step of one method reads X and writes X, and all methods share the sampled rows;
- the same steps as a bare vectorised torch loop without the engine (the ring as two rolls, float64);
- the same steps as plain Python loops over trials and nodes, on numpy vectors: a fraction of the steps, scaled up.

    make bench            writes benchmarks/results/convex.json
    PYTHONPATH=src python benchmarks/convex.py --device cuda        # all five figures on a GPU
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rumor

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import logistic_regression
from logistic import figures
from logistic.problem import Problem, synthetic
from logistic.run import LR, STEPS, Walk
from measure import interleaved, machine, save

TRIALS, METHODS = 50, 3


def study(names: list[str], device: str) -> float:
    """Times whole figures, as the script makes them: data, minimizers, all runs and the objective, without pictures."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--figure", *names, "--out", folder, "--device", device, "--no-pictures"]
        began = time.perf_counter()
        logistic_regression.main(arguments)
        return time.perf_counter() - began


def algorithms(n: int) -> list[rumor.GossipPGA]:
    return [rumor.parallel_sgd(n), rumor.gossip_sgd(rumor.ring(n)), rumor.gossip_pga(rumor.ring(n), figures.H_PAPER)]


def samples(problem: Problem, steps: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(problem.rows.shape[1], (steps, TRIALS, problem.n), generator=draw, dtype=torch.int16)


class Bare:
    """Parallel SGD, Gossip SGD and Gossip-PGA on a ring without Rumor, as one would write them for these three only."""

    def __init__(self, problem: Problem):
        self.rows, self.n, self.k = problem.all_rows, problem.n, 0
        self.first_row = torch.arange(problem.n) * problem.rows.shape[1]
        self.X = torch.zeros(METHODS, TRIALS, problem.n, problem.d, dtype=torch.float64)

    def step(self, sample: torch.Tensor, lr: float) -> None:
        X, rows = self.X, self.rows[sample + self.first_row]
        X += lr * torch.sigmoid(-(X * rows).sum(-1, keepdim=True)) * rows
        self.k += 1
        X[0] = X[0].mean(-2, keepdim=True)
        X[1] = self.gossip(X[1])
        X[2] = X[2].mean(-2, keepdim=True) if self.k % figures.H_PAPER == 0 else self.gossip(X[2])

    def gossip(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x.roll(1, -2) + x.roll(-1, -2)) / 3


def per_step(n: int, steps: int = 400) -> dict[str, Any]:
    """Times the engine, the bare loop and a copy of X in turns, on one thread as in the study, in microseconds per step."""
    problem = synthetic(n, iid=False)
    walk, bare, drawn = Walk(problem, algorithms(n), TRIALS), Bare(problem), samples(problem, steps)
    lr = torch.full((steps,), LR, dtype=torch.float64)
    other = torch.empty_like(walk.X)

    def of_the_study() -> None:
        for j in range(steps):
            walk.step(drawn[j], lr[j])

    def of_the_bare_loop() -> None:
        for j in range(steps):
            bare.step(drawn[j], LR)

    torch.set_num_threads(1)
    seconds = interleaved(
        {"rumor": of_the_study, "bare": of_the_bare_loop, "copies": lambda: [other.copy_(walk.X) for _ in range(steps)]}, 5
    )
    difference = float((walk.X - bare.X).abs().max())
    if difference > 1e-9:
        raise AssertionError(f"the bare loop and the study differ by {difference}")
    must_move = 2 * walk.X.nbytes + walk.X[0].nbytes
    at_copy_speed = seconds["copies"] * must_move / (2 * walk.X.nbytes)
    row = {f"{name}_us": 1e6 * value / steps for name, value in seconds.items()}
    return {"n": n, **row, "must_move_MB": must_move / 1e6, "share_of_copy_bandwidth": at_copy_speed / seconds["rumor"]}


def plain_loops(n: int, trials: int = 2, steps: int = 100) -> float:
    """Estimates the seconds of all trials and steps of one size as plain loops over trials and nodes."""
    problem = synthetic(n, iid=False)
    rows, drawn = problem.rows.numpy(), samples(problem, steps).numpy()
    neighbours = [[(n + i - 1) % n, i, (i + 1) % n] for i in range(n)]
    began = time.perf_counter()
    for trial in range(trials):
        for method in range(METHODS):
            x = [np.zeros(problem.d) for _ in range(n)]
            for k in range(steps):
                for i in range(n):
                    row = rows[i, drawn[k, trial, i]]
                    x[i] = x[i] + LR / (1 + np.exp(row @ x[i])) * row
                if method == 0 or (method == 2 and (k + 1) % figures.H_PAPER == 0):
                    x = [sum(x) / n] * n
                else:
                    x = [(x[a] + x[b] + x[c]) / 3 for a, b, c in neighbours]
    return (time.perf_counter() - began) * TRIALS / trials * STEPS / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "convex.json")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    if options.device == "cpu":
        results["figure_1_s"] = [study(["1"], "cpu") for _ in range(3)]
        results["all_five_s"] = study(list(figures.THE_PAPERS), "cpu")
        results["plain_loops_s"] = {str(n): plain_loops(n) for n in figures.SIZES}
        results["per_step"] = [per_step(n) for n in figures.SIZES]
    else:
        results["all_five_s"] = [study(list(figures.THE_PAPERS), options.device) for _ in range(3)]
        results["figure_1_s"] = [study(["1"], options.device) for _ in range(3)]
    print(json.dumps(results, indent=1))
    save(options.out, results)


if __name__ == "__main__":
    main()
